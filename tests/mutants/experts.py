"""Mistakes in the router and in the permutation by expert, in kernels and in PyTorch."""

from mutants.mutant import Mutant

KERNELS = "cuda/kernels/permutation.cu"
REFERENCE = "reference/permutation.py"
ROUTING = "functional/routing.py"
OPS = "basic_ops/moe.py"
ROUTER = "moe/router.py"

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
        ROUTING,
        "(numbers > capacity)",
        "(numbers >= capacity)",
        "test_moe.py::test_split_sizes_agree_with_the_rows_that_there_are",
    ),
    Mutant(
        "assignments without an expert use up the capacity",
        ROUTING,
        "        numbers = has_expert.view(-1).cumsum(0)",
        "        numbers = torch.ones_like(has_expert).view(-1).cumsum(0)",
        "test_moe.py::test_position_drops_the_last_tokens",
    ),
    Mutant(
        "the highest probabilities are dropped",
        ROUTING,
        "sort(descending=True, stable=True)",
        "sort(stable=True)",
        "test_moe.py::test_probs_drops_the_lowest_probabilities_and_of_equal_ones_the_last",
    ),
    Mutant(
        "the gradient of a dispatched probability is that of another row",
        OPS,
        "ops.unpermute(drows, inverse_map.view(-1, 1), None)",
        "drows[: inverse_map.numel()]",
        "test_moe_ops.py::test_a_layer_has_the_bits_of_permute_and_unpermute",
    ),
    Mutant(
        "rows are copied in the dtype of the tokens under autocast",
        OPS,
        "        dtype = ctx.autocast_dtype or input_.dtype\n        x = cast",
        "        dtype = input_.dtype\n        x = cast",
        "test_moe_ops.py::test_rows_are_copied_in_the_dtype_of_autocast",
    ),
    Mutant(
        "the first row has an assignment although it was dropped",
        "functional/permutation.py",
        "places.masked_fill(places < 0, rows)",
        "places.clamp(min=0)",
        "test_moe_ops.py::test_nothing_in_unused_rows_reaches_a_result_or_a_gradient",
    ),
    Mutant(
        "a row may be combined twice",
        OPS,
        "(counts > 1).any()",
        "(counts > 60).any()",
        "test_moe_ops.py::test_a_combine_refuses_what_are_not_rows_of_its_input",
    ),
    Mutant(
        "integers in a channel ask for a gradient",
        "runtime/pipeline.py",
        "else keys[source.producer or 0].requires_grad and spec.dtype.is_floating_point,",
        "else keys[source.producer or 0].requires_grad,",
        "test_channels.py::test_integers_go_through_a_channel_without_a_gradient",
    ),
    Mutant(
        "the weights of a layer that moved are copied at every call",
        "modules/grouped_linear.py",
        "        self._op._apply(lambda tensor: tensor)\n",
        "",
        "test_grouped_linear_module.py::test_separate_weights_share_one_buffer_also_after_a_move",
    ),
    Mutant(
        "two grouped linears of an expert may get other sizes",
        "runtime/shared_sizes.py",
        "        if sizes != others:",
        "        if sum(sizes) != sum(others):",
        "test_grouped_linear.py::test_two_grouped_linears_of_an_expert_must_get_the_same_sizes",
    ),
    Mutant(
        "grouped linears that are far apart must get the same sizes",
        "runtime/shared_sizes.py",
        '        elif not hasattr(op, "stage"):\n            last = None\n',
        "",
        "test_grouped_linear.py::test_other_groups_are_allowed_after_other_ops_and_in_other_numbers",
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
        "basic_ops/grouped_linear.py",
        "if weight._version != version:",
        "if weight._version < version:",
        "test_grouped_linear.py::test_a_weight_that_changes_before_the_backward_is_noticed",
    ),
    Mutant(
        "cuBLASLt gets rows that are in one another",
        "cuda/cublaslt.py",
        "return down >= columns or rows == 1",
        "return True",
        "test_cublaslt.py::test_torch_multiplies_what_cublaslt_does_not_take",
    ),
)
