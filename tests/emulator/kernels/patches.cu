// Tiles of values from producers of pointwise chains, put down as they are, transposed.
#include <fuser/producer/pointwise.cuh>
#include <fuser/store/transposed.cuh>
#include <fuser/tile/tiled.cuh>
