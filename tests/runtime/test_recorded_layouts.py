"""What a recorded pass is looked up by, field by field.

Each test calls a model in turn with two sets of tensors that differ in one field alone. Expected
values come from plain torch in fp64, or from a copy of the model that has no recordings.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_kernels import on_kernels
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.cuda.arguments import layout_of
from fuser.precision.contexts import AutocastState
from fuser.runtime import recorded
from fuser.runtime.known_parameters import ParameterLayout
from fuser.runtime.recorded import RecordedPasses

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
ROWS, WIDTH = 64, 32
# One rounding to bf16 of the result, and one of what is between two ops.
NEAR: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with on_kernels():
        yield


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sequences of recorded passes that were repeated."""
    sequences: list[Any] = []
    play = recorded._played

    def noted(sequence: Any, *given: Any) -> Any:
        sequences.append(sequence)
        return play(sequence, *given)

    monkeypatch.setattr(recorded, "_played", noted)
    return sequences


@contextlib.contextmanager
def without_recordings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedPasses, "find", lambda self, *_: None)
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def pointwise() -> fuser.Sequential:
    model = fuser.Sequential(fuser.GELU(), fuser.Bias(WIDTH, dtype=BF16))
    with torch.no_grad():
        model[1].bias.copy_(torch.linspace(-1, 1, WIDTH))
    return model


def normed() -> fuser.Sequential:
    model = fuser.Sequential(fuser.RMSNorm(WIDTH, dtype=BF16), fuser.GELU())
    with torch.no_grad():
        model[0].weight.copy_(torch.linspace(0.5, 2, WIDTH))
    return model


def odd(x: torch.Tensor) -> torch.Tensor:
    """The values of ``x`` at an address that is no multiple of 4 bytes."""
    flat = x.new_empty(x.numel() + 1)[1:]
    return flat.copy_(x.reshape(-1)).view(x.shape)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The values of ``x`` in every other element of its memory, or of each row."""
    columns = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7)
    part = columns[..., ::2] if x.dim() == 1 else columns[..., : x.shape[-1]]
    return part.copy_(x)


# -- inputs -------------------------------------------------------------------------------------

INPUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "shape": (lambda x: x, lambda x: x[: ROWS // 2]),
    "strides": (lambda x: x.contiguous(), wide),
    "alignment": (lambda x: x, odd),
    "dtype": (lambda x: x, lambda x: x.float()),  # in the key of a call too
}
OTHER_FIELDS = {"device": "another device is another key of a call, and needs two GPUs"}


def test_every_field_of_a_tensors_layout_has_a_case() -> None:
    fields = layout_of(torch.empty(3, 5))
    assert fields is not None
    assert len(fields) == len({*INPUTS, *OTHER_FIELDS})


@pytest.mark.parametrize("field", INPUTS)
def test_inputs_that_differ_in_one_field_are_recorded_apart(field: str, played: list[Any]) -> None:
    model = pointwise()
    bias = model[1].bias.double()
    for seed in range(8):
        x = INPUTS[field][seed % 2](random(ROWS, WIDTH, seed=seed))
        torch.testing.assert_close(model(x).double(), gelu(x.double()) + bias, **NEAR)
    assert len({id(sequence) for sequence in played}) == 2


@pytest.mark.parametrize("field", ["shape", "strides", "alignment"])
def test_gradients_of_extra_outputs_that_differ_in_one_field_are_recorded_apart(
    field: str, played: list[Any]
) -> None:
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.GELU())
    for seed in range(8):
        x = random(ROWS, WIDTH, seed=seed)
        given = INPUTS[field][seed % 2](x)
        x = x[: len(given)].requires_grad_()
        torch.autograd.backward(model(x), (torch.zeros_like(x), given))
        assert x.grad is not None
        torch.testing.assert_close(x.grad, given.contiguous())
    assert played


def test_backwards_are_recorded_apart_by_which_extra_output_has_a_gradient(
    played: list[Any],
) -> None:
    two = fuser.MakeExtraOutput(), fuser.GELU(), fuser.MakeExtraOutput(), fuser.GELU()
    model = fuser.Sequential(*two)
    for seed in range(12):
        x, dy, given = (random(ROWS, WIDTH, seed=3 * seed + i) for i in range(3))
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        used = ((0,), (1,), ())[seed % 3]
        for each, apply in ((leaf, model), (exact, None)):
            inner = gelu(each)
            y, *extras = apply(each) if apply else (gelu(inner), each, inner)
            outputs = [y, *(extras[i] for i in used)]
            grads = [dy, *(given for _ in used)]
            torch.autograd.backward(outputs, [g.to(each.dtype) for g in grads])
        assert leaf.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=5e-2, atol=5e-2)
    assert len({id(sequence) for sequence in played}) == 4  # of one forward and three backwards


def test_every_field_of_a_forwards_layout_is_tested_here() -> None:
    """A new part of a key needs a test in this file, and a place in this list."""
    model, recipe = fuser.Sequential(fuser.BasicLinear(WIDTH, WIDTH, dtype=BF16)), delayed()
    read: Any
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        room = recorded._Recordings.has_room

        def noted(self: Any, layout: Any, *args: Any, **options: Any) -> bool:
            found.append(layout)
            return room(self, layout, *args, **options)

        patch.setattr(recorded._Recordings, "has_room", noted)
        for seed in range(3):
            step(model, random(ROWS, WIDTH, seed=seed), recipe)
    forwards = [layout for layout in found if len(layout) != 5]
    tensors, ties, parameters, groups, notes_more, *others_of_call = forwards[-1]
    keywords, is_evaluated, *quantizers = others_of_call
    backend, changes, *of_input = tensors
    assert backend == id(fuser.cuda.launch.backend)
    assert changes == model[0].__dict__["_changes"]  # an attribute of an op: test_recorded.py
    assert len(of_input) == len({*INPUTS, *OTHER_FIELDS})
    assert ties is None
    assert isinstance(parameters, ParameterLayout)
    assert groups is None  # process groups: test_recorded_ranks.py
    assert notes_more is False  # gathered weights in a checkpoint: test_gathered_conversions.py
    assert keywords is None  # those of microbatches: test_recorded_microbatches.py
    assert is_evaluated is False
    assert len(quantizers) == 2  # of forward and of backward; a loaded state: test_recorded.py
    backwards = (layout for layout in found if len(layout) == 5)
    read, autocast, others, needed, is_packed = next(backwards)
    assert len(read) == 1 + len({*INPUTS, *OTHER_FIELDS})  # of the gradient
    assert autocast is False
    assert others == ()
    assert needed is None  # some of the gradients: test_gradient_paths.py
    assert is_packed is True  # in one tensor or not: the test below


def test_backwards_are_recorded_apart_by_whether_one_tensor_has_what_they_read(
    played: list[Any],
) -> None:
    linears = fuser.Linear(WIDTH, WIDTH, dtype=BF16), fuser.Linear(WIDTH, WIDTH, dtype=BF16)
    norm = fuser.RMSNorm(WIDTH, dtype=BF16)
    model = fuser.Sequential(norm, linears[0], fuser.GELU(), linears[1])
    own = copy.deepcopy(model)
    try:
        for seed in range(12):
            fuser.graph_passes(seed % 4 < 2)
            x = random(ROWS, WIDTH, seed=seed)
            found = step(model, x)
            with without_recordings():
                expected = step(own, x)
            assert all(map(torch.equal, found, expected)), seed
    finally:
        fuser.graph_passes(True)
    backwards = [one for one in played if one.owns_inputs]
    assert len({id(one) for one in backwards}) == 2
    assert len(backwards) >= 12 - 4


class Group:
    """In place of a process group."""


def test_each_process_group_of_a_call_is_in_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its ops in their order, and that over which delayed scaling reduces amaxes."""
    one, two, other = Group(), Group(), Group()
    over: list[Any] = [None]
    monkeypatch.setattr(recorded, "resolved", lambda name, group: group)
    monkeypatch.setattr(recorded, "current_state", lambda: AutocastState(delayed(), None, over[0]))
    ops = [SimpleNamespace(process_groups=()), SimpleNamespace(process_groups=())]

    def key(recipe: Any, amaxes: Any, *groups: tuple[Any, ...]) -> Any:
        over[0] = amaxes
        for op, of_op in zip(ops, groups, strict=True):
            op.process_groups = of_op
        passes = RecordedPasses([], recipe)
        passes._communicating = ops  # type: ignore[assignment]
        found = passes._groups_of([random(2, 2)])
        assert found is not None
        assert list(found[0]) == list(dict.fromkeys([*groups[0], *groups[1]]))
        return found[1]

    under = delayed()
    keys = {
        "as it is": key(under, one, (one,), (two,)),
        "amaxes of others": key(under, two, (one,), (two,)),
        "amaxes of all": key(under, None, (one,), (two,)),
        "first group": key(under, one, (other,), (two,)),
        "last group": key(under, one, (one,), (other,)),
        "another order": key(under, one, (two,), (one,)),
        "one group": key(under, one, (one,), (one,)),
        "one group more": key(under, one, (one,), (two, other)),
    }
    assert len(set(keys.values())) == len(keys)
    assert key(delayed(), one, (one,), (two,)) == keys["as it is"]
    assert key(None, one, (one,), (two,)) == key(None, two, (one,), (two,))
    x = random(2, 2)
    x.sizes = (1, 1)
    assert RecordedPasses([], None)._groups_of([random(2, 2), x]) is None


def test_an_input_that_is_given_twice_is_recorded_apart(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.AddExtraInput(), fuser.AddExtraInput())
    for seed in range(8):
        x, one, other = (random(ROWS, WIDTH, seed=3 * seed + i) for i in range(3))
        second = one if seed % 2 else other
        expected = gelu(x.double()) + one.double() + second.double()
        torch.testing.assert_close(model(x, one, second).double(), expected, **NEAR)
    assert len({id(sequence) for sequence in played}) == 2


def test_a_parameter_that_is_an_input_too_is_not_recorded_as_two_tensors() -> None:
    linear = fuser.BasicLinear(WIDTH, WIDTH, dtype=BF16)
    model = fuser.Sequential(fuser.GELU(), fuser.AddExtraInput(), linear)
    for seed in range(8):
        x = random(WIDTH, WIDTH, seed=seed)
        other = linear.weight if seed < 2 else torch.nn.Parameter(random(WIDTH, WIDTH, seed=99))
        rows = (gelu(x.double()) + other.double()).to(BF16).double()
        expected = rows @ linear.weight.double().t()
        torch.testing.assert_close(model(x, other).double(), expected, rtol=2e-2, atol=5e-2)


# -- parameters ---------------------------------------------------------------------------------

PARAMETERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strides": wide,
    "alignment": odd,
    "dtype": lambda weight: weight.float(),
}


@pytest.mark.parametrize("field", PARAMETERS)
def test_parameters_that_differ_in_one_field_are_recorded_apart(
    field: str, played: list[Any]
) -> None:
    model = normed()
    weight = model[0].weight
    data = (weight.detach().clone(), PARAMETERS[field](weight.detach()))
    for seed in range(8):
        weight.data = data[seed % 2]
        x = random(ROWS, WIDTH, seed=seed)
        torch.testing.assert_close(
            model(x).double(), gelu(rms(x.double(), weight.double())), **NEAR
        )
    assert len({id(sequence) for sequence in played}) == 2


def test_a_parameter_of_two_ops_is_recorded_apart_from_two_of_them(played: list[Any]) -> None:
    model = fuser.Sequential(*normed(), *normed())
    one, other = (torch.nn.Parameter(random(WIDTH, seed=seed)) for seed in (90, 91))
    model[0].weight = one
    for seed in range(8):
        model[2].weight = one if seed < 4 else other
        x = random(ROWS, WIDTH, seed=seed)
        hidden = gelu(rms(x.double(), model[0].weight.double()))
        expected = gelu(rms(hidden, model[2].weight.double()))
        torch.testing.assert_close(model(x).double(), expected, rtol=2e-2, atol=5e-2)
    assert len({id(sequence) for sequence in played}) == 2


# -- between forward and backward -----------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def set_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def set_(model: Any) -> None:
        model[0].weight.data = change(model[0].weight.detach())

    return set_


BETWEEN: dict[str, Callable[[Any], Any]] = {
    **{field: set_data(change) for field, change in PARAMETERS.items()},
    "values": set_data(lambda weight: 2 * weight),
    "module.to": lambda model: model.to(torch.float32),
}


@pytest.mark.parametrize("change", BETWEEN)
def test_a_backward_reads_a_parameter_as_it_is_then(change: str, played: list[Any]) -> None:
    """As torch's RMSNorm, which saves the parameter itself: sharders exchange its memory."""
    model, other = normed(), normed()
    for seed in range(4):
        step(model, random(ROWS, WIDTH, seed=seed))
    assert played
    for seed in range(4, 7):  # runs the plan's own code, is recorded, and is repeated
        x, dy = random(ROWS, WIDTH, seed=seed), random(ROWS, WIDTH, seed=seed + 50)
        leaf = x.clone().requires_grad_()
        model[0].weight.data = other[0].weight.detach().clone()
        model[0].weight.grad = None
        y = model(leaf)
        BETWEEN[change](model)
        now = model[0].weight.double()
        y.backward(dy.to(y.dtype))
        # The norm of the forward, and the derivative of the GELU there; the weight of the backward.
        exact = x.double().requires_grad_()
        before = rms(exact, other[0].weight.double()).detach().to(BF16).double()
        before.requires_grad_()
        (dz,) = torch.autograd.grad(gelu(before), before, dy.double())
        (expected,) = torch.autograd.grad(rms(exact, now), exact, dz)
        assert leaf.grad is not None
        if change == "values":  # the GELU computes its input again, with the weight of the backward
            with without_recordings():
                copied = copy.deepcopy(other)
                plain = x.clone().requires_grad_()
                z = copied(plain)
                BETWEEN[change](copied)
                z.backward(dy)
            assert torch.equal(leaf.grad, plain.grad)
        else:
            torch.testing.assert_close(leaf.grad.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("change", ["smaller", "freed"])
def test_a_backward_refuses_a_parameter_without_its_values(change: str) -> None:
    model = normed()
    for seed in range(4):
        step(model, random(ROWS, WIDTH, seed=seed))
    y = model(random(ROWS, WIDTH).requires_grad_())
    weight, kept = model[0].weight, model[0].weight.detach().clone()
    if change == "smaller":
        weight.data = kept[:16].clone()
    else:
        weight.untyped_storage().resize_(0)
    with pytest.raises(Exception, match=r"shape '\[32\]' is invalid|it was freed"):
        y.backward(torch.ones_like(y))
    weight.data = kept
    x, dy = random(ROWS, WIDTH, seed=9), random(ROWS, WIDTH, seed=9)
    leaf = x.clone().requires_grad_()
    model(leaf).backward(dy)
    exact = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(gelu(rms(exact, kept.double())), exact, dy.double())
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=3e-2, atol=3e-2)


# -- conditions ---------------------------------------------------------------------------------


def delayed() -> Any:
    return recipes.DelayedScaling(amax_history_len=2)


def step(model: Any, x: torch.Tensor, recipe: Any = None, run: Any = None) -> list[Any]:
    """Output and gradients of one step."""
    leaf = x.clone().requires_grad_()
    with contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe):
        y = (run or model)(leaf)
    y.backward(random(*y.shape, seed=3, dtype=y.dtype))
    results = [y.detach().clone(), leaf.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return results


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_evaluation_and_a_checkpoint_of_training_are_recorded_apart() -> None:
    """Both run without gradients; the second records amaxes."""
    model, recipe = fuser.Sequential(fuser.Linear(WIDTH, WIDTH, dtype=BF16)), delayed()
    other = copy.deepcopy(model)
    for seed in range(6):
        x = random(ROWS, WIDTH, seed=seed) * 4**seed
        with torch.no_grad(), fuser.autocast(recipe=recipe):
            model(x / 16)
            model(x / 16)
        found = step(model, x, recipe, lambda leaf: checkpoint(model, leaf, use_reentrant=True))
        with without_recordings():
            assert_equal(found, step(other, x, recipe))


def test_evaluation_of_a_frozen_model_is_recorded_apart_from_its_training() -> None:
    model, recipe = fuser.Sequential(fuser.Linear(WIDTH, WIDTH, dtype=BF16)), delayed()
    model.requires_grad_(False)
    other = copy.deepcopy(model)
    for seed in range(6):
        x = random(ROWS, WIDTH, seed=seed) * 4**seed
        with torch.no_grad(), fuser.autocast(recipe=recipe):
            model(x / 16)
        with fuser.autocast(recipe=recipe):
            y = model(x)
        with without_recordings(), fuser.autocast(recipe=recipe):
            assert torch.equal(y, other(x))


def test_a_backward_inside_autocast_is_recorded_apart(played: list[Any]) -> None:
    model = fuser.Sequential(fuser.Linear(WIDTH, WIDTH), fuser.GELU())
    other = copy.deepcopy(model)

    def run(model: Any, seed: int) -> list[Any]:
        x = random(ROWS, WIDTH, seed=seed, dtype=torch.float32).requires_grad_()
        y, dy = model(x), random(ROWS, WIDTH, seed=seed + 50, dtype=torch.float32)
        with torch.autocast("cpu", dtype=BF16, enabled=seed % 2 == 1):
            y.backward(dy)
        grads = [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad(set_to_none=True)
        return grads

    for seed in range(10):
        found = run(model, seed)
        with without_recordings():
            assert_equal(found, run(other, seed))
    assert played


def test_an_output_that_is_a_view_of_all_of_the_input_is_a_view_each_time(
    played: list[Any],
) -> None:
    model = fuser.Sequential(fuser.Reshape((ROWS, WIDTH)))
    for seed in range(5):
        x = random(ROWS, WIDTH, seed=seed).requires_grad_()
        with torch.no_grad():
            y = model(x)
            assert y._base is x
            y.transpose_(0, 1)
        assert x.shape == (ROWS, WIDTH)
    assert played


# -- which layouts are kept ---------------------------------------------------------------------


NONE = ParameterLayout(())


def layouts_in_turn(passes: RecordedPasses, rows: list[int]) -> list[int]:
    """Those that have a recording."""
    return [n for n in rows if passes.find([torch.empty(n, 4)], 0, NONE) is not None]


def test_of_more_layouts_than_places_some_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_LAYOUTS", 4)
    passes, rows = RecordedPasses([], None), [1, 2, 3, 4, 5, 6]
    assert layouts_in_turn(passes, rows) == []
    for _ in range(5):
        assert layouts_in_turn(passes, rows) == [1, 2, 3, 4]
    assert len(passes._forwards) == 4


def test_a_layout_that_is_used_keeps_its_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_LAYOUTS", 4)
    passes = RecordedPasses([], None)
    assert layouts_in_turn(passes, [7, 7]) == [7]
    for n in range(10, 40):  # each comes twice, one of them more often
        assert layouts_in_turn(passes, [n, n, 7])[-1] == 7
    assert len(passes._forwards) == 4


def test_layouts_of_later_work_take_the_places_of_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "MOST_LAYOUTS", 4)
    passes = RecordedPasses([], None)
    layouts_in_turn(passes, [1, 2, 3, 4] * 2)
    for _ in range(3):
        layouts_in_turn(passes, [5, 6, 7, 8])
    assert layouts_in_turn(passes, [5, 6, 7, 8]) == [5, 6, 7, 8]


def test_shapes_that_never_repeat_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_SEEN", 8)
    passes = RecordedPasses([], None)
    assert layouts_in_turn(passes, list(range(1, 100))) == []
    assert not passes._forwards
    assert len(passes._forwards._seen) == 8
