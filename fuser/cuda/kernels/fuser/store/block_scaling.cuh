// FP8 in blocks of 128 or 128 x 128 with fp32 scales: store policies.
#pragma once

#include <fuser/store/fp8_scaling.cuh>
#include <fuser/tile/amax.cuh>

namespace fuser {

struct BlockScaling {
    unsigned eps;  // bits of a float: a smaller amax counts as eps
    int pow2;

    template <class E, class T>
    __device__ __forceinline__ float scale(unsigned amax) const {
        // A scale that overflows fp32 becomes the largest finite T.
        return scale_from_amax(amax, E::kMax, pow2, eps, kLargestFinite<T>);
    }
    __device__ __forceinline__ float inverse(float scale) const { return inverse_of(scale, pow2); }
};

// Rows of scales are padded to 16 bytes, with zeros.
__device__ __forceinline__ long long padded(long long n) { return (n + 3) / 4 * 4; }

// ---- a scale for 1 x 128 in a row, and one for 128 x 1 in a column; either copy may be null ----

template <class E, bool kAligned>
struct Block1dStore {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = Transpose<uint2>::kBytes;
    unsigned char* row;  // [rows, columns]
    float* row_scale_inv;  // [column tiles, padded rows]
    unsigned char* col;  // [columns, rows]
    float* col_scale_inv;  // [row tiles, padded columns]
    BlockScaling scaling;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        __shared__ __align__(16) unsigned amaxes[kTileWarps][kTile / Patch<T>::kPerWord];
        if (col != nullptr) {
            store_column_amaxes(patch, amaxes);
        }
        if (row != nullptr) {
            quantize_rows(tile, patch);
        }
        if (col != nullptr) {
            __syncthreads();
            quantize_columns(tile, patch, amaxes);
        }
    }

    template <class T>
    __device__ __forceinline__ void quantize_rows(const Tile& tile, const Patch<T>& patch) const {
        unsigned amax[kPatch];
        patch.row_amaxes(amax);
        reduce_scatter_rows<kRowThreads>(amax);
        const float scale[1] = {scaling.template scale<E, T>(amax[0])};
        // Two threads own the same row.
        const long long kept = tile.row + owned_row<kRowThreads>(0);
        if (Tile::thread_column() < kRowThreads / 2 && kept < padded(tile.rows)) {
            row_scale_inv[tile.column_tile * padded(tile.rows) + kept] =
                kept < tile.rows ? scaling.inverse(scale[0]) : 0.0f;
        }
        store_quantized_rows<E, kAligned>(
            tile, patch, row, [&](int i) { return value_of_row<kRowThreads>(scale, i); });
    }

    template <class T>
    __device__ __forceinline__ void quantize_columns(
        const Tile& tile, const Patch<T>& patch,
        const unsigned (&amaxes)[kTileWarps][kTile / Patch<T>::kPerWord]) const {
        // ---- one scale a column, by the first 128 threads ----
        __shared__ __align__(16) float scales[kTile];
        const int of_tile = threadIdx.x;
        if (of_tile < kTile) {
            const float scale = scaling.template scale<E, T>(column_amax<T>(amaxes, of_tile));
            scales[of_tile] = scale;
            const int column = tile.first_column() + of_tile;
            if (column < padded(tile.columns)) {
                col_scale_inv[tile.row_tile * padded(tile.columns) + column] =
                    column < tile.columns ? scaling.inverse(scale) : 0.0f;
            }
        }
        __syncthreads();

        // ---- bytes ----
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

// ---- a scale for 128 x 128; either copy may be null ----

template <class E, bool kAligned>
struct Block2dStore {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = Transpose<uint2>::kBytes;
    unsigned char* row;  // [rows, columns]
    float* row_scale_inv;  // [row tiles, padded column tiles]
    unsigned char* col;  // [columns, rows]
    float* col_scale_inv;  // [column tiles, padded row tiles]
    BlockScaling scaling;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        __shared__ unsigned amaxes[kTileWarps];
        const float scale = scaling.template scale<E, T>(block_max(patch.amax(), amaxes));
        if (threadIdx.x == 0) {
            const float inverse = scaling.inverse(scale);
            if (row != nullptr) {
                store_scale(row_scale_inv, tile.row_tile, tile.column_tile, tile.column_tiles,
                            inverse);
            }
            if (col != nullptr) {
                store_scale(col_scale_inv, tile.column_tile, tile.row_tile, tile.row_tiles,
                            inverse);
            }
        }
        store_scaled<E, kAligned>(tile, patch, scale, row, col);
    }

    // The last block of a row also writes the padding after it.
    static __device__ __forceinline__ void store_scale(float* scales, int row, int column,
                                                       int columns, float scale) {
        float* p = scales + row * padded(columns);
        p[column] = scale;
        if (column == columns - 1) {
            for (int i = columns; i < padded(columns); ++i) {
                p[i] = 0.0f;
            }
        }
    }
};

}  // namespace fuser
