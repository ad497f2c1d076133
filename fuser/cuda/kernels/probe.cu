// The probe: a kernel whose result depends on every part of its launch, to test a machine.

// ---- y[i] = scale * x[i] + i for i < n, with `threads` threads in total ----

// `threads` must be gridDim.x * blockDim.x. The loop steps by this argument, so a wrong grid or
// block leaves elements unwritten.
extern "C" __global__ void fuser_probe(const float* __restrict__ x, float* __restrict__ y,
                                       long long n, long long threads, float scale) {
    long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long i = first; i < n; i += threads) {
        y[i] = fmaf(scale, x[i], static_cast<float>(i));
    }
}
