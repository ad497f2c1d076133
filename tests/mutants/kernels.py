"""Mistakes in kernels: barriers, edges, rounding, bits; each is compiled for the emulator."""

from mutants.mutant import Mutant

NORMS = "cuda/kernels/normalization.cu"
TILE_PRODUCER = "cuda/kernels/fuser/tile/producer.cuh"
TILE_BYTES = "cuda/kernels/fuser/tile/bytes.cuh"
MXFP8 = "cuda/kernels/fuser/store/mxfp8.cuh"
NVFP4 = "cuda/kernels/fuser/store/nvfp4.cuh"
SCALING = "cuda/kernels/fuser/core/scaling.cuh"

BARRIERS = (
    Mutant(
        "two sums over rows share one scratch area",
        "cuda/kernels/fuser/core/row_sums.cuh",
        "        turn ^= 1;\n",
        "",
        "test_cuda_normalization.py::test_blocks_that_take_many_rows_give_each_its_own "
        "test_cuda_normalization.py::test_forward_and_backward_are_as_exact_as_torch",
        select="4096 or rows or LayerNorm",
    ),
    Mutant(
        "a sum over rows reads before all warps have written",
        "cuda/kernels/fuser/core/row_sums.cuh",
        "        __syncthreads();\n",
        "",
        "test_cuda_normalization.py::test_forward_and_backward_are_as_exact_as_torch",
    ),
    Mutant(
        "swizzled scales are stored before they are in shared memory",
        MXFP8,
        "        copies.store_column_scales(tile, block, column, bytes, scales);\n"
        "        __syncthreads();\n",
        "        copies.store_column_scales(tile, block, column, bytes, scales);\n",
        "test_cuda_mxfp8.py::test_either_copy_is_made_alone_with_scales_in_either_order",
    ),
    Mutant(
        "a tile is stored before it is turned",
        "cuda/kernels/fuser/store/fp8_scaling.cuh",
        "        set_columns(transpose, bytes);\n        __syncthreads();\n",
        "        set_columns(transpose, bytes);\n",
        "test_cuda_fp8_scaling.py::test_current_scaling_gives_the_references_bytes",
    ),
    Mutant(
        "the amax of a tile is read before all warps have written theirs",
        "cuda/kernels/fuser/tile/amax.cuh",
        "        shared[threadIdx.x / 32] = most_of_warp;\n    }\n    __syncthreads();\n",
        "        shared[threadIdx.x / 32] = most_of_warp;\n    }\n",
        "test_cuda_block_scaling.py::test_both_copies_are_the_references_bytes_and_scales",
    ),
    Mutant(
        "a history of amaxes is rolled while it is read",
        "cuda/kernels/fp8_scaling.cu",
        "            next = history[static_cast<long long>(i + 1) * state.count];\n"
        "        }\n        __syncthreads();\n",
        "            next = history[static_cast<long long>(i + 1) * state.count];\n        }\n",
        "test_cuda_fp8_scaling.py::test_delayed_scales_of_several_states_are_updated_in_one_launch",
    ),
)

EDGES = (
    Mutant(
        "what lies past the last row counts in a tile",
        TILE_PRODUCER,
        "patch.words[i][w] = i < tile.rows_left ? patch.words[i][w] : 0u;",
        "patch.words[i][w] = patch.words[i][w];",
        "test_cuda_mxfp8.py test_cuda_block_scaling.py",
        select="both_copies",
        survives="Rows past the last one read the last row again, which changes no maximum of a "
        "block; stores and sums leave them out by themselves.",
    ),
    Mutant(
        "what lies past the last column counts in the variance",
        NORMS,
        "x = i < columns.left(v) ? x : 0.0f;",
        "x = columns.left(v) > 0 ? x : 0.0f;",
        "test_cuda_normalization.py::test_forward_and_backward_are_as_exact_as_torch",
        select="layernorm",
    ),
    Mutant(
        "rows past the last one are written",
        "cuda/kernels/pointwise.cu",
        "if (thread.is_inside && row < rows) {",
        "if (thread.is_inside) {",
        "test_cuda_pointwise.py::test_every_dtype_and_shape_is_as_exact_as_torch",
    ),
    Mutant(
        "columns past the last one count in the sum of a row",
        "cuda/kernels/pointwise.cu",
        "sums[i] = thread.is_inside ? contribution[i] : 0.0f;",
        "sums[i] = contribution[i];",
        "test_cuda_pointwise.py::test_chains_and_gradients_of_operands_are_as_exact_as_torch",
    ),
    Mutant(
        "rows past the last one count in the gradient of a bias",
        "cuda/kernels/pointwise.cu",
        "        if (row < rows) {\n#pragma unroll\n",
        "        {\n#pragma unroll\n",
        "test_cuda_pointwise.py::test_chains_and_gradients_of_operands_are_as_exact_as_torch",
    ),
    Mutant(
        "the padding of scales of 128x128 blocks is left as it was",
        "cuda/kernels/fuser/store/block_scaling.cuh",
        "                p[i] = 0.0f;\n",
        "                p[i] = p[i];\n",
        "test_cuda_block_scaling.py::test_both_copies_are_the_references_bytes_and_scales",
    ),
    Mutant(
        "bytes past the last column are written one by one",
        TILE_BYTES,
        "            if (i < count) {\n                p[i] = bytes[i];\n",
        "            if (i <= count) {\n                p[i] = bytes[i];\n",
        "test_cuda_fp8_scaling.py::test_current_scaling_gives_the_references_bytes",
    ),
    Mutant(
        "with few registers dx of every vector is made from the last vector",
        "cuda/kernels/normalization_backward.cu",
        "            if constexpr (!kKeeps) {\n                read(slot, v, statistics);",
        "            if constexpr (!kKeepsGain) {\n                read(slot, v, statistics);",
        "test_cuda_normalization.py::test_forward_and_backward_are_as_exact_as_torch",
    ),
    Mutant(
        "rows of a warp compare with an amax that no thread has read yet",
        NORMS,
        "            if (blockDim.x <= 32) {\n",
        "            if (blockDim.x <= 0) {\n",
        "test_cuda_normalization.py::test_statistics_are_those_that_come_with_y_and_with_dx",
    ),
    Mutant(
        "sums of gradients begin with what was in memory",
        "cuda/kernels/normalization_backward.cu",
        "row == begin ? 0.0f : p[i]",
        "p[i]",
        "test_cuda_normalization.py::test_forward_and_backward_are_as_exact_as_torch",
    ),
)

ARITHMETIC = (
    Mutant(
        "the amax of a square of 32x32 is that of its upper half",
        MXFP8,
        "        amax = max(amax, amaxes[warp ^ 1][block]);\n",
        "",
        "test_cuda_mxfp8.py::test_both_copies_are_the_references_bytes_and_scales",
    ),
    Mutant(
        "the exponent of an amax is rounded down",
        SCALING,
        "min(bits + 0x7fffffu, 0x7f7fffffu) >> 23",
        "min(bits, 0x7f7fffffu) >> 23",
        "test_cuda_mxfp8.py::test_both_copies_are_the_references_bytes_and_scales",
    ),
    Mutant(
        "the inverse of 2^127 is flushed to zero",
        SCALING,
        "__uint_as_float(e8m0 < 254u ? bits : bits | 0x00400000u)",
        "__uint_as_float(e8m0 < 255u ? bits : bits | 0x00400000u)",
        "test_cuda_mxfp8.py::test_e5m2_of_hard_values "
        "test_cuda_mxfp8.py::test_both_copies_are_the_references_bytes_and_scales",
    ),
    Mutant(
        "a scale of one element's own amax ignores eps",
        SCALING,
        "    amax = max(amax, eps);  // a NaN stays one\n",
        "",
        "test_cuda_fp8_scaling.py::test_e5m2_with_scales_of_every_kind "
        "test_cuda_block_scaling.py::test_scales_of_every_kind",
    ),
    Mutant(
        "an NVFP4 tensor of zeros has an infinite scale in a kernel",
        SCALING,
        "        encode = __float_as_uint(amax) == 0u ? 1.0f : encode;\n",
        "",
        "test_cuda_nvfp4.py",
        select="both_copies or hard or amaxes",
    ),
    Mutant(
        "the lower half of a Hadamard transform has its sign turned in the upper one",
        NVFP4,
        "const unsigned flip = is_lower ? 0x80000000u : 0u;",
        "const unsigned flip = is_lower ? 0u : 0x80000000u;",
        "test_cuda_nvfp4.py::test_hard_values_in_squares_and_transformed",
    ),
    Mutant(
        "random words of a copy begin at its first element, whatever the offset",
        NVFP4,
        "random_words8(seed, offset + first, stream, words);",
        "random_words8(seed, first, stream, words);",
        "test_cuda_nvfp4.py::test_stochastic_rounding_uses_the_references_words_at_every_offset",
    ),
    Mutant(
        "LayerNorm's gradient keeps its mean",
        "cuda/kernels/fuser/core/norms.cuh",
        "Norm::kCentered ? d_hat - means[kSums - 1] : d_hat;",
        "d_hat;",
        "test_cuda_normalization.py::test_forward_and_backward_are_as_exact_as_torch",
        select="layernorm",
    ),
    Mutant(
        "two bytes of a turned tile change places",
        "cuda/kernels/fuser/store/fp8_scaling.cuh",
        "columns[1][w] = __byte_perm(even01, even23, 0x7632);",
        "columns[1][w] = __byte_perm(even01, even23, 0x6732);",
        "test_cuda_fp8_scaling.py::test_a_transpose_moves_every_byte",
    ),
    Mutant(
        "dropout keeps one element too few",
        "cuda/kernels/fuser/chain/stages.cuh",
        "(words.x >= threshold) |",
        "(words.x >= threshold && words.y >= threshold) |",
        "test_cuda_pointwise.py::test_a_linear_chain_has_the_references_bits_and_mask",
    ),
    Mutant(
        "a value between two stages is not rounded",
        "cuda/kernels/fuser/chain/chain.cuh",
        "        apply(all, fetched, x, z);\n        if constexpr (sizeof...(Rest) > 0) {\n"
        "            round_halves(z);\n        }\n",
        "        apply(all, fetched, x, z);\n",
        "test_cuda_pointwise.py::test_a_chain_gives_the_bits_of_its_stages_one_by_one",
    ),
    Mutant(
        "GELU's slope loses its cubic term",
        "cuda/kernels/fuser/chain/activations.cuh",
        "fmaf(square, 3.0f * kCubic, kLinear)",
        "fmaf(square, kCubic, kLinear)",
        "test_cuda_pointwise.py::test_every_activation_is_as_exact_as_torchs",
        select="gelu",
    ),
    Mutant(
        "the erf GELU in fp32 forgets what its square loses",
        "cuda/kernels/fuser/chain/activations.cuh",
        "fmaf(__fmul_rn(-0.5f, lost), rounded, rounded)",
        "rounded",
        "test_cuda_pointwise.py::test_the_erf_gelu_is_exact_far_below_zero",
    ),
    Mutant(
        "the slope of the erf GELU has no density",
        "cuda/kernels/fuser/chain/activations.cuh",
        "fmaf(x, normal.density, phi)",
        "phi",
        "test_cuda_pointwise.py::test_every_activation_is_as_exact_as_torchs",
        select="gelu_erf",
    ),
    Mutant(
        "a clamped linear part passes a gradient on where it is clamped",
        "cuda/kernels/fuser/chain/activations.cuh",
        "fabsf(x) <= scalars[0] ? 1.0f : 0.0f",
        "x <= scalars[0] ? 1.0f : 0.0f",
        "test_cuda_pointwise.py::test_every_activation_is_as_exact_as_torchs",
        select="clamped",
    ),
    Mutant(
        "a ReLU drops positive subnormals",
        "cuda/kernels/fuser/chain/activations.cuh",
        "return bits - 1u < 0x7fffffffu || bits > 0xff800000u;",
        "return bits - 0x00800000u < 0x7f800000u || bits > 0xff800000u;",
        "test_cuda_pointwise.py::test_the_relu_family_keeps_subnormals_and_infinite_gradients",
    ),
    Mutant(
        "a matrix of two tiles finds the amax of each by itself",
        "cuda/fp8_scaling.py",
        "return 0 < rows <= TILE and 0 < columns <= TILE and columns % TILE_RUN == 0",
        "return 0 < rows <= 2 * TILE and 0 < columns <= TILE and columns % TILE_RUN == 0",
        "test_launch_cache.py::test_cached_launches_of_a_quantizer_give_the_references_bytes "
        "test_functional.py test_cuda_fp8_scaling.py",
        select="bytes or amax or tile",
    ),
)
