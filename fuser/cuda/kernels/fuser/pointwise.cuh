// Producers of the values of pointwise chains, forward and backward, for kernels of tiles.
//
// With kAligned, `columns` and `interleave` are multiples of 8, every pointer and stride is one of
// 16 bytes, and `count` is 8 or at most 0. What lies past the edges of a matrix is 0.
#pragma once

#include <fuser/chain.cuh>

namespace fuser {

// The lines that come out of a chain: y forward, dx backward.
template <class Chain, bool kBackward, bool kAligned>
struct Tile {
    using T = typename Chain::Element;
    static constexpr int kLines = kBackward ? Chain::kLines : 1;

    Inputs<Chain> inputs;

    // put(i, lines) for the rows row + i, i < kRows, of which those from `end` on are not there; 8
    // columns of each line, from the one on that belongs to `column` of the chain's output, of
    // which `count` are there. All rows are asked for before any is computed, see wait_for_all.
    template <int kRows, class Put>
    __device__ __forceinline__ void rows(long long row, long long end, int column, int count,
                                         const Put& put) const {
        if constexpr (kAligned) {
            if (count > 0) {
                produce<kRows, 8>(row, end, column, put);
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float lines[kLines][8] = {};
            if constexpr (!kAligned) {
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    if (k < count && row + i < end) {
                        float one[kLines][1];
                        produce<1, 1>(row + i, end, column + k, Copy<1>{one});
#pragma unroll
                        for (int line = 0; line < kLines; ++line) {
                            lines[line][k] = one[line][0];
                        }
                    }
                }
            }
            put(i, lines);
        }
    }

protected:
    // A `put` for one row.
    template <int N>
    struct Copy {
        float (&to)[kLines][N];

        __device__ __forceinline__ void operator()(int, const float (&from)[kLines][N]) const {
#pragma unroll
            for (int line = 0; line < kLines; ++line) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    to[line][i] = from[line][i];
                }
            }
        }
    };

private:
    template <int kRows, int N, class Put>
    __device__ __forceinline__ void produce(long long row, long long end, int column,
                                            const Put& put) const {
        Place place(0, inputs.columns, column, inputs.interleave);
        Run<Chain, kBackward, N> runs[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            place.row = min(row + i, end - 1);
            runs[i].fetch(inputs, place);
        }
        wait_for_all(runs);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float lines[kLines][N];
            if constexpr (kBackward) {
                typename Chain::template Sums<N> sums;  // operands get no gradients
                runs[i].backward(inputs, place, lines, sums, sums);
            } else {
                runs[i].forward(inputs, lines[0]);
            }
#pragma unroll
            for (int line = 0; line < kLines; ++line) {
                round_all<T>(lines[line]);
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    lines[line][k] = row + i < end ? lines[line][k] : 0.0f;
                }
            }
            put(i, lines);
        }
    }
};

// One row of y at a time: `count` of 8 columns from `column` on.
template <class Chain, bool kAligned>
struct PointwiseProducer : Tile<Chain, false, kAligned> {
    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&y)[8]) const {
        float lines[1][8];
        this->template rows<1>(row, row + 1, column, count,
                               typename Tile<Chain, false, kAligned>::template Copy<8>{lines});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            y[i] = lines[0][i];
        }
    }
};

// One row of dx at a time, a matrix of kLines * inputs.columns columns. Where there are two lines,
// `rows` reads half as much as this does for both.
template <class Chain, bool kAligned>
struct PointwiseBackwardProducer : Tile<Chain, true, kAligned> {
    static constexpr int kLines = Chain::kLines;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&dx)[8]) const {
        if constexpr (kAligned) {
            one_line(row, column, count, dx);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {  // the columns may belong to different lines
                float one[8];
                one_line(row, column + i, i < count ? 1 : 0, one);
                dx[i] = one[0];
            }
        }
    }

private:
    __device__ __forceinline__ void one_line(long long row, int column, int count,
                                             float (&dx)[8]) const {
        bool is_linear = false;
        if constexpr (kLines == 2) {
            const unsigned interleave = static_cast<unsigned>(this->inputs.interleave);
            const unsigned block = static_cast<unsigned>(column) / interleave;
            is_linear = block % 2 == 1;
            column -= static_cast<int>((block + 1) / 2 * interleave);
        }
        float lines[kLines][8];
        this->template rows<1>(row, row + 1, column, count,
                               typename Tile<Chain, true, kAligned>::template Copy<8>{lines});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            dx[i] = is_linear ? lines[kLines - 1][i] : lines[0][i];
        }
    }
};

}  // namespace fuser
