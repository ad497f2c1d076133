// The functions of fuser/core/sm90.cuh, used as kernels use them.

#include <fuser/core/sm90.cuh>

using namespace fuser;

__device__ unsigned char* rounded_up(unsigned char* memory) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(memory);
    return reinterpret_cast<unsigned char*>((address + 1023) / 1024 * 1024);
}

// ---- a box, as it is in shared memory, and some bytes after it ----

extern "C" __global__ void fuser_load(const __grid_constant__ TensorMap matrix, int column, int row,
                                      int box_rows, const unsigned char* from, int bytes,
                                      unsigned char* y) {
    extern __shared__ unsigned char memory[];
    __shared__ Barrier full;
    unsigned char* box = rounded_up(memory);
    const int box_bytes = box_rows * 128;
    if (threadIdx.x == 0) {
        prefetch_map(&matrix);
        init_barrier(&full, 1);
        publish_barriers();
        load_box(box, &matrix, column, row, &full);
        load_bytes(box + box_bytes, from, bytes, &full);
        arrive_expecting(&full, box_bytes + bytes);
    }
    __syncthreads();
    wait(&full, 0);
    for (int i = threadIdx.x; i < box_bytes + bytes; i += blockDim.x) {
        y[i] = box[i];
    }
}

// ---- y [64, 2 kSums] = start + a [64, 128 blocks] b [2 kSums, 128 blocks]^T ----

template <Fp8 kA, Fp8 kB, int kSums>
__global__ void fuser_product(const __grid_constant__ TensorMap a,
                              const __grid_constant__ TensorMap b, float* y, int blocks,
                              float start) {
    extern __shared__ unsigned char memory[];
    __shared__ Barrier full;
    unsigned char* operands = rounded_up(memory);
    if (threadIdx.x == 0) {
        init_barrier(&full, 1);
        publish_barriers();
    }
    __syncthreads();
    float sums[kSums];
    for (float& sum : sums) {
        sum = start;
    }
    for (int block = 0; block < blocks; ++block) {
        if (threadIdx.x == 0) {
            arrive_expecting(&full, (64 + 2 * kSums) * 128);
            load_box(operands, &a, block * 128, 0, &full);
            load_box(operands + 64 * 128, &b, block * 128, 0, &full);
        }
        wait(&full, block & 1);
        const unsigned long long of_a = operand(operands), of_b = operand(operands + 64 * 128);
        pin(sums);
        begin_products();
        for (int part = 0; part < 4; ++part) {
            add_product<kA, kB>(sums, of_a + 2 * part, of_b + 2 * part,
                                start != 0.0f || block + part > 0);
        }
        close_products();
        wait_for_products<0>();
        pin(sums);
        __syncthreads();
    }
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < kSums; ++i) {
        y[(row + i / 2 % 2 * 8) * 2 * kSums + i / 4 * 8 + column + i % 2] = sums[i];
    }
}
