"""Mistakes in what lives from step to step: kept weights, scales, recomputation, state."""

from mutants.mutant import Mutant

KEPT_WEIGHTS = (
    Mutant(
        "the kept weight loses its rowwise copy to the first backward",
        "basic_ops/basic_linear.py",
        "                is_first_microbatch is None\n                and not isinstance(weight,",
        "                True\n                and not isinstance(weight,",
        "test_microbatches.py",
    ),
    Mutant(
        "a copy of a model takes the kept weight along",
        "basic_ops/basic_linear.py",
        'return {**state, "_kept_weight": None}',
        "return state",
        "test_operand_flow.py::test_a_kept_weight_is_neither_copied_nor_saved",
    ),
)

DELAYED_SCALING = (
    Mutant(
        "a second tensor of a step lowers the amax of the first",
        "functional/fp8_scaling.py",
        "amax.copy_(torch.maximum(amax, seen))",
        "amax.copy_(seen)",
        "test_low_precision.py test_recomputation.py",
        select="delayed or scales or amax",
    ),
    Mutant(
        "the history rolls the wrong way",
        "reference/fp8_scaling.py",
        "rolled = amax_history.roll(-1, 0)",
        "rolled = amax_history.roll(1, 0)",
        "test_formats.py",
        select="newest_amax_goes or definition",
    ),
    Mutant(
        "the newest amax counts alone",
        "reference/fp8_scaling.py",
        'amax_history.amax(0) if algorithm == "max" else newest',
        "newest",
        "test_formats.py::test_delayed_scales_follow_the_loop_of_their_definition",
    ),
    Mutant(
        "the margin raises the scale",
        "reference/fp8_scaling.py",
        ".mul_(2.0**-margin)",
        ".mul_(2.0**margin)",
        "test_formats.py::test_delayed_scales_follow_the_loop_of_their_definition",
    ),
    Mutant(
        "the history of a tensor that was not used rolls too",
        "reference/fp8_scaling.py",
        "amax_history.copy_(torch.where(newest != 0, rolled, amax_history))",
        "amax_history.copy_(rolled)",
        "test_formats.py::test_delayed_scales_follow_the_loop_of_their_definition",
    ),
    Mutant(
        "the gradients' step never ends",
        "executor.py",
        "            if run.is_delayed:\n",
        "            if not run:\n",
        "test_low_precision.py test_recomputation.py",
        select="delayed or scales or amax",
    ),
    Mutant(
        "the gradients' state is only read in a recomputation",
        "delayed_scaling.py",
        'recomputed_conditions() if self.mode == "forward" else None',
        "recomputed_conditions()",
        "test_recomputation.py::test_delayed_scaling_goes_on_alike_with_checkpointing_and_without",
    ),
    Mutant(
        "a step ends of a state that was never used",
        "delayed_scaling.py",
        "for state, group in states.items() if state._recipe is not None}",
        "for state, group in states.items()}",
        "test_recomputation.py::test_a_model_with_a_state_goes_on_with_its_first_linear_frozen",
    ),
    Mutant(
        "main_grad is added to where it is to be overwritten",
        "basic_ops/basic_linear.py",
        "main_grad.zero_()",
        "pass",
        "test_state.py::test_a_main_grad_that_is_to_be_overwritten_gets_the_gradient_alone",
    ),
    Mutant(
        "a recomputation quantizes with the scales of a later step",
        "delayed_scaling.py",
        "past = self.scale.clone()",
        "past = self.scale",
        "test_recomputation.py::test_delayed_scaling_with_checkpointing_equals_without",
    ),
    Mutant(
        "ranks with a reduction keep scales of their own",
        "delayed_scaling.py",
        "return self._recipe is not None and self._recipe.reduce_amax",
        "return False",
        "test_amax_reduction.py",
    ),
)

RECOMPUTATION = ()

STATE = (
    Mutant(
        "a checkpoint without extra state is refused",
        "op.py",
        'missing_keys.remove(prefix + "_extra_state")',
        "pass",
        "test_state.py::test_a_checkpoint_without_extra_state_loads_strictly",
    ),
    Mutant(
        "delayed scaling's state is written with scales and history in the wrong order",
        "delayed_scaling.py",
        "torch.cat([sizes, self.scale.cpu(), self.amax_history.flatten().cpu()])",
        "torch.cat([sizes, self.amax_history.flatten().cpu(), self.scale.cpu()])",
        "test_low_precision.py::test_delayed_scales_go_through_checkpoints_and_copies",
    ),
    Mutant(
        "hooks are not told of a gradient that went into main_grad",
        "basic_ops/basic_linear.py",
        "weight.grad_added_to_main_grad = True",
        "pass",
        "test_state.py::"
        "test_grad_added_to_main_grad_is_set_and_a_stand_in_gradient_fires_the_hooks",
    ),
    Mutant(
        "a slice of a Sequential loses the fusions in force",
        "sequential.py",
        "            item.fusions = self.fusions\n",
        "            item.fusions = FUSIONS\n",
        "test_sequential.py::test_a_slice_keeps_the_names_and_the_fusions_in_force",
    ),
)
