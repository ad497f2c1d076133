// fuser_tiled<Producer, Store>: a block makes a tile of 128 x 128 values and stores it.
//
// Every kernel with a columnwise, blockwise or transposed output is such a pair. A *producer*
// computes the values of a tile, and a *store policy* quantizes and writes them.
//
//   struct Producer {
//       using Element = ...;  // fuser::bf16, fuser::fp16 or float
//       static constexpr bool kIsAligned = ...;  // whether it loads 16 bytes at a time
//       // The values of a row from `column` on, rounded to Element; zeros from `count` on.
//       __device__ void operator()(long long row, int column, int count, float (&x)[8]) const;
//   };
//   struct Store {
//       static constexpr bool kIsAligned = ...;  // whether it stores 8 elements at a time
//       static constexpr int kBlocks = 4;  // a multiprocessor: 4, or fewer if it needs registers
//       static constexpr int kScratchBytes = 0;  // of Tile::scratch, aligned to 16 bytes
//       template <class T>
//       __device__ void operator()(const Tile& tile, const Patch<T>& patch) const;
//   };
//
// All threads of a block call both. A producer that does not work row by row (because it has
// several rows in flight, or sums their columns) has an overload of `make_patch` instead of
// operator(). It may specialize these traits: kFewerBlocks is 1 or 2 if it takes many registers,
// and kFewerBlocksInPair in the first half of a pair;
// kHasHalves is true if values in the two halves of a row follow from the same inputs;
// kPrefetchBytes is the part of Tile::scratch that it prefetches into; kHasUnusedTiles is true if
// it has is_unused(tile), for tiles that are left as they are. A producer that used Tile::scratch
// ends with a barrier.
//
// A thread holds a patch of 8 x 8 values. 16 neighbouring threads make 128 columns, so a row of
// bf16 is 16 bytes a thread and 256 bytes a tile. A warp holds 16 rows. Patches are packed, two
// 16-bit values a word: bf16 and fp16 take 32 registers, so four blocks run on a multiprocessor
// with 4 x 256 x 128 bytes = 128 KB of loads in flight.
#pragma once

#include <fuser/tile/producer.cuh>
#include <fuser/tile/tile.cuh>

namespace fuser {

// With four blocks on a multiprocessor a thread has 64 registers, with three 80, with two 128 and
// with one 255. Two are for fp32, whose patches are twice as large, and for element-by-element
// access; one is for kernels with both a wide patch and a long chain.
template <class Producer, class Store>
constexpr bool kIsWide =
    sizeof(typename Producer::Element) == 4 || !Producer::kIsAligned || !Store::kIsAligned;
template <class Producer, class Store>
constexpr int kNarrowBlocks = Store::kBlocks - kFewerBlocks<Producer>;
template <class Producer, class Store>
constexpr int kTileBlocks = kIsWide<Producer, Store> ? (kFewerBlocks<Producer> > 1 ? 1 : 2)
                            : kNarrowBlocks<Producer, Store> > 2 ? kNarrowBlocks<Producer, Store>
                                                                 : 2;

// Of a kernel whose other half has kOther.
template <class Producer, class Store, int kOther>
constexpr int kPairBlocks = (kTileBlocks<Producer, Store> < kOther ? kTileBlocks<Producer, Store>
                                                                    : kOther) -
                            kFewerBlocksInPair<Producer>;

// The shared memory of a tile, in bytes: 16 or more.
template <class Producer, class Store>
constexpr int kTileBytes =
    kPrefetchBytes<Producer> > Store::kScratchBytes
        ? kPrefetchBytes<Producer>
        : (Store::kScratchBytes > 16 ? Store::kScratchBytes : 16);

template <class Producer, class Store>
__device__ __forceinline__ void make_tile(const Producer& producer, const Store& store, Tile tile,
                                          int (&index)[2]) {
    if constexpr (kHasUnusedTiles<Producer>) {
        if (producer.is_unused(tile)) {
            return;
        }
    }
    if constexpr (kPrefetchBytes<Producer> > 0) {
        tile.save_index(index);
    }
    const auto patch = make_patch(producer, tile);  // unqualified: later headers may have overloads
    if constexpr (kPrefetchBytes<Producer> > 0) {
        tile.restore_index(index);
    }
    store(tile, patch);
}

}  // namespace fuser

// ---- the kernels ----

template <class Producer, class Store>
__global__ void __launch_bounds__(fuser::kTileThreads, (fuser::kTileBlocks<Producer, Store>))
    fuser_tiled(Producer producer, Store store, long long rows, int columns) {
    __shared__ __align__(16) unsigned char scratch[fuser::kTileBytes<Producer, Store>];
    __shared__ int index[2];
    fuser::make_tile(producer, store,
                     fuser::Tile(rows, columns, fuser::kHasHalves<Producer>, scratch), index);
}

// Two such kernels over matrices of as many rows, in one launch. The second has as many columns or
// fewer, and its tiles are among those of the first that have the same place: what these have read,
// it finds in L2.
template <class Producer, class Store, class OtherProducer, class OtherStore>
__global__ void __launch_bounds__(
    fuser::kTileThreads,
    (fuser::kPairBlocks<Producer, Store, fuser::kTileBlocks<OtherProducer, OtherStore>>))
    fuser_tiled_pair(Producer producer, Store store, OtherProducer other_producer,
                     OtherStore other_store, long long rows, int columns, int other_columns) {
    constexpr int kBytes = fuser::kTileBytes<Producer, Store>;
    constexpr int kOtherBytes = fuser::kTileBytes<OtherProducer, OtherStore>;
    __shared__ __align__(16) unsigned char scratch[kBytes > kOtherBytes ? kBytes : kOtherBytes];
    __shared__ int index[2];
    const int tiles = (columns - 1) / fuser::kTile + 1;
    const int other_tiles = (other_columns - 1) / fuser::kTile + 1;
    const int each = (tiles - 1) / other_tiles + 1;  // of the first, for one of the second
    const int number = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // from the end, as above
    const int row_tile = number / (other_tiles * (each + 1));
    const int place = number / (each + 1) % other_tiles;
    const int which = number % (each + 1);
    if (which == each) {
        fuser::make_tile(other_producer, other_store,
                         fuser::Tile(rows, other_columns, row_tile, place,
                                     fuser::kHasHalves<OtherProducer>, scratch),
                         index);
    } else if (place * each + which < tiles) {
        fuser::make_tile(producer, store,
                         fuser::Tile(rows, columns, row_tile, place * each + which,
                                     fuser::kHasHalves<Producer>, scratch),
                         index);
    }
}

// Writes the producer's matrix unquantized, without a patch: out [rows, columns].
template <class Producer>
__global__ void __launch_bounds__(fuser::kTileThreads)
    fuser_tiled_rows(Producer producer, typename Producer::Element* out, long long rows,
                     int columns) {
    const fuser::Tile tile(rows, columns);
    if (tile.columns_left == 0) {
        return;
    }
    if constexpr (fuser::kHasUnusedTiles<Producer>) {
        if (producer.is_unused(tile)) {
            return;
        }
    }
    // Reads are the smaller part of the bytes, so four rows in flight are enough; eight would take
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
