"""Mistakes in what lives from step to step: kept weights, scales, recomputation, state."""

from mutants.mutant import Mutant

KEPT_WEIGHTS = (
    Mutant(
        "a kept weight serves after the weight was written to",
        "basic_ops/basic_linear.py",
        "kept is not None and kept[0] is weight and kept[1] == made_for",
        "kept is not None and kept[0] is weight",
        "test_operand_flow.py::test_a_weight_is_quantized_once_for_all_microbatches",
    ),
    Mutant(
        "a kept weight serves after the weight was replaced",
        "basic_ops/basic_linear.py",
        "kept is not None and kept[0] is weight and kept[1] == made_for",
        "kept is not None and kept[1] == made_for",
        "test_microbatches.py",
    ),
    Mutant(
        "a weight kept in evaluation serves training without a columnwise copy",
        "basic_ops/basic_linear.py",
        "if usage.columnwise or not columnwise:",
        "if usage.rowwise:",
        "test_microbatches.py",
    ),
    Mutant(
        "the kept weight loses its rowwise copy to the first backward",
        "basic_ops/basic_linear.py",
        "                is_first_microbatch is None\n                and not isinstance(weight,",
        "                True\n                and not isinstance(weight,",
        "test_microbatches.py",
    ),
    Mutant(
        "a recomputation of the first microbatch quantizes its weight again",
        "basic_ops/basic_linear.py",
        "if is_kept and (is_in_backward() or not is_first_microbatch):",
        "if is_kept and not is_first_microbatch:",
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
        "an autocast inside another ends the step",
        "precision.py",
        "if scope.outer is None and exc_type is None:",
        "if exc_type is None:",
        "test_recomputation.py test_low_precision.py test_recipe.py",
        select="delayed or scales or amax or nest or step or autocast",
    ),
    Mutant(
        "a forward that fails ends the step",
        "precision.py",
        "if scope.outer is None and exc_type is None:",
        "if scope.outer is None:",
        "test_recomputation.py::test_a_forward_that_fails_ends_no_step",
    ),
    Mutant(
        "evaluation records amaxes",
        "executor.py",
        "if self.is_delayed and not _is_grad_enabled():",
        "if False:",
        "test_recomputation.py::test_evaluation_leaves_training_as_it_is",
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

RECOMPUTATION = (
    Mutant(
        "a saved tensor that comes back otherwise is not noticed",
        "executor.py",
        "if found != kept and kept is not None:",
        "if kept is None:",
        "test_recomputation.py::test_a_saved_tensor_that_comes_back_otherwise_is_named",
    ),
    Mutant(
        "a recomputation runs without the recipe of its forward",
        "executor.py",
        "with recomputing_under(conditions):",
        "with recomputing_under(_UNQUANTIZED):",
        "test_recomputation.py::test_a_recomputation_runs_under_the_conditions_of_its_forward",
    ),
    Mutant(
        "an autocast that the function enters does not count in its recomputation",
        "pipeline.py",
        "return replace(self._conditions, recipe=current_recipe()) if is_inside"
        " else self._conditions",
        "return self._conditions",
        "test_recomputation.py",
        select="inside",
    ),
    Mutant(
        "a plain call leaves the conditions of an earlier call under a recipe",
        "pipeline.py",
        "        elif self._conditions is not None:\n            self._conditions = None\n",
        "",
        "test_recomputation.py test_low_precision.py",
        select="recomput or checkpoint",
    ),
    Mutant(
        "a pipeline under another recipe is recomputed under the recipe of the node that asks",
        "pipeline.py",
        "asked.ops is self.basic_ops or not (is_inside or asked.is_nested)",
        "asked.ops is self.basic_ops or not is_inside",
        "test_recomputation.py::test_pipelines_under_different_recipes_may_share_a_checkpoint",
    ),
)

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
        "a copy of an op points at the pipeline of the original",
        "op.py",
        'state.pop("_pipeline", None)',
        "pass",
        "test_sequential.py",
        select="copy_of",
    ),
    Mutant(
        "a copy of an op counts as captured",
        "op.py",
        '{**super().__getstate__(), "_captured": False, "_quantizers": None}',
        '{**super().__getstate__(), "_quantizers": None}',
        "test_sequential.py::test_a_copy_of_a_captured_op_may_be_bound_again",
    ),
    Mutant(
        "a frozen norm that is made from meta becomes trainable",
        "basic_ops/normalization.py",
        "parameter = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)",
        "parameter = torch.nn.Parameter(data)",
        "test_state.py::test_a_frozen_parameter_on_meta_stays_frozen",
    ),
    Mutant(
        "the first forward resets parameters that a checkpoint has filled",
        "basic_ops/normalization.py",
        "for name, parameter in named if parameter.is_meta])",
        "for name, parameter in named])",
        "test_robustness.py::test_a_loaded_parameter_is_not_made_again test_state.py",
        select="meta or loaded",
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
    Mutant(
        "another library's bytes are read as delayed scaling's state",
        "op.py",
        "if not isinstance(state, torch.Tensor) or state.dtype is not torch.float32:",
        "if not isinstance(state, torch.Tensor):",
        "test_state.py::test_extra_state_of_another_library_is_accepted_and_never_unpickled",
    ),
)
