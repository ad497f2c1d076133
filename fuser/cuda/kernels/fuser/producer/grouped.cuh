// Groups of rows, each padded with zeros to whole tiles: the producer that reads the rows of
// another producer.
#pragma once

#include <fuser/tile/producer.cuh>

namespace fuser {

// The rows of a tile: all belong to one group, and those from `count` on are padding.
struct alignas(16) GroupTile {
    int group;  // -1 for a tile after the last group: nothing is computed or written there
    int row;  // the first row in the matrix without padding
    int count;
    int unused;
};

template <class Inner>
struct GroupedProducer {
    using Element = typename Inner::Element;
    static constexpr bool kIsAligned = Inner::kIsAligned;
    Inner inner;
    const GroupTile* tiles;
    int is_padded;  // whether the rows of `inner` are padded too

    __device__ __forceinline__ bool is_unused(const Tile& tile) const {
        return tiles[tile.row_tile].group < 0;
    }

    // The place from which `inner` takes the rows of a thread's patch.
    __device__ __forceinline__ Tile source(const Tile& tile) const {
        const GroupTile of = tiles[tile.row_tile];
        const int first = Tile::thread_row() * kPatch;
        Tile found = tile;
        found.row = is_padded ? tile.row : of.row + first;
        found.rows = found.row - first + of.count;
        const int left = min(of.count - first, kPatch);
        found.rows_left = tile.columns_left > 0 && left > 0 ? left : 0;
        found.columns_left = found.rows_left > 0 ? tile.columns_left : 0;
        return found;
    }

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&x)[kPatch]) const {
        const GroupTile of = tiles[row / kTile];
        const int at = static_cast<int>(row % kTile);
        if (at < of.count) {
            inner((is_padded ? row - at : of.row) + at, column, count, x);
        } else {
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                x[i] = 0.0f;
            }
        }
    }
};

template <class Inner>
constexpr int kFewerBlocks<GroupedProducer<Inner>> = kFewerBlocks<Inner>;
template <class Inner>
constexpr bool kHasHalves<GroupedProducer<Inner>> = kHasHalves<Inner>;
template <class Inner>
constexpr int kPrefetchBytes<GroupedProducer<Inner>> = kPrefetchBytes<Inner>;
template <class Inner>
constexpr bool kHasUnusedTiles<GroupedProducer<Inner>> = true;

template <class Inner>
__device__ __forceinline__ Patch<typename Inner::Element> make_patch(
    const GroupedProducer<Inner>& producer, const Tile& tile) {
    return make_patch(producer.inner, producer.source(tile));
}

}  // namespace fuser
