// Packed elements: a thread keeps them in registers with the bits that they have in memory, so that
// 16-bit elements take half the registers of fp32.
#pragma once

#include <fuser/core/elements.cuh>

namespace fuser {

// kCount elements of T: one element, or an even number of 16-bit ones.
template <class T, int kCount>
struct Packed {
    static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
    static constexpr int kStep = kWords < 4 ? kWords : 4;
    using Access = typename Words<kStep>::Type;

    unsigned words[kWords];

    __device__ __forceinline__ unsigned element_bits(int i) const {
        if constexpr (sizeof(T) == 4) {
            return words[i];
        } else {
            return words[i / 2] >> i % 2 * 16 & 0xffffu;
        }
    }
    // A word that depends on every load, so a use of it cannot come before them.
    __device__ __forceinline__ unsigned bits() const {
        unsigned all = words[0];
#pragma unroll
        for (int i = kStep; i < kWords; i += kStep) {
            all ^= words[i];
        }
        return all;
    }
    // Makes every element depend on `zero`, which is 0.
    __device__ __forceinline__ void wait_for(unsigned zero) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            words[i] ^= zero;
        }
    }

    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[i]);
        } else {
            return to_float(T{static_cast<unsigned short>(element_bits(i))});
        }
    }
};

template <class T>
struct Packed<T, 1> {
    T element;

    __device__ __forceinline__ unsigned bits() const { return 0; }
    __device__ __forceinline__ void wait_for(unsigned) {}
    __device__ __forceinline__ float operator[](int) const { return to_float(element); }
};

template <class T, int kCount>
__device__ __forceinline__ Packed<T, kCount> zeros() {
    Packed<T, kCount> result;
#pragma unroll
    for (int i = 0; i < result.kWords; ++i) {
        result.words[i] = 0u;
    }
    return result;
}

// Rounded to nearest.
template <class T, int kCount>
__device__ __forceinline__ Packed<T, kCount> packed(const float (&x)[kCount]) {
    Packed<T, kCount> result;
#pragma unroll
    for (int i = 0; i < result.kWords; ++i) {
        if constexpr (sizeof(T) == 4) {
            result.words[i] = __float_as_uint(x[i]);
        } else {
            result.words[i] = packed_pair<T>(x[2 * i], x[2 * i + 1]);
        }
    }
    return result;
}

template <class T>
__device__ __forceinline__ unsigned added_words(unsigned a, unsigned b);
template <>
__device__ __forceinline__ unsigned added_words<float>(unsigned a, unsigned b) {
    return __float_as_uint(add_rn(__uint_as_float(a), __uint_as_float(b)));
}
template <>
__device__ __forceinline__ unsigned added_words<fp16>(unsigned a, unsigned b) {
    return add_fp16x2(a, b);
}
template <>
__device__ __forceinline__ unsigned added_words<bf16>(unsigned a, unsigned b) {
    return add_bf16x2(a, b);
}

// The sums of the elements, with the bits of torch: rounded once, subnormals kept. U is T, or has 16
// bits and T is fp32, to which torch promotes it.
template <class T, class U, int kCount>
__device__ __forceinline__ Packed<T, kCount> added(const Packed<T, kCount>& a,
                                                   const Packed<U, kCount>& b) {
    Packed<T, kCount> sum;
    if constexpr (sizeof(T) == sizeof(U)) {
#pragma unroll
        for (int i = 0; i < sum.kWords; ++i) {
            sum.words[i] = added_words<T>(a.words[i], b.words[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < sum.kWords; ++i) {
            sum.words[i] = __float_as_uint(add_rn(a[i], b[i]));
        }
    }
    return sum;
}

// Adds elements to fp32 numbers that are not rounded to T yet.
template <class T, int kCount>
__device__ __forceinline__ void add_packed(float (&x)[kCount], const Packed<T, kCount>& y) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        x[i] = add_rn(x[i], y[i]);
    }
}

// The largest magnitude among the first `count` elements, as the bits of T. Integer comparison puts
// NaN above infinity and keeps subnormals, which fmaxf flushes.
template <class T, int kCount>
__device__ __forceinline__ unsigned largest_magnitude(const Packed<T, kCount>& x, int count) {
    constexpr unsigned kMagnitude = sizeof(T) == 4 ? 0x7fffffffu : 0x7fffu;
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        largest = i < count ? max(largest, x.element_bits(i) & kMagnitude) : largest;
    }
    return largest;
}

// The bits of a magnitude in T as the bits of the same number in fp32.
template <class T>
__device__ __forceinline__ unsigned magnitude_as_fp32(unsigned bits) {
    if constexpr (sizeof(T) == 4) {
        return bits;
    } else {
        return __float_as_uint(to_float(T{static_cast<unsigned short>(bits)}));
    }
}

// ---- loads and stores ----

// Loads data that is read once. `p` is aligned to all elements or to 16 bytes, and no thread of the
// kernel writes that memory.
template <int kCount, class T>
__device__ __forceinline__ Packed<T, kCount> load_packed(const T* p) {
    using Result = Packed<T, kCount>;
    Result result;
    if constexpr (kCount == 1) {
        result.element = *p;
    } else {
#pragma unroll
        for (int i = 0; i < Result::kWords / Result::kStep; ++i) {
            using Access = typename Result::Access;
            const Access part = load_streaming(reinterpret_cast<const Access*>(p) + i);
            memcpy(result.words + i * Result::kStep, &part, sizeof(Access));
        }
    }
    return result;
}

// The same for memory that the thread overwrites after that.
template <int kCount, class T>
__device__ __forceinline__ Packed<T, kCount> load_packed_to_overwrite(const T* p) {
    using Result = Packed<T, kCount>;
    Result result;
    if constexpr (kCount == 1) {
        result.element = *p;
    } else {
#pragma unroll
        for (int i = 0; i < Result::kWords / Result::kStep; ++i) {
            using Access = typename Result::Access;
            const Access part = reinterpret_cast<const Access*>(p)[i];
            memcpy(result.words + i * Result::kStep, &part, sizeof(Access));
        }
    }
    return result;
}

// As load_packed, for data that other blocks read too.
template <int kCount, class T>
__device__ __forceinline__ Packed<T, kCount> load_packed_cached(const T* p) {
    using Result = Packed<T, kCount>;
    Result result;
#pragma unroll
    for (int i = 0; i < Result::kWords / Result::kStep; ++i) {
        using Access = typename Result::Access;
        const Access part = __ldg(reinterpret_cast<const Access*>(p) + i);
        memcpy(result.words + i * Result::kStep, &part, sizeof(Access));
    }
    return result;
}

// Loads the first `count` elements one at a time, from any address; the rest is 0.
template <int kCount, class T>
__device__ __forceinline__ Packed<T, kCount> load_packed_tail(const T* p, int count) {
    Packed<T, kCount> result = zeros<T, kCount>();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if constexpr (sizeof(T) == 4) {
            result.words[i] = i < count ? __float_as_uint(p[i]) : 0u;
        } else {
            const unsigned element = i < count ? p[i].bits : 0u;
            result.words[i / 2] |= element << i % 2 * 16;
        }
    }
    return result;
}

// kStreams is for data that is not read soon.
template <bool kStreams = true, class T, int kCount>
__device__ __forceinline__ void store_packed(T* p, const Packed<T, kCount>& x) {
    using Source = Packed<T, kCount>;
    using Access = typename Source::Access;
#pragma unroll
    for (int i = 0; i < Source::kWords / Source::kStep; ++i) {
        Access part;
        memcpy(&part, x.words + i * Source::kStep, sizeof(part));
        if constexpr (kStreams) {
            store_streaming(reinterpret_cast<Access*>(p) + i, part);
        } else {
            reinterpret_cast<Access*>(p)[i] = part;
        }
    }
}

template <class T, int kCount>
__device__ __forceinline__ void store_packed_tail(T* p, int count, const Packed<T, kCount>& x) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < count) {
            if constexpr (sizeof(T) == 4) {
                p[i] = __uint_as_float(x.words[i]);
            } else {
                p[i] = T{static_cast<unsigned short>(x.element_bits(i))};
            }
        }
    }
}

// Makes the first vector wait until all are loaded. A compiler that is short of registers would
// otherwise compute the first before it loads the next, with one load in flight at a time.
template <int kVectors, class Vector>
__device__ __forceinline__ void wait_for_all(Vector (&vectors)[kVectors]) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        bits ^= vectors[i].bits();
    }
    vectors[0].wait_for(bits & (blockDim.z - 1u));  // blockDim.z is 1; the compiler does not know
}

// Reads pieces of 16 bytes that are `step` pieces apart, in memory that this kernel wrote.
template <class T, int kCount>
__device__ __forceinline__ Packed<T, kCount> read_pieces(const uint4* pieces, int step) {
    Packed<T, kCount> result;
#pragma unroll
    for (int i = 0; i < result.kWords / 4; ++i) {
        const uint4 piece = pieces[i * step];
        memcpy(result.words + i * 4, &piece, sizeof(piece));
    }
    return result;
}

// Reads and writes memory that this kernel wrote, aligned to all elements or to 16 bytes.
template <class T, int kCount>
__device__ __forceinline__ Packed<T, kCount> read_packed(const void* p) {
    using Result = Packed<T, kCount>;
    using Access = typename Result::Access;
    Result result;
#pragma unroll
    for (int i = 0; i < Result::kWords / Result::kStep; ++i) {
        const Access part = static_cast<const Access*>(p)[i];
        memcpy(result.words + i * Result::kStep, &part, sizeof(Access));
    }
    return result;
}

template <class T, int kCount>
__device__ __forceinline__ void write_packed(void* p, const Packed<T, kCount>& x) {
    using Source = Packed<T, kCount>;
    using Access = typename Source::Access;
#pragma unroll
    for (int i = 0; i < Source::kWords / Source::kStep; ++i) {
        Access part;
        memcpy(&part, x.words + i * Source::kStep, sizeof(Access));
        static_cast<Access*>(p)[i] = part;
    }
}

}  // namespace fuser
