// The tiled skeleton: a block makes a tile of 128 x 128 values and hands it to a store policy.
//
// For every store with a columnwise, blockwise or transposed part. A *producer* makes values, a
// *store policy* puts them down, and any pair of them is a kernel, fuser_tiled<Producer, Store>.
//
//   struct Producer {
//       using Element = ...;  // fuser::bf16, fuser::fp16 or float
//       static constexpr bool kIsAligned = ...;  // whether it loads 16 bytes at a time
//       // The values of a row from `column` on, rounded to Element; zeros from `count` on.
//       __device__ void operator()(long long row, int column, int count, float (&x)[8]) const;
//   };
//   struct Store {
//       static constexpr bool kIsAligned = ...;  // whether it stores 8 elements at a time
//       static constexpr int kBlocks = 4;  // on a multiprocessor: 4, or fewer if it needs registers
//       static constexpr int kScratchBytes = 0;  // of Tile::scratch, aligned to 16 bytes
//       template <class T>
//       __device__ void operator()(const Tile& tile, const Patch<T>& patch) const;
//   };
//
// All threads of a block call both. A producer that makes its patches otherwise than row by row (to
// have several rows in flight, or to sum their columns) has an overload of `produced` in place of
// operator(). Traits are specialized where that is needed: kFewerBlocks, 1 or 2 if it takes many
// registers; kHasHalves, if values from the two halves of a row follow from the same inputs;
// kPrefetchBytes, of Tile::scratch for what it asks for ahead. Whoever has used that leaves a barrier
// behind.
//
// A thread holds a patch of 8 x 8 values: 16 threads side by side make 128 columns, so that a row of
// bf16 is 16 bytes a thread and 256 bytes a tile. A warp holds 16 rows. Patches are kept packed, two
// values a word: 32 registers for bf16 and fp16, which lets four blocks run on a multiprocessor with
// 4 x 256 x 128 bytes = 128 KB of loads in flight.
#pragma once

#include <fuser/tile/producer.cuh>
#include <fuser/tile/tile.cuh>

namespace fuser {

// Four blocks on a multiprocessor leave 64 registers a thread, three 80, two 128: for fp32, whose
// patches are twice as large, and for elements one by one. One leaves 255, for what is both long and
// wide.
template <class Producer, class Store>
constexpr bool kIsWide =
    sizeof(typename Producer::Element) == 4 || !Producer::kIsAligned || !Store::kIsAligned;
template <class Producer, class Store>
constexpr int kNarrowBlocks = Store::kBlocks - kFewerBlocks<Producer>;
template <class Producer, class Store>
constexpr int kTileBlocks = kIsWide<Producer, Store> ? (kFewerBlocks<Producer> > 1 ? 1 : 2)
                            : kNarrowBlocks<Producer, Store> > 2 ? kNarrowBlocks<Producer, Store>
                                                                 : 2;

}  // namespace fuser

// ---- the kernels ----

template <class Producer, class Store>
__global__ void __launch_bounds__(fuser::kTileThreads, (fuser::kTileBlocks<Producer, Store>))
    fuser_tiled(Producer producer, Store store, long long rows, int columns) {
    constexpr int kPrefetch = fuser::kPrefetchBytes<Producer>;
    constexpr int kBytes = kPrefetch > Store::kScratchBytes ? kPrefetch : Store::kScratchBytes;
    __shared__ __align__(16) unsigned char scratch[kBytes > 0 ? kBytes : 16];
    fuser::Tile tile(rows, columns, fuser::kHasHalves<Producer>, scratch);
    __shared__ int index[2];
    if constexpr (kPrefetch > 0) {
        tile.save_index(index);
    }
    const auto patch =
        make_patch(producer, tile);  // unqualified: overloads may stand in later headers
    if constexpr (kPrefetch > 0) {
        tile.restore_index(index);
    }
    store(tile, patch);
}

// A producer's matrix as it is, which takes no patch: out [rows, columns].
template <class Producer>
__global__ void __launch_bounds__(fuser::kTileThreads)
    fuser_tiled_rows(Producer producer, typename Producer::Element* out, long long rows,
                     int columns) {
    const fuser::Tile tile(rows, columns);
    if (tile.columns_left == 0) {
        return;
    }
    // Reads are the smaller part of the bytes: four rows in flight are enough, and eight would take
    // registers from other blocks.
    constexpr int kRows = 4;
#pragma unroll 1
    for (int first = 0; first < fuser::kPatch; first += kRows) {
        float x[kRows][fuser::kPatch];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const long long row = min(tile.row + first + i, rows - 1);
            producer(row, tile.column, tile.columns_left, x[i]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            auto* p = out + (tile.row + first + i) * columns + tile.column;
            if (first + i >= tile.rows_left) {
                return;
            }
            if constexpr (Producer::kIsAligned) {
                fuser::store<fuser::kPatch>(p, x[i]);
            } else {
                fuser::store_tail<fuser::kPatch>(p, tile.columns_left, x[i]);
            }
        }
    }
}
