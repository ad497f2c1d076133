"""Recorded passes of grouped linears with separate weights, which are views of one buffer.

A recording reads the buffer from the address of the first weight, so it must not be used for
weights that lie elsewhere. The yardstick is a model that knows nothing of earlier calls.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
from one_launch_experts import in_one_launch
from pipeline_kernels import on_kernels
from said import said, sentence
from torch.nn import Parameter

import fuser
from fuser.cuda import sequence
from fuser.runtime import known_parameters, recorded
from fuser.runtime.known_parameters import KnownParameters
from fuser.runtime.recorded import RecordedPasses

BF16 = torch.bfloat16
E, H, F, T = 4, 16, 24, 40
# Launched, recorded, and repeated.
STEPS = 3
SIZES = ((10, 10, 10, 10), (0, 25, 5, 7), (40, 0, 0, 0))


@pytest.fixture(autouse=True)
def one_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    in_one_launch(monkeypatch)
    with on_kernels():
        yield


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sequences of recorded passes that were repeated."""
    found: list[Any] = []
    play = recorded._played

    def noted(which: sequence.LaunchSequence, *given: Any) -> Any:
        found.append(which)
        return play(which, *given)

    monkeypatch.setattr(recorded, "_played", noted)
    return found


def experts(**options: Any) -> fuser.Sequential:
    first, second = {"bias": False, "dtype": BF16}, {"dtype": BF16, **options}
    model = fuser.Sequential(
        fuser.GroupedLinear(E, H, 2 * F, device="cpu", **first),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(E, F, H, device="cpu", **second),
    )
    return oracles.randomize(model)


def scaled_bias() -> fuser.GroupedLinear:
    return oracles.randomize(fuser.GroupedLinear(E, H, F, dtype=BF16, scale_bias=True))


def called(model: torch.nn.Module, *inputs: torch.Tensor, seed: int = 0) -> torch.Tensor:
    x, scales = inputs or inputs_of(seed)
    sizes = torch.tensor(SIZES[seed % len(SIZES)])
    y: torch.Tensor = model(x, sizes, scales, sizes)
    return y


def inputs_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = oracles.random_tensor((T, H), BF16, seed).requires_grad_()
    return x, oracles.random_tensor((T,), BF16, seed + 1).requires_grad_()


def step(model: torch.nn.Module, seed: int = 0) -> list[Any]:
    """Output and gradients of one step."""
    x, scales = inputs_of(seed)
    y = called(model, x, scales, seed=seed)
    y.backward(oracles.random_tensor((T, H), BF16, seed + 2))
    found = [y.detach(), x.grad, scales.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def unrecorded(model: torch.nn.Module, seed: int = 0) -> list[Any]:
    """As :func:`step`, of a copy that has no recordings, and whose weights are no neighbours."""
    return step(copy.deepcopy(model), seed)


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def warm(model: torch.nn.Module) -> None:
    for seed in range(STEPS):
        step(model, seed)


def test_recorded_steps_have_the_bits_of_the_plans_own_code(played: list[Any]) -> None:
    model = experts()
    for seed in range(6):
        assert_equal(step(model, seed), unrecorded(model, seed))
    assert len(played) == 2 * 4, "forward and backward, without the first two steps"
    assert len({id(which) for which in played}) == 2


def test_evaluation_is_recorded(played: list[Any]) -> None:
    model = experts()
    x, scales = torch.randn(T, H, dtype=BF16), torch.rand(T, dtype=BF16)
    sizes = torch.tensor(SIZES[0])
    with torch.no_grad():
        found = [model(x, sizes, scales, sizes) for _ in range(4)]
    assert len(played) == 2
    assert all(torch.equal(y, found[0]) for y in found)


# -- weights that change ------------------------------------------------------------------


def names(op: torch.nn.Module) -> list[str]:
    return [f"weight{g}" for g in range(E)]


def replaced_data(op: Any) -> None:
    op.weight2.data = op.weight2.detach() * 2


def replaced_first_data(op: Any) -> None:
    op.weight0.data = op.weight0.detach() * 2


def replaced_parameter(op: Any) -> None:
    op.weight1 = Parameter(op.weight1.detach() * 2)


def new_parameters_over_the_old_memory(op: Any) -> None:
    for name in names(op):
        setattr(op, name, Parameter(getattr(op, name).data))


def moved_to_another_buffer(op: Any) -> None:
    buffer = torch.stack([getattr(op, name).detach() * 2 for name in names(op)])
    for name, part in zip(names(op), buffer, strict=True):
        getattr(op, name).data = part


def moved_into_a_larger_buffer_in_another_order(op: Any) -> None:
    buffer = torch.stack([getattr(op, name).detach() * 2 for name in names(op)] * 2)
    for name, part in zip(names(op), reversed(buffer[1 : E + 1]), strict=True):
        getattr(op, name).data = part


def exchanged_data(op: Any) -> None:
    op.weight1.data, op.weight2.data = op.weight2.data, op.weight1.data


def exchanged_parameters(op: Any) -> None:
    op.weight1, op.weight3 = op.weight3, op.weight1


def swapped_tensors(op: Any) -> None:
    torch.utils.swap_tensors(op.weight2, Parameter(op.weight2.detach() * 2))


def tied(op: Any) -> None:
    op.weight3 = op.weight2


def tied_memory(op: Any) -> None:
    op.weight3.data = op.weight2.data


def assigned_state(op: Any) -> None:
    op.load_state_dict({n: 2 * v for n, v in op.state_dict().items() if v.numel()}, assign=True)


def loaded_state(op: Any) -> None:
    op.load_state_dict({n: 2 * v for n, v in op.state_dict().items() if v.numel()})


def written(op: Any) -> None:
    for name in names(op):
        getattr(op, name).data.mul_(2)


def applied(op: Any) -> None:
    op._apply(lambda parameter: 2 * parameter)


def frozen(op: Any) -> None:
    op.weight2.requires_grad_(False)


def all_frozen(op: Any) -> None:
    op.requires_grad_(False)


def other_strides(op: Any) -> None:
    for name in names(op):
        weight = getattr(op, name)
        weight.data = weight.data.view(weight.shape[::-1]).t()


def other_dtype(op: Any) -> None:
    op.half()


def negated(op: Any) -> None:
    op.weight2.data = torch._neg_view(op.weight2.data)


def other_storages_at_the_same_addresses(op: Any) -> None:
    weights = [getattr(op, name) for name in names(op)]
    held.append(weights[0].untyped_storage())
    for weight in weights:
        flat = (weight.numel() * 2,)
        bytes_ = torch.frombuffer(_memory(weight), dtype=torch.uint8)
        assert bytes_.shape == flat
        weight.data = bytes_.view(BF16).view(weight.shape)
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == E


def _memory(tensor: torch.Tensor) -> Any:
    import ctypes

    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


held: list[Any] = []

CHANGES = [
    replaced_data,
    replaced_first_data,
    replaced_parameter,
    new_parameters_over_the_old_memory,
    moved_to_another_buffer,
    moved_into_a_larger_buffer_in_another_order,
    exchanged_data,
    exchanged_parameters,
    swapped_tensors,
    tied,
    tied_memory,
    assigned_state,
    loaded_state,
    written,
    applied,
    frozen,
    all_frozen,
    other_strides,
    other_dtype,
    negated,
    other_storages_at_the_same_addresses,
]


@pytest.mark.sampled
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("index", [0, 2], ids=["first linear", "second linear"])
def test_weights_that_change_are_read_as_they_are(
    change: Callable[[Any], None], index: int, played: list[Any]
) -> None:
    model = experts()
    warm(model)
    assert played
    change(model[index])
    for seed in range(STEPS):
        found = step(model, seed)
        expected = unrecorded(model, seed)
        assert_equal(found, expected)


def test_a_frozen_weight_that_is_thawed_has_a_gradient_again() -> None:
    model = experts()
    for is_wanted in (True, False, True, False):
        model[0].weight1.requires_grad_(is_wanted)
        for seed in range(3):
            found = step(model, seed)
            assert (found[4] is not None) == is_wanted
            assert_equal(found, unrecorded(model, seed))


def step_with_weights_in_turn() -> None:
    model = experts()
    buffers = [torch.stack([p.detach() * c for p in model[0].parameters()]) for c in (1, 2)]
    apart = [part.clone() for part in buffers[1]]
    every: list[Any] = [*buffers, apart]
    for i, parts in enumerate(every * 4):
        for weight, part in zip(model[0].parameters(), parts, strict=True):
            weight.data = part
        assert_equal(step(model, i), unrecorded(model, i))


def test_weights_that_move_in_turn_between_two_places_are_read_as_they_are() -> None:
    step_with_weights_in_turn()


def test_weights_that_move_in_turn_between_two_places_are_recorded_in_both(
    played: list[Any],
) -> None:
    step_with_weights_in_turn()
    assert len({id(which) for which in played}) == 4, "two forwards, two backwards"


def test_a_recording_of_weights_that_were_joined_is_not_for_weights_that_stay_apart(
    played: list[Any],
) -> None:
    """Weights in memory of their own are joined, unless other tensors are there too."""
    model = experts()
    weights = list(model[0].parameters())
    for weight in weights:
        weight.data = weight.detach().clone()
    warm(model)
    assert played
    others = [weight.detach() * 2 for weight in weights]
    for weight, other in zip(weights, others, strict=True):
        weight.data = other
    for seed in range(STEPS):
        assert_equal(step(model, seed), unrecorded(model, seed))


def test_weights_without_torchs_guard_are_read_at_each_call(
    monkeypatch: pytest.MonkeyPatch, played: list[Any]
) -> None:
    monkeypatch.setattr(known_parameters, "TensorGuards", None)
    model = experts()
    for change in (lambda op: None, replaced_data, frozen, moved_to_another_buffer):
        change(model[0])
        for seed in range(STEPS):
            assert_equal(step(model, seed), unrecorded(model, seed))
    assert played


def test_torch_has_the_guard() -> None:
    assert known_parameters.TensorGuards is not None


def test_facts_are_read_once_for_parameters_that_do_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewed: list[int] = []
    renew = KnownParameters.renew

    def noted(self: Any, params: Any) -> Any:
        renewed.append(len(params))
        return renew(self, params)

    monkeypatch.setattr(KnownParameters, "renew", noted)
    model = experts()
    warm(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        step(model, seed)
        optimizer.step()
    assert len(renewed) == 1


# -- weights that change between forward and backward --------------------------------------


def as_made(model: fuser.Sequential) -> fuser.Sequential:
    """Weights that share one version counter."""
    return model


def packed_later(model: fuser.Sequential) -> fuser.Sequential:
    """Weights in one buffer, each with a version counter of its own."""
    return copy.deepcopy(model).to("cpu")


def apart(model: fuser.Sequential) -> fuser.Sequential:
    return copy.deepcopy(model)


@pytest.mark.parametrize("make", [as_made, packed_later, apart])
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
def test_each_weight_that_changes_before_the_backward_is_noticed(
    make: Callable[[fuser.Sequential], fuser.Sequential],
    is_recorded: bool,
    played: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(experts(bias=False))
    weights = list(model.parameters())
    assert len(weights) == 2 * E
    if make is packed_later:
        with torch.no_grad():
            weights[0].add_(0)
        assert weights[0]._version != weights[1]._version
    if is_recorded:
        warm(model)
    for weight in weights:
        if not is_recorded:
            monkeypatch.setattr(RecordedPasses, "find", lambda *_: None)
        count = len(played)
        y = called(model)
        assert len(played) == count + is_recorded
        with torch.no_grad():
            weight.mul_(1)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            y.sum().backward()
    assert_equal(step(model), unrecorded(model))


def test_each_backward_compares_the_versions_of_its_own_forward(played: list[Any]) -> None:
    model = packed_later(experts(bias=False))
    warm(model)
    before = called(model)
    with torch.no_grad():
        model[2].weight3.mul_(2)
    after = called(model)
    after.sum().backward()
    with pytest.raises(
        RuntimeError, match=said("shared-memory-parameter-shape-changed", "GroupedLinear", (16, 24))
    ):
        before.sum().backward()


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
def test_each_bias_that_changes_before_the_backward_of_the_scales_is_noticed(
    is_recorded: bool, played: list[Any]
) -> None:
    op = copy.deepcopy(scaled_bias()).to("cpu")
    for g in range(E):
        for repeat in range(STEPS if is_recorded else 1):
            x, scales = inputs_of(g)
            y = op(x, torch.tensor(SIZES[0]), scales)
            if repeat + 1 < STEPS and is_recorded:
                y.sum().backward()
        with torch.no_grad():
            getattr(op, f"bias{g}").mul_(2)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            y.sum().backward()
    assert bool(played)


def test_one_expert_is_recorded(played: list[Any]) -> None:
    op = oracles.randomize(fuser.GroupedLinear(1, H, F, bias=False, dtype=BF16))
    for seed in range(STEPS):
        x, _ = inputs_of(seed)
        y = op(x, torch.tensor([T]))
        assert torch.equal(y, torch.nn.functional.linear(x, op.weight0))
        y.sum().backward()
    assert len(played) == 2


# -- views beside a tensor ------------------------------------------------------------------


def strided(base: torch.Tensor, *given: Any) -> Callable[[], torch.Tensor]:
    return lambda: base.as_strided(*given) + 1


def test_a_view_of_memory_beside_a_tensor_is_recorded_if_the_inputs_there_follow_it() -> None:
    buffer = torch.randn(4, 6)
    one, other = buffer[0], buffer[1]
    both = (one.data_ptr(), other.data_ptr() + other.nbytes)
    made, result, slotted = sequence.record(
        [one, other], strided(one, (2, 6), (6, 1)), runs=[both], with_calls=True
    )
    assert made.is_complete
    made.result = slotted(result)
    others = torch.randn(3, 6)
    assert torch.equal(made.play(tuple(others[1:])), others[1:] + 1)


REFUSED = {
    "nothing is known": ((2, 6), (6, 1), (), 0),
    "it ends later": ((3, 6), (6, 1), (), 2),
    "its steps are larger": ((2,), (13,), (), 2),
    "its offset is in the storage": ((2, 6), (6, 1), (6,), 2),
}


@pytest.mark.parametrize(("size", "stride", "offset", "known"), REFUSED.values(), ids=REFUSED)
def test_other_views_beside_a_tensor_are_not_recorded(
    size: Any, stride: Any, offset: Any, known: int
) -> None:
    buffer = torch.randn(5, 6)
    one = buffer[1]
    runs = [(one.data_ptr(), one.data_ptr() + known * one.nbytes)] if known else []
    made, _, _ = sequence.record(
        list(buffer[1:3]), strided(one, size, stride, *offset), runs=runs, with_calls=True
    )
    assert made.refusal == sentence("sequence-memory-beside-tensor")


def test_parameters_follow_one_another_only_in_one_memory() -> None:
    buffer = torch.randn(6, 8)
    alone = torch.randn(8)
    known = KnownParameters(())

    def runs(*params: torch.Tensor) -> Any:
        _, layout = known.renew(params)
        assert layout is not None
        return layout.runs

    assert runs(*buffer) == ((0, 6),)
    assert runs(*buffer[:3], *buffer[4:]) == ((0, 3), (3, 2))
    assert runs(buffer[0], alone, *buffer[1:3]) == ((2, 2),)
    assert runs(*list(buffer)[::-1]) == runs(buffer[0], buffer[2]) == runs(alone) == ()
    assert runs(buffer[:2].t(), buffer[2]) == runs(buffer[0, :0], buffer[0, :0]) == ()
    halves = [torch.frombuffer(_memory(part), dtype=torch.float32) for part in buffer[:2]]
    assert runs(*halves) == ()
    for one, other in itertools.pairwise([buffer, buffer + 1]):
        assert known.renew(tuple(one))[1] is known.renew(tuple(other))[1]
