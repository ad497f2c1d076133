"""The call key covers everything that a plan depends on: a running pipeline has no stale plan.

The yardstick is a deep copy, which plans anew and so cannot know what ran before.
"""

from __future__ import annotations

import copy
import gc
import linecache
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import models
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from said import holds, said

import fuser
from fuser.recipe import Float8CurrentScaling, MXFP8BlockScaling
from fuser.runtime.call_key import CallKeyReader

SIZE = 32

Results = list[torch.Tensor | None]


mlp = partial(models.mlp, SIZE, SIZE)


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return oracles.random_tensor(shape, dtype, 1)


def results_of(model: fuser.Sequential, x: torch.Tensor) -> Results:
    """The output, and a gradient for the input and each parameter, None where there is none."""
    leaves = [x, *model.parameters()]
    y = model(x)
    if not y.requires_grad:
        return [y, *[None] * len(leaves)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = iter(torch.autograd.grad(y.float().square().sum(), wanted))
    return [y.detach(), *(next(grads) if leaf.requires_grad else None for leaf in leaves)]


def assert_like_a_fresh_copy(model: fuser.Sequential, x: torch.Tensor) -> None:
    found, expected = results_of(model, x), results_of(copy.deepcopy(model), x)
    assert [None if t is None else t.dtype for t in found] == [
        None if t is None else t.dtype for t in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- parameters ------------------------------------------------------------------------------


def replace(model: fuser.Sequential) -> None:
    model[0].weight = torch.nn.Parameter(model[0].weight.detach() + 1)


def replace_inside(model: fuser.Sequential) -> None:
    bias = model[2].basic_ops[1]
    bias._parameters["bias"] = torch.nn.Parameter(bias.bias.detach() * 2, requires_grad=False)


def cast_data(model: fuser.Sequential) -> None:
    for parameter in model[2].parameters():
        parameter.data = parameter.data.bfloat16()


def cast_one(model: fuser.Sequential) -> None:
    model[2].weight.data = model[2].weight.data.half()


def freeze(model: fuser.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def freeze_all(model: fuser.Sequential) -> None:
    model.requires_grad_(False)


def thaw_all(model: fuser.Sequential) -> None:
    model.requires_grad_(True)


def swap(model: fuser.Sequential) -> None:
    first, second = model[0].bias, model[2].bias
    model[0].bias, model[2].bias = second, first


CHANGES = [replace, replace_inside, cast_data, cast_one, freeze, freeze_all, thaw_all, swap]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("input_requires_grad", [False, True])
def test_a_changed_parameter_is_noticed_at_the_next_call(
    change: Callable[[fuser.Sequential], None], input_requires_grad: bool
) -> None:
    model, x = mlp(), x_of(3, SIZE).requires_grad_(input_requires_grad)
    for _ in range(2):
        assert_like_a_fresh_copy(model, x)
        change(model)
        assert_like_a_fresh_copy(model, x)


def test_freezing_and_thawing_in_turn_plans_twice() -> None:
    model, x = mlp(), x_of(3, SIZE)
    for _ in range(3):
        for wanted in (True, False):
            model[0].weight.requires_grad_(wanted)
            grads = results_of(model, x)
            assert (grads[2] is not None) == wanted
    assert len(model.plans) == 2


def test_a_dtype_that_no_pipeline_runs_in_is_refused_when_it_comes_through_data() -> None:
    model = mlp()
    expected = model(x_of(3, SIZE))
    data = model[0].weight.data
    model[0].weight.data = data.double()
    with pytest.raises(
        fuser.InputError, match=said("checks-pipeline-runs", holds((32, 32)), "torch.float64")
    ):
        model(x_of(3, SIZE))
    model[0].weight.data = data
    assert torch.equal(model(x_of(3, SIZE)), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_parameter_that_went_to_meta_is_refused(bias: bool) -> None:
    # Without a bias torch multiplies by a weight on meta, and returns whatever memory holds.
    model: Any = fuser.Linear(SIZE, SIZE, bias=bias)
    x = x_of(3, SIZE)
    expected = model(x)
    kept = model.weight
    model.weight = torch.nn.Parameter(kept.detach().to("meta"))
    with pytest.raises(
        fuser.InputError,
        match=said("checks-pipeline-runs-device", None, "cpu", holds("shape (32, 32)"), "meta"),
    ):
        model(x)
    model.weight = kept
    assert torch.equal(model(x), expected)


def test_a_parameter_that_was_set_to_none_is_a_sentence() -> None:
    model, x = mlp(), x_of(3, SIZE)
    model(x)
    bias = model[0].basic_ops[1]
    kept, bias.bias = bias.bias, None
    with pytest.raises(
        fuser.StateError, match=said("parameter-slots-any-more-never", "Op 1 (Bias)", "'bias'")
    ):
        model(x)
    bias.bias = kept
    assert model(x).shape == (3, SIZE)


# -- inputs ----------------------------------------------------------------------------------


def test_an_input_of_another_dtype_or_that_wants_a_gradient_is_noticed() -> None:
    model = mlp()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for wanted in (False, True, False):
            x = x_of(3, SIZE, dtype=dtype).requires_grad_(wanted)
            assert_like_a_fresh_copy(model, x)


def test_an_extra_input_that_changes_is_noticed() -> None:
    model = fuser.Sequential(fuser.BasicLinear(SIZE, SIZE), fuser.AddExtraInput())
    model.requires_grad_(False)
    x = x_of(3, SIZE)
    for dtype in (torch.float32, torch.bfloat16):
        for wanted in (False, True, False):
            extra = x_of(3, SIZE, dtype=dtype).requires_grad_(wanted)
            y, expected = model(x, extra), copy.deepcopy(model)(x, extra)
            assert torch.equal(y, expected)
            assert y.dtype is expected.dtype
            assert y.requires_grad == wanted
            if wanted:
                y.sum().backward()
                assert torch.equal(extra.grad, torch.ones_like(extra))
    assert len(model.plans) == 4


def test_an_input_on_another_device_is_planned_for_that_device() -> None:
    model = fuser.Sequential(fuser.GELU())
    for device in ("cpu", "meta", "cpu"):
        assert model(x_of(3, SIZE).to(device)).device.type == device
    assert [plan.key.device for plan in model.plans] == ["cpu", "meta"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((x_of(3, 0),), said("checks-last-dimension-not", (3, 0))),
        ((torch.tensor(1.0),), said("checks-dimensions-needs-least")),
        ((None,), said("checks-tensor", None, "NoneType")),
        (([1.0],), said("checks-tensor", None, "list")),
        ((x_of(3, SIZE).double(),), "float64"),
        ((x_of(3, SIZE), x_of(3, SIZE)), said("checks-pipeline", "0 extra inputs", 1)),
        ((x_of(3, SIZE).to("meta"),), said("checks-pipeline-runs-device", None, "meta")),
    ],
    ids=str,
)
def test_what_is_no_input_is_refused_after_a_good_call_and_the_next_good_one_works(
    bad: tuple[Any, ...], words: str
) -> None:
    model = fuser.OperationFuser(list(mlp()))
    expected = model(x_of(3, SIZE))
    for _ in range(2):
        with pytest.raises((fuser.InputError, fuser.InputTypeError), match=words):
            model(*bad)
        assert torch.equal(model(x_of(3, SIZE)), expected)


# -- modes of calling ------------------------------------------------------------------------

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
    "cuda's autocast": lambda: torch.autocast("cuda", enabled=False),
    "mxfp8": lambda: fuser.autocast(recipe=MXFP8BlockScaling()),
    "mxfp8, exact backward": lambda: fuser.autocast(
        recipe=MXFP8BlockScaling(backward_override="high_precision")
    ),
    "fp8": lambda: fuser.autocast(recipe=Float8CurrentScaling()),
}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_a_mode_that_is_toggled_between_two_calls_is_noticed(first: str, second: str) -> None:
    model, x = mlp(), x_of(SIZE, SIZE).requires_grad_()
    for mode in (first, second, first):
        with MODES[mode]():
            assert_like_a_fresh_copy(model, x)


@pytest.mark.parametrize("first", ["plain", "no_grad"])
def test_training_and_evaluation_run_plans_of_their_own_in_any_order(first: str) -> None:
    model, x = mlp(), x_of(SIZE, SIZE)
    for mode in (first, "plain", "no_grad"):
        with MODES[mode]():
            assert (model(x).grad_fn is None) == (mode == "no_grad")
    with_backward = [bool(plan.backward) for plan in model.plans]
    assert sorted(with_backward) == [False, True]


def test_a_fusion_that_is_registered_between_two_calls_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fuser.runtime.pipeline, "_registered", fuser.runtime.pipeline._registered)
    model, x = mlp(), x_of(3, SIZE)
    asked: list[int] = []

    def asking(ops: list[Any], recipe: Any) -> list[Any]:
        asked.append(len(ops))
        return ops

    expected = model(x)
    fuser.register_forward_fusion(asking)
    assert torch.equal(model(x), expected)
    assert asked
    del asked[:]
    model(x)
    assert not asked


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(MODES)), st.sampled_from([None, *CHANGES]), st.booleans()),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=25, deadline=None)
def test_no_sequence_of_changes_leaves_a_stale_plan(
    steps: list[tuple[str, Callable[[fuser.Sequential], None] | None, bool]],
) -> None:
    model = mlp()
    for mode, change, input_requires_grad in steps:
        if change is not None:
            change(model)
        with MODES[mode]():
            assert_like_a_fresh_copy(model, x_of(SIZE, SIZE).requires_grad_(input_requires_grad))


def test_threads_that_call_one_model_in_different_modes_get_their_own_plans() -> None:
    model, x = mlp(), x_of(SIZE, SIZE).requires_grad_()
    names = ["plain", "no_grad", "bf16", "mxfp8"]
    expected = {}
    for name in names:
        with MODES[name]():
            expected[name] = results_of(copy.deepcopy(model), x)
    barrier, errors = threading.Barrier(len(names)), []

    def work(name: str) -> None:
        barrier.wait()
        try:
            for _ in range(30):
                with MODES[name]():
                    found = results_of(model, x)
                torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert len(model.plans) == len(names)


# -- the code that reads it ------------------------------------------------------------------


def test_parameters_are_read_in_the_order_of_the_ops() -> None:
    linear, norm = fuser.Linear(8, 4), fuser.LayerNorm(4)
    ops = [*linear.basic_ops, norm]
    slots = CallKeyReader(ops, 0)
    params, *_ = slots.read(x_of(3, 8), (), None)
    assert slots.counts == [1, 1, 2]
    wanted = [linear.weight, linear.bias, *norm.parameters()]
    assert all(one is other for one, other in zip(params, wanted, strict=True))
    assert all(one is other for one, other in zip(slots.tensors(), wanted, strict=True))


def test_shapes_are_not_part_of_the_call_key() -> None:
    slots = CallKeyReader(list(mlp()[0].basic_ops), 1)
    keys = {
        slots.read(x_of(*shape), (x_of(*shape),), None)[1]
        for shape in [(3, SIZE), (2, 5, SIZE), (SIZE,), (0, SIZE)]
    }
    assert len(keys) == 1


def test_an_op_without_parameters_has_a_call_key() -> None:
    params, key, _ = CallKeyReader([fuser.GELU()], 0).read(x_of(3, 8), (), None)
    assert params == ()
    assert torch.float32 in key


def test_a_parameter_that_two_ops_share_counts_for_each() -> None:
    linear = fuser.BasicLinear(8, 8)
    model = fuser.Sequential(linear, fuser.GELU(), linear)
    x = x_of(3, 8)
    assert_like_a_fresh_copy(model, x)
    linear.weight.requires_grad_(False)
    assert_like_a_fresh_copy(model, x.requires_grad_())


def test_a_dropped_model_frees_its_generated_source() -> None:
    def sources() -> int:
        return sum(str(name).startswith("<fuser ") for name in linecache.cache)

    gc.collect()
    before = sources()
    model = mlp()
    model(x_of(3, SIZE))
    assert sources() == before + 2  # the call key's, and one plan's
    gc.disable()
    try:
        del model
        assert sources() == before
    finally:
        gc.enable()
