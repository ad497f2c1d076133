"""Quantized parameters in modules, optimizers and checkpoints, and what hangs on their tensors."""

from __future__ import annotations

import copy
import gc
import pickle
import types
from collections.abc import Callable, Iterable
from typing import Any

import oracles
import pytest
import torch
from test_quantized_tensors import (
    MAKERS,
    QUANTIZERS,
    every_quantizer,
    every_recipe,
    quantized_linear,
    same_buffers,
)

import fuser
from fuser import recipe as recipes


def values(seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return oracles.random_tensor((64, 96), dtype, seed)


def bytes_of(tensor: torch.Tensor) -> list[torch.Tensor | None]:
    assert isinstance(tensor, fuser.QuantizedTensor)
    return [None if b is None else b.clone() for b in tensor.buffers().values()]


# -- conversions -----------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.bfloat16().float(), torch.float32),
        (lambda m: m.to(torch.float16), torch.float16),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.cpu(), torch.float32),
    ],
    ids=["half", "bfloat16", "float", "to(dtype)", "to(device)", "cpu"],
)
def test_converting_a_module_leaves_the_contents_of_its_parameters_alone(
    convert: Any, dtype: torch.dtype, make: Any
) -> None:
    """The bytes stay, the nominal dtype follows, so that the model runs in its new dtype."""
    model = quantized_linear(make, preserve_high_precision_init_val=True)
    weight = model[0].weight
    weight.mark = "by the caller"
    before, kept = bytes_of(weight), weight.get_high_precision_init_val()
    convert(model)
    assert model[0].weight is weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.dtype is dtype
    assert same_bytes(bytes_of(weight), before)
    assert weight.mark == "by the caller"
    assert weight.get_high_precision_init_val() is kept
    x = oracles.random_tensor((32, 64), dtype, 1).requires_grad_()
    for recipe in (None, make()):
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.sum().backward()
        assert y.dtype is dtype
        assert weight.grad.dtype is dtype
        assert torch.isfinite(x.grad).all()


def same_bytes(a: Iterable[torch.Tensor | None], b: Iterable[torch.Tensor | None]) -> bool:
    return all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


@every_quantizer
def test_a_conversion_is_a_copy_with_another_nominal_dtype(quantizer: Any) -> None:
    tensor = quantizer(values())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        other = tensor.to(dtype)
        assert same_buffers(other, tensor)
        assert torch.equal(other.dequantize(), tensor.dequantize(dtype=dtype))
        assert other.dequantize().dtype is dtype
    before = tensor.dequantize()
    tensor.to(torch.float16).zero_()
    assert torch.equal(tensor.dequantize(), before)
    for dtype in (torch.int32, torch.float8_e4m3fn):
        assert not isinstance(tensor.to(dtype), fuser.QuantizedTensor)
    assert torch.equal(tensor.to(torch.int32), before.to(torch.int32))


@every_quantizer
def test_another_device_gets_every_buffer(quantizer: Any) -> None:
    tensor = quantizer(values())
    for one in (tensor, tensor.view(2, 32, 96), tensor[:64]):
        moved = one.to("meta")
        assert (moved.device.type, moved.shape) == ("meta", one.shape)
        for mine, its in zip(moved.buffers().values(), tensor.buffers().values(), strict=True):
            assert (mine.device.type, mine.shape, mine.dtype) == ("meta", its.shape, its.dtype)


def test_pinning_pins_every_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(buffer: torch.Tensor) -> torch.Tensor:
        pinned.append(buffer.clone())
        return pinned[-1]

    tensor = QUANTIZERS["nvfp4"](values())
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    twin = torch.ops.aten._pin_memory.default(tensor)
    assert same_buffers(twin, tensor)
    assert [b is p for b, p in zip(twin.buffers().values(), pinned, strict=True)] == [True] * 6


@every_recipe
def test_setting_data_sets_the_contents(make: Any) -> None:
    weight = quantized_linear(make)[0].weight
    quantizer = weight._quantizer
    new = quantizer(oracles.random_tensor((32, 64), torch.bfloat16, 5))
    weight.data = new
    assert same_buffers(weight, new)
    assert weight.dtype is torch.bfloat16
    weight.data.zero_()
    assert not new.dequantize().any()
    plain = oracles.random_tensor((32, 64), torch.float32, 6)
    weight.data = plain
    assert same_buffers(weight, quantizer(plain))
    assert weight.dtype is torch.float32
    assert isinstance(weight, torch.nn.Parameter)


# -- optimizers --------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
}


@every_quantizer
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["single", "foreach", "fused"])
def test_an_optimizer_step_is_that_on_the_values_quantized_again(
    how: str, name: str, quantizer: Any
) -> None:
    make, options = OPTIMIZERS[name]
    options = {**options, "foreach": how == "foreach", "fused": how == "fused"}
    weight = torch.nn.Parameter(quantizer(values()))
    plain = torch.nn.Parameter(weight.dequantize().detach())
    optimizer, reference = make([weight], **options), make([plain], **options)
    if name == "AdamW" and how != "fused":
        # It writes the decayed weight first, and then the step: two roundings.
        reference = torch.optim.Adam([plain], **{**options, "weight_decay": 0.0})
    buffers = {n: b.data_ptr() for n, b in weight.buffers().items()}
    for seed in range(3):
        weight.grad, plain.grad = values(10 + seed), values(10 + seed)
        version = weight._version
        optimizer.step()
        if type(reference) is not make:
            plain.data.copy_(quantizer(plain.detach() * (1 - 0.1 * 0.5)).dequantize())
        reference.step()
        assert same_buffers(weight, quantizer(plain.detach()))
        assert weight._version > version
        plain.data.copy_(weight.dequantize())
    assert buffers == {n: b.data_ptr() for n, b in weight.buffers().items()}
    state = [s for s in optimizer.state[weight].values() if isinstance(s, torch.Tensor)]
    assert state
    assert not any(isinstance(s, fuser.QuantizedTensor) for s in state)


# -- checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("target", MAKERS)
@pytest.mark.parametrize("source", [*MAKERS, "plain"])
def test_a_state_dict_loads_strictly_into_any_format(source: str, target: str) -> None:
    model = fuser.Sequential(fuser.Linear(64, 32))
    if source != "plain":
        model = quantized_linear(MAKERS[source])
    state = model.state_dict()
    loaded = quantized_linear(MAKERS[target])
    oracles.randomize(loaded, 9)
    weight = loaded[0].weight
    version = weight._version
    assert not any(loaded.load_state_dict(state, strict=True))
    assert loaded[0].weight is weight
    assert weight._version > version
    given = model[0].weight.detach()
    if {source, target} <= {"delayed", "current"} or source == target:  # one format
        assert same_buffers(weight, given)
    else:
        assert same_buffers(weight, weight._quantizer(given))
    plain = fuser.Sequential(fuser.Linear(64, 32))
    assert not any(plain.load_state_dict(loaded.state_dict(), strict=True))
    assert torch.equal(plain[0].weight, weight.dequantize())


@every_recipe
def test_assigning_a_state_dict_makes_the_parameters_what_it_holds(make: Any) -> None:
    model, plain = quantized_linear(make), fuser.Sequential(fuser.Linear(64, 32))
    plain.load_state_dict(model.state_dict(), assign=True)
    assert same_buffers(plain[0].weight, model[0].weight)
    assert isinstance(plain[0].weight, torch.nn.Parameter)
    x = oracles.random_tensor((32, 64), torch.float32, 1)
    assert torch.equal(plain(x), model(x))


@every_recipe
def test_a_checkpoint_with_one_copy_loads_into_a_model_with_both(make: Any) -> None:
    model, loaded = quantized_linear(make), quantized_linear(make)
    model[0].weight.update_usage(columnwise_usage=False)
    loaded.load_state_dict(model.state_dict())
    weight = loaded[0].weight
    assert same_buffers(weight, weight._quantizer(model[0].weight.detach()))


@every_recipe
def test_values_go_through_safetensors(make: Any, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = quantized_linear(make)
    state = {
        name: t.dequantize() if isinstance(t, fuser.QuantizedTensor) else t
        for name, t in model.state_dict().items()
    }
    safetensors.save_file(state, tmp_path / "model.safetensors")
    again = quantized_linear(make)
    oracles.randomize(again, 9)
    again.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    weight = model[0].weight
    assert same_buffers(again[0].weight, weight._quantizer(weight.detach()))
    plain = fuser.Sequential(fuser.Linear(64, 32))
    plain.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(plain[0].weight, weight.dequantize())


@every_recipe
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_trains_apart(duplicate: Any, make: Any) -> None:
    model = quantized_linear(make)
    twin = duplicate(model)
    assert same_buffers(twin[0].weight, model[0].weight)
    assert isinstance(twin[0].weight, torch.nn.Parameter)
    before = model[0].weight.dequantize()
    with torch.no_grad():
        twin[0].weight.zero_()
    assert torch.equal(model[0].weight.dequantize(), before)
    assert not twin[0].weight.dequantize().any()


# -- what a tensor holds on to ---------------------------------------------------------------


class Group:
    """Stands for a process group."""


NOT_FOLLOWED = (type, types.ModuleType, types.FrameType, types.CodeType, types.MethodType)


def reachable(*roots: Any, limit: int = 200_000) -> list[Any]:
    """Every object that ``roots`` hold, directly or not; not through classes and modules."""
    seen, todo = {id(root): root for root in roots}, list(roots)
    while todo:
        found = todo.pop()
        if isinstance(found, types.FunctionType):  # its globals are its module's
            referents: list[Any] = [found.__closure__, found.__defaults__]
        else:
            referents = gc.get_referents(found)
        for one in referents:
            if id(one) not in seen and not isinstance(one, NOT_FOLLOWED):
                seen[id(one)] = one
                todo.append(one)
        assert len(seen) < limit, "went astray"
    return list(seen.values())


def held_by_quantizers(*roots: Any) -> tuple[int, set[str]]:
    """How many quantizers ``roots`` reach, and the groups and recipes that those hold."""
    quantizers = [one for one in reachable(*roots) if isinstance(one, fuser.Quantizer)]
    kinds = (Group, recipes.Recipe, torch.distributed.ProcessGroup)
    held = {type(one).__name__ for one in reachable(*quantizers) if isinstance(one, kinds)}
    return len(quantizers), held


def graph_nodes(node: Any) -> list[Any]:
    """The autograd nodes behind ``node``, which are the contexts of their functions."""
    nodes = [node]
    for one in nodes:
        nodes += [following for following, _ in one.next_functions if following is not None]
    return nodes


RECIPES: dict[str, Callable[[], Any]] = {**MAKERS, "delayed": recipes.DelayedScaling}


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
def test_no_quantizer_that_anything_holds_has_a_group_or_a_recipe(make: Any) -> None:
    model = fuser.Sequential(fuser.Linear(64, 32), fuser.GELU(), fuser.Linear(32, 32))
    if make is not recipes.DelayedScaling:
        with fuser.quantized_model_init(recipe=make()):
            model = fuser.Sequential(fuser.Linear(64, 32), fuser.GELU(), fuser.Linear(32, 32))
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        fuser.autocast(recipe=make(), amax_reduction_group=Group()),
    ):
        y = model(x)
    for roots in (
        list(model.parameters()),
        list(model.state_dict().values()),
        saved,
        graph_nodes(y.grad_fn),
        [y],
    ):
        assert held_by_quantizers(*roots)[1] == set()
    assert held_by_quantizers(*saved)[0] > 0


def test_a_group_is_bound_for_one_call_and_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    quantizer = fuser.Float8CurrentScalingQuantizer()
    bound = quantizer.bound_to(Group())
    assert held_by_quantizers(bound)[1] == {"Group"}
    assert held_by_quantizers(bound(values()))[1] == set()
    assert (
        held_by_quantizers(bound.with_usage(rowwise=True, columnwise=False)(values()))[1] == set()
    )
    assert held_by_quantizers(quantizer)[1] == set()
