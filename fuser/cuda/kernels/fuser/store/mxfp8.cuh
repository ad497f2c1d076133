// MXFP8, where 32 elements share a power of two: store policies.
#pragma once

#include <fuser/tile/amax.cuh>
#include <fuser/tile/bytes.cuh>

namespace fuser {

// Blocks of a tile in either direction. A tile of scales is 128 x 4 bytes, one word for each of 128
// rows of the GEMM operand (so for columns of the columnwise copy).
constexpr int kMxBlocks = kTile / kMxBlock;
// Neighbouring threads that share a block of a row.
constexpr int kMxThreads = kMxBlock / kPatch;

// The position of a row's word in a tile of scales, in the order that tensor cores read.
__device__ __forceinline__ int swizzled_word(int row) { return row % 32 * 4 + row / 32; }

// Scales are padded to whole tiles. A tile at an edge has zeros after it, and the scale of zeros is
// 0. So every tile writes all its scales without a check, and the padding becomes zero.
struct Mxfp8Copies {
    unsigned char* row;  // [rows, columns]
    unsigned char* row_scale;  // [128 row tiles, 4 column tiles]
    unsigned char* col;  // [rows, columns]
    unsigned char* col_scale;  // [4 row tiles, 128 column tiles]
    int swizzled;

    // Stores the word of a row of the tile: the scales of its four blocks.
    __device__ __forceinline__ void store_row_scales(const Tile& tile, int row,
                                                     unsigned word) const {
        unsigned* scales = reinterpret_cast<unsigned*>(row_scale);
        const long long tiles = static_cast<long long>(tile.row_tile) * tile.column_tiles;
        if (swizzled) {
            scales[(tiles + tile.column_tile) * kTile + swizzled_word(row)] = word;
        } else {
            store_partial_sector(scales + tiles * kTile +
                                     static_cast<long long>(row) * tile.column_tiles +
                                     tile.column_tile,
                                 word);
        }
    }

    // Stores the scales of sizeof(Bytes) columns of the tile, in its row `block` of blocks.
    // Swizzled scales go to `shared`; store_swizzled writes them to memory after a barrier.
    template <class Bytes>
    __device__ __forceinline__ void store_column_scales(const Tile& tile, int block, int column,
                                                        Bytes bytes, unsigned char* shared) const {
        if (swizzled) {
            unsigned char each[sizeof(Bytes)];
            memcpy(each, &bytes, sizeof(Bytes));
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(Bytes)); ++i) {
                shared[swizzled_word(column + i) * kMxBlocks + block] = each[i];
            }
        } else {
            const long long row = static_cast<long long>(tile.row_tile) * kMxBlocks + block;
            *reinterpret_cast<Bytes*>(col_scale + row * tile.column_tiles * kTile +
                                      tile.first_column() + column) = bytes;
        }
    }
    __device__ __forceinline__ void store_swizzled(const Tile& tile,
                                                   const unsigned char* shared) const {
        if (swizzled && threadIdx.x < kTile * kMxBlocks / 16) {
            const long long tiles = static_cast<long long>(tile.column_tile) * tile.row_tiles;
            uint4* p = reinterpret_cast<uint4*>(col_scale) + (tiles + tile.row_tile) * 32;
            p[threadIdx.x] = reinterpret_cast<const uint4*>(shared)[threadIdx.x];
        }
    }
};

// Each of the 16 threads of a row gets the word of its four blocks, from the byte of its own block.
__device__ __forceinline__ unsigned word_of_blocks(unsigned e8m0) {
    unsigned word = e8m0 << Tile::thread_column() / kMxThreads * 8;
    word |= __shfl_xor_sync(kAllLanes, word, kMxThreads);
    return word | __shfl_xor_sync(kAllLanes, word, 2 * kMxThreads);
}

// ---- a scale for 1 x 32 in a row, and one for 32 x 1 in a column; either copy may be null ----

template <class E, bool kAligned>
struct Mxfp8Store {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = 0;
    Mxfp8Copies copies;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        __shared__ __align__(16) unsigned amaxes[kTileWarps][kTile / Patch<T>::kPerWord];
        if (copies.col != nullptr) {
            store_column_amaxes(patch, amaxes);
        }
        if (copies.row != nullptr) {
            quantize_rows(tile, patch);
        }
        if (copies.col != nullptr) {
            __syncthreads();
            quantize_columns(tile, patch, amaxes);
        }
    }

    template <class T>
    __device__ __forceinline__ void quantize_rows(const Tile& tile, const Patch<T>& patch) const {
        unsigned amax[kPatch];
        patch.row_amaxes(amax);
        reduce_scatter_rows<kMxThreads>(amax);
        float factor[kOwnedRows<kMxThreads>];
        unsigned bytes = 0;
#pragma unroll
        for (int k = 0; k < kOwnedRows<kMxThreads>; ++k) {
            const unsigned e8m0 = e8m0_from_amax(amax[k], 1.0f / E::kMax);
            factor[k] = inverse_of_e8m0(e8m0);
            bytes |= e8m0 << 8 * k;
        }

        // ---- words of scales: one thread of each pair writes for two rows ----
        const int block = Tile::thread_column() / kMxThreads;
        const unsigned pairs = block & 1 ? 0x15u : 0x40u;
        bytes = __byte_perm(bytes, __shfl_xor_sync(kAllLanes, bytes, kMxThreads), pairs);
        const unsigned quads = block & 2 ? 0x1054u : 0x5410u;
        bytes = __byte_perm(bytes, __shfl_xor_sync(kAllLanes, bytes, 2 * kMxThreads), quads);
        if (block < kOwnedRows<kMxThreads>) {
            const int row = Tile::thread_row() * kPatch + owned_row<kMxThreads>(0) + block;
            copies.store_row_scales(tile, row, bytes);
        }

        // ---- bytes ----
        store_quantized_rows<E, kAligned>(
            tile, patch, copies.row, [&](int i) { return value_of_row<kMxThreads>(factor, i); });
    }

    template <class T>
    __device__ __forceinline__ void quantize_columns(
        const Tile& tile, const Patch<T>& patch,
        const unsigned (&amaxes)[kTileWarps][kTile / Patch<T>::kPerWord]) const {
        // ---- one scale a block: a thread computes those of two columns of 32 rows ----
        __shared__ __align__(16) float factors[kMxBlocks][kTile];
        __shared__ __align__(16) unsigned char scales[kTile * kMxBlocks];
        constexpr int kEach = kTile * kMxBlocks / kTileThreads;
        static_assert(kEach == 2);
        const int block = threadIdx.x / (kTile / kEach);
        const int column = threadIdx.x % (kTile / kEach) * kEach;
        unsigned e8m0[kEach];
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            // A block is the rows of two warps.
            const int word = (column + k) / Patch<T>::kPerWord;
            const unsigned most = larger<T>(amaxes[2 * block][word], amaxes[2 * block + 1][word]);
            e8m0[k] = e8m0_from_amax(widened<T>(most, k), 1.0f / E::kMax);
            factors[block][column + k] = inverse_of_e8m0(e8m0[k]);
        }
        const auto bytes = static_cast<unsigned short>(e8m0[0] | e8m0[1] << 8);
        copies.store_column_scales(tile, block, column, bytes, scales);
        __syncthreads();
        copies.store_swizzled(tile, scales);

        // ---- bytes ----
        float factor[kPatch];
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            factor[j] =
                factors[Tile::thread_row() / kMxThreads][Tile::thread_column() * kPatch + j];
        }
        // Written out: a shared helper for scales of columns takes up to 24 instructions more.
        RowStores<kAligned, uint2> rows(tile, copies.col);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            float x[kPatch];
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                x[j] = mul_rn(patch.value(i, j), factor[j]);
            }
            rows.store(i, encoded8<E>(x));
        }
    }
};

// ---- a scale for 32 x 32: both copies hold the same bytes; either may be null ----

template <class E, bool kAligned>
struct Mxfp8SquareStore {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = 0;
    Mxfp8Copies copies;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        // ---- the amax: over 4 x 2 threads of this warp, and the same 4 columns of the next one
        // ----
        __shared__ unsigned amaxes[kTileWarps][kMxBlocks];
        const int warp = threadIdx.x / 32, block = Tile::thread_column() / kMxThreads;
        unsigned amax = patch.amax();
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 2));
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, kRowThreads));
        if (threadIdx.x % kMxThreads == 0 && threadIdx.x % 32 < kRowThreads) {
            amaxes[warp][block] = amax;
        }
        __syncthreads();
        amax = max(amax, amaxes[warp ^ 1][block]);

        // ---- the scale, the same for all rows or columns of a block ----
        const unsigned e8m0 = e8m0_from_amax(amax, 1.0f / E::kMax);
        if (copies.row != nullptr) {
            const unsigned word = word_of_blocks(e8m0);
            if (Tile::thread_column() < kPatch) {
                const int row = Tile::thread_row() * kPatch + Tile::thread_column();
                copies.store_row_scales(tile, row, word);
            }
        }
        if (copies.col != nullptr) {
            __shared__ __align__(16) unsigned char scales[kTile * kMxBlocks];
            if (Tile::thread_row() % kMxThreads == 0) {
                const unsigned four = e8m0 * 0x01010101u;
                copies.store_column_scales(tile, warp / 2, Tile::thread_column() * kPatch,
                                           make_uint2(four, four), scales);
            }
            __syncthreads();
            copies.store_swizzled(tile, scales);
        }

        // ---- bytes ----
        uint2 bytes[kPatch];
        quantize_patch<E>(patch, inverse_of_e8m0(e8m0), bytes);
        store_rows<kAligned>(tile, bytes, copies.row);
        store_rows<kAligned>(tile, bytes, copies.col);
    }
};

}  // namespace fuser
