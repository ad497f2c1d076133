// Products of groups of FP8 rows on Hopper: out_g = a_g b_g^T, in tiles of 128 x 256.
//
// One warpgroup loads, two multiply; a block computes one tile after the other. No order of blocks
// changes a bit: each tile adds its products along the depth in one order.
#pragma once

#include <fuser/core/elements.cuh>
#include <fuser/core/sm90.cuh>

namespace fuser {

// What a group has of its own: rows of `a`, or a range of the depth of both operands.
enum class Grouping { kRows, kDepth };

// How sums are formed. kFast: by the tensor cores alone. kSplit: the sums of 128 products are added
// to others in fp32. kBlocks1d, kBlocks2d: so too, each times the scales of its blocks: 1x128 of
// `a`; 1x128 or 128x128 of `b`.
enum class Sums { kFast, kSplit, kBlocks1d, kBlocks2d };

constexpr int kGemmRows = 128;
constexpr int kGemmColumns = 256;
constexpr int kGemmDepth = 128;  // bytes
constexpr int kGemmStages = 4;
constexpr int kGemmThreads = 384;
// Rows of tiles that blocks go through before the next columns, so that they find operands in L2.
constexpr int kGemmPanel = 16;

struct GemmStage {
    unsigned char a[kGemmRows * kGemmDepth];
    unsigned char b[kGemmColumns * kGemmDepth];
};

struct GemmShared {
    GemmStage stages[kGemmStages];
    float a_scales[kGemmStages][kGemmRows];
    float b_scales[kGemmStages][kGemmColumns];
    Barrier full[kGemmStages];
    Barrier empty[kGemmStages];
};

// Matrices are those of fuser/cuda/grouped_gemm.py.
struct GroupedGemm {
    void* out;
    const float* a_scales;
    const float* b_scales;
    const int* padded_ends;
    const int* tiles;    // [n, 4], of Grouping::kRows
    int groups;
    int rows;            // of one group's result, with Grouping::kDepth
    int columns;         // of the result
    int depth;           // with Grouping::kRows
    int b_row_step;      // from one group's b to the next's, in rows and in depth
    int b_depth_step;
    int a_scale_stride;  // from 128 of the depth to the next
    int b_scale_stride;  // with blocks of 128x128: from 128 rows of b to the next
    int b_scale_rows;    // with blocks of 128x128
    int is_padded;       // with Grouping::kRows, whether results have the rows of padded groups
};

// One tile of the result.
struct GemmTile {
    int a_row, b_row;      // of the operands
    int a_depth, b_depth;  // where the depth begins
    int blocks;            // of 128 of the depth
    long long out_row;     // where the tile's first row is in the result
    int out_rows;          // of the tile that are stored
    int column;
    int a_scale, b_scale;  // with one scale for each group: where it is
};

template <Grouping kGrouping>
struct GemmTiles {
    const GroupedGemm& gemm;
    int row_tiles, column_tiles, count;

    __device__ __forceinline__ explicit GemmTiles(const GroupedGemm& g) : gemm(g) {
        column_tiles = (g.columns + kGemmColumns - 1) / kGemmColumns;
        if constexpr (kGrouping == Grouping::kRows) {
            row_tiles = g.padded_ends[g.groups - 1] / kGemmRows;
            count = row_tiles * column_tiles;
        } else {
            row_tiles = (g.rows + kGemmRows - 1) / kGemmRows;
            count = row_tiles * column_tiles * g.groups;
        }
    }

    __device__ __forceinline__ GemmTile operator[](int index) const {
        const int of_group = row_tiles * column_tiles;
        const int group = kGrouping == Grouping::kDepth ? index / of_group : 0;
        const int own = index - group * of_group;
        const int panel = own / (kGemmPanel * column_tiles);
        const int within = own - panel * kGemmPanel * column_tiles;
        const int height = min(kGemmPanel, row_tiles - panel * kGemmPanel);
        const int row = panel * kGemmPanel + within % height, column = within / height;
        GemmTile tile;
        tile.a_row = row * kGemmRows;
        tile.b_row = tile.column = column * kGemmColumns;
        if constexpr (kGrouping == Grouping::kRows) {
            const int* entry = gemm.tiles + 4ll * row;
            tile.a_depth = 0;
            tile.b_row += entry[0] * gemm.b_row_step;
            tile.b_depth = entry[0] * gemm.b_depth_step;
            tile.blocks = (gemm.depth + kGemmDepth - 1) / kGemmDepth;
            tile.out_row = gemm.is_padded ? tile.a_row : entry[1];
            tile.out_rows = gemm.is_padded ? kGemmRows : entry[2];
            tile.a_scale = row;
            tile.b_scale = entry[0] * gemm.b_scale_stride;
        } else {
            const int begin = group == 0 ? 0 : gemm.padded_ends[group - 1];
            tile.a_depth = tile.b_depth = begin;
            tile.blocks = (gemm.padded_ends[group] - begin) / kGemmDepth;
            tile.out_row = static_cast<long long>(group) * gemm.rows + tile.a_row;
            tile.out_rows = min(kGemmRows, gemm.rows - tile.a_row);
            tile.a_scale = tile.b_scale = begin / kGemmDepth;
        }
        return tile;
    }
};

// The stage that is next, and the parity of its phase.
struct GemmTurn {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kGemmStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---- the thread that loads ----

template <Grouping kGrouping, Sums kSums>
__device__ __forceinline__ void load_gemm(const TensorMap* a, const TensorMap* b,
                                          const GroupedGemm& gemm, GemmShared& shared) {
    constexpr bool kHasRowScales = kSums == Sums::kBlocks1d || kSums == Sums::kBlocks2d;
    constexpr bool kHasColumnScales = kSums == Sums::kBlocks1d;
    const GemmTiles<kGrouping> tiles(gemm);
    GemmTurn turn;
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        const GemmTile tile = tiles[index];
        int a_scales = 0, b_scales = 0;  // bytes
        if constexpr (kHasRowScales) {
            a_scales = min(kGemmRows, gemm.a_scale_stride - tile.a_row) * 4;
        }
        if constexpr (kHasColumnScales) {
            b_scales = min(kGemmColumns, gemm.b_scale_stride - tile.b_row) * 4;
        }
        for (int block = 0; block < tile.blocks; ++block, turn.advance()) {
            const int s = turn.stage;
            GemmStage& stage = shared.stages[s];
            Barrier* full = &shared.full[s];
            wait(&shared.empty[s], turn.parity ^ 1);
            arrive_expecting(full, static_cast<int>(sizeof(GemmStage)) + a_scales + b_scales);
            load_box(stage.a, a, tile.a_depth + block * kGemmDepth, tile.a_row, full);
            load_box(stage.b, b, tile.b_depth + block * kGemmDepth, tile.b_row, full);
            if constexpr (kHasRowScales) {
                const long long line = tile.a_depth / kGemmDepth + block;
                load_bytes(shared.a_scales[s],
                           gemm.a_scales + line * gemm.a_scale_stride + tile.a_row, a_scales, full);
            }
            if constexpr (kHasColumnScales) {
                const long long line = tile.b_depth / kGemmDepth + block;
                load_bytes(shared.b_scales[s],
                           gemm.b_scales + line * gemm.b_scale_stride + tile.b_row, b_scales, full);
            }
        }
    }
}

// ---- the warpgroups that multiply ----

// Four lanes have a pair of columns each in four blocks of 8 columns; after this call each has all
// 8 columns of one block.
__device__ __forceinline__ uint4 gathered_columns(const unsigned (&pairs)[4], int lane) {
    const bool is_odd = lane & 1, is_high = lane & 2;
    const unsigned x = __shfl_xor_sync(kAllLanes, is_odd ? pairs[0] : pairs[1], 1);
    const unsigned y = __shfl_xor_sync(kAllLanes, is_odd ? pairs[2] : pairs[3], 1);
    const unsigned low[2] = {is_odd ? x : pairs[0], is_odd ? pairs[1] : x};
    const unsigned high[2] = {is_odd ? y : pairs[2], is_odd ? pairs[3] : y};
    const unsigned u = __shfl_xor_sync(kAllLanes, is_high ? low[0] : high[0], 2);
    const unsigned v = __shfl_xor_sync(kAllLanes, is_high ? low[1] : high[1], 2);
    return is_high ? make_uint4(u, v, high[0], high[1]) : make_uint4(low[0], low[1], u, v);
}

// Stores the sums of 64 rows, from `row` of the tile, and of columns from `column` of the result.
template <class Out, int kCount>
__device__ __forceinline__ void store_sums(const float (&sums)[kCount], float scale, int row,
                                           int column, const GemmTile& tile,
                                           const GroupedGemm& gemm) {
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    row += thread / 32 * 16 + lane / 4;
    Out* out = static_cast<Out*>(gemm.out) + (tile.out_row + row) * gemm.columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool is_row = row + 8 * half < tile.out_rows;
        Out* line = out + 8ll * half * gemm.columns;
#pragma unroll
        for (int j = 0; j < kCount / 4; j += 4) {
            if constexpr (sizeof(Out) == 2) {
                unsigned pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = 4 * (j + i) + 2 * half;
                    pairs[i] = packed_pair<Out>(sums[at] * scale, sums[at + 1] * scale);
                }
                const uint4 columns = gathered_columns(pairs, lane);
                const int first = column + 8 * (j + lane % 4);
                if (is_row && first < gemm.columns) {
                    *reinterpret_cast<uint4*>(line + first) = columns;
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = 4 * (j + i) + 2 * half;
                    const int first = column + 8 * (j + i) + 2 * (lane % 4);
                    if (is_row && first < gemm.columns) {
                        *reinterpret_cast<float2*>(line + first) =
                            make_float2(sums[at] * scale, sums[at + 1] * scale);
                    }
                }
            }
        }
    }
}

template <Grouping kGrouping, Sums kSums, Fp8 kA, Fp8 kB, class Out>
__device__ __forceinline__ void multiply_fast(const GroupedGemm& gemm, GemmShared& shared) {
    const GemmTiles<kGrouping> tiles(gemm);
    const int consumer = threadIdx.x / 128;
    const bool arrives = threadIdx.x % 32 == 0;
    GemmTurn turn;
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        const GemmTile tile = tiles[index];
        float sums[128];
#pragma unroll
        for (float& sum : sums) {
            sum = 0.0f;
        }
        int before = 0;
        for (int block = 0; block < tile.blocks; ++block, turn.advance()) {
            wait(&shared.full[turn.stage], turn.parity);
            const GemmStage& stage = shared.stages[turn.stage];
            const unsigned long long a = operand(stage.a + consumer * 64 * kGemmDepth);
            const unsigned long long b = operand(stage.b);
            pin(sums);
            begin_products();
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                add_product<kA, kB>(sums, a + 2 * part, b + 2 * part, true);
            }
            close_products();
            pin(sums);
            wait_for_products<1>();
            if (block > 0 && arrives) {
                arrive(&shared.empty[before]);
            }
            before = turn.stage;
        }
        wait_for_products<0>();
        pin(sums);
        float scale = 0.0f;
        if (tile.blocks > 0) {
            if (arrives) {
                arrive(&shared.empty[before]);
            }
            scale = gemm.a_scales[tile.a_scale] * gemm.b_scales[tile.b_scale];
        }
        store_sums<Out>(sums, scale, consumer * 64, tile.column, tile, gemm);
    }
}

// A consumer has 128 rows and 128 columns: while one adds, the other multiplies.
template <Grouping kGrouping, Sums kSums, Fp8 kA, Fp8 kB, class Out>
__device__ __forceinline__ void multiply_split(const GroupedGemm& gemm, GemmShared& shared) {
    const GemmTiles<kGrouping> tiles(gemm);
    const int consumer = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int own_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    GemmTurn turn;
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        const GemmTile tile = tiles[index];
        float sums[2][64] = {};
        float part[64];
        const float* b_scales = nullptr;
        if constexpr (kSums == Sums::kBlocks2d) {
            const int line = min(tile.b_row / 128 + consumer, gemm.b_scale_rows - 1);
            b_scales = gemm.b_scales + static_cast<long long>(line) * gemm.b_scale_stride +
                       tile.b_depth / kGemmDepth;
        }
        for (int block = 0; block < tile.blocks; ++block, turn.advance()) {
            [[maybe_unused]] float b_scale = 0.0f;
            if constexpr (kSums == Sums::kBlocks2d) {
                b_scale = b_scales[block];
            }
            const int s = turn.stage;
            wait(&shared.full[s], turn.parity);
            const GemmStage& stage = shared.stages[s];
            const unsigned long long b = operand(stage.b + consumer * 128 * kGemmDepth);
            // Scales are loaded before the products: loads take longer beside them.
            float a_scales[4];
            float2 b_pairs[16];
            if constexpr (kSums == Sums::kBlocks1d || kSums == Sums::kBlocks2d) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a_scales[i] = shared.a_scales[s][own_row + i / 2 * 64 + i % 2 * 8];
                }
            }
            if constexpr (kSums == Sums::kBlocks1d) {
                const float* columns = shared.b_scales[s] + consumer * 128 + 2 * (lane % 4);
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    b_pairs[j] = *reinterpret_cast<const float2*>(columns + 8 * j);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned long long a = operand(stage.a + half * 64 * kGemmDepth);
                pin(part);
                begin_products();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    add_product<kA, kB>(part, a + 2 * k, b + 2 * k, k > 0);
                }
                close_products();
                wait_for_products<0>();
                pin(part);
                if (half == 1) {
                    __syncwarp();  // all lanes have their scales
                    if (lane == 0) {
                        arrive(&shared.empty[s]);
                    }
                }
#pragma unroll
                for (int i = 0; i < 64; ++i) {
                    float& sum = sums[half][i];
                    if constexpr (kSums == Sums::kSplit) {
                        sum += part[i];
                    } else if constexpr (kSums == Sums::kBlocks2d) {
                        sum = fmaf(part[i], a_scales[2 * half + i / 2 % 2] * b_scale, sum);
                    } else {
                        const float b_scale = i % 2 == 0 ? b_pairs[i / 4].x : b_pairs[i / 4].y;
                        sum = fmaf(part[i] * a_scales[2 * half + i / 2 % 2], b_scale, sum);
                    }
                }
            }
        }
        float scale = 1.0f;
        if constexpr (kSums == Sums::kSplit) {
            scale = tile.blocks == 0
                        ? 0.0f
                        : gemm.a_scales[tile.a_scale] * gemm.b_scales[tile.b_scale];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            store_sums<Out>(sums[half], scale, half * 64, tile.column + consumer * 128, tile, gemm);
        }
    }
}

}  // namespace fuser
