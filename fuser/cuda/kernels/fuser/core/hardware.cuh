// Inline PTX: all of it is in this file. Each instruction has a fallback in plain C++ that gives
// the same bits.
//
// FUSER_EMULATED is defined when kernels are compiled for a CPU. The fallback also serves
// architectures that lack the instruction.
#pragma once

namespace fuser {

// The mask of all lanes of a warp.
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- loads and stores of 4, 8 or 16 bytes that are used once ----

// Only for memory that no thread of the kernel writes. An H200 takes 1 to 9% longer with
// L1::no_allocate; other hints make it no faster.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
#if defined(FUSER_EMULATED)
    return *p;
#else
    uint4 v;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
#endif
}

__device__ __forceinline__ uint2 load_streaming(const uint2* p) {
#if defined(FUSER_EMULATED)
    return *p;
#else
    uint2 v;
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
#endif
}

__device__ __forceinline__ unsigned load_streaming(const unsigned* p) {
#if defined(FUSER_EMULATED)
    return *p;
#else
    unsigned v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
#endif
}

__device__ __forceinline__ void store_streaming(uint4* p, uint4 v) { __stcs(p, v); }
__device__ __forceinline__ void store_streaming(uint2* p, uint2 v) { __stcs(p, v); }
__device__ __forceinline__ void store_streaming(unsigned* p, unsigned v) { __stcs(p, v); }

// Stores one word of a 32-byte sector that several blocks write. L2 keeps the sector longer than
// streamed data, so that it is complete before it goes to memory.
__device__ __forceinline__ void store_partial_sector(unsigned* p, unsigned v) {
#if defined(FUSER_EMULATED)
    *p = v;
#else
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(p), "r"(v), "l"(policy)
                 : "memory");
#endif
}

// ---- fp32 to 8 and 4 bits: to nearest, ties to even; overflow gives the largest finite ----

// Integers only: -ftz=true would flush inputs that round to a subnormal of the format.
template <int kExponentBits, int kMantissaBits, int kBias, unsigned kMax, unsigned kNan>
__device__ __forceinline__ unsigned encoded(float x) {
    constexpr int kSmallestNormal = 128 - kBias;  // as an exponent of fp32
    const unsigned bits = __float_as_uint(x);
    const unsigned magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return kNan;
    }
    const int exponent = max(static_cast<int>(magnitude >> 23), 1);  // 1 for subnormals too
    const unsigned significand = magnitude - (static_cast<unsigned>(exponent - 1) << 23);
    // Bits of the significand that do not fit the format. From 25 on, no bit is left.
    const int dropped = 23 - kMantissaBits + max(kSmallestNormal - exponent, 0);
    const int shift = min(dropped, 25);
    const unsigned odd = significand >> shift & 1u;
    const unsigned rounded = (significand + (1u << (shift - 1)) - 1u + odd) >> shift;
    const unsigned octave = static_cast<unsigned>(max(exponent - kSmallestNormal, 0));
    const unsigned code = min(rounded + (octave << kMantissaBits), kMax);
    return code | bits >> 31 << (kExponentBits + kMantissaBits);
}

// Two E4M3 bytes, `low` in the low one. NaN gives 0x7F.
__device__ __forceinline__ unsigned short to_e4m3x2(float low, float high) {
#if !defined(FUSER_EMULATED) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return static_cast<unsigned short>(encoded<4, 3, 7, 0x7e, 0x7f>(low) |
                                       encoded<4, 3, 7, 0x7e, 0x7f>(high) << 8);
#endif
}

// Two E5M2 bytes, `low` in the low one. NaN gives 0x7F.
__device__ __forceinline__ unsigned short to_e5m2x2(float low, float high) {
#if !defined(FUSER_EMULATED) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return static_cast<unsigned short>(encoded<5, 2, 15, 0x7b, 0x7f>(low) |
                                       encoded<5, 2, 15, 0x7b, 0x7f>(high) << 8);
#endif
}

// Two E2M1 values in a byte, `low` in the low nibble. NaN gives 7, which is +6.
__device__ __forceinline__ unsigned char to_e2m1x2(float low, float high) {
#if !defined(FUSER_EMULATED) && defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH__ >= 1000
    unsigned short pair;
    asm("{ .reg .b8 byte;\n"
        "  cvt.rn.satfinite.e2m1x2.f32 byte, %1, %2;\n"
        "  mov.b16 %0, {byte, 0}; }"
        : "=h"(pair)
        : "f"(high), "f"(low));
    return static_cast<unsigned char>(pair);
#else
    return static_cast<unsigned char>(encoded<2, 1, 1, 7, 7>(low) | encoded<2, 1, 1, 7, 7>(high)
                                                                        << 4);
#endif
}

// ---- 16 bits and fp32 ----

// Two bf16, `low` in the low half; overflow gives infinity. NaN gives 0x7FFF.
__device__ __forceinline__ unsigned to_bf16x2(float low, float high) {
#if defined(FUSER_EMULATED)
    return encoded<8, 7, 127, 0x7f80, 0x7fff>(low) | encoded<8, 7, 127, 0x7f80, 0x7fff>(high) << 16;
#else
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// Two fp16, `low` in the low half; overflow gives infinity. NaN gives 0x7FFF.
__device__ __forceinline__ unsigned to_fp16x2(float low, float high) {
#if defined(FUSER_EMULATED)
    return encoded<5, 10, 15, 0x7c00, 0x7fff>(low) | encoded<5, 10, 15, 0x7c00, 0x7fff>(high) << 16;
#else
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

__device__ __forceinline__ float from_fp16(unsigned short bits) {
#if defined(FUSER_EMULATED)
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1fu;
    const unsigned mantissa = bits & 0x3ffu;
    if (exponent == 0u) {  // a subnormal of fp16 is a normal fp32
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
        return __uint_as_float(__float_as_uint(magnitude) | sign);
    }
    const unsigned wide = exponent == 0x1fu ? 0xffu : exponent + 112u;
    return __uint_as_float(sign | wide << 23 | mantissa << 13);
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#endif
}

// ---- fp32 arithmetic to nearest: subnormals are kept under -ftz, and nothing is contracted ----

#if defined(FUSER_EMULATED)
// The emulator computes in 80 bits, which are not flushed; volatile stops the compiler from using
// 32 bits. Every NaN becomes the NaN that a GPU writes.
__device__ __forceinline__ float shortened(volatile long double x) {
    const float y = static_cast<float>(x);
    return y == y ? y : __uint_as_float(0x7fffffffu);
}
#endif

__device__ __forceinline__ float add_rn(float a, float b) {
#if defined(FUSER_EMULATED)
    return shortened(static_cast<long double>(a) + b);
#else
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#endif
}

__device__ __forceinline__ float mul_rn(float a, float b) {
#if defined(FUSER_EMULATED)
    return shortened(static_cast<long double>(a) * b);
#else
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#endif
}

// |a| b. Without -ftz, the absolute value is a modifier of the operand and costs no instruction.
__device__ __forceinline__ float mul_magnitude_rn(float a, float b) {
#if defined(FUSER_EMULATED)
    return mul_rn(__uint_as_float(__float_as_uint(a) & 0x7fffffffu), b);
#else
    float c;
    asm("{ .reg .f32 magnitude;\n"
        "  abs.f32 magnitude, %1;\n"
        "  mul.rn.f32 %0, magnitude, %2; }"
        : "=f"(c)
        : "f"(a), "f"(b));
    return c;
#endif
}

__device__ __forceinline__ float div_rn(float a, float b) {
#if defined(FUSER_EMULATED)
    return shortened(static_cast<long double>(a) / b);
#else
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#endif
}

__device__ __forceinline__ float sqrt_rn(float a) {
#if defined(FUSER_EMULATED)
    return shortened(sqrtl(static_cast<long double>(a)));
#else
    float b;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(b) : "f"(a));
    return b;
#endif
}

// 1 / x, with the bits of div_rn(1, x) in fewer instructions.
__device__ __forceinline__ float reciprocal_rn(float x) {
#if defined(FUSER_EMULATED)
    return div_rn(1.0f, x);
#else
    float y;
    asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1 / x within an ulp, in one instruction less than `__fdividef(1, x)`.
__device__ __forceinline__ float reciprocal(float x) {
#if defined(FUSER_EMULATED)
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ---- pairs of 16-bit numbers ----

// The larger of each pair of unsigned halves.
__device__ __forceinline__ unsigned max_u16x2(unsigned a, unsigned b) {
#if !defined(FUSER_EMULATED) && __CUDA_ARCH__ >= 900
    unsigned c;
    asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    return max(a & 0xffffu, b & 0xffffu) | max(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// Two E4M3 bytes as two fp16, without rounding.
__device__ __forceinline__ unsigned from_e4m3x2(unsigned short pair) {
#if !defined(FUSER_EMULATED) && __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
#else
    unsigned halves = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned byte = pair >> 8 * i & 0xffu, exponent = byte >> 3 & 0xfu;
        unsigned half = (byte & 7u) << 7;
        if ((byte & 0x7fu) == 0x7fu) {
            half = 0x7fffu;
        } else if (exponent > 0u) {
            half |= (exponent + 8u) << 10;
        } else if (half > 0u) {  // a subnormal of E4M3 is a normal fp16
            const int up = __clz(static_cast<int>(half)) - 21;
            half = (half << up & 0x3ffu) | static_cast<unsigned>(9 - up) << 10;
        }
        halves |= (half | (byte & 0x80u) << 8) << 16 * i;
    }
    return halves;
#endif
}

#if !defined(FUSER_EMULATED) && defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH__ >= 1000
constexpr bool kConvertsToE2m1 = true;
#else
constexpr bool kConvertsToE2m1 = false;
#endif

// Eight E2M1 values in a word, the first in the lowest nibble. Uses the instruction that converts
// two.
__device__ __forceinline__ unsigned to_e2m1x8(const float (&x)[8]) {
    unsigned codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes |= static_cast<unsigned>(to_e2m1x2(x[2 * i], x[2 * i + 1])) << 8 * i;
    }
    return codes;
}

// Eight E2M1 values without that instruction. `magnitude` is in units of kE2m1Unit and below 7;
// `sign` gives the signs. In these units an E2M1 number is an E5M2 number with twice its code, in
// its subnormals and its three octaves.
constexpr float kE2m1Unit = 0x1p-14f;

__device__ __forceinline__ unsigned to_e2m1x8_from_units(const float (&magnitude)[8],
                                                         const float (&sign)[8]) {
    float rounded[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // q has the octave of x, or the lowest octave, whose step is also that of subnormals. One
        // ulp of q 2^22 is one step, so the difference to x is rounded to the grid, ties to even.
        // Below that octave an ulp is half a step, but x is then so close to two steps that it
        // rounds to them.
        const float x = magnitude[i];
        const float q = fmaxf(x, 1.5f * kE2m1Unit);
        const float difference = fmaf(q, 0x1p22f, -x);
        rounded[i] = copysignf(fmaf(q, 0x1p22f, -difference), sign[i]);
    }
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int first = i / 2 + i % 2 * 4;  // 0 and 2, 4 and 6, 1 and 3, 5 and 7
        pairs[i] = to_e5m2x2(rounded[first], rounded[first + 2]);
    }
    const unsigned even = pairs[0] | pairs[1] << 16, odd = pairs[2] | pairs[3] << 16;
    const unsigned codes = (even >> 1 & 0x07070707u) | (odd << 3 & 0x70707070u);
    const unsigned signs = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    return codes | signs;
}

// ---- sums of pairs of 16-bit numbers ----

// Two bf16 sums; subnormals are kept. The product with 1 is exact, so each sum is rounded once.
// torch rounds to fp32 and then to bf16, which gives the same bits because 24 >= 2 * 8 + 2.
__device__ __forceinline__ unsigned add_bf16x2(unsigned a, unsigned b) {
#if defined(FUSER_EMULATED)
    return to_bf16x2(add_rn(__uint_as_float(a << 16), __uint_as_float(b << 16)),
                     add_rn(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u)));
#else
    unsigned sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return sum;
#endif
}

// Two fp16 sums, in the same way: 24 >= 2 * 11 + 2.
__device__ __forceinline__ unsigned add_fp16x2(unsigned a, unsigned b) {
#if defined(FUSER_EMULATED)
    return to_fp16x2(
        from_fp16(static_cast<unsigned short>(a)) + from_fp16(static_cast<unsigned short>(b)),
        from_fp16(static_cast<unsigned short>(a >> 16)) +
            from_fp16(static_cast<unsigned short>(b >> 16)));
#else
    unsigned sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
#endif
}

// ---- asynchronous copies from global to shared memory ----

// Copies 8 or 16 bytes; both addresses are aligned to that size.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    static_assert(kBytes == 8 || kBytes == 16);
#if defined(FUSER_EMULATED)
    fuser_emulator::copy_later(shared, global, kBytes);
#else
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (kBytes == 16) {  // bypasses L1
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
    }
#endif
}

// Makes one group of the copies since the last call.
__device__ __forceinline__ void close_copies() {
#if defined(FUSER_EMULATED)
    fuser_emulator::close_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kLeft groups of this thread are unfinished. Other threads see the data after
// a barrier.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
#if defined(FUSER_EMULATED)
    fuser_emulator::wait_for_copies(kLeft);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

}  // namespace fuser
