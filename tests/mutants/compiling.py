"""Mistakes in pipelines inside torch.compile."""

from mutants.mutant import Mutant

FILE = "runtime/compiled.py"
TEST = "test_compiled.py::"
BITS = f"{TEST}test_a_compiled_step_has_the_bits_of_an_eager_one"
CHANGE = f"{TEST}test_a_change_after_compiling_counts"

COMPILING = (
    Mutant(
        "a changed attribute of an op does not change its structure",
        "op/fusible.py",
        '        if is_change and "_structure" in self.__dict__:\n',
        "        if False:\n",
        CHANGE,
        select="eps",
    ),
    Mutant(
        "values of attributes are no part of the structure",
        "op/structure.py",
        'parts.append(f"{attribute}={text}")',
        'parts.append(f"{attribute}")',
        CHANGE,
        select="eps",
    ),
    Mutant(
        "Dynamo does not compare the structures of ops",
        FILE,
        "            tuple(structures + fusions),\n",
        "            (),\n",
        CHANGE,
        select="eps",
    ),
    Mutant(
        "the recipe is no part of the facts",
        FILE,
        "    facts = Facts(recipe_key, is_grad_enabled",
        '    facts = Facts("", is_grad_enabled',
        f"{TEST}test_equal_recipes_share_a_graph_and_others_do_not",
    ),
    Mutant(
        "whether gradients are wanted is no part of the facts",
        FILE,
        "    facts = Facts(recipe_key, is_grad_enabled,",
        "    facts = Facts(recipe_key, True,",
        f"{TEST}test_a_call_without_gradients_saves_nothing",
    ),
    Mutant(
        "the dtype of torch's autocast is no part of the facts",
        FILE,
        "is_grad_enabled, device, autocast, parameter_count, tensors, training)\n",
        "is_grad_enabled, device, None, parameter_count, tensors, training)\n",
        f"{TEST}test_torchs_autocast",
    ),
    Mutant(
        "an autocast leaves no key",
        "precision/contexts.py",
        "        is_autocast_used = True\n        _recipe_key = self._key\n",
        "        is_autocast_used = True\n",
        BITS,
        select="current",
    ),
    Mutant(
        "a thread runs under the recipe of another one",
        FILE,
        "        if recipe is not self._recipe and recipe != self._recipe:\n",
        "        if False:\n",
        f"{TEST}test_a_thread_under_another_recipe_is_refused_and_the_next_call_works",
    ),
    Mutant(
        "a recomputation under another recipe is not noticed",
        FILE,
        "        if again is not None and again.recipe != self._recipe:\n",
        "        if False:\n",
        f"{TEST}test_a_recomputation_under_another_recipe_is_refused",
    ),
    Mutant(
        "dropout is traced in training",
        FILE,
        "    if any(training[i] for i in random) or",
        "    if",
        f"{TEST}test_dropout_is_in_the_graph_of_an_evaluation",
    ),
    Mutant(
        "a copy of a pipeline stays in the mode of its first trace",
        FILE,
        '                op.__dict__["training"] = training\n',
        "                pass\n",
        f"{TEST}test_an_evaluation_after_training_drops_nothing",
    ),
    Mutant(
        "an output that is the input is returned as it is",
        FILE,
        "    tensor = tensor.clone() if storage_of",
        "    tensor = tensor if storage_of",
        f"{TEST}test_writes_to_an_output_do_not_change_the_input",
    ),
    Mutant(
        "strides are no part of what tells passes apart",
        FILE,
        "for size in [*tensor.shape, *tensor.stride()]]",
        "for size in tensor.shape]",
        f"{TEST}test_backwards_in_another_order_read_their_own_layouts",
    ),
    Mutant(
        "a copy of a pipeline keeps the parameters of a call",
        FILE,
        "                self._give(self._no_parameters)\n",
        "                pass\n",
        f"{TEST}test_a_model_that_is_compiled_and_dropped_frees_its_parameters",
    ),
)
