// FP8 with one scale a tensor: the scale, and the store policy.
#pragma once

#include <fuser/tile/amax.cuh>
#include <fuser/tile/transpose.cuh>

namespace fuser {

// The scale of a tensor under current or delayed scaling. With neither amax nor scale, that of the
// amax of the tile; with both, the scale unless that of the amax is smaller.
struct TensorScale {
    const float* amax;  // current scaling: the scale follows from it
    const float* scale;  // delayed scaling
    float* scale_inv;  // 1 / scale; may be null
    unsigned eps;  // bits of a float: a smaller amax counts as eps
    int pow2;

    __device__ __forceinline__ bool is_of_tile() const {
        return amax == nullptr && scale == nullptr;
    }

    // The scale, in every thread. The first thread of the block that is first writes scale_inv.
    template <class E>
    __device__ __forceinline__ float load(bool is_first) const {
        float found;
        if (amax == nullptr) {
            found = *scale;
        } else if (scale == nullptr) {
            found = of_amax<E>(__float_as_uint(*amax));
        } else {  // with the bits of `max / amax` in torch
            const float largest = mul_rn(reciprocal_rn(*amax), E::kMax);
            const bool is_finite = __float_as_uint(*amax) < kInfinity;
            found = is_finite && largest < *scale ? largest : *scale;
        }
        return store_inverse(found, is_first);
    }
    // The same for a matrix of one tile, from the amax of each thread's patch.
    template <class E>
    __device__ __forceinline__ float of_tile(unsigned bits, unsigned char* scratch) const {
        const unsigned amax_of_tile = block_max(bits, reinterpret_cast<unsigned*>(scratch));
        __syncthreads();  // `scratch` is used again
        return store_inverse(of_amax<E>(amax_of_tile), true);
    }

private:
    template <class E>
    __device__ __forceinline__ float of_amax(unsigned bits) const {
        return scale_from_amax(bits, E::kMax, pow2, eps, kFloatMax);
    }
    __device__ __forceinline__ float store_inverse(float found, bool is_first) const {
        if (scale_inv != nullptr && is_first && threadIdx.x == 0) {
            *scale_inv = div_rn(1.0f, found);
        }
        return found;
    }
};

// ---- a tile with one scale ----

// Transposes the bytes of 8 rows to 8 columns, 4 x 4 at a time.
__device__ __forceinline__ void set_columns(const Transpose<uint2>& transpose,
                                            const uint2 (&rows)[kPatch]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned columns[4][2];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            unsigned row[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                row[i] = half == 0 ? rows[4 * w + i].x : rows[4 * w + i].y;
            }
            const unsigned even01 = __byte_perm(row[0], row[1], 0x5140);
            const unsigned even23 = __byte_perm(row[2], row[3], 0x5140);
            const unsigned odd01 = __byte_perm(row[0], row[1], 0x7362);
            const unsigned odd23 = __byte_perm(row[2], row[3], 0x7362);
            columns[0][w] = __byte_perm(even01, even23, 0x5410);
            columns[1][w] = __byte_perm(even01, even23, 0x7632);
            columns[2][w] = __byte_perm(odd01, odd23, 0x5410);
            columns[3][w] = __byte_perm(odd01, odd23, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            transpose.set_column(4 * half + j, make_uint2(columns[j][0], columns[j][1]));
        }
    }
}

// Stores the bytes rowwise and transposed; either may be null. All threads of a block must call it.
template <class E, bool kAligned, class T>
__device__ __forceinline__ void store_scaled(const Tile& tile, const Patch<T>& patch, float scale,
                                             unsigned char* row, unsigned char* col) {
    uint2 bytes[kPatch];
    quantize_patch<E>(patch, scale, bytes);
    store_rows<kAligned>(tile, bytes, row);
    if (col != nullptr) {
        const Transpose<uint2> transpose(tile.scratch);
        set_columns(transpose, bytes);
        __syncthreads();
        transpose.template store<kAligned>(tile, col, tile.rows);
    }
}

// ---- the store policy: bytes, and the amax before scaling; each may be null ----

template <class E, bool kAligned>
struct Fp8Store {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = Transpose<uint2>::kBytes;
    TensorScale scaling;
    unsigned char* row;  // [rows, columns]
    unsigned char* col;  // [columns, rows]
    unsigned* recorded;  // bits of an fp32, raised to the amax

    template <class T>
    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
        if (recorded != nullptr) {
            record_amax(patch.amax(), recorded);
        }
        if (row != nullptr || col != nullptr || scaling.scale_inv != nullptr) {
            const float scale = scaling.is_of_tile()
                                    ? scaling.of_tile<E>(patch.amax(), tile.scratch)
                                    : scaling.load<E>(tile.is_first());
            store_scaled<E, kAligned>(tile, patch, scale, row, col);
        }
    }
};

}  // namespace fuser
