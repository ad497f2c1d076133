// Lists of stages, run forward and backward over runs of elements.
//
// Between stages values are rounded to the pipeline's dtype T, as they would be on their way
// through memory, so that a chain gives the bits of its stages run one by one. What comes out of a
// chain is not rounded yet: storing it does that. A chain with a gated activation has two lines in
// front of it, gate and linear part, and one behind.
#pragma once

#include <fuser/chain/stages.cuh>

namespace fuser {

// ---- chains ----

// Sums over rows of one thread, of kLines lines.
template <int kLines, int N>
struct ColumnSums {
    float lines[kLines][N] = {};
};
template <int N>
struct ColumnSums<0, N> {};

// A kernel's argument: the tensors of a chain. `x` has rows of `x_stride` elements and is null
// where no stage reads it; `dy` is read backward only. `pointers` and `scalars` are those of all
// stages.
template <class Chain>
struct Inputs {
    using T = typename Chain::Element;
    static constexpr int kPointers = Chain::kPointers;
    static constexpr int kScalars = Chain::kScalars;

    void* pointers[kPointers > 0 ? kPointers : 1];
    const T* x;
    const T* dy;
    long long x_stride;
    long long dy_stride;
    float scalars[kScalars > 0 ? kScalars : 1];
    int columns;     // of the chain's output
    int interleave;  // `columns` where gate and linear part are the halves of a row
};

template <class T, class... Stages>
struct Chain;

template <class T>
struct Chain<T> {
    using Element = T;
    static constexpr int kLines = 1;
    static constexpr int kPointers = 0;
    static constexpr int kScalars = 0;
    static constexpr bool kGradientReadsInput = false;
    static constexpr bool kPassesGradientOn = true;

    template <int N>
    struct Fetched {};
    template <int N>
    struct Sums {};

    template <bool kBackward, int N, class All>
    __device__ __forceinline__ static void fetch(const All&, const Place&, Fetched<N>&) {}
    template <bool kBackward, int N>
    __device__ __forceinline__ static unsigned bits(const Fetched<N>&) {
        return 0;
    }

    template <int N, class All>
    __device__ __forceinline__ static void forward(const All&, const Fetched<N>&,
                                                   const float (&x)[1][N], float (&y)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            y[i] = x[0][i];
        }
    }

    template <int N, class All, class Collector>
    __device__ __forceinline__ static void backward(const All&, const Place&, const Fetched<N>&,
                                                    const float (&)[1][N], const float (&dy)[N],
                                                    float (&dx)[1][N], Sums<N>&,
                                                    const Collector&) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            dx[0][i] = dy[i];
        }
    }

    template <int N, class All, class Collector>
    __device__ __forceinline__ static void finish(const All&, const Place&, const Sums<N>&,
                                                  const Collector&) {}
};

template <class T, class First, class... Rest>
struct Chain<T, First, Rest...> {
    using Element = T;
    using Next = Chain<T, Rest...>;
    static constexpr bool kIsGated = First::kInputs == 2;
    static_assert(!kIsGated || Next::kLines == 1, "a chain takes one gated activation");

    // Lines in front of this stage, and behind it.
    static constexpr int kLines = kIsGated ? 2 : Next::kLines;
    static constexpr int kBehind = Next::kLines;
    static constexpr int kPointers = First::kPointers + Next::kPointers;
    static constexpr int kScalars = First::kScalars + Next::kScalars;
    static constexpr bool kGradientReadsInput =
        First::kGradientReadsInput || Next::kGradientReadsInput;
    static constexpr bool kPassesGradientOn = First::kPassesGradientOn && Next::kPassesGradientOn;
    static constexpr bool kSumsColumns = First::kOperandGradient == Operand::kColumns;

    template <int N>
    struct Fetched {
        typename First::template Operands<T, N> own[kBehind];
        typename Next::template Fetched<N> rest;
    };

    template <int N>
    struct Sums {
        ColumnSums<kSumsColumns ? kBehind : 0, N> own;
        typename Next::template Sums<N> rest;
    };

    // Backward runs a stage again only for stages behind it.
    template <bool kBackward>
    static constexpr bool kReadsOperand =
        kBackward ? First::kGradientReadsOperand ||
                        (First::kValueReadsOperand && Next::kGradientReadsInput)
                  : First::kValueReadsOperand;

    // Reads everything that stages need.
    template <bool kBackward, int N, class All>
    __device__ __forceinline__ static void fetch(const All& all, const Place& place,
                                                 Fetched<N>& fetched) {
        if constexpr (kReadsOperand<kBackward>) {
#pragma unroll
            for (int line = 0; line < kBehind; ++line) {
                fetched.own[line].fetch(pointers(all), scalars(all), place.spot<kBehind>(line));
            }
        }
        Next::template fetch<kBackward>(all, place, fetched.rest);
    }
    template <bool kBackward, int N>
    __device__ __forceinline__ static unsigned bits(const Fetched<N>& fetched) {
        unsigned all = Next::template bits<kBackward>(fetched.rest);
        if constexpr (kReadsOperand<kBackward>) {
#pragma unroll
            for (int line = 0; line < kBehind; ++line) {
                all ^= fetched.own[line].bits();
            }
        }
        return all;
    }

    template <int N, class All>
    __device__ __forceinline__ static void forward(const All& all, const Fetched<N>& fetched,
                                                   const float (&x)[kLines][N], float (&y)[N]) {
        float z[kBehind][N];
        run(all, fetched, x, z);
        if constexpr (sizeof...(Rest) > 0) {
            round_lines(z);
        }
        Next::forward(all, fetched.rest, z, y);
    }

    // dx from dy; `x` counts only where kGradientReadsInput. Gradients of operands go to
    // `collector`, or are added to `sums`.
    template <int N, class All, class Collector>
    __device__ __forceinline__ static void backward(const All& all, const Place& place,
                                                    const Fetched<N>& fetched,
                                                    const float (&x)[kLines][N],
                                                    const float (&dy)[N], float (&dx)[kLines][N],
                                                    Sums<N>& sums, const Collector& collector) {
        float z[kBehind][N] = {};
        float dz[kBehind][N];
        if constexpr (Next::kGradientReadsInput) {
            run(all, fetched, x, z);
            round_lines(z);
        }
        Next::backward(all, place, fetched.rest, z, dy, dz, sums.rest, collector);
        if constexpr (!Next::kPassesGradientOn) {
            round_lines(dz);
        }
#pragma unroll
        for (int line = 0; line < kBehind; ++line) {
            float contribution[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float in[First::kInputs], d_in[First::kInputs];
                take(x, line, i, in);
                const float e = First::kGradientReadsOperand ? fetched.own[line][i] : 0.0f;
                contribution[i] = First::gradient(dz[line][i], in, e, scalars(all), d_in);
                give(d_in, line, i, dx);
            }
            if constexpr (kSumsColumns) {
                collector.add(contribution, sums.own.lines[line]);
            } else if constexpr (First::kOperandGradient == Operand::kRows) {
                collector.add_up(contribution, static_cast<float*>(pointers(all)[1]));
            } else if constexpr (First::kOperandGradient == Operand::kElementwise) {
                collector.put(contribution, static_cast<T*>(pointers(all)[1]),
                              place.spot<kBehind>(line));
            }
        }
    }

    // Hands on the sums, once a thread.
    template <int N, class All, class Collector>
    __device__ __forceinline__ static void finish(const All& all, const Place& place,
                                                  const Sums<N>& sums,
                                                  const Collector& collector) {
        if constexpr (kSumsColumns) {
#pragma unroll
            for (int line = 0; line < kBehind; ++line) {
                collector.keep(sums.own.lines[line], static_cast<float*>(pointers(all)[1]),
                               place.spot<kBehind>(line));
            }
        }
        Next::finish(all, place, sums.rest, collector);
    }

private:
    template <class All>
    __device__ __forceinline__ static void* const* pointers(const All& all) {
        return all.pointers + (All::kPointers - kPointers);
    }
    template <class All>
    __device__ __forceinline__ static const float* scalars(const All& all) {
        return all.scalars + (All::kScalars - kScalars);
    }

    template <int N>
    __device__ __forceinline__ static void round_lines(float (&z)[kBehind][N]) {
#pragma unroll
        for (int line = 0; line < kBehind; ++line) {
            round_all<T>(z[line]);
        }
    }

    // This stage alone: z from x.
    template <int N, class All>
    __device__ __forceinline__ static void run(const All& all, const Fetched<N>& fetched,
                                               const float (&x)[kLines][N],
                                               float (&z)[kBehind][N]) {
#pragma unroll
        for (int line = 0; line < kBehind; ++line) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float in[First::kInputs];
                take(x, line, i, in);
                const float e = First::kValueReadsOperand ? fetched.own[line][i] : 0.0f;
                z[line][i] = First::value(in, e, scalars(all));
            }
        }
    }

    // The inputs of element i of a line behind this stage, from the lines in front of it.
    template <int N>
    __device__ __forceinline__ static void take(const float (&x)[kLines][N], int line, int i,
                                                float (&in)[First::kInputs]) {
#pragma unroll
        for (int k = 0; k < First::kInputs; ++k) {
            in[k] = x[kIsGated ? k : line][i];
        }
    }
    template <int N>
    __device__ __forceinline__ static void give(const float (&in)[First::kInputs], int line, int i,
                                                float (&x)[kLines][N]) {
#pragma unroll
        for (int k = 0; k < First::kInputs; ++k) {
            x[kIsGated ? k : line][i] = in[k];
        }
    }
};

// ---- runs ----

// What a run reads from memory. The first kNeeded lines are those that are surely used: the linear
// part of a gated activation is not, mostly, where nobody wants but its own gradient.
template <class Chain, bool kBackward, int N, int kNeeded = Chain::kLines>
struct Run {
    using T = typename Chain::Element;
    static constexpr int kLines = Chain::kLines;
    static constexpr bool kReadsInput = !kBackward || Chain::kGradientReadsInput;

    Packed<T, N> x[kLines];
    Packed<T, N> dy;
    typename Chain::template Fetched<N> fetched;

    __device__ __forceinline__ void fetch(const Inputs<Chain>& inputs, const Place& place) {
        if constexpr (kBackward) {
            dy = load_packed<N>(inputs.dy + place.row * inputs.dy_stride + place.column);
        }
        if constexpr (kReadsInput) {
            const T* row = inputs.x + place.row * inputs.x_stride;
#pragma unroll
            for (int line = 0; line < kLines; ++line) {
                x[line] = load_packed<N>(row + place.template spot<kLines>(line).column);
            }
        }
        Chain::template fetch<kBackward>(inputs, place, fetched);
    }

    // As `fetch`, but what is surely used comes from `staged`: dy, then lines, 16 bytes each time,
    // `step` apart.
    __device__ __forceinline__ void take(const Inputs<Chain>& inputs, const Place& place,
                                         const uint4* staged, int step) {
        constexpr int kChunks = N * static_cast<int>(sizeof(T)) / 16;
        if constexpr (kBackward) {
            dy = read_pieces<T, N>(staged, step);
        }
        if constexpr (kReadsInput) {
#pragma unroll
            for (int line = 0; line < kLines; ++line) {
                if (line < kNeeded) {
                    x[line] = read_pieces<T, N>(staged + (kBackward + line) * kChunks * step, step);
                } else {
                    x[line] = load_packed<N>(inputs.x + place.row * inputs.x_stride +
                                             place.template spot<kLines>(line).column);
                }
            }
        }
        Chain::template fetch<kBackward>(inputs, place, fetched);
    }

    // Bits that are there when all is that `fetch` reads and that is needed.
    __device__ __forceinline__ unsigned bits() const {
        unsigned all = Chain::template bits<kBackward>(fetched);
        if constexpr (kBackward) {
            all ^= dy.bits();
        }
        if constexpr (kReadsInput) {
#pragma unroll
            for (int line = 0; line < kNeeded; ++line) {
                all ^= x[line].bits();
            }
        }
        return all;
    }

    // Makes the run wait for `zero`, which is 0.
    __device__ __forceinline__ void wait_for(unsigned zero) {
        if constexpr (kReadsInput) {
#pragma unroll
            for (int line = 0; line < kNeeded; ++line) {
                x[line].wait_for(zero);
            }
        } else {
            dy.wait_for(zero);
        }
    }

    // y, not rounded yet.
    __device__ __forceinline__ void forward(const Inputs<Chain>& inputs, float (&y)[N]) const {
        float lines[kLines][N];
        unpack(lines);
        Chain::forward(inputs, fetched, lines, y);
    }

    // dx, not rounded yet.
    template <class Sums, class Collector>
    __device__ __forceinline__ void backward(const Inputs<Chain>& inputs, const Place& place,
                                             float (&dx)[kLines][N], Sums& sums,
                                             const Collector& collector) const {
        float lines[kLines][N] = {};
        if constexpr (kReadsInput) {
            unpack(lines);
        }
        float gradient[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            gradient[i] = dy[i];
        }
        Chain::backward(inputs, place, fetched, lines, gradient, dx, sums, collector);
    }

private:
    __device__ __forceinline__ void unpack(float (&lines)[kLines][N]) const {
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                lines[line][i] = x[line][i];
            }
        }
    }
};

// The first of several runs waits until all have been read. A compiler that is short of registers
// would else compute the first before it asks for the next, and have one load on its way at a time.
template <int kRuns, class Run>
__device__ __forceinline__ void wait_for_all(Run (&runs)[kRuns]) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
        bits ^= runs[i].bits();
    }
    runs[0].wait_for(bits & (blockDim.z - 1u));  // blocks are flat, and the compiler does not know
}

}  // namespace fuser
