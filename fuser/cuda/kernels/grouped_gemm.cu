// Products of groups of FP8 rows in one launch.
#include <fuser/gemm/sm90_grouped.cuh>

using namespace fuser;

template <Grouping kGrouping, Sums kSums, Fp8 kA, Fp8 kB, class Out>
__global__ __launch_bounds__(kGemmThreads, 1) void fuser_grouped_gemm(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
    const __grid_constant__ GroupedGemm gemm) {
    extern __shared__ unsigned char memory[];
    // The swizzle counts from multiples of 1024 bytes.
    GemmShared& shared = *reinterpret_cast<GemmShared*>(
        (reinterpret_cast<unsigned long long>(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kGemmStages; ++stage) {
            init_barrier(&shared.full[stage], 1);
            init_barrier(&shared.empty[stage], 8);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        give_registers_back<24>();
        if (threadIdx.x == 256) {
            load_gemm<kGrouping, kSums>(&a, &b, gemm, shared);
        }
    } else {
        take_registers<240>();
        if constexpr (kSums == Sums::kFast) {
            multiply_fast<kGrouping, kSums, kA, kB, Out>(gemm, shared);
        } else {
            multiply_split<kGrouping, kSums, kA, kB, Out>(gemm, shared);
        }
    }
}
