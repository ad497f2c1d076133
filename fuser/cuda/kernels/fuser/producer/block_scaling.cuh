// FP8 in blocks of 128 or 128 x 128 with fp32 scales: the producer that decodes.
#pragma once

#include <fuser/tile/bytes.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

// Decodes rowwise data directly, and columnwise data as a matrix of `columns` rows.
template <class T, class E, bool kAligned>
struct BlockProducer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const unsigned char* data;  // [rows, columns], contiguous
    const float* scale_inv;
    int columns;
    // The scale of row r and block b of 128 columns is at (r >> row_shift) * row_stride + b *
    // block_stride.
    int row_shift;
    long long row_stride, block_stride;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&x)[kPatch]) const {
        decode8<E>(load_bytes<uint2, kAligned>(data + row * columns + column, count), x);
        const float factor =
            scale_inv[(row >> row_shift) * row_stride + column / kTile * block_stride];
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            x[j] = rounded_to<T>(mul_rn(x[j], factor));
        }
    }
};

}  // namespace fuser
