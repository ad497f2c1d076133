// Producers: their traits, and the patch that a producer makes row by row.
#pragma once

#include <fuser/tile/tile.cuh>

namespace fuser {

// Traits of a producer; tile/tiled.cuh says when to specialize them.
template <class Producer>
constexpr int kFewerBlocks = 0;
template <class Producer>
constexpr int kFewerBlocksInPair = 0;
template <class Producer>
constexpr bool kHasHalves = false;
template <class Producer>
constexpr int kPrefetchBytes = 0;
template <class Producer>
constexpr bool kHasUnusedTiles = false;

// Sets the rows of a patch after the last row of the matrix to zero.
template <class T>
__device__ __forceinline__ void clear_rows_outside(Patch<T>& patch, const Tile& tile) {
    if (tile.rows_left < kPatch) {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
#pragma unroll
            for (int w = 0; w < patch.kWords; ++w) {
                patch.words[i][w] = i < tile.rows_left ? patch.words[i][w] : 0u;
            }
        }
    }
}

// Patches outside the matrix are zero, and so are their rows and columns after its edges.
template <class Producer>
__device__ __forceinline__ Patch<typename Producer::Element> make_patch(const Producer& producer,
                                                                        const Tile& tile) {
    Patch<typename Producer::Element> patch{};
    if (tile.columns_left > 0) {
        // Rows after the last read the last row again: without branches, all loads are in flight at
        // once.
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            float x[kPatch];
            const long long row = min(tile.row + i, tile.rows - 1);
            producer(row, tile.column, tile.columns_left, x);
            patch.set_row(i, x);
        }
        clear_rows_outside(patch, tile);
    }
    return patch;
}

}  // namespace fuser
