// Kernels for Hopper with one mistake each, which the emulator must find.

#include <fuser/core/sm90.cuh>

using namespace fuser;

__device__ unsigned char* rounded_up(unsigned char* memory) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(memory);
    return reinterpret_cast<unsigned char*>((address + 1023) / 1024 * 1024);
}

// ---- a box of 64 rows, and 256 bytes ----

enum class Copy {
    kRight,
    kOddBytes,
    kOddSource,
    kOddPlace,
    kOddBoxPlace,
    kBeyondSource,
    kBeyondShared,
    kOutsideShared,
    kNotInitialised,
    kInitialisedTwice,
    kNotPublished,
    kNoCount,
    kOverwritten,
    kTooManyArrivals,
    kTooFewBytes,
    kTooManyBytes,
    kNobodyArrives,
    kReadBeforeWait,
    kNoWait,
};

constexpr int kBytes = 64 * 128 + 256 + 1024;  // with what rounding up may take

template <Copy kMistake>
__global__ void fuser_copy(const __grid_constant__ TensorMap matrix, const unsigned char* from,
                           unsigned char* y) {
    extern __shared__ unsigned char memory[];
    __shared__ Barrier full;
    unsigned char* box = rounded_up(memory);
    unsigned char* bytes = box + 64 * 128;
    if (threadIdx.x == 0) {
        if (kMistake != Copy::kNotInitialised) {
            init_barrier(&full, kMistake == Copy::kNoCount ? 0 : 1);
        }
        if (kMistake == Copy::kInitialisedTwice) {
            init_barrier(&full, 1);
        }
        if (kMistake != Copy::kNotPublished) {
            publish_barriers();
        }
        if (kMistake == Copy::kOverwritten) {
            full = 0;
        }
        const int announced = 64 * 128 + 256 + (kMistake == Copy::kTooManyBytes ? 16 : 0) -
                              (kMistake == Copy::kTooFewBytes ? 256 : 0);
        if (kMistake != Copy::kNobodyArrives) {
            arrive_expecting(&full, announced);
        }
        if (kMistake == Copy::kTooManyArrivals) {
            arrive(&full);
        }
        load_box(box + (kMistake == Copy::kOddBoxPlace ? 64 : 0), &matrix, 0, 0, &full);
        if (kMistake == Copy::kBeyondShared) {
            bytes = memory + kBytes - 128;
            bytes -= reinterpret_cast<unsigned long long>(bytes) % 16;
        } else if (kMistake == Copy::kOutsideShared) {
            bytes = y;
        }
        load_bytes(bytes + (kMistake == Copy::kOddPlace ? 8 : 0),
                   from + (kMistake == Copy::kOddSource ? 8 : 0) +
                       (kMistake == Copy::kBeyondSource ? 16 : 0),
                   kMistake == Copy::kOddBytes ? 248 : 256, &full);
    }
    __syncthreads();
    if (kMistake == Copy::kReadBeforeWait) {
        y[threadIdx.x] = bytes[threadIdx.x];
    }
    if (kMistake == Copy::kNoWait) {
        return;
    }
    wait(&full, 0);
    y[128 + threadIdx.x] = bytes[threadIdx.x];
}

// ---- bytes through two stages: one warp loads, others add; kMeets: all lanes before one says so ----

template <bool kMeets>
__global__ void fuser_stages(const int* x, int* y, int rounds) {
    __shared__ __align__(16) int stages[2][32];
    __shared__ Barrier full[2];
    __shared__ Barrier empty[2];
    const int lane = threadIdx.x % 32, readers = blockDim.x / 32 - 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            init_barrier(&full[i], 1);
            init_barrier(&empty[i], readers);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int i = 0; i < rounds && lane == 0; ++i) {
            wait(&empty[i % 2], (i / 2 & 1) ^ 1);
            arrive_expecting(&full[i % 2], 128);
            load_bytes(stages[i % 2], x + 32 * i, 128, &full[i % 2]);
        }
        return;
    }
    int total = 0;
    for (int i = 0; i < rounds; ++i) {
        wait(&full[i % 2], i / 2 & 1);
        total += (i + 1) * stages[i % 2][lane];
        if (kMeets) {
            __syncwarp();
        }
        if (lane == 0) {
            arrive(&empty[i % 2]);
        }
    }
    y[threadIdx.x - 32] = total;
}

// ---- a product of 64 x 128 sums, and stages that are loaded again ----

enum class Product {
    kRight,
    kOddOperand,
    kOperandOutside,
    kNoSwizzle,
    kNotBegun,
    kNotBegunAgain,
    kReadBeforeWait,
    kWrittenBeforeWait,
    kWaitForNothing,
    kNotClosed,
    kNoWait,
    kThreeWarps,
    kTwoOperands,
    kTwoPlaces,
    kReleasedEarly,
};

template <Product kMistake>
__global__ void fuser_multiply(const __grid_constant__ TensorMap matrix, float* y) {
    using P = Product;
    constexpr Fp8 k = Fp8::kE4m3;
    extern __shared__ unsigned char memory[];
    __shared__ Barrier full;
    __shared__ Barrier empty;
    unsigned char* stage = rounded_up(memory);
    if (threadIdx.x == 0) {
        init_barrier(&full, 1);
        init_barrier(&empty, 1);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x == 128) {
        for (int i = 0; i < 2; ++i) {
            wait(&empty, i ^ 1);
            arrive_expecting(&full, 128 * 128);
            load_box(stage, &matrix, 128 * i, 0, &full);
        }
    }
    if (threadIdx.x >= 128) {
        return;
    }
    float sums[64];
    for (int i = 0; i < 2; ++i) {
        wait(&full, i);
        unsigned long long a = operand(stage + (kMistake == P::kOddOperand ? 128 : 0));
        if (kMistake == P::kOperandOutside) {
            a = operand(reinterpret_cast<unsigned char*>(y));
        } else if (kMistake == P::kNoSwizzle) {
            a &= ~(3ull << 62);
        } else if (kMistake == P::kTwoOperands && threadIdx.x == 77) {
            a += 2;
        }
        const unsigned long long b = operand(stage);
        if (kMistake != P::kNotBegun && (kMistake != P::kNotBegunAgain || i == 0)) {
            begin_products();
        }
        if (kMistake == P::kThreeWarps && threadIdx.x >= 96) {
            return;
        }
        if (kMistake == P::kTwoPlaces && threadIdx.x >= 96) {
            add_product<k, k>(sums, a, b, i > 0);
        } else {
            add_product<k, k>(sums, a, b, i > 0);
        }
        if (kMistake != P::kNotClosed) {
            close_products();
        }
        if (kMistake == P::kReadBeforeWait) {
            y[threadIdx.x + 128] = sums[threadIdx.x % 64];
        } else if (kMistake == P::kWrittenBeforeWait) {
            sums[threadIdx.x % 64] = 1.0f;
        }
        if (kMistake == P::kReleasedEarly && threadIdx.x == 0) {
            arrive(&empty);
        }
        if (kMistake == P::kWaitForNothing) {
            wait_for_products<1>();
        } else if (kMistake != P::kNoWait) {
            wait_for_products<0>();
        }
        if (kMistake != P::kReleasedEarly && threadIdx.x == 0) {
            arrive(&empty);
        }
    }
    float total = 0.0f;
    for (float sum : sums) {
        total += sum;
    }
    y[threadIdx.x] = total;
}

// ---- registers: 384 threads have 168 each, and two warpgroups want the third's ----

enum class Registers { kRight, kNotEights, kTooFew, kHalf, kTooMany, kGiveMore, kTakeLess };

template <Registers kMistake>
__global__ void fuser_registers(int* y) {
    using R = Registers;
    if (kMistake == R::kNotEights) {
        give_registers_back<60>();
    } else if (kMistake == R::kTooFew) {
        give_registers_back<16>();
    } else if (kMistake == R::kGiveMore) {
        give_registers_back<176>();
    } else if (kMistake == R::kTakeLess) {
        take_registers<160>();
    } else if (threadIdx.x < 256) {
        take_registers<kMistake == R::kTooMany ? 248 : 240>();
    } else if (kMistake != R::kHalf || threadIdx.x < 320) {
        give_registers_back<24>();
    }
    y[threadIdx.x] = 1;
}
