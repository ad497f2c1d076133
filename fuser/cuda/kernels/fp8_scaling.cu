// FP8 with one scale a tensor: amax, casts, dequantization, transpose, and the delayed-scaling
// update.
#include <fuser/producer/adamw.cuh>
#include <fuser/producer/load.cuh>
#include <fuser/producer/normalization.cuh>
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/fp8_scaling.cuh>
#include <fuser/tile/tiled.cuh>

namespace {

using namespace fuser;

// ---- streams: a block has 4 x 256 consecutive vectors of 8 elements, a thread 4 of them ----

constexpr int kThreads = 256;
constexpr int kVectors = 4;
constexpr int kCount = 8;

// The index of the vector's first element.
__device__ __forceinline__ long long start_of(int vector) {
    return ((static_cast<long long>(blockIdx.x) * kVectors + vector) * kThreads + threadIdx.x) *
           kCount;
}

// Whether all vectors of the block lie below n, so that its loads can be in flight at once.
__device__ __forceinline__ bool is_whole(long long n) {
    return (static_cast<long long>(blockIdx.x) + 1) * kVectors * kThreads * kCount <= n;
}

// The number of elements of the vector below n.
__device__ __forceinline__ int count_of(int vector, long long n) {
    return static_cast<int>(max(0ll, min(n - start_of(vector), static_cast<long long>(kCount))));
}

template <bool kAligned, class T>
__device__ __forceinline__ void load_vectors(const T* x, long long n,
                                             float (&values)[kVectors][kCount]) {
    if (kAligned && is_whole(n)) {
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
            load<kCount>(x + start_of(vector), values[vector]);
        }
    } else {
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
            load_tail<kCount>(x + start_of(vector), count_of(vector, n), values[vector]);
        }
    }
}

__device__ __forceinline__ unsigned amax_of(const float (&values)[kVectors][kCount]) {
    unsigned most = 0;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            most = max(most, magnitudes<float>(__float_as_uint(values[vector][i])));
        }
    }
    return most;
}

}  // namespace

// ---- *amax = max(*amax, max |x|), as bits ----

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    fuser_amax(const T* __restrict__ x, unsigned* amax, long long n) {
    float values[kVectors][kCount];
    load_vectors<kAligned>(x, n, values);
    record_amax(amax_of(values), amax);
}

// ---- row[i] = fp8(x[i] * scale), and optionally the amax of x ----

template <class T, class E, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    fuser_fp8_cast(const T* __restrict__ x, TensorScale scaling, unsigned char* __restrict__ row,
                   unsigned* recorded, long long n) {
    float values[kVectors][kCount];
    load_vectors<kAligned>(x, n, values);
    const float scale = scaling.load<E>(blockIdx.x == 0);
    if (recorded != nullptr) {
        record_amax(amax_of(values), recorded);
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[vector][i] = mul_rn(values[vector][i], scale);
        }
        const uint2 bytes = encoded8<E>(values[vector]);
        const int count = count_of(vector, n);
        if (kAligned && count == kCount) {
            store_bytes<true>(row + start_of(vector), kCount, bytes);
        } else {
            store_bytes<false>(row + start_of(vector), count, bytes);
        }
    }
}

// ---- out[i] = data[i] * scale_inv ----

template <class T, class E, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    fuser_fp8_dequantize(const unsigned char* __restrict__ data,
                         const float* __restrict__ scale_inv, T* __restrict__ out, long long n) {
    uint2 bytes[kVectors];
    if (kAligned && is_whole(n)) {
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
            bytes[vector] = load_bytes<uint2, true>(data + start_of(vector), kCount);
        }
    } else {
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
            bytes[vector] = load_bytes<uint2, false>(data + start_of(vector), count_of(vector, n));
        }
    }
    const float factor = *scale_inv;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
        float x[kCount];
        decode8<E>(bytes[vector], x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            x[i] = mul_rn(x[i], factor);
        }
        const int count = count_of(vector, n);
        if (kAligned && count == kCount) {
            store<kCount>(out + start_of(vector), x);
        } else {
            store_tail<kCount>(out + start_of(vector), count, x);
        }
    }
}

// ---- out = the transposed bytes of data [rows, columns] ----

template <bool kAligned>
__global__ void __launch_bounds__(kTileThreads)
    fuser_fp8_transpose(const unsigned char* __restrict__ data, unsigned char* __restrict__ out,
                        long long rows, int columns) {
    const Tile tile(rows, columns);
    uint2 bytes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const unsigned char* p = data + (tile.row + i) * columns + tile.column;
        const int count = i < tile.rows_left ? tile.columns_left : 0;
        bytes[i] = load_bytes<uint2, kAligned>(p, count);
    }
    __shared__ __align__(16) unsigned char shared[Transpose<uint2>::kBytes];
    const Transpose<uint2> transpose(shared);
    set_columns(transpose, bytes);
    __syncthreads();
    transpose.store<kAligned>(tile, out, rows);
}

// ---- delayed scaling: shift the histories and set the scales; one block a tensor ----

struct DelayedState {
    float* amax_history;  // [length, count]; row 0 is the newest
    float* scale;  // [count]
    const float* max_fp8;  // [count]
    const float* amaxes;  // [count], in place of row 0; kNotOver: the tensor stays as it is
    int length, count;
};

constexpr unsigned kNotOver = 0xbf800000u;  // -1

template <int kStates>
struct DelayedStates {
    DelayedState states[kStates];
};

template <int kStates>
__global__ void __launch_bounds__(kThreads)
    fuser_update_delayed(const __grid_constant__ DelayedStates<kStates> all,
                         float two_to_minus_margin, int most_recent) {
    const DelayedState& state = all.states[blockIdx.y];
    const int tensor = blockIdx.x, length = state.length;
    if (tensor >= state.count) {
        return;
    }
    unsigned* history = reinterpret_cast<unsigned*>(state.amax_history) + tensor;
    const unsigned newest =
        state.amaxes == nullptr ? history[0] : __float_as_uint(state.amaxes[tensor]);
    if (newest == kNotOver) {
        return;
    }

    // ---- the largest amax, as bits: a NaN is above all ----
    __shared__ unsigned of_warps[kThreads / 32];
    unsigned largest = newest;
    if (!most_recent) {
        for (int i = 1 + threadIdx.x; i < length; i += kThreads) {
            largest = max(largest, history[static_cast<long long>(i) * state.count]);
        }
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = largest;
    }
    __syncthreads();

    // ---- the scale ----
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / 32; ++warp) {
            largest = max(largest, of_warps[warp]);
        }
        if (largest > 0u && largest < kInfinity) {
            const float numerator = mul_rn(state.max_fp8[tensor], two_to_minus_margin);
            const float scale = div_rn(numerator, __uint_as_float(largest));
            state.scale[tensor] = scale > kFloatMax ? kFloatMax : scale;
        }
    }

    // ---- row i becomes row i - 1, the newest becomes the last, and row 0 becomes 0 ----
    if (newest == 0u) {
        return;
    }
    for (int first = 0; first < length; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        unsigned next = newest;
        if (i + 1 < length) {
            next = history[static_cast<long long>(i + 1) * state.count];
        }
        __syncthreads();
        if (i < length) {
            history[static_cast<long long>(i) * state.count] = i == 0 ? 0u : next;
        }
    }
}
