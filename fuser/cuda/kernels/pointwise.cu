// Pointwise chains along rows, forward and backward, and the partial sums of backward.

#include <fuser/chain/chain.cuh>
#include <fuser/core/scaling.cuh>

namespace fuser {

// A block is blockDim.x vectors of N columns by blockDim.y rows. A thread has several rows,
// `blockDim.y` apart; consecutive blocks are neighbours in a row. After the edges, threads read the
// first column or the last row again and write nothing, so that no load is in a branch.
template <int N>
struct Thread {
    unsigned vector;
    unsigned row_block;
    int column;
    bool is_inside;

    __device__ __forceinline__ explicit Thread(int columns)
        : vector(blockIdx.x * blockDim.x + threadIdx.x),
          row_block(blockIdx.z * gridDim.y + blockIdx.y) {
        is_inside = vector < (columns + N - 1u) / N;
        column = is_inside ? static_cast<int>(vector * N) : 0;
    }

    // Row `number` of the `each` rows of this thread.
    __device__ __forceinline__ unsigned row(int number, int each) const {
        return (row_block * each + number) * blockDim.y + threadIdx.y;
    }
};

// ---- amax ----

// The largest magnitudes of vectors, packed as they are stored.
template <class T>
struct Largest {
    unsigned words = 0;

    template <int N>
    __device__ __forceinline__ void update(const float (&x)[N]) {
        constexpr int kEach = sizeof(T) == 4 || N == 1 ? 1 : 2;
#pragma unroll
        for (int i = 0; i < N; i += kEach) {
            const float next = kEach == 2 ? x[i + kEach - 1] : 0.0f;
            words = larger<T>(words, magnitudes<T>(packed_pair<T>(x[i], next)));
        }
    }
    // The bits of an fp32; NaN is above infinity.
    __device__ __forceinline__ unsigned bits() const { return largest<T>(words); }
};

// ---- forward: y = chain(x), T [rows, inputs.columns] ----

}  // namespace fuser

// With kAmax, *amax becomes at least max |y|, and y may be null. *amax holds the bits of a float >=
// 0.
template <class Chain, int kRows, int N, bool kAmax>
__global__ void __launch_bounds__(256)
    fuser_pointwise(const fuser::Inputs<Chain> inputs, typename Chain::Element* __restrict__ y,
                    unsigned* __restrict__ amax, unsigned rows) {
    const fuser::Thread<N> thread(inputs.columns);
    fuser::ChainCoord coord(0, inputs.columns, thread.column, inputs.interleave);

    // ---- load ----
    fuser::Vector<Chain, false, N> vectors[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        coord.row = min(thread.row(i, kRows), rows - 1);
        vectors[i].fetch(inputs, coord);
    }
    fuser::wait_for_all(vectors);

    // ---- compute and store ----
    fuser::Largest<typename Chain::Element> largest;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        float values[N];
        vectors[i].forward(inputs, values);
        const unsigned row = thread.row(i, kRows);
        if (thread.is_inside && row < rows) {
            if constexpr (kAmax) {
                largest.update(values);
            }
            if (!kAmax || y != nullptr) {
                fuser::write(y + static_cast<long long>(row) * inputs.columns + thread.column,
                             values);
            }
        }
    }
    if constexpr (kAmax) {
        fuser::record_amax(largest.bits(), amax);
    }
}

// ---- backward: dx, T [rows, kHalves * inputs.columns], and partial gradients of operands ----

namespace fuser {

// Receives the gradients of operands, for one row of one thread.
template <int N>
struct Collector {
    unsigned row;
    unsigned rows;
    const Thread<N>& thread;

    __device__ __forceinline__ bool is_inside() const { return thread.is_inside && row < rows; }

    // Adds to the sums over rows.
    __device__ __forceinline__ void add(const float (&contribution)[N], float (&sums)[N]) const {
        if (row < rows) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sums[i] = __fadd_rn(sums[i], contribution[i]);
            }
        }
    }

    // Stores one part of the sum of a row, over the columns of a warp: parts[i][row]. It adds
    // pairwise, so that vectors of 1 and of N columns are added in the same order.
    __device__ __forceinline__ void store_row_part(const float (&contribution)[N],
                                                   float* parts) const {
        float sums[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sums[i] = thread.is_inside ? contribution[i] : 0.0f;
        }
        const int lanes = min(static_cast<int>(blockDim.x), 32);
        float sum = pairwise_sum(sums);
        for (int distance = 1; distance < lanes; distance *= 2) {
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
        }
        if (threadIdx.x % lanes == 0 && row < rows) {
            parts[static_cast<long long>(thread.vector / lanes) * rows + row] = sum;
        }
    }

    // Stores the contributions as the gradient.
    template <class T>
    __device__ __forceinline__ void store(const float (&contribution)[N], T* gradient,
                                          const Coord& coord) const {
        if (is_inside()) {
            write(gradient + coord.index(), contribution);
        }
    }

    // Stores one part of the sums over rows, over the rows of a block: parts[i][column].
    __device__ __forceinline__ void store_column_part(const float (&sums)[N], float* parts,
                                                      const Coord& coord) const {
        __shared__ float of_threads[N][256];
        const int own = threadIdx.y * blockDim.x + threadIdx.x;
        __syncthreads();  // another stage may have used it
#pragma unroll
        for (int i = 0; i < N; ++i) {
            of_threads[i][own] = sums[i];
        }
        __syncthreads();
        if (threadIdx.y == 0 && thread.is_inside) {
            float totals[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                totals[i] = sums[i];
            }
#pragma unroll 1
            for (int other = 1; other < static_cast<int>(blockDim.y); ++other) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    totals[i] = __fadd_rn(totals[i], of_threads[i][own + other * blockDim.x]);
                }
            }
            write(parts + static_cast<long long>(thread.row_block) * coord.width + coord.column,
                  totals);
        }
    }
};

}  // namespace fuser

// A thread has `steps` times kRows rows. dx may be null. With kOutput, y becomes the output of
// forward, T [rows, inputs.columns]; its memory may be that of dy, of which a thread then overwrites
// what it alone has used. At the edges others read that too, and use nothing of it.
template <class Chain, int kRows, int N, bool kAmax, bool kOutput>
__global__ void __launch_bounds__(256)
    fuser_pointwise_backward(const fuser::Inputs<Chain> inputs,
                             typename Chain::Element* __restrict__ dx, typename Chain::Element* y,
                             unsigned* __restrict__ amax, unsigned rows, int steps) {
    const fuser::Thread<N> thread(inputs.columns);
    fuser::ChainCoord coord(0, inputs.columns, thread.column, inputs.interleave);
    typename Chain::template Sums<N> sums;
    fuser::Largest<typename Chain::Element> largest;
    for (int step = 0; step < steps; ++step) {
        // ---- load ----
        fuser::Vector<Chain, true, N> vectors[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            coord.row = min(thread.row(step * kRows + i, steps * kRows), rows - 1);
            vectors[i].template fetch<kOutput>(inputs, coord);
        }
        fuser::wait_for_all(vectors);

        // ---- compute and store ----
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const unsigned row = thread.row(step * kRows + i, steps * kRows);
            const fuser::Collector<N> collector{row, rows, thread};
            coord.row = row;
            float halves[Chain::kHalves][N];
            vectors[i].backward(inputs, coord, halves, sums, collector);
            if (collector.is_inside()) {
#pragma unroll
                for (int half = 0; half < Chain::kHalves; ++half) {
                    const fuser::Coord target = coord.template of_half<Chain::kHalves>(half);
                    if constexpr (kAmax) {
                        largest.update(halves[half]);
                    }
                    if (dx != nullptr) {
                        fuser::write(dx + target.index(), halves[half]);
                    }
                }
                if constexpr (kOutput) {
                    // The zero is unknown to the compiler, which would otherwise keep parts of the
                    // gradient for y: 68 registers in place of 56 for SwiGLU, 136 of 63 for SiTUGLU,
                    // and so one block less on a multiprocessor, or three.
                    vectors[i].wait_for(blockDim.z - 1u);
                    float values[N];
                    vectors[i].forward(inputs, values);
                    fuser::write(y + static_cast<long long>(row) * inputs.columns + thread.column,
                                 values);
                }
            }
        }
    }
    Chain::finish(inputs, coord, sums, fuser::Collector<N>{0, rows, thread});
    if constexpr (kAmax) {
        fuser::record_amax(largest.bits(), amax);
    }
}

// ---- sums[i] = sum over parts[...][i], fp32 [count, n] to T [n], in a fixed order ----

// Adds pairwise within kFan neighbouring parts, then in sequence within each of kShares shares, and
// then over the shares. A block is 32 by kShares threads.
template <class T, int kFan>
__global__ void __launch_bounds__(256)
    fuser_sum_parts(const float* __restrict__ parts, T* __restrict__ sums, int count, long long n) {
    constexpr int kShares = 8;
    constexpr int kAtOnce = 8 / kFan;
    __shared__ float of_shares[kShares][32];
    const long long i = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
    const int fans = (count + kFan - 1) / kFan;
    const int share = (fans + kShares - 1) / kShares;
    const int end = min(fans, share * static_cast<int>(threadIdx.y + 1));
    float sum = 0.0f;
    if (i < n) {
#pragma unroll kAtOnce
        for (int fan = share * threadIdx.y; fan < end; ++fan) {
            float pairs[kFan];
#pragma unroll
            for (int k = 0; k < kFan; ++k) {
                const int part = fan * kFan + k;
                pairs[k] = part < count ? __ldg(parts + part * n + i) : 0.0f;
            }
#pragma unroll
            for (int distance = 1; distance < kFan; distance *= 2) {
#pragma unroll
                for (int k = 0; k + distance < kFan; k += 2 * distance) {
                    pairs[k] = __fadd_rn(pairs[k], pairs[k + distance]);
                }
            }
            sum = __fadd_rn(sum, pairs[0]);
        }
    }
    of_shares[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && i < n) {
        for (int other = 1; other < kShares; ++other) {
            sum = __fadd_rn(sum, of_shares[other][threadIdx.x]);
        }
        sums[i] = fuser::from_float<T>(sum);
    }
}
