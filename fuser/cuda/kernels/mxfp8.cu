// MXFP8: every kernel is a fuser_tiled of a policy or a producer of the header.
#include <fuser/producer/load.cuh>
#include <fuser/producer/mxfp8.cuh>
#include <fuser/producer/normalization.cuh>
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/mxfp8.cuh>
#include <fuser/tile/tiled.cuh>
