"""The public names and arguments that scripts of te.ops rely on: they cannot go unnoticed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import every_format
import oracles
import pytest
import torch
from said import said

import fuser
from fuser import recipe as recipes
from fuser import tensors
from fuser.tensors import Quantizer

# The modules of formats; importing all of them is what finds one that nobody exports.
SHIPPED = {f"fuser.tensors.{m.name}" for m in pkgutil.iter_modules(tensors.__path__)}

# name -> its arguments as te.ops has them: a bare name is required, others have their default;
# "*" begins those that go by keyword alone. What fuser takes beyond them is not listed.
TENSOR_PARALLEL = (
    ("tensor_parallel_mode", None),
    ("tensor_parallel_group", None),
    ("sequence_parallel", False),
    ("rng_state_tracker_function", None),
    ("accumulate_into_main_grad", False),
)
FACTORY = (("device", None), ("dtype", None))
CACHED = ("*", ("cache_quantized_input", False))
INTERLEAVED = (*CACHED, ("glu_interleave_size", None))
NORM = (
    *("normalized_shape", "*", ("eps", 1e-5), *FACTORY),
    *(("zero_centered_gamma", False), ("sm_margin", 0)),
)
SCALED_GLU = (("glu_interleave_size", None), "*", ("activation_recompute_in_mlp", False))

OPS: dict[str, tuple[Any, ...]] = {
    "BasicLinear": ("in_features", "out_features", "*", *FACTORY, *TENSOR_PARALLEL),
    "Bias": (
        *("size", "*", *FACTORY),
        *(("tensor_parallel", False), ("tensor_parallel_group", None)),
    ),
    "Linear": ("in_features", "out_features", "*", ("bias", True), *FACTORY, *TENSOR_PARALLEL),
    "LayerNorm": NORM,
    "RMSNorm": NORM,
    "AdaptiveLayerNorm": ("hidden_size", "*", ("eps", 1e-5), ("batch_dim", 0)),
    "L2Normalization": ("*", ("eps", 1e-6), ("seq_length", None), ("micro_batch_size", None)),
    **dict.fromkeys(
        ("GELU", "QGELU", "ReLU", "SReLU", "SiLU", "GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU"),
        CACHED,
    ),
    "SwiGLU": INTERLEAVED,
    "SiTUGLU": ("*", ("beta1", 4.0), ("beta2", 25.0), *INTERLEAVED[1:]),
    "ClampedSwiGLU": (
        *("*", ("limit", 7.0), ("alpha", 1.702), ("glu_linear_offset", 1.0)),
        *INTERLEAVED[1:],
    ),
    "ScaledSwiGLU": SCALED_GLU,
    "ScaledSiTUGLU": (*SCALED_GLU, ("beta1", 4.0), ("beta2", 25.0)),
    "ScaledClampedQGeGLU": (
        *SCALED_GLU,
        *(("limit", 7.0), ("alpha", 1.702), ("glu_linear_offset", 1.0)),
    ),
    "ScaledSReLU": ("*", ("activation_recompute_in_mlp", False)),
    "ScaledTanhSReLU": ("*", "tanh_clamp_scale", ("activation_recompute_in_mlp", False)),
    "ConstantScale": ("scale",),
    "Dropout": ("p",),
    "AddExtraInput": ("*", ("in_place", False)),
    "MakeExtraOutput": ("*", ("in_place", False)),
    "Quantize": (("forward", True), ("backward", False)),
    "Reshape": ("shape",),
    "Identity": (),
}
EXTRAS = {  # extra inputs and outputs
    **dict.fromkeys(("AddExtraInput", "ScaledSReLU", "ScaledTanhSReLU"), (1, 0)),
    **dict.fromkeys(("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU"), (1, 0)),
    "AdaptiveLayerNorm": (2, 0),
    "MakeExtraOutput": (0, 1),
}
USAGE = ("*", ("rowwise", True), ("columnwise", True))
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "autocast": (
        *(("enabled", True), ("calibrating", False)),
        *(("recipe", None), ("amax_reduction_group", None)),
    ),
    "quantized_model_init": (
        *(("enabled", True), ("recipe", None)),
        ("preserve_high_precision_init_val", False),
    ),
    "fp8_autocast": (
        *(("enabled", True), ("calibrating", False)),
        *(("fp8_recipe", None), ("fp8_group", None)),
    ),
    "fp8_model_init": (
        *(("enabled", True), ("recipe", None)),
        ("preserve_high_precision_init_val", False),
    ),
    **dict.fromkeys(
        (
            *("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available"),
            *("is_nvfp4_available", "is_bf16_available"),
        ),
        (("return_reason", False),),
    ),
    "get_default_recipe": (),
    "checkpoint": ("function", ("use_reentrant", True), ("distribute_saved_activations", False)),
    "interleave_glu_tensor": ("tensor", "interleave_size"),
    "deinterleave_glu_tensor": ("tensor", "interleave_size"),
    "register_forward_fusion": ("op_fusion_func", ("prepend", False)),
    "register_backward_fusion": ("op_fusion_func", ("prepend", False)),
    "register_forward_backward_fusion": ("op_fusion_func", ("prepend", False)),
    "Float8Quantizer": ("scale", "amax", "fp8_dtype", *USAGE),
    "Float8CurrentScalingQuantizer": (
        *("fp8_dtype", "device", *USAGE),
        *(("with_amax_reduction", False), ("amax_reduction_group", None)),
        *(("use_existing_amax", False), ("force_pow_2_scales", False), ("amax_epsilon", 0.0)),
    ),
    "MXFP8Quantizer": ("fp8_dtype", *USAGE),
    "Float8BlockQuantizer": (
        *("fp8_dtype", *USAGE, ("amax_epsilon", 0.0)),
        *(("force_pow_2_scales", True), ("block_scaling_dim", 2)),
    ),
    "NVFP4Quantizer": (
        *(("fp4_dtype", fuser.DType.kFloat4E2M1), ("rowwise", True), ("columnwise", True)),
        *(("with_amax_reduction", False), ("amax_reduction_group", None), ("with_rht", False)),
        *(("with_post_rht_amax", False), ("with_2d_quantization", False)),
        ("stochastic_rounding", False),
    ),
    "QuantizerRole": (("module_type", ""), ("tensor_type", ""), ("name", "")),
}
RECIPES: dict[str, tuple[Any, ...]] = {
    "DelayedScaling": (
        *(("margin", 0), ("fp8_format", recipes.Format.HYBRID), ("amax_history_len", 1024)),
        *(("amax_compute_algo", "max"), ("reduce_amax", True)),
    ),
    "Float8CurrentScaling": (
        *(("use_power_2_scales", False), ("fp8_format", recipes.Format.HYBRID)),
    ),
    "MXFP8BlockScaling": (
        *(("fp8_format", recipes.Format.E4M3), ("enable_2d_quantization", False)),
    ),
    "Float8BlockScaling": (
        *(("use_f32_scales", False), ("fp8_format", recipes.Format.E4M3)),
        *(("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2), ("grad_block_scaling_dim", 1)),
    ),
    "NVFP4BlockScaling": (
        *(("disable_rht", False), ("disable_stochastic_rounding", False)),
        *(("disable_2d_quantization", False), "*", ("row_scaled_activation", False)),
        *(("nvfp4_4over6", "none"), ("fp4_format", recipes.Format.E2M1)),
    ),
    "CustomRecipe": ("qfactory",),
    "MMParams": (("use_split_accumulator", True),),
    "QParams": (
        *(("power_2_scale", False), ("amax_epsilon", 0.0)),
        *(("random_hadamard_transform", False), ("stochastic_rounding", False)),
        ("fp4_2d_quantization", False),
    ),
}
ACCUMULATORS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
FP8_PARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
MEMBERS: dict[str, tuple[str, ...]] = {
    "Recipe": (
        *("backward_override", "fp8_dpa", "fp8_mha", "delayed", "float8_current_scaling"),
        *("float8_per_tensor_scaling", "mxfp8", "float8_block_scaling", "nvfp4", "custom"),
    ),
    "Float8CurrentScaling": (*ACCUMULATORS, *FP8_PARAMS),
    "Float8BlockScaling": (*ACCUMULATORS, *FP8_PARAMS),
    "NVFP4BlockScaling": ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"),
}
QUANTIZER_MEMBERS = (
    *("set_usage", "get_usages", "rowwise_usage", "columnwise_usage", "copy", "quantize"),
    *("update_quantized", "make_empty", "is_quantizable", "internal", "optimize_for_gemm"),
    *("dtype", "__call__"),
)
TENSOR_MEMBERS = {
    "QuantizedTensor": ("dequantize", "update_usage", "quantize_", "_get_quantizer"),
    "Float8Tensor": ("_data", "_transpose", "_scale_inv", "_fp8_dtype"),
    **dict.fromkeys(
        ("MXFP8Tensor", "Float8BlockwiseQTensor"),
        ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"),
    ),
    "NVFP4Tensor": ("_rowwise_data", "_columnwise_data", "_amax_rowwise", "_amax_columnwise"),
}
STORAGES = {
    "QuantizedTensorStorage": "QuantizedTensor",
    "Float8TensorStorage": "Float8Tensor",
    "MXFP8TensorStorage": "MXFP8Tensor",
    "Float8BlockwiseQTensorStorage": "Float8BlockwiseQTensor",
    "NVFP4TensorStorage": "NVFP4Tensor",
}
OP_MEMBERS = (
    *("op_forward", "op_backward", "fuser_forward", "fuser_backward", "num_quantizers"),
    *("get_quantizer", "get_input_quantizer", "get_grad_output_quantizer", "is_fused_op"),
    *("pre_first_fuser_forward", "pre_fuser_forward", "num_extra_inputs", "num_extra_outputs"),
    *("set_extra_input_channel", "set_extra_output_channel"),
)
MODULES = {
    "fuser.ops": (*OPS, "Sequential", "OperationFuser", "BasicOperation", "FusedOperation"),
    "fuser.ops.basic": tuple(name for name in OPS if name != "Linear"),
    "fuser.ops.fused": (
        *("BackwardActivationBias", "BackwardAddRMSNorm", "BackwardLinearAdd"),
        *("BackwardLinearScale", "ForwardLinearBiasActivation", "ForwardLinearBiasAdd"),
        "ForwardLinearScaleAdd",
    ),
    "fuser.ops.fuser": (
        *("OperationFuser", "register_forward_fusion", "register_backward_fusion"),
        "register_forward_backward_fusion",
    ),
    "fuser.ops.linear": ("Linear",),
    "fuser.ops.op": ("BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext"),
    "fuser.ops.sequential": ("Sequential",),
    "fuser.recipe": (*RECIPES, *MEMBERS, "Format"),
    "fuser.modules": ("GroupedLinear", "Linear", "LayerNormLinear", "LayerNormMLP"),
}
DTYPES = (
    *("kByte", "kInt32", "kInt64", "kFloat32", "kFloat16", "kBFloat16"),
    *("kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
)


def accepts(function: Callable[..., Any], wanted: tuple[Any, ...]) -> list[str]:
    """What a call in te's manner would meet otherwise: sentences, none if all is the same."""
    parameters = dict(inspect.signature(function).parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    order = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    said = []
    by_place = True
    for place, one in enumerate(wanted):
        if one == "*":
            by_place = False
            continue
        name, default = one if isinstance(one, tuple) else (one, inspect.Parameter.empty)
        if name not in parameters:
            said += [] if takes_any else [f"no argument {name}"]
            continue
        is_required = isinstance(one, str)
        if not is_required and parameters[name].default != default:
            said.append(f"{name} is {parameters[name].default} by default")
        if by_place and name in order and order.index(name) != place:
            said.append(f"{name} is argument {order.index(name)}")
    required = {one for one in wanted if isinstance(one, str)}
    for name, p in parameters.items():
        is_new = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if is_new and name not in required:
            said.append(f"{name} is required")
    return said


@pytest.mark.parametrize(("name", "wanted"), OPS.items(), ids=OPS)
def test_an_op_takes_the_arguments_of_te_ops(name: str, wanted: tuple[Any, ...]) -> None:
    assert accepts(getattr(fuser, name), wanted) == []
    if name != "Linear":
        cls = getattr(fuser, name)
        extras = (cls.num_extra_inputs, cls.num_extra_outputs)
        assert extras == EXTRAS.get(name, (0, 0))


@pytest.mark.parametrize(("name", "wanted"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_a_function_takes_the_arguments_of_te(name: str, wanted: tuple[Any, ...]) -> None:
    assert accepts(getattr(fuser, name), wanted) == []


@pytest.mark.parametrize(("name", "wanted"), RECIPES.items(), ids=RECIPES)
def test_a_recipe_takes_the_arguments_of_te(name: str, wanted: tuple[Any, ...]) -> None:
    assert accepts(getattr(recipes, name), wanted) == []


def test_recipes_quantizers_tensors_and_ops_have_the_members_that_scripts_read() -> None:
    for name, members in MEMBERS.items():
        recipe = recipes.MXFP8BlockScaling() if name == "Recipe" else getattr(recipes, name)()
        assert [m for m in members if not hasattr(recipe, m)] == []
    quantizer = fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)
    assert [m for m in QUANTIZER_MEMBERS if not hasattr(quantizer, m)] == []
    made = {
        "QuantizedTensor": quantizer,
        "Float8Tensor": fuser.Float8CurrentScalingQuantizer(),
        "MXFP8Tensor": quantizer,
        "Float8BlockwiseQTensor": fuser.Float8BlockQuantizer(),
        "NVFP4Tensor": fuser.NVFP4Quantizer(),
    }
    for name, members in TENSOR_MEMBERS.items():
        tensor = made[name](torch.ones(32, 32))
        assert isinstance(tensor, getattr(fuser, name))
        assert [m for m in members if not hasattr(tensor, m)] == []
    assert [m for m in OP_MEMBERS if not hasattr(fuser.BasicOperation, m)] == []
    assert [name for name in DTYPES if name not in fuser.DType.__members__] == []
    assert {s: getattr(fuser, s) for s in STORAGES} == {
        s: getattr(fuser, tensor) for s, tensor in STORAGES.items()
    }


@pytest.mark.parametrize(("path", "names"), MODULES.items(), ids=MODULES)
def test_names_are_found_under_the_import_paths_of_te(path: str, names: tuple[str, ...]) -> None:
    module = importlib.import_module(path)
    assert [name for name in names if not hasattr(module, name)] == []
    listed = getattr(module, "__all__", names)
    assert [name for name in listed if not hasattr(module, name)] == []
    for name in set(names) & set(fuser.__all__):
        if path not in ("fuser.modules", "fuser.recipe"):
            assert getattr(module, name) is getattr(fuser, name)


def test_every_public_name_exists_and_te_ops_is_an_attribute() -> None:
    assert [name for name in fuser.__all__ if not hasattr(fuser, name)] == []
    assert sorted(set(fuser.__all__)) == sorted(fuser.__all__)
    te = fuser
    assert te.ops.Linear is te.Linear


PUBLIC_MODULES = ("distributed", "modules", "moe", "ops", "recipe", "testing")


def test_dir_shows_the_public_names_alone() -> None:
    assert dir(fuser) == sorted(fuser.__all__)
    shown = {name for name in dir(fuser) if inspect.ismodule(getattr(fuser, name))}
    assert shown == set(PUBLIC_MODULES)
    for name in PUBLIC_MODULES:
        module = getattr(fuser, name)
        inner = {key for key in dir(module) if inspect.ismodule(getattr(module, key))}
        assert name == "ops" or not inner  # te.ops has modules of its own
        assert [key for key in dir(module) if not hasattr(module, key)] == []


def test_a_name_that_dir_does_not_show_is_imported_as_before() -> None:
    names = [module.name for module in pkgutil.iter_modules(fuser.__path__)]
    assert {"chain", "cuda", "errors", "plan", "specs", "tensors", *PUBLIC_MODULES} <= {*names}
    from fuser.plan import FusionPlan

    assert fuser.plan(fuser.Sequential(fuser.GELU()), torch.ones(2)).parts  # a function, by design
    assert FusionPlan is fuser.FusionPlan
    for name in names:
        if name not in ("__main__", "plan"):  # the former runs the command line
            assert importlib.import_module(f"fuser.{name}") is getattr(fuser, name)


def test_every_number_format_has_its_quantizer_and_tensor_at_the_top_level() -> None:
    for cls in every_format.QUANTIZER_CLASSES:
        for name in (cls.__name__, cls.tensor_class.__name__):
            assert name in fuser.__all__
    names = {cls.__name__ for cls in every_format.QUANTIZER_CLASSES}
    for module in SHIPPED:
        importlib.import_module(module)
    shipped = {
        cls.__name__
        for cls in Quantizer.__subclasses__()
        if cls.__module__ in SHIPPED and not cls.__name__.startswith("_")  # bases of others
    }
    assert names == shipped - {"Float8GroupsQuantizer", "NVFP4GroupsQuantizer"}  # GroupedTensor's


# -- functions ------------------------------------------------------------------------


def test_the_older_names_warn_and_do_the_same() -> None:
    recipe = recipes.MXFP8BlockScaling()
    linear = fuser.Linear(32, 32)
    x = torch.randn(32, 32)
    with fuser.autocast(recipe=recipe):
        expected = linear(x)
    with pytest.warns(
        DeprecationWarning, match=said("functions-fuser-now-new", "fp8_autocast", "autocast")
    ):
        region: Any = fuser.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=recipe)
    with region:
        assert torch.equal(linear(x), expected)
    with pytest.warns(
        DeprecationWarning, match=said("functions-fuser-now-new", None, "quantized_model_init")
    ):
        region = fuser.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True)
    with region:
        weight = fuser.BasicLinear(32, 32).weight
    assert isinstance(weight, fuser.MXFP8Tensor)
    assert weight.get_high_precision_init_val() is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fuser.fp8_autocast()
    assert caught[0].filename == __file__


def test_the_default_recipe_is_that_of_an_autocast_without_one() -> None:
    assert fuser.get_default_recipe() == fuser.autocast().recipe


def test_bf16_is_available_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fuser.is_bf16_available() is True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert fuser.is_bf16_available() is False
    with_reason: Any = fuser.is_bf16_available(return_reason=True)
    available, reason = with_reason
    assert not available
    assert "7.5" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert fuser.is_bf16_available(return_reason=True) == (True, "")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_computes_the_same_gradients(use_reentrant: bool) -> None:
    model = oracles.randomize(fuser.Sequential(fuser.Linear(64, 64), fuser.GELU()))
    results = []
    for call in (model, lambda x: fuser.checkpoint(model, x, use_reentrant=use_reentrant)):
        x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
        model.zero_grad()
        with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
            y = call(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, model[0].weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distribute_saved_activations": True}, said("functions-distribute-saved-activations")),
        (
            {"out": torch.ones(2, requires_grad=True)},
            said("functions-keyword-requires-gradient", "out"),
        ),
    ],
)
def test_a_checkpoint_refuses_what_it_does_not_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(fuser.InputError, match=words):
        fuser.checkpoint(torch.relu, torch.ones(2), **options)
    assert torch.equal(fuser.checkpoint(torch.relu, torch.ones(2), tp_group="any"), torch.ones(2))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_interleaved_weights_give_an_interleaved_unit_the_same_values(size: int) -> None:
    plain = oracles.randomize(fuser.Sequential(fuser.Linear(7, 16), fuser.SwiGLU()))
    other = fuser.Sequential(fuser.Linear(7, 16), fuser.SwiGLU(glu_interleave_size=size))
    with torch.no_grad():
        for name in ("weight", "bias"):
            tensor = getattr(plain[0], name)
            turned = fuser.interleave_glu_tensor(tensor, size)
            assert torch.equal(fuser.deinterleave_glu_tensor(turned, size), tensor)
            getattr(other[0], name).copy_(turned)
    x = oracles.random_tensor((5, 7), torch.float32, 1)
    widths = torch.arange(8)
    torch.testing.assert_close(other(x)[:, widths], plain(x))


@pytest.mark.parametrize(("rows", "size"), [(6, 2), (4, 0), (4, -1), (2, 2)])
def test_rows_that_do_not_divide_into_blocks_are_not_interleaved(rows: int, size: int) -> None:
    for function in (fuser.interleave_glu_tensor, fuser.deinterleave_glu_tensor):
        with pytest.raises(
            fuser.InputError, match=said("functions-tensor-shape-cannot", None, size)
        ):
            function(torch.ones(rows, 3), size)
        with pytest.raises(fuser.InputError, match=said("functions-tensor-shape-cannot")):
            function(torch.ones(()), 1)
