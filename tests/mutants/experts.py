"""Mistakes in the router and in the permutation by expert, in kernels and in PyTorch."""

from mutants.mutant import Mutant

KERNELS = "cuda/kernels/permutation.cu"
REFERENCE = "reference/permutation.py"
MOE = "moe/permutation.py"
ROUTER = "moe/router.py"
RECORDED = "test_recorded_experts.py::"

EXPERTS = (
    Mutant(
        "an index of 64 bits is cut to 32",
        KERNELS,
        "    const Index expert = indices[i];\n",
        "    const int expert = static_cast<int>(indices[i]);\n",
        "test_cuda_permutation.py::test_assignments_are_sorted_by_expert_and_then_by_token",
    ),
    Mutant(
        "a lane reads the next row of an expert after another lane has moved it",
        KERNELS,
        "        __syncwarp();\n        if (expert >= 0 && rank == 0) {\n",
        "        if (expert >= 0 && rank == 0) {\n",
        "test_cuda_permutation.py::test_assignments_are_sorted_by_expert_and_then_by_token",
    ),
    Mutant(
        "a block counts its own assignments among those before it",
        KERNELS,
        "                if (i < own) {\n",
        "                if (i < own + experts) {\n",
        "test_cuda_permutation.py::test_assignments_are_sorted_by_expert_and_then_by_token",
    ),
    Mutant(
        "split sizes count rows past the last one",
        KERNELS,
        "min(row_after, rows) - min(row, rows)",
        "row_after - row",
        "test_cuda_permutation.py::test_assignments_are_sorted_by_expert_and_then_by_token",
    ),
    Mutant(
        "only one unused row of each group of threads is cleared",
        KERNELS,
        "         row >= 0 && row_map[row] < 0; row -= groups) {\n",
        "         row >= 0 && row_map[row] < 0; row -= rows) {\n",
        "test_cuda_permutation.py::test_tokens_are_copied_to_the_rows_of_their_experts",
    ),
    Mutant(
        "a dropped assignment adds the first row",
        KERNELS,
        "            from[i] = first + i < choices ? own[first + i] : -1;\n",
        "            from[i] = first + i < choices ? max(own[first + i], 0) : -1;\n",
        "test_cuda_permutation.py::test_the_rows_of_a_token_are_added",
    ),
    Mutant(
        "a dropped assignment adds zero times a row",
        REFERENCE,
        "        out = torch.where((rows >= 0)[:, None], out + term, out)\n",
        "        out = out + term * (rows >= 0)[:, None]\n",
        "test_moe.py::test_a_dropped_probability_may_be_nan",
    ),
    Mutant(
        "rows without an assignment keep the first token",
        REFERENCE,
        "    return y.masked_fill_((row_map < 0)[:, None], 0)\n",
        "    return y\n",
        "test_moe.py::test_rows_are_those_of_a_loop_over_experts_and_tokens",
    ),
    Mutant(
        "the gradient of a dropped probability is a dot product",
        REFERENCE,
        "torch.where(rows >= 0, _row_sums(products), 0)",
        "_row_sums(products)",
        "test_moe.py::test_gradients_are_those_of_finite_differences",
    ),
    Mutant(
        "one assignment less than the capacity remains",
        MOE,
        "(numbers > capacity)",
        "(numbers >= capacity)",
        "test_moe.py::test_split_sizes_agree_with_the_rows_that_there_are",
    ),
    Mutant(
        "assignments without an expert use up the capacity",
        MOE,
        "        numbers = has_expert.view(-1).cumsum(0)",
        "        numbers = torch.ones_like(has_expert).view(-1).cumsum(0)",
        "test_moe.py::test_position_drops_the_last_tokens",
    ),
    Mutant(
        "the highest probabilities are dropped",
        MOE,
        "sort(descending=True, stable=True)",
        "sort(stable=True)",
        "test_moe.py::test_probs_drops_the_lowest_probabilities_and_of_equal_ones_the_last",
    ),
    Mutant(
        "the router multiplies in the dtype of autocast",
        ROUTER,
        "        with _without_autocast(x.device.type):\n            return x",
        "        with contextlib.nullcontext():\n            return x",
        "test_moe.py::test_the_router_computes_in_fp32_under_autocast_and_keeps_gradients_in_their_"
        "dtypes",
    ),
    Mutant(
        "the load of an expert is counted a token, not an assignment",
        ROUTER,
        "/ chosen.numel()",
        "/ logits.shape[0]",
        "test_moe.py::test_probabilities_and_loss_are_those_of_the_formulas",
    ),
    Mutant(
        "rows after the last group are not zeros",
        "gemm/grouped.py",
        "a.new_zeros(a.shape[0] - sum(groups.sizes), b.shape[2])",
        "a.new_ones(a.shape[0] - sum(groups.sizes), b.shape[2])",
        "test_grouped_linear.py::test_equals_a_loop_of_linears",
    ),
    Mutant(
        "a weight that changes before the backward is not noticed",
        "basic_ops/shared_memory.py",
        "        if found != self.versions:\n",
        "        if found < self.versions:\n",
        "test_grouped_linear.py::test_a_weight_that_changes_before_the_backward_is_noticed",
    ),
    Mutant(
        "a recorded backward compares no versions",
        "runtime/recorded.py",
        "                each.check()\n",
        "                pass\n",
        RECORDED + "test_each_weight_that_changes_before_the_backward_is_noticed",
    ),
    Mutant(
        "biases that change before the backward are not noticed",
        "basic_ops/grouped_linear.py",
        'versioned += self._parts("bias")',
        "versioned += []",
        RECORDED + "test_each_bias_that_changes_before_the_backward_of_the_scales_is_noticed",
    ),
    Mutant(
        "weights that moved are taken for those before",
        "runtime/call_key.py",
        "or list(map(address_of, params)) != addresses ",
        "",
        RECORDED + "test_weights_that_change_are_read_as_they_are",
    ),
    Mutant(
        "weights that were frozen, cast or turned are taken for those before",
        "runtime/call_key.py",
        "is_same is None or not is_same(*params) ",
        "is_same is None ",
        RECORDED + "test_weights_that_change_are_read_as_they_are",
    ),
    Mutant(
        "other storages at the same addresses are taken for those before",
        "runtime/call_key.py",
        "or heads and ends_of_memory(params, heads) != ends:",
        "or False:",
        RECORDED + "test_weights_that_change_are_read_as_they_are",
    ),
    Mutant(
        "a recording is used for weights that do not follow one another",
        "runtime/known_parameters.py",
        "facts = (ties, runs, are_parameters,",
        "facts = (ties, are_parameters,",
        RECORDED + "test_weights_that_change_are_read_as_they_are",
    ),
    Mutant(
        "a weight follows another one in another storage",
        "runtime/known_parameters.py",
        "        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()\n",
        "",
        RECORDED + "test_parameters_follow_one_another_only_in_one_memory",
    ),
    Mutant(
        "a weight is read as of the dtype of the first",
        "basic_ops/shared_memory.py",
        "if set(map(_dtype, parts)) != {first.dtype}:",
        "if not parts:",
        "test_grouped_linear.py::test_weights_of_another_dtype_in_the_buffer_are_read_as_they_are",
    ),
    Mutant(
        "a view beside a tensor is recorded wherever it begins in the storage",
        "cuda/sequence.py",
        "        if len(args) > 3 or kwargs:\n",
        "        if False:\n",
        RECORDED + "test_other_views_beside_a_tensor_are_not_recorded",
    ),
    Mutant(
        "a view beside a tensor is recorded however far it reaches",
        "cuda/sequence.py",
        "any(first <= start and end <= last for first, last in spans)",
        "any(first <= start for first, last in spans)",
        RECORDED + "test_other_views_beside_a_tensor_are_not_recorded",
    ),
    Mutant(
        "cuBLASLt gets rows that are in one another",
        "cuda/cublaslt.py",
        "return down >= columns or rows == 1",
        "return True",
        "test_cublaslt.py::test_torch_multiplies_what_cublaslt_does_not_take",
    ),
)
