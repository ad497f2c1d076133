// NVFP4: every kernel is a fuser_tiled of a policy or a producer of the header.
#include <fuser/normalization.cuh>
#include <fuser/nvfp4.cuh>
#include <fuser/pointwise.cuh>
