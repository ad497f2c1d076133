"""Names and arguments of the release of Transformer Engine that programs are told: all are here,
or listed with the reason why not."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import argument_rows
import pytest
import te_signatures
import torch
from arguments_listed import METHODS, MODULES, OPTIONS
from te_signatures import MODULES as MODULES_THERE
from te_signatures import NAMES, SIGNATURES

import fuser
from fuser.te import import_paths

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
    "pytorch.Float8BlockQuantizer": ("all_gather_usage", "a copy has one layout"),
    "pytorch.Float8BlockwiseQTensor": ("data_format", "a copy has one layout"),
    "pytorch.Float8BlockwiseQTensorStorage": ("data_format", "a copy has one layout"),
    "pytorch.Float8CurrentScalingQuantizer": ("scale amax", "each call makes its own"),
    "pytorch.make_graphed_callables": (
        "sample_kwargs fp8_enabled fp8_calibrating fp8_recipe fp8_group fp8_weight_caching "
        "calibrating cache_quantized_params retain_graph_in_backward",
        "samples are positional, and the recipe has its newer names",
    ),
    "pytorch.ops.op.OperationContext": (
        "saved_tensors to_save requires_grad",
        "it is made by the library",
    ),
    **{
        f"pytorch.ops.fused.{name}": (names, f"a fused op gets its ops in one list; {_FUSIONS}")
        for name, names in {
            "BackwardActivationBias": "bias activation",
            "BackwardAddRMSNorm": "add rmsnorm",
            "BackwardLinearAdd": "backward_add linear",
            "BackwardLinearScale": "scale linear",
            "ForwardLinearBiasActivation": "linear bias activation",
            "ForwardLinearBiasAdd": "linear bias add",
            "ForwardLinearScaleAdd": "linear scale add",
        }.items()
    },
}
"""Arguments that are not here, and are refused, with the reason."""

_BUFFERS = "quantized tensors are made from buffers by keyword"
REORDERED: dict[str, str] = {
    "common.recipe.MXFP8BlockScaling": "a margin by position is refused: it is no format",
    "pytorch.Float8BlockwiseQTensorStorage": _BUFFERS,
    "pytorch.MXFP8TensorStorage": _BUFFERS,
    "pytorch.NVFP4TensorStorage": _BUFFERS,
    "pytorch.QuantizedTensor": _BUFFERS,
}
"""What has other arguments by position, with the reason."""

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
    """The arguments that may be given by position, in their order."""
    parameters = inspect.signature(value).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return names[1:] if names[:1] == ["self"] else names


def accepted(value: Any) -> set[str]:
    """The names of all arguments: those of options are listed, or of a class further down."""
    names = {*argument_rows.arguments_of(value), *OPTIONS.get(FIRST_NAMES.get(id(value), ""), ())}
    if inspect.isclass(value):
        parameters = inspect.signature(value).parameters.values()
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
    names = SIGNATURES[path].split()
    ends = [place for place, name in enumerate(names) if name.startswith("*")]
    theirs = names[: ends[0] if ends else None]
    pairs = zip(theirs, positional(found(path)), strict=False)
    assert all(name == own for name, own in pairs) == (path not in REORDERED)


def test_lists_of_what_is_missing_name_what_is_in_the_table() -> None:
    assert MISSING_ARGUMENTS.keys() | REORDERED.keys() <= SIGNATURES.keys()
    assert {path.rpartition(".")[0] for path in MISSING} <= NAMES.keys()


def test_an_argument_of_another_place_is_refused() -> None:
    with pytest.raises(fuser.InputError, match="fp8_format"):
        fuser.recipe.MXFP8BlockScaling(0)
