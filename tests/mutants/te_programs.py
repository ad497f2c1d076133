"""Mistakes in Transformer Engine's import paths, and in the layers and functions behind them."""

from __future__ import annotations

from mutants.mutant import Mutant

PATHS = "te/import_paths.py"
LAYERS = "te/pytorch/layers.py"
ENTROPY = "te/pytorch/cross_entropy.py"
ROWS = "te/pytorch/permutation.py"
OPTIMIZERS = "te/pytorch/optimizers.py"
ATTENTION = "te/pytorch/attention.py"

TE_PROGRAMS = (
    Mutant(
        "names of any module are found, not those of the table alone",
        PATHS,
        "if name in module.__all__:",
        "if hasattr(module, name):",
        "test_import_paths.py::test_names_that_are_not_here_raise_and_are_counted",
    ),
    Mutant(
        "the real library is replaced",
        PATHS,
        "    if present is not None:\n",
        "    if False:\n",
        "test_import_paths.py::test_the_real_library_is_not_replaced",
    ),
    Mutant(
        "a row parallel bias is added before the sum over ranks",
        LAYERS,
        'parallel_mode == "row" and given.get("tp_size", 1) > 1',
        "False",
        "test_te_ranks.py::test_a_row_parallel_bias_has_the_gradient_of_its_rows",
    ),
    Mutant(
        "all ranks take the target's logit for theirs",
        ENTROPY,
        "is_mine = (place >= 0) & (place < columns)",
        "is_mine = torch.ones_like(place, dtype=torch.bool)",
        "test_te_ranks.py::test_cross_entropy_over_ranks_is_that_of_the_whole_vocabulary",
    ),
    Mutant(
        "an ignored target has a gradient",
        ENTROPY,
        "dx *= grad.float().masked_fill(is_ignored, 0.0)[..., None]",
        "dx *= grad.float()[..., None]",
        "test_te_layers.py::test_cross_entropy_is_that_of_torch",
    ),
    Mutant(
        "rows are sorted by token",
        ROWS,
        "by_expert = routing_map.to(torch.bool).T",
        "by_expert = routing_map.to(torch.bool)",
        "test_te_layers.py::test_permuted_rows_are_sorted_by_expert_and_come_back",
    ),
    Mutant(
        "a master weight is not kept",
        OPTIMIZERS,
        '                self.state[parameter]["master_param"] = master\n',
        "                pass\n",
        "test_te_layers.py::test_master_weights_are_in_fp32_and_the_parameter_is_their_rounding",
    ),
    Mutant(
        "the last query of bottom right masks sees the first key alone",
        ATTENTION,
        'shift = keys - queries if kind.endswith("bottom_right") else 0',
        "shift = 0",
        "test_te_layers.py::test_attention_sees_what_its_mask_says",
    ),
)
