"""Mistakes in graphed callables: what a capture leaves, and what a replay is compared with."""

from mutants.mutant import Mutant

CAPTURES = "test_graph_captures.py::"
REPLAYS = "test_graph_replays.py::"

GRAPHS = (
    Mutant(
        "the runs before a capture leave their amaxes in the history",
        "precision/delayed_scaling.py",
        "            self.amax_history.copy_(numbers[1])\n",
        "",
        CAPTURES + "test_states_are_restored_with_their_numbers_and_memory",
    ),
    Mutant(
        "the runs before a capture leave new states",
        "runtime/graphs.py",
        '            vars(op)["_delayed"] = of_op',
        "            pass",
        CAPTURES + "test_states_are_restored_with_their_numbers_and_memory",
    ),
    Mutant(
        "the runs before a capture leave their statistics in buffers",
        "runtime/graphs.py",
        "                buffer.copy_(values)\n",
        "                pass\n",
        CAPTURES + "test_a_capture_leaves_no_trace",
        select="whole",
    ),
    Mutant(
        "the runs before a capture add to main_grad",
        "runtime/graphs.py",
        "            weight.main_grad = torch.zeros_like(main_grad)\n",
        "            weight.main_grad = main_grad\n",
        REPLAYS + "test_main_grad_is_overwritten_in_replays_if_the_weight_says_so",
    ),
    Mutant(
        "the runs before a capture read gradients without values",
        "runtime/graphed.py",
        "    return torch.zeros(output.shape, dtype=output.dtype, device=output.device)\n",
        "    return torch.empty_like(output)\n",
        CAPTURES + "test_no_run_of_a_capture_reads_memory_without_values",
    ),
    Mutant(
        "ops of layers are not walked",
        "op/walk.py",
        "        if isinstance(each, HiddenOps):\n",
        "        if False:\n",
        "test_graphs.py::test_ops_of_layers_are_among_the_ops_of_a_model",
    ),
    Mutant(
        "an inner context swallows the notes of the outer one",
        "precision/delayed_scaling.py",
        "    _uses.noted = (*outer, used)\n",
        "    _uses.noted = (used,)\n",
        "test_graphs.py::test_a_context_notes_states_that_one_inside_it_notes_too",
    ),
    Mutant(
        "addresses are not compared before a replay",
        "runtime/captured.py",
        "            and list(map(_address, tensors)) == self._addresses\n",
        "",
        REPLAYS + "test_a_changed_module_runs_without_its_graph_and_says_what_changed",
        select="data",
    ),
    Mutant(
        "what torch's guard compares is not compared before a replay",
        "runtime/captured.py",
        "            and self._has_same_layouts(*tensors)\n",
        "",
        REPLAYS + "test_an_unfrozen_parameter_gets_its_gradient",
    ),
    Mutant(
        "attributes of ops are not compared before a replay",
        "runtime/captured.py",
        '            and [attributes.get("_changes") for attributes in self._ops]'
        " == self._known_changes\n",
        "",
        REPLAYS + "test_an_attribute_of_an_op_that_was_set_is_followed",
    ),
    Mutant(
        "submodules are not compared before a replay",
        "runtime/captured.py",
        "            list(map(list, map(dict.values, self._parents))),\n",
        "",
        REPLAYS + "test_a_changed_module_runs_without_its_graph_and_says_what_changed",
        select="module",
    ),
    Mutant(
        "a call without gradients is replayed",
        "runtime/graphed.py",
        "        torch.is_grad_enabled(),\n        torch.is_inference",
        "        torch.is_inference",
        REPLAYS + "test_without_gradients_the_module_itself_runs_and_records_no_amax",
    ),
    Mutant(
        "a graph runs outside of the autocast of torch in which it was captured",
        "runtime/graphed.py",
        "        autocast_dtype(device_type),\n",
        "",
        REPLAYS + "test_under_autocast_of_torch_a_graph_casts_the_present_weights",
    ),
    Mutant(
        "a replay of the same graph leaves what its forward saved",
        "runtime/graph_memory.py",
        "not saved[-1].forward < place <",
        "not saved[-1].forward <= place <",
        REPLAYS
        + "test_only_graphs_captured_between_a_forward_and_its_backward_leave_its_memory_alone",
    ),
    Mutant(
        "a second backward of one forward is replayed",
        "runtime/graph_memory.py",
        "< place < saved[-1].backward",
        "< place <= saved[-1].backward",
        REPLAYS + "test_a_backward_runs_once",
    ),
    Mutant(
        "a loaded state stays beside the graph's memory",
        "runtime/captured.py",
        "            if state is None or not state.is_in(memory):\n",
        "            if state is None:\n",
        REPLAYS + "test_replays_use_the_scales_of_a_loaded_checkpoint",
    ),
    Mutant(
        "the state that was replaced stays in the graph's memory",
        "runtime/captured.py",
        "            before.leave(memory)\n",
        "            pass\n",
        CAPTURES
        + "test_a_state_that_replaces_another_has_its_own_numbers_in_the_memory_of_the_graph",
    ),
    Mutant(
        "a copy of a graphed module has its graph",
        "runtime/graphed.py",
        "        return GraphedForward(copy.deepcopy(self._module, memo), "
        "copy.deepcopy(self._plain, memo))\n",
        "        return self\n",
        REPLAYS + "test_a_copy_computes_with_its_own_parameters",
        select="deepcopy",
    ),
    Mutant(
        "gradients of autograd.grad are in the memory of the graph",
        "runtime/graphed.py",
        "ours.clone() if is_kept or place in self._shared else",
        "ours.clone() if place in self._shared else",
        REPLAYS + "test_gradients_of_autograd_grad_are_the_callers",
    ),
    Mutant(
        "two leaves get one memory as their gradients",
        "runtime/graphed.py",
        "ours.clone() if is_kept or place in self._shared else",
        "ours.clone() if is_kept else",
        CAPTURES + "test_gradients_of_two_leaves_share_no_memory",
    ),
    Mutant(
        "a capture keeps quantized weights for other microbatches",
        "basic_ops/kept_weight.py",
        "    if holds_steps() or any(",
        "    if any(",
        CAPTURES + "test_weights_of_microbatches_are_not_kept_in_a_capture",
    ),
)
