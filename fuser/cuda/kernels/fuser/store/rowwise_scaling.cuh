// FP8 with one fp32 scale for each row of a copy: the amaxes of rows and columns, and the store
// policy that quantizes with them. A row needs its amax before its first element is cast, and spans
// many tiles, so the two are two launches.
#pragma once

#include <fuser/tile/amax.cuh>
#include <fuser/tile/bytes.cuh>
#include <fuser/tile/transpose.cuh>

namespace fuser {

// ---- amaxes: raised over all tiles, so their order does not matter; either may be null ----

// Most tiles find that others have raised the amax already; then they only read.
__device__ __forceinline__ void raise_amax(unsigned* amax, unsigned bits) {
    if (bits > *static_cast<volatile unsigned*>(amax)) {
        atomicMax(amax, bits);
    }
}

struct RowwiseAmaxStore {
    static constexpr bool kIsAligned = true;  // it stores no elements
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = 0;
    unsigned* row_amax;  // [rows], bits of an fp32
    unsigned* col_amax;  // [columns]

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        if (row_amax != nullptr) {
            unsigned amax[kPatch];
            patch.row_amaxes(amax);
            reduce_scatter_rows<kRowThreads>(amax);
            // Two threads own the same row.
            const long long row = tile.row + owned_row<kRowThreads>(0);
            if (Tile::thread_column() < kRowThreads / 2 && row < tile.rows) {
                raise_amax(row_amax + row, amax[0]);
            }
        }
        if (col_amax != nullptr) {
            __shared__ __align__(16) unsigned amaxes[kTileWarps][kTile / Patch<T>::kPerWord];
            store_column_amaxes(patch, amaxes);
            __syncthreads();
            const int of_tile = threadIdx.x;
            const int column = tile.first_column() + of_tile;
            if (of_tile < kTile && column < tile.columns) {
                raise_amax(col_amax + column, column_amax<T>(amaxes, of_tile));
            }
        }
    }
};

// ---- bytes and scales of the rows and of the columns; the scales of either copy may be null ----

// The scales say which copies are made: without elements there are no bytes, but there are scales.

template <class E, bool kAligned>
struct RowwiseStore {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = Transpose<uint2>::kBytes;
    const unsigned* row_amax;  // [rows], bits of an fp32
    unsigned char* row;  // [rows, columns]
    float* row_scale_inv;  // [rows]
    const unsigned* col_amax;  // [columns]
    unsigned char* col;  // [columns, rows]
    float* col_scale_inv;  // [columns]
    unsigned eps;  // bits of a float: a smaller amax counts as eps
    int pow2;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        __shared__ __align__(16) float scales[kTile];
        if (col_scale_inv != nullptr) {
            load_column_scales(tile, scales);
        }
        if (row_scale_inv != nullptr) {
            quantize_rows(tile, patch);
        }
        if (col_scale_inv != nullptr) {
            __syncthreads();
            quantize_columns(tile, patch, scales);
        }
    }

    __device__ __forceinline__ float scale_of(unsigned amax) const {
        return scale_from_amax(amax, E::kMax, pow2, eps, kFloatMax);
    }

    // The first 128 threads compute a scale each; the first row of tiles writes their inverses.
    __device__ __forceinline__ void load_column_scales(const Tile& tile,
                                                       float (&scales)[kTile]) const {
        const int of_tile = threadIdx.x;
        const int column = tile.first_column() + of_tile;
        if (of_tile < kTile && column < tile.columns) {
            scales[of_tile] = scale_of(col_amax[column]);
            if (tile.row_tile == 0) {
                col_scale_inv[column] = inverse_of(scales[of_tile], pow2);
            }
        } else if (of_tile < kTile) {
            scales[of_tile] = 1.0f;
        }
    }

    // Each thread computes the scale of the row that it owns; the first column of tiles writes it.
    template <class T>
    __device__ __forceinline__ void quantize_rows(const Tile& tile, const Patch<T>& patch) const {
        const long long owned = tile.row + owned_row<kRowThreads>(0);
        const float scale[1] = {owned < tile.rows ? scale_of(row_amax[owned]) : 1.0f};
        if (tile.column_tile == 0 && Tile::thread_column() < kRowThreads / 2 && owned < tile.rows) {
            row_scale_inv[owned] = inverse_of(scale[0], pow2);
        }
        store_quantized_rows<E, kAligned>(
            tile, patch, row, [&](int i) { return value_of_row<kRowThreads>(scale, i); });
    }

    template <class T>
    __device__ __forceinline__ void quantize_columns(const Tile& tile, const Patch<T>& patch,
                                                     const float (&scales)[kTile]) const {
        const Transpose<uint2> transpose(tile.scratch);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            const float factor = scales[Tile::thread_column() * kPatch + j];
            float x[kPatch];
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                x[i] = mul_rn(patch.value(i, j), factor);
            }
            transpose.set_column(j, encoded8<E>(x));
        }
        __syncthreads();
        transpose.template store<kAligned>(tile, col, tile.rows);
    }
};

}  // namespace fuser
