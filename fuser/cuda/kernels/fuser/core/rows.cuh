// Rows of a matrix, distributed over the threads of a block, and the parameters of a norm.
#pragma once

#include <fuser/core/packed.cuh>

namespace fuser {

// ---- the threads of a row ----

// A row has blockDim.x threads, and a block has blockDim.y rows at a time. A vector is 16 bytes of
// x; thread t of n holds vectors t, t + n, and so on. A chunk of a row is kVectors vectors of each
// thread.

template <class T>
__device__ __forceinline__ T* start_of(T* p, int row, long long stride) {
    return p + row * stride;
}

// The columns of a thread in a chunk: kCount of them from first + v * step, for each v below
// kVectors.
template <int kCount, int kVectors>
struct Columns {
    int first;
    int step;
    int end;  // of the row; 0 for a row that does not exist

    __device__ __forceinline__ Columns(int chunk, int columns)
        : first((chunk * kVectors * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) *
                kCount),
          step(static_cast<int>(blockDim.x) * kCount),
          end(columns) {}

    // The number of elements of vector v in the row; it may be more than kCount, or negative.
    __device__ __forceinline__ int left(int v) const { return end - first - v * step; }
};

// Only loads, so that all are in flight before the first is used. Elements after the end of the row
// are 0.
template <class T, int kCount, int kVectors>
__device__ __forceinline__ void load_chunk(const T* row, const Columns<kCount, kVectors>& columns,
                                           bool is_aligned, Packed<T, kCount> (&x)[kVectors]) {
    const T* p = row + columns.first;
    if (is_aligned) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            x[v] = zeros<T, kCount>();
            if (columns.left(v) > 0) {
                x[v] = load_packed<kCount>(p + v * columns.step);
            }
        }
    } else {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            x[v] = load_packed_tail<kCount>(p + v * columns.step, columns.left(v));
        }
    }
}

// Stores the elements of a vector that are in the row; at least one is.
template <bool kStreams = true, class T, int kCount>
__device__ __forceinline__ void store_vector(T* p, int left, bool is_aligned,
                                             const Packed<T, kCount>& x) {
    if (is_aligned) {
        store_packed<kStreams>(p, x);
    } else {
        store_packed_tail(p, left, x);
    }
}

// ---- gamma and beta, which have a dtype of their own ----

enum ParameterType { kNoParameter, kFp32Parameter, kFp16Parameter, kBf16Parameter };

template <class P, int kCount>
__device__ __forceinline__ void load_parameters_as(const void* parameters, int column, int left,
                                                   bool is_aligned, float (&values)[kCount]) {
    const P* p = static_cast<const P*>(parameters) + column;
    const auto loaded =
        is_aligned ? load_packed_cached<kCount>(p) : load_packed_tail<kCount>(p, left);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] = loaded[i];
    }
}

// Loads the parameters of a vector in the row; 0 if there are none.
template <int kCount>
__device__ __forceinline__ void load_parameters(const void* parameters, int type, int column,
                                                int left, bool is_aligned,
                                                float (&values)[kCount]) {
    if (type == kFp32Parameter) {
        load_parameters_as<float>(parameters, column, left, is_aligned, values);
    } else if (type == kBf16Parameter) {
        load_parameters_as<bf16>(parameters, column, left, is_aligned, values);
    } else if (type == kFp16Parameter) {
        load_parameters_as<fp16>(parameters, column, left, is_aligned, values);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = 0.0f;
        }
    }
}

// gamma, plus one if it is zero-centered.
template <int kCount>
__device__ __forceinline__ void load_gain(const void* gamma, int type, float offset, int column,
                                          int left, bool is_aligned, float (&gain)[kCount]) {
    load_parameters(gamma, type, column, left, is_aligned, gain);
    if (offset != 0.0f) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            gain[i] += offset;
        }
    }
}

// ---- the sizes and scalars of a launch ----

struct Sizes {
    long long x_stride;  // from row to row, in elements
    long long extra_stride;
    long long dy_stride;
    int rows;
    int columns;
    int chunks;
    int prefetch_depth;  // of backward, in rows
    int parameter_type;
    int is_aligned;
    float gain_offset;
    float scale;  // of sums over a row: 1 / columns for their mean
    float eps;
};

}  // namespace fuser
