// Every function of fuser/core/hardware.cuh over arrays: in the emulator, and on a GPU.

#include <fuser/core/hardware.cuh>

// ---- pairs of floats to pairs of small floats; `pairs` of them ----

extern "C" __global__ void fuser_convert(const float2* __restrict__ x, unsigned short* e4m3,
                                         unsigned short* e5m2, unsigned char* e2m1,
                                         long long pairs) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < pairs) {
        e4m3[i] = fuser::to_e4m3x2(x[i].x, x[i].y);
        e5m2[i] = fuser::to_e5m2x2(x[i].x, x[i].y);
        e2m1[i] = fuser::to_e2m1x2(x[i].x, x[i].y);
    }
}

// The fallbacks, also where there are instructions.
extern "C" __global__ void fuser_convert_by_integers(const float2* __restrict__ x,
                                                     unsigned short* e4m3, unsigned short* e5m2,
                                                     unsigned char* e2m1, long long pairs) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < pairs) {
        e4m3[i] = fuser::encoded<4, 3, 7, 0x7e, 0x7f>(x[i].x) |
                  fuser::encoded<4, 3, 7, 0x7e, 0x7f>(x[i].y) << 8;
        e5m2[i] = fuser::encoded<5, 2, 15, 0x7b, 0x7f>(x[i].x) |
                  fuser::encoded<5, 2, 15, 0x7b, 0x7f>(x[i].y) << 8;
        e2m1[i] = fuser::encoded<2, 1, 1, 7, 7>(x[i].x) | fuser::encoded<2, 1, 1, 7, 7>(x[i].y) << 4;
    }
}

// ---- a copy of n elements of type T through streaming loads and stores ----

template <typename T>
__global__ void fuser_copy(const T* __restrict__ x, T* __restrict__ y, long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        fuser::store_streaming(y + i, fuser::load_streaming(x + i));
    }
}
