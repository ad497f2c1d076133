"""Mistakes in adapters of low rank, and in state dicts with the keys of torch's layers."""

from __future__ import annotations

from mutants.mutant import Mutant

LORA = "basic_ops/lora_linear.py"
SHARED = "basic_ops/lora_adapters.py"
GROUPED = "basic_ops/lora_linear.py"
STATES = "op/state.py"

ADAPTERS = (
    Mutant(
        "the gradient of B is without the scale",
        SHARED,
        "LoRAAdapters.adapters_backward",
        "grad_b = products.wgrad(dy, saved.hidden, state.scale)",
        "grad_b = products.wgrad(dy, saved.hidden)",
        "test_lora_linear.py::test_output_and_gradients_are_those_of_the_formula",
    ),
    Mutant(
        "the gradient of A reads the input without its mask",
        SHARED,
        "LoRAAdapters.adapters_backward",
        "x = materialize(pointwise.dropout(x, saved.seed, state.dropout_probability))",
        "pass",
        "test_lora_linear.py::test_dropout_is_of_the_adapters_input_alone",
    ),
    Mutant(
        "the adapters' gradient of the input is without the mask",
        SHARED,
        "LoRAAdapters.adapters_backward",
        "grad_input = materialize(dropped)",
        "pass",
        "test_lora_linear.py::test_dropout_is_of_the_adapters_input_alone",
    ),
    Mutant(
        "a bias in fp32 is left out beside a quantized product",
        LORA,
        "LoRALinear.op_forward",
        "y = y + bias",
        "pass",
        "test_lora_linear.py::test_a_recipe_quantizes_the_weights_product_and_not_the_adapters",
    ),
    Mutant(
        "the op takes an input that the op before has quantized",
        SHARED,
        "LoRAAdapters.input_quantization",
        "def input_quantization(self, key: PlanKey) -> QuantSpec | None:\n"
        '    """None: the adapters read the values too, and the op quantizes for itself."""\n'
        "    return None",
        "def input_quantization(self, key: PlanKey) -> QuantSpec | None:\n"
        "    return super().input_quantization(key)",
        "test_lora_linear.py::test_on_kernels_an_activation_before_it_is_computed_again",
    ),
    Mutant(
        "the adapters' gradients wait for an input that is stored later",
        LORA,
        "LoRALinear.can_defer_wgrad",
        "False",
        "True",
        "test_lora_linear.py::test_on_kernels_an_activation_before_it_is_computed_again",
    ),
    Mutant(
        "a frozen quantized weight is held twice",
        SHARED,
        "hold_once",
        "weight.update_usage(columnwise_usage=False)",
        "pass",
        "test_lora_linear.py::"
        "test_a_quantized_weight_is_held_once_and_so_between_forward_and_backward",
    ),
    Mutant(
        "the other copy of a frozen quantized weight lives from forward to backward",
        LORA,
        "LoRALinear._saved_weight",
        "if qw is weight and is_made and ctx.backward_override is None:",
        "if False:",
        "test_lora_linear.py::"
        "test_a_quantized_weight_is_held_once_and_so_between_forward_and_backward",
    ),
    Mutant(
        "plans do not follow merging",
        SHARED,
        "LoRAAdapters._set_merged",
        "module_calls.change()",
        "",
        "test_lora_linear.py::test_the_plan_of_frozen_adapters_follows_merging",
    ),
    Mutant(
        "a merged op saves its adapters too",
        SHARED,
        "LoRAAdapters._save_to_state_dict",
        "del destination[prefix + name]",
        "pass",
        "test_lora_linear.py::"
        "test_the_state_of_a_merged_op_is_that_of_a_linear_and_none_is_loaded_into_it",
    ),
    Mutant(
        "a quantized weight is merged",
        SHARED,
        "LoRAAdapters.merge",
        "if isinstance(weights[0], QuantizedTensor):",
        "if False:",
        "test_lora_linear.py::test_what_cannot_be_merged_is_refused_and_stays_as_it_is",
    ),
    Mutant(
        "an expert's adapters read a row of the next expert",
        GROUPED,
        "LoRAGroupedLinear.step_forward",
        "GroupProducts(groups._replace(padded=None))",
        "GroupProducts(Groups(groups.ends + 1, groups.sizes))",
        "test_lora_grouped_linear.py::"
        "test_a_recipe_quantizes_the_weights_products_and_not_the_adapters",
    ),
    Mutant(
        "the gradients of the experts' adapters are without the scale",
        "gemm/grouped.py",
        "_scaled",
        "return product if scale == 1.0 else product.mul_(scale)",
        "return product",
        "test_lora_grouped_linear.py::test_any_number_of_experts",
    ),
    Mutant(
        "the other copy of an expert's frozen weight lives from forward to backward",
        "basic_ops/grouped_loop.py",
        "LoopedProduct._saved_operand",
        "if operand is values and is_made and self.ctx.backward_override is None:",
        "if False:",
        "test_lora_grouped_linear.py::"
        "test_quantized_weights_are_held_once_and_so_between_forward_and_backward",
    ),
    Mutant(
        "experts with adapters in fp32 are planned as one launch",
        GROUPED,
        "LoRAGroupedLinear.runs_at_once",
        "return super().runs_at_once(key) and not is_wide",
        "return super().runs_at_once(key)",
        "test_lora_grouped_linear.py::"
        "test_a_plan_for_a_gpu_says_when_sizes_are_read_and_has_plain_torch_beside_it",
    ),
    Mutant(
        "adapters that change before the backward are not noticed",
        GROUPED,
        "LoRAGroupedLinear._operand",
        "self.note_versions(ctx, kind)",
        "",
        "test_lora_grouped_linear.py::test_a_parameter_that_changes_before_the_backward_is_noticed",
    ),
    Mutant(
        "adapters that were frozen are trained after a merge",
        SHARED,
        "LoRAAdapters.merge",
        "self._are_trained = tuple(getattr(self, name).requires_grad "
        "for name in self._adapter_names)",
        "pass",
        "test_modes.py::test_unmerged_adapters_are_trained_as_before",
    ),
    Mutant(
        "adapters of a linear in evaluation are in training",
        SHARED,
        "LoRAAdapters.from_linear",
        "adapted.train(linear.training)",
        "pass",
        "test_modes.py::test_adapters_are_in_the_mode_of_their_linear",
    ),
    Mutant(
        "the bias of an adapted linear is trained",
        SHARED,
        "LoRAAdapters.from_linear",
        "setattr(adapted, name, frozen(parameter))",
        'setattr(adapted, name, parameter if name == "bias" else frozen(parameter))',
        "test_modes.py::test_adapters_are_in_the_mode_of_their_linear",
    ),
    Mutant(
        "adapters drop in evaluation",
        SHARED,
        "LoRAAdapters.add_adapters",
        "if self.training and self.draws_seed:",
        "if self.draws_seed:",
        "test_modes.py::test_adapters_are_in_the_mode_of_their_linear",
    ),
    Mutant(
        "the gradient of B alone asks for B",
        SHARED,
        "LoRAAdapters.adapters_backward",
        "if saved.b is not None:\n    grad_hidden = products.dgrad(dy, saved.b, state.scale)",
        "grad_hidden = products.dgrad(dy, saved.b, state.scale)",
        "test_lora_linear.py::test_every_set_of_leaves_gets_its_gradients",
    ),
    Mutant(
        "a merged weight holds the graph of A",
        SHARED,
        "LoRAAdapters._with_products",
        "self.scale * (b.detach().float() @ a.detach().float())",
        "self.scale * (b.detach().float() @ a.float())",
        "test_lora_linear.py::test_a_merged_op_is_a_linear_with_the_merged_weight",
    ),
    Mutant(
        "a dropout of nothing draws a seed",
        SHARED,
        "LoRAAdapters.draws_seed",
        "self.dropout_probability > 0 and not self.is_merged",
        "not self.is_merged",
        "test_lora_linear.py::test_a_seed_is_drawn_only_for_what_is_dropped",
    ),
    Mutant(
        "B may change before the gradient of the input reads it, if A is frozen",
        SHARED,
        "LoRAAdapters.add_adapters",
        'b = self._operand(ctx, "lora_B", dtype, is_read=of_a or of_x)',
        'b = self._operand(ctx, "lora_B", dtype, is_read=of_a)',
        "test_lora_grouped_linear.py::"
        "test_what_the_gradient_of_the_input_reads_is_watched_if_adapters_are_frozen",
    ),
)

STATE_DICTS = (
    Mutant(
        "keys of torch's linear are not found",
        "op/fused.py",
        "FusedOperation._load_from_state_dict",
        "self._take_plain_names(state_dict, prefix)",
        "",
        "test_state.py::test_a_state_of_torchs_layers_loads_strictly",
    ),
    Mutant(
        "a plain key replaces one of te.ops",
        STATES,
        "Stateful._take_plain_names",
        "and prefix + key not in state_dict:",
        ":",
        "test_state.py::test_keys_of_both_kinds_for_one_parameter_are_refused",
    ),
    Mutant(
        "a refused state is half loaded",
        STATES,
        "Stateful.load_state_dict",
        "_try(self, state_dict)",
        "pass",
        "test_state.py::test_a_state_that_is_refused_changes_nothing",
        select="sequential",
    ),
    Mutant(
        "the state of delayed scaling changes before a state is refused",
        "op/basic.py",
        "BasicOperation.set_extra_state",
        "if is_tried():\n    return",
        "",
        "test_state.py::test_a_state_that_is_refused_changes_nothing",
        select="sequential or layer",
    ),
    Mutant(
        "a module that refers to its own parameters keeps the stand-ins",
        STATES,
        "_try",
        "setattr(each, name, tensor)",
        "(each._parameters if name in each._parameters else each._buffers)[name] = tensor",
        "test_state.py::test_a_state_that_is_refused_leaves_references_of_other_modules_as_they_are",
    ),
    Mutant(
        "hooks of users run twice",
        STATES,
        "_can_be_tried",
        "not has_loading_hooks(each) and",
        "",
        "test_state.py::test_a_hook_of_a_user_runs_once_in_a_load",
    ),
    Mutant(
        "a plain state has quantized weights",
        STATES,
        "plain_keys",
        "value.detach().dequantize() if is_quantized else value",
        "value",
        "test_state.py::test_a_plain_state_dict_has_neither_quantized_tensors_nor_scales",
    ),
    Mutant(
        "an op of a composite is exchanged by its name",
        "op/fused.py",
        "_FixedOps.__setattr__",
        "self._refuse()",
        "pass",
        "test_robustness.py::test_the_ops_of_a_composite_cannot_be_exchanged_one_by_one",
    ),
    Mutant(
        "ops that have no quantizers save an empty state",
        "op/basic.py",
        "BasicOperation._save_to_state_dict",
        'del destination[f"{prefix}_extra_state"]',
        "pass",
        "test_state.py::test_state_dict_has_the_keys_that_checkpoints_have",
    ),
    Mutant(
        "of a module under two names one has plain keys",
        "op/state.py",
        "plain_keys",
        "module.named_modules(remove_duplicate=False)",
        "module.named_modules()",
        "test_state.py::test_a_module_under_two_names_has_plain_keys_under_both",
    ),
    Mutant(
        "of two keys of one parameter a layer loads that of its op",
        "modules/layer.py",
        "Layer._load_from_state_dict",
        "state_dict.setdefault(prefix + name, value)",
        "state_dict[prefix + name] = value",
        "test_modules.py::test_of_two_keys_of_one_parameter_a_layer_loads_its_own",
    ),
)
