// Vectors of N elements of a row: rounding, writing, and their coordinates.
//
// N is 1, or the elements are next to each other in every tensor and aligned to 16 bytes or to all
// of them.
#pragma once

#include <fuser/core/packed.cuh>

namespace fuser {

template <int N, class T>
__device__ __forceinline__ void write(T* p, const float (&x)[N]) {
    if constexpr (N == 1) {
        *p = from_float<T>(x[0]);
    } else {
        store(p, x);
    }
}

template <class T, int N>
__device__ __forceinline__ void round_all(float (&x)[N]) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {  // one instruction for two
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const unsigned pair = packed_pair<T>(x[i], x[i + 1]);
            x[i] = to_float(T{static_cast<unsigned short>(pair)});
            x[i + 1] = to_float(T{static_cast<unsigned short>(pair >> 16)});
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            x[i] = rounded_to<T>(x[i]);
        }
    }
}

// The sum of x, added pairwise: vectors of N elements and N of one element are added in one order.
template <int N>
__device__ __forceinline__ float pairwise_sum(float (&x)[N]) {
#pragma unroll
    for (int distance = 1; distance < N; distance *= 2) {
#pragma unroll
        for (int i = 0; i + distance < N; i += 2 * distance) {
            x[i] = __fadd_rn(x[i], x[i + distance]);
        }
    }
    return x[0];
}

// ---- coordinates ----

// The position of a vector in a matrix of `width` columns.
struct Coord {
    long long row;
    int column;
    int width;

    __device__ __forceinline__ long long index() const { return row * width + column; }
};

// The position of a vector in a chain: in its output, and in the two halves of a gated stage's
// input.
struct ChainCoord {
    long long row;
    int columns;  // of the output
    int column;
    int wide[2];

    // Gate and linear half alternate in blocks of `interleave` columns.
    __device__ __forceinline__ ChainCoord(long long row, int columns, int column, int interleave)
        : row(row), columns(columns), column(column) {
        const unsigned block = static_cast<unsigned>(column) / static_cast<unsigned>(interleave);
        wide[0] = column + static_cast<int>(block) * interleave;
        wide[1] = wide[0] + interleave;
    }

    template <int kHalves>
    __device__ __forceinline__ Coord of_half(int half) const {
        return kHalves == 1 ? Coord{row, column, columns} : Coord{row, wide[half], 2 * columns};
    }
};

}  // namespace fuser
