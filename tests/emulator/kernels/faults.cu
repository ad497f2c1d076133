// Kernels with one mistake each, which the emulator must find.

// ---- memory ----

extern "C" __global__ void fuser_read_at(const float* x, float* y, int index) { y[0] = x[index]; }

extern "C" __global__ void fuser_write_at(float* y, int index) { y[index] = 1.0f; }

extern "C" __global__ void fuser_vector_at(const float* x, float4* y) {
    *y = *reinterpret_cast<const float4*>(x);
}

template <typename T>
__global__ void fuser_static_shared_at(T* y, int index) {
    __shared__ T tile[10];
    tile[threadIdx.x] = 1;
    T* beyond = tile + index;
    *beyond = 2;
    y[0] = tile[0];
}

extern "C" __global__ void fuser_dynamic_shared_at(float* y, int index) {
    extern __shared__ float tile[];
    tile[index] = 1.0f;
    y[0] = tile[index];
}

// ---- outputs and order ----

// Every second element.
extern "C" __global__ void fuser_write_some(float* y, int n) {
    const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) {
        y[i] = 1.0f;
    }
}

extern "C" __global__ void fuser_add_to(float* y) { y[threadIdx.x] += 1.0f; }

extern "C" __global__ void fuser_forget_barrier(int* y) {
    __shared__ int tile[64];
    tile[threadIdx.x] = threadIdx.x;
    y[threadIdx.x] = tile[63 - threadIdx.x];
}

extern "C" __global__ void fuser_read_garbage(int* y) {
    __shared__ int tile[64];
    y[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void fuser_sum_in_any_order(const float* x, float* y) {
    atomicAdd(y, x[blockIdx.x * blockDim.x + threadIdx.x]);
}

// ---- waiting ----

extern "C" __global__ void fuser_leave_before_barrier(int* y) {
    if (threadIdx.x >= 40) {
        return;
    }
    __syncthreads();
    y[threadIdx.x] = 1;
}

extern "C" __global__ void fuser_two_barriers(int* y) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = 1;
}

extern "C" __global__ void fuser_divergent_shuffle(int* y) {
    int value = threadIdx.x;
    if (threadIdx.x < 16) {
        value = __shfl_xor_sync(0xffffffffu, value, 1);
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = value;
}

extern "C" __global__ void fuser_shuffle_beyond_the_block(int* y) {
    y[threadIdx.x] = __shfl_down_sync(0xffffffffu, static_cast<int>(threadIdx.x), 8);
}

extern "C" __global__ void fuser_shuffle_outside_the_mask(int* y) {
    y[threadIdx.x] = __shfl_sync(0x0000ffffu, static_cast<int>(threadIdx.x), 0);
}

extern "C" __global__ void fuser_spin(volatile int* y) {
    while (*y == 0) {
    }
}

extern "C" __global__ void fuser_trap(const int* x) {
    if (x[0] != 0) {
        __trap();
    }
}

// ---- copies that a thread does not wait for: two groups, of which `kLeft` may be under way ----

#include <fuser/core/hardware.cuh>

template <int kLeft>
__global__ void fuser_read_copies(const uint4* x, uint4* y) {
    __shared__ uint4 staged[2][32];
    for (int i = 0; i < 2; ++i) {
        fuser::copy_async<16>(&staged[i][threadIdx.x], x + i * 32 + threadIdx.x);
        fuser::close_copies();
    }
    fuser::wait_for_copies<kLeft>();
    y[threadIdx.x] = staged[0][threadIdx.x];
    y[32 + threadIdx.x] = staged[1][threadIdx.x];
}

// Asked for before what stands there has been read.
extern "C" __global__ void fuser_copy_over(const uint4* x, uint4* y) {
    __shared__ uint4 staged[32];
    staged[threadIdx.x] = make_uint4(1u, 2u, 3u, 4u);
    fuser::copy_async<16>(&staged[threadIdx.x], x + threadIdx.x);
    fuser::close_copies();
    y[threadIdx.x] = staged[threadIdx.x];
    fuser::wait_for_copies<0>();
}

// ---- warps that are ahead of others by less than a barrier ----

// Sums over the block, again and again: what a warp writes for the next sum, after its shuffles, may
// be there before another warp has read this one. Two buffers take turns.
template <int kBuffers>
__global__ void fuser_sum_again(int* y, int rounds) {
    __shared__ int scratch[2][32];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int x = threadIdx.x;
    for (int i = 0; i < rounds; ++i) {
        int* row = scratch[i % kBuffers];
        for (int offset = 16; offset > 0; offset /= 2) {
            x += __shfl_xor_sync(0xffffffffu, x, offset);
        }
        if (threadIdx.x % 32 == 0) {
            row[warp] = x % 1000;
        }
        __syncthreads();
        for (int w = 0; w < warps; ++w) {
            x += row[w] * (w + 1);
        }
        x %= 1000;
    }
    y[threadIdx.x] = x;
}

// The first warp writes what all read before it writes again, which takes two stages.
template <int kStages>
__global__ void fuser_read_stages(const int* x, int* y, int rounds) {
    __shared__ int stages[2][32];
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int i = 0; i < rounds; ++i) {
        int* stage = stages[i % kStages];
        int next = x[32 * i + lane];
        for (int offset = 16; offset > 0; offset /= 2) {
            next = max(next, __shfl_xor_sync(0xffffffffu, next, offset));
        }
        if (threadIdx.x < 32) {
            stage[lane] = next;
        }
        __syncthreads();
        total += (i + 1) * stage[lane];
    }
    y[threadIdx.x] = total;
}
