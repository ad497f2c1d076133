// Tiles of values from producers of pointwise chains, as the tiled kernels ask for them.

#include <fuser/pointwise.cuh>

namespace fuser {

// 8 values of a row; what lies past the edge must be 0, and what is stored already rounded.
template <class T>
__device__ void put(const float (&x)[8], T* y, long long row, long long rows, int column,
                    int columns) {
    for (int i = 0; i < 8; ++i) {
        if (row < rows && column + i < columns) {
            assert(!(rounded_to<T>(x[i]) != x[i]) || x[i] != x[i]);
            y[row * columns + column + i] = from_float<T>(x[i]);
        } else {
            assert(x[i] == 0.0f);
        }
    }
}

}  // namespace fuser

// A thread takes rows blockIdx.y * 8 on, and 8 columns.
template <class T, class Producer>
__global__ void fuser_patches(const Producer producer, T* y, int rows, int columns) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (int i = 0; i < 8; ++i) {
        const long long row = blockIdx.y * 8 + i;
        if (row < rows) {
            float x[8];
            producer(row, column, min(columns - column, 8), x);
            fuser::put(x, y, row, rows, column, columns);
        }
    }
}

// The same by batches of four rows, every line of them; `columns` are those of one line.
template <class T, class Producer>
__global__ void fuser_batches(const Producer producer, T* first, T* last, int rows, int columns) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    for (int i = 0; i < 8; i += 4) {
        const long long row = blockIdx.y * 8 + i;
        producer.template rows<4>(
            row, rows, column, min(columns - column, 8),
            [&](int k, const float (&lines)[Producer::kLines][8]) {
                fuser::put(lines[0], first, row + k, rows, column, columns);
                fuser::put(lines[Producer::kLines - 1], last, row + k, rows, column, columns);
            });
    }
}
