"""Mistakes in the conversion of models of other libraries."""

from __future__ import annotations

from mutants.mutant import Mutant

CONVERT = "conversion/convert.py"
UNIT = "conversion/unit.py"
PARTS = "conversion/parts.py"
CHAINS = "conversion/chains.py"
LEAVES = "conversion/leaves.py"
KNOWN = "conversion/known_modules.py"
TRACED = "runtime/traced.py"

TEST = "test_convert.py::test_"
CHANGED = f"{TEST}a_child_that_was_changed_is_what_runs"
LOOKED = f"{TEST}children_are_looked_at_again_after_a_change_alone"

CONVERTING = (
    Mutant(
        "an activation is not compared with the values of those that fuser has",
        LEAVES,
        "activation_like",
        "if _is_like(y, expected) and _is_like(grad, expected_grad, loose=True):",
        "if True:",
        f"{TEST}a_converted_feed_forward_has_the_values_of_its_own_forward",
        select="gelu",
    ),
    Mutant(
        "values that others read are computed inside of a chain",
        CHAINS,
        "Chains.ending_at",
        "if not read:",
        "if True:",
        f"{TEST}a_look_alike_computes_as_before",
    ),
    Mutant(
        "hooks of children are not looked for",
        PARTS,
        "Chain.refusal",
        "if path and (hooks := hooks_of(module)):",
        "if path and (hooks := hooks_of(module)) is module:",
        CHANGED,
        select="hook",
    ),
    Mutant(
        "attributes of children are not compared",
        UNIT,
        "Runner._refusal",
        "if attributes_of(child_of(owner, path)) != attributes:",
        "if child_of(owner, path) is None:",
        LOOKED,
        select="eps",
    ),
    Mutant(
        "children that were added or removed are not noticed",
        UNIT,
        "Runner._refusal",
        "if _names_of_children(child_of(owner, path)) != names:",
        "if child_of(owner, path) is None:",
        f"{TEST}a_model_that_loops_over_layers_may_lose_and_get_some",
    ),
    Mutant(
        "a module between two ops that was replaced still runs",
        UNIT,
        "Runner._refusal",
        "if child_of(owner, name) is not module:",
        "if child_of(owner, name) is None:",
        f"{TEST}a_dropout_and_a_norm_that_were_replaced_are_used",
    ),
    Mutant(
        "hooks that were added after a call are not noticed",
        KNOWN,
        "KnownModules.are_as_noted",
        "not any(noted.hooks)",
        "True",
        CHANGED,
        select="hook and after",
    ),
    Mutant(
        "attributes that were set after a call are not noticed",
        KNOWN,
        "KnownModules.are_as_noted",
        "and noted.attributes == noted.copies and",
        "and",
        LOOKED,
        select="eps",
    ),
    Mutant(
        "dtypes and shapes that have changed after a call are not noticed",
        KNOWN,
        "KnownModules.are_as_noted",
        "and noted.have_same_layout(*_tensors(noted.parameters))",
        "",
        LOOKED,
        select="dtype",
    ),
    Mutant(
        "a child that was replaced lives until the next call",
        KNOWN,
        "KnownModules._forget",
        "self._noted = None",
        "pass",
        f"{TEST}a_child_that_was_replaced_is_not_kept_alive",
    ),
    Mutant(
        "weights that model.to has moved apart are not joined again",
        "conversion/converted.py",
        "Converted._apply",
        "join_weights(self)",
        "",
        f"{TEST}gate_and_up_are_one_memory_and_stay_the_same_parameters",
    ),
    Mutant(
        "linears that are kept are quantized",
        CONVERT,
        "_Search.keeps",
        "return not self._kept.isdisjoint(_linears_of(path, unit))",
        "return False",
        f"{TEST}a_recipe_is_that_of_the_whole_model_and_keep_leaves_linears_out",
    ),
    Mutant(
        "linears that are kept run under the autocast around them",
        UNIT,
        "Pipeline._run",
        "with contextlib.nullcontext() if is_quantized else autocast(enabled=False):",
        "with contextlib.nullcontext():",
        f"{TEST}a_recipe_is_that_of_the_whole_model_and_keep_leaves_linears_out",
    ),
    Mutant(
        "a converted module under torch.func runs its pipeline",
        UNIT,
        "Runner.refusal",
        "if is_functorch_active() or forward_ad_level() >= 0:",
        "if is_functorch_active() and forward_ad_level() >= 0:",
        f"{TEST}a_transform_of_torch_func_has_the_values_of_the_own_forward",
        select="vmap",
    ),
    Mutant(
        "a graph gives the parameters of the first pipeline to the second one",
        TRACED,
        "traced_call",
        "first += len(part.parameters)",
        "",
        f"{TEST}a_checkpoint_in_a_compiled_graph_needs_no_setting",
        select="torch and None",
    ),
    Mutant(
        "linears of two dtypes run as one",
        PARTS,
        "LinearPart.refusal",
        "weight.dtype not in COMPUTE_DTYPES or weight.dtype is not first.dtype",
        "weight.dtype not in COMPUTE_DTYPES",
        "test_refusals.py::test_two_linears_of_which_one_is_in_another_dtype_do_not_run_as_one",
    ),
    Mutant(
        "linears of two sizes run as one",
        PARTS,
        "LinearPart.refusal",
        "if weight.shape != first.shape:",
        "if False:",
        "test_refusals.py::test_two_linears_of_other_sizes_do_not_run_as_one",
    ),
    Mutant(
        "the class of the first weight stands for those of all",
        PARTS,
        "LinearPart.refusal",
        "first = linears[0].weight\n"
        "for name, linear in zip(self.names, linears, strict=True):\n"
        '    weight = linear._parameters.get("weight")\n'
        "    if type(weight) not in PLAIN_TENSORS:",
        "first = linears[0].weight\n"
        "for name, linear in zip(self.names, linears, strict=True):\n"
        '    weight = linear._parameters.get("weight")\n'
        "    if type(first) not in PLAIN_TENSORS:",
        "test_refusals.py::test_a_change_of_any_linear_is_seen",
    ),
    Mutant(
        "a norm computes with parameters of any class",
        PARTS,
        "NormPart.refusal",
        "or set(present) - set(PLAIN_TENSORS)",
        "",
        "test_refusals.py::test_a_change_of_a_norm_is_seen",
    ),
    Mutant(
        "the eps of a norm is the smallest of its numbers",
        LEAVES,
        "norm_part",
        "for eps in sorted(floats):",
        "for eps in sorted(floats)[:1]:",
        "test_refusals.py::test_the_eps_of_a_norm_is_found_among_its_numbers",
    ),
    Mutant(
        "a norm is tried in one mode alone",
        LEAVES,
        "_called",
        "for is_training in (False, True):",
        "for is_training in (False, False):",
        "test_refusals.py::test_a_norm_whose_mode_decides_stays",
    ),
    Mutant(
        "experts of transformers, whose forward takes more, stay plain",
        "conversion/experts.py",
        "experts_unit",
        'if len(parameters_of(module)) != 3 and not hasattr(module, "config"):',
        "if len(parameters_of(module)) != 3:",
        "test_experts.py::test_converted_experts_have_the_values_of_their_loop",
    ),
    Mutant(
        "experts of two dtypes run in one",
        "conversion/experts.py",
        "ExpertsPart.refusal",
        "weight.dtype not in COMPUTE_DTYPES or weight.dtype is not first.dtype",
        "weight.dtype not in COMPUTE_DTYPES",
        "test_experts.py::test_changed_experts_compute_what_their_own_forward_does",
    ),
    Mutant(
        "an expert of another rank is none of those here by its index alone",
        "conversion/experts.py",
        "ExpertsPart.inputs",
        "experts = torch.where(experts == self.experts, -1, experts)",
        "pass",
        "test_experts.py::test_an_expert_of_another_rank_gets_nothing",
    ),
    Mutant(
        "experts are tried with small values alone",
        "conversion/experts.py",
        "_is_proved",
        "for spread in (0.1, 30.0, 1e4):",
        "for spread in (0.1,):",
        "test_experts.py::test_experts_of_another_kind_stay_as_they_are",
    ),
    Mutant(
        "experts are tried with one expert a token",
        "conversion/experts.py",
        "_is_proved",
        "chosen = order[:, : min(2, experts)]",
        "chosen = order[:, :1]",
        "test_experts.py::test_experts_of_another_kind_stay_as_they_are",
    ),
    Mutant(
        "a linear is large if one of its sides is",
        CONVERT,
        "_Search._leaf",
        "min(linear.shape) >= SMALLEST_LINEAR",
        "max(linear.shape) >= SMALLEST_LINEAR",
        "test_choices.py::test_convert_takes_and_leaves_what_the_table_says",
    ),
    Mutant(
        "the last pattern alone keeps linears",
        CONVERT,
        "_kept",
        "kept.update(named)",
        "kept = set(named)",
        "test_choices.py::test_convert_takes_and_leaves_what_the_table_says",
    ),
)
