// A kernel whose result depends on every part of its launch: whether kernels work on a machine.

// ---- y[i] = scale * x[i] + i for i < n, by threads that are `threads` in all ----

// `threads` is what gridDim.x * blockDim.x must be. The loop steps by the argument, so a grid or
// block that arrives otherwise leaves elements unwritten.
extern "C" __global__ void fuser_probe(const float* __restrict__ x, float* __restrict__ y,
                                       long long n, long long threads, float scale) {
    long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long i = first; i < n; i += threads) {
        y[i] = fmaf(scale, x[i], static_cast<float>(i));
    }
}
