// What the emulator gives to kernels, used as kernels use it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

// ---- which thread am I, in three dimensions ----

extern "C" __global__ void __launch_bounds__(64) fuser_where(int* y) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    y[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = 1000 * block + thread;
}

// ---- the sum of each row: shuffles, then shared memory, then one thread ----

template <typename T, int kThreads>
__global__ void fuser_row_sum(const T* __restrict__ x, float* __restrict__ y, int columns) {
    __shared__ float partial[kThreads / 32];
    float sum = 0.0f;
    for (int column = threadIdx.x; column < columns; column += kThreads) {
        sum += static_cast<float>(x[static_cast<long long>(blockIdx.x) * columns + column]);
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / 32; ++warp) {
            sum += partial[warp];
        }
        y[blockIdx.x] = sum;
    }
}

// ---- a transpose through a tile of dynamic shared memory ----

template <typename T>
__global__ void fuser_transpose(const T* __restrict__ x, T* __restrict__ y, int rows,
                                int columns) {
    extern __shared__ __align__(16) unsigned char bytes[];
    T* tile = reinterpret_cast<T*>(bytes);
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.x + threadIdx.y;
    if (row < rows && column < columns) {
        tile[threadIdx.y * (blockDim.x + 1) + threadIdx.x] = x[row * columns + column];
    }
    __syncthreads();
    const int to_row = blockIdx.x * blockDim.x + threadIdx.y;
    const int to_column = blockIdx.y * blockDim.x + threadIdx.x;
    if (to_row < columns && to_column < rows) {
        y[to_row * rows + to_column] = tile[threadIdx.x * (blockDim.x + 1) + threadIdx.y];
    }
}

// ---- every warp collective on one warp: y is [results, 32] ----

extern "C" __global__ void fuser_collectives(const long long* __restrict__ x, long long* y) {
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x;
    const int value = static_cast<int>(x[lane]);
    int row = 0;
    auto put = [&](long long result) { y[32 * row++ + lane] = result; };
    put(__shfl_sync(all, x[lane], 5));
    put(__shfl_sync(all, value, lane + 1, 8));
    put(__shfl_up_sync(all, x[lane], 3));
    put(__shfl_up_sync(all, value, 1, 16));
    put(__shfl_down_sync(all, x[lane], 3));
    put(__shfl_down_sync(all, static_cast<float>(value), 1, 16));
    put(__shfl_xor_sync(all, x[lane], 17));
    put(static_cast<long long>(__shfl_xor_sync(all, static_cast<double>(value), 3, 4)));
    put(__ballot_sync(all, value > 0));
    put(__any_sync(all, value == static_cast<int>(x[7])));
    put(__all_sync(all, value > 0));
    put(__reduce_add_sync(all, value));
    put(__reduce_min_sync(all, value));
    put(__reduce_max_sync(all, value));
    put(__match_any_sync(all, value & 3));
    // Each half of the warp on its own.
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    put(__shfl_sync(half, x[lane], lane < 16 ? 2 : 20));
    __syncwarp();
}

// ---- atomics over all blocks: y is [sum, max, min, count of blocks], z the last block's note ----

extern "C" __global__ void fuser_atomics(const int* __restrict__ x, int* y, float* sum,
                                         unsigned* largest, int* z, int n) {
    __shared__ bool is_last;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        atomicAdd(&y[0], x[i]);
        atomicMax(&y[1], x[i]);
        atomicMin(&y[2], x[i]);
        atomicAdd(sum, 1.0f);
        atomicMax(largest, __float_as_uint(fabsf(static_cast<float>(x[i]))));
    }
    __threadfence();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&y[3], 1) == static_cast<int>(gridDim.x) - 1;
    }
    __syncthreads();
    if (is_last && threadIdx.x == 0) {
        z[0] = atomicExch(&y[0], -1);
        z[1] = atomicCAS(&y[3], static_cast<int>(gridDim.x), 77);
    }
}

// ---- block-wide predicates: y is [3, threads] ----

extern "C" __global__ void fuser_predicates(const int* __restrict__ x, int* y) {
    const int i = threadIdx.x;
    const int n = blockDim.x;
    y[i] = __syncthreads_count(x[i] > 0);
    y[n + i] = __syncthreads_or(x[i] == 7);
    y[2 * n + i] = __syncthreads_and(x[i] > 0);
}

// ---- CUDA's number types: bf16 and fp16 in vectors of 16 bytes, E4M3, and fp32 subnormals ----

extern "C" __global__ void fuser_numbers(const uint4* __restrict__ x, uint4* y, __half* h,
                                         unsigned char* q, float* tiny) {
    uint4 packed = x[threadIdx.x];
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(pairs[i]);
        h[8 * threadIdx.x + 2 * i] = __float2half(pair.x);
        h[8 * threadIdx.x + 2 * i + 1] = __float2half(pair.y);
        const auto both = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
        q[8 * threadIdx.x + 2 * i] = both & 0xff;
        q[8 * threadIdx.x + 2 * i + 1] = both >> 8;
        pairs[i] = __hmul2(pairs[i], __float2bfloat162_rn(2.0f));
    }
    y[threadIdx.x] = packed;
    if (threadIdx.x == 0) {
        tiny[0] = tiny[1] * 0.5f;
        tiny[2] = __uint_as_float(1u) + tiny[1];
        tiny[3] = fabsf(__uint_as_float(0x80000001u));
        tiny[4] = fmaxf(__uint_as_float(1u), -1.0f);
        tiny[5] = __uint_as_float(1u);
    }
}

// ---- bits and intrinsics: y is a list of results ----

extern "C" __global__ void fuser_intrinsics(const unsigned* __restrict__ x, unsigned* y) {
    const unsigned a = x[0];
    const unsigned b = x[1];
    int i = 0;
    y[i++] = __popc(a);
    y[i++] = __clz(a);
    y[i++] = __ffs(a);
    y[i++] = __brev(a);
    y[i++] = __byte_perm(a, b, 0x7521);
    y[i++] = __umulhi(a, b);
    y[i++] = __funnelshift_l(a, b, 7);
    y[i++] = __float_as_uint(__fmul_rn(__uint_as_float(a), 3.0f));
    y[i++] = __float_as_uint(fmaf(__uint_as_float(a), 3.0f, 1.0f));
    y[i++] = __float2int_rn(2.5f) + min(3, 4) + max(1u, 2u);
    y[i++] = __float_as_uint(rsqrtf(4.0f));
    y[i++] = __float_as_uint(exp2f(3.0f));
    y[i++] = __ldg(&x[1]);
    y[i++] = __float2int_rz(1e20f);
}

// ---- arguments of every kind; `Many` is a struct with pointers in it ----

struct Many {
    const float* inputs[3];
    float* outputs[3];
    int sizes[3];
    float factor;
};

extern "C" __global__ void fuser_many(Many many, const float* nothing, double offset, bool add) {
    for (int k = blockIdx.x; k < 3; k += gridDim.x) {
        for (int i = threadIdx.x; i < many.sizes[k]; i += blockDim.x) {
            many.outputs[k][i] =
                many.factor * many.inputs[k][i] + (add && nothing == nullptr ? offset : 0.0);
        }
    }
}

// ---- y += x in place, x and y one tensor ----

extern "C" __global__ void fuser_double(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        y[i] += x[i];
    }
}

// ---- many steps of 1024 threads ----

extern "C" __global__ void fuser_steps(int* y, int steps) {
    __shared__ int ring[1024];
    int value = threadIdx.x;
    for (int step = 0; step < steps; ++step) {
        ring[threadIdx.x] = value;
        __syncthreads();
        value = ring[(threadIdx.x + 1) % blockDim.x];
        __syncthreads();
    }
    y[threadIdx.x] = value;
}
