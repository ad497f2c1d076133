"""Quantized parameters in modules, optimizers and checkpoints, and attributes of their tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import oracles
import pytest
import torch
from said import said
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
from fuser.precision import contexts
from fuser.tensors.sharding import Sharding


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


@every_recipe
def test_a_quantized_parameter_of_any_module_is_converted_with_its_bytes(make: Any) -> None:
    """Also one that a foreign module holds, or shares with an op."""
    model = quantized_linear(make)
    weight = model[0].weight
    weight.grad = torch.ones(32, 64)
    foreign = torch.nn.Module()
    foreign.model, foreign.tied = model, weight
    foreign.own = torch.nn.Linear(64, 32)
    foreign.own.weight = torch.nn.Parameter(weight.detach().clone())
    before = bytes_of(weight)
    for convert, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.type(torch.bfloat16), torch.bfloat16),
        (lambda m: m.to(torch.ones(1, dtype=torch.float16)), torch.float16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu", torch.float32), torch.float32),
    ):
        with torch.no_grad():
            convert(foreign)
        assert foreign.tied is model[0].weight is weight
        for one in (weight, foreign.own.weight):
            assert one.dtype is dtype
            assert same_bytes(bytes_of(one), before)
        assert weight.grad.dtype is dtype


CONVERSIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "float": (lambda t: t.float(), torch.float32),
    "half": (lambda t: t.half(), torch.float16),
    "bfloat16": (lambda t: t.bfloat16(), torch.bfloat16),
    "double": (lambda t: t.double(), torch.float64),
    "to(dtype)": (lambda t: t.to(torch.float32), torch.float32),
    "to(dtype=)": (lambda t: t.to(dtype=torch.float16, copy=True), torch.float16),
    "to(device, dtype)": (lambda t: t.to("cpu", torch.float32, True), torch.float32),
    "to(other)": (lambda t: t.to(torch.ones(1, dtype=torch.float16)), torch.float16),
    "to(integers)": (lambda t: t.to(torch.int32), torch.int32),
    "int": (lambda t: t.int(), torch.int32),
    "to(fp8)": (lambda t: t.to(torch.float8_e4m3fn), torch.float8_e4m3fn),
    "type(dtype)": (lambda t: t.type(torch.float16), torch.float16),
    "torch's own half": (lambda t: torch.Tensor.half(t), torch.float16),
    "type_as": (lambda t: t.type_as(torch.ones(1, dtype=torch.float32)), torch.float32),
}


@pytest.mark.sampled(most=24)
@every_quantizer
@pytest.mark.parametrize(("convert", "dtype"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_tensor_that_is_converted_to_a_dtype_is_a_plain_copy(
    convert: Any, dtype: torch.dtype, quantizer: Any
) -> None:
    tensor = quantizer(values())
    before = tensor.dequantize()
    for one in (tensor, tensor[:64], tensor.view(2, 32, 96)):
        plain = convert(one)
        assert type(plain) is torch.Tensor
        assert plain.dtype is dtype
        assert torch.equal(plain.float(), before.view(one.shape).to(dtype).float())
        plain.zero_()
        assert torch.equal(tensor.dequantize(), before)


@every_quantizer
def test_master_weights_of_a_quantized_parameter_take_small_updates(quantizer: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(quantizer(values(dtype=dtype)))
        with torch.no_grad():  # as an optimizer's step is
            copies = weight.detach().float().clone(), weight.float(), weight.to(torch.float32)
        for master in copies:
            before = master.clone()
            for _ in range(100):
                master.sub_(1e-4)
            torch.testing.assert_close(
                before - master, torch.full_like(master, 0.01), rtol=1e-3, atol=1e-5
            )


@every_quantizer
def test_a_conversion_to_another_device_keeps_the_bytes(quantizer: Any) -> None:
    tensor = quantizer(values())
    for moved in (
        tensor.to("cpu"),
        tensor.cpu(),
        tensor.to("cpu", copy=True),
        tensor.to(device="cpu"),
    ):
        assert same_buffers(moved, tensor)
    assert tensor.type() == "torch.FloatTensor"


def test_torch_autocast_computes_with_the_values() -> None:
    weight: Any = torch.nn.Parameter(QUANTIZERS["mxfp8"](values()))
    x = values(5)[:3]
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, weight)
    expected = torch.nn.functional.linear(x.bfloat16(), weight.dequantize(dtype=torch.bfloat16))
    assert torch.equal(y, expected)
    y.sum().backward()
    assert weight.grad.dtype is torch.float32


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
    tensor._sharding = Sharding(None, len(tensor), True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    twin = torch.ops.aten._pin_memory.default(tensor)
    assert same_buffers(twin, tensor)
    assert [b is p for b, p in zip(twin.buffers().values(), pinned, strict=True)] == [True] * 6
    assert twin._sharding is tensor._sharding


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


@pytest.mark.sampled(most=24)
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


# -- gradients ---------------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_quantized_tensor_is_that_of_what_was_quantized(
    dtype: torch.dtype, quantizer: Any
) -> None:
    x, factor = values(dtype=dtype).requires_grad_(), values(5, dtype=torch.float32)
    tensor = quantizer(x)
    assert isinstance(tensor, fuser.QuantizedTensor)
    assert tensor.requires_grad
    (tensor * factor).sum().backward()
    assert x.grad.dtype is dtype
    assert torch.equal(x.grad, factor.to(dtype))
    x.grad = None
    # Also through views, through another quantization, and of a quantized tensor.
    (quantizer(tensor[:, :32].contiguous().repeat(1, 3)) * factor).sum().backward()
    torch.testing.assert_close(
        x.grad[:, :32], factor.view(64, 3, 32).sum(1).to(dtype), rtol=2e-2, atol=2e-2
    )
    assert not x.grad[:, 32:].any()
    with torch.no_grad():
        assert not quantizer(x).requires_grad
    assert not quantizer(x.detach()).requires_grad


@every_quantizer
@pytest.mark.parametrize(
    "plain",
    [
        lambda w: w.dequantize(),
        lambda w: w.dequantize(dtype=torch.float32),
        lambda w: w.float(),
        lambda w: w.to(torch.float32),
        lambda w: w.to("cpu", torch.bfloat16),
        lambda w: w[:, :].dequantize(),
        lambda w: w.view(-1).dequantize(dtype=torch.float32).view(64, 96),
    ],
)
def test_the_gradient_of_values_goes_to_the_quantized_parameter(plain: Any, quantizer: Any) -> None:
    weight = torch.nn.Parameter(quantizer(values(dtype=torch.bfloat16)))
    found = plain(weight)
    expected = weight.detach().dequantize()
    torch.testing.assert_close(found.to(torch.bfloat16), expected, rtol=2**-8, atol=0)
    found.float().square().sum().backward()
    assert weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(weight.grad, 2 * expected, rtol=2**-7, atol=0)
    for without in (plain(weight.detach()), torch.no_grad()(plain)(weight)):
        assert not without.requires_grad


@every_recipe
def test_a_penalty_on_the_values_of_a_weight_adds_to_its_gradient(make: Any) -> None:
    model = quantized_linear(make)
    weight = model[0].weight
    x = oracles.random_tensor((32, 64), torch.float32, 1)
    (model(x).sum() + weight.dequantize().square().sum()).backward()
    together, weight.grad = weight.grad, None
    model(x).sum().backward()
    expected = weight.grad + 2 * weight.detach().dequantize()
    torch.testing.assert_close(together, expected)


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


class Setting:
    """Something that a user hangs on a parameter."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting)


def saved_and_loaded(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@every_recipe
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded]
)
def test_a_copied_parameter_keeps_what_was_set_on_it(duplicate: Any, make: Any) -> None:
    model = quantized_linear(make, preserve_high_precision_init_val=True)
    weight = model[0].weight
    weight.mark, weight.main_grad = Setting(), torch.ones(32, 64)
    twin = duplicate(model)[0].weight
    assert isinstance(twin, torch.nn.Parameter)
    assert twin.mark == Setting()
    assert torch.equal(twin.main_grad, weight.main_grad)
    kept = twin.get_high_precision_init_val()
    assert torch.equal(kept, weight.get_high_precision_init_val())
    assert kept is not weight.get_high_precision_init_val()


@every_recipe
def test_a_state_dict_has_nothing_in_it_that_was_set_on_parameters(
    make: Any, tmp_path: Any
) -> None:
    model = quantized_linear(make, preserve_high_precision_init_val=True)
    model[0].weight.mark, model[0].weight.main_grad = Setting(), torch.ones(32, 64)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)["0.basic_ops.0.weight"]
    assert same_buffers(loaded, model[0].weight.detach())
    assert loaded.get_high_precision_init_val() is None
    assert not hasattr(loaded, "main_grad")


@every_recipe
def test_inference_mode_reads_copies_views_and_writes_parameters(make: Any) -> None:
    model = quantized_linear(make)
    weight = model[0].weight
    expected = weight.dequantize().detach()
    with torch.inference_mode():
        assert same_buffers(model.state_dict()["0.basic_ops.0.weight"], weight.detach())
        assert same_buffers(weight.to("cpu", copy=True), weight)
        for view in (
            lambda t: t[3:5],
            lambda t: t.chunk(2)[1],
            lambda t: t.chunk(2, 1)[1],
            lambda t: t.reshape(-1),
            lambda t: t.t(),
            lambda t: t.contiguous(),
            lambda t: t.data,
        ):
            assert torch.equal(values_of(view(weight)), view(expected))
        x = oracles.random_tensor((32, 64), torch.float32, 1)
        torch.testing.assert_close(model(x), x @ expected.T + model[0].bias)
        copy = weight.clone()
        for one in (weight, copy):
            one[:, 3].zero_()
            one[5].zero_()
            assert not values_of(one)[:, 3].any()
            assert not values_of(one)[5].any()
            assert values_of(one).any()
    assert not weight.is_inference()
    assert not weight.detach().is_inference()
    model(x.clone()).sum().backward()  # no inference tensor is left in the model


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, fuser.QuantizedTensor) else tensor


# -- shared memory and storages ------------------------------------------------------------


def negate(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.neg_()
        model[0].weight[:, 0].zero_()


@every_recipe
def test_a_model_in_shared_memory_is_written_to_by_another_process(make: Any) -> None:
    model = quantized_linear(make)
    weight = model[0].weight
    weight.mark = "by the caller"
    assert not weight.is_shared()
    assert model.share_memory() is model
    assert model[0].weight is weight
    assert weight.is_shared()
    assert weight[3:5].is_shared()
    assert weight[:, 3].is_shared()
    assert weight.mark == "by the caller"
    twin, before = copy.deepcopy(model), weight.dequantize().detach().clone()
    negate(twin)  # in a format with a scale a row, column 0 may have the largest value of a row
    expected = twin[0].weight.dequantize()
    assert not expected[:, 0].any()
    assert (expected + before)[:, 1:].norm() <= 0.1 * before.norm()
    process = torch.multiprocessing.get_context("fork").Process(target=negate, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(weight.dequantize(), expected)


@every_quantizer
def test_a_quantized_tensor_goes_through_a_queue(quantizer: Any) -> None:
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    tensor = quantizer(values())
    expected = tensor.dequantize()
    for one in (tensor, tensor[:32], tensor[:, 3]):
        queue.put(one)
        found = queue.get()
        assert type(found) is (
            type(one) if isinstance(one, fuser.QuantizedTensor) else torch.Tensor
        )
        assert torch.equal(values_of(found), values_of(one))
    assert torch.equal(tensor.dequantize(), expected)


def test_a_quantized_tensor_has_an_empty_storage_and_no_address() -> None:
    tensor = QUANTIZERS["current"](values())
    for one in (tensor, tensor[3:5], tensor[:, 3]):
        storage = one.untyped_storage()
        assert (storage.nbytes(), storage.tolist(), bytes(storage)) == (0, [], b"")
        storage.share_memory_()
        with pytest.raises(fuser.StateError, match=said("wrapper-tensor-no-memory-values")):
            one.data_ptr()
    assert (tensor.nbytes, tensor.element_size()) == (64 * 96 * 4, 4)


@every_recipe
def test_safetensors_saves_and_loads_values_and_says_how(make: Any, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, path = quantized_linear(make), tmp_path / "model.safetensors"
    for save in (
        lambda: safetensors.save_model(model, path),
        lambda: safetensors.save_file(model.state_dict(), path),
    ):
        with pytest.raises(fuser.StateError, match=said("wrapper-tensor-no-memory-values")):
            save()
    safetensors.save_file({k: values_of(t) for k, t in model.state_dict().items()}, path)
    again = quantized_linear(make)
    with torch.no_grad():
        again[0].weight.zero_()
    safetensors.load_model(again, path)
    assert torch.equal(again[0].weight, model[0].weight)


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


@every_quantizer
def test_what_a_tensor_was_quantized_from_is_forgotten_when_it_is_written(quantizer: Any) -> None:
    def one() -> Any:
        tensor, source = quantizer(values()), values()
        tensor.high_precision_source = source
        assert tensor.high_precision_source is source
        return tensor, weakref.ref(source)

    for write in (
        lambda t: t.zero_(),
        lambda t: t.quantize_(values(5)),
        lambda t: t[:, :3].zero_(),
        lambda t: t[3:5].zero_(),
        lambda t: t.detach().zero_(),
        lambda t: t.copy_(quantizer(values(5))),
        lambda t: setattr(t, "data", values(5)),
        lambda t: setattr(t, "data", quantizer(values(5))),
    ):
        tensor, source = one()
        write(tensor)
        assert tensor.high_precision_source is None
        with torch.inference_mode():
            tensor = quantizer(values())
            tensor.high_precision_source = values()
            write(tensor)
            assert tensor.high_precision_source is None
    tensor, source = one()
    other = quantizer(values(5))
    other.zero_()
    other.data = tensor  # as new as what it was set to, however often it was written before
    assert other.high_precision_source is source()
    other[:, :3].zero_()
    assert other.high_precision_source is None
    del tensor, other
    for keep in (
        lambda t: t.detach(),
        lambda t: t.with_usage("rowwise"),
        lambda t: t.detach()[:, :3],  # as torch's do, other views keep the tensor itself
        lambda t: t.detach()[:32],
        lambda t: t.clone(),
        lambda t: t.to("cpu", copy=True),
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: t.data,
    ):
        tensor, source = one()
        kept = keep(tensor)
        del tensor
        assert source() is None
        assert kept is not None


@every_quantizer
def test_one_copy_of_a_view_keeps_no_bytes_of_the_other(quantizer: Any) -> None:
    for view in (lambda t: t[:], lambda t: t.view(2, 32, 96)[1], lambda t: t.t()):
        for which in ("rowwise", "columnwise"):
            tensor = quantizer(values())
            held = {name: weakref.ref(b) for name, b in tensor.buffers().items()}
            part = view(tensor.detach())
            if not isinstance(part, fuser.QuantizedTensor) or not part._has(which):
                continue
            part = part.with_usage(which)
            is_turned = part.stride(-1) != 1
            kept = "columnwise" if (which == "rowwise") == is_turned else "rowwise"
            del tensor
            alive = {name for name, ref in held.items() if ref() is not None}
            both = {*part.rowwise_names, *part.columnwise_names}
            assert alive & both <= set(part._names(kept))


@every_quantizer
def test_a_view_keeps_the_bytes_of_its_parent_alone(quantizer: Any) -> None:
    for view in (lambda t: t[:, :3], lambda t: t[:32], lambda t: t.t(), lambda t: t.view(-1)[5]):
        x = values().requires_grad_()
        tensor = quantizer(x)
        held = weakref.ref(tensor), weakref.ref(x)
        part = view(tensor.detach())
        expected = values_of(part).clone()
        del tensor, x
        assert [ref() for ref in held] == [None, None]
        assert torch.equal(values_of(part), expected)


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
def test_no_quantizer_that_anything_holds_has_a_group_or_a_recipe(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fuser.Sequential(fuser.Linear(64, 32), fuser.GELU(), fuser.Linear(32, 32))
    if make is not recipes.DelayedScaling:
        with fuser.quantized_model_init(recipe=make()):
            model = fuser.Sequential(fuser.Linear(64, 32), fuser.GELU(), fuser.Linear(32, 32))
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    saved: list[torch.Tensor] = []
    monkeypatch.setattr(contexts, "resolved", lambda name, group: group)  # as a process group

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
    assert held_by_quantizers(fuser.Float8CurrentScalingQuantizer(device=Group()))[1] == {"Group"}
    bound = quantizer.bound_to(Group())
    assert held_by_quantizers(bound(values()))[1] == set()
    assert held_by_quantizers(quantizer)[1] == set()
