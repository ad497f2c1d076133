// MXFP8: every kernel is a fuser_tiled of a policy or a producer of the header.
#include <fuser/mxfp8.cuh>
#include <fuser/normalization.cuh>
#include <fuser/pointwise.cuh>
