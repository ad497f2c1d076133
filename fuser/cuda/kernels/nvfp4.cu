// NVFP4: every kernel is a fuser_tiled of a policy or a producer of the header.
#include <fuser/producer/load.cuh>
#include <fuser/producer/normalization.cuh>
#include <fuser/producer/nvfp4.cuh>
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/nvfp4.cuh>
#include <fuser/store/transposed.cuh>
#include <fuser/tile/tiled.cuh>
