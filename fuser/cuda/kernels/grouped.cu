// Groups of consecutive rows: where each ends, zeros after the last, biases and sums of groups.
#include <fuser/core/vector.cuh>
#include <fuser/producer/grouped.cuh>

namespace {
using fuser::kTile;
}

// The number of groups that end at or before `row`: the group of the row.
__device__ __forceinline__ int group_of(const int* ends, int groups, int row) {
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

// ---- where groups end ----

// The sum of `value` over this lane and those before it.
__device__ __forceinline__ long long sum_up_to(long long value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const long long other = __shfl_up_sync(0xffffffffu, value, step);
        value += lane >= step ? other : 0;
    }
    return value;
}

// ends[g] = min(rows, sum over i <= g of max(sizes[i], 0)), by one warp. If padded_ends is not null,
// it gets the same sums of sizes that are padded to whole tiles. If sizes is null, all are `size`.
template <class Index>
__device__ __forceinline__ void write_ends(const Index* __restrict__ sizes, int size,
                                           int* __restrict__ ends, int* __restrict__ padded_ends,
                                           int groups, int rows) {
    const int lane = static_cast<int>(threadIdx.x);
    long long before = 0, padded_before = 0;
    for (int first = 0; first < groups; first += 32) {
        const int g = first + lane;
        long long own = 0;
        if (g < groups) {
            const long long given = sizes == nullptr ? size : static_cast<long long>(sizes[g]);
            own = given < 0 ? 0 : given < rows ? given : rows;  // so that no sum overflows
        }
        long long end = before + sum_up_to(own, lane);
        end = end < rows ? end : rows;
        if (g < groups) {
            ends[g] = static_cast<int>(end);
        }
        if (padded_ends != nullptr) {
            const long long up = __shfl_up_sync(0xffffffffu, end, 1);
            const long long count = end - (lane == 0 ? before : up);
            const long long padded =
                padded_before + sum_up_to((count + kTile - 1) / kTile * kTile, lane);
            if (g < groups) {
                padded_ends[g] = static_cast<int>(padded);
            }
            padded_before = __shfl_sync(0xffffffffu, padded, 31);
        }
        before = __shfl_sync(0xffffffffu, end, 31);
    }
}

template <class Index>
__global__ void __launch_bounds__(32)
    fuser_group_ends(const Index* __restrict__ sizes, int* __restrict__ ends, int groups,
                     int rows) {
    write_ends(sizes, 0, ends, nullptr, groups, rows);
}

// The ends, and the group and the rows of each tile of groups that are padded to whole tiles; by
// one block.
template <class Index>
__global__ void __launch_bounds__(256)
    fuser_group_tiles(const Index* __restrict__ sizes, int size, int* ends, int* padded_ends,
                      fuser::GroupTile* __restrict__ tiles, int groups, int rows, int tile_count) {
    if (threadIdx.x < 32) {
        write_ends(sizes, size, ends, padded_ends, groups, rows);
    }
    __syncthreads();
    for (int tile = static_cast<int>(threadIdx.x); tile < tile_count; tile += 256) {
        const int group = group_of(padded_ends, groups, tile * kTile);
        fuser::GroupTile found{-1, 0, 0, 0};
        if (group < groups) {
            const int start = group == 0 ? 0 : ends[group - 1];
            const int row = start + tile * kTile - (group == 0 ? 0 : padded_ends[group - 1]);
            const int left = ends[group] - row;
            found = {group, row, left < kTile ? left : kTile, 0};
        }
        tiles[tile] = found;
    }
}

// ---- y[row] = the row of groups that are padded; 0 after the last group ----

// A block takes one row, of `words` words.
template <class Word>
__global__ void __launch_bounds__(256)
    fuser_unpad(const Word* __restrict__ padded, Word* __restrict__ y, const int* __restrict__ ends,
                const int* __restrict__ padded_ends, int groups, int words) {
    const int row = static_cast<int>(blockIdx.x);
    const int group = group_of(ends, groups, row);
    const bool is_inside = group < groups;
    const int start = group == 0 || !is_inside ? 0 : ends[group - 1];
    const int padded_start = group == 0 || !is_inside ? 0 : padded_ends[group - 1];
    const Word* const from = padded + static_cast<long long>(padded_start + row - start) * words;
    Word* const to = y + static_cast<long long>(row) * words;
    for (int word = static_cast<int>(threadIdx.x); word < words; word += 256) {
        to[word] = is_inside ? from[word] : Word{};
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

// ---- sums[g] = sum over the parts of the tiles of group g, in a fixed order ----

// Adds in sequence within each of kShares shares of the tiles, and then over the shares. A block is
// 32 columns by kShares shares, of one group.
template <class T>
__global__ void __launch_bounds__(256)
    fuser_sum_groups(const float* __restrict__ parts, T* __restrict__ sums,
                     const int* __restrict__ padded_ends, int columns) {
    constexpr int kShares = 8;
    __shared__ float of_shares[kShares][32];
    const int group = static_cast<int>(blockIdx.y);
    const int column = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
    const int first = group == 0 ? 0 : padded_ends[group - 1] / kTile;
    const int end = padded_ends[group] / kTile;
    const int share = (end - first + kShares - 1) / kShares;
    const int begin = first + share * static_cast<int>(threadIdx.y);
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (int tile = begin; tile < min(begin + share, end); ++tile) {
            sum = __fadd_rn(sum, __ldg(parts + static_cast<long long>(tile) * columns + column));
        }
    }
    of_shares[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        for (int other = 1; other < kShares; ++other) {
            sum = __fadd_rn(sum, of_shares[other][threadIdx.x]);
        }
        sums[static_cast<long long>(group) * columns + column] = fuser::from_float<T>(sum);
    }
}
