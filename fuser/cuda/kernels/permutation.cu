// Permutation of tokens to rows sorted by expert, and back.
//
// An assignment is a pair of a token and one of its experts; its number is token * choices + choice.
// row_map has the number of the assignment in each row, and -1 after the last row in use.
// inverse_map has the row of each assignment, and -1 if it is dropped.

#include <fuser/core/packed.cuh>

namespace fuser {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks that must fit a multiprocessor, where ptxas would otherwise spill to fit more.
constexpr int kBlocks = 4;

// ---- sort by expert ----

// The expert of assignment i, or -1 if it has none.
template <class Index>
__device__ __forceinline__ int expert_of(const Index* indices, int i, int end, int experts) {
    if (i >= end) {
        return -1;
    }
    const Index expert = indices[i];
    return expert >= 0 && expert < experts ? static_cast<int>(expert) : -1;
}

// The sum of x over the threads before this one. `of_warps` is shared memory for kWarps numbers; all
// threads of the block must call this.
__device__ __forceinline__ int sum_before(int x, int* of_warps) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(kAllLanes, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    if (lane == 31) {
        of_warps[warp] = sum;
    }
    __syncthreads();
    for (int other = 0; other < warp; ++other) {
        sum += of_warps[other];
    }
    return sum - x;
}

}  // namespace fuser

// counts[block][expert]: the assignments of each expert in the chunk of a block. Shared memory:
// `experts` int.
template <class Index>
__global__ void __launch_bounds__(fuser::kThreads)
    fuser_count_experts(const Index* __restrict__ indices, int* __restrict__ counts, int n,
                        int experts, int chunk) {
    extern __shared__ __align__(16) int count_of[];
    for (int expert = threadIdx.x; expert < experts; expert += fuser::kThreads) {
        count_of[expert] = 0;
    }
    __syncthreads();
    const long long first = static_cast<long long>(blockIdx.x) * chunk;
    const int end = static_cast<int>(min(first + chunk, static_cast<long long>(n)));
    for (long long i = first + threadIdx.x; i < end; i += fuser::kThreads) {
        const int expert = fuser::expert_of(indices, static_cast<int>(i), end, experts);
        if (expert >= 0) {
            atomicAdd(count_of + expert, 1);
        }
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += fuser::kThreads) {
        counts[static_cast<long long>(blockIdx.x) * experts + expert] = count_of[expert];
    }
}

// Writes row_map [rows], inverse_map [n] and split_sizes [experts] of a stable sort. A single block
// needs no counts. Shared memory: (kWarps + 2) * experts int.
template <class Index>
__global__ void __launch_bounds__(fuser::kThreads, fuser::kBlocks)
    fuser_sort_by_expert(const Index* __restrict__ indices, const int* __restrict__ counts,
                         int* __restrict__ split_sizes, int* __restrict__ row_map,
                         int* __restrict__ inverse_map, int n, int experts, int chunk, int rows) {
    extern __shared__ __align__(16) int shared[];
    int* const next_row = shared;                          // [kWarps][experts]
    int* const total = shared + fuser::kWarps * experts;   // [experts], of all blocks
    int* const before = total + experts;                   // [experts], of the blocks before
    __shared__ int of_warps[fuser::kWarps];
    __shared__ int used;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

    // ---- count: in the segment of each warp, and in all blocks ----
    for (int i = threadIdx.x; i < (fuser::kWarps + 2) * experts; i += fuser::kThreads) {
        shared[i] = 0;
    }
    __syncthreads();
    const int segment = chunk / fuser::kWarps;
    const long long begin = static_cast<long long>(blockIdx.x) * chunk + warp * segment;
    const int end = static_cast<int>(min(begin + segment, static_cast<long long>(n)));
    int* const next_of_warp = next_row + warp * experts;
    for (long long i = begin + lane; i < end; i += 32) {
        const int expert = fuser::expert_of(indices, static_cast<int>(i), end, experts);
        if (expert >= 0) {
            atomicAdd(next_of_warp + expert, 1);
            if (gridDim.x == 1) {
                atomicAdd(total + expert, 1);
            }
        }
    }
    if (gridDim.x > 1) {
        const int size = static_cast<int>(gridDim.x) * experts;
        const int own = static_cast<int>(blockIdx.x) * experts;
        for (int i = threadIdx.x; i < size; i += fuser::kThreads) {
            const int count = counts[i];
            if (count > 0) {
                atomicAdd(total + i % experts, count);
                if (i < own) {
                    atomicAdd(before + i % experts, count);
                }
            }
        }
    }
    __syncthreads();

    // ---- the first row of each expert, and of each warp in it ----
    const int each = (experts + fuser::kThreads - 1) / fuser::kThreads;
    const int first = min(static_cast<int>(threadIdx.x) * each, experts);
    const int last = min(first + each, experts);
    int count = 0;
    for (int expert = first; expert < last; ++expert) {
        count += total[expert];
    }
    int row = fuser::sum_before(count, of_warps);
    for (int expert = first; expert < last; ++expert) {
        int next = row + before[expert];
        for (int i = 0; i < fuser::kWarps; ++i) {
            const int own = next_row[i * experts + expert];
            next_row[i * experts + expert] = next;
            next += own;
        }
        const int row_after = row + total[expert];
        if (blockIdx.x == 0) {
            split_sizes[expert] = min(row_after, rows) - min(row, rows);
        }
        row = row_after;
    }
    if (threadIdx.x == fuser::kThreads - 1) {
        used = row;
    }
    __syncthreads();

    // ---- place: 32 assignments at a time, in their order ----
    for (long long i = begin; i < end; i += 32) {
        const int number = static_cast<int>(i) + lane;
        const int expert = fuser::expert_of(indices, number, end, experts);
        const unsigned alike = __match_any_sync(fuser::kAllLanes, expert);
        const int rank = __popc(alike & ((1u << lane) - 1u));
        const int place = expert < 0 ? rows : next_of_warp[expert] + rank;
        __syncwarp();
        if (expert >= 0 && rank == 0) {
            next_of_warp[expert] = place + __popc(alike);
        }
        __syncwarp();
        if (number < end) {
            inverse_map[number] = place < rows ? place : -1;
        }
        if (place < rows) {
            row_map[place] = number;
        }
    }
    const long long threads = static_cast<long long>(gridDim.x) * fuser::kThreads;
    for (long long i = used + blockIdx.x * fuser::kThreads + threadIdx.x; i < rows; i += threads) {
        row_map[i] = -1;
    }
}

// ---- rows ----

namespace fuser {

// A block is blockDim.x vectors of a row by blockDim.y tokens. A thread has several tokens,
// `blockDim.y` apart.
struct Place {
    unsigned vector;
    unsigned block;

    __device__ __forceinline__ Place()
        : vector(blockIdx.x * blockDim.x + threadIdx.x),
          block(blockIdx.z * gridDim.y + blockIdx.y) {}

    // Number `i` of the `each` tokens of this thread.
    __device__ __forceinline__ long long token(int i, int each) const {
        return (static_cast<long long>(block) * each + i) * blockDim.y + threadIdx.y;
    }
};

// Calls `clear(row)` for the rows after the last one in use. They are shared out among `groups` of
// threads; this is number `group`.
template <class Clear>
__device__ __forceinline__ void for_unused_rows(const int* row_map, int rows, long long group,
                                                long long groups, const Clear& clear) {
    if (group >= rows) {
        return;
    }
    for (long long row = group + (rows - 1 - group) / groups * groups;
         row >= 0 && row_map[row] < 0; row -= groups) {
        clear(row);
    }
}

// Makes the first row wait until all are loaded, as wait_for_all.
template <int kRows>
__device__ __forceinline__ void wait_for_rows(int (&rows)[kRows]) {
    int bits = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        bits ^= rows[i];
    }
    rows[0] ^= bits & static_cast<int>(blockDim.z - 1u);
}

__device__ __forceinline__ uint4 load_word(const uint4* p) { return load_streaming(p); }
__device__ __forceinline__ unsigned load_word(const unsigned* p) { return load_streaming(p); }
__device__ __forceinline__ unsigned short load_word(const unsigned short* p) { return *p; }
__device__ __forceinline__ void store_word(uint4* p, uint4 x) { store_streaming(p, x); }
__device__ __forceinline__ void store_word(unsigned* p, unsigned x) { store_streaming(p, x); }
__device__ __forceinline__ void store_word(unsigned short* p, unsigned short x) { *p = x; }

}  // namespace fuser

// y[inverse_map[t][j]] = x[t]; unused rows are 0. A row is `columns` words, and rows of x are
// `stride` words apart. A thread has kTokens tokens and reads each once.
template <class Word, int kTokens>
__global__ void __launch_bounds__(fuser::kThreads, fuser::kBlocks)
    fuser_permute(const Word* __restrict__ x, const int* __restrict__ row_map,
                  const int* __restrict__ inverse_map, Word* __restrict__ y, int tokens,
                  int choices, int rows, int columns, long long stride) {
    constexpr int kAtOnce = 4;  // numbers of rows in flight
    const fuser::Place place;
    if (place.vector >= static_cast<unsigned>(columns)) {
        return;
    }
    Word words[kTokens] = {};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        const long long token = place.token(i, kTokens);
        if (token < tokens) {
            words[i] = fuser::load_word(x + token * stride + place.vector);
        }
    }
    Word* const column = y + place.vector;

    // ---- unused rows, while the loads are in flight ----
    const long long groups = static_cast<long long>(gridDim.y) * gridDim.z * blockDim.y;
    fuser::for_unused_rows(row_map, rows, place.token(0, 1), groups, [&](long long row) {
        fuser::store_word(column + row * columns, Word{});
    });

    // ---- copies ----
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        const long long token = place.token(i, kTokens);
        if (token >= tokens) {
            return;
        }
        const int* own = inverse_map + token * choices;
        for (int first = 0; first < choices; first += kAtOnce) {
            int to[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                to[k] = first + k < choices ? own[first + k] : -1;
            }
            fuser::wait_for_rows(to);
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                if (static_cast<unsigned>(to[k]) < static_cast<unsigned>(rows)) {
                    fuser::store_word(column + static_cast<long long>(to[k]) * columns, words[i]);
                }
            }
        }
    }
}

// out[t] = sum over j of y[inverse_map[t][j]] * probs[t][j], in the order of j, without dropped
// assignments. Rows of y are `stride` elements apart.
template <class T, bool kProbs, bool kAligned>
__global__ void __launch_bounds__(fuser::kThreads)
    fuser_unpermute(const T* __restrict__ y, const int* __restrict__ inverse_map,
                    const float* __restrict__ probs, T* __restrict__ out, int tokens, int choices,
                    int rows, int columns, long long stride) {
    constexpr int kCount = fuser::kWidest<T>;
    constexpr int kAtOnce = 4;  // rows in flight
    const fuser::Place place;
    const long long token = place.token(0, 1);
    const long long column = static_cast<long long>(place.vector) * kCount;
    const int left = static_cast<int>(min(columns - column, static_cast<long long>(kCount)));
    if (token >= tokens || left <= 0) {
        return;
    }
    const int* const own = inverse_map + token * choices;
    float sums[kCount] = {};
    for (int first = 0; first < choices; first += kAtOnce) {
        // ---- load; a row that is not there counts as zeros ----
        int from[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            from[i] = first + i < choices ? own[first + i] : -1;
        }
        fuser::wait_for_rows(from);
        fuser::Packed<T, kCount> terms[kAtOnce];
        float scales[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            terms[i] = fuser::zeros<T, kCount>();
            scales[i] = 0.0f;
            if (static_cast<unsigned>(from[i]) < static_cast<unsigned>(rows)) {
                const T* p = y + from[i] * stride + column;
                if constexpr (kAligned) {
                    terms[i] = fuser::load_packed<kCount>(p);
                } else {
                    terms[i] = fuser::load_packed_tail<kCount>(p, left);
                }
                if constexpr (kProbs) {
                    scales[i] = probs[token * choices + first + i];
                }
            }
        }
        fuser::wait_for_all(terms);
        // ---- add: a zero changes no bit, because a sum that begins with 0 is never -0 ----
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int c = 0; c < kCount; ++c) {
                const float x = terms[i][c];
                sums[c] = fuser::add_rn(sums[c], kProbs ? fuser::mul_rn(x, scales[i]) : x);
            }
        }
    }
    const fuser::Packed<T, kCount> result = fuser::packed<T>(sums);
    T* const p = out + token * columns + column;
    if constexpr (kAligned) {
        fuser::store_packed(p, result);
    } else {
        fuser::store_packed_tail(p, left, result);
    }
}

// dy[inverse_map[t][j]] = dout[t] * probs[t][j], 0 in unused rows; with kDot also
// dprobs[t][j] = the dot product of dout[t] and y[inverse_map[t][j]]. A warp has one assignment, and
// a lane 8 columns of every 256.
template <class T, bool kDot, bool kAligned>
__global__ void __launch_bounds__(fuser::kThreads)
    fuser_unpermute_backward(const T* __restrict__ dout, const T* __restrict__ y,
                             const int* __restrict__ row_map, const int* __restrict__ inverse_map,
                             const float* __restrict__ probs, T* __restrict__ dy,
                             float* __restrict__ dprobs, int assignments, int choices, int rows,
                             int columns, long long dout_stride, long long y_stride) {
    constexpr int kCount = 8;
    constexpr int kStep = 32 * kCount;
    constexpr int kSteps = sizeof(T) == 2 ? 4 : 2;  // in flight
    using Vector = fuser::Packed<T, kCount>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const long long assignment =
        static_cast<long long>(blockIdx.x) * fuser::kWarps + threadIdx.x / 32;
    const int row = assignment < assignments ? inverse_map[assignment] : -1;
    const bool is_there = static_cast<unsigned>(row) < static_cast<unsigned>(rows);

    // ---- one row ----
    float sums[kCount] = {};
    if (is_there) {
        const float scale = probs[assignment];
        const T* const from = dout + assignment / choices * dout_stride;
        const T* const other = kDot ? y + row * y_stride : nullptr;
        T* const to = dy + static_cast<long long>(row) * columns;
        for (long long first = lane * kCount; first < columns; first += kSteps * kStep) {
            Vector loaded[kDot ? 2 * kSteps : kSteps];  // dout, and then y
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const long long column = first + i * kStep;
                const int left = static_cast<int>(columns - column);
                loaded[i] = fuser::zeros<T, kCount>();
                if constexpr (kDot) {
                    loaded[kSteps + i] = fuser::zeros<T, kCount>();
                }
                if constexpr (kAligned) {
                    if (left > 0) {
                        loaded[i] = fuser::load_packed_cached<kCount>(from + column);
                        if constexpr (kDot) {
                            loaded[kSteps + i] = fuser::load_packed<kCount>(other + column);
                        }
                    }
                } else {
                    loaded[i] = fuser::load_packed_tail<kCount>(from + column, left);
                    if constexpr (kDot) {
                        loaded[kSteps + i] =
                            fuser::load_packed_tail<kCount>(other + column, left);
                    }
                }
            }
            fuser::wait_for_all(loaded);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const long long column = first + i * kStep;
                const int left = static_cast<int>(columns - column);
                float scaled[kCount];
#pragma unroll
                for (int c = 0; c < kCount; ++c) {
                    const float grad = loaded[i][c];
                    scaled[c] = fuser::mul_rn(grad, scale);
                    if constexpr (kDot) {
                        const float value = loaded[kSteps + i][c];
                        sums[c] = fuser::add_rn(sums[c], fuser::mul_rn(grad, value));
                    }
                }
                const Vector result = fuser::packed<T>(scaled);
                if constexpr (kAligned) {
                    if (left > 0) {
                        fuser::store_packed(to + column, result);
                    }
                } else {
                    fuser::store_packed_tail(to + column, left, result);
                }
            }
        }
    }

    // ---- its dot product ----
    if constexpr (kDot) {
#pragma unroll
        for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
            for (int c = 0; c < half; ++c) {
                sums[c] = fuser::add_rn(sums[c], sums[c + half]);
            }
        }
        float sum = sums[0];
#pragma unroll
        for (int half = 16; half > 0; half /= 2) {
            sum = fuser::add_rn(sum, __shfl_xor_sync(fuser::kAllLanes, sum, half));
        }
        if (lane == 0 && assignment < assignments) {
            dprobs[assignment] = is_there ? sum : 0.0f;
        }
    }

    // ---- unused rows ----
    const long long groups = max(assignments, 1);
    if (assignment < groups) {
        fuser::for_unused_rows(row_map, rows, assignment, groups, [&](long long unused) {
#pragma unroll 4
            for (long long column = lane * kCount; column < columns; column += kStep) {
                T* const p = dy + unused * columns + column;
                if constexpr (kAligned) {
                    fuser::store_packed(p, fuser::zeros<T, kCount>());
                } else {
                    fuser::store_packed_tail(p, static_cast<int>(columns - column),
                                             fuser::zeros<T, kCount>());
                }
            }
        });
    }
}
