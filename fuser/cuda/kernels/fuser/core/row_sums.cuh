// Sums over the threads that share a row. The order depends on the number of threads alone.
#pragma once

#include <fuser/core/hardware.cuh>

namespace fuser {

constexpr int kMaxWarps = 32;

// The sum over `width` neighbouring lanes, a power of two up to 32; every one of them gets it. All
// lanes of the warp must call this. All lanes add the same pairs, so they get the same bits.
__device__ __forceinline__ float warp_sum(float x, int width = 32) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        if (offset < width) {
            x += __shfl_xor_sync(kAllLanes, x, offset);
        }
    }
    return x;
}

// Computes kSums sums at once over the threads of a row. A block is blockDim.y rows of blockDim.x
// threads; blockDim.x is a power of two up to 32, or a multiple of 32.
template <int kSums>
struct RowSums {
    // Two areas are used in turn: a thread after the barrier of one sum may write for the next sum
    // while another thread still reads.
    static constexpr int kScratch = 2 * kSums * kMaxWarps;

    float* scratch;  // kScratch floats of shared memory
    int turn = 0;

    __device__ __forceinline__ float operator()(float x) {
        float sums[1] = {x};
        (*this)(sums);
        return sums[0];
    }

    // Replaces each x by its sum, in every thread of the row. All threads of the block must call
    // this.
    __device__ __forceinline__ void operator()(float (&x)[kSums]) {
        const int width = static_cast<int>(blockDim.x);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            x[i] = warp_sum(x[i], width);
        }
        if (width <= 32) {
            return;
        }
        const int warps = width / 32, lane = static_cast<int>(threadIdx.x) % 32;
        const int slots = 1 << (32 - __clz(warps - 1));  // warps, rounded up to a power of two
        float* row = scratch + turn * kSums * kMaxWarps + static_cast<int>(threadIdx.y) * warps;
        turn ^= 1;
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                row[i * kMaxWarps + static_cast<int>(threadIdx.x) / 32] = x[i];
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            const int slot = lane & (slots - 1);
            x[i] = warp_sum(slot < warps ? row[i * kMaxWarps + slot] : 0.0f, slots);
        }
    }
};

}  // namespace fuser
