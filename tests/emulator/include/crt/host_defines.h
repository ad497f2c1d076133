// Stands in for the compiler's own header of this name, which the runtime's wheel does not hold.
#pragma once

#define __host__
#define __device__
#define __constant__
#define __managed__
#define __device_builtin__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define CUDARTAPI
