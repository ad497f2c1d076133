// Maxima over the blocks of a tile that share a scale, and sums over its rows.
#pragma once

#include <fuser/tile/tile.cuh>

namespace fuser {

// ---- rows: 2, 4 or 16 neighbouring threads share a block ----

struct Larger {
    __device__ __forceinline__ unsigned operator()(unsigned a, unsigned b) const {
        return max(a, b);
    }
};
struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};

// A reduce-scatter: threads exchange halves of their rows, so that each thread ends with the maxima
// (or sums) of 8 / kThreads rows, or of one, and computes each scale once. Of the 8 values,
// values[k] becomes the maximum of row owned_row(k).
template <int kThreads, class Combine = Larger, class Value>
__device__ __forceinline__ void reduce_scatter_rows(Value (&values)[kPatch]) {
    const Combine combine;
    int count = kPatch;
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) {
        if (count == 1) {
            values[0] = combine(values[0], __shfl_xor_sync(kAllLanes, values[0], step));
            continue;
        }
        count /= 2;
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const Value kept = upper ? values[k + count] : values[k];
            const Value sent = upper ? values[k] : values[k + count];
            values[k] = combine(kept, __shfl_xor_sync(kAllLanes, sent, step));
        }
    }
}

template <int kThreads>
constexpr int kOwnedRows = kThreads < kPatch ? kPatch / kThreads : 1;

template <int kThreads>
__device__ __forceinline__ int owned_row(int k) {
    const int lane = threadIdx.x;
    const int first = (lane & 1) * 4 + (lane >> 1 & 1) * 2 + (lane >> 2 & 1);
    return (first & ~(kOwnedRows<kThreads> - 1)) + k;
}

// The value of row i, from the thread that owns the row.
template <int kThreads>
__device__ __forceinline__ float value_of_row(const float (&values)[kOwnedRows<kThreads>], int i) {
    const int owner = ((i >> 2 & 1) | (i >> 1 & 1) << 1 | (i & 1) << 2) & (kThreads - 1);
    return __shfl_sync(kAllLanes, values[i % kOwnedRows<kThreads>], owner, kThreads);
}

// ---- columns: the maxima over 128 rows ----

// Writes the maxima of a warp, over its 16 rows, to a row of shared memory, packed as the patch is.
template <class T>
__device__ __forceinline__ void store_column_amaxes(
    const Patch<T>& patch, unsigned (&amaxes)[kTileWarps][kTile / Patch<T>::kPerWord]) {
    constexpr int kWords = Patch<T>::kWords;
    unsigned most[kWords];
    patch.column_amaxes(most);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        most[w] = larger<T>(most[w], __shfl_xor_sync(kAllLanes, most[w], kRowThreads));
    }
    if (threadIdx.x % 32 < kRowThreads) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            amaxes[threadIdx.x / 32][Tile::thread_column() * kWords + w] = most[w];
        }
    }
}

// The bits of the amax of a column of the tile. A barrier must come first.
template <class T>
__device__ __forceinline__ unsigned column_amax(
    const unsigned (&amaxes)[kTileWarps][kTile / Patch<T>::kPerWord], int column) {
    constexpr int kPerWord = Patch<T>::kPerWord;
    unsigned most = amaxes[0][column / kPerWord];
#pragma unroll
    for (int warp = 1; warp < kTileWarps; ++warp) {
        most = larger<T>(most, amaxes[warp][column / kPerWord]);
    }
    return widened<T>(most, column);
}

// ---- the maximum over a tile ----

// The maximum over the values of all threads, in every thread. `shared` has a word for each warp; a
// barrier must come before it is used again.
__device__ __forceinline__ unsigned block_max(unsigned value, unsigned* shared) {
    const unsigned most_of_warp = __reduce_max_sync(kAllLanes, value);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = most_of_warp;
    }
    __syncthreads();
    unsigned most = shared[0];
#pragma unroll
    for (int warp = 1; warp < kTileWarps; ++warp) {
        most = max(most, shared[warp]);
    }
    return most;
}

}  // namespace fuser
