// Activations and gated linear units in fp32: a struct for each, with its value and its derivative.
//
// The formulas are those of fuser/reference/activation.py. T is the dtype that results are rounded
// to. The comments say how many operations of the special function unit (MUFU) `value` and `at`
// take. An H200 has 3.6e12 of these operations a second, and 28e12 issue slots of all kinds. In
// bf16 its memory moves 1.05e12 elements of GELU a second, 0.7e12 of SwiGLU or of GELU backward,
// and 0.42e12 of SwiGLU backward. So the unit is no limit up to 3, 5, 5 and 8 operations an
// element, and the issue slots are no limit up to 26, 40, 40 and 67 instructions.
//
// Products and sums are explicit (__fmul_rn, fmaf), so that the compiler contracts none: a function
// gives the same bits wherever it is inlined. fp32 subnormals count as 0 in exp and tanh only;
// elsewhere mul_rn keeps them, so the ReLU family has the bits of torch.
#pragma once

#include <fuser/core/hardware.cuh>

namespace fuser {

// The value of a function at a point, and its derivative there.
struct Point {
    float value;
    float slope;
};

// ---- the gradient of an input from that of the output ----

// dx = dy * f'(x)
struct Smooth {
    __device__ __forceinline__ static float gradient(float dy, float slope) {
        return mul_rn(dy, slope);
    }
};

// f'(x) is 0 or 1: dx is 0 or dy itself, also for an infinite or subnormal dy.
struct Masked {
    __device__ __forceinline__ static float gradient(float dy, float slope) {
        return slope == 0.0f ? 0.0f : dy;
    }
};

// f'(x) is 0 outside a limit: dx is 0 there, also for an infinite dy.
struct Clamped {
    __device__ __forceinline__ static float gradient(float dy, float slope) {
        return slope == 0.0f ? 0.0f : mul_rn(dy, slope);
    }
};

// ---- exp, sigmoid and tanh; quotients are an approximate reciprocal times a product, 2 ulp ----

// exp(x). expf is within 2 ulp and takes 8 instructions more than 2^(x log2 e), which loses |x| / 2
// ulp. That does not show in 16 bits, but is a dozen ulp of fp32 where the sigmoid is small. MUFU:
// 1.
template <class T>
__device__ __forceinline__ float exponential(float x) {
    return sizeof(T) == 4 ? expf(x) : exp2f(__fmul_rn(1.44269504f, x));
}

// -|x| in one instruction. fabsf and a minus would take one each, because they flush subnormals.
__device__ __forceinline__ float minus_magnitude(float x) {
    return __uint_as_float(__float_as_uint(x) | 0x80000000u);
}

// numerator / (1 + e), which is numerator * sigmoid(v) for e = exp(-v). MUFU: 1.
__device__ __forceinline__ float times_sigmoid(float numerator, float e) {
    return __fdividef(numerator, __fadd_rn(1.0f, e));
}

struct Sigmoid {
    float value;  // sigmoid(v)
    float slope;  // sigmoid(v) (1 - sigmoid(v))
};

// exp(-|v|) for sigmoid_at in fp32: it cannot overflow, and the slope has a small relative error
// for every v. In 16 bits exp(-v): the slope loses digits only where it is small compared to the
// number that `weighted` adds it to, or to 1. MUFU: 1.
template <class T>
__device__ __forceinline__ float exponential_below(float v) {
    return sizeof(T) == 4 ? expf(minus_magnitude(v)) : exp2f(__fmul_rn(-1.44269504f, v));
}

// MUFU: 1.
template <class T>
__device__ __forceinline__ Sigmoid sigmoid_at(float e, float v) {
    const float larger = reciprocal(__fadd_rn(1.0f, e));
    if constexpr (sizeof(T) == 2) {
        return {larger, fmaf(-larger, larger, larger)};
    }
    const float smaller = __fmul_rn(e, larger);
    return {v >= 0.0f ? larger : smaller, __fmul_rn(larger, smaller)};
}

// x sigmoid(v), where v'(x) = 1 or dv. MUFU: 0.
__device__ __forceinline__ Point weighted(float x, Sigmoid sigmoid) {
    return {__fmul_rn(x, sigmoid.value), fmaf(x, sigmoid.slope, sigmoid.value)};
}
__device__ __forceinline__ Point weighted(float x, Sigmoid sigmoid, float dv) {
    // First dv times the slope: it is 0 where x * dv overflows.
    return {__fmul_rn(x, sigmoid.value), fmaf(x, __fmul_rn(dv, sigmoid.slope), sigmoid.value)};
}

// tanh for |z| < 0.55, by the odd polynomial with the smallest relative error, 2^-23.4.
__device__ __forceinline__ bool is_near(float z) { return minus_magnitude(z) > -0.55f; }
__device__ __forceinline__ float tanh_near(float z) {
    const float u = __fmul_rn(z, z);
    float p = 1.6437596e-2f;
    p = fmaf(p, u, -5.2671824e-2f);
    p = fmaf(p, u, 1.3320725e-1f);
    p = fmaf(p, u, -3.3332947e-1f);
    return fmaf(__fmul_rn(p, u), z, z);
}

// exp(-2 |z|). It is at most 1/3 for other z, so that 2^(-2 |z| log2 e) is exact enough for any T.
// MUFU: 1.
__device__ __forceinline__ float tanh_exponential(float z) {
    return exp2f(__fmul_rn(2.8853901f, minus_magnitude(z)));
}

struct Ratio {
    float numerator;
    float denominator;
};

// tanh(z) as a quotient, so that another quotient can share its reciprocal. Here and below, both
// formulas are computed before one is chosen, which avoids a branch. MUFU: 1.
__device__ __forceinline__ Ratio tanh_ratio(float z) {
    const float e = tanh_exponential(z);
    const float near = tanh_near(z);
    const float far = copysignf(__fsub_rn(1.0f, e), z);
    const float denominator = __fadd_rn(1.0f, e);
    return {is_near(z) ? near : far, is_near(z) ? 1.0f : denominator};
}

// MUFU: 2.
__device__ __forceinline__ Point tanh_at(float z) {
    const float e = tanh_exponential(z);
    const float inverse = reciprocal(__fadd_rn(1.0f, e));
    const float near = tanh_near(z);
    const float far = copysignf(__fmul_rn(__fsub_rn(1.0f, e), inverse), z);
    // Far from 0, 1 - tanh^2 is a small difference of large numbers; 4 e / (1 + e)^2 is not.
    const float near_slope = fmaf(-near, near, 1.0f);
    const float far_slope = __fmul_rn(__fmul_rn(4.0f, e), __fmul_rn(inverse, inverse));
    return {is_near(z) ? near : far, is_near(z) ? near_slope : far_slope};
}

// ---- functions of one value; `scalars` are those of the activation ----

// True for NaN and every positive x, also subnormal: a comparison of floats would flush those.
__device__ __forceinline__ bool passes_relu(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits - 1u < 0x7fffffffu || bits > 0xff800000u;
}

// MUFU: 0.
struct IdentityFunction : Masked {
    __device__ __forceinline__ static float value(float x, const float*) { return x; }
    __device__ __forceinline__ static Point at(float x, const float*) { return {x, 1.0f}; }
};

// MUFU: 0.
struct ReluFunction : Masked {
    __device__ __forceinline__ static float value(float x, const float*) {
        return passes_relu(x) ? x : 0.0f;
    }
    __device__ __forceinline__ static Point at(float x, const float*) {
        return passes_relu(x) ? Point{x, 1.0f} : Point{0.0f, 0.0f};
    }
};

// MUFU: 0.
struct SreluFunction : Smooth {
    __device__ __forceinline__ static float value(float x, const float* scalars) {
        const float positive = ReluFunction::value(x, scalars);
        return mul_rn(positive, positive);
    }
    __device__ __forceinline__ static Point at(float x, const float* scalars) {
        const float positive = ReluFunction::value(x, scalars);
        return {mul_rn(positive, positive), mul_rn(2.0f, positive)};
    }
};

// (beta tanh(max(x, 0) / beta))^2, with scalars beta and 1 / beta. MUFU: 2, 2.
struct SoftClippedSreluFunction : Smooth {
    __device__ __forceinline__ static float value(float x, const float* scalars) {
        const Ratio t = tanh_ratio(__fmul_rn(ReluFunction::value(x, scalars), scalars[1]));
        const float clipped = __fdividef(__fmul_rn(scalars[0], t.numerator), t.denominator);
        return __fmul_rn(clipped, clipped);
    }
    __device__ __forceinline__ static Point at(float x, const float* scalars) {
        const Point t = tanh_at(__fmul_rn(ReluFunction::value(x, scalars), scalars[1]));
        const float clipped = __fmul_rn(scalars[0], t.value);
        return {__fmul_rn(clipped, clipped), __fmul_rn(__fmul_rn(2.0f, clipped), t.slope)};
    }
};

// MUFU: 2, 2.
template <class T>
struct SigmoidFunction : Smooth {
    __device__ __forceinline__ static float value(float x, const float*) {
        return times_sigmoid(1.0f, exponential<T>(-x));
    }
    __device__ __forceinline__ static Point at(float x, const float*) {
        const Sigmoid sigmoid = sigmoid_at<T>(exponential_below<T>(x), x);
        return {sigmoid.value, sigmoid.slope};
    }
};

// MUFU: 2, 2.
template <class T>
struct SiluFunction : Smooth {
    __device__ __forceinline__ static float value(float x, const float*) {
        return times_sigmoid(x, exponential<T>(-x));
    }
    __device__ __forceinline__ static Point at(float x, const float*) {
        return weighted(x, sigmoid_at<T>(exponential_below<T>(x), x));
    }
};

// 0.5 x (1 + tanh(u)) = x sigmoid(v) with v = 2 u. This has no small difference of larger numbers,
// so 2^(-v log2 e) is more exact than the formula with tanh. MUFU: 2, 2.
template <class T>
struct GeluFunction : Smooth {
    static constexpr float kLinear = 1.5957691f;  // v = x (kLinear + kCubic x^2): 2 sqrt(2 / pi)
    static constexpr float kCubic = 0.071354814f;  // 0.044715 kLinear
    static constexpr float kLog2E = 1.44269504f;

    __device__ __forceinline__ static float value(float x, const float*) {
        const float inner = fmaf(__fmul_rn(x, x), -kLog2E * kCubic, -kLog2E * kLinear);
        return times_sigmoid(x, exp2f(__fmul_rn(x, inner)));
    }
    __device__ __forceinline__ static Point at(float x, const float*) {
        const float square = __fmul_rn(x, x);
        constexpr float kSign = sizeof(T) == 4 ? 1.0f : -1.0f;  // as in exponential_below
        const float inner = fmaf(square, kSign * kLog2E * kCubic, kSign * kLog2E * kLinear);
        const float e = exp2f(__fmul_rn(sizeof(T) == 4 ? minus_magnitude(x) : x, inner));
        return weighted(x, sigmoid_at<T>(e, x), fmaf(square, 3.0f * kCubic, kLinear));
    }
};

// The standard normal distribution at x: its density, and its integral up to -|x|.
struct Normal {
    float tail;
    float density;
};

// tail = exp(-x^2 / 2) t P(t) with t = 1 / (1 + p |x|), which is Hastings' form of erfc (Abramowitz
// and Stegun, 7.1.26). p and P have the smallest relative error for |x| < 14.5: 2^-20.0, and 2^-25.1
// for fp32. 0.5 (1 + erf(x / sqrt(2))) would lose all digits far below 0. MUFU: 2.
template <class T>
__device__ __forceinline__ Normal normal_at(float x) {
    constexpr float kDensity = 0.39894228f;  // 1 / sqrt(2 pi)
    constexpr float kHalfLog2E = 0.72134752f;
    if constexpr (sizeof(T) == 2) {
        const float t = reciprocal(fmaf(minus_magnitude(x), -0.36f, 1.0f));
        float p = 4.6782482e-2f;
        p = fmaf(p, t, -1.7882656e-1f);
        p = fmaf(p, t, 1.7967756e-1f);
        p = fmaf(p, t, 2.7426681e-2f);
        p = fmaf(p, t, 1.3940005e-1f);
        p = fmaf(p, t, 1.4183038e-1f);
        p = fmaf(p, t, 1.4370897e-1f);
        const float e = exp2f(__fmul_rn(x, __fmul_rn(x, -kHalfLog2E)));
        return {__fmul_rn(__fmul_rn(t, e), p), __fmul_rn(kDensity, e)};
    }
    // Both are 0 further out, where the square would overflow.
    const float below = fmaxf(minus_magnitude(x), -15.0f);
    const float t = reciprocal_rn(fmaf(below, -0.26f, 1.0f));
    float p = 3.0229690e-2f;
    p = fmaf(p, t, -1.5149158e-1f);
    p = fmaf(p, t, 2.4872755e-1f);
    p = fmaf(p, t, -1.4778315e-1f);
    p = fmaf(p, t, 1.5875469e-1f);
    p = fmaf(p, t, 5.1966459e-2f);
    p = fmaf(p, t, 1.0278828e-1f);
    p = fmaf(p, t, 1.0305102e-1f);
    p = fmaf(p, t, 1.0375702e-1f);
    // What the square loses counts |x|^2 / 2 times in the exponential.
    const float square = __fmul_rn(below, below);
    const float lost = fmaf(below, below, -square);
    const float rounded = expf(__fmul_rn(-0.5f, square));
    const float e = fmaf(__fmul_rn(-0.5f, lost), rounded, rounded);
    const float far = __fmul_rn(__fmul_rn(t, e), p);
    // Near 0 errors of t count three times: there Taylor's series, 0.5 - |x| (1 - x^2 / 6 + ...)
    // density(0), of which the next term is 2^-29.
    float q = -9.4447e-6f;
    q = fmaf(q, square, 1.1543467e-4f);
    q = fmaf(q, square, -1.1873281e-3f);
    q = fmaf(q, square, 9.9735570e-3f);
    q = fmaf(q, square, -6.6490380e-2f);
    q = fmaf(q, square, kDensity);
    return {is_near(x) ? fmaf(below, q, 0.5f) : far, __fmul_rn(kDensity, e)};
}

// x Phi(x) = 0.5 x (1 + erf(x / sqrt(2))), with the slope Phi(x) + x phi(x). In 16 bits `value`
// takes 18 instructions, of which 6 are for P. MUFU: 2, 2.
template <class T>
struct GeluErfFunction : Smooth {
    __device__ __forceinline__ static float integral(float x, Normal normal) {
        return x < 0.0f ? normal.tail : __fsub_rn(1.0f, normal.tail);
    }
    __device__ __forceinline__ static float value(float x, const float*) {
        return __fmul_rn(x, integral(x, normal_at<T>(x)));
    }
    __device__ __forceinline__ static Point at(float x, const float*) {
        const Normal normal = normal_at<T>(x);
        const float phi = integral(x, normal);
        return {__fmul_rn(x, phi), fmaf(x, normal.density, phi)};
    }
};

// MUFU: 2, 2.
template <class T>
struct QgeluFunction : Smooth {
    static constexpr float kAlpha = 1.702f;

    __device__ __forceinline__ static float value(float x, const float*) {
        return times_sigmoid(x, exponential<T>(__fmul_rn(-kAlpha, x)));
    }
    __device__ __forceinline__ static Point at(float x, const float*) {
        const float e = exponential_below<T>(__fmul_rn(kAlpha, x));
        return weighted(x, sigmoid_at<T>(e, x), kAlpha);
    }
};

// beta tanh(x / beta) sigmoid(x), with scalars beta and 1 / beta. MUFU: 3, 4.
template <class T>
struct SoftClippedSiluFunction : Smooth {
    __device__ __forceinline__ static float value(float x, const float* scalars) {
        const Ratio t = tanh_ratio(__fmul_rn(x, scalars[1]));
        return __fdividef(__fmul_rn(scalars[0], t.numerator),
                          __fmul_rn(t.denominator, __fadd_rn(1.0f, exponential<T>(-x))));
    }
    __device__ __forceinline__ static Point at(float x, const float* scalars) {
        const Point t = tanh_at(__fmul_rn(x, scalars[1]));
        const float clipped = __fmul_rn(scalars[0], t.value);
        const Sigmoid sigmoid = sigmoid_at<T>(exponential_below<T>(x), x);
        return {__fmul_rn(clipped, sigmoid.value),
                fmaf(clipped, sigmoid.slope, __fmul_rn(t.slope, sigmoid.value))};
    }
};

// beta tanh(x / beta), with scalars beta and 1 / beta after those of the gate. MUFU: 2, 2.
struct SoftClipFunction : Smooth {
    __device__ __forceinline__ static float value(float x, const float* scalars) {
        const Ratio t = tanh_ratio(__fmul_rn(x, scalars[3]));
        return __fdividef(__fmul_rn(scalars[2], t.numerator), t.denominator);
    }
    __device__ __forceinline__ static Point at(float x, const float* scalars) {
        const Point t = tanh_at(__fmul_rn(x, scalars[3]));
        return {__fmul_rn(scalars[2], t.value), t.slope};
    }
};

// g sigmoid(alpha g) with g = min(x, limit), scalars limit and alpha. NaN has a value but a slope
// of 0. MUFU: 2, 2.
template <class T>
struct ClampedGateFunction : Clamped {
    __device__ __forceinline__ static float value(float x, const float* scalars) {
        const float g = x > scalars[0] ? scalars[0] : x;
        return times_sigmoid(g, exponential<T>(-__fmul_rn(scalars[1], g)));
    }
    __device__ __forceinline__ static Point at(float x, const float* scalars) {
        const float g = x > scalars[0] ? scalars[0] : x;
        const float v = __fmul_rn(scalars[1], g);
        const Sigmoid sigmoid = sigmoid_at<T>(exponential_below<T>(v), v);
        const Point p = weighted(g, sigmoid, scalars[1]);
        return {p.value, x <= scalars[0] ? p.slope : 0.0f};
    }
};

// clamp(x, -limit, limit) + offset, with scalars limit (shared with the gate) and offset. MUFU: 0.
struct ClampedLinearFunction : Masked {
    __device__ __forceinline__ static float value(float x, const float* scalars) {
        const float limit = scalars[0];
        return __fadd_rn(x > limit ? limit : x < -limit ? -limit : x, scalars[2]);
    }
    __device__ __forceinline__ static Point at(float x, const float* scalars) {
        return {value(x, scalars), fabsf(x) <= scalars[0] ? 1.0f : 0.0f};
    }
};

// ---- activations: functions of kInputs values, and their gradients ----

template <class Function, int kScalarCount = 0>
struct Unary {
    static constexpr int kInputs = 1;
    static constexpr int kScalars = kScalarCount;

    __device__ __forceinline__ static float value(const float (&x)[1], const float* scalars) {
        return Function::value(x[0], scalars);
    }
    // dx from dy; returns the value.
    __device__ __forceinline__ static float gradient(float dy, const float (&x)[1],
                                                     const float* scalars, float (&dx)[1]) {
        const Point p = Function::at(x[0], scalars);
        dx[0] = Function::gradient(dy, p.slope);
        return p.value;
    }
};

template <class Gate, class Linear, int kScalarCount = 0>
struct Gated {
    static constexpr int kInputs = 2;
    static constexpr int kScalars = kScalarCount;

    __device__ __forceinline__ static float value(const float (&x)[2], const float* scalars) {
        return mul_rn(Gate::value(x[0], scalars), Linear::value(x[1], scalars));
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&x)[2],
                                                     const float* scalars, float (&dx)[2]) {
        const Point gate = Gate::at(x[0], scalars);
        const Point linear = Linear::at(x[1], scalars);
        dx[0] = Gate::gradient(mul_rn(dy, linear.value), gate.slope);
        dx[1] = Linear::gradient(mul_rn(dy, gate.value), linear.slope);
        return mul_rn(gate.value, linear.value);
    }
};

template <class T>
using GELU = Unary<GeluFunction<T>>;
template <class T>
using GELUErf = Unary<GeluErfFunction<T>>;
template <class T>
using QGELU = Unary<QgeluFunction<T>>;
template <class T>
using ReLU = Unary<ReluFunction>;
template <class T>
using SReLU = Unary<SreluFunction>;
template <class T>
using SiLU = Unary<SiluFunction<T>>;
// Scalars beta, 1 / beta.
template <class T>
using TanhSReLU = Unary<SoftClippedSreluFunction, 2>;
template <class T>
using GLU = Gated<SigmoidFunction<T>, IdentityFunction>;
template <class T>
using GEGLU = Gated<GeluFunction<T>, IdentityFunction>;
template <class T>
using GEGLUErf = Gated<GeluErfFunction<T>, IdentityFunction>;
template <class T>
using QGEGLU = Gated<QgeluFunction<T>, IdentityFunction>;
template <class T>
using ReGLU = Gated<ReluFunction, IdentityFunction>;
template <class T>
using SReGLU = Gated<SreluFunction, IdentityFunction>;
template <class T>
using SwiGLU = Gated<SiluFunction<T>, IdentityFunction>;
// Scalars beta1, 1 / beta1, beta2, 1 / beta2. Forward takes 50 instructions an element, more than
// the memory bandwidth leaves time for.
template <class T>
using SiTUGLU = Gated<SoftClippedSiluFunction<T>, SoftClipFunction, 4>;
// Scalars limit, alpha, offset.
template <class T>
using ClampedSwiGLU = Gated<ClampedGateFunction<T>, ClampedLinearFunction, 3>;

}  // namespace fuser
