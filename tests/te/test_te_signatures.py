"""Names and arguments of the release of Transformer Engine that programs are told: all are here,
or listed with the reason why not."""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

import argument_rows
import pytest
import te_signatures
import torch
from arguments_listed import METHODS, MODULES, OPTIONS
from said import said
from te_signatures import MODULES as MODULES_THERE
from te_signatures import NAMES, SIGNATURES

import fuser
from fuser.communication import PlannedGroup
from fuser.te import import_paths
from fuser.te import pytorch as te
from fuser.te.pytorch import recipes as te_recipes

FIRST_NAMES = {id(value): path for path, value in argument_rows.public(MODULES)} | {
    id(argument_rows.found(path)): path for path in METHODS
}
"""By object the path of its rows."""

_OF_OTHER_NAMES = "the classes and functions have other import paths, which are here"
_OF_KERNELS = "the part of its kernels; kernels here have other arguments"
_OF_DEBUGGING = "for debugging and export, which are not here"
MISSING_MODULES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("pytorch.module.", "pytorch.ops.basic.", "pytorch.ops.fused.", "pytorch.optimizers."),
            *("pytorch.quantized_tensor", "pytorch.tensor.storage"),
            "pytorch.attention.dot_product_attention.dot_product_attention",
        ),
        _OF_OTHER_NAMES,
    ),
    **dict.fromkeys(
        (
            *("pytorch.attention.dot_product_attention.", "pytorch.constants", "pytorch.utils"),
            *("pytorch.cpp_extensions", "pytorch.custom_recipes.", "pytorch.jit"),
            "pytorch.torch_version",
        ),
        _OF_KERNELS,
    ),
    **dict.fromkeys(
        ("pytorch.export", "pytorch.numerics_debug", "pytorch.onnx_extensions"), _OF_DEBUGGING
    ),
    "pytorch.attention.inference": "attention has no cache here",
    "pytorch.cpu_offload_v1": "an older form of pytorch.cpu_offload",
}
"""Modules without an import path here, or beginnings of their names, with the reason."""

_STATES = "the state of a recipe is in the ops"
_ELEMENTS = "formats have their elements in fuser.formats"
_FUNCTION = "the autograd function below a function that is here"
_SYNCHRONIZERS = "offloaded tensors are moved by hooks of saved tensors alone"
_REFERENCES = "the quantizers of the factories are those of this library"
_LISTS = "kernels below FusedAdam and FusedSGD"
_FUSIONS = "planned by the graph of this library"
_GRAPHS = "the library captures with make_graphed_callables alone"
_RANKS = "helpers of its own layers"
_RECIPE_STATES = (
    *("RecipeState", "CustomRecipeState", "DelayedScalingRecipeState"),
    *("Float8BlockScalingRecipeState", "Float8CurrentScalingRecipeState"),
    *("MXFP8BlockScalingRecipeState", "NVFP4BlockScalingRecipeState", "check_recipe_support"),
    "split_and_copy",
)
_ELEMENT_TYPES = ("get_fp4_te_dtype", "get_fp8_max", "get_fp8_te_dtype", "get_fp8_torch_dtype")
_REASONS: dict[str, dict[str, tuple[str, ...]]] = {
    "pytorch": {
        "attention has no cache here": ("InferenceParams",),
        "torch says it": ("get_cudnn_version", "get_device_compute_capability"),
        _OF_DEBUGGING: ("onnx_export",),
        "they are methods of a quantized tensor": ("prepare_for_saving", "restore_from_saved"),
    },
    "pytorch.attention": {"attention has no cache here": ("InferenceParams",)},
    "pytorch.attention.dot_product_attention": {_OF_KERNELS: ("_attention_backends",)},
    "pytorch.attention.rope": {_FUNCTION: ("FusedQKVRoPEFunc", "FusedRoPEFunc")},
    "pytorch.cpu_offload": {
        _SYNCHRONIZERS: (
            *("DefaultOffloadSynchronizer", "ManualOffloadSynchronizer", "OffloadSynchronizer"),
            *("OffloadableLayerState", "TensorGroup", "TensorGroupProcessor"),
            *("is_cpu_offload_enabled", "mark_activation_offload", "mark_not_offload"),
            "start_offload",
        )
    },
    "pytorch.cross_entropy": {_FUNCTION: ("CrossEntropyFunction",)},
    "pytorch.custom_recipes.quantization_current_scaling": {
        _REFERENCES: ("CurrentScalingQuantizerRef", "CurrentScalingTensorRef")
    },
    "pytorch.custom_recipes.quantization_nvfp4": {
        _REFERENCES: (
            *("NVFP4QuantizerRef", "NVFP4TensorRef", "cast_from_fp4x2", "cast_to_e4m3"),
            *("cast_to_e8", "cast_to_fp4x2", "get_wgrad_sign_vector", "high_precision_gemm_ref"),
        )
    },
    "pytorch.distributed": {
        _RANKS: (
            *("allreduce", "gather_split_1d_tensor", "get_activation_recompute_contexts"),
            *("get_symmetric_memory_tensor", "graph_safe_rng_available", "has_te_modules"),
            *("initialize_affine_weight_gpu", "prepare_te_modules_for_fsdp"),
            *("set_all_rng_states", "set_tensor_model_parallel_attributes"),
            *("split_tensor_into_1d_equal_chunks", "symmetric_all_reduce"),
            "use_reentrant_activation_recompute",
        ),
        "torch's FSDP takes the layers as they are": ("FullyShardedDataParallel",),
    },
    "pytorch.fp8": {_STATES: _RECIPE_STATES, _ELEMENTS: _ELEMENT_TYPES},
    "pytorch.quantization": {
        _STATES: _RECIPE_STATES,
        _ELEMENTS: _ELEMENT_TYPES,
        "no format here needs alignment": ("get_align_size_for_quantization",),
    },
    "pytorch.graph": {
        _GRAPHS: (
            *("graph_pool_handle", "is_graph_capturing", "restore_fp8_tensors"),
            *("save_fp8_tensors", "set_capture_end", "set_capture_start"),
        )
    },
    "pytorch.module.base": {
        "there are no userbuffers": ("fill_userbuffers_buffer_for_all_gather", "get_ub")
    },
    "pytorch.ops.fused": {
        "there are no userbuffers": (
            *("UserbuffersBackwardLinear", "UserbuffersForwardLinear"),
            *("fuse_userbuffers_backward_linear", "fuse_userbuffers_forward_linear"),
        ),
        _FUSIONS: (
            *("fuse_backward_activation_bias", "fuse_backward_add_rmsnorm"),
            *("fuse_backward_linear_add", "fuse_backward_linear_scale"),
            *("fuse_forward_linear_bias_activation", "fuse_forward_linear_bias_add"),
            "fuse_forward_linear_scale_add",
        ),
    },
    "pytorch.optimizers": {
        _LISTS: (
            *("MultiTensorApply", "multi_tensor_adam", "multi_tensor_adam_capturable"),
            *("multi_tensor_adam_capturable_master", "multi_tensor_adam_fp8"),
            *("multi_tensor_sgd", "multi_tensor_unscale_l2norm"),
        )
    },
    "pytorch.router": {
        _FUNCTION: ("FusedAuxLoss", "FusedComputeScoresForMoEAuxLoss", "FusedTopkScoreFunction")
    },
    "pytorch.tensor": {
        "quantized tensors here have one base": ("get_all_tensor_types",),
        "they are methods of a quantized tensor": ("prepare_for_saving", "restore_from_saved"),
    },
    "pytorch.tensor.nvfp4_tensor": {
        _OF_KERNELS: (
            *("get_hadamard_matrix", "get_no_random_sign_vector", "get_random_sign_mask_for_rht"),
            *("get_rht_matrix", "get_sign_from_vector", "get_wgrad_sign_vector"),
        )
    },
    "pytorch.tensor.utils": {_OF_KERNELS: ("is_custom",)},
    "pytorch.transformer": {"drop paths are refused": ("DropPath",)},
}
MISSING: dict[str, str] = {
    f"{path}.{name}": reason
    for path, reasons in _REASONS.items()
    for reason, names in reasons.items()
    for name in names
}
"""Names that are not here, with the reason."""

MISSING_ARGUMENTS: dict[str, tuple[str, str]] = {
    "pytorch.Float8Tensor.make_like": ("data data_transpose", "a tensor is made of its keywords"),
    "pytorch.ops.op.OperationContext": (
        "saved_tensors to_save requires_grad",
        "it is made by the library",
    ),
}
"""Arguments that are not here, and are refused, with the reason."""

_BUFFERS = "quantized tensors are made from buffers by keyword"
_TWO_NAMES = "by position it has torch's name; this one is a keyword"
REORDERED: dict[str, str] = {
    **{f"pytorch.ops.Sequential.{name}": _TWO_NAMES for name in ("extend", "insert", "pop")},
    "pytorch.ops.op.OperationContext": "it is made by the library",
    "common.recipe.MXFP8BlockScaling": "a margin by position is refused: it is no format",
    "pytorch.Float8BlockwiseQTensorStorage": _BUFFERS,
    "pytorch.MXFP8TensorStorage": _BUFFERS,
    "pytorch.NVFP4TensorStorage": _BUFFERS,
    "pytorch.QuantizedTensor": _BUFFERS,
}
"""What has other arguments by position, with the reason."""
BY_KEYWORD = ("fp8_dpa", "fp8_mha")
"""The last arguments of recipes, which are refused if they are on: they are keywords here."""

_OF_LAYERS = "a step of its own layers, which are pipelines here"
_META = "the state of a recipe is in the ops"
_LAYOUTS = "the layout of a format is in fuser.formats"
_OF_DEBUGGER = "for its debugger, which is not here"
MISSING_METHODS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("set_activation_dtype", "prepare_forward", "set_nccl_overlap_warning_if_tp"),
            *("grad_output_preprocess", "get_weight_workspace", "reset_layer_norm_parameters"),
            "maybe_fuse_ops",
        ),
        _OF_LAYERS,
    ),
    **dict.fromkeys(
        (
            *("adjust_amax_history_length", "set_meta_tensor", "init_fp8_meta_tensors"),
            *("get_fp8_meta_tensors", "reset_fp8_meta_tensors", "reset_recipe_state"),
            "init_fp8_metadata",
        ),
        _META,
    ),
    **dict.fromkeys(("is_debug_iter", "no_debug_features_active"), _OF_DEBUGGER),
    **dict.fromkeys(
        (
            *("get_scale_shape", "get_columnwise_shape", "convert_shape_for_fp4"),
            *("create_tensor_from_data", "supports_only_rowwise_all_gather"),
        ),
        _LAYOUTS,
    ),
    **dict.fromkeys(("quantize_impl", "calibrate"), "quantize is the method that programs call"),
    "remove_caches": "a tensor keeps no transposed copy that it was not asked for",
    **dict.fromkeys(
        ("get_unscaled_state", "set_scaled_state", "get_momentums"), "states are in fp32 alone"
    ),
}
"""Methods that are not here, or not in every class that has them there, with the reason."""

E4M3 = fuser.DType.kFloat8E4M3
TENSORS: dict[Any, Any] = {
    type(tensor): tensor
    for tensor in (
        quantizer(torch.ones(128, 128))
        for quantizer in (
            fuser.Float8CurrentScalingQuantizer(E4M3),
            fuser.MXFP8Quantizer(E4M3),
            fuser.Float8BlockQuantizer(E4M3),
            fuser.NVFP4Quantizer(),
        )
    )
}
"""A tensor of each class that is made of buffers, which it has by keyword."""


def found(path: str) -> Any:
    """The object under an import path here, such as ``pytorch.Linear.forward``; None if none."""
    owner, _, name = path.rpartition(".")
    if owner not in import_paths.SOURCES:
        value = found(owner)
        return None if value is None else getattr(value, name, None)
    if path in import_paths.SOURCES:
        return importlib.import_module(import_paths.SOURCES[path][0])
    for source in import_paths.SOURCES[owner]:
        module = importlib.import_module(source)
        if name in module.__all__:
            return getattr(module, name)
    return None


def positional(value: Any) -> list[str]:
    """The arguments that may be given by position, in their order; ``*`` if they have no names."""
    makers = [vars(each).get("__init__") for each in getattr(value, "__mro__", ())]
    for call in (value, *filter(None, makers)):
        parameters = inspect.signature(call).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            continue  # they are passed on
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return names[1:] if names[:1] == ["self"] else names
    return ["*"]


def accepted(value: Any) -> set[str]:
    """The names of all arguments: those of options are listed, or of a class further down."""
    names = {*argument_rows.arguments_of(value), *OPTIONS.get(FIRST_NAMES.get(id(value), ""), ())}
    if inspect.isclass(value):
        parameters = inspect.signature(value).parameters.values()
        names.update(getattr(value, "member_names", ()))
        if value in TENSORS:
            names |= TENSORS[value].get_metadata().keys()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            for base in value.__mro__[1:-1]:
                if vars(base).get("__init__") and base not in (torch.nn.Module,):
                    names |= argument_rows.arguments_of(base).keys()
    return names


def arguments(signature: str) -> list[str]:
    """The names in a signature of the table, without private ones."""
    return [name for name in signature.split() if not name.startswith(("*", "_"))]


def test_the_table_is_of_the_version_that_programs_are_told() -> None:
    assert te_signatures.VERSION == import_paths.VERSION


@pytest.mark.parametrize("path", NAMES)
def test_a_path_has_the_names_of_the_release(path: str) -> None:
    absent = {f"{path}.{name}" for name in NAMES[path].split() if found(f"{path}.{name}") is None}
    assert absent == {name for name in MISSING if name.rpartition(".")[0] == path}


def test_modules_of_the_release_have_an_import_path_or_a_reason() -> None:
    absent = [name for name in MODULES_THERE.split() if name not in import_paths.SOURCES]
    assert all(name.startswith(tuple(MISSING_MODULES)) for name in absent), absent
    for beginning in MISSING_MODULES:
        assert any(name.startswith(beginning) for name in absent), beginning


@pytest.mark.parametrize("path", [path for path in SIGNATURES if found(path) is not None])
def test_a_signature_has_the_arguments_of_the_release(path: str) -> None:
    absent = [name for name in arguments(SIGNATURES[path]) if name not in accepted(found(path))]
    assert absent == MISSING_ARGUMENTS.get(path, ("", ""))[0].split()


@pytest.mark.parametrize("path", [path for path in SIGNATURES if found(path) is not None])
def test_an_argument_by_position_is_that_of_the_release(path: str) -> None:
    theirs = list(itertools.takewhile(lambda name: name[0] != "*", SIGNATURES[path].split()))
    while theirs and (theirs[-1] in BY_KEYWORD or theirs[-1].startswith("_")):
        theirs.pop()
    own = positional(found(path))
    is_same = own in (["*"], [*theirs, *own[len(theirs) :]])
    assert is_same == (path not in REORDERED), own


def test_classes_have_the_methods_of_the_release_or_a_reason() -> None:
    absent = set()
    for path in SIGNATURES:
        owner, _, name = path.rpartition(".")
        if owner in SIGNATURES and found(owner) is not None and found(path) is None:
            absent.add(name)
    assert absent == MISSING_METHODS.keys()


def test_lists_of_what_is_missing_name_what_is_in_the_table() -> None:
    assert MISSING_ARGUMENTS.keys() | REORDERED.keys() <= SIGNATURES.keys()
    assert {path.rpartition(".")[0] for path in MISSING} <= NAMES.keys()


def test_an_argument_of_another_place_is_refused() -> None:
    with pytest.raises(fuser.InputError, match="fp8_format"):
        fuser.recipe.MXFP8BlockScaling(0)


OPTIONS_OF_LINEARS = (False, False, None, 1, None, None, None, True, False, None, None)
OF_CALLS: dict[str, tuple[Any, ...]] = {
    "DotProductAttention": (
        *(None,) * 8,
        *("causal", None, False, "no_bias", None, None, True, None, None, False, 1),
    ),
    "MultiheadAttention": (
        *(None,) * 5,
        *(False, None, None, "no_bias", *(None,) * 8, True, None),
    ),
    "TransformerLayer": (
        *(None,) * 8,
        *(False, None, None, "no_bias", *(None,) * 8, True, None),
    ),
}
"""What a call may give by position, after its main inputs, as the release has it by default."""
OF_LAYERS: dict[str, tuple[Any, ...]] = {
    "Linear": (8, 6, *OPTIONS_OF_LINEARS, None, "meta"),
    "LayerNormLinear": (
        *(8, 6, 1e-5, False, False, None, 1, None, None, True, "LayerNorm", False, None, None),
        *(False, False, None, False, "meta"),
    ),
    "LayerNormMLP": (
        *(8, 12, 1e-5, False, False, None, None, 1, None, True, "LayerNorm", "gelu", None, None),
        *(False, None, False, False, None, None, False, False, "meta"),
    ),
    "GroupedLinear": (2, 8, 6, *OPTIONS_OF_LINEARS, "meta"),
    "MultiheadAttention": (
        *(8, 4, None, 0.1, 1e-5, None, None, None, "causal", None, None, 1, None, False, None),
        *(False, None, False, False, False, "self", False, False, False, True, False),
        *(*(False,) * 5, True, "LayerNorm", "meta"),
    ),
    "TransformerLayer": (
        *(8, 12, 4, None, 1e-5, 0.1, 0.1, None, None, None, None, "causal", None, "no_mask"),
        *(None, None, 1, None, None, False, None, None, False, False, False, False, "encoder"),
        *(0.0, False, False, False, False, True, False, *(False,) * 5, True, "gelu", None),
        *("LayerNorm", "meta"),
    ),
}
"""What makes a layer by position, to the device, which has another value."""


@pytest.mark.parametrize("name", OF_CALLS)
def test_a_call_with_defaults_by_position_is_that_without(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"DotProductAttention": (4, 8), "MultiheadAttention": (32, 4)}.get(name, (32, 48, 4))
    layer = getattr(te, name)(*sizes).eval()
    inputs = torch.randn(3, 5, 2, 4, 8).unbind() if name == "DotProductAttention" else ()
    inputs = inputs or (torch.randn(5, 2, 32),)
    assert torch.equal(layer(*inputs, *OF_CALLS[name]), layer(*inputs))


def test_an_argument_by_position_has_the_effect_of_its_name() -> None:
    torch.manual_seed(0)
    layer = te.TransformerLayer(32, 48, 4).eval()
    x, angles = torch.randn(5, 2, 32), te.RotaryPositionEmbedding(8)(5)
    places = [*OF_CALLS["TransformerLayer"]]
    places[SIGNATURES["pytorch.TransformerLayer.forward"].split().index("rotary_pos_emb") - 1] = (
        angles
    )
    y = layer(x, *places)
    assert torch.equal(y, layer(x, rotary_pos_emb=angles))
    assert not torch.equal(y, layer(x))
    with pytest.raises(
        fuser.InputError, match=said("transformer-tensor-shape-not", None, "encoder_output")
    ):
        layer(x, None, None, None, x)  # the fifth
    with pytest.raises(
        fuser.InputTypeError,
        match=said("positions-arguments-position-takes", None, len(places) + 2),
    ):
        layer(x, *places, None)


def test_signatures_say_the_arguments_that_may_be_given_by_position() -> None:
    shown = inspect.signature(te_recipes.DelayedScaling.__init__).parameters
    assert {"margin", "reduce_amax"} <= shown.keys()
    for name in OF_LAYERS:
        theirs = SIGNATURES[f"pytorch.{name}"].split()
        bound = inspect.signature(getattr(te, name)).bind(*OF_LAYERS[name]).arguments
        assert list(bound) == theirs[: len(OF_LAYERS[name])]
        assert bound["device"] == "meta"


def test_a_position_too_many_is_refused_with_the_number_that_there_are() -> None:
    places: list[Any] = [0, fuser.recipe.Format.HYBRID, 16, "max", None, True, False]
    words = said("positions-arguments-position-takes", "DelayedScaling.__init__", 7, 6)
    with pytest.raises(fuser.InputTypeError, match=words):
        te_recipes.DelayedScaling(*places)
    with pytest.raises(TypeError, match="device"):
        te.Linear(*OF_LAYERS["Linear"], device="cpu")


@pytest.mark.parametrize("name", OF_LAYERS)
def test_a_layer_is_made_by_position(name: str) -> None:
    layer = getattr(te, name)(*OF_LAYERS[name])
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_fused_ops_of_te_ops_take_their_ops_by_name() -> None:
    linear, bias, add = fuser.BasicLinear(8, 8), fuser.Bias(8), fuser.AddExtraInput()
    fused = fuser.ops.fused.ForwardLinearBiasAdd(add=add, linear=linear, bias=bias)
    assert fused.members == (linear, bias, add)
    x, extra = torch.randn(2, 4, 8).unbind()
    torch.testing.assert_close(fused(x, extra), x @ linear.weight.T + bias.bias + extra)
    without = fuser.ops.fused.ForwardLinearBiasAdd(linear=linear, bias=None, add=add)
    assert without.members == (linear, add)
    with pytest.raises(
        fuser.InputTypeError, match=said("fused-takes-no-argument", None, "'activation'")
    ):
        fuser.ops.fused.ForwardLinearBiasAdd(linear=linear, activation=fuser.GELU())


def test_a_fused_op_takes_all_of_its_names_or_none() -> None:
    linear, add = fuser.BasicLinear(8, 8), fuser.AddExtraInput()
    fused = fuser.ops.fused.ForwardLinearBiasAdd
    for ops, named, got in (
        ((), {"bias": None, "add": add}, "bias, add"),
        ((), {"linear": linear}, "linear"),
        (
            (linear, add),
            {"linear": linear, "bias": None, "add": add},
            "basic_ops, linear, bias, add",
        ),
    ):
        words = said("fused-alone-each-none", "ForwardLinearBiasAdd", got, "linear, bias, add")
        with pytest.raises(fuser.InputTypeError, match=words):
            fused(ops, **named)


def test_a_sequential_takes_the_names_of_te_ops_and_of_torch() -> None:
    ops = [fuser.GELU(), fuser.ReLU(), fuser.SiLU()]
    model = fuser.Sequential(ops[0])
    model.extend(modules=[ops[2]]).insert(idx=1, module=ops[1])
    assert list(model) == ops
    assert model.pop(idx=-1) is ops[2]
    assert model.extend(sequential=[ops[2]]).pop(key=0) is ops[0]
    assert list(model.insert(index=0, module=ops[0])) == ops
    for call in (model.pop, model.extend, lambda: model.insert(0, ops[0], idx=0)):
        with pytest.raises(fuser.InputTypeError, match=said("sequential-values-two-give")):
            call()
    assert list(model) == ops


def test_groups_are_set_on_the_layers_of_a_transformer_layer() -> None:
    layer = te.TransformerLayer(32, 48, 4)
    layer.set_tensor_parallel_group(None)
    layer.set_context_parallel_group(None, [0], None, "p2p")
    with pytest.raises(fuser.InputError, match=said("layers-set-tensor-group", None, 2)):
        layer.set_tensor_parallel_group(PlannedGroup(2))
    with pytest.raises(fuser.InputError, match=said("attention-cp-group-ranks", 2)):
        layer.set_context_parallel_group(cp_group=PlannedGroup(2), cp_global_ranks=[0, 1])


def test_parameters_keep_their_values_where_they_are_made_later() -> None:
    for layer in (te.Linear(8, 8), te.LayerNormMLP(8, 12), te.GroupedLinear(2, 8, 6)):
        before = [parameter.clone() for parameter in layer.parameters()]
        layer.reset_parameters(defer_init=True)
        assert all(map(torch.equal, before, layer.parameters()))
        layer.reset_parameters()
        assert not all(map(torch.equal, before, layer.parameters()))
        assert not layer.need_backward_dw()
        layer.backward_dw()


def test_weight_gradients_that_are_left_are_computed_by_the_layer() -> None:
    layer = te.GroupedLinear(2, 8, 6, bias=False, delay_wgrad_compute=True)
    assert layer.need_backward_dw()
    layer(torch.ones(4, 8), [1, 3]).sum().backward()
    assert layer.weight0.grad is None
    layer.backward_dw()
    assert torch.equal(layer.weight1.grad, torch.full((6, 8), 3.0))


def test_one_argument_by_two_names_and_modules_of_two_kinds_are_refused_by_graphs() -> None:
    module, sample = te.Linear(8, 6), (torch.ones(4, 8),)
    with pytest.raises(fuser.InputError, match=said("graph-older-name-give", "enabled", True)):
        te.make_graphed_callables(module, sample, enabled=True, fp8_enabled=False)
    with pytest.raises(fuser.InputError, match=said("graph-enabled-modules-call", (True, False))):
        te.make_graphed_callables((module,) * 2, (sample,) * 2, enabled=(True, False))
