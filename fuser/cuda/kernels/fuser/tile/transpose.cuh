// The transpose of a tile of bytes through shared memory.
#pragma once

#include <fuser/tile/bytes.cuh>

namespace fuser {

// The shared memory of the transpose: [128 columns][16 chunks]. A chunk is 8 rows of a column,
// packed. Chunk c of a column is at position c ^ (column / 8). This avoids bank conflicts in the
// writes, to columns 8 apart, and in the reads, along a column.
template <class Chunk>
struct Transpose {
    static constexpr int kBytes = kTile * kRowThreads * static_cast<int>(sizeof(Chunk));
    Chunk* chunks;

    __device__ __forceinline__ explicit Transpose(unsigned char* shared)
        : chunks(reinterpret_cast<Chunk*>(shared)) {}

    // Writes the 8 rows of column j of the patch.
    __device__ __forceinline__ void set_column(int j, Chunk chunk) const {
        const int column = Tile::thread_column() * kPatch + j;
        chunks[column * kRowThreads + (Tile::thread_row() ^ Tile::thread_column())] = chunk;
    }

    // Stores the whole tile to `out`, the transposed matrix with `row_bytes` bytes a row. A barrier
    // must come between set_column and store.
    template <bool kAligned>
    __device__ __forceinline__ void store(const Tile& tile, unsigned char* out,
                                          long long row_bytes) const {
        struct alignas(2 * sizeof(Chunk)) Piece {
            Chunk part[2];
        };
        constexpr int kPieces = kRowThreads / 2;  // of a column
        constexpr int kColumns = kTileThreads / kPieces;  // of all threads together
        static_assert(kColumns / kPatch % 2 == 0);
        const int column = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
        const int turn = column / kPatch;  // each step adds kColumns / kPatch, so the parity stays
        const long long byte = tile.first_row() / kPatch * static_cast<int>(sizeof(Chunk)) +
                               piece * static_cast<int>(sizeof(Piece));
        const long long left = min(row_bytes - byte, static_cast<long long>(sizeof(Piece)));
        const int columns_left = left > 0 ? tile.columns - tile.first_column() - column : 0;
        unsigned char* p = out + (tile.first_column() + column) * row_bytes + byte;
#pragma unroll
        for (int k = 0; k < kTile / kColumns; ++k) {
            const int swizzled = piece ^ turn >> 1 ^ k * (kColumns / kPatch / 2);
            Piece found = reinterpret_cast<const Piece*>(
                chunks)[(column + k * kColumns) * kPieces + swizzled];
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

}  // namespace fuser
