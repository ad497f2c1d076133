// The producer that reads the rows of a matrix by an index: tokens in the order of their experts,
// without a copy of them in memory.
#pragma once

#include <fuser/tile/producer.cuh>

namespace fuser {

// Row r is the token of assignment row_map[r], row `row_map[r] / choices` of `x`; zeros if
// row_map[r] is negative. kAligned: as for LoadProducer.
template <class T, bool kAligned>
struct GatheredProducer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const T* x;
    long long stride;
    const int* row_map;
    int choices;

    // The row of `x`; -1 for zeros.
    __device__ __forceinline__ int token(long long row) const {
        const int assignment = row_map[row];
        const unsigned found = static_cast<unsigned>(assignment) / static_cast<unsigned>(choices);
        return assignment < 0 ? -1 : static_cast<int>(found);
    }

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&values)[kPatch]) const {
        const int from = token(row);
        load_tail<kPatch>(x + max(from, 0) * stride + column, from < 0 ? 0 : count, values);
    }
};

// Copies the words of an aligned matrix, 16 bytes at a time. All indices are read first, so that
// the rows are in flight together.
template <class T>
__device__ __forceinline__ Patch<T> make_patch(const GatheredProducer<T, true>& producer,
                                               const Tile& tile) {
    Patch<T> patch{};
    if (tile.columns_left > 0) {
        int tokens[kPatch];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            tokens[i] = i < tile.rows_left ? producer.token(tile.row + i) : -1;
        }
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            const T* p = producer.x + max(tokens[i], 0) * producer.stride + tile.column;
#pragma unroll
            for (int k = 0; k < patch.kWords / 4; ++k) {
                uint4 words{};
                if (tokens[i] >= 0) {
                    words = load_streaming(reinterpret_cast<const uint4*>(p) + k);
                }
                memcpy(patch.words[i] + 4 * k, &words, sizeof(words));
            }
        }
    }
    return patch;
}

}  // namespace fuser
