// Amaxes and scales, bit for bit as in the references.
//
// Under -ftz=true, fp32 arithmetic flushes subnormals, and so do fabsf and fmaxf. Therefore an amax
// is a maximum over the bits of |x| as unsigned integers, in which a NaN is above infinity and
// wins. Scales and amaxes are multiplied and divided by mul_rn and div_rn, which keep subnormals:
// bf16 inputs may be subnormal, and so is 1 / scale from 2^126 on.
#pragma once

#include <fuser/core/elements.cuh>

namespace fuser {

constexpr unsigned kInfinity = 0x7f800000u;
constexpr unsigned kNan = 0x7fc00000u;
constexpr float kFloatMax = 3.40282346638528859812e38f;
template <class T>
constexpr float kLargestFinite = kFloatMax;
template <>
constexpr float kLargestFinite<bf16> = 3.38953138925153547590e38f;
template <>
constexpr float kLargestFinite<fp16> = 65504.0f;

// ---- 8-bit elements ----

struct E4M3 {
    static constexpr float kMax = 448.0f;
    // Two bytes from two fp32, `low` in the low byte: to nearest, saturating, NaN as 0x7F.
    static __device__ __forceinline__ unsigned encoded(float low, float high) {
        return to_e4m3x2(low, high);
    }
    // Two bytes as two fp16, without rounding.
    static __device__ __forceinline__ unsigned to_fp16x2(unsigned pair) {
        return from_e4m3x2(static_cast<unsigned short>(pair));
    }
};

struct E5M2 {
    static constexpr float kMax = 57344.0f;
    static __device__ __forceinline__ unsigned encoded(float low, float high) {
        return to_e5m2x2(low, high);
    }
    // The upper byte of an fp16 is an E5M2.
    static __device__ __forceinline__ unsigned to_fp16x2(unsigned pair) {
        return (pair & 0xffu) << 8 | (pair & 0xff00u) << 16;
    }
};

// Eight bytes of E from eight fp32, the first in the lowest.
template <class E>
__device__ __forceinline__ uint2 encoded8(const float (&x)[8]) {
    return make_uint2(E::encoded(x[0], x[1]) | E::encoded(x[2], x[3]) << 16,
                      E::encoded(x[4], x[5]) | E::encoded(x[6], x[7]) << 16);
}

// Eight bytes of E in fp32.
template <class E>
__device__ __forceinline__ void decode8(uint2 bytes, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned pair = (i < 2 ? bytes.x : bytes.y) >> i % 2 * 16 & 0xffffu;
        const unsigned fp16x2 = E::to_fp16x2(pair);
        x[2 * i] = from_fp16(static_cast<unsigned short>(fp16x2));
        x[2 * i + 1] = from_fp16(static_cast<unsigned short>(fp16x2 >> 16));
    }
}

template <class E>
__device__ __forceinline__ float decode(unsigned byte) {
    return from_fp16(static_cast<unsigned short>(E::to_fp16x2(byte)));
}

// ---- magnitudes: the bits of |x|, in words of one fp32 or two 16-bit elements ----

template <class T>
__device__ __forceinline__ unsigned magnitudes(unsigned word) {
    return word & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu);
}

// The larger magnitude of each element of two words.
template <class T>
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    if constexpr (sizeof(T) == 4) {
        return max(a, b);
    } else {
        return max_u16x2(a, b);
    }
}

// One magnitude of a word, as the bits of an fp32.
template <class T>
__device__ __forceinline__ unsigned widened(unsigned word, int index) {
    if constexpr (sizeof(T) == 4) {
        return word;
    } else {
        return __float_as_uint(to_float(T{static_cast<unsigned short>(word >> index % 2 * 16)}));
    }
}

// The largest magnitude of a word, as the bits of an fp32.
template <class T>
__device__ __forceinline__ unsigned largest(unsigned word) {
    if constexpr (sizeof(T) == 4) {
        return word;
    } else {
        return widened<T>(max(word & 0xffffu, word >> 16), 0);
    }
}

// Raises `*amax` to the maximum of the `bits` of a warp; one or more of its threads write. The
// result does not depend on the order.
__device__ __forceinline__ void record_amax(unsigned bits, unsigned* amax) {
    const unsigned most = __reduce_max_sync(kAllLanes, bits);
    if (threadIdx.x % 32 == 0 && most > *static_cast<volatile unsigned*>(amax)) {
        atomicMax(amax, most);
    }
}

// ---- one fp32 scale: of a tensor, or of a block of 128 ----

// Amaxes between 2^-100 and 2^100. These, and the powers of two that follow from them, are far from
// both ends of fp32.
constexpr unsigned kOne = 0x3f800000u;
constexpr unsigned kSmallestPlain = kOne - (100u << 23);
constexpr unsigned kLargestPlain = kOne + (100u << 23);

// 1 / scale.
__device__ __forceinline__ float inverse_of(float scale, bool pow2) {
    const unsigned bits = __float_as_uint(scale);
    if (pow2 && bits - kSmallestPlain < kLargestPlain - kSmallestPlain) {
        return __uint_as_float(2u * kOne - bits);
    }
    return div_rn(1.0f, scale);
}

// `amax` and `eps` are the bits of numbers that are not negative.
__device__ __forceinline__ float scale_from_amax(unsigned amax, float max_fp8, bool pow2,
                                                 unsigned eps, float when_infinite) {
    amax = max(amax, eps);  // a NaN stays one
    // Computes the exponent with a borrow instead of a division. A quotient just below a power of
    // two is never rounded up to it: the significand of both maxima is 1.75, and 1.75 over a
    // significand that is one ulp larger is further from 1 than half an ulp of one.
    if (pow2 && amax - kSmallestPlain < kLargestPlain - kSmallestPlain) {
        return __uint_as_float(__float_as_uint(max_fp8) - amax + kOne & 0xff800000u);
    }
    if (amax == 0u || amax >= kInfinity) {
        return 1.0f;
    }
    float scale = div_rn(max_fp8, __uint_as_float(amax));
    if (__float_as_uint(scale) == kInfinity) {
        scale = when_infinite;
    }
    return pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

// ---- E8M0: a power of two for 32 elements ----

constexpr int kMxBlock = 32;

// The exponent of amax / max_fp8, rounded up to a power of two, from the bits of an amax.
__device__ __forceinline__ unsigned e8m0_from_amax(unsigned amax, float max_inverse) {
    const unsigned bits = __float_as_uint(mul_rn(__uint_as_float(amax), max_inverse));
    // 2^-127 and less give 0. A number that rounds up to infinity gives 0xFE, as infinity does.
    const unsigned exponent = min(bits + 0x7fffffu, 0x7f7fffffu) >> 23;
    return bits > kInfinity ? 0xffu : bits <= 0x00400000u ? 0u : exponent;
}

// 2^(e8m0 - 127), with NaN for 255; and its inverse. 2^-127 is a subnormal.
__device__ __forceinline__ float power_of_e8m0(unsigned e8m0) {
    const unsigned bits = e8m0 << 23;
    return __uint_as_float(e8m0 == 0u ? 0x00400000u : e8m0 == 255u ? kNan : bits);
}
__device__ __forceinline__ float inverse_of_e8m0(unsigned e8m0) {
    const unsigned bits = (254u - e8m0) << 23;  // 255 gives the bits of -infinity
    return __uint_as_float(e8m0 < 254u ? bits : bits | 0x00400000u);
}

// ---- NVFP4: an E4M3 scale for 16 elements below one fp32 scale for the tensor ----

constexpr int kNvBlock = 16;

// The words of scales for n elements of a row. Scales are padded to tiles of 128 x 4 bytes, one
// word for each of 128 rows.
__device__ __forceinline__ int scale_words(long long n) { return static_cast<int>((n + 63) / 64); }

struct Nvfp4Scale {
    float encode;  // scales the amax of the tensor to 448 * 6
    float decode;

    __device__ __forceinline__ explicit Nvfp4Scale(float amax) {
        encode = div_rn(448.0f * 6.0f, amax);
        encode = encode > kFloatMax ? kFloatMax : encode;
        encode = __float_as_uint(amax) == 0u ? 1.0f : encode;
        decode = reciprocal_rn(encode);
    }

    // Returns the E4M3 scales of four blocks, the first in the lowest byte, from the bits of their
    // amaxes. `factor` gets the numbers that the elements of each block are multiplied by.
    __device__ __forceinline__ unsigned blocks(const unsigned (&amax)[4],
                                               float (&factor)[4]) const {
        const float unit = mul_rn(encode, 1.0f / 6.0f);
        unsigned bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned pair = E4M3::encoded(mul_rn(__uint_as_float(amax[i]), unit),
                                                mul_rn(__uint_as_float(amax[i + 1]), unit));
            const unsigned fp16x2 = E4M3::to_fp16x2(pair);
            factor[i] = multiplier(from_fp16(static_cast<unsigned short>(fp16x2)));
            factor[i + 1] = multiplier(from_fp16(static_cast<unsigned short>(fp16x2 >> 16)));
            bytes |= pair << 8 * i;
        }
        return bytes;
    }

private:
    __device__ __forceinline__ float multiplier(float scale) const {
        const float inverse = reciprocal_rn(mul_rn(scale, decode));
        return inverse > kFloatMax ? kFloatMax : inverse;
    }
};

}  // namespace fuser
