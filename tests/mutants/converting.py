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
)
