"""Mistakes in the kernel of grouped FP8 products: barriers, stages, scales, panels."""

from mutants.mutant import Mutant

KERNEL = "cuda/kernels/grouped_gemm.cu"
PRODUCTS = "cuda/kernels/fuser/gemm/sm90_grouped.cuh"
OF_ROWS = "test_cuda_grouped_gemm.py::test_each_group_of_rows_has_its_own_b"

GROUPED_GEMM = (
    Mutant(
        "a stage is released while products read it",
        PRODUCTS,
        "multiply_fast",
        "arrive(&shared.empty[before]); } before = turn.stage;",
        "arrive(&shared.empty[turn.stage]); } before = turn.stage;",
        OF_ROWS,
        select="kFast and many",
    ),
    Mutant(
        "all groups have the second group's matrix",
        PRODUCTS,
        "GemmTiles",
        "tile.b_row += entry[0] * gemm.b_row_step;",
        "tile.b_row += gemm.b_row_step;",
        OF_ROWS,
        select="kBlocks2d and many",
    ),
    Mutant(
        "a stage is loaded before it is released",
        PRODUCTS,
        "load_gemm",
        "wait(&shared.empty[s], turn.parity ^ 1);",
        "",
        OF_ROWS,
        select="kSplit and many",
    ),
    Mutant(
        "the bytes of scales are not announced",
        PRODUCTS,
        "load_gemm",
        "static_cast<int>(sizeof(GemmStage)) + a_scales + b_scales",
        "static_cast<int>(sizeof(GemmStage)) + a_scales",
        OF_ROWS,
        select="kBlocks1d and two",
    ),
    Mutant(
        "one warpgroup of two is not waited for",
        KERNEL,
        "fuser_grouped_gemm",
        "init_barrier(&shared.empty[stage], 8)",
        "init_barrier(&shared.empty[stage], 4)",
        OF_ROWS,
        select="kBlocks1d and many",
    ),
    Mutant(
        "sums are read before their products end",
        PRODUCTS,
        "multiply_fast",
        "wait_for_products<0>(); pin(sums); float scale",
        "pin(sums); float scale",
        OF_ROWS,
        select="kFast and two",
    ),
    Mutant(
        "the last panel is as high as the others",
        PRODUCTS,
        "GemmTiles",
        "const int height = min(kGemmPanel, row_tiles - panel * kGemmPanel);",
        "const int height = kGemmPanel;",
        "test_cuda_grouped_gemm.py::test_tiles_of_more_than_one_panel",
    ),
)
