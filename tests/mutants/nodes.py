"""Mistakes in pipelines that are cut into several autograd nodes."""

from mutants.mutant import Mutant

BITS = "test_autograd_nodes.py::test_cuts_change_no_bits"
LEAVING = "test_gradient_types.py::test_gradients_of_leaves_are_plain"
WAITS = "test_autograd_nodes.py::test_a_pipeline_is_one_node_unless_gradients_are_needed_early"

NODES = (
    Mutant(
        "a quantized gradient is dequantized at a cut",
        "runtime/codegen.py",
        'dx = "dx" if self.neighbours.before is not None else grad.format("dx")',
        'dx = grad.format("dx")',
        BITS,
        select="MXFP8",
    ),
    Mutant(
        "the start of a pipeline is taken for a cut",
        "plan/cuts.py",
        "others.add(0)",
        "others.discard(0)",
        LEAVING,
        select="quantize and MXFP8",
    ),
    Mutant(
        "the gradient of an input leaves as the op before a cut would take it",
        "runtime/codegen.py",
        'grad = "{0} if type({0}) is tensor else plain({0})"',
        'grad = "{0}"',
        LEAVING,
        select="user and MXFP8",
    ),
    Mutant(
        "the gradient of a parameter is what a user's op returns",
        "runtime/codegen.py",
        'row = f"map(plain, p{i} or ())" if i in external else f"(p{i} or ())"',
        'row = f"(p{i} or ())"',
        LEAVING,
        select="user and MXFP8",
    ),
    Mutant(
        "a view of a quantized gradient counts as plain",
        "runtime/codegen.py",
        "return grad.dequantize() if isinstance(grad, WrapperTensor) else grad",
        "return grad.dequantize() if hasattr(grad, 'format') else grad",
        "test_gradient_types.py::test_a_quantized_gradient_of_a_caller_does_not_pass_through",
    ),
    Mutant(
        "the op after a cut quantizes no gradient for the op before it",
        "runtime/codegen.py",
        "reader = self._op(index - 1) if index else self.neighbours.before",
        "reader = self._op(index - 1) if index else None",
        "test_autograd_nodes.py::test_a_quantized_tensor_passes_a_cut",
    ),
    Mutant(
        "the op after a cut gets an input that was not quantized for it",
        "runtime/codegen.py",
        "reader = self._op(index) if inside else self.neighbours.after",
        "reader = self._op(index) if inside else None",
        "test_autograd_nodes.py::test_a_quantized_tensor_passes_a_cut",
    ),
    Mutant(
        "a cut divides a step of backward",
        "plan/cuts.py",
        "for op in sorted(starts[0] & starts[1] - others):",
        "for op in sorted(starts[0] - others):",
        "test_autograd_nodes.py::test_no_cut_is_inside_a_step_of_forward_or_backward",
    ),
    Mutant(
        "a cut divides a step of forward",
        "plan/cuts.py",
        "for op in sorted(starts[0] & starts[1] - others):",
        "for op in sorted(starts[1] - others):",
        "test_autograd_nodes.py::test_no_cut_is_inside_a_step_of_forward_or_backward",
    ),
    Mutant(
        "a cut is beside a user's op",
        "plan/cuts.py",
        "        if op.is_external\n",
        "        if not ops\n",
        "test_autograd_nodes.py::test_no_cut_is_beside_a_users_op",
    ),
    Mutant(
        "a gradient is converted at a cut",
        "plan/cuts.py",
        "if not op_key.input_requires_grad or main[op] or",
        "if not op_key.input_requires_grad or",
        "test_autograd_nodes.py::test_no_cut_is_where_autograd_would_convert_a_gradient",
    ),
    Mutant(
        "a cut is between the uses of one weight",
        "plan/cuts.py",
        "if not any(first < op <= last for first, last in joined)",
        "if True",
        "test_autograd_nodes.py::test_no_cut_is_between_the_uses_of_one_tensor",
    ),
    Mutant(
        "the first node is as large as the others",
        "plan/cuts.py",
        "wanted, stop = max(first, FIRST_BYTES), len(self._bytes)",
        "wanted, stop = max(bytes_of_others, FIRST_BYTES), len(self._bytes)",
        WAITS,
    ),
    Mutant(
        "nodes are cut after the first only",
        "plan/cuts.py",
        "wanted, stop = max(bytes_of_others, FIRST_BYTES), gap.op",
        "break",
        WAITS,
    ),
    Mutant(
        "a forward in no_sync is cut",
        "runtime/cut.py",
        "if ddp is not None and ddp.require_backward_grad_sync:",
        "if ddp is not None:",
        WAITS,
    ),
    Mutant(
        "a recomputation forgets that its forward was cut",
        "runtime/cut.py",
        "return found or self._last\n",
        "return found\n",
        "test_data_parallel.py::test_a_checkpointed_forward_is_cut_in_its_recomputation",
    ),
    Mutant(
        "an extra output on a channel across a cut is returned to the caller",
        "runtime/cut.py",
        "                    if place in self._returned:\n",
        "                    if True:\n",
        BITS,
    ),
    Mutant(
        "keyword arguments go to the ops of the first node",
        "runtime/cut.py",
        "kwargs and kwargs[part.ops.start : part.ops.stop],",
        "kwargs and kwargs[: len(part.ops)],",
        "test_autograd_nodes.py::test_keyword_arguments_reach_the_ops_of_all_nodes",
    ),
    Mutant(
        "runs of parameters keep their places in the whole pipeline",
        "runtime/known_parameters.py",
        "(first - start, end - first) for",
        "(first, end - first) for",
        "test_autograd_nodes.py::test_the_layout_of_a_part_counts_from_its_first_parameter",
    ),
    Mutant(
        "profiles number the ops of a node from 0",
        "runtime/codegen.py",
        "shown = span(tuple(self.neighbours.start + i for i in indices))",
        "shown = span(indices)",
        "test_autograd_nodes.py::test_the_first_gradient_comes_in_the_first_quarter_of_backward",
    ),
)
