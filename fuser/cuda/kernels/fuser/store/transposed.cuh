// The store policy that transposes the producer's matrix without quantizing.
#pragma once

#include <fuser/tile/tile.cuh>

namespace fuser {

// Stores from registers: the 8 rows of a thread and of its neighbour in the warp fill sectors of 32
// bytes.
template <class T, bool kAligned>
struct TransposedStore {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 3;
    static constexpr int kScratchBytes = 0;
    T* out;  // [columns, rows]

    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            if (j < tile.columns_left) {
                float x[kPatch];
#pragma unroll
                for (int i = 0; i < kPatch; ++i) {
                    x[i] = patch.value(i, j);
                }
                T* p = out + (tile.column + j) * tile.rows + tile.row;
                if constexpr (kAligned) {
                    store<kPatch>(p, x);
                } else {
                    store_tail<kPatch>(p, tile.rows_left, x);
                }
            }
        }
    }
};

}  // namespace fuser
