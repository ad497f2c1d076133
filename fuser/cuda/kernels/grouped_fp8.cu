// FP8 with one scale a group: every kernel is fuser_tiled or fuser_tiled_rows of these headers.
#include <fuser/producer/block_scaling.cuh>
#include <fuser/producer/gathered.cuh>
#include <fuser/producer/grouped.cuh>
#include <fuser/producer/load.cuh>
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/grouped_fp8.cuh>
#include <fuser/store/transposed.cuh>
#include <fuser/tile/tiled.cuh>
