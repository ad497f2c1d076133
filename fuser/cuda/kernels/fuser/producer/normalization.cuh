// Producers of normalized values and of their gradients.
#pragma once

#include <fuser/core/norms.cuh>
#include <fuser/core/vector.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

// ---- 8 columns of a row ----

template <bool kAligned, class T>
__device__ __forceinline__ void load_vector(const T* p, int count, float (&x)[kPatch]) {
    if constexpr (kAligned) {
        load<kPatch>(p, x);
    } else {
        load_tail<kPatch>(p, count, x);
    }
}

// The same for data that other threads read too.
template <bool kAligned, class P>
__device__ __forceinline__ void load_shared_vector(const P* p, int count, float (&x)[kPatch]) {
    if constexpr (kAligned) {
        const Packed<P, kPatch> loaded = load_packed_cached<kPatch>(p);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            x[i] = loaded[i];
        }
    } else {
        load_tail<kPatch>(p, count, x);
    }
}

// The type of gamma and beta if there are none.
struct NoParameters {};
template <class P>
constexpr bool kHasParameters = true;
template <>
constexpr bool kHasParameters<NoParameters> = false;

// gamma, plus one if it is zero-centered; one if there is none.
template <bool kAligned, class P>
__device__ __forceinline__ void load_gain_vector(const P* gamma, float offset, const Tile& tile,
                                                 float (&gain)[kPatch]) {
    if constexpr (kHasParameters<P>) {
        load_shared_vector<kAligned>(gamma + tile.column, tile.columns_left, gain);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            gain[i] = offset != 0.0f ? gain[i] + offset : gain[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            gain[i] = 1.0f;
        }
    }
}

// Makes the first row wait until all rows are loaded. A compiler that is short of registers would
// otherwise compute the first before it loads the next, with one load in flight at a time.
__device__ __forceinline__ void wait_for_bits(unsigned bits, float (&x)[kPatch]) {
    const unsigned zero = bits & (blockDim.z - 1u);  // blockDim.z is 1; the compiler does not know
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        x[i] = __uint_as_float(__float_as_uint(x[i]) ^ zero);
    }
}

// Sets row i of a patch; positions after the edges may hold values, and become 0.
template <bool kAligned, class T>
__device__ __forceinline__ void set_vector(const Tile& tile, bool is_there, float (&x)[kPatch],
                                           int i, Patch<T>& patch) {
    round_all<T>(x);
    if constexpr (!kAligned) {
#pragma unroll
        for (int k = 0; k < kPatch; ++k) {
            x[k] = k < tile.columns_left ? x[k] : 0.0f;
        }
    }
    patch.set_row(i, x);
#pragma unroll
    for (int w = 0; w < patch.kWords; ++w) {
        patch.words[i][w] = is_there ? patch.words[i][w] : 0u;
    }
}

// ---- producers; tile/tiled.cuh says what a producer is ----

// With kAligned, rows and parameters begin at multiples of 16 bytes. A loop loads kRows rows before
// it uses the first, as many as fit the registers: a compiler that sees all 8 rows at once keeps
// more in flight. Every kRows keeps 24 KB in flight on a multiprocessor.

// y from x; x is z if the forward added something before the norm.
template <class Norm, class T, class Out, class P, bool kAligned>
struct NormProducer {
    using Element = Out;
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kRows = !kAligned ? 1 : sizeof(T) == 2 ? 8 : Norm::kCentered ? 2 : 4;

    const T* x;
    const P* gamma;
    const P* beta;  // only LayerNorm has beta and mean
    const float* mean;
    const float* rstd;
    long long stride;
    float gain_offset;

    __device__ __forceinline__ Patch<Out> patch(const Tile& tile) const {
        Patch<Out> result{};
        const int count = tile.columns_left;
        if (count <= 0) {
            return result;
        }
        float gain[kPatch], shift[kPatch] = {};
        load_gain_vector<kAligned>(gamma, gain_offset, tile, gain);
        if constexpr (Norm::kCentered) {
            load_shared_vector<kAligned>(beta + tile.column, count, shift);
        }
#pragma unroll 1
        for (int first = 0; first < kPatch; first += kRows) {
            result.template move_up<kRows>();
            float values[kRows][kPatch];
            unsigned bits = 0;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const long long row = tile.row + min(first + i, tile.rows_left - 1);
                load_vector<kAligned>(x + row * stride + tile.column, count, values[i]);
                bits ^= __float_as_uint(values[i][0]);
            }
            wait_for_bits(bits, values[0]);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const long long row = tile.row + min(first + i, tile.rows_left - 1);
                const float row_mean = Norm::kCentered ? __ldg(mean + row) : 0.0f;
                const float row_rstd = __ldg(rstd + row);
#pragma unroll
                for (int k = 0; k < kPatch; ++k) {
                    values[i][k] = y_of<Norm>(values[i][k], row_mean, row_rstd, gain[k], shift[k]);
                }
                const bool is_there = first + i < tile.rows_left;
                set_vector<kAligned>(tile, is_there, values[i], kPatch - kRows + i, result);
            }
        }
        return result;
    }
};

template <class Norm, class T, class Out, class P, bool kAligned>
__device__ __forceinline__ Patch<Out> make_patch(
    const NormProducer<Norm, T, Out, P, kAligned>& producer, const Tile& tile) {
    return producer.patch(tile);
}

template <class Norm, class T, class Out, class P, bool kAligned>
constexpr int kFewerBlocks<NormProducer<Norm, T, Out, P, kAligned>> = Norm::kCentered ? 2 : 1;

// dx from dy and the statistics of both passes. With kAdds, plus d_extra, before rounding to T.
template <class Norm, class T, class Dy, class P, bool kAdds, bool kAligned>
struct NormBackwardProducer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kRows = !kAligned ? 1 : sizeof(T) == 4 ? 1 : 4;
    static constexpr int kSums = Norm::kCentered ? 2 : 1;

    const Dy* dy;
    const T* x;
    const P* gamma;
    const float* mean;  // only LayerNorm has it
    const float* rstd;
    const float* means;  // [rows, kSums]
    const T* d_extra;
    long long x_stride;
    long long extra_stride;
    long long dy_stride;
    float gain_offset;

    __device__ __forceinline__ Patch<T> patch(const Tile& tile) const {
        Patch<T> result{};
        const int count = tile.columns_left;
        if (count <= 0) {
            return result;
        }
        float gain[kPatch];
        load_gain_vector<kAligned>(gamma, gain_offset, tile, gain);
#pragma unroll 1
        for (int first = 0; first < kPatch; first += kRows) {
            result.template move_up<kRows>();
            float xs[kRows][kPatch], dys[kRows][kPatch], extras[kAdds ? kRows : 1][kPatch];
            unsigned bits = 0;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const long long row = tile.row + min(first + i, tile.rows_left - 1);
                load_vector<kAligned>(x + row * x_stride + tile.column, count, xs[i]);
                load_vector<kAligned>(dy + row * dy_stride + tile.column, count, dys[i]);
                bits ^= __float_as_uint(xs[i][0]) ^ __float_as_uint(dys[i][0]);
                if constexpr (kAdds) {
                    const T* p = d_extra + row * extra_stride + tile.column;
                    load_vector<kAligned>(p, count, extras[i]);
                    bits ^= __float_as_uint(extras[i][0]);
                }
            }
            wait_for_bits(bits, xs[0]);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const long long row = tile.row + min(first + i, tile.rows_left - 1);
                const float row_mean = Norm::kCentered ? __ldg(mean + row) : 0.0f;
                const float row_rstd = __ldg(rstd + row);
                float row_means[kSums];
#pragma unroll
                for (int k = 0; k < kSums; ++k) {
                    row_means[k] = __ldg(means + row * kSums + k);
                }
                float dx[kPatch];
#pragma unroll
                for (int k = 0; k < kPatch; ++k) {
                    const float x_hat = x_hat_of<Norm>(xs[i][k], row_mean, row_rstd);
                    const float d_hat = __fmul_rn(dys[i][k], gain[k]);
                    dx[k] = dx_of<Norm>(x_hat, d_hat, row_means, row_rstd);
                }
                if constexpr (kAdds) {
#pragma unroll
                    for (int k = 0; k < kPatch; ++k) {
                        dx[k] = add_rn(dx[k], extras[i][k]);
                    }
                }
                const bool is_there = first + i < tile.rows_left;
                set_vector<kAligned>(tile, is_there, dx, kPatch - kRows + i, result);
            }
        }
        return result;
    }
};

template <class Norm, class T, class Dy, class P, bool kAdds, bool kAligned>
__device__ __forceinline__ Patch<T> make_patch(
    const NormBackwardProducer<Norm, T, Dy, P, kAdds, kAligned>& producer, const Tile& tile) {
    return producer.patch(tile);
}

template <class Norm, class T, class Dy, class P, bool kAdds, bool kAligned>
constexpr int kFewerBlocks<NormBackwardProducer<Norm, T, Dy, P, kAdds, kAligned>> = 2;

}  // namespace fuser
