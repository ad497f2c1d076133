"""Mistakes in communication over ranks: of linears, of ops, and of plans."""

from mutants.mutant import Mutant

LINEARS = "test_tensor_parallel.py::test_two_ranks_compute_what_one_rank_computes"
BYTES = "test_tensor_parallel.py::test_gathered_operands_have_the_bytes_and_scales_of_one_rank"

PARALLEL = (
    Mutant(
        "ranks quantize gathered rows with scales of their own",
        "basic_ops/quantized_rows.py",
        "Rows(copies.bound_to(group)(x), is_delayed)",
        "Rows(copies(x), is_delayed)",
        BYTES,
        select="current",
    ),
    Mutant(
        "amaxes of columns are not reduced",
        "tensors/rowwise_scaling.py",
        "torch.distributed.all_reduce(largest,",
        "torch.distributed.all_reduce(largest.clone(),",
        BYTES,
        select="rowwise",
    ),
    Mutant(
        "blocks with rows of two ranks are gathered as bytes",
        "communication/quantized_gather.py",
        "rows % units[name][1] == 0 if name in units",
        "True if name in units",
        "test_parallel_ops.py::test_rows_that_two_ranks_quantize_together_are_gathered_first",
    ),
    Mutant(
        "the gradient of a column parallel input is not added",
        "basic_ops/linear_parallel.py",
        '        elif parallel.mode == "column":\n            reducing',
        '        elif parallel.mode == "":\n            reducing',
        LINEARS,
        select="unquantized",
    ),
    Mutant(
        "the gradient of a row parallel output is not gathered",
        "basic_ops/linear_parallel.py",
        "    if op._parallel.gathers_grad:\n",
        "    if not op:\n",
        LINEARS,
        select="unquantized",
    ),
    Mutant(
        "every rank adds the bias of a row parallel linear",
        "basic_ops/bias.py",
        "        if not self.is_added:\n",
        "        if self is None:\n",
        "test_parallel_ops.py::test_a_parallel_linear_with_a_bias_is_that_of_one_rank",
    ),
    Mutant(
        "a backward uses the group that the op has now",
        "basic_ops/quantized_rows.py",
        "return resolved(op, own) if noted is None else noted(op)",
        "return resolved(op, own)",
        "test_parallel_ops.py::test_a_backward_uses_the_group_of_its_forward_which_nothing_keeps",
    ),
    Mutant(
        "a context keeps the group",
        "communication/groups.py",
        "self._ref = weakref.ref(group)",
        "self._ref = lambda: group",
        "test_parallel_ops.py::test_a_backward_uses_the_group_of_its_forward_which_nothing_keeps",
    ),
    Mutant(
        "scales of two ranks are not compared",
        "basic_ops/quantized_rows.py",
        "checks_scales=self.checks_scales",
        "checks_scales=False",
        "test_parallel_ops.py::test_ranks_with_different_scales_are_told",
    ),
    Mutant(
        "a fusion that does not communicate takes ops that do",
        "plan/planner.py",
        "        if fusion.communicates:\n",
        "        if fusion:\n",
        "test_parallel_ops.py::test_a_fusion_that_would_not_communicate_is_refused",
    ),
    Mutant(
        "a linear that communicates is recorded",
        "basic_ops/basic_linear.py",
        "        return self._parallel is None\n",
        "        return True\n",
        "test_parallel_ops.py::test_a_pipeline_that_communicates_is_not_recorded",
    ),
    Mutant(
        "an all-reduce counts the bytes of one direction",
        "specs.py",
        "2 * others * own // self.ranks",
        "others * own // self.ranks",
        "test_parallel_ops.py::test_the_bytes_of_collectives_are_those_of_a_ring",
    ),
    Mutant(
        "the caller's tensor is reduced in place",
        "communication/collectives.py",
        "        out = out.clone()\n",
        "        pass\n",
        "test_parallel_ops.py::test_all_reduce_adds_both_ways_or_forward_alone",
    ),
)
