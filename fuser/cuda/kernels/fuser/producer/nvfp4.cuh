// NVFP4, where 16 elements of 4 bits share an E4M3 scale: the producer that decodes.
#pragma once

#include <fuser/tile/bytes.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

template <class T, bool kAligned>
struct Nvfp4Producer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const unsigned char* data;  // [rows, columns / 2], contiguous
    const unsigned char* scale;  // 4 scale_words(columns) bytes a row
    const float* amax;
    int columns;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&x)[kPatch]) const {
        const unsigned codes =
            load_bytes<unsigned, kAligned>(data + (row * columns + column) / 2, count / 2);
        const unsigned byte = scale[row * 4 * scale_words(columns) + column / kNvBlock];
        const float factor = mul_rn(mul_rn(decode<E4M3>(byte), *amax), 1.0f / (6.0f * 448.0f));
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            // With the sign in bit 15 and the other bits from bit 9 on, a code is an fp16 of 2^-14
            // times its value.
            const unsigned code = codes >> 4 * j & 0xfu;
            const unsigned half = (code & 7u) << 9 | (code & 8u) << 12;
            const float value = from_fp16(static_cast<unsigned short>(half)) * 16384.0f;
            x[j] = rounded_to<T>(mul_rn(value, factor));
        }
    }
};

}  // namespace fuser
