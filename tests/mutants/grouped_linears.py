"""Mistakes in grouped linears and the grouped MLP: what is frozen, watched, left and accumulated.

And in what cuBLASLt's products are known by.
"""

from mutants.mutant import Mutant

LOOP = "basic_ops/grouped_loop.py"
PARAMETERS = "basic_ops/grouped_parameters.py"
PRODUCTS = "basic_ops/grouped_products.py"
WGRAD = "basic_ops/grouped_parameters.py"
FORMATS = "tensors/group_formats.py"
MLP = "fused_ops/grouped_mlp.py"
CUBLASLT = "cuda/cublaslt.py"
STORE = "cuda/kernels/fuser/store/grouped_fp8.cuh"
WATCHED = "test_grouped_linear.py::test_every_parameter_that_a_backward_reads_is_watched"
IN_ORDER = (
    "test_grouped_linear.py::test_gradients_that_are_left_come_in_the_order_of_their_backwards"
)
FP32_SUMS = "test_grouped_linear.py::test_the_gradient_of_scales_is_summed_in_fp32"
ACCUMULATORS = (
    "test_quantized_groups.py::test_each_product_has_the_accumulator_that_the_recipe_gives_it"
)
OF_LOOP = "test_quantized_groups.py::test_each_product_of_the_loop_has_it_too"
ROLES = "test_grouped_products.py::test_the_parameters_of_each_role_hold_for_each_group"
SIZES = (
    "test_grouped_products.py"
    "::test_sizes_on_the_host_that_do_not_fit_are_refused_where_none_is_read"
)
ALONE = "test_grouped_mlp.py::test_one_linear_alone_may_keep_its_weights"
EVERY_SET = "test_grouped_mlp.py::test_in_fp32_every_set_of_leaves_gets_its_gradients"
FROZEN = "test_grouped_mlp.py::test_under_a_recipe_leaves_get_their_gradients_whatever_is_frozen"
FROM_KERNELS = "test_grouped_mlp.py::test_leaves_alone_get_their_gradients_from_kernels"
KNOWN = "test_cublaslt.py::test_products_are_known_by_all_that_their_descriptors_say"
KNOWN_MODES = (
    "test_cublaslt.py::test_quantized_products_are_known_by_modes_formats_and_accumulators"
)
SMALL = (
    "test_cuda_grouped.py"
    "::test_a_small_amax_of_a_group_counts_as_epsilon_and_scales_may_be_powers_of_two"
)

GROUPED_LINEARS = (
    Mutant(
        "the versions of biases replace those of the weights",
        PARAMETERS,
        "GroupParameters.note_versions",
        'noted = ctx.versions.tensors if "versions" in ctx.__dict__ else []',
        "noted: list[Any] = []",
        WATCHED,
    ),
    Mutant(
        "only the first parameter's version is compared",
        "basic_ops/shared_memory.py",
        "Versions.check",
        "if found != self.versions:",
        "if found[0] != self.versions[0]:",
        WATCHED,
    ),
    Mutant(
        "the parameters of a linear with scaled biases are not watched",
        PRODUCTS,
        "GroupedProduct.of_backward",
        "linear.check_versions(ctx)",
        "if not linear.scale_bias:\n    linear.check_versions(ctx)",
        "test_grouped_mlp.py::test_a_scaled_bias_is_watched_beside_the_weights",
    ),
    Mutant(
        "wgrad of groups has the accumulator of dgrad",
        PRODUCTS,
        "QuantizedProduct._wgrad",
        '{"is_split": self.ctx.split_accumulators[2]}',
        '{"is_split": self.ctx.split_accumulators[1]}',
        ACCUMULATORS,
    ),
    Mutant(
        "dgrad of groups has the accumulator of the forward",
        PRODUCTS,
        "QuantizedProduct._dgrad",
        '{"is_split": self.ctx.split_accumulators[1],',
        '{"is_split": self.ctx.split_accumulators[0],',
        ACCUMULATORS,
    ),
    Mutant(
        "wgrad of one group after the other has the accumulator of dgrad",
        LOOP,
        "LoopedProduct._wgrad",
        "linear, is_split = self.linear, self.ctx.split_accumulators[2]",
        "linear, is_split = self.linear, self.ctx.split_accumulators[1]",
        OF_LOOP,
    ),
    Mutant(
        "the newest gradients are computed and the oldest are dropped",
        WGRAD,
        "GroupParameters.backward_dw",
        "self._delayed_wgrads[0]()",
        "self._delayed_wgrads[-1]()",
        IN_ORDER,
    ),
    Mutant(
        "the newest gradients are computed first",
        WGRAD,
        "GroupParameters.backward_dw",
        "    self._delayed_wgrads[0]()\nself._delayed_wgrads.popleft()",
        "    self._delayed_wgrads[-1]()\nself._delayed_wgrads.pop()",
        IN_ORDER,
    ),
    Mutant(
        "sizes on a CPU are not checked where all groups are one launch",
        "gemm/grouped.py",
        "groups_of",
        'if split_sizes.device.type == "cpu" or is_read:',
        "if is_read:",
        SIZES,
    ),
    Mutant(
        "a sum of sizes with a negative one passes",
        "gemm/grouped.py",
        "_check_sizes",
        "if any(size < 0 for size in sizes):",
        "if False:",
        SIZES,
    ),
    Mutant(
        "products of the gradient of scales are rounded to 16 bits",
        PRODUCTS,
        "GroupedProduct._bias_gradients",
        "(dy.float() * reference.of_rows(groups.ends, bias, dy.shape[0]).float()).sum(-1)",
        "(dy * reference.of_rows(groups.ends, bias, dy.shape[0])).float().sum(-1)",
        FP32_SUMS,
    ),
    Mutant(
        "the gradient of scales passes through 16 bits",
        PRODUCTS,
        "GroupedProduct._bias_gradients",
        "products = (dy.float() * reference.of_rows(groups.ends, bias, "
        "dy.shape[0]).float()).sum(-1)\n"
        "dscales = reference.zero_tail(groups.ends, products).to(scales.dtype)",
        "products = (dy.float() * reference.of_rows(groups.ends, bias, "
        "dy.shape[0]).float()).sum(-1)\n"
        "dscales = reference.zero_tail(groups.ends, products).to(dy.dtype).to(scales.dtype)",
        FP32_SUMS,
    ),
    Mutant(
        "the second linear keeps its weight with the flag of the first",
        MLP,
        "GroupedMLP._together",
        "of_down.forward(h, extras[2], firsts[2],",
        "of_down.forward(h, extras[2], firsts[0],",
        ALONE,
    ),
    Mutant(
        "the first linear keeps its weight with the flag of the second",
        MLP,
        "GroupedMLP._together",
        "of_up.forward(x, extras[0], firsts[0],",
        "of_up.forward(x, extras[0], firsts[2],",
        ALONE,
    ),
    Mutant(
        "scales of frozen biases get no gradient",
        PRODUCTS,
        "GroupedProduct.backward",
        "reads_dy = self.wants_biases or saved.bias is not None",
        "reads_dy = self.wants_biases",
        FROZEN,
    ),
    Mutant(
        "scales of frozen biases get none without a recipe either",
        PRODUCTS,
        "GroupedProduct.backward",
        "(reads_dy or not self.wants_products)",
        "self.wants_biases",
        EVERY_SET,
    ),
    Mutant(
        "biases alone are left to a kernel that does not run",
        MLP,
        "GroupedMLP._activation_backward",
        "of_up.wants_biases and of_up.wants_products and not of_up.linear.scale_bias",
        "of_up.wants_biases and not of_up.linear.scale_bias",
        FROM_KERNELS,
    ),
    Mutant(
        "sums of unscaled rows are the gradients of scaled biases",
        MLP,
        "GroupedMLP._activation_backward",
        "of_up.wants_biases and of_up.wants_products and not of_up.linear.scale_bias",
        "of_up.wants_biases and of_up.wants_products",
        FROZEN,
    ),
    Mutant(
        "the epsilon and the powers of two of the recipe do not reach groups",
        FORMATS,
        "groups_quantizer",
        "Float8GroupsQuantizer(groups, first, **usages)",
        "Float8GroupsQuantizer(groups, Float8CurrentScalingQuantizer(first.fp8_dtype), **usages)",
        ROLES,
        select="current",
    ),
    Mutant(
        "the kernel of groups does not get the epsilon",
        FORMATS,
        "Float8GroupsQuantizer.from_kernel",
        '"pow2": self.force_pow_2_scales, "eps": self.amax_epsilon}',
        '"pow2": self.force_pow_2_scales}',
        ROLES,
        select="current-kernels",
    ),
    Mutant(
        "the kernel of groups ignores the epsilon",
        STORE,
        "GroupedFp8Store::operator()",
        "eps, kFloatMax);",
        "0u, kFloatMax);",
        SMALL,
    ),
    Mutant(
        "the kernel of groups makes no powers of two",
        STORE,
        "GroupedFp8Store::operator()",
        "E::kMax, pow2,",
        "E::kMax, 0,",
        SMALL,
    ),
    Mutant(
        "products with addends of other strides are taken for the same",
        CUBLASLT,
        "_product",
        "None if addend is None else addend.stride(),",
        "addend is not None,",
        KNOWN,
    ),
    Mutant(
        "products into rows of other strides are taken for the same",
        CUBLASLT,
        "_product",
        "), out.stride(), None",
        "), None",
        KNOWN,
    ),
    Mutant(
        "products with and without a bias are taken for the same",
        CUBLASLT,
        "_product",
        "None if bias is None else bias.dtype,",
        "",
        KNOWN,
    ),
    Mutant(
        "products with other accumulators are taken for the same",
        CUBLASLT,
        "_product",
        "modes, is_split)\ntry:",
        "modes)\ntry:",
        KNOWN_MODES,
    ),
    Mutant(
        "the gradient of an expert without rows is what its memory held",
        LOOP,
        "LoopedProduct._wgrad",
        "products = dy.values.new_zeros(size)",
        "products = dy.values.new_empty(size)",
        "test_groups_without_rows.py::test_experts_without_rows_get_zeros_and_others_their_own",
    ),
    Mutant(
        "rows of no expert are what their memory held",
        LOOP,
        "LoopedProduct._multiplied",
        "return zero_tail(self.groups.ends, y)",
        "return y",
        "test_groups_without_rows.py::test_experts_without_rows_get_zeros_and_others_their_own",
    ),
    Mutant(
        "gradients of rows of no expert are what their memory held",
        LOOP,
        "LoopedProduct._dgrad",
        "return zero_tail(self.groups.ends, dx)",
        "return dx",
        "test_groups_without_rows.py::test_experts_without_rows_get_zeros_and_others_their_own",
    ),
    Mutant(
        "parts of one buffer in another order move into a new one",
        "basic_ops/shared_memory.py",
        "_may_move",
        "is_slice = held == count * parameter.nbytes and offset == place * parameter.numel()",
        "is_slice = held == count * parameter.nbytes",
        "test_grouped_memory.py::test_parts_of_one_buffer_in_another_order_stay_there",
    ),
    Mutant(
        "groups that can be quantized together are multiplied one by one",
        "basic_ops/grouped_linear.py",
        "GroupedLinear._product",
        "quantizers = None if is_read else quantizers_of_groups(self, ctx)",
        "quantizers = None",
        "test_grouped_products.py::test_recipes_that_quantize_all_groups_multiply_them_at_once",
    ),
)
