// Chains: lists of stages, run forward and backward over vectors of elements.
//
// Values between stages are rounded to the pipeline's dtype T, as if they went through memory, so a
// chain gives the bits of its stages run one by one. The output of a chain is not rounded yet;
// storing rounds it. The input of a gated activation has two halves, gate and linear, and its
// output has one. A tensor that is not gated counts as one half.
#pragma once

#include <fuser/chain/stages.cuh>

namespace fuser {

// ---- chains ----

// The sums of one thread over rows, of kHalves halves.
template <int kHalves, int N>
struct ColumnSums {
    float halves[kHalves][N] = {};
};
template <int N>
struct ColumnSums<0, N> {};

// A kernel's argument: the tensors of a chain. `x` has rows of `x_stride` elements and is null if
// no stage reads it; only backward reads `dy`. `pointers` and `scalars` are those of all stages.
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
    int columns;  // of the chain's output
    int interleave;  // `columns` if gate and linear part are the halves of a row
};

template <class T, class... Stages>
struct Chain;

template <class T>
struct Chain<T> {
    using Element = T;
    static constexpr int kHalves = 1;
    static constexpr int kPointers = 0;
    static constexpr int kScalars = 0;
    static constexpr bool kGradientReadsInput = false;
    static constexpr bool kPassesGradientOn = true;
    static constexpr bool kSumsRows = false;
    static constexpr bool kGradientReadsOperand = false;

    template <int N>
    struct Fetched {};
    template <int N>
    struct Sums {};

    template <bool kBackward, int N, class All>
    __device__ __forceinline__ static void fetch(const All&, const ChainCoord&, Fetched<N>&) {}
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
    __device__ __forceinline__ static void backward(const All&, const ChainCoord&,
                                                    const Fetched<N>&, const float (&)[1][N],
                                                    const float (&dy)[N], float (&dx)[1][N],
                                                    Sums<N>&, const Collector&) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            dx[0][i] = dy[i];
        }
    }

    template <int N, class All, class Collector>
    __device__ __forceinline__ static void finish(const All&, const ChainCoord&, const Sums<N>&,
                                                  const Collector&) {}
    template <class All>
    __device__ __forceinline__ static float* row_parts(const All&) {
        return nullptr;
    }
};

template <class T, class First, class... Rest>
struct Chain<T, First, Rest...> {
    using Element = T;
    using Next = Chain<T, Rest...>;
    static constexpr bool kIsGated = First::kInputs == 2;
    static_assert(!kIsGated || Next::kHalves == 1, "a chain takes one gated activation");

    // Halves of this stage's input, and of its output.
    static constexpr int kHalves = kIsGated ? 2 : Next::kHalves;
    static constexpr int kOutputHalves = Next::kHalves;
    static constexpr int kPointers = First::kPointers + Next::kPointers;
    static constexpr int kScalars = First::kScalars + Next::kScalars;
    static constexpr bool kGradientReadsInput =
        First::kGradientReadsInput || Next::kGradientReadsInput;
    static constexpr bool kPassesGradientOn = First::kPassesGradientOn && Next::kPassesGradientOn;
    static constexpr bool kSumsColumns = First::kGradReduction == GradReduction::kColumns;
    static constexpr bool kSumsOwnRows = First::kGradReduction == GradReduction::kRows;
    static constexpr bool kSumsRows = kSumsOwnRows || Next::kSumsRows;
    static constexpr bool kGradientReadsOperand =
        First::kGradientReadsOperand || Next::kGradientReadsOperand;

    template <int N>
    struct Fetched {
        typename First::template Operands<T, N> own[kOutputHalves];
        typename Next::template Fetched<N> rest;
    };

    template <int N>
    struct Sums {
        ColumnSums<kSumsColumns ? kOutputHalves : 0, N> own;
        typename Next::template Sums<N> rest;
    };

    // Backward recomputes a stage only if a later stage needs its output.
    template <bool kBackward>
    static constexpr bool kReadsOperand =
        kBackward ? First::kGradientReadsOperand ||
                        (First::kValueReadsOperand && Next::kGradientReadsInput)
                  : First::kValueReadsOperand;

    // Loads the operands of all stages.
    template <bool kBackward, int N, class All>
    __device__ __forceinline__ static void fetch(const All& all, const ChainCoord& coord,
                                                 Fetched<N>& fetched) {
        if constexpr (kReadsOperand<kBackward>) {
#pragma unroll
            for (int half = 0; half < kOutputHalves; ++half) {
                fetched.own[half].fetch(pointers(all), scalars(all),
                                        coord.of_half<kOutputHalves>(half));
            }
        }
        Next::template fetch<kBackward>(all, coord, fetched.rest);
    }
    template <bool kBackward, int N>
    __device__ __forceinline__ static unsigned bits(const Fetched<N>& fetched) {
        unsigned all = Next::template bits<kBackward>(fetched.rest);
        if constexpr (kReadsOperand<kBackward>) {
#pragma unroll
            for (int half = 0; half < kOutputHalves; ++half) {
                all ^= fetched.own[half].bits();
            }
        }
        return all;
    }

    template <int N, class All>
    __device__ __forceinline__ static void forward(const All& all, const Fetched<N>& fetched,
                                                   const float (&x)[kHalves][N], float (&y)[N]) {
        float z[kOutputHalves][N];
        apply(all, fetched, x, z);
        if constexpr (sizeof...(Rest) > 0) {
            round_halves(z);
        }
        Next::forward(all, fetched.rest, z, y);
    }

    // dx from dy. `x` is used only if kGradientReadsInput. Gradients of operands go to `collector`,
    // or are added to `sums`.
    template <int N, class All, class Collector>
    __device__ __forceinline__ static void backward(const All& all, const ChainCoord& coord,
                                                    const Fetched<N>& fetched,
                                                    const float (&x)[kHalves][N],
                                                    const float (&dy)[N], float (&dx)[kHalves][N],
                                                    Sums<N>& sums, const Collector& collector) {
        float z[kOutputHalves][N] = {};
        float dz[kOutputHalves][N];
        if constexpr (Next::kGradientReadsInput) {
            apply(all, fetched, x, z);
            round_halves(z);
        }
        Next::backward(all, coord, fetched.rest, z, dy, dz, sums.rest, collector);
        if constexpr (!Next::kPassesGradientOn) {
            round_halves(dz);
        }
#pragma unroll
        for (int half = 0; half < kOutputHalves; ++half) {
            float contribution[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float in[First::kInputs], d_in[First::kInputs];
                gather(x, half, i, in);
                const float e = First::kGradientReadsOperand ? fetched.own[half][i] : 0.0f;
                contribution[i] = First::gradient(dz[half][i], in, e, scalars(all), d_in);
                scatter(d_in, half, i, dx);
            }
            if constexpr (kSumsColumns) {
                collector.add(contribution, sums.own.halves[half]);
            } else if constexpr (kSumsOwnRows) {
                collector.store_row_part(contribution, static_cast<float*>(pointers(all)[1]));
            } else if constexpr (First::kGradReduction == GradReduction::kElementwise) {
                collector.store(contribution, static_cast<T*>(pointers(all)[1]),
                                coord.of_half<kOutputHalves>(half));
            }
        }
    }

    // Passes the sums to the collector, once a thread.
    template <int N, class All, class Collector>
    __device__ __forceinline__ static void finish(const All& all, const ChainCoord& coord,
                                                  const Sums<N>& sums, const Collector& collector) {
        if constexpr (kSumsColumns) {
#pragma unroll
            for (int half = 0; half < kOutputHalves; ++half) {
                collector.store_column_part(sums.own.halves[half],
                                            static_cast<float*>(pointers(all)[1]),
                                            coord.of_half<kOutputHalves>(half));
            }
        }
        Next::finish(all, coord, sums.rest, collector);
    }

    // The sums over columns of the first stage whose gradient is reduced so.
    template <class All>
    __device__ __forceinline__ static float* row_parts(const All& all) {
        if constexpr (kSumsOwnRows) {
            return static_cast<float*>(pointers(all)[1]);
        } else {
            return Next::row_parts(all);
        }
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
    __device__ __forceinline__ static void round_halves(float (&z)[kOutputHalves][N]) {
#pragma unroll
        for (int half = 0; half < kOutputHalves; ++half) {
            round_all<T>(z[half]);
        }
    }

    // Computes z from x by this stage alone.
    template <int N, class All>
    __device__ __forceinline__ static void apply(const All& all, const Fetched<N>& fetched,
                                                 const float (&x)[kHalves][N],
                                                 float (&z)[kOutputHalves][N]) {
#pragma unroll
        for (int half = 0; half < kOutputHalves; ++half) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float in[First::kInputs];
                gather(x, half, i, in);
                const float e = First::kValueReadsOperand ? fetched.own[half][i] : 0.0f;
                z[half][i] = First::value(in, e, scalars(all));
            }
        }
    }

    // The inputs of element i of an output half, from the input halves.
    template <int N>
    __device__ __forceinline__ static void gather(const float (&x)[kHalves][N], int half, int i,
                                                  float (&in)[First::kInputs]) {
#pragma unroll
        for (int k = 0; k < First::kInputs; ++k) {
            in[k] = x[kIsGated ? k : half][i];
        }
    }
    template <int N>
    __device__ __forceinline__ static void scatter(const float (&in)[First::kInputs], int half,
                                                   int i, float (&x)[kHalves][N]) {
#pragma unroll
        for (int k = 0; k < First::kInputs; ++k) {
            x[kIsGated ? k : half][i] = in[k];
        }
    }
};

// ---- vectors ----

// The data that a vector reads from memory. The first kNeeded halves are always used. The linear
// half of a gated activation is mostly not used if only its own gradient is wanted.
template <class Chain, bool kBackward, int N, int kNeeded = Chain::kHalves>
struct Vector {
    using T = typename Chain::Element;
    static constexpr int kHalves = Chain::kHalves;
    static constexpr bool kReadsInput = !kBackward || Chain::kGradientReadsInput;

    Packed<T, N> x[kHalves];
    Packed<T, N> dy;
    typename Chain::template Fetched<N> fetched;

    // With kOverwritesDy, the kernel may write to dy after that.
    template <bool kOverwritesDy = false>
    __device__ __forceinline__ void fetch(const Inputs<Chain>& inputs, const ChainCoord& coord) {
        if constexpr (kBackward) {
            const T* source = inputs.dy + coord.row * inputs.dy_stride + coord.column;
            dy = kOverwritesDy ? load_packed_to_overwrite<N>(source) : load_packed<N>(source);
        }
        if constexpr (kReadsInput) {
            const T* row = inputs.x + coord.row * inputs.x_stride;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                x[half] = load_packed<N>(row + coord.template of_half<kHalves>(half).column);
            }
        }
        Chain::template fetch<kBackward>(inputs, coord, fetched);
    }

    // Like `fetch`, but dy and the needed halves, in this order, come from `staged`, in pieces of
    // 16 bytes that are `step` pieces apart.
    __device__ __forceinline__ void fetch_prefetched(const Inputs<Chain>& inputs,
                                                     const ChainCoord& coord, const uint4* staged,
                                                     int step) {
        constexpr int kPieces = N * static_cast<int>(sizeof(T)) / 16;
        if constexpr (kBackward) {
            dy = read_pieces<T, N>(staged, step);
        }
        if constexpr (kReadsInput) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                if (half < kNeeded) {
                    x[half] = read_pieces<T, N>(staged + (kBackward + half) * kPieces * step, step);
                } else {
                    x[half] = load_packed<N>(inputs.x + coord.row * inputs.x_stride +
                                             coord.template of_half<kHalves>(half).column);
                }
            }
        }
        Chain::template fetch<kBackward>(inputs, coord, fetched);
    }

    // XOR of a word of all needed loads: it depends on every load, so the compiler cannot move one
    // below its use.
    __device__ __forceinline__ unsigned bits() const {
        unsigned all = Chain::template bits<kBackward>(fetched);
        if constexpr (kBackward) {
            all ^= dy.bits();
        }
        if constexpr (kReadsInput) {
#pragma unroll
            for (int half = 0; half < kNeeded; ++half) {
                all ^= x[half].bits();
            }
        }
        return all;
    }

    // Makes the vector depend on `zero`, which is 0.
    __device__ __forceinline__ void wait_for(unsigned zero) {
        if constexpr (kReadsInput) {
#pragma unroll
            for (int half = 0; half < kNeeded; ++half) {
                x[half].wait_for(zero);
            }
        } else {
            dy.wait_for(zero);
        }
    }

    // Computes y, not rounded yet.
    __device__ __forceinline__ void forward(const Inputs<Chain>& inputs, float (&y)[N]) const {
        float halves[kHalves][N];
        unpack(halves);
        Chain::forward(inputs, fetched, halves, y);
    }

    // Computes dx, not rounded yet.
    template <class Sums, class Collector>
    __device__ __forceinline__ void backward(const Inputs<Chain>& inputs, const ChainCoord& coord,
                                             float (&dx)[kHalves][N], Sums& sums,
                                             const Collector& collector) const {
        float halves[kHalves][N] = {};
        if constexpr (kReadsInput) {
            unpack(halves);
        }
        float gradient[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            gradient[i] = dy[i];
        }
        Chain::backward(inputs, coord, fetched, halves, gradient, dx, sums, collector);
    }

private:
    __device__ __forceinline__ void unpack(float (&halves)[kHalves][N]) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                halves[half][i] = x[half][i];
            }
        }
    }
};

}  // namespace fuser
