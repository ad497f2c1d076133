// Inline PTX of Hopper's asynchronous copies and matrix products; all of it is in this file.
//
// FUSER_EMULATED is defined when kernels are compiled for a CPU; then <emulator/sm90.hpp> has the
// same functions.
#pragma once

#include <fuser/core/hardware.cuh>

namespace fuser {

// A matrix in global memory for the copy engine (TMA): the 128 bytes of a CUtensorMap.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// An mbarrier in shared memory.
using Barrier = unsigned long long;

enum class Fp8 { kE4m3, kE5m2 };

}  // namespace fuser

#if defined(FUSER_EMULATED)
#include <emulator/sm90.hpp>
#else

namespace fuser {

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// ---- barriers: a phase ends after `count` arrivals and all the bytes that were announced ----

__device__ __forceinline__ void init_barrier(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(count)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrives, and announces bytes that copies to this barrier will write.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait(Barrier* barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "  @done bra.uni ended;\n"
        "  bra.uni again;\n"
        "ended: }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---- copies into shared memory by the copy engine ----

// A box of a matrix whose first element is at (`column`, `row`); zeros outside of the matrix.
__device__ __forceinline__ void load_box(void* to, const TensorMap* matrix, int column, int row,
                                         Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
        "l"(matrix), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// `bytes`, a multiple of 16, between addresses that are multiples of 16.
__device__ __forceinline__ void load_bytes(void* to, const void* from, int bytes,
                                           Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* matrix) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(matrix) : "memory");
}

// ---- registers ----

// The registers that each thread of this warpgroup has from here on.
template <int kCount>
__device__ __forceinline__ void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- matrix products of a warpgroup, on operands in shared memory ----

// A matrix of rows of 128 bytes, which begins at a multiple of 1024 bytes, as a copy with the
// 128-byte swizzle writes it. An operand begins at a multiple of 8 rows, and of 32 bytes in a row:
// add bytes / 16. Fields: PTX ISA, "Matrix descriptor format" of wgmma.
__device__ __forceinline__ unsigned long long operand(const void* matrix) {
    constexpr unsigned long long kSwizzle128 = 1ull << 62, kEightRows = 1024 / 16;
    return kSwizzle128 | kEightRows << 32 | 1ull << 16 |
           (shared_address(matrix) & 0x3ffff) / 16;
}

// Before the first product, and after other instructions have accessed its sums.
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void close_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kLeft` closed groups of products are under way.
template <int kLeft>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Keeps the compiler from moving accesses of the sums across the place of this call.
template <int kCount>
__device__ __forceinline__ void pin(float (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(sums[i])::"memory");
    }
}

#define FUSER_SUMS_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define FUSER_SUMS_16(s, i) \
    FUSER_SUMS_4(s, i), FUSER_SUMS_4(s, i + 4), FUSER_SUMS_4(s, i + 8), FUSER_SUMS_4(s, i + 12)

#define FUSER_WGMMA_128(A, B) \
    asm volatile( \
        "{ .reg .pred p;\n" \
        "  setp.ne.b32 p, %66, 0;\n" \
        "  wgmma.mma_async.sync.aligned.m64n128k32.f32." A "." B " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "%64, %65, p, 1, 1; }" \
        : FUSER_SUMS_16(sums, 0), FUSER_SUMS_16(sums, 16), FUSER_SUMS_16(sums, 32), \
          FUSER_SUMS_16(sums, 48) \
        : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

#define FUSER_WGMMA_256(A, B) \
    asm volatile( \
        "{ .reg .pred p;\n" \
        "  setp.ne.b32 p, %130, 0;\n" \
        "  wgmma.mma_async.sync.aligned.m64n256k32.f32." A "." B " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
        "%128, %129, p, 1, 1; }" \
        : FUSER_SUMS_16(sums, 0), FUSER_SUMS_16(sums, 16), FUSER_SUMS_16(sums, 32), \
          FUSER_SUMS_16(sums, 48), FUSER_SUMS_16(sums, 64), FUSER_SUMS_16(sums, 80), \
          FUSER_SUMS_16(sums, 96), FUSER_SUMS_16(sums, 112) \
        : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

// sums = a b^T (+ sums, if `adds`) for 64 rows of a, 32 bytes of each row, and 2 kSums rows of b.
// Thread t has the sums of rows 16 (t / 32) + t % 32 / 4 (+ 8 in the second pair) and columns
// 8 j + 2 (t % 4) + {0, 1} in sums[4 j ..].
template <Fp8 kA, Fp8 kB, int kSums>
__device__ __forceinline__ void add_product(float (&sums)[kSums], unsigned long long a,
                                            unsigned long long b, bool adds) {
    static_assert(kSums == 64 || kSums == 128, "64 x 128 or 64 x 256 sums");
    if constexpr (kSums == 64) {
        if constexpr (kA == Fp8::kE4m3 && kB == Fp8::kE4m3) {
            FUSER_WGMMA_128("e4m3", "e4m3");
        } else if constexpr (kA == Fp8::kE4m3) {
            FUSER_WGMMA_128("e4m3", "e5m2");
        } else if constexpr (kB == Fp8::kE4m3) {
            FUSER_WGMMA_128("e5m2", "e4m3");
        } else {
            FUSER_WGMMA_128("e5m2", "e5m2");
        }
    } else {
        if constexpr (kA == Fp8::kE4m3 && kB == Fp8::kE4m3) {
            FUSER_WGMMA_256("e4m3", "e4m3");
        } else if constexpr (kA == Fp8::kE4m3) {
            FUSER_WGMMA_256("e4m3", "e5m2");
        } else if constexpr (kB == Fp8::kE4m3) {
            FUSER_WGMMA_256("e5m2", "e4m3");
        } else {
            FUSER_WGMMA_256("e5m2", "e5m2");
        }
    }
}

#undef FUSER_WGMMA_256
#undef FUSER_WGMMA_128
#undef FUSER_SUMS_16
#undef FUSER_SUMS_4

}  // namespace fuser

#endif  // FUSER_EMULATED
