// FP8 with one scale a row: every kernel is fuser_tiled or fuser_tiled_rows of the headers below.
#include <fuser/producer/adamw.cuh>
#include <fuser/producer/block_scaling.cuh>
#include <fuser/producer/load.cuh>
#include <fuser/producer/normalization.cuh>
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/rowwise_scaling.cuh>
#include <fuser/store/transposed.cuh>
#include <fuser/tile/tiled.cuh>
