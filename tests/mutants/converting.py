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
        "        if _is_like(y, expected) and _is_like(grad, expected_grad, loose=True):\n",
        "        if True:\n",
        f"{TEST}a_converted_feed_forward_has_the_values_of_its_own_forward",
        select="gelu",
    ),
    Mutant(
        "values that others read are computed inside of a chain",
        CHAINS,
        "            if not read:\n",
        "            if True:\n",
        f"{TEST}a_look_alike_computes_as_before",
    ),
    Mutant(
        "hooks of children are not looked for",
        PARTS,
        "            if path and (hooks := hooks_of(module)):\n",
        "            if path and (hooks := hooks_of(module)) is module:\n",
        CHANGED,
        select="hook",
    ),
    Mutant(
        "attributes of children are not compared",
        UNIT,
        "            if attributes_of(child_of(owner, path)) != attributes:\n",
        "            if child_of(owner, path) is None:\n",
        LOOKED,
        select="eps",
    ),
    Mutant(
        "children that were added or removed are not noticed",
        UNIT,
        "            if _names_of_children(child_of(owner, path)) != names:\n",
        "            if child_of(owner, path) is None:\n",
        f"{TEST}a_model_that_loops_over_layers_may_lose_and_get_some",
    ),
    Mutant(
        "a module between two ops that was replaced still runs",
        UNIT,
        "                if child_of(owner, name) is not module:\n",
        "                if child_of(owner, name) is None:\n",
        f"{TEST}a_dropout_and_a_norm_that_were_replaced_are_used",
    ),
    Mutant(
        "hooks that were added after a call are not noticed",
        KNOWN,
        "            not any(noted.hooks)\n",
        "            True\n",
        CHANGED,
        select="hook and after",
    ),
    Mutant(
        "attributes that were set after a call are not noticed",
        KNOWN,
        "            and noted.attributes == noted.copies\n",
        "",
        LOOKED,
        select="eps",
    ),
    Mutant(
        "dtypes and shapes that have changed after a call are not noticed",
        KNOWN,
        "            and noted.have_same_layout(*_tensors(noted.parameters))\n",
        "",
        LOOKED,
        select="dtype",
    ),
    Mutant(
        "a child that was replaced lives until the next call",
        KNOWN,
        "    def _forget(self) -> None:\n        self._noted = None\n",
        "    def _forget(self) -> None:\n        pass\n",
        f"{TEST}a_child_that_was_replaced_is_not_kept_alive",
    ),
    Mutant(
        "weights that model.to has moved apart are not joined again",
        "conversion/converted.py",
        "  # type: ignore[misc]\n        join_weights(self)  # type: ignore[arg-type]\n"
        "        return result\n",
        "  # type: ignore[misc]\n        return result\n",
        f"{TEST}gate_and_up_are_one_memory_and_stay_the_same_parameters",
    ),
    Mutant(
        "linears that are kept are quantized",
        CONVERT,
        "        return not self._kept.isdisjoint(_linears_of(path, unit))\n",
        "        return False\n",
        f"{TEST}a_recipe_is_that_of_the_whole_model_and_keep_leaves_linears_out",
    ),
    Mutant(
        "linears that are kept run under the autocast around them",
        UNIT,
        "        with contextlib.nullcontext() if is_quantized else autocast(enabled=False):\n",
        "        with contextlib.nullcontext():\n",
        f"{TEST}a_recipe_is_that_of_the_whole_model_and_keep_leaves_linears_out",
    ),
    Mutant(
        "a converted module under torch.func runs its pipeline",
        UNIT,
        "        if is_functorch_active() or forward_ad_level() >= 0:\n",
        "        if is_functorch_active() and forward_ad_level() >= 0:\n",
        f"{TEST}a_transform_of_torch_func_has_the_values_of_the_own_forward",
        select="vmap",
    ),
    Mutant(
        "a graph gives the parameters of the first pipeline to the second one",
        TRACED,
        "            first += len(part.parameters)\n",
        "",
        f"{TEST}a_checkpoint_in_a_compiled_graph_needs_no_setting",
        select="torch and None",
    ),
)
