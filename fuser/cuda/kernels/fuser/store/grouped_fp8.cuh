// FP8 with one scale a group of rows: the store policy.
#pragma once

#include <fuser/producer/grouped.cuh>
#include <fuser/store/fp8_scaling.cuh>

namespace fuser {

template <class E, bool kAligned>
struct GroupedFp8Store {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = Transpose<uint2>::kBytes;
    const GroupTile* tiles;
    const float* amax;  // [groups]; current scaling: the scale follows from it
    const float* scale;  // [groups]; delayed scaling, if amax is null
    float* scale_inv;  // [row tiles]: 1 / scale
    unsigned char* row;  // [rows, columns]; may be null
    unsigned char* col;  // [columns, rows]; may be null
    unsigned* recorded;  // [groups]: bits of an fp32, raised to the amax; may be null
    unsigned eps;  // bits of a float: a smaller amax counts as eps
    int pow2;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        const int group = tiles[tile.row_tile].group;
        if (recorded != nullptr) {
            record_amax(patch.amax(), recorded + group);
        }
        if (row != nullptr || col != nullptr) {
            const float factor = amax == nullptr
                                     ? scale[group]
                                     : scale_from_amax(__float_as_uint(amax[group]), E::kMax, pow2,
                                                       eps, kFloatMax);
            if (tile.column_tile == 0 && threadIdx.x == 0) {
                scale_inv[tile.row_tile] = div_rn(1.0f, factor);
            }
            store_scaled<E, kAligned>(tile, patch, factor, row, col);
        }
    }
};

}  // namespace fuser
