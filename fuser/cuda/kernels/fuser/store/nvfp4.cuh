// NVFP4, where 16 elements of 4 bits share an E4M3 scale: store policies.
#pragma once

#include <fuser/core/packed.cuh>
#include <fuser/core/random_words.cuh>
#include <fuser/tile/amax.cuh>
#include <fuser/tile/transpose.cuh>

namespace fuser {

// A block is 16 columns of two threads, or the 16 rows of a warp.
constexpr int kNvThreads = kNvBlock / kPatch;
constexpr int kNvBlocks = kTile / kNvBlock;

// ---- 8 codes of 4 bits in a word, the first in the lowest bits ----

// Rounds the magnitude up if the remainder, in units of the grid's step, plus 24 random bits
// reaches 1. Magnitudes above 6 (bits 0x40c00000) become 6; so does a NaN, with its sign. The NaN
// of a product has no sign.
__device__ __forceinline__ unsigned e2m1_at_random(const float (&x)[kPatch],
                                                   const unsigned (&words)[kPatch]) {
    unsigned codes = 0;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const unsigned magnitude = min(magnitudes<float>(__float_as_uint(x[i])), 0x40c00000u);
        // The step is 2^(octave - 1), with octave 0 below 2; octave is in the bits of the exponent.
        const unsigned octave = max(magnitude & kInfinity, 127u << 23) - (127u << 23);
        // Fixed point with 24 fractional bits.
        const float factor = __uint_as_float((152u << 23) - octave);
        const float scaled = __fmul_rn(__uint_as_float(magnitude), factor);
        const unsigned fixed = static_cast<unsigned>(__float2int_rz(scaled));
        const unsigned code = ((fixed + (words[i] >> 8)) >> 24) + (octave >> 22);
        codes |= (code | (__float_as_uint(x[i]) >> 28 & 8u)) << 4 * i;
    }
    return codes;
}

// x * factor, to nearest, ties to even; above 6 gives 6, and NaN gives +6. With `is_in_units`,
// `factor` includes kE2m1Unit, and no product is too large for it.
__device__ __forceinline__ unsigned e2m1_to_nearest(const float (&x)[kPatch], float factor,
                                                    bool is_in_units) {
    float magnitude[kPatch], sign[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        magnitude[i] = mul_magnitude_rn(x[i], factor);
        sign[i] = x[i];
    }
    if (!is_in_units) {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            sign[i] = magnitude[i] == magnitude[i] ? sign[i] : 0.0f;
            magnitude[i] = fminf(magnitude[i], 6.0f) * kE2m1Unit;
        }
    }
    return to_e2m1x8_from_units(magnitude, sign);
}

struct Rounding {
    unsigned long long seed;
    unsigned long long offset;

    // Multiplies the factors of blocks with these amaxes by the unit of codes, if all blocks of the
    // warp allow it; returns whether it did. A block's amax times its factor is at most 6.4, except
    // if its scale is the largest or the smallest E4M3, or if the amax of the tensor is not its
    // own.
    template <bool kStochastic, int kCount>
    static __device__ __forceinline__ bool bring_into_units(const unsigned (&amax)[kCount],
                                                            float (&factor)[kCount]) {
        if constexpr (kStochastic || kConvertsToE2m1) {
            return false;
        } else {
            bool is_suitable = true;
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                is_suitable &= factor[k] > 0x1p-100f;  // the product with the unit is not subnormal
                is_suitable &= mul_rn(__uint_as_float(amax[k]), factor[k]) < 7.0f;
            }
            is_suitable = __all_sync(kAllLanes, is_suitable);
            const float unit = is_suitable ? kE2m1Unit : 1.0f;
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                factor[k] = mul_rn(factor[k], unit);
            }
            return is_suitable;
        }
    }

    // The codes of x times the factor of its block, for 8 elements of a copy from element `first`
    // on, in storage order.
    template <bool kStochastic>
    __device__ __forceinline__ unsigned codes(const float (&x)[kPatch], float factor,
                                              bool is_in_units, unsigned long long first,
                                              unsigned stream) const {
        if constexpr (kStochastic || kConvertsToE2m1) {
            float products[kPatch];
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                products[i] = mul_rn(x[i], factor);
            }
            if constexpr (kStochastic) {
                unsigned words[kPatch];
                random_words8(seed, offset + first, stream, words);
                return e2m1_at_random(products, words);
            } else {
                return to_e2m1x8(products);
            }
        } else {
            return e2m1_to_nearest(x, factor, is_in_units);
        }
    }
};

// ---- columns, and their 16-point Hadamard transform ----

// Elements i and i + kDistance become their sum and their difference.
template <int kDistance>
__device__ __forceinline__ void butterfly(float (&x)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        if ((i & kDistance) == 0) {
            const float left = x[i], right = x[i + kDistance];
            x[i] = add_rn(left, right);
            x[i + kDistance] = add_rn(left, __uint_as_float(__float_as_uint(right) ^ 0x80000000u));
        }
    }
}

// Transforms the 8 rows of column j, without rounding. A warp has all 16 rows of a transform, and
// all its threads must call this. Bit i of `mask` changes the sign of row i of every 16 first.
template <class T>
__device__ __forceinline__ void transform_column(const Patch<T>& patch, int j, int mask,
                                                 float (&x)[kPatch]) {
    const bool is_lower = Tile::thread_row() % 2 == 1;
    const unsigned signs = static_cast<unsigned>(is_lower ? mask >> kPatch : mask);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const unsigned sign = signs << (31 - i) & 0x80000000u;
        x[i] = __uint_as_float(__float_as_uint(patch.value(i, j)) ^ sign);
    }
    butterfly<1>(x);
    butterfly<2>(x);
    butterfly<4>(x);
    // Distance 8: the other thread of the warp with this column.
    const unsigned flip = is_lower ? 0x80000000u : 0u;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const float other = __shfl_xor_sync(kAllLanes, x[i], kRowThreads);
        const float own = __uint_as_float(__float_as_uint(x[i]) ^ flip);
        x[i] = mul_rn(add_rn(other, own), 0.25f);
    }
}

__device__ __forceinline__ unsigned largest_of(const unsigned (&values)[kPatch]) {
    unsigned most = values[0];
#pragma unroll
    for (int i = 1; i < kPatch; ++i) {
        most = max(most, values[i]);
    }
    return most;
}

__device__ __forceinline__ unsigned amax_of(const float (&x)[kPatch]) {
    unsigned magnitude[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        magnitude[i] = magnitudes<float>(__float_as_uint(x[i]));
    }
    return largest_of(magnitude);
}

// The amax of transformed values after rounding: rounding keeps the order.
__device__ __forceinline__ unsigned rounded_amax(unsigned amax) {
    return __float_as_uint(rounded_to<bf16>(__uint_as_float(amax)));
}

// ---- the store policy; either copy may be null ----

template <bool kHadamard, bool kStochastic, bool kAligned>
struct Nvfp4Store {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = kHadamard || kStochastic ? 2 : 3;
    static constexpr int kScratchBytes = Transpose<unsigned>::kBytes;
    const float* amaxes;  // [0] for the tensor, [col_at] for the columnwise copy
    unsigned char* row;  // [rows, columns / 2]
    unsigned char* row_scale;  // [128 row tiles, 4 scale_words(columns)]
    float* row_amax;  // written if not null, like col_amax
    unsigned char* col;  // [columns, rows / 2]
    unsigned char* col_scale;  // [128 column tiles, 4 scale_words(rows)]
    float* col_amax;
    Rounding rounding;
    int col_at;
    int two_dimensional;  // blocks are 16 x 16
    int signs;  // of the transform

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        if (tile.row_tile == 0 && tile.column_tile == 0 && threadIdx.x == 0) {
            if (row_amax != nullptr) {
                *row_amax = amaxes[0];
            }
            if (col_amax != nullptr) {
                *col_amax = amaxes[col_at];
            }
        }
        if (row != nullptr) {
            quantize_rows(tile, patch);
        }
        if (col != nullptr) {
            quantize_columns(tile, patch);
        }
    }

    // The maximum over a block of 16 x 16, from the maximum of each patch.
    static __device__ __forceinline__ unsigned of_square(unsigned amax) {
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 1));
        return max(amax, __shfl_xor_sync(kAllLanes, amax, kRowThreads));
    }

    template <class T>
    __device__ __forceinline__ void quantize_rows(const Tile& tile, const Patch<T>& patch) const {
        // ---- one scale a block: each of two threads owns four rows ----
        const Nvfp4Scale of_tensor(amaxes[0]);
        unsigned amax[kPatch];
        patch.row_amaxes(amax);
        if (two_dimensional) {
            const unsigned square = of_square(largest_of(amax));
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                amax[i] = square;
            }
        }
        reduce_scatter_rows<kNvThreads>(amax);
        unsigned amax_kept[kOwnedRows<kNvThreads>];
        float factor[kOwnedRows<kNvThreads>];
#pragma unroll
        for (int k = 0; k < kOwnedRows<kNvThreads>; ++k) {
            amax_kept[k] = amax[k];
        }
        const unsigned bytes = of_tensor.blocks(amax_kept, factor);
        store_row_scales(tile, bytes);

        // ---- codes ----
        const bool is_in_units = rounding.template bring_into_units<kStochastic>(amax_kept, factor);
        RowStores<kAligned, unsigned> rows(tile, row);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            const float of_block = value_of_row<kNvThreads>(factor, i);
            float x[kPatch];
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                x[j] = patch.value(i, j);
            }
            const long long first = (tile.row + i) * tile.columns + tile.column;
            rows.store(i, rounding.template codes<kStochastic>(x, of_block, is_in_units, first, 0));
        }
    }

    // Four threads that are kNvThreads apart each hold the bytes of one block for four rows; each
    // of them makes the word of one row.
    __device__ __forceinline__ void store_row_scales(const Tile& tile, unsigned bytes) const {
        // In a tensor with a NaN, the scale of zeros is NaN too; but the padding is zero.
        bytes = tile.columns_left > 0 ? bytes : 0u;
        const int block = Tile::thread_column() / kNvThreads;
        const unsigned pairs = block & 1 ? 0x3715u : 0x6240u;
        bytes = __byte_perm(bytes, __shfl_xor_sync(kAllLanes, bytes, kNvThreads), pairs);
        const unsigned quads = block & 2 ? 0x3276u : 0x5410u;
        bytes = __byte_perm(bytes, __shfl_xor_sync(kAllLanes, bytes, 2 * kNvThreads), quads);
        const int words = scale_words(tile.columns);
        const int word = tile.column_tile * (kNvBlocks / 4) + block / 4;
        const long long row = tile.row + owned_row<kNvThreads>(0) + block % 4;
        if (word < words) {
            store_partial_sector(reinterpret_cast<unsigned*>(row_scale) + row * words + word,
                                 row < tile.rows ? bytes : 0u);
        }
    }

    template <class T>
    __device__ __forceinline__ void quantize_columns(const Tile& tile,
                                                     const Patch<T>& patch) const {
        // ---- the columns, transformed with kHadamard, and their amaxes ----
        Packed<bf16, kPatch> transformed[kPatch];
        unsigned amax[kPatch];
        if constexpr (kHadamard) {
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                float x[kPatch];
                transform_column(patch, j, signs, x);
                transformed[j] = packed<bf16>(x);
                amax[j] = rounded_amax(amax_of(x));
            }
        } else {
            unsigned most[Patch<T>::kWords];
            patch.column_amaxes(most);
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                amax[j] = widened<T>(most[j / Patch<T>::kPerWord], j);
            }
        }

        // ---- one scale a block: each of two threads, with 16 rows, owns four columns ----
        __shared__ __align__(16) unsigned char scales[kTile][kNvBlocks];
        constexpr int kKept = kPatch / kNvThreads;
        const Nvfp4Scale of_tensor(amaxes[col_at]);
        const int first = Tile::thread_row() % kNvThreads * kKept;
        const unsigned square = two_dimensional ? of_square(largest_of(amax)) : 0u;
        unsigned amax_kept[kKept];
        float factor[kKept];
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const unsigned kept = first == 0 ? amax[k] : amax[k + kKept];
            const unsigned sent = first == 0 ? amax[k + kKept] : amax[k];
            const unsigned most = max(kept, __shfl_xor_sync(kAllLanes, sent, kRowThreads));
            amax_kept[k] = two_dimensional ? square : most;
        }
        const unsigned found = of_tensor.blocks(amax_kept, factor);
        const unsigned bytes = tile.rows_left > 0 ? found : 0u;
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            scales[Tile::thread_column() * kPatch + first + k][threadIdx.x / 32] =
                static_cast<unsigned char>(bytes >> 8 * k);
        }

        // ---- codes ----
        const bool is_in_units = rounding.template bring_into_units<kStochastic>(amax_kept, factor);
        const Transpose<unsigned> transpose(tile.scratch);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            const int owner = Tile::thread_column() + j / kKept * kRowThreads;
            const float of_block = __shfl_sync(kAllLanes, factor[j % kKept], owner);
            float x[kPatch];
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                x[i] = kHadamard ? transformed[j][i] : patch.value(i, j);
            }
            const long long element = (tile.column + j) * tile.rows + tile.row;
            transpose.set_column(
                j, rounding.template codes<kStochastic>(x, of_block, is_in_units, element, 1));
        }
        __syncthreads();
        transpose.template store<kAligned>(tile, col, tile.rows / 2);

        // ---- scales: a thread stores a word of four blocks ----
        constexpr int kWords = kNvBlocks / 4;
        const int column = threadIdx.x / kWords;
        const int word = tile.row_tile * kWords + static_cast<int>(threadIdx.x) % kWords;
        const int words = scale_words(tile.rows);
        if (word < words) {
            const unsigned four = reinterpret_cast<const unsigned*>(scales)[threadIdx.x];
            const long long at = static_cast<long long>(tile.first_column()) + column;
            store_partial_sector(reinterpret_cast<unsigned*>(col_scale) + at * words + word, four);
        }
    }
};

// ---- the amaxes of a tensor and of its Hadamard transform along columns ----

struct HadamardAmaxStore {
    static constexpr bool kIsAligned = true;
    static constexpr int kBlocks = 3;
    static constexpr int kScratchBytes = 0;
    unsigned* amax;  // [2], bits of fp32, raised to the amaxes
    int signs;

    template <class T>
    __device__ __forceinline__ void operator()(const Tile&, const Patch<T>& patch) const {
        unsigned transformed = 0;
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            float x[kPatch];
            transform_column(patch, j, signs, x);
            transformed = max(transformed, amax_of(x));
        }
        record_amax(patch.amax(), amax);
        record_amax(rounded_amax(transformed), amax + 1);
    }
};

}  // namespace fuser
