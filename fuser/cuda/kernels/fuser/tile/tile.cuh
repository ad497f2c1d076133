// A tile of 128 x 128 values: the position of a thread in it, and the patch of values that the
// thread holds.
#pragma once

#include <fuser/core/scaling.cuh>

namespace fuser {

constexpr int kTile = 128;
constexpr int kPatch = 8;
constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kRowThreads = kTile / kPatch;

// ---- the position of a thread ----

struct Tile {
    long long rows;  // of the matrix
    int columns;
    int row_tiles, column_tiles;
    int row_tile, column_tile;  // of this tile
    long long row;  // first row and column of the patch
    int column;
    int rows_left, columns_left;  // of the patch: up to 8; both are 0 outside the matrix
    unsigned char* scratch;  // shared memory; the producer uses it first, then the store

    // With has_halves, a tile of the left half and the same tile of the right half are neighbours
    // in the grid, so that the second finds in L2 what the first has read.
    __device__ __forceinline__ Tile(long long rows, int columns, bool has_halves = false,
                                    unsigned char* scratch = nullptr)
        : rows(rows), columns(columns), scratch(scratch) {
        row_tiles = static_cast<int>((rows - 1) / kTile + 1);
        column_tiles = (columns - 1) / kTile + 1;
        // From the end: the kernel before this one touched the end last, so it may still be in L2.
        const unsigned tile = gridDim.x - 1 - blockIdx.x;
        locate(static_cast<int>(tile / column_tiles), static_cast<int>(tile % column_tiles),
               has_halves);
    }
    // The tile that is number `place` of those of a row.
    __device__ __forceinline__ Tile(long long rows, int columns, int row_tile, int place,
                                    bool has_halves, unsigned char* scratch)
        : rows(rows), columns(columns), scratch(scratch) {
        row_tiles = static_cast<int>((rows - 1) / kTile + 1);
        column_tiles = (columns - 1) / kTile + 1;
        locate(row_tile, place, has_halves);
    }

    __device__ __forceinline__ bool is_first() const { return row_tile == 0 && column_tile == 0; }

    // save_index writes the index of the tile to shared memory; after a barrier, restore_index
    // reads it. Between the two it takes no registers.
    __device__ __forceinline__ void save_index(int (&shared)[2]) const {
        if (threadIdx.x == 0) {
            shared[0] = row_tile;
            shared[1] = column_tile;
        }
    }
    __device__ __forceinline__ void restore_index(const int (&shared)[2]) {
        row_tile = shared[0];
        column_tile = shared[1];
        locate_thread();
    }

    __device__ __forceinline__ long long first_row() const {
        return static_cast<long long>(row_tile) * kTile;
    }
    __device__ __forceinline__ int first_column() const { return column_tile * kTile; }
    static __device__ __forceinline__ int thread_row() { return threadIdx.x / kRowThreads; }
    static __device__ __forceinline__ int thread_column() { return threadIdx.x % kRowThreads; }

private:
    __device__ __forceinline__ void locate(int row_tile_, int place, bool has_halves) {
        row_tile = row_tile_;
        column_tile = has_halves ? place / 2 + place % 2 * ((column_tiles + 1) / 2) : place;
        locate_thread();
    }
    __device__ __forceinline__ void locate_thread() {
        row = first_row() + thread_row() * kPatch;
        column = first_column() + thread_column() * kPatch;
        const bool is_inside = row < rows && column < columns;
        const long long below = rows - row;
        rows_left = is_inside ? static_cast<int>(below < kPatch ? below : kPatch) : 0;
        columns_left = is_inside ? min(columns - column, kPatch) : 0;
    }
};

// ---- the values of a thread ----

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

template <class T>
struct Patch {
    static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    static constexpr int kWords = kPatch / kPerWord;
    unsigned words[kPatch][kWords];

    // Sets a row to x, rounded to nearest.
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

    // Moves all rows up by kRows, to make room at the end: registers cannot be indexed at run time.
    template <int kRows>
    __device__ __forceinline__ void move_up() {
#pragma unroll
        for (int row = 0; row < kPatch - kRows; ++row) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                words[row][w] = words[row + kRows][w];
            }
        }
    }

    // Sets a row to x, which is already rounded to T.
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

    // The largest magnitude of each row as the bits of an fp32, and of each column packed as T.
    __device__ __forceinline__ unsigned row_amax(int row) const {
        unsigned most = magnitudes<T>(words[row][0]);
#pragma unroll
        for (int w = 1; w < kWords; ++w) {
            most = larger<T>(most, magnitudes<T>(words[row][w]));
        }
        return largest<T>(most);
    }
    __device__ __forceinline__ void row_amaxes(unsigned (&most)[kPatch]) const {
#pragma unroll
        for (int row = 0; row < kPatch; ++row) {
            most[row] = row_amax(row);
        }
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
            // The halves of the words that were loaded; the compiler recognizes this.
            return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
        } else {
            return packed_pair<T>(low, high);
        }
    }
};

}  // namespace fuser
