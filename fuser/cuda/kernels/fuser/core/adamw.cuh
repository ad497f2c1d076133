// A step of AdamW, for vectors of consecutive elements.
#pragma once

#include <fuser/core/vector.cuh>

namespace fuser {

// As the reference's `constants_of` puts them in memory.
struct AdamWConstants {
    float kept, decay;  // of a weight: (1 - lr weight_decay); in the gradient, as in Adam
    float beta1, rest1, beta2, rest2;  // rest = 1 - beta
    float step_size, root_scale, eps;
};

// All four have one element for each of the parameter; three are read and written.
template <class G>
struct AdamWState {
    float* master;
    const G* gradient;
    float* exp_avg;
    float* exp_avg_sq;
    const AdamWConstants* constants;

    __device__ __forceinline__ AdamWConstants load_constants() const {
        float values[sizeof(AdamWConstants) / sizeof(float)];
#pragma unroll
        for (unsigned i = 0; i < sizeof(values) / sizeof(float); ++i) {
            values[i] = __ldg(reinterpret_cast<const float*>(constants) + i);
        }
        AdamWConstants result;
        memcpy(&result, values, sizeof(result));
        return result;
    }
};

// One element, with the bits of the reference: each operation is rounded once.
__device__ __forceinline__ void step_adamw(const AdamWConstants& c, float gradient, float& weight,
                                           float& average, float& average_sq) {
    const float g = c.decay == 0.0f ? gradient : add_rn(gradient, mul_rn(weight, c.decay));
    average = add_rn(mul_rn(average, c.beta1), mul_rn(g, c.rest1));
    average_sq = add_rn(mul_rn(average_sq, c.beta2), mul_rn(mul_rn(g, g), c.rest2));
    const float root = add_rn(mul_rn(sqrt_rn(average_sq), c.root_scale), c.eps);
    weight = add_rn(mul_rn(weight, c.kept), -div_rn(mul_rn(average, c.step_size), root));
}

// Memory that this thread writes later: a load that other threads may not cache.
template <int N>
__device__ __forceinline__ void load_own(const float* p, float (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = *p;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 part = *reinterpret_cast<const uint4*>(p + i);
            memcpy(x + i, &part, sizeof(part));
        }
    }
}

// The new weights of N elements from `first` on, in fp32. With kWrites, the step is taken.
template <bool kWrites, class G, int N>
__device__ __forceinline__ void step_adamw(const AdamWState<G>& state, const AdamWConstants& c,
                                           long long first, float (&weights)[N]) {
    float gradients[N], averages[N], averages_sq[N];
    load_own(state.master + first, weights);
    if constexpr (N == 1) {
        gradients[0] = to_float(state.gradient[first]);
    } else {
        load(state.gradient + first, gradients);
    }
    load_own(state.exp_avg + first, averages);
    load_own(state.exp_avg_sq + first, averages_sq);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        step_adamw(c, gradients[i], weights[i], averages[i], averages_sq[i]);
    }
    if constexpr (kWrites) {
        write(state.master + first, weights);
        write(state.exp_avg + first, averages);
        write(state.exp_avg_sq + first, averages_sq);
    }
}

}  // namespace fuser
