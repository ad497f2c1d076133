"""Mistakes in quantized tensors, number formats and matrix products."""

from mutants.mutant import Mutant

QUANTIZED_TENSORS = (
    Mutant(
        "bytes are copied into a view whose blocks reach beyond it",
        "tensors/dispatch.py",
        "if exchanges_bytes and target._can_be_written_alone():",
        "if exchanges_bytes:",
        "test_quantized_views.py::test_a_write_through_rows_reaches_the_parent "
        "test_quantized_views.py::test_quantized_rows_are_copied_byte_by_byte_where_blocks_allow",
    ),
    Mutant(
        "bytes of another encoding are copied",
        "tensors/dispatch.py",
        "and source._usage().encoding() == target._usage().encoding()",
        "and source._usage().encoding()",
        "test_quantized_views.py::test_bytes_of_another_encoding_are_not_copied",
    ),
    Mutant(
        "a view that begins inside a block keeps its scales",
        "tensors/base.py",
        "return start % block != 0 or (stop % block != 0 and stop != self._matrix()[0])",
        "return stop % block != 0 and stop != self._matrix()[0]",
        "test_quantized_views.py::test_rows_keep_the_copies_whose_blocks_they_do_not_cut",
    ),
    Mutant(
        "a short last block counts as cut",
        "tensors/base.py",
        "return start % block != 0 or (stop % block != 0 and stop != self._matrix()[0])",
        "return start % block != 0 or stop % block != 0",
        "test_quantized_views.py::test_a_last_block_may_be_short",
    ),
    Mutant(
        "one copy of a tensor may be written to",
        "tensors/base.py",
        "        alias._is_read_only = True\n",
        "",
        "test_quantized_views.py::test_one_copy_and_a_compact_view_are_there_to_be_read",
    ),
    Mutant(
        "a write through transposed rows is taken for one of rows",
        "tensors/base.py",
        "if view.is_turned or any(self._has(which)",
        "if any(self._has(which)",
        "test_quantized_views.py",
        select="transpose or turned",
    ),
    Mutant(
        "NVFP4 with a Hadamard transform is taken for its transpose",
        "tensors/nvfp4.py",
        "return how.with_2d_quantization and not (how.with_rht or how.stochastic_rounding)",
        "return how.with_2d_quantization",
        "test_quantized_views.py::"
        "test_a_transpose_stays_quantized_where_both_copies_are_the_same_values",
    ),
    Mutant(
        "new zeros are quantized in sizes that no block divides",
        "tensors/dispatch.py",
        "return quantizer(zeros) if is_like and is_taken else zeros",
        "return quantizer(zeros) if is_like else zeros",
        "test_quantized_views.py::test_new_zeros_are_quantized_where_only_rows_differ",
    ),
    Mutant(
        "a conversion loses what hangs on a parameter",
        "tensors/dispatch.py",
        "        lambda b: b.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype\n"
        "    )\n    copy._take_attributes(tensor)\n",
        "        lambda b: b.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype\n"
        "    )\n",
        "test_quantized_parameters.py",
    ),
    Mutant(
        "a quantizer carries the group that it was bound to",
        "tensors/fp8.py",
        "return self if self.group is None else replace(self, group=None)",
        "return self",
        "test_quantized_tensors.py::"
        "test_a_bound_quantizer_reduces_its_amax_and_leaves_no_group_on_the_tensor",
    ),
    Mutant(
        "a subclass of a quantizer counts as one that only launches",
        "tensors/quantizer.py",
        '        if "replay_key" not in cls.__dict__:\n',
        '        if "replay_key" in cls.__dict__ and "buffers_of" not in cls.__dict__:\n',
        "test_replay.py::test_a_users_own_quantizer_is_called_every_time",
    ),
)

NUMBER_FORMATS = (
    Mutant(
        "an MXFP8 exponent is rounded down, so that elements saturate",
        "reference/mxfp8.py",
        "(bits.clamp(max=0x7F000000) + 0x7FFFFF) >> 23",
        "bits.clamp(max=0x7F000000) >> 23",
        "test_formats.py::test_the_exponent_of_an_amax",
    ),
    Mutant(
        "an MXFP8 exponent rounds up to that of NaN",
        "reference/mxfp8.py",
        "(bits.clamp(max=0x7F000000) + 0x7FFFFF) >> 23",
        "(bits + 0x7FFFFF) >> 23",
        "test_formats.py::test_an_exponent_never_rounds_up_to_that_of_nan",
    ),
    Mutant(
        "a NaN keeps its sign",
        "reference/fp8.py",
        "x.clamp_(-dtype.max, dtype.max).nan_to_num_(nan=math.nan)",
        "x.clamp_(-dtype.max, dtype.max)",
        "test_formats.py::test_a_cast_saturates_and_every_nan_becomes_one_byte",
    ),
    Mutant(
        "an amax of infinity gives a scale of zero",
        "reference/fp8.py",
        "return torch.where((amax > 0) & (amax < math.inf), scale, 1.0)",
        "return torch.where(amax > 0, scale, 1.0)",
        "test_formats.py::test_the_scale_of_an_amax",
    ),
    Mutant(
        "a scale is divided by twice: as the product with a reciprocal",
        "reference/fp8.py",
        "torch.full_like(amax, max_fp8).div_(amax)",
        "amax.reciprocal().mul_(max_fp8)",
        "test_formats.py::test_scales_equal_the_numpy_definition_for_any_fp32_amax",
    ),
    Mutant(
        "a power-of-two scale is rounded up",
        "reference/fp8.py",
        "scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)",
        "scale = (scale.view(torch.int32) + 0x7FFFFF & -0x800000).view(torch.float32)",
        "test_formats.py::test_the_scale_of_an_amax",
    ),
    Mutant(
        "a block's scale that overflows becomes fp32's largest number",
        "reference/block_scaling.py",
        "overflow = x.float(), min(torch.finfo(x.dtype).max, FLOAT32_MAX)",
        "overflow = x.float(), FLOAT32_MAX",
        "test_formats.py::test_a_scale_that_overflows_is_the_largest_number_of_the_inputs_dtype",
    ),
    Mutant(
        "negative elements do not count in an amax",
        "reference/fp8_scaling.py",
        "torch.maximum(low.abs(), high.abs())",
        "high.abs()",
        "test_formats.py::test_current_scaling_equals_the_numpy_definition",
    ),
    Mutant(
        "both copies of an NVFP4 tensor round with one stream of random words",
        "reference/nvfp4.py",
        "_ROWWISE_STREAM, _COLUMNWISE_STREAM = 0, 1",
        "_ROWWISE_STREAM, _COLUMNWISE_STREAM = 0, 0",
        "test_formats.py::test_the_copies_of_a_tensor_round_independently",
    ),
    Mutant(
        "stochastic rounding rounds up too rarely",
        "reference/nvfp4.py",
        "fixed.add_((words >> 8).to(torch.int32))",
        "fixed.add_((words >> 9).to(torch.int32))",
        "test_formats.py::"
        "test_stochastic_rounding_is_unbiased_over_seeds_and_reaches_both_neighbours_only",
    ),
    Mutant(
        "an NVFP4 tensor of zeros has an infinite scale",
        "reference/nvfp4.py",
        "    encode = encode.masked_fill_(amax == 0, 1.0)\n",
        "",
        "test_formats.py::test_bytes_of_named_nvfp4_blocks "
        "test_formats.py::test_nvfp4_equals_the_numpy_definition",
    ),
    Mutant(
        "columnwise MXFP8 scales are not padded to whole tiles",
        "formats.py",
        "return round_up(blocks, SCALE_TILE_BLOCKS), round_up(k, SCALE_TILE_ROWS)",
        "return round_up(blocks, SCALE_TILE_BLOCKS), k",
        "test_formats.py::test_scale_shapes",
    ),
    Mutant(
        "an element of 4 bits counts as a byte",
        "formats.py",
        "bits = 4 if self.element is DType.kFloat4E2M1 else 8",
        "bits = 8",
        "test_formats.py test_planner.py test_operand_flow.py test_plan.py "
        "test_quantized_tensors.py",
        select="bytes or nbytes or counted or emits",
    ),
    Mutant(
        "a columnwise copy of 128x128 blocks has its scales as the rowwise one",
        "reference/block_scaling.py",
        "padded(scale.reciprocal().t(), col_shape)",
        "padded(scale.reciprocal().reshape(scale.shape[::-1]), col_shape)",
        "test_formats.py::test_block_scaling_equals_the_numpy_definition "
        "test_formats.py::test_a_transposed_columnwise_copy_is_the_rowwise_copy_of_the_transpose",
    ),
    Mutant(
        "the mask of a dropout has other random words on a CPU",
        "reference/dropout.py",
        "PHILOX_ROUNDS = 7",
        "PHILOX_ROUNDS = 10",
        "test_cuda_pointwise.py::test_a_linear_chain_has_the_references_bits_and_mask",
    ),
)

MATRIX_PRODUCTS = (
    Mutant(
        "dgrad and wgrad swap their accumulators",
        "basic_ops/basic_linear.py",
        "_, dgrad_is_split, wgrad_is_split = ctx.split_accumulators",
        "_, wgrad_is_split, dgrad_is_split = ctx.split_accumulators",
        "test_quantized_gemm.py::test_accumulators_are_those_of_the_recipe",
    ),
    Mutant(
        "a split accumulator is asked for where it is not wanted",
        "native_gemm.py",
        "use_fast_accum=not is_split",
        "use_fast_accum=is_split",
        "test_quantized_gemm.py::test_accumulators_are_those_of_the_recipe",
    ),
    Mutant(
        "two E5M2 operands go to tensor cores",
        "native_gemm.py",
        "and DType.kFloat8E4M3 in (a.element, b.element)",
        "and a.element in DType",
        "test_quantized_gemm.py",
    ),
    Mutant(
        "the padding of a native product is not cut off",
        "native_gemm.py",
        "return product if columns == padded_columns else product[:, :columns]",
        "return product",
        "test_quantized_gemm.py::test_native_products_equal_emulated_ones",
    ),
    Mutant(
        "a weight gradient replaces main_grad instead of being added",
        "gemm.py",
        "main_grad.addmm_(a, b, alpha=scale)",
        "main_grad.addmm_(a, b, beta=0, alpha=scale)",
        "test_state.py::test_weight_gradients_add_up_in_fp32_main_grad",
    ),
    Mutant(
        "under an override wgrad reads the columnwise copy of what was saved rowwise",
        "basic_ops/basic_linear.py",
        'which = "rowwise" if override == "dequantized" else "columnwise"',
        'which = "columnwise"',
        "test_backward_override.py",
    ),
    Mutant(
        "a weight is quantized columnwise also where nobody wants dgrad",
        "basic_ops/basic_linear.py",
        "weight_columnwise = wants_dgrad and override is None",
        "weight_columnwise = override is None",
        "test_low_precision.py test_operand_flow.py test_backward_override.py",
        select="copy or copies",
    ),
)
