// Producers of the values of pointwise chains, forward and backward, for kernels of tiles.
//
// With kAligned, `columns` and `interleave` are multiples of 8, and every pointer and stride is one
// of 16 bytes. The values are those that the kernels of pointwise.cu write.
#pragma once

#include <fuser/chain.cuh>
#include <fuser/tiled.cuh>

namespace fuser {

// y, a matrix of inputs.columns columns.
template <class Chain, bool kAligned>
struct PointwiseProducer {
    using Element = typename Chain::Element;
    static constexpr bool kIsAligned = kAligned;
    Inputs<Chain> inputs;
};

// dx, a matrix of Chain::kLines * inputs.columns columns. With kSums, the sums of dx over the rows of
// each tile, too: the parts of the gradient of a bias that is the chain's first stage.
template <class Chain, bool kSums, bool kAligned>
struct PointwiseBackwardProducer {
    using Element = typename Chain::Element;
    static constexpr bool kIsAligned = kAligned;
    Inputs<Chain> inputs;
    float* sums;  // [row tiles, columns]
};

// At 64 registers all but the shortest chains spill, and at 80 those of more than one activation
// with one operand. Where memory is slower two blocks keep up with it, and some short ones would
// spill at 80, too.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
template <class Chain>
constexpr bool kIsShort = Chain::kLines + Chain::kPointers + Chain::kScalars <= 2;
#else
template <class Chain>
constexpr bool kIsShort = false;
#endif
template <class Chain, bool kAligned>
constexpr int kFewerBlocks<PointwiseProducer<Chain, kAligned>> =
    kIsShort<Chain> && kAligned ? 1 : 2;
template <class Chain, bool kSums, bool kAligned>
constexpr int kFewerBlocks<PointwiseBackwardProducer<Chain, kSums, kAligned>> =
    kIsShort<Chain> && kAligned && (!kSums || sizeof(typename Chain::Element) == 4) ? 1 : 2;

// Gate and linear part of dx follow from the same inputs. A block takes a tile of one of them, since
// two patches take more registers than a thread has at half the blocks; its neighbour, which runs at
// the same time, takes the other and finds the inputs in L2. Both compute what they need alone.
template <class Chain, bool kSums, bool kAligned>
constexpr bool kHasHalves<PointwiseBackwardProducer<Chain, kSums, kAligned>> = Chain::kLines == 2;

// ---- one line of a chain's lines: y, or one of dx's ----

template <class Chain, bool kBackward>
struct ChainRows {
    using T = typename Chain::Element;
    static constexpr int kLines = kBackward ? Chain::kLines : 1;
    static constexpr bool kReadsInput = !kBackward || Chain::kGradientReadsInput;
    static constexpr int kReads = kBackward + kReadsInput * Chain::kLines;
    // Rows that are asked for at once: up to 16 words a thread forward, one row's backward. Three
    // blocks of 256 threads have 24 to 48 KB on their way then.
    static constexpr int kWords = kReads * Patch<T>::kWords;
    static constexpr int kAtOnce = kWords > 8 || kBackward ? 1 : 2;

    const Inputs<Chain>& inputs;

    // All of a patch whose columns belong to line kLine, from `column` of the chain's output on. In a
    // loop, two rows a round: a compiler that sees all 8 rows at once keeps more of them under way
    // than it has registers for. The rows that are there move up, since registers have no index.
    template <int kLine>
    __device__ __forceinline__ void fill(Patch<T>& patch, const Tile& tile, int column) const {
        constexpr int kRound = 2;
        Place place(0, inputs.columns, column, inputs.interleave);
#pragma unroll 1
        for (int round = 0; round < kPatch; round += kRound) {
#pragma unroll
            for (int i = 0; i < kPatch - kRound; ++i) {
                patch.move_row(i, i + kRound);
            }
#pragma unroll
            for (int first = 0; first < kRound; first += kAtOnce) {
                Run<Chain, kBackward, kPatch, kLine == 0 ? Chain::kLines : 1> runs[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    place.row = tile.row + min(round + first + i, tile.rows_left - 1);
                    runs[i].fetch(inputs, place);
                }
                wait_for_all(runs);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    float lines[kLines][kPatch];
                    compute(runs[i], place, lines);
                    patch.round_row(kPatch - kRound + first + i, lines[kLine]);
                }
            }
        }
        clear_rows_outside(patch, tile);
    }

    // All of a patch, one element at a time, of either line. A loop, since chains may be long.
    __device__ __forceinline__ void fill_singly(Patch<T>& patch, const Tile& tile) const {
#pragma unroll 1
        for (int row = 0; row < tile.rows_left; ++row) {
            float x[kPatch];
#pragma unroll
            for (int k = 0; k < kPatch; ++k) {
                int column = tile.column + min(k, tile.columns_left - 1);
                const int line = line_of(column);
                const Place place(tile.row + row, inputs.columns, column, inputs.interleave);
                Run<Chain, kBackward, 1> run;
                run.fetch(inputs, place);
                float lines[kLines][1];
                compute(run, place, lines);
                x[k] = k < tile.columns_left ? lines[line == 0 ? 0 : kLines - 1][0] : 0.0f;
            }
            Patch<T> one;
            one.round_row(0, x);
#pragma unroll
            for (int i = 0; i < kPatch; ++i) {
#pragma unroll
                for (int w = 0; w < Patch<T>::kWords; ++w) {
                    patch.words[i][w] = i == row ? one.words[0][w] : patch.words[i][w];
                }
            }
        }
    }

    // The line of a column of dx, which becomes a column of the chain's output.
    __device__ __forceinline__ int line_of(int& column) const {
        if constexpr (kLines == 2) {
            const unsigned block =
                static_cast<unsigned>(column) / static_cast<unsigned>(inputs.interleave);
            column -= static_cast<int>((block + 1) / 2) * inputs.interleave;
            return static_cast<int>(block % 2);
        }
        return 0;
    }

private:
    template <class Run, int N>
    __device__ __forceinline__ void compute(const Run& run, const Place& place,
                                            float (&lines)[kLines][N]) const {
        if constexpr (kBackward) {
            typename Chain::template Sums<N> none;  // operands get no gradients here
            run.backward(inputs, place, lines, none, none);
        } else {
            run.forward(inputs, lines[0]);
        }
    }
};

// ---- sums over the rows of a tile ----

// Of 8 rows, of two threads, of eight warps: an order that depends on nothing.
template <class T>
__device__ __forceinline__ void sum_columns(const Patch<T>& patch, const Tile& tile, float* sums) {
    __shared__ __align__(16) float of_warps[kTileWarps][kTile];
    // Through words that only seem to be others, or unpacked values would stay in registers until the
    // store needs them.
    const unsigned zero = sizeof(T) == 4 ? 0u : blockDim.z - 1u;
    Patch<T> own;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
        for (int w = 0; w < Patch<T>::kWords; ++w) {
            own.words[i][w] = patch.words[i][w] ^ zero;
        }
    }
    float sum[kPatch];
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
        sum[j] = own.value(0, j);
#pragma unroll
        for (int i = 1; i < kPatch; ++i) {
            sum[j] = __fadd_rn(sum[j], own.value(i, j));
        }
        sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(kWarp, sum[j], kRowThreads));
    }
    if (threadIdx.x % 32 < kRowThreads) {
        float4* p =
            reinterpret_cast<float4*>(&of_warps[threadIdx.x / 32][Tile::thread_column() * kPatch]);
        p[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        p[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
    const int column = tile.first_column() + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kTile && column < tile.columns) {
        float total = of_warps[0][threadIdx.x];
#pragma unroll
        for (int warp = 1; warp < kTileWarps; ++warp) {
            total = __fadd_rn(total, of_warps[warp][threadIdx.x]);
        }
        sums[static_cast<long long>(tile.row_tile) * tile.columns + column] = total;
    }
}

// ---- patches ----

template <class Chain, bool kAligned>
__device__ __forceinline__ Patch<typename Chain::Element> produced(
    const PointwiseProducer<Chain, kAligned>& producer, const Tile& tile) {
    const ChainRows<Chain, false> rows{producer.inputs};
    Patch<typename Chain::Element> patch{};
    if constexpr (kAligned) {
        if (tile.columns_left > 0) {
            rows.template fill<0>(patch, tile, tile.column);
        }
    } else {
        rows.fill_singly(patch, tile);
    }
    return patch;
}

template <class Chain, bool kSums, bool kAligned>
__device__ __forceinline__ Patch<typename Chain::Element> produced(
    const PointwiseBackwardProducer<Chain, kSums, kAligned>& producer, const Tile& tile) {
    const ChainRows<Chain, true> rows{producer.inputs};
    Patch<typename Chain::Element> patch{};
    if constexpr (kAligned) {
        if (tile.columns_left > 0) {
            int column = tile.column;
            const int line = rows.line_of(column);
            if (Chain::kLines == 1 || line == 0) {
                rows.template fill<0>(patch, tile, column);
            } else {
                rows.template fill<Chain::kLines - 1>(patch, tile, column);
            }
        }
    } else {
        rows.fill_singly(patch, tile);
    }
    if constexpr (kSums) {
        sum_columns(patch, tile, producer.sums);
    }
    return patch;
}

}  // namespace fuser
