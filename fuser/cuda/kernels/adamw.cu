// A step of AdamW on a parameter that is kept in fp32 and used in another format.
#include <fuser/core/adamw.cuh>
#include <fuser/core/scaling.cuh>

// The new weights, rounded to T, become `values`, and *amax at least their amax, as bits; either may
// be null. kCount: elements of a thread.
template <class T, class G, int kCount>
__global__ void __launch_bounds__(256)
    fuser_adamw(const fuser::AdamWState<G> state, T* values, unsigned* amax, long long n) {
    const long long first =
        (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount;
    unsigned most = 0;
    if (first < n) {
        float weights[kCount];
        fuser::step_adamw<true>(state, state.load_constants(), first, weights);
        if (values != nullptr) {
            fuser::write(values + first, weights);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float weight = fuser::rounded_to<T>(weights[i]);
            most = max(most, fuser::magnitudes<float>(__float_as_uint(weight)));
        }
    }
    if (amax != nullptr) {
        fuser::record_amax(most, amax);
    }
}
