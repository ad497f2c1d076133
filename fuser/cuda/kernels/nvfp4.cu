// NVFP4: every kernel is fuser_tiled or fuser_tiled_rows of the headers below.
#include <fuser/producer/adamw.cuh>
#include <fuser/producer/gathered.cuh>
#include <fuser/producer/grouped.cuh>
#include <fuser/producer/load.cuh>
#include <fuser/producer/normalization.cuh>
#include <fuser/producer/nvfp4.cuh>
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/grouped_nvfp4.cuh>
#include <fuser/store/nvfp4.cuh>
#include <fuser/store/transposed.cuh>
#include <fuser/tile/tiled.cuh>
