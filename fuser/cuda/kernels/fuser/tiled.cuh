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
// kAheadBytes, of Tile::scratch for what it asks for ahead. Whoever has used that leaves a barrier
// behind.
//
// A thread holds a patch of 8 x 8 values: 16 threads side by side make 128 columns, so that a row of
// bf16 is 16 bytes a thread and 256 bytes a tile. A warp holds 16 rows. Patches are kept packed, two
// values a word: 32 registers for bf16 and fp16, which lets four blocks run on a multiprocessor with
// 4 x 256 x 128 bytes = 128 KB of loads in flight.
#pragma once

#include <fuser/scaling.cuh>

namespace fuser {

constexpr int kTile = 128;
constexpr int kPatch = 8;
constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kRowThreads = kTile / kPatch;

template <class Producer>
constexpr int kFewerBlocks = 0;
template <class Producer>
constexpr bool kHasHalves = false;
template <class Producer>
constexpr int kAheadBytes = 0;

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

// ---- where a thread is ----

struct Tile {
    long long rows;  // of the matrix
    int columns;
    int row_tiles, column_tiles;
    int row_tile, column_tile;  // this one
    long long row;  // the patch's first
    int column;
    int rows_left, columns_left;  // of the patch in the matrix: 8 or fewer, both 0 outside of it
    unsigned char* scratch;       // shared memory, of the producer first and then of the store

    // With has_halves, a tile of the left half stands beside the one of the right half, so that what
    // one of them reads is still in L2 for the other.
    __device__ __forceinline__ Tile(long long rows, int columns, bool has_halves = false,
                                    unsigned char* scratch = nullptr)
        : rows(rows), columns(columns), scratch(scratch) {
        row_tiles = static_cast<int>((rows - 1) / kTile + 1);
        column_tiles = (columns - 1) / kTile + 1;
        // From the end: the kernel before this one touched it last, so it may still be in L2.
        const unsigned tile = gridDim.x - 1 - blockIdx.x;
        row_tile = static_cast<int>(tile / column_tiles);
        column_tile = static_cast<int>(tile % column_tiles);
        if (has_halves) {
            column_tile = column_tile / 2 + column_tile % 2 * ((column_tiles + 1) / 2);
        }
        place_thread();
    }

    // The place of the tile waits in `shared` for a barrier and place_again: then nothing of it stays
    // in registers meanwhile.
    __device__ __forceinline__ void keep_place(int (&shared)[2]) const {
        if (threadIdx.x == 0) {
            shared[0] = row_tile;
            shared[1] = column_tile;
        }
    }
    __device__ __forceinline__ void place_again(const int (&shared)[2]) {
        row_tile = shared[0];
        column_tile = shared[1];
        place_thread();
    }

    __device__ __forceinline__ long long first_row() const {
        return static_cast<long long>(row_tile) * kTile;
    }
    __device__ __forceinline__ int first_column() const { return column_tile * kTile; }
    static __device__ __forceinline__ int thread_row() { return threadIdx.x / kRowThreads; }
    static __device__ __forceinline__ int thread_column() { return threadIdx.x % kRowThreads; }

private:
    __device__ __forceinline__ void place_thread() {
        row = first_row() + thread_row() * kPatch;
        column = first_column() + thread_column() * kPatch;
        const bool is_inside = row < rows && column < columns;
        const long long below = rows - row;
        rows_left = is_inside ? static_cast<int>(below < kPatch ? below : kPatch) : 0;
        columns_left = is_inside ? min(columns - column, kPatch) : 0;
    }
};

// ---- what it holds ----

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

template <class T>
struct Patch {
    static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    static constexpr int kWords = kPatch / kPerWord;
    unsigned words[kPatch][kWords];

    // x, rounded to nearest.
    __device__ __forceinline__ void round_row(int row, const float (&x)[kPatch]) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            if constexpr (sizeof(T) == 4) {
                words[row][w] = __float_as_uint(x[w]);
            } else {
                words[row][w] = packed_pair<T>(x[2 * w], x[2 * w + 1]);
            }
        }
    }

    __device__ __forceinline__ void move_row(int to, int from) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            words[to][w] = words[from][w];
        }
    }

    // x, which is rounded to T already.
    __device__ __forceinline__ void set_row(int row, const float (&x)[kPatch]) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            words[row][w] = packed(x[w * kPerWord], x[w * kPerWord + kPerWord - 1]);
        }
    }

    __device__ __forceinline__ float value(int row, int column) const {
        const unsigned word = words[row][column / kPerWord];
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word);
        } else {
            return to_float(T{static_cast<unsigned short>(word >> column % 2 * 16)});
        }
    }

    // Magnitudes: the largest of a row as the bits of an fp32, and of each column packed as T.
    __device__ __forceinline__ unsigned row_amax(int row) const {
        unsigned most = magnitudes<T>(words[row][0]);
#pragma unroll
        for (int w = 1; w < kWords; ++w) {
            most = larger<T>(most, magnitudes<T>(words[row][w]));
        }
        return largest<T>(most);
    }
    __device__ __forceinline__ void column_amaxes(unsigned (&most)[kWords]) const {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            most[w] = magnitudes<T>(words[0][w]);
#pragma unroll
            for (int row = 1; row < kPatch; ++row) {
                most[w] = larger<T>(most[w], magnitudes<T>(words[row][w]));
            }
        }
    }
    __device__ __forceinline__ unsigned amax() const {
        unsigned columns[kWords];
        column_amaxes(columns);
        unsigned most = columns[0];
#pragma unroll
        for (int w = 1; w < kWords; ++w) {
            most = larger<T>(most, columns[w]);
        }
        return largest<T>(most);
    }

private:
    static __device__ __forceinline__ unsigned packed(float low, float high) {
        if constexpr (kIsBf16<T>) {
            // The halves of the words that were loaded; the compiler sees that they are.
            return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
        } else {
            return packed_pair<T>(low, high);
        }
    }
};

// ---- the first producer: a matrix in memory ----

// kAligned: `x` and the row stride are multiples of 16 bytes, the number of columns is one of 8.
template <class T, bool kAligned>
struct LoadProducer {
    using Element = T;
    static constexpr bool kIsAligned = kAligned;
    const T* x;
    long long stride;

    __device__ __forceinline__ void operator()(long long row, int column, int count,
                                               float (&values)[kPatch]) const {
        load_tail<kPatch>(x + row * stride + column, count, values);
    }
};

// Rows of a patch beyond the edge become zero.
template <class T>
__device__ __forceinline__ void clear_rows_outside(Patch<T>& patch, const Tile& tile) {
    if (tile.rows_left < kPatch) {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
#pragma unroll
            for (int w = 0; w < patch.kWords; ++w) {
                patch.words[i][w] = i < tile.rows_left ? patch.words[i][w] : 0u;
            }
        }
    }
}

// Patches outside the matrix are zero, and so are their rows and columns beyond its edges.
template <class Producer>
__device__ __forceinline__ Patch<typename Producer::Element> produced(const Producer& producer,
                                                                      const Tile& tile) {
    Patch<typename Producer::Element> patch{};
    if (tile.columns_left > 0) {
        // Rows beyond the last read the last one: without branches all loads are in flight at once.
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            float x[kPatch];
            const long long row = min(tile.row + i, tile.rows - 1);
            producer(row, tile.column, tile.columns_left, x);
            patch.set_row(i, x);
        }
        clear_rows_outside(patch, tile);
    }
    return patch;
}

// A matrix as it lies in memory, 16 bytes at a time.
template <class T>
__device__ __forceinline__ Patch<T> produced(const LoadProducer<T, true>& producer,
                                             const Tile& tile) {
    Patch<T> patch{};
    if (tile.columns_left > 0) {
        const T* p = producer.x + tile.row * producer.stride + tile.column;
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
#pragma unroll
            for (int k = 0; k < patch.kWords / 4; ++k) {
                const uint4 words = load_streaming(reinterpret_cast<const uint4*>(p) + k);
                memcpy(patch.words[i] + 4 * k, &words, sizeof(words));
            }
            p += i + 1 < tile.rows_left ? producer.stride : 0;
        }
        clear_rows_outside(patch, tile);
    }
    return patch;
}

// ---- maxima over the 2, 4 or 16 threads that share the blocks of a row ----

// Threads exchange halves of their rows, so that each ends with 8 / kThreads rows, or one, and a
// scale is computed once: values[k] of 8 becomes the maximum of row kept_row(k).
template <int kThreads>
__device__ __forceinline__ void share_rows(unsigned (&values)[kPatch]) {
    int count = kPatch;
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) {
        if (count == 1) {
            values[0] = max(values[0], __shfl_xor_sync(kWarp, values[0], step));
            continue;
        }
        count /= 2;
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const unsigned kept = upper ? values[k + count] : values[k];
            const unsigned sent = upper ? values[k] : values[k + count];
            values[k] = max(kept, __shfl_xor_sync(kWarp, sent, step));
        }
    }
}

template <int kThreads>
constexpr int kKeptRows = kThreads < kPatch ? kPatch / kThreads : 1;

template <int kThreads>
__device__ __forceinline__ int kept_row(int k) {
    const int lane = threadIdx.x;
    const int first = (lane & 1) * 4 + (lane >> 1 & 1) * 2 + (lane >> 2 & 1);
    return (first & ~(kKeptRows<kThreads> - 1)) + k;
}

// The value that belongs to row i, from the thread that kept it.
template <int kThreads>
__device__ __forceinline__ float of_row(const float (&values)[kKeptRows<kThreads>], int i) {
    const int owner = ((i >> 2 & 1) | (i >> 1 & 1) << 1 | (i & 1) << 2) & (kThreads - 1);
    return __shfl_sync(kWarp, values[i % kKeptRows<kThreads>], owner, kThreads);
}

// ---- maxima over the 128 rows of a column ----

// A warp's columns, its 16 rows, to a line of shared memory, packed as the patch is.
template <class T>
__device__ __forceinline__ void put_column_amaxes(
    const Patch<T>& patch, unsigned (&amaxes)[kTileWarps][kTile / Patch<T>::kPerWord]) {
    constexpr int kWords = Patch<T>::kWords;
    unsigned most[kWords];
    patch.column_amaxes(most);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        most[w] = larger<T>(most[w], __shfl_xor_sync(kWarp, most[w], kRowThreads));
    }
    if (threadIdx.x % 32 < kRowThreads) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            amaxes[threadIdx.x / 32][Tile::thread_column() * kWords + w] = most[w];
        }
    }
}

// The bits of the amax of a column of the tile, behind a barrier.
template <class T>
__device__ __forceinline__ unsigned column_amax(
    const unsigned (&amaxes)[kTileWarps][kTile / Patch<T>::kPerWord], int column) {
    constexpr int kPerWord = Patch<T>::kPerWord;
    unsigned most = amaxes[0][column / kPerWord];
#pragma unroll
    for (int warp = 1; warp < kTileWarps; ++warp) {
        most = larger<T>(most, amaxes[warp][column / kPerWord]);
    }
    return widened<T>(most, column);
}

// ---- the maximum over a tile ----

// Of all threads' values, in every thread; `shared` has a word for each warp, and is free again.
__device__ __forceinline__ unsigned block_max(unsigned value, unsigned* shared) {
    const unsigned most_of_warp = __reduce_max_sync(kWarp, value);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = most_of_warp;
    }
    __syncthreads();
    unsigned most = shared[0];
#pragma unroll
    for (int warp = 1; warp < kTileWarps; ++warp) {
        most = max(most, shared[warp]);
    }
    __syncthreads();
    return most;
}

// ---- rows of bytes ----

// All bytes of Words or none of them where kAligned, else the first `count`; the rest is 0.
template <class Words, bool kAligned>
__device__ __forceinline__ Words load_bytes(const unsigned char* p, int count) {
    Words words{};
    if constexpr (kAligned) {
        if (count > 0) {
            words = load_streaming(reinterpret_cast<const Words*>(p));
        }
    } else {
        unsigned char bytes[sizeof(Words)];
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Words)); ++i) {
            bytes[i] = i < count ? p[i] : 0;
        }
        memcpy(&words, bytes, sizeof(Words));
    }
    return words;
}

// A thread's 8 bytes of a row, or 4 bytes of nibbles; without a streaming hint, since a GEMM reads
// them next.
template <bool kAligned, class Words>
__device__ __forceinline__ void store_bytes(unsigned char* p, int count, const Words& words) {
    if constexpr (kAligned) {
        *reinterpret_cast<Words*>(p) = words;
    } else {
        unsigned char bytes[sizeof(Words)];
        memcpy(bytes, &words, sizeof(Words));
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Words)); ++i) {
            if (i < count) {
                p[i] = bytes[i];
            }
        }
    }
}

// The rows of a patch, from the first on and each as Words, to `out`, a matrix of the tile's columns.
// A pointer that moves on: where every row has an address to be worked out, that takes 9 instructions.
template <bool kAligned, class Words>
struct RowStores {
    static constexpr int kBits = static_cast<int>(sizeof(Words));  // of each of 8 columns: 8 or 4
    unsigned char* p;
    int step, rows_left, count;

    __device__ __forceinline__ RowStores(const Tile& tile, unsigned char* out)
        : p(out + (tile.row * tile.columns + tile.column) * kBits / 8),
          step(kBits == 8 ? tile.columns : tile.columns / 2),
          rows_left(tile.rows_left),
          count(tile.columns_left * kBits / 8) {}

    __device__ __forceinline__ void put(int i, const Words& words) {
        if (i < rows_left) {
            store_bytes<kAligned>(p, count, words);
        }
        p += step;
    }
};

// A patch in one scale.
template <class E, class T>
__device__ __forceinline__ void scale_patch(const Patch<T>& patch, float scale,
                                            uint2 (&bytes)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        float x[kPatch];
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            x[j] = mul_rn(patch.value(i, j), scale);
        }
        bytes[i] = encoded8<E>(x);
    }
}

// The bytes of a patch to `out`, which may be null.
template <bool kAligned>
__device__ __forceinline__ void store_rows(const Tile& tile, const uint2 (&bytes)[kPatch],
                                           unsigned char* out) {
    if (out != nullptr) {
        RowStores<kAligned, uint2> rows(tile, out);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            rows.put(i, bytes[i]);
        }
    }
}

// ---- from rows to columns ----

// Shared memory that turns a tile of bytes: [128 columns][16 chunks], a chunk being what 8 rows of a
// column pack into. Chunk c of a column stands at c ^ (column / 8): then neither the writes, of
// columns 8 apart, nor the reads, along a column, meet in a bank.
template <class Chunk>
struct Turned {
    static constexpr int kBytes = kTile * kRowThreads * static_cast<int>(sizeof(Chunk));
    Chunk* chunks;

    __device__ __forceinline__ explicit Turned(unsigned char* shared)
        : chunks(reinterpret_cast<Chunk*>(shared)) {}

    // The 8 rows of column j of the patch.
    __device__ __forceinline__ void put(int j, Chunk chunk) const {
        const int column = Tile::thread_column() * kPatch + j;
        chunks[column * kRowThreads + (Tile::thread_row() ^ Tile::thread_column())] = chunk;
    }

    // All of the tile to `out`, the transposed matrix of `row_bytes` a row. Between put and store
    // stands a barrier.
    template <bool kAligned>
    __device__ __forceinline__ void store(const Tile& tile, unsigned char* out,
                                          long long row_bytes) const {
        struct alignas(2 * sizeof(Chunk)) Piece {
            Chunk part[2];
        };
        constexpr int kPieces = kRowThreads / 2;  // of a column
        constexpr int kColumns = kTileThreads / kPieces;  // that all threads take at once
        static_assert(kColumns / kPatch % 2 == 0);
        const int column = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
        const int turn = column / kPatch;  // kColumns / kPatch more each time: as odd as now
        const long long byte = tile.first_row() / kPatch * static_cast<int>(sizeof(Chunk)) +
                               piece * static_cast<int>(sizeof(Piece));
        const long long left = min(row_bytes - byte, static_cast<long long>(sizeof(Piece)));
        const int columns_left = left > 0 ? tile.columns - tile.first_column() - column : 0;
        unsigned char* p = out + (tile.first_column() + column) * row_bytes + byte;
#pragma unroll
        for (int k = 0; k < kTile / kColumns; ++k) {
            const int turned = piece ^ turn >> 1 ^ k * (kColumns / kPatch / 2);
            Piece found = reinterpret_cast<const Piece*>(
                chunks)[(column + k * kColumns) * kPieces + turned];
            if (turn & 1) {
                const Chunk first = found.part[0];
                found.part[0] = found.part[1];
                found.part[1] = first;
            }
            if (k * kColumns < columns_left) {
                store_bytes<kAligned>(p, static_cast<int>(left), found);
            }
            p += kColumns * row_bytes;
        }
    }
};

// ---- the first store policy: the matrix of the producer's elements, transposed ----

// Straight from registers: the 8 rows of a thread and of its neighbour in the warp make whole sectors
// of 32 bytes.
template <class T, bool kAligned>
struct TurnedStore {
    static constexpr bool kIsAligned = kAligned;
    static constexpr int kBlocks = 3;
    static constexpr int kScratchBytes = 0;
    T* out;  // [columns, rows]

    __device__ __forceinline__ void operator()(const Tile& tile, const Patch<T>& patch) const {
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
            if (j < tile.columns_left) {
                float x[kPatch];
#pragma unroll
                for (int i = 0; i < kPatch; ++i) {
                    x[i] = patch.value(i, j);
                }
                T* p = out + (tile.column + j) * tile.rows + tile.row;
                if constexpr (kAligned) {
                    store<kPatch>(p, x);
                } else {
                    store_tail<kPatch>(p, tile.rows_left, x);
                }
            }
        }
    }
};

}  // namespace fuser

// ---- the kernels ----

template <class Producer, class Store>
__global__ void __launch_bounds__(fuser::kTileThreads, (fuser::kTileBlocks<Producer, Store>))
    fuser_tiled(Producer producer, Store store, long long rows, int columns) {
    constexpr int kAhead = fuser::kAheadBytes<Producer>;
    constexpr int kBytes = kAhead > Store::kScratchBytes ? kAhead : Store::kScratchBytes;
    __shared__ __align__(16) unsigned char scratch[kBytes > 0 ? kBytes : 16];
    fuser::Tile tile(rows, columns, fuser::kHasHalves<Producer>, scratch);
    __shared__ int place[2];
    if constexpr (kAhead > 0) {
        tile.keep_place(place);
    }
    const auto patch = produced(producer, tile);  // unqualified: overloads may stand in later headers
    if constexpr (kAhead > 0) {
        tile.place_again(place);
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
