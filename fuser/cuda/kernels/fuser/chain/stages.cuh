// Stages of pointwise chains: basic ops with the gradients of their inputs and operands.
#pragma once

#include <fuser/chain/activations.cuh>
#include <fuser/core/philox.cuh>
#include <fuser/core/vector.cuh>

namespace fuser {

// The reduction from contributions, one an element, to the gradient of an operand.
enum class GradReduction {
    kNone,  // no gradient is wanted
    kColumns,  // summed over rows
    kRows,  // summed over columns
    kElementwise  // no reduction
};

// The defaults of a stage. `value` is in fp32 and not rounded yet. `gradient` returns the
// contribution to the gradient of the operand e.
struct Stage {
    static constexpr int kInputs = 1;
    static constexpr int kPointers = 0;  // the operand, then its gradient
    static constexpr int kScalars = 0;
    static constexpr bool kGradientReadsInput = false;
    static constexpr bool kValueReadsOperand = false;
    static constexpr bool kGradientReadsOperand = false;
    static constexpr bool kPassesGradientOn = false;
    static constexpr GradReduction kGradReduction = GradReduction::kNone;

    // The operand of a vector: element i of it. `bits` depends on the loads of `fetch`.
    template <class T, int N>
    struct Operands {
        __device__ __forceinline__ float operator[](int) const { return 0.0f; }
        __device__ __forceinline__ void fetch(void* const*, const float*, const Coord&) {}
        __device__ __forceinline__ unsigned bits() const { return 0; }
    };
};

// y = x + bias[column]. With kGrad, a second pointer gets sums of dy over the rows of a block.
template <bool kGrad = false>
struct Bias : Stage {
    static constexpr int kPointers = 1 + kGrad;
    static constexpr bool kValueReadsOperand = true;
    static constexpr bool kPassesGradientOn = true;
    static constexpr GradReduction kGradReduction =
        kGrad ? GradReduction::kColumns : GradReduction::kNone;

    template <class T, int N>
    struct Operands : Packed<T, N> {
        __device__ __forceinline__ void fetch(void* const* pointers, const float*,
                                              const Coord& coord) {
            *this = {load_packed<N>(static_cast<const T*>(pointers[0]) + coord.column)};
        }
    };

    __device__ __forceinline__ static float value(const float (&x)[1], float e, const float*) {
        return add_rn(x[0], e);
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&)[1], float,
                                                     const float*, float (&dx)[1]) {
        return dx[0] = dy;
    }
};

// y = x + extra. With kGrad, a second pointer gets dy.
template <bool kGrad = false>
struct AddExtraInput : Bias<false> {
    static constexpr int kPointers = 1 + kGrad;
    static constexpr GradReduction kGradReduction =
        kGrad ? GradReduction::kElementwise : GradReduction::kNone;

    template <class T, int N>
    struct Operands : Packed<T, N> {
        __device__ __forceinline__ void fetch(void* const* pointers, const float*,
                                              const Coord& coord) {
            *this = {load_packed<N>(static_cast<const T*>(pointers[0]) + coord.index())};
        }
    };
};

// y = scale * x.
struct ConstantScale : Stage {
    static constexpr int kScalars = 1;

    __device__ __forceinline__ static float value(const float (&x)[1], float,
                                                  const float* scalars) {
        return mul_rn(x[0], scalars[0]);
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&)[1], float,
                                                     const float* scalars, float (&dx)[1]) {
        dx[0] = mul_rn(dy, scalars[0]);
        return 0.0f;
    }
};

// y = x / (1 - p) if a random word is at least p 2^32, else 0 x. Scalars: 1 / (1 - p), and p 2^32
// as the bits of an unsigned. The word depends only on the two 64-bit numbers at the pointer and on
// the index of the element. So backward computes the same mask without a saved one, and a captured
// graph gets a new mask whenever a replay follows new numbers.
struct Dropout : Stage {
    static constexpr int kPointers = 1;
    static constexpr int kScalars = 2;
    static constexpr bool kValueReadsOperand = true;
    static constexpr bool kGradientReadsOperand = true;

    template <class T, int N>
    struct Operands {
        unsigned kept;  // bit i belongs to element i
        float scale;

        __device__ __forceinline__ float operator[](int i) const {
            return kept >> i & 1u ? scale : 0.0f;
        }
        __device__ __forceinline__ void fetch(void* const* pointers, const float* scalars,
                                              const Coord& coord) {
            const auto* seed = static_cast<const unsigned long long*>(pointers[0]);
            const unsigned long long key = __ldg(seed), offset = __ldg(seed + 1);
            const unsigned long long index = coord.index();
            const unsigned threshold = __float_as_uint(scalars[1]);
            scale = scalars[0];
            kept = 0;
#pragma unroll
            for (int i = 0; i < N; i += 4) {  // N is 1 or a multiple of 4, and so is the index
                const uint4 words = philox((index + i) / 4, offset, key);
                const unsigned four = (words.x >= threshold) | (words.y >= threshold) << 1 |
                                      (words.z >= threshold) << 2 | (words.w >= threshold) << 3;
                kept |= N == 1 ? four >> index % 4 : four << i;
            }
        }
        __device__ __forceinline__ unsigned bits() const { return 0; }
    };

    __device__ __forceinline__ static float value(const float (&x)[1], float e, const float*) {
        return mul_rn(x[0], e);
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&)[1], float e,
                                                     const float*, float (&dx)[1]) {
        dx[0] = mul_rn(dy, e);
        return 0.0f;
    }
};

// y = f(x), for an activation f.
template <class Function>
struct Activation : Stage {
    static constexpr int kInputs = Function::kInputs;
    static constexpr int kScalars = Function::kScalars;
    static constexpr bool kGradientReadsInput = true;

    __device__ __forceinline__ static float value(const float (&x)[kInputs], float,
                                                  const float* scalars) {
        return Function::value(x, scalars);
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&x)[kInputs], float,
                                                     const float* scalars, float (&dx)[kInputs]) {
        return Function::gradient(dy, x, scalars, dx);
    }
};

// y = f(x) scale[row], rounded once; the scales have dtype S. With kGrad, a second pointer gets
// sums of dy f(x) over the columns of a warp.
template <class Function, class S, bool kGrad = false>
struct ScaledActivation : Activation<Function> {
    static constexpr int kInputs = Function::kInputs;
    static constexpr int kPointers = 1 + kGrad;
    static constexpr bool kValueReadsOperand = true;
    static constexpr bool kGradientReadsOperand = true;
    static constexpr GradReduction kGradReduction =
        kGrad ? GradReduction::kRows : GradReduction::kNone;

    template <class T, int N>
    struct Operands {
        float scale;

        __device__ __forceinline__ float operator[](int) const { return scale; }
        __device__ __forceinline__ void fetch(void* const* pointers, const float*,
                                              const Coord& coord) {
            scale = to_float(static_cast<const S*>(pointers[0])[coord.row]);
        }
        __device__ __forceinline__ unsigned bits() const { return __float_as_uint(scale); }
    };

    __device__ __forceinline__ static float value(const float (&x)[kInputs], float e,
                                                  const float* scalars) {
        return mul_rn(Function::value(x, scalars), e);
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&x)[kInputs], float e,
                                                     const float* scalars, float (&dx)[kInputs]) {
        return mul_rn(dy, Function::gradient(mul_rn(dy, e), x, scalars, dx));
    }
};

// A stage before the tensor that was saved for backward: backward does not recompute it.
template <class Inner>
struct Skipped : Inner {
    static_assert(!Inner::kGradientReadsInput, "the input of this stage must have been saved");
    static constexpr bool kValueReadsOperand = false;

    __device__ __forceinline__ static float value(const float (&x)[1], float, const float*) {
        return x[0];
    }
};

}  // namespace fuser
