// The producer that reads a matrix from memory.
#pragma once

#include <fuser/core/vector.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

// kAligned: `x` and the row stride are multiples of 16 bytes, and the columns a multiple of 8.
template <class T, bool kAligned>
struct LoadProducer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const T* x;
    long long stride;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&values)[kPatch]) const {
        load_tail<kPatch>(x + row * stride + column, count, values);
    }
};

// An aligned matrix of fp32, whose values are rounded to T.
template <class T>
struct RoundedProducer {
    using Element = T;
    static constexpr bool kIsAligned = true;
    const float* x;
    long long stride;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&values)[kPatch]) const {
        load<kPatch>(x + row * stride + column, values);
        round_all<T>(values);
    }
};
template <class T>
constexpr int kFewerBlocks<RoundedProducer<T>> = sizeof(T) == 4 ? 0 : 2;

// Copies the words of an aligned matrix, 16 bytes at a time.
template <class T>
__device__ __forceinline__ Patch<T> make_patch(const LoadProducer<T, true>& producer,
                                               const Tile& tile) {
    Patch<T> patch{};
    if (tile.columns_left > 0) {
        const T* p = producer.x + tile.row * producer.stride + tile.column;
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
#pragma unroll
            for (int k = 0; k < patch.kWords / 4; ++k) {
                const uint4 words = load_streaming(reinterpret_cast<const uint4*>(p) + k);
                memcpy(patch.words[i] + 4 * k, &words, sizeof(words));
            }
            p += i + 1 < tile.rows_left ? producer.stride : 0;
        }
        clear_rows_outside(patch, tile);
    }
    return patch;
}

}  // namespace fuser
