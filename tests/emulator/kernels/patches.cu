// Tiles of values from producers of pointwise chains, put down as they are, transposed.
#include <fuser/pointwise.cuh>
