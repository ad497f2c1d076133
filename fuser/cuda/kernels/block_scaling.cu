// FP8 in blocks of 128: every kernel is a fuser_tiled of a policy or a producer of the header.
#include <fuser/block_scaling.cuh>
#include <fuser/normalization.cuh>
#include <fuser/pointwise.cuh>
