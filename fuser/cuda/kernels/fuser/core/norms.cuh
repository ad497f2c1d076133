// RMSNorm and LayerNorm, and their gradients, for one value.
#pragma once

namespace fuser {

// ---- the norms ----

// L2 normalization is an RMSNorm that divides by 1 and whose gain is 1.
struct RMSNorm {
    static constexpr bool kCentered = false;
};
struct LayerNorm {
    static constexpr bool kCentered = true;
};

// ---- one value ----

// A compiler may contract a product and a sum in one kernel and not in another. Therefore every
// product that is added to something is an fmaf, or is rounded by __fmul_rn, as d_hat and the means
// are. So every kernel gives the same bits.

template <class Norm>
__device__ __forceinline__ float x_hat_of(float x, float mean, float rstd) {
    return Norm::kCentered ? (x - mean) * rstd : x * rstd;
}

template <class Norm>
__device__ __forceinline__ float y_of(float x, float mean, float rstd, float gain, float shift) {
    const float x_hat = x_hat_of<Norm>(x, mean, rstd);
    return Norm::kCentered ? fmaf(x_hat, gain, shift) : x_hat * gain;
}

// d_hat is dy * gain, rounded. The means are taken over the row: of d_hat * x_hat and, for
// LayerNorm, of d_hat.
template <class Norm, int kSums>
__device__ __forceinline__ float dx_of(float x_hat, float d_hat, const float (&means)[kSums],
                                       float rstd) {
    const float d = Norm::kCentered ? d_hat - means[kSums - 1] : d_hat;
    return fmaf(-x_hat, means[0], d) * rstd;
}

}  // namespace fuser
