"""Mistakes in shards of quantized parameters and their gathering."""

from mutants.mutant import Mutant

TWO_RANKS = "test_sharded_parameters.py::test_on_two_ranks"
EXPERTS = "test_sharded_experts.py::test_on_two_ranks"

SHARDING = (
    Mutant(
        "the amax of a write to a shard is that of the shard",
        "tensors/sharding.py",
        "Part(quantizer, values, self.group if self.is_exact and self.ranks > 1 else None)",
        "Part(quantizer, values, None)",
        TWO_RANKS,
    ),
    Mutant(
        "shards that are written together reduce their amaxes one by one",
        "tensors/quantizer.py",
        "found.setdefault((group, amaxes.device), []).append(amaxes)",
        "found[group, amaxes] = [amaxes]",
        TWO_RANKS,
        select="reduce and current",
    ),
    Mutant(
        "shards of two process groups reduce their amaxes in one of them",
        "tensors/quantizer.py",
        "found.setdefault((group, amaxes.device), []).append(amaxes)",
        "found.setdefault((parts[0].group, amaxes.device), []).append(amaxes)",
        TWO_RANKS,
        select="two_groups",
    ),
    Mutant(
        "a weight is gathered as it was quantized for an earlier forward",
        "tensors/master_weight.py",
        "shard, state.is_new = state.shard, False",
        "shard = state.shard",
        TWO_RANKS,
        select="gathered_together",
    ),
    Mutant(
        "a weight that is gathered quantized is read under any recipe",
        "runtime/checks.py",
        "if recipe is not None and other is not None and other != recipe:",
        "if False:",
        TWO_RANKS,
        select="another_recipe",
    ),
    Mutant(
        "shards that cut blocks are gathered as bytes",
        "tensors/sharding.py",
        "return all(rows // ranks % units[name][1] == 0 for name in names if name in units)",
        "return True",
        TWO_RANKS,
    ),
    Mutant(
        "scales of padding are left as memory had them",
        "tensors/gathering.py",
        "            if sizes != tuple(buffer.shape):\n                buffer.zero_()\n",
        "",
        TWO_RANKS,
    ),
    Mutant(
        "a backward in high precision reads the columnwise copy",
        "basic_ops/basic_linear.py",
        'note_backward_read(weight, "rowwise" if ctx.input_requires_grad else None)',
        'note_backward_read(weight, "columnwise")',
        TWO_RANKS,
    ),
    Mutant(
        "a copy of a parameter that is not in memory is read",
        "tensors/base.py",
        "return data.numel() == 0 or data.untyped_storage().nbytes() > 0",
        "return True",
        TWO_RANKS,
    ),
    Mutant(
        "a parameter that stays gathered after backward has one copy",
        "tensors/gathering.py",
        'if state == "PRE_BACKWARD" and group.reshard_after_backward and _is_last_backward():',
        'if state == "PRE_BACKWARD" and _is_last_backward():',
        TWO_RANKS,
    ),
    Mutant(
        "a prefetch for a backward that was before has one copy",
        "tensors/gathering.py",
        'if state == "PRE_BACKWARD" and group.reshard_after_backward and _is_last_backward():',
        'if state == "PRE_BACKWARD" and group.reshard_after_backward:',
        TWO_RANKS,
    ),
    Mutant(
        "copies of a weight that is gathered quantized share its state",
        "tensors/master_weight.py",
        '            is_another = is_another or caller("FSDPParam") is None\n',
        "            pass\n",
        TWO_RANKS,
    ),
    Mutant(
        "the rowwise bytes stay in memory after their transpose was made",
        "tensors/gathering.py",
        '    if "rowwise" not in sent.copies:\n        gathering.memory[row]',
        "    if False:\n        gathering.memory[row]",
        TWO_RANKS,
    ),
    Mutant(
        "a quantized weight is kept after its parameter was gathered again",
        "basic_ops/kept_weight.py",
        "return self._freed is None or self._freed.untyped_storage().size() > 0",
        "return True",
        EXPERTS,
        select="kept_quantized and current",
    ),
    Mutant(
        "copies of separate gathered weights are kept for backward",
        "basic_ops/grouped_parameters.py",
        "        if len(parts) == 1 or packed(parts) is not None or not gathered_by(parts):\n",
        "        if True:\n",
        EXPERTS,
        select="no_copy and unquantized",
    ),
    Mutant(
        "shards of uneven stacks of matrices are taken as exact",
        "tensors/sharding.py",
        "if shape[0] % ranks or not",
        "if rows % ranks or not",
        TWO_RANKS,
        select="matrices_of and mxfp8",
    ),
)
