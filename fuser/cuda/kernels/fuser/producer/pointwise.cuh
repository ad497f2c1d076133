// Producers of pointwise chains, forward and backward, for tiled kernels.
//
// With kAligned, `columns` and `interleave` are multiples of 8, and every pointer and stride is a
// multiple of 16 bytes. The values have the bits of the kernels of pointwise.cu.
#pragma once

#include <fuser/chain/chain.cuh>
#include <fuser/tile/amax.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

// y, a matrix of inputs.columns columns.
template <class Chain, bool kAligned>
struct PointwiseProducer {
    using Element = typename Chain::Element;
    static constexpr bool kIsAligned = kAligned;
    Inputs<Chain> inputs;
};

// dx, a matrix of Chain::kHalves * inputs.columns columns. With kSums, the producer also writes the
// sums of dx over the rows of each tile: the parts of the gradient of a bias before the chain. If
// the scales of an activation get a gradient, it writes its parts: [column tiles, rows], of the
// tiles that have columns of the gate, each column of the chain's output once.
template <class Chain, bool kSums, bool kAligned>
struct PointwiseBackwardProducer {
    using Element = typename Chain::Element;
    static constexpr bool kIsAligned = kAligned;
    Inputs<Chain> inputs;
    float* sums;  // [row tiles, columns]
    long long rows;  // of the inputs
};

// With four blocks of 64 registers, memory stays busy while short chains compute: on an H200 they
// take 4 to 12% less time than with three. Longer chains would spill, and on slower memory two
// blocks are fast enough. For sm_100 the compiler takes a few registers more, so gradients get
// three. With sums over rows, those of scaled activations would spill up to 200 bytes, and with sums
// over columns 16 bytes on sm_100: these get a block less.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
template <class Chain>
constexpr bool kIsShort =
    Chain::kHalves + Chain::kPointers - Chain::kSumsRows + Chain::kScalars <= 2;
#else
template <class Chain>
constexpr bool kIsShort = false;
#endif
#if __CUDA_ARCH__ == 1000
constexpr int kFewerOfGradients = 1;
#else
constexpr int kFewerOfGradients = 0;
#endif
template <class Chain, bool kSums>
constexpr bool kSpills = kSums ? Chain::kGradientReadsOperand
                               : Chain::kSumsRows && kFewerOfGradients > 0;
template <class Chain, bool kAligned>
constexpr int kFewerBlocks<PointwiseProducer<Chain, kAligned>> =
    kIsShort<Chain> && kAligned ? 0 : 2;
template <class Chain, bool kSums, bool kAligned>
constexpr int kFewerBlocks<PointwiseBackwardProducer<Chain, kSums, kAligned>> =
    kIsShort<Chain> && kAligned ? kFewerOfGradients + kSpills<Chain, kSums> : 2;

// With sums over rows they would spill up to 16 bytes in a pair.
#if __CUDA_ARCH__ == 900
template <class Chain>
constexpr int kFewerBlocksInPair<PointwiseBackwardProducer<Chain, true, true>> = 1;
#endif

// Gate and linear half of dx follow from the same inputs. A block computes a tile of one half,
// because two patches would take more registers than a thread has at half the blocks. Its
// neighbour, which runs at the same time, computes the other half and finds the inputs in L2.
template <class Chain, bool kSums, bool kAligned>
constexpr bool kHasHalves<PointwiseBackwardProducer<Chain, kSums, kAligned>> = Chain::kHalves == 2;

// ---- one half of the result: y, or a half of dx ----

// The prefetch into shared memory: kDepth rows of kStreams tensors, in pieces of 16 bytes. A thread
// reads only pieces that it prefetched itself. Such loads take no registers, and rows are in flight
// while others are computed. Eight or nine pieces a thread are 128 or 144 KB on a multiprocessor;
// with six an H200 takes 1 to 9% more time.
template <class T, int kStreams>
struct PrefetchLayout {
    static constexpr int kPieces = kPatch * static_cast<int>(sizeof(T)) / 16;  // of a vector
    static constexpr int kEach = kStreams * kPieces;
    static constexpr int kMost = 9;  // pieces a thread: more would exceed a block's 48 KB
    static constexpr int kDepth = kEach == 1 ? kPatch : kEach < kMost ? kMost / kEach : 1;
    static constexpr int kBytes = kDepth * kEach * kTileThreads * 16;
};

template <class T>
__device__ __forceinline__ void add_row(const Patch<T>& patch, int row, float (&sums)[kPatch]) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
        sums[j] = __fadd_rn(sums[j], patch.value(row, j));
    }
}

// Receives the parts of the gradient of a row's scale, in one thread.
struct RowSum {
    float& sum;

    template <int N>
    __device__ __forceinline__ void store_row_part(float (&contribution)[N], float*) const {
        sum = __fadd_rn(sum, pairwise_sum(contribution));
    }
};
struct OneOfRow {
    float& one;

    __device__ __forceinline__ void store_row_part(float (&contribution)[1], float*) const {
        one = __fadd_rn(one, contribution[0]);
    }
};
struct NoRowSum {
    template <int N>
    __device__ __forceinline__ void store_row_part(const float (&)[N], float*) const {}
};

template <class Chain, bool kBackward>
struct ChainRows {
    using T = typename Chain::Element;
    static constexpr int kHalves = kBackward ? Chain::kHalves : 1;
    static constexpr bool kReadsInput = !kBackward || Chain::kGradientReadsInput;
    static constexpr int kStreams = kBackward + kReadsInput * Chain::kHalves;
    static constexpr int kRound = 2;  // rows that the compiler sees at once
    static constexpr bool kSumsRows = kBackward && Chain::kSumsRows;
    using Layout = PrefetchLayout<T, kStreams>;

    const Inputs<Chain>& inputs;
    uint4* staged;

    // Computes a patch whose columns belong to half kHalf; `column` is its first in the chain's
    // output. With kSums, adds its rows to `sums`. In half 0, which reads both halves, the parts of
    // the gradient of scales become `of_rows`. The linear half is not prefetched if only its own
    // gradient is wanted, because that is mostly not read then.
    template <int kHalf, bool kSums>
    __device__ __forceinline__ void fill(Patch<T>& patch, const Tile& tile, int column,
                                         float (&sums)[kPatch], float (&of_rows)[kPatch]) const {
        constexpr int kNeeded = kHalf == 0 ? Chain::kHalves : 1;
        constexpr int kDepth = Layout::kDepth;
        ChainCoord coord(tile.row, inputs.columns, column, inputs.interleave);
        const T* dy = kBackward ? inputs.dy + coord.row * inputs.dy_stride + coord.column : nullptr;
        const T* x = kReadsInput ? inputs.x + coord.row * inputs.x_stride +
                                       coord.template of_half<Chain::kHalves>(0).column
                                 : nullptr;
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            prefetch<kNeeded>(i + 1 < tile.rows_left, dy, x, slot(i));
            close_copies();
        }
        // A loop: a compiler that sees all 8 rows at once keeps more in flight than it has
        // registers for. Finished rows move up, because registers cannot be indexed at run time.
        int at = 0;  // the slot of the row; a remainder by 3 would take longer
#pragma unroll 1
        for (int round = 0; round < kPatch; round += kRound) {
            patch.template move_up<kRound>();
            if constexpr (kSumsRows && kHalf == 0) {
#pragma unroll
                for (int i = 0; i < kPatch - kRound; ++i) {
                    of_rows[i] = of_rows[i + kRound];
                }
            }
#pragma unroll
            for (int i = 0; i < kRound; ++i) {
                const int row = round + i;
                Vector<Chain, kBackward, kPatch, kNeeded> vector;
                coord.row = tile.row + min(row, tile.rows_left - 1);
                wait_for_copies<kDepth - 1>();
                vector.fetch_prefetched(inputs, coord, slot(at), kTileThreads);
                if (row + kDepth < kPatch) {
                    prefetch<kNeeded>(row + kDepth + 1 < tile.rows_left, dy, x, slot(at));
                }
                close_copies();
                at = at + 1 < kDepth ? at + 1 : 0;
                float halves[kHalves][kPatch];
                if constexpr (kSumsRows && kHalf == 0) {
                    float& of_row = of_rows[kPatch - kRound + i];
                    of_row = 0.0f;
                    compute(vector, coord, halves, RowSum{of_row});
                } else {
                    compute(vector, coord, halves, NoRowSum{});
                }
                patch.round_row(kPatch - kRound + i, halves[kHalf]);
                if (kSums && row < tile.rows_left) {
                    add_row(patch, kPatch - kRound + i, sums);
                }
            }
        }
        clear_rows_outside(patch, tile);
    }

    __device__ __forceinline__ uint4* slot(int i) const {
        return staged + i * Layout::kEach * kTileThreads + threadIdx.x;
    }

    // Prefetches the row at `dy` and `x`, and moves both to the next row if there is one.
    template <int kNeeded>
    __device__ __forceinline__ void prefetch(bool has_next, const T*& dy, const T*& x,
                                             uint4* to) const {
        constexpr int kPieces = Layout::kPieces;
        if constexpr (kBackward) {
            prefetch_vector(dy, to);
            dy += has_next ? inputs.dy_stride : 0;
        }
        if constexpr (kReadsInput) {
#pragma unroll
            for (int half = 0; half < kNeeded; ++half) {
                prefetch_vector(x + half * inputs.interleave,
                                to + (kBackward + half) * kPieces * kTileThreads);
            }
            x += has_next ? inputs.x_stride : 0;
        }
    }
    __device__ __forceinline__ void prefetch_vector(const T* p, uint4* to) const {
#pragma unroll
        for (int piece = 0; piece < Layout::kPieces; ++piece) {
            copy_async<16>(to + piece * kTileThreads, reinterpret_cast<const uint4*>(p) + piece);
        }
    }

    // Computes a patch one element at a time, in either half. A loop, because chains may be long.
    __device__ __forceinline__ void fill_singly(Patch<T>& patch, const Tile& tile,
                                                float (&of_rows)[kPatch]) const {
#pragma unroll 1
        for (int row = 0; row < tile.rows_left; ++row) {
            float x[kPatch];
            float of_columns[kPatch] = {};
#pragma unroll
            for (int k = 0; k < kPatch; ++k) {
                int column = tile.column + min(k, tile.columns_left - 1);
                const int half = half_of(column);
                const ChainCoord coord(tile.row + row, inputs.columns, column, inputs.interleave);
                Vector<Chain, kBackward, 1> vector;
                vector.fetch(inputs, coord);
                float halves[kHalves][1];
                if constexpr (kSumsRows) {
                    float one = 0.0f;
                    compute(vector, coord, halves, OneOfRow{one});
                    of_columns[k] = half == 0 && k < tile.columns_left ? one : 0.0f;
                } else {
                    compute(vector, coord, halves, NoRowSum{});
                }
                x[k] = k < tile.columns_left ? halves[half == 0 ? 0 : kHalves - 1][0] : 0.0f;
            }
            const float of_row = kSumsRows ? pairwise_sum(of_columns) : 0.0f;
            Patch<T> one;
            one.round_row(0, x);
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                of_rows[i] = kSumsRows && i == row ? of_row : of_rows[i];
#pragma unroll
                for (int w = 0; w < Patch<T>::kWords; ++w) {
                    patch.words[i][w] = i == row ? one.words[0][w] : patch.words[i][w];
                }
            }
        }
    }

    // The half of a column of dx; the column becomes that of the chain's output.
    __device__ __forceinline__ int half_of(int& column) const {
        if constexpr (kHalves == 2) {
            const unsigned block =
                static_cast<unsigned>(column) / static_cast<unsigned>(inputs.interleave);
            column -= static_cast<int>((block + 1) / 2) * inputs.interleave;
            return static_cast<int>(block % 2);
        }
        return 0;
    }

private:
    template <class Vector, int N, class Collector>
    __device__ __forceinline__ void compute(const Vector& vector, const ChainCoord& coord,
                                            float (&halves)[kHalves][N],
                                            const Collector& collector) const {
        if constexpr (kBackward) {
            typename Chain::template Sums<N> none;  // other operands get no gradients here
            vector.backward(inputs, coord, halves, none, collector);
        } else {
            vector.forward(inputs, halves[0]);
        }
    }
};

template <class Chain, bool kAligned>
constexpr int kPrefetchBytes<PointwiseProducer<Chain, kAligned>> =
    kAligned ? ChainRows<Chain, false>::Layout::kBytes : 0;
// At least the bytes of the sums over rows.
template <class Chain>
constexpr int kBackwardBytes = ChainRows<Chain, true>::Layout::kBytes > kTileWarps * kTile * 4
                                   ? ChainRows<Chain, true>::Layout::kBytes
                                   : kTileWarps * kTile * 4;
template <class Chain, bool kSums, bool kAligned>
constexpr int kPrefetchBytes<PointwiseBackwardProducer<Chain, kSums, kAligned>> =
    kAligned || kSums ? kBackwardBytes<Chain> : 0;

// ---- sums over the rows of a tile ----

// Adds the sums of the threads, each over 8 rows: first of two threads, then of eight warps, in a
// fixed order. Uses the memory of the prefetched rows.
__device__ __forceinline__ void store_sums(float (&sum)[kPatch], const Tile& tile, uint4* shared,
                                           float* sums) {
    float* of_warps = reinterpret_cast<float*>(shared);  // [kTileWarps][kTile]
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
        sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(kAllLanes, sum[j], kRowThreads));
    }
    __syncthreads();
    if (threadIdx.x % 32 < kRowThreads) {
        float4* p = reinterpret_cast<float4*>(of_warps + threadIdx.x / 32 * kTile +
                                              Tile::thread_column() * kPatch);
        p[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        p[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
    const int column = tile.first_column() + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kTile && column < tile.columns) {
        float total = of_warps[threadIdx.x];
#pragma unroll
        for (int warp = 1; warp < kTileWarps; ++warp) {
            total = __fadd_rn(total, of_warps[warp * kTile + threadIdx.x]);
        }
        sums[static_cast<long long>(tile.row_tile) * tile.columns + column] = total;
    }
}

// ---- sums over the columns of a tile ----

// Adds the sums of the 16 threads of a row, each over 8 columns, in a fixed order. Tiles without
// columns of the gate write nothing.
template <class Chain>
__device__ __forceinline__ void store_row_sums(float (&sums)[kPatch], const Tile& tile,
                                               const Inputs<Chain>& inputs, long long rows) {
    reduce_scatter_rows<kRowThreads, Sum>(sums);
    const long long row = tile.row + owned_row<kRowThreads>(0);
    const int end = Chain::kHalves == 1 ? inputs.columns : 2 * inputs.columns - inputs.interleave;
    if (Tile::thread_column() < kPatch && row < tile.rows && tile.first_column() < end) {
        Chain::row_parts(inputs)[tile.column_tile * rows + row] = sums[0];
    }
}

// ---- patches ----

template <class Chain, bool kAligned>
__device__ __forceinline__ Patch<typename Chain::Element> make_patch(
    const PointwiseProducer<Chain, kAligned>& producer, const Tile& tile) {
    using Rows = ChainRows<Chain, false>;
    uint4* staged = reinterpret_cast<uint4*>(tile.scratch);
    const Rows rows{producer.inputs, staged};
    Patch<typename Chain::Element> patch{};
    float none[kPatch] = {};
    if constexpr (kAligned) {
        if (tile.columns_left > 0) {
            rows.template fill<0, false>(patch, tile, tile.column, none, none);
        }
    } else {
        rows.fill_singly(patch, tile, none);
    }
    __syncthreads();  // the store uses this memory next
    return patch;
}

template <class Chain, bool kSums, bool kAligned>
__device__ __forceinline__ Patch<typename Chain::Element> make_patch(
    const PointwiseBackwardProducer<Chain, kSums, kAligned>& producer, const Tile& tile) {
    using Rows = ChainRows<Chain, true>;
    uint4* staged = reinterpret_cast<uint4*>(tile.scratch);
    const Rows rows{producer.inputs, staged};
    Patch<typename Chain::Element> patch{};
    float sums[kPatch] = {};
    float of_rows[kPatch] = {};
    if constexpr (kAligned) {
        if (tile.columns_left > 0) {
            int column = tile.column;
            const int half = rows.half_of(column);
            if (Chain::kHalves == 1 || half == 0) {
                rows.template fill<0, kSums>(patch, tile, column, sums, of_rows);
            } else {
                rows.template fill<Chain::kHalves - 1, kSums>(patch, tile, column, sums, of_rows);
            }
        }
    } else {
        rows.fill_singly(patch, tile, of_rows);
        if constexpr (kSums) {
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
                add_row(patch, i, sums);
            }
        }
    }
    if constexpr (Chain::kSumsRows) {
        store_row_sums(of_rows, tile, producer.inputs, producer.rows);
    }
    if constexpr (kSums) {
        store_sums(sums, tile, staged, producer.sums);
    }
    __syncthreads();  // the store uses this memory next
    return patch;
}

}  // namespace fuser
