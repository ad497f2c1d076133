"""Products with an addend, and the layouts that cuBLASLt takes."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from said import holds, said
from strict_cublaslt import strict_cublaslt
from test_quantized_gemm import NATIVE, StrictTensorCores, refusal, stand_in_for_hopper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fuser
from fuser import gemm
from fuser import recipe as recipes
from fuser.cuda import cublaslt
from fuser.errors import StateError
from fuser.gemm import native

BF16 = torch.bfloat16


@pytest.fixture
def calls() -> Iterator[list[str]]:
    with strict_cublaslt() as made:
        yield made


@pytest.fixture
def hopper(calls: list[str]) -> Iterator[StrictTensorCores]:
    with stand_in_for_hopper() as cores:
        yield cores


def values(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return oracles.random_tensor(shape, dtype, seed)


# -- 16 bits ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, -0.25])
@pytest.mark.parametrize("shape", [(48,), (2, 24)], ids=str)
def test_a_product_with_an_addend_is_rounded_once(
    shape: tuple[int, ...], scale: float, calls: list[str]
) -> None:
    x, weight = values(*shape, 32, seed=1), values(64, 32, seed=2)
    addend, kept = values(*shape, 64, seed=3), values(*shape, 64, seed=3)
    exact = scale * (x.double() @ weight.double().t()) + addend.double()
    assert torch.equal(gemm.linear_add(x, weight, addend, scale=scale), exact.to(BF16))
    dy = values(*shape, 64, seed=4)
    added = values(*shape, 32, seed=5)
    exact = scale * (dy.double() @ weight.double()) + added.double()
    assert torch.equal(gemm.dgrad(dy, weight, scale, added), exact.to(BF16))
    assert len(calls) == 2
    assert torch.equal(addend, kept)


def test_a_product_takes_a_bias_and_an_addend(calls: list[str]) -> None:
    x, weight, bias = values(48, 32, seed=1), values(64, 32, seed=2), values(64, seed=3)
    addend = values(48, 64, seed=4)
    exact = x.double() @ weight.double().t() + bias.double() + addend.double()
    assert torch.equal(gemm.linear_add(x, weight, addend, bias=bias), exact.to(BF16))
    assert calls == ["torch.bfloat16 + bias +"]


def test_an_addend_in_fp32_gets_the_product_before_it_is_rounded(calls: list[str]) -> None:
    x, weight, bias = values(48, 32, seed=1), values(64, 32, seed=2), values(64, seed=3)
    addend = values(48, 64, seed=4, dtype=torch.float32)
    exact = x.double() @ weight.double().t() + addend.double()
    assert torch.equal(gemm.linear_add(x, weight, addend), exact.float())
    assert len(calls) == 1
    # With a bias of 16 bits torch multiplies.
    found = gemm.linear_add(x, weight, addend, bias=bias)
    assert torch.allclose(found.double(), exact + bias.double(), rtol=2**-7, atol=2**-6)
    assert found.dtype is torch.float32
    assert len(calls) == 1


@pytest.mark.parametrize("step", [2, 1], ids=["strided", "between two vectors"])
def test_torch_adds_a_bias_that_is_no_vector(step: int, calls: list[str]) -> None:
    x, weight, addend = values(48, 32, seed=1), values(64, 32, seed=2), values(48, 64, seed=3)
    bias = values(129, seed=4)[1 : 1 + 64 * step : step]
    exact = x.double() @ weight.double().t() + addend.double() + bias.double()
    found = gemm.linear_add(x, weight, addend, bias=bias)
    assert torch.allclose(found.double(), exact, rtol=2**-7, atol=2**-6)
    assert calls == []


def apart(matrix: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are 128 elements apart."""
    return matrix.new_zeros(matrix.shape[0], 128)[:, : matrix.shape[1]].copy_(matrix)


def products_of(dtype: torch.dtype) -> list[cublaslt.Operands]:
    """A product of 48 x 32 and 32 x 64, and others that differ from it in one field alone."""
    out, addend = torch.zeros(48, 64, dtype=dtype), values(48, 64, seed=1, dtype=dtype)
    a, b = values(48, 32, seed=2, dtype=dtype), values(32, 64, seed=3, dtype=dtype)
    one = cublaslt.Operands(out, a, b, addend, values(64, seed=4, dtype=dtype))
    columns = {"out": out[:, :32], "b": b[:, :32], "addend": addend[:, :32]}
    return [
        one,
        one._replace(a=a.t().contiguous().t()),
        one._replace(b=b.t().contiguous().t()),
        one._replace(a=apart(a)),
        one._replace(b=apart(b)),
        one._replace(out=apart(out)),
        one._replace(addend=apart(addend)),
        one._replace(addend=None),
        one._replace(bias=None),
        one._replace(out=out.float(), addend=None, bias=None),
        one._replace(out=out[:32], a=a[:32], addend=addend[:32]),
        one._replace(bias=one.bias[:32], **{n: t.contiguous() for n, t in columns.items()}),
        one._replace(a=a[:, :16].contiguous(), b=b[:16]),
    ]


def test_products_are_known_by_all_that_their_descriptors_say(calls: list[str]) -> None:
    """Each of them after all others, against fp64."""
    every = [operands for dtype in (BF16, torch.float16) for operands in products_of(dtype)]
    for operands in (*every, *reversed(every)):
        out, a, b, addend, bias = operands
        assert cublaslt.serves(operands)
        exact = a.double() @ b.double()
        for added in (addend, bias):
            exact = exact if added is None else exact + added.double()
        assert torch.equal(cublaslt.multiply(operands), exact.to(out.dtype))
    assert len(calls) == 2 * len(every)
    assert len(cublaslt._products.found) == len(every)


def test_quantized_products_are_known_by_modes_formats_and_accumulators(calls: list[str]) -> None:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    a, b = values(48, 32, seed=1).to(e4m3), values(64, 32, seed=2).to(e4m3).t()
    one, row = torch.tensor(0.5), cublaslt.Scales.ROWS
    rows = (torch.rand(48), torch.rand(64))
    both = [(a, b), (a.to(e5m2), b), (a, b.to(e5m2))]
    scaled: list[tuple[cublaslt.Modes, Any]] = [
        ((cublaslt.Scales.TENSOR,) * 2, (one, one)),
        ((row, row), rows),
    ]
    every = list(itertools.product(both, scaled, (False, True), (BF16, torch.float32)))
    for (x, w), (modes, scales), is_split, dtype in (*every, *reversed(every)):
        operands = cublaslt.Operands(torch.empty(48, 64, dtype=dtype), x, w)
        how: Any = {"modes": modes, "is_split": is_split}
        assert cublaslt.serves(operands, **how)
        found = cublaslt.multiply(operands, scales=scales, **how)
        left, right = x.double() * scales[0].view(-1, 1), w.double() * scales[1].view(1, -1)
        torch.testing.assert_close(found.double(), left @ right, rtol=2**-8, atol=1e-6)
    assert len(calls) == 2 * len(every)
    assert len(cublaslt._products.found) == len(every)


def test_selective_checkpointing_may_keep_a_product(calls: list[str]) -> None:
    """And then the forward is repeated without it."""
    linear = fuser.BasicLinear(32, 32, dtype=BF16, device="cpu")
    model = oracles.randomize(fuser.Sequential(linear, fuser.AddExtraInput()))
    x, residual = (values(48, 32, seed=i).requires_grad_() for i in (1, 2))
    leaves = [x, residual, linear.weight]
    contexts = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.fuser.multiply.default]
    )

    def run(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (2 * model(x, residual)).tanh()
        return y

    expected = torch.autograd.grad(run(x, residual).sum(), leaves)
    y = checkpoint(run, x, residual, use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(y.sum(), leaves)
    assert calls
    assert all(map(torch.equal, found, expected))


def test_a_main_grad_of_another_shape_is_refused(
    hopper: StrictTensorCores, calls: list[str]
) -> None:
    model = block(256, 512)
    model[1].members[0].weight.main_grad = torch.zeros(256, 512)
    with pytest.raises(fuser.InputError, match=r"which has the shape \(256, 512\)"):
        step(model, NATIVE["current"], 144)


def odd_arguments() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Operands of ``linear_add`` that torch multiplies."""
    x, weight, addend = values(48, 32, seed=1), values(64, 32, seed=2), values(48, 64, seed=3)
    unaligned = torch.empty(48 * 32 + 1, dtype=BF16)[1:].view(48, 32).copy_(x)
    return {
        "fp32": (x.float(), weight.float(), addend.float()),
        "fp64": (x.double(), weight.double(), addend.double()),
        "no row": (x[:0], weight, addend[:0]),
        "nothing to contract": (x[:, :0], weight[:, :0], addend),
        "an address between two vectors": (unaligned, weight, addend),
        "rows that are one row": (x[:1].expand(48, 32), weight, addend),
        "an addend for all rows": (x, weight, addend[0].expand(48, 64)),
        "weights that overlap": (x, values(95, seed=2).as_strided((64, 32), (1, 1)), addend),
        "strided operands": (values(48, 64, seed=1)[:, ::2], weight, addend),
        "a transposed addend": (x, weight, values(64, 48, seed=3).t()),
        "a transposed addend in fp32": (x, weight, values(64, 48, seed=3).float().t()),
    }


@pytest.mark.parametrize("name", odd_arguments())
def test_torch_multiplies_what_cublaslt_does_not_take(name: str, calls: list[str]) -> None:
    x, weight, addend = odd_arguments()[name]
    exact = x.double() @ weight.double().t() + addend.double()
    found = gemm.linear_add(x, weight, addend)
    assert found.dtype is addend.dtype
    assert torch.allclose(found.double(), exact, rtol=2**-7, atol=2**-6)
    assert calls == []


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """The same values, column by column."""
    return matrix.t().contiguous().t()


def of_served() -> dict[str, tuple[bool, dict[str, torch.Tensor | None]]]:
    """Whether there is a product of 48 x 32 and 32 x 64, with other tensors in their place."""
    out, a, b = torch.zeros(48, 64, dtype=BF16), values(48, 32, seed=1), values(32, 64, seed=2)
    column = values(96, seed=3)
    return {
        "as they are": (True, {}),
        "an fp32 sum": (True, {"out": out.float()}),
        "operands by columns": (True, {"a": transposed(a), "b": transposed(b)}),
        "one row at any distance": (True, {"a": a[:1].as_strided((1, 32), (5, 1)), "out": out[:1]}),
        "one column at any distance": (
            True,
            {"a": column[:48].view(48, 1), "b": column[:64].as_strided((1, 64), (1, 1))},
        ),
        "one column by columns": (
            True,
            {"b": column[:32].as_strided((32, 1), (1, 5)), "out": torch.zeros(48, 1, dtype=BF16)},
        ),
        "fewer rows of the sum": (False, {"out": out[:47]}),
        "more columns of the sum": (False, {"out": torch.zeros(48, 128, dtype=BF16)}),
        "a transposed sum": (False, {"out": torch.zeros(64, 48, dtype=BF16)}),
        "a sum by columns": (False, {"out": transposed(out)}),
        "a sum in fp64": (False, {"out": out.double()}),
        "an fp64 operand": (False, {"a": a.double()}),
        "fp32 operands": (False, {"out": out.float(), "a": a.float(), "b": b.float()}),
        "an fp32 operand a": (False, {"out": out.float(), "a": a.float()}),
        "an fp32 operand b": (False, {"out": out.float(), "b": b.float()}),
        "an addend of another dtype": (False, {"addend": out.float()}),
        "an addend of fewer rows": (False, {"addend": out[:1]}),
        "a strided bias": (False, {"bias": values(128, seed=4)[::2]}),
    }


@pytest.mark.parametrize("name", of_served())
def test_a_product_is_served_that_its_descriptors_can_say(name: str, calls: list[str]) -> None:
    is_served, others = of_served()[name]
    out, a, b = torch.zeros(48, 64, dtype=BF16), values(48, 32, seed=1), values(32, 64, seed=2)
    operands = cublaslt.Operands(out, a, b)._replace(**others)
    assert cublaslt.serves(operands) == is_served


def test_a_product_that_is_not_there_is_refused_with_its_operands() -> None:
    out = torch.empty(48, 64, dtype=BF16)
    operands = cublaslt.Operands(out, values(48, 32, seed=1), values(32, 64, seed=2))
    assert not cublaslt.serves(operands)
    with pytest.raises(
        StateError,
        match=said(
            "cublaslt-no-product-into", holds("(48, 32) ", 16), holds("(32, 64) "), None, "cpu"
        ),
    ):
        cublaslt.multiply(operands)


# -- quantized --------------------------------------------------------------------


def block(width: int, hidden: int) -> fuser.Sequential:
    """``x + Linear(GELU(Linear(x)))`` on the CPU, with weight gradients in ``main_grad``."""
    fork, join = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join.set_extra_input_channel(0, "residual")
    linear: dict[str, Any] = {"dtype": BF16, "bias": False, "accumulate_into_main_grad": True}
    linear["device"] = "cpu"
    model = fuser.Sequential(
        fork,
        fuser.Linear(width, hidden, **linear),
        fuser.GELU(),
        fuser.Linear(hidden, width, **linear),
        join,
    )
    return with_main_grads(oracles.randomize(model))


def with_main_grads(model: fuser.Sequential) -> fuser.Sequential:
    for parameter in model.parameters():
        parameter.main_grad = torch.ones(parameter.shape, device=parameter.device)
    return model


def step(model: fuser.Sequential, recipe: Any, rows: int) -> list[Any]:
    linear = model[1].members[0]
    width, device = linear.in_features, linear.weight.device
    x = values(rows, width, seed=1).to(device).requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(values(rows, width, seed=2).to(device))
    return [y.detach(), x.grad, *(p.main_grad.clone() for p in model.parameters())]


def close(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < bound, error


@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
def test_a_quantized_block_adds_residuals_and_gradients_in_its_products(
    recipe: Any, hopper: StrictTensorCores, calls: list[str]
) -> None:
    model = block(256, 512)
    found = step(model, recipe, 144)
    # The residual, the gradient that the fork adds, and two weight gradients.
    assert sum(call.endswith("+") for call in calls) == 4
    (plan,) = model.plans
    assert "ForwardLinearBiasAdd" in [step.fusion for step in plan.forward]
    assert "BackwardLinearAdd" in [step.fusion for step in plan.backward]
    row = {"FP8 1x128": "FP8 128-block", "FP8 128x128": "FP8 128-block"}
    name = model[1].members[0].quantizer_format(recipe, "input").name
    assert f"dgrad {row.get(name, name)} addmm (native)" in plan.backward[-1].kernel
    with stand_in_for_hopper() as cores, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda device_type: None)
        expected = step(block(256, 512), recipe, 144)
        assert len(cores.calls) == 6
    close(found, expected, 2**-7)


@pytest.mark.parametrize("rows", [33, 144])
@pytest.mark.parametrize("recipe", NATIVE.values(), ids=NATIVE)
def test_sizes_that_cublaslt_does_not_take_are_added_by_torch(
    recipe: Any, rows: int, hopper: StrictTensorCores, calls: list[str]
) -> None:
    found = step(block(40, 72), recipe, rows)
    assert calls == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda device_type: None)
        expected = step(block(40, 72), recipe, rows)
    close(found, expected, 2**-7)


@pytest.mark.parametrize("name", ["block", "block-1D", "block-2D-input"])
def test_blocks_are_not_padded_where_cublaslt_multiplies(
    name: str, hopper: StrictTensorCores, calls: list[str]
) -> None:
    """384 and 400 are not whole runs of four blocks, and 400 is not a whole block."""
    model = oracles.randomize(fuser.Sequential(fuser.BasicLinear(384, 400, dtype=BF16)))
    x = values(144, 384, seed=1).requires_grad_()

    def gradients() -> tuple[torch.Tensor, ...]:
        with fuser.autocast(recipe=NATIVE[name]):
            y = model(x)
        return y.detach(), *torch.autograd.grad(y, (x, model[0].weight), values(144, 400, seed=2))

    found = gradients()
    assert calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda device_type: None)
        expected = gradients()
    close(list(found), list(expected), 2**-7)


@pytest.mark.parametrize("recipe", [None, *NATIVE.values()], ids=["none", *NATIVE])
def test_recorded_passes_repeat_products_with_addends(
    recipe: Any, hopper: StrictTensorCores, calls: list[str]
) -> None:
    """The third call and later ones are repetitions; ``main_grad`` grows by the same each time."""
    with on_kernels():
        model = block(256, 512)
        steps, counts = [], []
        for _ in range(4):
            steps.append(step(model, recipe, 144))
            counts.append(len(calls))
    assert counts == [counts[0] * n for n in (1, 2, 3, 4)]
    stateless = not isinstance(recipe, recipes.DelayedScaling)
    for previous, found in itertools.pairwise(steps):
        if stateless:
            assert torch.equal(previous[0], found[0])
            assert torch.equal(previous[1], found[1])
    for i in range(2, len(steps[0])):
        grown = [after[i] - before[i] for before, after in itertools.pairwise(steps)]
        close(grown[1:], grown[:1] * 2, 2**-4)  # delayed scaling's scales change


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("recipe", [None, *NATIVE.values()], ids=["none", *NATIVE])
def test_a_residual_in_fp32_under_autocast_is_added_in_the_product(
    recipe: Any, has_bias: bool, hopper: StrictTensorCores, calls: list[str]
) -> None:
    x, residual = (values(144, width, seed=1, dtype=torch.float32) for width in (256, 384))

    def made() -> fuser.Sequential:
        linear = fuser.Linear(256, 384, bias=has_bias, device="cpu")
        return oracles.randomize(fuser.Sequential(linear, fuser.AddExtraInput()))

    def step(model: fuser.Sequential) -> list[torch.Tensor]:
        leaves = [x.requires_grad_(), residual.requires_grad_(), *model.parameters()]
        with (
            torch.autocast("cpu", BF16),
            fuser.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            y = model(x, residual)
        dy = values(144, 384, seed=2, dtype=torch.float32)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    model = made()
    found = step(model)
    assert found[0].dtype is torch.float32
    (plan,) = model.plans
    if recipe is None and has_bias:
        assert "ForwardLinearBiasAdd" not in [step.fusion for step in plan.forward]
        return
    assert [step.fusion for step in plan.forward] == ["ForwardLinearBiasAdd"]
    assert calls[0].endswith("+")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda device_type: None)
        other = made()
        close(found, step(other), 2**-7)
        (plan,) = other.plans
        assert [step.fusion for step in plan.forward] != ["ForwardLinearBiasAdd"]


def test_without_the_library_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda device_type: None)
    linear, add = fuser.BasicLinear(64, 64, dtype=BF16), fuser.AddExtraInput()
    with stand_in_for_hopper():
        sentence = refusal([linear, add], "ForwardLinearBiasAdd", NATIVE["current"])
    assert sentence == "FP8 mm takes no addend: torch has it, and no cuBLASLt could be loaded."


def test_a_scale_is_a_factor_of_the_product(hopper: StrictTensorCores, calls: list[str]) -> None:
    linear, scale = fuser.BasicLinear(256, 384, dtype=BF16), fuser.ConstantScale(0.5)
    x = values(144, 256, seed=1).requires_grad_()
    model = fuser.Sequential(linear, scale)
    with fuser.autocast(recipe=NATIVE["current"]):
        (backward,) = model.plan(x).backward
        y = model(x)
    y.backward(values(144, 384, seed=2))
    assert backward.kernel == ("quantize grad_output, dgrad FP8 mm (native), wgrad FP8 mm (native)")
    assert len(calls) == 2


def test_a_kept_weight_serves_a_product_with_a_scale_and_an_addend(
    hopper: StrictTensorCores, calls: list[str]
) -> None:
    linear = fuser.BasicLinear(256, 384, dtype=BF16)
    model = fuser.Sequential(linear, fuser.ConstantScale(0.5), fuser.AddExtraInput())
    given = values(144, 256, seed=1), values(144, 384, seed=2)
    with fuser.autocast(recipe=NATIVE["current"]), torch.no_grad():
        first = model(*given, op_kwargs={linear: {"is_first_microbatch": True}})
        linear.weight.data.zero_()  # which torch does not count
        later = model(*given, op_kwargs={linear: {"is_first_microbatch": False}})
    assert model.plans[0].forward[0].fusion == "ForwardLinearScaleAdd"
    assert torch.equal(later, first)


# -- a build of torch for CUDA, and no GPU -------------------------------------------


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch as ``pip install torch`` brings it to a laptop: it has loaded cuBLASLt, for no GPU."""
    opened = ctypes.CDLL

    def opens(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).startswith("libcublasLt.so"):
            return mock.MagicMock(name=name)
        return opened(name, *args, **kwargs)

    caches = (cublaslt._loaded, native.torch_cuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", opens)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def residual(dtype: torch.dtype = torch.float32) -> fuser.Sequential:
    """The residual is added by the linear's GEMM, and the scale is its factor."""
    torch.manual_seed(0)
    kept = fuser.MakeExtraOutput()
    kept.set_extra_output_channel(0, "residual", output_to_caller=False)
    added = fuser.AddExtraInput()
    added.set_extra_input_channel(0, "residual")
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype}
    return fuser.Sequential(
        kept,
        fuser.Linear(64, 64, **options),
        added,
        fuser.Linear(64, 64, bias=False, **options),
        fuser.ConstantScale(0.5),
    )


def plain_residual(model: fuser.Sequential, x: torch.Tensor) -> torch.Tensor:
    (first, bias), (second,) = (model[i].parameters() for i in (1, 3))
    y: torch.Tensor = 0.5 * ((x @ first.t() + bias + x) @ second.t())
    return y


def test_a_cuda_build_without_a_gpu_takes_tensors_without_memory(cuda_build: None) -> None:
    assert cublaslt.library("cuda") is not None  # as in such a build
    assert cublaslt.library("cpu") is None
    model = residual().eval()
    x = values(8, 64, seed=1, dtype=torch.float32)
    batch = values(3, 8, 64, seed=2, dtype=torch.float32)
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), plain_residual(model, x))
        mapped = torch.func.vmap(model)(batch)
        torch.testing.assert_close(mapped, plain_residual(model, batch))


@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["plain", "current"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_cuda_build_without_a_gpu_plans_and_computes_as_a_cpu_build(
    recipe: Any, request: pytest.FixtureRequest
) -> None:
    def run() -> tuple[Any, ...]:
        model, x = residual(BF16), values(8, 64, seed=1).requires_grad_()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
            plan = model.plan(x)
        return str(plan), y, *torch.autograd.grad(y.sum(), (x, *model.parameters()))

    plan, *expected = run()
    request.getfixturevalue("cuda_build")
    other, *actual = run()
    assert other == plan
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
