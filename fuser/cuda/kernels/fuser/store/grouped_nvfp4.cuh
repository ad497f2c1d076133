// NVFP4 with the amaxes of groups of rows: store policies, and the producer that decodes.
#pragma once

#include <fuser/producer/grouped.cuh>
#include <fuser/producer/nvfp4.cuh>
#include <fuser/store/nvfp4.cuh>

namespace fuser {

template <bool kHadamard, bool kStochastic, bool kAligned>
struct GroupedNvfp4Store {
    using Alone = Nvfp4Store<kHadamard, kStochastic, kAligned>;
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = Alone::kBlocks;
    static constexpr int kScratchBytes = Alone::kScratchBytes;
    Alone of_groups;  // amaxes: [groups, 1 + col_at]; row_amax and col_amax: [row tiles]
    const GroupTile* tiles;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        Alone own = of_groups;
        own.amaxes += tiles[tile.row_tile].group * (own.col_at + 1);
        own.row_amax = own.col_amax = nullptr;
        if (tile.column_tile == 0 && threadIdx.x == 0) {
            if (of_groups.row_amax != nullptr) {
                of_groups.row_amax[tile.row_tile] = own.amaxes[0];
            }
            if (of_groups.col_amax != nullptr) {
                of_groups.col_amax[tile.row_tile] = own.amaxes[own.col_at];
            }
        }
        own(tile, patch);
    }
};

// The amaxes of each group and of its Hadamard transform along columns.
struct GroupedHadamardAmaxStore {
    static constexpr bool kIsAligned = true;
    static constexpr int kBlocks = HadamardAmaxStore::kBlocks;
    static constexpr int kScratchBytes = 0;
    HadamardAmaxStore of_groups;  // amax: [groups, 2]
    const GroupTile* tiles;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        HadamardAmaxStore own = of_groups;
        own.amax += 2 * tiles[tile.row_tile].group;
        own(tile, patch);
    }
};

// With kColumnwise, a tile of groups is 128 columns of the data, and otherwise 128 rows.
template <class T, bool kColumnwise, bool kAligned>
struct GroupedNvfp4Producer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    Nvfp4Producer<T, kAligned> of_groups;  // amax: [tiles]

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&x)[kPatch]) const {
        Nvfp4Producer<T, kAligned> own = of_groups;
        own.amax += (kColumnwise ? column : row) / kTile;
        own(row, column, count, x);
    }
};

}  // namespace fuser
