"""Separate weights of a GroupedLinear are one buffer, also after they were copied or replaced."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import fuser

G, K, N, T = 4, 32, 48, 96
SIZES = (24, 30, 0, 42)
WEIGHT_BYTES = G * N * K * 4


def grouped(**options: Any) -> fuser.GroupedLinear:
    return oracles.randomize(fuser.GroupedLinear(G, K, N, device="cpu", **options))


def step(op: Any, seed: int = 1) -> list[torch.Tensor]:
    """Output, and gradients of the input and of all parameters."""
    x = oracles.random_tensor((T, K), torch.float32, seed).to(op.weight0.dtype).requires_grad_()
    y = op(x, torch.tensor(SIZES))
    params = [p for p in op.parameters() if p.requires_grad]
    dy = oracles.random_tensor((T, N), torch.float32, seed + 1).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *params], dy)]


def expected(op: Any, seed: int = 1) -> torch.Tensor:
    """The output in fp64, by torch."""
    x = oracles.random_tensor((T, K), torch.float32, seed).double()
    weights = [getattr(op, f"weight{g}").detach().double() for g in range(G)]
    biases = [getattr(op, f"bias{g}").detach().double() for g in range(G)]
    parts = zip(x.split(SIZES), weights, biases, strict=True)
    return torch.cat([torch.nn.functional.linear(*part) for part in parts])


def weights_of(op: Any) -> list[Any]:
    return [getattr(op, f"weight{g}") for g in range(G)]


def are_one_buffer(op: Any) -> bool:
    """Weights, and biases, follow one another in memory that has nothing else."""
    for kind in ("weight", "bias"):
        parts = [getattr(op, f"{kind}{g}") for g in range(G) if hasattr(op, f"{kind}{g}")]
        steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(parts)}
        if parts and (
            steps != {parts[0].nbytes}
            or any(p.untyped_storage().nbytes() != G * p.nbytes for p in parts)
        ):
            return False
    return True


def unpickled(op: Any) -> Any:
    return pickle.loads(pickle.dumps(op))


def saved_and_loaded(op: Any) -> Any:
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(op: Any) -> Any:
    other = fuser.GroupedLinear(G, K, N, device="meta")
    state = {name: value.clone() for name, value in op.state_dict().items()}
    other.load_state_dict(state, assign=True)
    return other


def assigned_in_part(op: Any) -> Any:
    state = {"weight1": op.weight1.detach().clone(), "bias3": op.bias3.detach().clone()}
    op.load_state_dict(state, strict=False, assign=True)
    return op


def replaced(op: Any) -> Any:
    op.weight2 = Parameter(op.weight2.detach().clone())
    return op


def with_data_of_its_own(op: Any) -> Any:
    for p in op.parameters():
        p.data = p.detach().clone()
    return op


CHANGES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "deep copy of a deep copy": lambda op: copy.deepcopy(copy.deepcopy(op)),
    "pickle": unpickled,
    "torch.save": saved_and_loaded,
    "assigned state": assigned,
    "some assigned": assigned_in_part,
    "one replaced": replaced,
    "data": with_data_of_its_own,
    "conversion": lambda op: with_data_of_its_own(op).double().float(),
    "in a model": lambda op: copy.deepcopy(torch.nn.ModuleList([op]))[0],
}
CHANGED = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


class Copies(TorchDispatchMode):
    """Counts copies of as many bytes as all weights have."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func._opname in ("stack", "cat", "clone", "_to_copy", "copy_", "contiguous")
        self.count += is_copy and result.nbytes >= WEIGHT_BYTES
        return result


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        with on_kernels():
            yield
    else:
        yield


@CHANGED
def test_weights_are_one_buffer_from_the_next_call_on(change: Any) -> None:
    op = change(grouped())
    before = [id(p) for p in op.parameters()]
    found = step(op)
    assert are_one_buffer(op)
    assert [id(p) for p in op.parameters()] == before
    torch.testing.assert_close(found[0].double(), expected(op), rtol=1e-5, atol=1e-5)
    reference = grouped()
    assert all(torch.equal(a, b) for a, b in zip(found, step(reference), strict=True))


@CHANGED
def test_no_pass_copies_or_saves_all_weights(change: Any) -> None:
    op = change(grouped())
    step(op)
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Copies() as copies, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        step(op)
    assert copies.count == 0
    own = {p.untyped_storage().data_ptr() for p in op.parameters()}
    beside = sum(nbytes for address, nbytes in saved.items() if address not in own)
    assert beside <= T * K * 4 + 1024, beside  # the input, and sizes of groups


@pytest.mark.parametrize("name", ["deep copy", "pickle"])
def test_a_copy_has_no_more_memory_than_its_parameters(name: str) -> None:
    op = CHANGES[name](grouped())
    if name == "pickle":  # whose loader still has the memory while it makes the op
        step(op)
    storages = {(s := p.untyped_storage()).data_ptr(): s.nbytes() for p in op.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in op.parameters())
    assert are_one_buffer(op)


def shared_with_detached(op: fuser.GroupedLinear) -> list[torch.Tensor]:
    for parameter in op.parameters():
        parameter.data = parameter.detach().clone()
    return [parameter.detach() for parameter in op.parameters()]


def shared_with_state_dict(op: fuser.GroupedLinear) -> list[torch.Tensor]:
    state = {name: value.clone() for name, value in op.state_dict().items() if value is not None}
    op.load_state_dict(state, assign=True)
    return [state[name] for name, _ in op.named_parameters()]


def shared_with_arrays(op: fuser.GroupedLinear) -> list[torch.Tensor]:
    arrays = [parameter.detach().numpy().copy() for parameter in op.parameters()]
    for parameter, array in zip(op.parameters(), arrays, strict=True):
        parameter.data = torch.from_numpy(array)
    return [torch.from_numpy(array) for array in arrays]


def shared_with_another_op(op: fuser.GroupedLinear) -> list[torch.Tensor]:
    other = [torch.nn.Parameter(parameter.detach().clone()) for parameter in op.parameters()]
    for parameter, one in zip(op.parameters(), other, strict=True):
        parameter.data = one.data
    return [one.detach() for one in other]


@pytest.mark.parametrize(
    "share",
    [shared_with_detached, shared_with_state_dict, shared_with_arrays, shared_with_another_op],
)
def test_tensors_that_share_memory_with_the_weights_still_do_after_calls(share: Any) -> None:
    op = grouped()
    step(op)
    aliases = share(op)
    for _ in range(2):
        step(op)
        with torch.no_grad():
            for alias in aliases:
                alias.mul_(2)
        for parameter, alias in zip(op.parameters(), aliases, strict=True):
            assert torch.equal(parameter.detach(), alias)
    found = step(op)
    torch.testing.assert_close(found[0].double(), expected(op), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("place")
def test_weights_that_move_between_calls_are_followed() -> None:
    """On kernels, passes are recorded with the addresses of parameters."""
    op, other = grouped(bias=False), grouped(bias=False)
    for turn in range(8):
        if turn % 3 == 2:
            with_data_of_its_own(op)
        with torch.no_grad():
            for model in (op, other):
                model.weight1.mul_(1.5)
        found, wanted = step(op, turn), step(other, turn)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), turn
        assert are_one_buffer(op)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    ],
    ids=["sgd", "adamw", "fused adamw"],
)
def test_an_optimizer_keeps_the_parameters_that_are_joined(make: Any) -> None:
    op, other = with_data_of_its_own(grouped()), grouped()
    optimizers = [make(list(model.parameters())) for model in (op, other)]
    for turn in range(4):
        if turn == 2:
            with_data_of_its_own(op)
        for model, optimizer in zip((op, other), optimizers, strict=True):
            x = oracles.random_tensor((T, K), torch.float32, turn)
            model(x, torch.tensor(SIZES)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, own in zip(op.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, own)
    assert are_one_buffer(op)


def test_a_backward_of_other_code_reads_the_weight_that_was_moved_since() -> None:
    op = with_data_of_its_own(grouped())
    x = torch.randint(-8, 9, (5, K)).float().requires_grad_()  # its sums are exact in every order
    y = torch.nn.functional.linear(x, op.weight1)
    step(op)
    y.sum().backward()
    torch.testing.assert_close(x.grad, op.weight1.detach().sum(0).expand(5, K))
    assert torch.equal(op.weight1.grad, x.detach().sum(0).expand(N, K))


def test_a_change_after_the_join_is_still_noticed_before_the_backward() -> None:
    op = with_data_of_its_own(grouped())
    y = op(torch.randn(T, K, requires_grad=True), torch.tensor(SIZES))
    with torch.no_grad():
        op.weight2.mul_(3)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        y.sum().backward()


def test_frozen_weights_and_calls_without_gradients_are_joined() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        op = with_data_of_its_own(grouped())
        for p in op.parameters():
            p.requires_grad_(False)
        x = oracles.random_tensor((T, K), torch.float32, 1)
        with context():
            y = op(x, torch.tensor(SIZES))
        assert are_one_buffer(op)
        assert not any(p.is_inference() or p.requires_grad for p in op.parameters())
        torch.testing.assert_close(y.double(), expected(op), rtol=1e-5, atol=1e-5)
        op.requires_grad_(True)
        step(op)  # torch refuses to save inference tensors for a backward


def test_weights_of_inference_mode_stay_as_they_are() -> None:
    with torch.inference_mode():
        op = grouped()
        for g in range(G):
            setattr(op, f"weight{g}", Parameter(torch.randn(N, K), requires_grad=False))
        y = op(oracles.random_tensor((T, K), torch.float32, 1), torch.tensor(SIZES))
        torch.testing.assert_close(y.double(), expected(op), rtol=1e-5, atol=1e-5)


def test_parameters_of_other_dtypes_shapes_or_strides_stay() -> None:
    op = grouped()
    op.weight1.data = op.weight1.detach().t().contiguous().t()
    places = [w.data_ptr() for w in weights_of(op)]
    for _ in range(2):
        found = step(op)
    assert [w.data_ptr() for w in weights_of(op)] == places
    torch.testing.assert_close(found[0].double(), expected(op), rtol=1e-5, atol=1e-5)


def test_weights_that_share_memory_go_on_sharing_it() -> None:
    op = with_data_of_its_own(grouped())
    op.weight2.data = op.weight1.data
    for _ in range(2):
        step(op)
    with torch.no_grad():
        op.weight1.zero_()
    assert not op.weight2.any()


def test_weights_in_the_memory_of_a_caller_stay_there() -> None:
    """As those of an optimizer whose parameters are views of one flat tensor."""
    op = grouped()
    flat = torch.cat([w.detach().flatten() for w in reversed(weights_of(op))] + [torch.zeros(7)])
    for place, weight in enumerate(reversed(weights_of(op))):
        weight.data = flat[place * N * K : (place + 1) * N * K].view(N, K)
    for _ in range(2):
        step(op)
    flat.zero_()
    assert not any(w.any() for w in weights_of(op))


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 2, 3, 0), (0, 2, 1, 3)], ids=str)
def test_parts_of_one_buffer_in_another_order_stay_there(order: tuple[int, ...]) -> None:
    """Nothing but the weights is in it: whoever made it reads it in that order."""
    op, reference = grouped(), grouped()
    flat = torch.stack([weights_of(op)[g].detach() for g in order])
    for place, g in enumerate(order):
        weights_of(op)[g].data = flat[place]
    del flat
    places = [w.data_ptr() for w in weights_of(op)]
    for turn in range(3):
        found, wanted = step(op, turn), step(reference, turn)
        assert [w.data_ptr() for w in weights_of(op)] == places
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), turn
    assert not are_one_buffer(op)


def test_a_weight_of_two_ops_stays_one_parameter_and_finds_a_place() -> None:
    """Not at each call another one: the op that comes first has its weights in one buffer."""
    one, other = grouped(bias=False), grouped(bias=False)
    other.weight0 = one.weight0
    other.weight3 = other.weight2
    places = []
    for turn in range(5):
        found = [step(op, turn)[0] for op in (one, other)]
        places.append([w.data_ptr() for op in (one, other) for w in weights_of(op)])
        x = oracles.random_tensor((T, K), torch.float32, turn).double()
        for op, y in zip((one, other), found, strict=True):
            parts = zip(x.split(SIZES), weights_of(op), strict=True)
            product = torch.cat([part @ w.detach().double().t() for part, w in parts])
            torch.testing.assert_close(y.double(), product, rtol=1e-5, atol=1e-5)
    assert other.weight0 is one.weight0
    assert places[2:] == [places[2]] * 3


def test_two_ops_that_share_a_weight_take_it_from_each_other_once() -> None:
    one, other = grouped(bias=False), grouped(bias=False)
    other.weight0 = one.weight0
    places = []
    for turn in range(6):
        for op in (one, other):
            step(op, turn)
        places.append([w.data_ptr() for op in (one, other) for w in weights_of(op)])
    assert places[2:] == [places[2]] * 4
    assert are_one_buffer(one) or are_one_buffer(other)


def test_a_chain_of_experts_is_joined_too() -> None:
    """Under a recipe too, and in a fusion, whose weights are those of two ops."""

    def chain() -> fuser.Sequential:
        torch.manual_seed(1)
        return fuser.Sequential(
            fuser.GroupedLinear(G, K, 2 * N, bias=False, device="cpu"),
            fuser.ScaledSwiGLU(),
            fuser.GroupedLinear(G, N, K, bias=False, device="cpu"),
        )

    for recipe in (None, fuser.recipe.MXFP8BlockScaling()):
        model, twin = chain(), copy.deepcopy(chain())
        x, scales = torch.randn(T, K), torch.rand(T)
        sizes = torch.tensor(SIZES)
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            results = [m(x, sizes, scales, sizes) for m in (model, twin)]
        assert torch.equal(*results)
        for op in (twin[0], twin[2]):
            assert are_one_buffer(op)
