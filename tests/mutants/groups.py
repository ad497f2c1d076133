"""Mistakes in padded groups of rows, their quantization, and the grouped MLP."""

from mutants.mutant import Mutant

PRODUCER = "cuda/kernels/fuser/producer/grouped.cuh"
GATHERED = "cuda/kernels/fuser/producer/gathered.cuh"
STORE = "cuda/kernels/fuser/store/grouped_fp8.cuh"
NVFP4 = "cuda/kernels/fuser/store/grouped_nvfp4.cuh"
KERNELS = "cuda/kernels/grouped.cu"
PRODUCTS = "basic_ops/grouped_products.py"
MLP = "fused_ops/grouped_mlp.py"
DISPATCHED = "fused_ops/dispatched_experts.py"
PERMUTATION = "functional/permutation.py"
FORMATS = "tensors/group_formats.py"
TENSORS = "tensors/grouped.py"
EMULATED = "test_cuda_grouped.py::"

CHAINS = "cuda/kernels/fuser/producer/pointwise.cuh"
BESIDE = EMULATED + "test_gradients_of_scales_and_biases_are_left_beside_a_quantized_gradient"
ONE_KERNEL = "test_grouped_mlp.py::test_one_kernel_makes_and_sums_and_quantizes_the_gradient_of_z"

GROUPS = (
    Mutant(
        "a column of h counts in both halves of dz",
        CHAINS,
        "ChainRows::fill_singly",
        "of_columns[k] = half == 0 && k < tile.columns_left ? one : 0.0f;",
        "of_columns[k] = k < tile.columns_left ? one : 0.0f;",
        BESIDE,
        select="interleaved",
    ),
    Mutant(
        "the parts of scales are written where rows of a tile would be without groups",
        CHAINS,
        "store_row_sums",
        "const long long row = tile.row + owned_row<kRowThreads>(0);",
        "const long long row = tile.first_row() + Tile::thread_row() * kPatch + "
        "owned_row<kRowThreads>(0);",
        BESIDE,
        select="rows and not padded and interleaved",
    ),
    Mutant(
        "the sums of a group begin at the first tile",
        KERNELS,
        "fuser_sum_groups",
        "const int first = group == 0 ? 0 : padded_ends[group - 1] / kTile;",
        "const int first = 0;",
        BESIDE,
        select="interleaved",
    ),
    Mutant(
        "a kernel that looks for amaxes writes the sums too",
        "cuda/fp8_scaling.py",
        "quantize",
        "producer = producer if is_any else producer.alone or producer",
        "",
        ONE_KERNEL,
        select="current-SReLU",
    ),
    Mutant(
        "the gradient of z is written to be summed",
        MLP,
        "GroupedMLP._activation_backward",
        "if sums_beside and isinstance(of_up, QuantizedProduct) and not of_up.is_exact:",
        "if False:",
        ONE_KERNEL,
        select="mxfp8-SwiGLU",
    ),
    Mutant(
        "a group reads rows of the next one into its padding",
        PRODUCER,
        "GroupedProducer::source",
        "const int left = min(of.count - first, kPatch);",
        "const int left = kPatch;",
        EMULATED + "test_a_group_in_fp8_has_a_scale_of_its_own",
    ),
    Mutant(
        "padded rows are read where they would be without padding",
        PRODUCER,
        "GroupedProducer::source",
        "found.row = is_padded ? tile.row : of.row + first;",
        "found.row = of.row + first;",
        EMULATED + "test_an_activation_of_padded_groups_is_quantized_as_it_is_computed",
    ),
    Mutant(
        "a row without an assignment has the values of the first token",
        GATHERED,
        "make_patch",
        "if (tokens[i] >= 0) {",
        "if (true) {",
        EMULATED + "test_a_group_in_fp8_has_a_scale_of_its_own",
    ),
    Mutant(
        "rows are taken for tokens of one expert each",
        GATHERED,
        "GatheredProducer::token",
        "static_cast<unsigned>(assignment) / static_cast<unsigned>(choices);",
        "static_cast<unsigned>(assignment);",
        EMULATED + "test_tokens_by_index_are_the_rows_of_permute",
    ),
    Mutant(
        "probabilities of dispatched experts get the gradient of one op alone",
        DISPATCHED,
        "DispatchedExperts.step_backward",
        "of_outputs[place] = grad if before is None else before + grad",
        "of_outputs[place] = grad",
        "test_dispatched_experts.py::test_biases_that_are_scaled_have_the_bits_of_the_ops",
    ),
    Mutant(
        "tokens are read by index where backward reads rows in high precision",
        DISPATCHED,
        "DispatchedExperts.refuses",
        'recipe.backward_override == "high_precision" and reads_rows',
        "False",
        "test_dispatched_experts.py::test_it_refuses_if_the_rows_are_read_in_memory",
    ),
    Mutant(
        "all groups have the scale of the first",
        STORE,
        "GroupedFp8Store::operator()",
        "const int group = tiles[tile.row_tile].group;",
        "const int group = 0;",
        EMULATED + "test_a_group_in_fp8_has_a_scale_of_its_own",
    ),
    Mutant(
        "the columnwise copy of NVFP4 has the amax of the rowwise one",
        NVFP4,
        "GroupedNvfp4Store::operator()",
        "own.amaxes[own.col_at];",
        "own.amaxes[0];",
        EMULATED + "test_a_group_in_nvfp4_has_an_amax_of_its_own",
    ),
    Mutant(
        "groups that do not fit are padded as if they did",
        KERNELS,
        "write_ends",
        "long long end = before + sum_up_to(own, lane); end = end < rows ? end : rows; if (g < "
        "groups) { ends[g] = static_cast<int>(end); } if (padded_ends != nullptr) { const long "
        "long up = __shfl_up_sync(0xffffffffu, end, 1); const long long count = end - (lane == 0 "
        "? before : up);",
        "long long end = before + sum_up_to(own, lane); end = end < rows ? end : rows; if (g < "
        "groups) { ends[g] = static_cast<int>(end); } if (padded_ends != nullptr) { const long "
        "long up = __shfl_up_sync(0xffffffffu, end, 1); const long long count = own + 0 * up;",
        EMULATED + "test_tiles_are_the_references",
    ),
    Mutant(
        "rows are taken from where padded groups end, not begin",
        KERNELS,
        "fuser_unpad",
        "const int padded_start = group == 0 || !is_inside ? 0 : padded_ends[group - 1];",
        "const int padded_start = group == 0 || !is_inside ? 0 : padded_ends[group] - 128;",
        EMULATED + "test_rows_of_padded_groups",
    ),
    Mutant(
        "a member's scales are those of the first tile",
        TENSORS,
        "GroupedTensor._member",
        "whole.narrow(dim, first // unit, count)",
        "whole.narrow(dim, 0, count)",
        "test_grouped_tensor.py::test_a_member_has_the_buffers_of_the_group_alone",
    ),
    Mutant(
        "weights of other sizes are joined with as many scales as the first has",
        TENSORS,
        "_for_tiles",
        "if len(set(counts)) == 1:",
        "if True:",
        "test_grouped_quantized_parameters.py::"
        "test_each_tile_of_joined_weights_has_the_number_of_its_weight",
    ),
    Mutant(
        "scales of joined weights are repeated one after the other",
        TENSORS,
        "_for_tiles",
        "if len(set(counts)) == 1:",
        "if False:",
        "test_grouped_quantized_parameters.py::"
        "test_a_repeated_pass_joins_many_weights_by_as_many_calls_as_few",
    ),
    Mutant(
        "amaxes of delayed scaling are not recorded",
        FORMATS,
        "Float8GroupsQuantizer._record",
        "if self.amaxes:\n    foreach_maximum_",
        "if not self.amaxes:\n    foreach_maximum_",
        "test_grouped_tensor.py::test_a_member_has_the_buffers_of_the_group_alone",
    ),
    Mutant(
        "a kept weight loses the rowwise copy that the next microbatch reads",
        PRODUCTS,
        "GroupedProduct._kept",
        "if not is_own:",
        "if False:",
        "test_grouped_mlp.py::test_weights_of_the_first_microbatch_are_kept",
    ),
    Mutant(
        "under an override the gradient is quantized",
        PRODUCTS,
        "QuantizedProduct._gradient",
        "if self.is_exact:",
        "if False:",
        "test_grouped_mlp.py::test_bits_are_those_of_the_ops",
    ),
    Mutant(
        "high precision saves the quantized operand",
        PRODUCTS,
        "GroupedProduct._kept",
        'if self.ctx.backward_override == "high_precision":\n    return values\nif',
        "if",
        "test_grouped_products.py::test_overrides_save_what_they_say",
    ),
    Mutant(
        "groups are quantized again with the scales of a later step",
        "tensors/group_formats.py",
        "Float8GroupsQuantizer.from_kernel",
        "buffers[AMAXES] = scale.clone() if scale is self.scales[0] else scale",
        "buffers[AMAXES] = scale",
        "test_rebuilt.py::test_delayed_scales_of_experts_are_those_of_the_forward",
        select="kernels and 1",
    ),
    Mutant(
        "the input of groups is quantized again with the scales of this time",
        PRODUCTS,
        "QuantizedProduct._rebuilt",
        "return quantizer.repeating(scaling)(rows)",
        "return quantizer(rows)",
        "test_rebuilt.py::test_delayed_scales_of_experts_are_those_of_the_forward",
    ),
    Mutant(
        "the weights of groups are quantized again with the scales of this time",
        PRODUCTS,
        "QuantizedProduct._quantized_weight",
        "quantizer = quantizer.repeating(scaling)",
        "pass",
        "test_rebuilt.py::test_delayed_scales_of_experts_are_those_of_the_forward",
    ),
    Mutant(
        "gradients of scales keep the places of padded rows",
        PRODUCTS,
        "unpadded_values",
        "return values if padded is None else unpad(values.view(-1, 1), padded).view(-1)",
        "return values if padded is None else values[: padded.rows]",
        "test_grouped_mlp.py::test_bits_are_those_of_the_ops",
    ),
    Mutant(
        "sizes of two tensors are taken for the same",
        MLP,
        "GroupedMLP._products",
        "is_fused = extras[0][0] is extras[2][0] and are_no_buffers",
        "is_fused = are_no_buffers",
        "test_grouped_mlp.py::test_sizes_of_two_tensors_run_the_ops_one_by_one",
    ),
    Mutant(
        "a matrix of a stack is turned with scales for its rows",
        "tensors/dispatch.py",
        "_rows_at",
        "if tensor.has_scales_of_rows or not tensor._is_transposable():",
        "if not tensor._is_transposable():",
        "test_stacked_parameters.py::test_a_view_of_a_matrix_has_its_values_and_writes_it_alone",
        select="current",
    ),
    Mutant(
        "a part of a matrix is written with a scale of its own",
        "tensors/base.py",
        "QuantizedTensor._rows_of_a_write",
        "return stacked",
        "return 1",
        "test_stacked_parameters.py::test_a_write_to_a_part_of_a_matrix_leaves_the_scales_of_others",
        select="current",
    ),
    Mutant(
        "rows of two matrices are copied byte by byte into one",
        "tensors/stacks.py",
        "_StackQuantizer.of_view",
        "if start % root.stacked_rows == 0:",
        "if True:",
        "test_stacked_parameters.py::test_rows_that_begin_inside_a_matrix_are_copied_by_value",
    ),
    Mutant(
        "a write to a part of a matrix quantizes all matrices",
        "tensors/writes.py",
        "blocks_around",
        "if last - first < m:",
        "if False:",
        "test_stacked_parameters.py"
        "::test_a_write_to_a_part_of_a_matrix_writes_the_bytes_of_separate_weights",
    ),
    Mutant(
        "a write to columns of a matrix quantizes all matrices",
        "tensors/dispatch.py",
        "_written_part",
        "if not written or any(view.dtype is not values.dtype for view in written):",
        "if True:",
        "test_stacked_parameters.py"
        "::test_a_write_to_a_part_of_a_matrix_writes_the_bytes_of_separate_weights",
    ),
    Mutant(
        "views have the scales of all matrices",
        "tensors/dispatch.py",
        "_rows",
        "for name in set(whole._layout.shared) & units.keys():",
        "for name in set():",
        "test_stacked_parameters.py::test_a_view_of_a_matrix_has_its_values_and_writes_it_alone",
        select="current",
    ),
    Mutant(
        "a backward does not say which copy of a stack it reads",
        "basic_ops/grouped_loop.py",
        "LoopedProduct._saved_weight",
        "note_reads(weights, self._usage, is_read=is_read)\n"
        'is_values = self.ctx.backward_override == "high_precision"',
        'is_values = self.ctx.backward_override == "high_precision"',
        "test_sharded_experts.py::test_on_two_ranks",
        select="a_pass_gathers_the_copy_of_stacked and mxfp8",
    ),
)
