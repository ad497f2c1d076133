"""Mistakes in shards of quantized parameters and their gathering."""

from mutants.mutant import Mutant

TWO_RANKS = "test_sharded_parameters.py::test_on_two_ranks"
EXPERTS = "test_sharded_experts.py::test_on_two_ranks"
GROUPED_MEMORY = "test_grouped_memory.py"
OF_TWO_OPS = "test_modules.py::test_gather_quantized_asks_for_one_quantizer_of_a_weight_of_two_ops"

SHARDING = (
    Mutant(
        "a write to a shard has the amax of its rows",
        "tensors/writes.py",
        "_part",
        "Part(quantizer, values) if sharding is None else sharding.write(quantizer, values)",
        "Part(quantizer, values)",
        "test_shards.py::test_a_write_to_a_shard_reduces_its_amax_over_the_ranks",
    ),
    Mutant(
        "some rows of a shard get a scale of their own",
        "tensors/base.py",
        "QuantizedTensor._can_be_written_alone",
        "and stop >= root._sharding.rows",
        "",
        "test_shards.py::test_bytes_of_a_shard_without_its_padding_are_copied",
    ),
    Mutant(
        "the amax of a write to a shard is that of the shard",
        "tensors/sharding.py",
        "Sharding.write",
        "Part(quantizer, values, self.group if self.is_exact and self.ranks > 1 else None)",
        "Part(quantizer, values, None)",
        TWO_RANKS,
    ),
    Mutant(
        "shards that are written together reduce their amaxes one by one",
        "tensors/quantizer.py",
        "quantized_parts",
        "found.setdefault((group, amaxes.device), []).append(amaxes)",
        "found[group, amaxes] = [amaxes]",
        TWO_RANKS,
        select="reduce and current",
    ),
    Mutant(
        "shards of two process groups reduce their amaxes in one of them",
        "tensors/quantizer.py",
        "quantized_parts",
        "        found.setdefault((group, amaxes.device), []).append(amaxes)\n"
        "        quantizer = quantizer.with_amaxes(amaxes)\n"
        "    quantizers.append(quantizer)\n"
        "for (group, _), together in found.items():\n"
        "    reduce_amaxes(together, group)\n"
        "for quantizer, part in zip(quantizers, parts, strict=True):",
        "        found.setdefault((parts[0].group, amaxes.device), []).append(amaxes)\n"
        "        quantizer = quantizer.with_amaxes(amaxes)\n"
        "    quantizers.append(quantizer)\n"
        "for (group, _), together in found.items():\n"
        "    reduce_amaxes(together, group)\n"
        "for quantizer, part in zip(quantizers, parts, strict=True):",
        TWO_RANKS,
        select="two_groups",
    ),
    Mutant(
        "a weight is gathered as it was quantized for an earlier forward",
        "tensors/master_weight.py",
        "MasterWeight.fsdp_pre_all_gather",
        "shard, state.is_new = state.shard, False",
        "shard = state.shard",
        TWO_RANKS,
        select="gathered_together",
    ),
    Mutant(
        "a weight that is gathered quantized is read under any recipe",
        "runtime/checks.py",
        "Checks.recipes",
        "if recipe is not None and other is not None and other != recipe:",
        "if False:",
        TWO_RANKS,
        select="another_recipe",
    ),
    Mutant(
        "shards that cut blocks are gathered as bytes",
        "tensors/sharding.py",
        "is_exact",
        "return all(rows // ranks % units[name][1] == 0 for name in names if name in units)",
        "return True",
        TWO_RANKS,
    ),
    Mutant(
        "scales of padding are left as memory had them",
        "tensors/gathering.py",
        "_fill_from_parts",
        "if sizes != tuple(buffer.shape):\n    buffer.zero_()",
        "",
        TWO_RANKS,
    ),
    Mutant(
        "a backward in high precision reads the columnwise copy",
        "basic_ops/basic_linear.py",
        "BasicLinear.operands",
        'note_backward_read(weight, "rowwise" if ctx.input_requires_grad else None)',
        'note_backward_read(weight, "columnwise")',
        TWO_RANKS,
    ),
    Mutant(
        "a copy of a parameter that is not in memory is read",
        "tensors/base.py",
        "QuantizedTensor._is_in_memory",
        "return data.numel() == 0 or data.untyped_storage().nbytes() > 0",
        "return True",
        TWO_RANKS,
    ),
    Mutant(
        "a parameter that stays gathered after backward has one copy",
        "tensors/gathering.py",
        "_copies_read",
        'if state == "PRE_BACKWARD" and group.reshard_after_backward and _is_last_backward():',
        'if state == "PRE_BACKWARD" and _is_last_backward():',
        TWO_RANKS,
    ),
    Mutant(
        "a prefetch for a backward that was before has one copy",
        "tensors/gathering.py",
        "_copies_read",
        'if state == "PRE_BACKWARD" and group.reshard_after_backward and _is_last_backward():',
        'if state == "PRE_BACKWARD" and group.reshard_after_backward:',
        TWO_RANKS,
    ),
    Mutant(
        "copies of a weight that is gathered quantized share its state",
        "tensors/master_weight.py",
        "MasterWeight._state_of_result",
        'is_another = is_another or fsdp_caller("FSDPParam") is None',
        "pass",
        TWO_RANKS,
        select="assigned_copies",
    ),
    Mutant(
        "the rowwise bytes stay in memory after their transpose was made",
        "tensors/gathering.py",
        "_derive",
        'if "rowwise" not in sent.copies:\n    gathering.free',
        "if False:\n    gathering.free",
        TWO_RANKS,
    ),
    Mutant(
        "a rank without rows for an expert gathers another copy of its weight than others",
        "basic_ops/grouped_loop.py",
        "LoopedProduct._saved_weight",
        "note_reads(operand, self._usage, is_read=is_read)\n"
        "for g, rows in enumerate(self.groups.slices() if is_read else ()):",
        "note_reads([operand[g] for g, rows in enumerate(self.groups.slices()) if rows.start < "
        "rows.stop], self._usage, is_read=is_read)\n"
        "for g, rows in enumerate(self.groups.slices() if is_read else ()):",
        EXPERTS,
        select="different_experts and mxfp8",
    ),
    Mutant(
        "a quantized weight is kept after its parameter was gathered again",
        "tensors/sharding.py",
        "GatheredMemory.lasts",
        "return self._freed is not None and self._freed.untyped_storage().size() > 0",
        "return True",
        EXPERTS,
        select="kept_quantized and current",
    ),
    Mutant(
        "copies of separate gathered weights are kept for backward",
        "basic_ops/grouped_products.py",
        "GroupedProduct._saved_weight",
        "if is_copy and len(parts) > 1 and (is_quantized_again or is_gathered):",
        "if False:",
        EXPERTS,
        select="no_copy and unquantized",
    ),
    Mutant(
        "shards of uneven stacks of matrices are taken as exact",
        "tensors/sharding.py",
        "is_exact",
        "if shape[0] % ranks:\n"
        "    return False\n"
        "kept = USAGES[:1] if whole.derives_columnwise and quantizer.rowwise else USAGES\n"
        "names = [n for usage in kept if getattr(quantizer, usage) for n in whole._names(usage)]\n"
        "return all(rows // ranks % units[name][1] == 0 for name in names if name in units)",
        "if rows % ranks:\n"
        "    return False\n"
        "kept = USAGES[:1] if whole.derives_columnwise and quantizer.rowwise else USAGES\n"
        "names = [n for usage in kept if getattr(quantizer, usage) for n in whole._names(usage)]\n"
        "return all(rows // ranks % units[name][1] == 0 for name in names if name in units)",
        TWO_RANKS,
        select="matrices_of and mxfp8",
    ),
    Mutant(
        "a forward gathers both copies of a parameter that stays gathered",
        "tensors/gathering.py",
        "_copies_read",
        "if reshards_after_forward(group) or sharding.is_exact:",
        "if reshards_after_forward(group):",
        TWO_RANKS,
        select="is_of_one_copy and mxfp8",
    ),
    Mutant(
        "the columns that a backward gathers may be those of other values",
        "tensors/gathering.py",
        "_gather_columns",
        "if version is not None and shard._version != version:",
        "if False:",
        TWO_RANKS,
        select="written_before",
    ),
    Mutant(
        "a rank without rows does not gather what others read in backward",
        "basic_ops/grouped_loop.py",
        "LoopedProduct.backward",
        'gather_noted_reads(self.linear._parts("weight"))',
        "",
        EXPERTS,
        select="without_rows and rowwise",
    ),
    Mutant(
        "a copy that a backward added leaves the other one in memory",
        "tensors/gathering.py",
        "_complete",
        "gathering.free(gathering.of_forward.shard.rowwise_names)",
        "pass",
        TWO_RANKS,
        select="stays_is_in_memory",
    ),
    Mutant(
        "a shard of a stack of matrices counts matrices",
        "tensors/sharding.py",
        "shards_of_values",
        "Sharding(group, values.shape[:-1].numel(), is_whole)",
        "Sharding(group, values.shape[0], is_whole)",
        EXPERTS,
        select="counts_rows",
    ),
    Mutant(
        "values that are set by data leave the quantized shard of the old ones",
        "tensors/master_weight.py",
        "MasterWeight.data",
        "self._plain, self._state.shard, self._state.is_new = plain, None, False",
        "self._plain = plain",
        TWO_RANKS,
        select="values_that_are_set",
    ),
    Mutant(
        "a weight is quantized from another dtype than the policy's",
        "tensors/master_weight.py",
        "_quantize",
        "one._plain.to(param.mp_policy.param_dtype or one.dtype)",
        "one._plain",
        TWO_RANKS,
        select="dtype_of_the_policy",
    ),
    Mutant(
        "a weight of two ops becomes two that are gathered",
        "distributed/gather_quantized.py",
        "gather_quantized",
        "owner._parameters[name] = masters.get(id(parameter), parameter)",
        "owner._parameters[name] = torch.nn.Parameter(masters.get(id(parameter), parameter))",
        OF_TWO_OPS,
    ),
    Mutant(
        "a weight of two ops is gathered with the quantizer of the second",
        "distributed/gather_quantized.py",
        "gather_quantized",
        "if id(weight) not in masters:",
        "if True:",
        OF_TWO_OPS,
    ),
    Mutant(
        "a frozen parameter trains after it was sharded",
        "distributed/parallel_styles.py",
        "_Style._distribute",
        "setattr(op, name, torch.nn.Parameter(distributed, requires_grad=parameter.requires_grad))",
        "setattr(op, name, torch.nn.Parameter(distributed))",
        "test_dtensor_parameters.py",
        select="stays_frozen",
    ),
    Mutant(
        "a plan sends the columnwise copy of an input that is read rowwise",
        "basic_ops/linear_parallel.py",
        "_travels",
        'is_wgrads = side == "backward" and recipe.backward_override is None',
        'is_wgrads = side == "backward"',
        "test_parallel_ops.py::"
        "test_a_plan_sends_the_copy_of_an_input_that_an_overridden_backward_reads",
    ),
    Mutant(
        "weights that were moved have the layout of before",
        "runtime/known_parameters.py",
        "KnownParameters.renew",
        "layout = self._layout(params) if any(are_moved) else layout",
        "pass",
        "test_recorded_experts.py::"
        "test_a_recording_of_weights_that_were_joined_is_not_for_weights_that_stay_apart",
    ),
    Mutant(
        "a call takes weights out of the memory of its caller",
        "basic_ops/shared_memory.py",
        "_may_move",
        "if not (is_alone or is_slice) or parameter.is_inference():",
        "if parameter.is_inference():",
        GROUPED_MEMORY,
        select="another_order",
    ),
    Mutant(
        "two ops take a weight from each other at each call",
        "basic_ops/shared_memory.py",
        "_have_own_memory",
        "== places.count(at) + 1",
        ">= places.count(at) + 1",
        GROUPED_MEMORY,
        select="two_ops",
    ),
    Mutant(
        "shards with the columnwise copy alone have the bytes of the whole",
        "tensors/sharding.py",
        "is_exact",
        "kept = USAGES[:1] if whole.derives_columnwise and quantizer.rowwise else USAGES",
        "kept = USAGES[:1] if whole.derives_columnwise else USAGES",
        "test_quantized_tensors.py::"
        "test_shards_have_the_bytes_of_the_whole_if_no_copy_has_a_block_in_two_of_them",
    ),
    Mutant(
        "the first backward of a group frees rows that others recompute with",
        "tensors/gathering.py",
        "_complete",
        'if group.reshard_after_backward and "rowwise" not in gathering.backward_reads:',
        "if group.reshard_after_backward:",
        "test_sharded_parameters.py::test_on_two_ranks",
        select="one_by_one",
    ),
    Mutant(
        "a frozen weight that is gathered quantized is trained",
        "distributed/gather_quantized.py",
        "_master",
        "return torch.nn.Parameter(master, requires_grad=weight.requires_grad)",
        "return torch.nn.Parameter(master)",
        "test_modules.py::test_gather_quantized_leaves_frozen_weights_frozen",
    ),
    Mutant(
        "a copy of a shard shares what backward reads",
        "tensors/sharding.py",
        "Sharding.__deepcopy__",
        "return replace(self, backward_reads=set())",
        "return replace(self)",
        "test_shards.py",
    ),
    Mutant(
        "chunks of a checkpoint keep the scale of the tensor that they are loaded into",
        "tensors/loading.py",
        "_takes_chunk",
        "if written_by is None or written_by() is not plan:",
        "if False:",
        "test_sharded_parameters.py::test_on_two_ranks",
        select="checkpoints_of_shards and current",
    ),
    Mutant(
        "rows that a load has written become zeros for its next chunk",
        "tensors/loading.py",
        "_takes_chunk",
        "if written_by is None or written_by() is not plan:",
        "if True:",
        "test_loaded_chunks.py::test_chunks_that_were_quantized_apart_keep_their_values",
    ),
)
