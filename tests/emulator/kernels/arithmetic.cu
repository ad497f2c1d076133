// fp32 arithmetic that keeps subnormals, and what else scales are made of, over arrays.

#include <fuser/store/nvfp4.cuh>

// ---- a op b of `n` pairs, |a| b and 1 / b ----

extern "C" __global__ void fuser_arithmetic(const float* __restrict__ a, const float* __restrict__ b,
                                            float* sum, float* product, float* quotient,
                                            float* of_magnitude, float* reciprocal,
                                            long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        sum[i] = fuser::add_rn(a[i], b[i]);
        product[i] = fuser::mul_rn(a[i], b[i]);
        quotient[i] = fuser::div_rn(a[i], b[i]);
        of_magnitude[i] = fuser::mul_magnitude_rn(a[i], b[i]);
        reciprocal[i] = fuser::reciprocal_rn(b[i]);
    }
}

// ---- the larger halves of `n` pairs of words ----

extern "C" __global__ void fuser_max_u16x2(const unsigned* __restrict__ a,
                                           const unsigned* __restrict__ b, unsigned* most,
                                           long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        most[i] = fuser::max_u16x2(a[i], b[i]);
    }
}

// ---- every byte in fp32; 256 threads ----

extern "C" __global__ void fuser_decode(float* e4m3, float* e5m2) {
    e4m3[threadIdx.x] = fuser::decode<fuser::E4M3>(threadIdx.x);
    e5m2[threadIdx.x] = fuser::decode<fuser::E5M2>(threadIdx.x);
}

// ---- eight floats a thread to eight codes of E2M1; below 7 where they are in units ----

extern "C" __global__ void fuser_to_e2m1x8(const float* __restrict__ x, unsigned* codes,
                                           long long n, int in_units) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        float values[8];
        fuser::load_tail<8>(x + 8 * i, 8, values);
        const float factor = in_units ? fuser::kE2m1Unit : 1.0f;
        codes[i] = fuser::e2m1_to_nearest(values, factor, in_units);
    }
}

// ---- scales of `n` amaxes ----

extern "C" __global__ void fuser_scales(const unsigned* __restrict__ amax, float* scale,
                                        unsigned char* e8m0, float* multiplier, long long n,
                                        float max_fp8, float when_infinite, unsigned eps,
                                        int pow2) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) {
        scale[i] = fuser::scale_from_amax(amax[i], max_fp8, pow2, eps, when_infinite);
        const unsigned exponent = fuser::e8m0_from_amax(amax[i], 1.0f / max_fp8);
        e8m0[i] = static_cast<unsigned char>(exponent);
        multiplier[i] = fuser::inverse_of_e8m0(exponent);
    }
}
