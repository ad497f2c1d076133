// Elements of a pipeline's dtype (fp32, fp16 or bf16): loads and stores of several at a time. All
// arithmetic is in fp32.
#pragma once

#include <fuser/core/hardware.cuh>

namespace fuser {

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

// The number of elements of T in the widest access, which is 16 bytes.
template <class T>
constexpr int kWidest = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(fp16 x) { return from_fp16(x.bits); }
__device__ __forceinline__ float to_float(bf16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

// Packs two fp32 into one word of two T, rounded to nearest. A word of fp32 holds one element.
template <class T>
__device__ __forceinline__ unsigned packed_pair(float low, float high);
template <>
__device__ __forceinline__ unsigned packed_pair<float>(float low, float) {
    return __float_as_uint(low);
}
template <>
__device__ __forceinline__ unsigned packed_pair<bf16>(float low, float high) {
    return to_bf16x2(low, high);
}
template <>
__device__ __forceinline__ unsigned packed_pair<fp16>(float low, float high) {
    return to_fp16x2(low, high);
}

template <class T>
__device__ __forceinline__ T from_float(float x) {
    return T{static_cast<unsigned short>(packed_pair<T>(x, 0.0f))};
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}

// x, rounded to T and back, as if it had been stored and loaded.
template <class T>
__device__ __forceinline__ float rounded_to(float x) {
    return to_float(from_float<T>(x));
}

// The type of an access of 4, 8 or 16 bytes.
template <int kWords>
struct Words;
template <>
struct Words<1> {
    using Type = unsigned;
};
template <>
struct Words<2> {
    using Type = uint2;
};
template <>
struct Words<4> {
    using Type = uint4;
};

// Loads kCount elements into fp32. `p` is aligned to all of them or to 16 bytes, and no thread of
// the kernel writes that memory.
template <int kCount, class T>
__device__ __forceinline__ void load(const T* p, float (&x)[kCount]) {
    constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
    constexpr int kStep = kWords < 4 ? kWords : 4;
    using Access = typename Words<kStep>::Type;
    unsigned words[kWords];
#pragma unroll
    for (int i = 0; i < kWords / kStep; ++i) {
        const Access part = load_streaming(reinterpret_cast<const Access*>(p) + i);
        memcpy(words + i * kStep, &part, sizeof(Access));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if constexpr (sizeof(T) == 4) {
            x[i] = __uint_as_float(words[i]);
        } else {
            x[i] = to_float(T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)});
        }
    }
}

// Stores kCount elements, rounded to nearest. `p` is aligned to all of them or to 16 bytes.
template <int kCount, class T>
__device__ __forceinline__ void store(T* p, const float (&x)[kCount]) {
    constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
    constexpr int kStep = kWords < 4 ? kWords : 4;
    using Access = typename Words<kStep>::Type;
    unsigned words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        if constexpr (sizeof(T) == 4) {
            words[i] = __float_as_uint(x[i]);
        } else {
            words[i] = packed_pair<T>(x[2 * i], x[2 * i + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < kWords / kStep; ++i) {
        Access part;
        memcpy(&part, words + i * kStep, sizeof(Access));
        store_streaming(reinterpret_cast<Access*>(p) + i, part);
    }
}

// Loads the first `count` of kCount elements one at a time, from any address; the rest is 0.
template <int kCount, class T>
__device__ __forceinline__ void load_tail(const T* p, int count, float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        x[i] = i < count ? to_float(p[i]) : 0.0f;
    }
}

template <int kCount, class T>
__device__ __forceinline__ void store_tail(T* p, int count, const float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < count) {
            p[i] = from_float<T>(x[i]);
        }
    }
}

}  // namespace fuser
