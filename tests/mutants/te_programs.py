"""Mistakes in Transformer Engine's import paths, and in the layers and functions behind them."""

from __future__ import annotations

from mutants.mutant import Mutant

PATHS = "te/import_paths.py"
LAYERS = "te/pytorch/layers.py"
ENTROPY = "te/pytorch/cross_entropy.py"
ROWS = "te/pytorch/permutation.py"
OPTIMIZERS = "te/pytorch/optimizers.py"
ATTENTION = "te/pytorch/attention.py"
FUNCTIONS = "te/functions.py"
STATES = "te/pytorch/grouped_state.py"
WEIGHTS = "te/pytorch/master_weights.py"

TE_PROGRAMS = (
    Mutant(
        "names of any module are found, not those of the table alone",
        PATHS,
        "_ImportPath.__getattr__",
        "if name in module.__all__:",
        "if hasattr(module, name):",
        "test_import_paths.py::test_names_that_are_not_here_raise_and_are_counted",
    ),
    Mutant(
        "the real library is replaced",
        PATHS,
        "install",
        "if present is not None:",
        "if False:",
        "test_import_paths.py::test_the_real_library_is_not_replaced",
    ),
    Mutant(
        "a row parallel bias is added before the sum over ranks",
        LAYERS,
        "Linear.__init__",
        'parallel_mode == "row" and given.get("tp_size", 1) > 1',
        "False",
        "test_te_ranks.py::test_a_row_parallel_bias_has_the_gradient_of_its_rows",
    ),
    Mutant(
        "all ranks take the target's logit for theirs",
        ENTROPY,
        "_CrossEntropy.forward",
        "is_mine = (place >= 0) & (place < columns)",
        "is_mine = torch.ones_like(place, dtype=torch.bool)",
        "test_te_ranks.py::test_cross_entropy_over_ranks_is_that_of_the_whole_vocabulary",
    ),
    Mutant(
        "an ignored target has a gradient",
        ENTROPY,
        "_CrossEntropy.backward",
        "grad = grad.float().masked_fill(is_ignored, 0.0).masked_fill(",
        "grad = grad.float().masked_fill(",
        "test_te_layers.py::test_cross_entropy_is_that_of_torch",
    ),
    Mutant(
        "rows are sorted by token",
        ROWS,
        "_row_ids",
        "by_expert = routing_map.to(torch.bool).T",
        "by_expert = routing_map.to(torch.bool)",
        "test_te_layers.py::test_permuted_rows_are_sorted_by_expert_and_come_back",
    ),
    Mutant(
        "a master weight is not kept",
        OPTIMIZERS,
        "_Fused._values",
        'self.state[parameter]["master_param"] = master',
        "pass",
        "test_te_layers.py::test_master_weights_are_in_fp32_and_the_parameter_is_their_rounding",
    ),
    Mutant(
        "the last query of bottom right masks sees the first key alone",
        ATTENTION,
        "_window",
        'shift = keys - queries if kind.endswith("bottom_right") else 0',
        "shift = 0",
        "test_te_layers.py::test_attention_sees_what_its_mask_says",
    ),
    Mutant(
        "a layer with a mode and one rank has the group of all ranks",
        LAYERS,
        "_options",
        'taken["parallel_mode"] = None',
        "pass",
        "test_te_ranks.py::test_a_parallel_mode_over_one_rank_shares_nothing",
    ),
    Mutant(
        "a recomputation goes on with the random states of the last forward",
        FUNCTIONS,
        "_WithStates.__call__",
        "tracker.set_states(_copies(self._first))",
        "pass",
        "test_megatron_names.py::test_a_recomputation_has_the_random_states_of_its_forward",
    ),
    Mutant(
        "a recomputation leaves its random states to later forwards",
        FUNCTIONS,
        "_WithStates.__call__",
        "tracker.set_states(before)",
        "pass",
        "test_megatron_names.py::test_a_recomputation_has_the_random_states_of_its_forward",
    ),
    Mutant(
        "scales of experts are loaded in the order of inputs and weights",
        STATES,
        "plain_state",
        "scale.view(count, groups)[:own].T.flatten()",
        "scale.view(count, groups)[:own].flatten()",
        "test_megatron_names.py::test_a_state_of_experts_is_saved_and_loaded",
    ),
    Mutant(
        "rows of padding stand before those of an expert",
        ROWS,
        "moe_permute_and_pad_with_probs",
        "offsets = padding.cumsum(0) - padding",
        "offsets = padding.cumsum(0)",
        "test_megatron_names.py::test_rows_of_experts_are_padded_and_come_back",
    ),
    Mutant(
        "the largest logit is that of the last rows",
        ATTENTION,
        "_largest_logits",
        "largest = torch.maximum(largest, logits.flatten(1).amax(dim=1))",
        "largest = logits.flatten(1).amax(dim=1)",
        "test_megatron_names.py::test_attention_returns_the_largest_logit_of_each_head",
    ),
    Mutant(
        "a rank writes its shard with the scale of its own values",
        WEIGHTS,
        "quantize_master_weights",
        "dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)",
        "pass",
        "test_te_ranks.py::test_a_weight_whose_shards_ranks_write_has_the_scale_of_the_whole",
    ),
    Mutant(
        "the transposed copy of the weight before is read",
        WEIGHTS,
        "quantize_master_weights",
        "post_all_gather_processing(model_weights)",
        "pass",
        "test_megatron_names.py::test_a_layer_reads_the_bytes_that_were_written",
    ),
)
