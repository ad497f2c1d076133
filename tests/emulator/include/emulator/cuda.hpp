// CUDA C++ as plain C++: what a kernel finds without including anything. Precompiled once.
#pragma once

#define FUSER_EMULATED 1

#include <math.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <vector_functions.h>

#include <emulator/runtime.hpp>

// A toolkit's own headers leave these to its compiler.
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int warpSize = 32;

// ---- bits ----

namespace fuser_emulator {

template <typename To, typename From>
To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// A value of up to 8 bytes, copied as its bytes though pairs of bf16 have a constructor, and back.
template <typename T>
std::uint64_t packed(T value) {
    static_assert(sizeof(T) <= 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <typename T>
T unpacked(std::uint64_t bits) {
    T value;
    std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
    return value;
}

}  // namespace fuser_emulator

inline int __float_as_int(float x) { return fuser_emulator::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return fuser_emulator::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return fuser_emulator::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return fuser_emulator::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return fuser_emulator::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return fuser_emulator::bits_as<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) {
        result |= (x >> bit & 1u) << (31 - bit);
    }
    return result;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> (4 * i);
        unsigned byte = bytes >> (8 * (choice & 7)) & 0xff;
        if (choice & 8) {
            byte = byte & 0x80 ? 0xff : 0;
        }
        result |= byte << (8 * i);
    }
    return result;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return ((static_cast<std::uint64_t>(high) << 32 | low) << (shift & 31)) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31);
}

inline int __mulhi(int a, int b) { return static_cast<long long>(a) * b >> 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<std::uint64_t>(a) * b >> 32;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}

// ---- arithmetic: each the correctly rounded operation; subnormals are flushed by the worker ----

namespace fuser_emulator {

// The GPU's abs, max and min flush too (abs.ftz.f32); the CPU's are no arithmetic and do not.
inline float flushed(float x) {
    const std::uint32_t bits = bits_as<std::uint32_t>(x);
    return (bits & 0x7f800000u) == 0 ? bits_as<float>(bits & 0x80000000u) : x;
}
inline float absolute(float x) { return flushed(::fabsf(x)); }
inline float larger(float a, float b) { return ::fmaxf(flushed(a), flushed(b)); }
inline float smaller(float a, float b) { return ::fminf(flushed(a), flushed(b)); }

}  // namespace fuser_emulator

#define fabsf fuser_emulator::absolute
#define fmaxf fuser_emulator::larger
#define fminf fuser_emulator::smaller

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(double{x})); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(double{x})); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678f); }
inline float fdividef(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A>>>
std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_same_v<T, float>) {
        return fminf(a, b);
    } else if constexpr (std::is_floating_point_v<T>) {
        return fmin(static_cast<T>(a), static_cast<T>(b));
    } else {
        return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
    }
}

template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A>>>
std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_same_v<T, float>) {
        return fmaxf(a, b);
    } else if constexpr (std::is_floating_point_v<T>) {
        return fmax(static_cast<T>(a), static_cast<T>(b));
    } else {
        return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
    }
}

// Conversions to integers saturate, and a NaN becomes 0.
namespace fuser_emulator {

template <typename T>
T saturated(double rounded) {
    if (rounded != rounded) {
        return 0;
    }
    if (rounded <= static_cast<double>(std::numeric_limits<T>::min())) {
        return std::numeric_limits<T>::min();
    }
    if (rounded >= static_cast<double>(std::numeric_limits<T>::max())) {
        return std::numeric_limits<T>::max();
    }
    return static_cast<T>(rounded);
}

}  // namespace fuser_emulator

inline int __float2int_rn(float x) { return fuser_emulator::saturated<int>(nearbyint(x)); }
inline int __float2int_rz(float x) { return fuser_emulator::saturated<int>(trunc(x)); }
inline int __float2int_rd(float x) { return fuser_emulator::saturated<int>(floor(x)); }
inline int __float2int_ru(float x) { return fuser_emulator::saturated<int>(ceil(x)); }
inline unsigned __float2uint_rn(float x) { return fuser_emulator::saturated<unsigned>(nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return fuser_emulator::saturated<unsigned>(trunc(x)); }
inline unsigned __float2uint_rd(float x) { return fuser_emulator::saturated<unsigned>(floor(x)); }
inline unsigned __float2uint_ru(float x) { return fuser_emulator::saturated<unsigned>(ceil(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }

// ---- memory ----

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}

template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldca(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> T __ldlu(const T* p) { return *p; }
template <typename T> T __ldcv(const T* p) { return *p; }
template <typename T> void __stwb(T* p, T value) { *p = value; }
template <typename T> void __stcg(T* p, T value) { *p = value; }
template <typename T> void __stcs(T* p, T value) { *p = value; }
template <typename T> void __stwt(T* p, T value) { *p = value; }

// ---- atomics: threads change places at barriers and warp collectives alone ----

namespace fuser_emulator {

// The type of a second argument that converts to the first one's, as CUDA's overloads let it.
template <typename T>
using Same = std::common_type_t<T>;

template <typename T>
T exchanged(T* address, T value) {
    const T old = *address;
    *address = value;
    return old;
}

}  // namespace fuser_emulator

template <typename T>
T atomicAdd(T* address, fuser_emulator::Same<T> value) {
    if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        return fuser_emulator::exchanged(
            address, static_cast<T>(static_cast<U>(*address) + static_cast<U>(value)));
    } else {
        return fuser_emulator::exchanged(address, static_cast<T>(*address + value));
    }
}

template <typename T>
T atomicSub(T* address, fuser_emulator::Same<T> value) {
    using U = std::make_unsigned_t<T>;
    return fuser_emulator::exchanged(
        address, static_cast<T>(static_cast<U>(*address) - static_cast<U>(value)));
}

template <typename T>
T atomicMax(T* address, fuser_emulator::Same<T> value) {
    static_assert(std::is_integral_v<T>, "CUDA has no atomicMax of floating-point numbers");
    return fuser_emulator::exchanged(address, std::max<T>(*address, value));
}

template <typename T>
T atomicMin(T* address, fuser_emulator::Same<T> value) {
    static_assert(std::is_integral_v<T>, "CUDA has no atomicMin of floating-point numbers");
    return fuser_emulator::exchanged(address, std::min<T>(*address, value));
}

template <typename T>
T atomicExch(T* address, fuser_emulator::Same<T> value) {
    return fuser_emulator::exchanged(address, static_cast<T>(value));
}

template <typename T>
T atomicCAS(T* address, fuser_emulator::Same<T> compare, fuser_emulator::Same<T> value) {
    const T old = *address;
    if (old == compare) {
        *address = value;
    }
    return old;
}

template <typename T>
T atomicAnd(T* address, fuser_emulator::Same<T> value) {
    return fuser_emulator::exchanged(address, static_cast<T>(*address & value));
}

template <typename T>
T atomicOr(T* address, fuser_emulator::Same<T> value) {
    return fuser_emulator::exchanged(address, static_cast<T>(*address | value));
}

template <typename T>
T atomicXor(T* address, fuser_emulator::Same<T> value) {
    return fuser_emulator::exchanged(address, static_cast<T>(*address ^ value));
}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return fuser_emulator::exchanged(address, *address >= limit ? 0u : *address + 1u);
}

inline unsigned atomicDec(unsigned* address, unsigned limit) {
    return fuser_emulator::exchanged(
        address, *address == 0u || *address > limit ? limit : *address - 1u);
}

// ---- barriers and warp collectives: the last two parameters say where the source calls them ----

#define FUSER_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define FUSER_SITE(name) fuser_emulator::Site{name, file, line}

inline void __syncthreads(FUSER_HERE) {
    fuser_emulator::block_barrier(FUSER_SITE("__syncthreads"), false);
}
inline int __syncthreads_count(int predicate, FUSER_HERE) {
    return fuser_emulator::block_barrier(FUSER_SITE("__syncthreads_count"), predicate != 0);
}
inline int __syncthreads_or(int predicate, FUSER_HERE) {
    return fuser_emulator::block_barrier(FUSER_SITE("__syncthreads_or"), predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate, FUSER_HERE) {
    return fuser_emulator::block_barrier(FUSER_SITE("__syncthreads_and"), predicate == 0) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, FUSER_HERE) {
    fuser_emulator::meet(FUSER_SITE("__syncwarp"), mask, 0);
}

// The calling lane alone: an answer that CUDA allows, since it promises no convergence.
inline unsigned __activemask() { return 1u << fuser_emulator::lane(); }

inline unsigned __ballot_sync(unsigned mask, int predicate, FUSER_HERE) {
    const auto& met = fuser_emulator::meet(FUSER_SITE("__ballot_sync"), mask, predicate != 0);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        result |= (met.present >> lane & 1u & met.values[lane]) << lane;
    }
    return result;
}
inline int __any_sync(unsigned mask, int predicate, FUSER_HERE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, FUSER_HERE) {
    return __ballot_sync(mask, predicate == 0, file, line) == 0;
}

namespace fuser_emulator {

template <typename T>
T shuffled(Site site, unsigned mask, T value, unsigned source) {
    const Meeting& met = meet(site, mask, packed(value));
    if (!(met.present >> source & 1u)) {
        fail("%s at %s:%d reads lane %u, which took no part", site.function, site.file, site.line,
             source);
    }
    return unpacked<T>(met.values[source]);
}

}  // namespace fuser_emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, FUSER_HERE) {
    const unsigned segment = fuser_emulator::lane() & ~(width - 1u);
    return fuser_emulator::shuffled(FUSER_SITE("__shfl_sync"), mask, value,
                                    segment | (source & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FUSER_HERE) {
    const unsigned lane = fuser_emulator::lane();
    const bool inside = (lane & (width - 1u)) >= delta;
    return fuser_emulator::shuffled(FUSER_SITE("__shfl_up_sync"), mask, value,
                                    inside ? lane - delta : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, FUSER_HERE) {
    const unsigned lane = fuser_emulator::lane();
    const bool inside = (lane & (width - 1u)) + delta < static_cast<unsigned>(width);
    return fuser_emulator::shuffled(FUSER_SITE("__shfl_down_sync"), mask, value,
                                    inside ? lane + delta : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, FUSER_HERE) {
    const unsigned lane = fuser_emulator::lane();
    const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
    const bool inside = source <= (lane | (width - 1u));
    return fuser_emulator::shuffled(FUSER_SITE("__shfl_xor_sync"), mask, value,
                                    inside ? source : lane);
}

namespace fuser_emulator {

template <typename T, typename Combine>
T reduced(Site site, unsigned mask, T value, Combine combine) {
    static_assert(sizeof(T) == 4 && std::is_integral_v<T>);
    const Meeting& met = meet(site, mask, packed(value));
    T result = value;
    for (unsigned other = 0; other < 32; ++other) {
        if (met.present >> other & 1u && other != lane()) {
            result = combine(result, unpacked<T>(met.values[other]));
        }
    }
    return result;
}

}  // namespace fuser_emulator

#define FUSER_REDUCTION(name, expression)                                                \
    template <typename T>                                                                \
    T name(unsigned mask, T value, FUSER_HERE) {                                         \
        return fuser_emulator::reduced(FUSER_SITE(#name), mask, value, [](T a, T b) -> T { \
            return expression;                                                           \
        });                                                                              \
    }
FUSER_REDUCTION(__reduce_add_sync, static_cast<unsigned>(a) + static_cast<unsigned>(b))
FUSER_REDUCTION(__reduce_min_sync, std::min(a, b))
FUSER_REDUCTION(__reduce_max_sync, std::max(a, b))
FUSER_REDUCTION(__reduce_and_sync, a& b)
FUSER_REDUCTION(__reduce_or_sync, a | b)
FUSER_REDUCTION(__reduce_xor_sync, a ^ b)
#undef FUSER_REDUCTION

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, FUSER_HERE) {
    const auto& met =
        fuser_emulator::meet(FUSER_SITE("__match_any_sync"), mask, fuser_emulator::packed(value));
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        const bool same = met.values[lane] == fuser_emulator::packed(value);
        result |= (met.present >> lane & 1u & same) << lane;
    }
    return result;
}

#undef FUSER_HERE
#undef FUSER_SITE

// ---- ends of a kernel ----

#define __trap() fuser_emulator::fail("__trap at %s:%d", __FILE__, __LINE__)
#define __builtin_assume(condition)                                                       \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fuser_emulator::fail("%s is assumed at %s:%d and false", #condition, __FILE__, \
                                 __LINE__);                                               \
        }                                                                                 \
    } while (false)

// ---- the table at the end of a generated source ----

namespace fuser_emulator {

template <typename T>
constexpr Parameter parameter() {
    if constexpr (std::is_pointer_v<T>) {
        return {sizeof(T), 'p'};
    } else if constexpr (std::is_floating_point_v<T>) {
        return {sizeof(T), 'f'};
    } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
        return {sizeof(T), 'i'};
    } else {
        return {sizeof(T), 's'};
    }
}

template <typename... P, std::size_t... I>
void call(void (*kernel)(), void* const* arguments, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(P...)>(kernel)(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
}

template <typename... P>
Entry entry(const char* name, void (*kernel)(P...)) {
    static const Parameter parameters[] = {parameter<P>()..., {0, 0}};
    return {name, reinterpret_cast<void (*)()>(kernel),
            [](void (*untyped)(), void* const* arguments) {
                call<P...>(untyped, arguments, std::index_sequence_for<P...>());
            },
            parameters, sizeof...(P)};
}

}  // namespace fuser_emulator
