// Bytes of a tile: loading, quantizing and storing them row by row.
#pragma once

#include <fuser/tile/tile.cuh>

namespace fuser {

// With kAligned, all bytes of Words, or none if count is 0; otherwise the first `count`. The rest
// is 0.
template <class Words, bool kAligned>
__device__ __forceinline__ Words load_bytes(const unsigned char* p, int count) {
    Words words{};
    if constexpr (kAligned) {
        if (count > 0) {
            words = load_streaming(reinterpret_cast<const Words*>(p));
        }
    } else {
        unsigned char bytes[sizeof(Words)];
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Words)); ++i) {
            bytes[i] = i < count ? p[i] : 0;
        }
        memcpy(&words, bytes, sizeof(Words));
    }
    return words;
}

// Stores the bytes of a thread in a row: 8, or 4 of nibbles. Without a streaming hint, because a
// GEMM reads them next.
template <bool kAligned, class Words>
__device__ __forceinline__ void store_bytes(unsigned char* p, int count, const Words& words) {
    if constexpr (kAligned) {
        *reinterpret_cast<Words*>(p) = words;
    } else {
        unsigned char bytes[sizeof(Words)];
        memcpy(bytes, &words, sizeof(Words));
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Words)); ++i) {
            if (i < count) {
                p[i] = bytes[i];
            }
        }
    }
}

// Stores the rows of a patch in order, each as Words, to `out`, a matrix with the columns of the
// tile. The pointer moves from row to row: an address for each row would take 9 instructions.
template <bool kAligned, class Words>
struct RowStores {
    static constexpr int kBits = static_cast<int>(sizeof(Words));  // bits of each of the 8 columns
    unsigned char* p;
    int step, rows_left, count;

    __device__ __forceinline__ RowStores(const Tile& tile, unsigned char* out)
        : p(out + (tile.row * tile.columns + tile.column) * kBits / 8),
          step(kBits == 8 ? tile.columns : tile.columns / 2),
          rows_left(tile.rows_left),
          count(tile.columns_left * kBits / 8) {}

    __device__ __forceinline__ void store(int i, const Words& words) {
        if (i < rows_left) {
            store_bytes<kAligned>(p, count, words);
        }
        p += step;
    }
};

// Row i of a patch times `scale`, as bytes of E.
template <class E, class T>
__device__ __forceinline__ uint2 quantized_row(const Patch<T>& patch, int i, float scale) {
    float x[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
        x[j] = mul_rn(patch.value(i, j), scale);
    }
    return encoded8<E>(x);
}

// Quantizes the rows of a patch to `out`; scale(i) is the scale of row i.
template <class E, bool kAligned, class T, class Scale>
__device__ __forceinline__ void store_quantized_rows(const Tile& tile, const Patch<T>& patch,
                                                     unsigned char* out, const Scale& scale) {
    RowStores<kAligned, uint2> rows(tile, out);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        rows.store(i, quantized_row<E>(patch, i, scale(i)));
    }
}

// Quantizes a patch that has one scale.
template <class E, class T>
__device__ __forceinline__ void quantize_patch(const Patch<T>& patch, float scale,
                                               uint2 (&bytes)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        bytes[i] = quantized_row<E>(patch, i, scale);
    }
}

// Stores the bytes of a patch to `out`, which may be null.
template <bool kAligned>
__device__ __forceinline__ void store_rows(const Tile& tile, const uint2 (&bytes)[kPatch],
                                           unsigned char* out) {
    if (out != nullptr) {
        RowStores<kAligned, uint2> rows(tile, out);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            rows.store(i, bytes[i]);
        }
    }
}

}  // namespace fuser
