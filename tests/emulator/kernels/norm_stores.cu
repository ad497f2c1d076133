// Normalizations straight into every store policy, as the tiled kernels have them.
#include <fuser/producer/normalization.cuh>
#include <fuser/store/block_scaling.cuh>
#include <fuser/store/fp8_scaling.cuh>
#include <fuser/store/mxfp8.cuh>
#include <fuser/store/nvfp4.cuh>
#include <fuser/store/rowwise_scaling.cuh>

// On a multiprocessor: three leave 80 registers, two 128.
template <class Producer>
constexpr int kProducerBlocks = 2;
template <class T, class Out, class P>
constexpr int kProducerBlocks<fuser::NormProducer<fuser::RMSNorm, T, Out, P, true>> =
    sizeof(Out) == 4 ? 2 : 3;
template <class Producer, class Store>
constexpr int kNormBlocks =
    Store::kBlocks > kProducerBlocks<Producer> ? kProducerBlocks<Producer> : Store::kBlocks;

template <class Producer, class Store>
__global__ void __launch_bounds__(fuser::kTileThreads, (kNormBlocks<Producer, Store>))
    fuser_norm_store(Producer producer, Store store, long long rows, int columns) {
    __shared__ __align__(16) unsigned char scratch[Store::kScratchBytes + 16];
    const fuser::Tile tile(rows, columns, false, scratch);
    store(tile, make_patch(producer, tile));
}

// The values themselves.
struct PlainStore {
    static constexpr int kBlocks = 4;
    static constexpr int kScratchBytes = 0;
    void* out;

    template <class T>
    __device__ void operator()(const fuser::Tile& tile, const fuser::Patch<T>& patch) const {
        for (int i = 0; i < fuser::kPatch; ++i) {
            for (int j = 0; j < fuser::kPatch; ++j) {
                const float x = patch.value(i, j);
                if (i < tile.rows_left && j < tile.columns_left) {
                    T* p = static_cast<T*>(out) + (tile.row + i) * tile.columns + tile.column + j;
                    *p = fuser::from_float<T>(x);
                }
            }
        }
    }
};
