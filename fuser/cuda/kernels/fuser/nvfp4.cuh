// NVFP4: 16 elements of 4 bits share an E4M3 scale: store policies, and the producer that decodes.
#pragma once

#include <fuser/random_words.cuh>
#include <fuser/tiled.cuh>

namespace fuser {

// A block is two threads of a row, or the 16 rows of a warp.
constexpr int kNvBlock = 16;
constexpr int kNvThreads = kNvBlock / kPatch;
constexpr int kNvBlocks = kTile / kNvBlock;
// Scales are padded to tiles of 128 x 4, a word for each of 128 rows; of n elements in a row:
__device__ __forceinline__ int scale_words(long long n) { return static_cast<int>((n + 63) / 64); }

// ---- 8 codes of 4 bits in a word, the first in the lowest ----

// Up in magnitude where the remainder, in units of the grid's step, and 24 random bits reach 1. Beyond
// 6, the bits of which are 0x40c00000, comes 6; of a NaN too, with its sign, and the NaN of a product
// has none.
__device__ __forceinline__ unsigned e2m1_at_random(const float (&x)[kPatch],
                                                   const unsigned (&words)[kPatch]) {
    unsigned codes = 0;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const unsigned magnitude = min(magnitudes<float>(__float_as_uint(x[i])), 0x40c00000u);
        // The step is 2^(octave - 1), with octave 0 below 2; octaves stand where exponents do.
        const unsigned octave = max(magnitude & kInfinity, 127u << 23) - (127u << 23);
        // In fixed point, 24 bits behind the point.
        const float factor = __uint_as_float((152u << 23) - octave);
        const float scaled = __fmul_rn(__uint_as_float(magnitude), factor);
        const unsigned fixed = static_cast<unsigned>(__float2int_rz(scaled));
        const unsigned code = ((fixed + (words[i] >> 8)) >> 24) + (octave >> 22);
        codes |= (code | (__float_as_uint(x[i]) >> 28 & 8u)) << 4 * i;
    }
    return codes;
}

struct Rounding {
    unsigned long long seed;
    unsigned long long offset;

    // Element `first` of a copy and the 7 behind it, in the order in which they are stored.
    template <bool kStochastic>
    __device__ __forceinline__ unsigned codes(const float (&x)[kPatch], unsigned long long first,
                                              unsigned stream) const {
        if constexpr (kStochastic) {
            unsigned words[kPatch];
            random_words8(seed, offset + first, stream, words);
            return e2m1_at_random(x, words);
        } else {
            return to_e2m1x8(x);
        }
    }
};

// ---- columns, and their 16-point Hadamard transform ----

// Bit i: element i of every 16 changes its sign first. As the reference has them.
constexpr unsigned kHadamardSigns = 0x7888u;

// Element i and the one `distance` behind it become their sum and their difference.
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

// The 8 rows of column j, transformed. A warp has all 16 rows of a transform, and calls it together.
template <class T>
__device__ __forceinline__ void transform_column(const Patch<T>& patch, int j,
                                                 float (&x)[kPatch]) {
    const bool is_lower = Tile::thread_row() % 2 == 1;
    const unsigned signs = is_lower ? kHadamardSigns >> kPatch : kHadamardSigns;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        x[i] = __uint_as_float(__float_as_uint(patch.value(i, j)) ^ (signs >> i & 1u) << 31);
    }
    butterfly<1>(x);
    butterfly<2>(x);
    butterfly<4>(x);
    // Distance 8 is the other thread of the warp in this column.
    const unsigned flip = is_lower ? 0x80000000u : 0u;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        const float other = __shfl_xor_sync(kWarp, x[i], kRowThreads);
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

// ---- the store policy; either copy may be null ----

template <bool kHadamard, bool kStochastic, bool kAligned>
struct Nvfp4Store {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = kHadamard || kStochastic ? 2 : 3;
    static constexpr int kScratchBytes = Turned<unsigned>::kBytes;
    const float* row_amax;
    const float* col_amax;
    unsigned char* row;        // [rows, columns / 2]
    unsigned char* row_scale;  // [128 row tiles, 4 scale_words(columns)]
    unsigned char* col;        // [columns, rows / 2]
    unsigned char* col_scale;  // [128 column tiles, 4 scale_words(rows)]
    Rounding rounding;
    int two_dimensional;  // blocks are 16 x 16

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        if (row != nullptr) {
            quantize_rows(tile, patch);
        }
        if (col != nullptr) {
            quantize_columns(tile, patch);
        }
    }

    // The maximum over a block of 16 x 16, from that of each patch.
    static __device__ __forceinline__ unsigned of_square(unsigned amax) {
        amax = max(amax, __shfl_xor_sync(kWarp, amax, 1));
        return max(amax, __shfl_xor_sync(kWarp, amax, kRowThreads));
    }

    template <class T>
    __device__ __forceinline__ void quantize_rows(const Tile& tile, const Patch<T>& patch) const {
        // ---- a scale a block: two threads keep four rows each ----
        const Nvfp4Scale of_tensor(*row_amax);
        unsigned amax[kPatch];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            amax[i] = patch.row_amax(i);
        }
        if (two_dimensional) {
            const unsigned square = of_square(largest_of(amax));
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                amax[i] = square;
            }
        }
        share_rows<kNvThreads>(amax);
        const int block = Tile::thread_column() / kNvThreads;
        const int words = scale_words(tile.columns);
        const int word = tile.column_tile * (kNvBlocks / 4) + block / 4;
        float factor[kKeptRows<kNvThreads>];
#pragma unroll
        for (int k = 0; k < kKeptRows<kNvThreads>; ++k) {
            const int kept = kept_row<kNvThreads>(k);
            const unsigned byte = of_tensor.block(amax[k]);
            factor[k] = of_tensor.multiplier(byte);
            // In a tensor with a NaN the scale of zeros is a NaN too, and the padding is zero.
            const bool is_inside = kept < tile.rows_left;
            unsigned four = is_inside ? byte << block % 4 * 8 : 0u;
            four |= __shfl_xor_sync(kWarp, four, kNvThreads);
            four |= __shfl_xor_sync(kWarp, four, 2 * kNvThreads);
            if (block % 4 == 0 && word < words) {
                reinterpret_cast<unsigned*>(row_scale)[(tile.row + kept) * words + word] = four;
            }
        }

        // ---- codes ----
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            const float of_block = of_row<kNvThreads>(factor, i);
            float x[kPatch];
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                x[j] = mul_rn(patch.value(i, j), of_block);
            }
            const long long first = (tile.row + i) * tile.columns + tile.column;
            store_row<kAligned>(tile, i, rounding.template codes<kStochastic>(x, first, 0), row);
        }
    }

    template <class T>
    __device__ __forceinline__ void quantize_columns(const Tile& tile,
                                                     const Patch<T>& patch) const {
        // ---- the columns, as fp32 where they are transformed, and their amaxes ----
        float transformed[kPatch][kPatch];
        unsigned amax[kPatch];
        if constexpr (kHadamard) {
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                transform_column(patch, j, transformed[j]);
                amax[j] = amax_of(transformed[j]);
            }
        } else {
            unsigned most[Patch<T>::kWords];
            patch.column_amaxes(most);
#pragma unroll
            for (int j = 0; j < kPatch; ++j) {
                amax[j] = widened<T>(most[j / Patch<T>::kPerWord], j);
            }
        }

        // ---- a scale a block: two threads, 16 rows, keep four columns each ----
        __shared__ __align__(16) unsigned char scales[kTile][kNvBlocks];
        constexpr int kKept = kPatch / kNvThreads;
        const Nvfp4Scale of_tensor(*col_amax);
        const int first = Tile::thread_row() % kNvThreads * kKept;
        const bool is_inside = tile.rows_left > 0;
        const unsigned square = two_dimensional ? of_square(largest_of(amax)) : 0u;
        float factor[kKept];
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
            const unsigned kept = first == 0 ? amax[k] : amax[k + kKept];
            const unsigned sent = first == 0 ? amax[k + kKept] : amax[k];
            const unsigned most = max(kept, __shfl_xor_sync(kWarp, sent, kRowThreads));
            const unsigned byte = of_tensor.block(two_dimensional ? square : most);
            factor[k] = of_tensor.multiplier(byte);
            scales[Tile::thread_column() * kPatch + first + k][threadIdx.x / 32] =
                static_cast<unsigned char>(is_inside ? byte : 0u);
        }

        // ---- codes ----
        const Turned<unsigned> turned(tile.scratch);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            const int owner = Tile::thread_column() + j / kKept * kRowThreads;
            const float of_block = __shfl_sync(kWarp, factor[j % kKept], owner);
            float x[kPatch];
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                x[i] = mul_rn(kHadamard ? transformed[j][i] : patch.value(i, j), of_block);
            }
            const long long element = (tile.column + j) * tile.rows + tile.row;
            turned.put(j, rounding.template codes<kStochastic>(x, element, 1));
        }
        __syncthreads();
        turned.template store<kAligned>(tile, col, tile.rows / 2);

        // ---- scales: a word of four blocks a thread ----
        constexpr int kWords = kNvBlocks / 4;
        const int column = threadIdx.x / kWords;
        const int word = tile.row_tile * kWords + static_cast<int>(threadIdx.x) % kWords;
        const int words = scale_words(tile.rows);
        if (word < words) {
            const unsigned four = reinterpret_cast<const unsigned*>(scales)[threadIdx.x];
            const long long at = static_cast<long long>(tile.first_column()) + column;
            reinterpret_cast<unsigned*>(col_scale)[at * words + word] = four;
        }
    }
};

// ---- the amaxes of a tensor and of its Hadamard transform along columns ----

struct HadamardAmaxStore {
    static constexpr bool kIsAligned = true;
    static constexpr int kBlocks = 3;
    static constexpr int kScratchBytes = 0;
    unsigned* amax;  // [2], bits of fp32, raised

    template <class T>
    __device__ __forceinline__ void operator()(const Tile&, const Patch<T>& patch) const {
        unsigned transformed = 0;
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            float x[kPatch];
            transform_column(patch, j, x);
            transformed = max(transformed, amax_of(x));
        }
        record_amax(patch.amax(), amax);
        record_amax(transformed, amax + 1);
    }
};

// ---- the values of a copy, as it is stored ----

template <class T, bool kAligned>
struct Nvfp4Producer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const unsigned char* data;   // [rows, columns / 2], contiguous
    const unsigned char* scale;  // of 4 scale_words(columns) bytes a row
    const float* amax;
    int columns;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&x)[kPatch]) const {
        const unsigned codes =
            load_bytes<unsigned, kAligned>(data + (row * columns + column) / 2, count / 2);
        const unsigned byte = scale[row * 4 * scale_words(columns) + column / kNvBlock];
        const float factor = mul_rn(mul_rn(decode<E4M3>(byte), *amax), 1.0f / (6.0f * 448.0f));
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            // With the sign in bit 15 and the rest from bit 9, a code is 2^-14 of its value in fp16.
            const unsigned code = codes >> 4 * j & 0xfu;
            const unsigned half = (code & 7u) << 9 | (code & 8u) << 12;
            const float value = from_fp16(static_cast<unsigned short>(half)) * 16384.0f;
            x[j] = rounded_to<T>(mul_rn(value, factor));
        }
    }
};

}  // namespace fuser
