// MXFP8, where 32 elements share a power of two: the producer that decodes.
#pragma once

#include <fuser/tile/bytes.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

template <class T, class E, bool kAligned>
struct Mxfp8Producer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const unsigned char* data;  // [rows, columns], contiguous
    const unsigned char* scale;  // not swizzled, `scale_stride` bytes a row
    long long scale_stride;
    int columns;
    int columnwise;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&x)[kPatch]) const {
        decode8<E>(load_bytes<uint2, kAligned>(data + row * columns + column, count), x);
        unsigned e8m0[2];
        if (columnwise) {
            // Scales have an allocation of their own, padded to whole tiles, so 8 bytes always
            // exist.
            const uint2 found =
                *reinterpret_cast<const uint2*>(scale + row / kMxBlock * scale_stride + column);
            e8m0[0] = found.x;
            e8m0[1] = found.y;
        } else {
            e8m0[0] = scale[row * scale_stride + column / kMxBlock] * 0x01010101u;
            e8m0[1] = e8m0[0];
        }
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            const float factor = power_of_e8m0(e8m0[j / 4] >> j % 4 * 8 & 0xffu);
            x[j] = rounded_to<T>(mul_rn(x[j], factor));
        }
    }
};

}  // namespace fuser
