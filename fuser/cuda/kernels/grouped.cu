// Groups of consecutive rows: where each ends, zeros after the last, and the biases of groups.
#include <fuser/core/vector.cuh>

// ---- ends[g] = min(rows, sum over i <= g of max(sizes[i], 0)), by one warp ----

template <class Index>
__global__ void __launch_bounds__(32)
    fuser_group_ends(const Index* __restrict__ sizes, int* __restrict__ ends, int groups,
                     int rows) {
    const int lane = static_cast<int>(threadIdx.x);
    long long before = 0;
    for (int first = 0; first < groups; first += 32) {
        const int g = first + lane;
        long long sum = 0;
        if (g < groups) {
            const long long size = static_cast<long long>(sizes[g]);
            sum = size < 0 ? 0 : size < rows ? size : rows;  // so that no sum overflows
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const long long other = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? other : 0;
        }
        sum += before;
        if (g < groups) {
            ends[g] = static_cast<int>(sum < rows ? sum : rows);
        }
        before = __shfl_sync(0xffffffffu, sum, 31);
        before = before < rows ? before : rows;
    }
}

// ---- y[row] = 0 for the rows after the last group ----

// Blocks take these rows in turns.
template <class T, int N>
__global__ void __launch_bounds__(256)
    fuser_zero_tail(T* __restrict__ y, const int* __restrict__ ends, int groups, int rows,
                    int columns) {
    float zeros[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        zeros[i] = 0.0f;
    }
    const int end = ends[groups - 1];
    for (int row = end + static_cast<int>(blockIdx.x); row < rows;
         row += static_cast<int>(gridDim.x)) {
        T* const first = y + static_cast<long long>(row) * columns;
        for (int column = static_cast<int>(threadIdx.x) * N; column < columns; column += 256 * N) {
            fuser::write(first + column, zeros);
        }
    }
}

// ---- y[row] += scales[row] * bias[group of the row]; 0 after the last group ----

// The number of groups that end at or before `row`: the group of the row.
__device__ __forceinline__ int group_of(const int* __restrict__ ends, int groups, int row) {
    int low = 0;
    int high = groups;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// A block takes one row. The product with the scale is rounded, and so is the sum.
template <class T, int N, bool kScaled>
__global__ void __launch_bounds__(256)
    fuser_grouped_bias(T* __restrict__ y, const T* __restrict__ bias,
                       const T* __restrict__ scales, const int* __restrict__ ends, int groups,
                       int columns) {
    const int row = static_cast<int>(blockIdx.x);
    const int group = group_of(ends, groups, row);
    const float scale = kScaled && group < groups ? fuser::to_float(scales[row]) : 1.0f;
    T* const first = y + static_cast<long long>(row) * columns;
    for (int column = static_cast<int>(threadIdx.x) * N; column < columns; column += 256 * N) {
        float sum[N];
        if (group == groups) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum[i] = 0.0f;
            }
        } else {
            const T* const from = bias + static_cast<long long>(group) * columns + column;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float added = fuser::to_float(from[i]);
                if constexpr (kScaled) {
                    added = fuser::rounded_to<T>(__fmul_rn(added, scale));
                }
                sum[i] = __fadd_rn(fuser::to_float(first[column + i]), added);
            }
        }
        fuser::write(first + column, sum);
    }
}
