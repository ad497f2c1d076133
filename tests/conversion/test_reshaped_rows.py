"""Feed-forwards of rows that are reshaped before and after them, as in OPT."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convert import HIDDEN, WIDTH, pipelines_run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fuser


class FeedForward(nn.Module):
    """Rows are a matrix between ``reshape`` and ``view``."""

    def __init__(self, is_norm_first: bool = True, p: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.is_norm_first, self.p = is_norm_first, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.reshape(-1, x.size(-1))
        h = self.norm(x) if self.is_norm_first else x
        h = F.dropout(self.fc2(torch.relu(self.fc1(h))), p=self.p, training=self.training)
        y: torch.Tensor = (x + h).view(shape)
        return y if self.is_norm_first else self.norm(y)


class Unpacked(FeedForward):
    """The sizes are read one by one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, hidden = x.shape
        h = self.fc2(torch.relu(self.fc1(self.norm(x.view(batch * rows, hidden)))))
        y: torch.Tensor = h.reshape(batch, rows, -1)
        return y


class Flattened(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc2(torch.relu(self.fc1(self.norm(x.flatten(0, 1)))))
        y: torch.Tensor = h.unflatten(0, x.shape[:2])
        return y


class Added(FeedForward):
    """A sum that no chain has, written as a method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifts = x.reshape(-1).add(x.flatten())
        h: torch.Tensor = self.fc2(torch.relu(self.fc1(self.norm(x))))
        return h * shifts.view(x.shape)


class WrittenTo(FeedForward):
    """A view of the output is written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.fc2(torch.relu(self.fc1(self.norm(x.reshape(-1, HIDDEN)))))
        h.view(-1).mul_(2)
        return h


class InPlace(FeedForward):
    """An activation writes into the input, after the first linear has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        h = torch.relu(self.fc1(x))
        z = self.act(x)
        y: torch.Tensor = self.norm(self.fc2(h) + z * z)
        return y


class Augmented(FeedForward):
    """``*=`` writes into a value of which there is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.fc2(torch.relu(self.fc1(self.norm(x))))
        rows = h.view(-1)
        h *= 2
        return rows


class InPlaceInside(InPlace):
    """The module that writes is inside of one that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.LeakyReLU(0.1, inplace=True))  # type: ignore[assignment]


class InPlaceDropout(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        y: torch.Tensor = h + self.fc2(torch.relu(self.fc1(self.drop(h))))
        return y


class Strided(FeedForward):
    """Depends on the strides of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.fc2(torch.relu(self.fc1(self.norm(x))))
        return h * x.stride(0)


def made(make: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, copy.deepcopy(plain)


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(3))


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]


def assert_same(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for found, expected in zip(results(model, x), results(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("make", [FeedForward, Unpacked, Flattened, Added])
def test_reshaped_rows_have_the_values_of_the_module(make: Any) -> None:
    plain, model = made(make)
    fuser.convert(model, strict=True)
    for each in (model, pickle.loads(pickle.dumps(model))):
        assert pipelines_run(each, data(2, 3)) == 1
        for x in (data(2, 3), data(5, 1), data(3, 2).transpose(0, 1).contiguous()):
            for is_training in (True, False):
                each.train(is_training)
                plain.train(is_training)
                assert_same(each, plain, x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (FeedForward, "LayerNorm, fc1, ReLU, fc2"),
        (lambda: FeedForward(p=0), "LayerNorm, fc1, ReLU, fc2, residual"),
        (lambda: FeedForward(is_norm_first=False), "fc1, ReLU, fc2"),
    ],
    ids=["first", "without dropout", "last"],
)
def test_the_chain_is_that_between_the_reshapes(make: Any, text: str) -> None:
    plain, model = made(make)
    (row,) = fuser.convert(model).converted
    assert row.text == text
    assert_same(model, plain, data(2, 3))


def test_rows_that_have_no_such_view_raise_as_before() -> None:
    plain, model = made(Unpacked)
    fuser.convert(model)
    x = data(3, 2).transpose(0, 1)
    for each in (plain, model):
        with pytest.raises(RuntimeError, match="view"):
            each(x)


@pytest.mark.parametrize(
    "make", [WrittenTo, InPlace, InPlaceInside, InPlaceDropout, Augmented, Strided]
)
def test_a_step_that_writes_or_reads_strides_is_left(make: Any) -> None:
    plain, model = (each.eval() for each in made(make))
    assert not fuser.convert(model).converted
    with torch.no_grad():
        torch.testing.assert_close(model(data(2, 3)), plain(data(2, 3)))


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class WrittenInBetween(FeedForward):
    """A module of the user's writes into the input of a chain, after its first linear read it."""

    def __init__(self, view: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.doubling, self.view = Doubling(), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        h = torch.relu(self.fc1(y))
        z = self.doubling(self.view(y, x))
        out: torch.Tensor = self.fc2(h) + z.view(x.shape)
        return out


class Beside(WrittenInBetween):
    """It writes into another tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.fc1(x))
        out: torch.Tensor = self.fc2(h) + self.doubling(x * 1.0)
        return out


VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "itself": lambda y, x: y,
    "a view": lambda y, x: y.view(-1, HIDDEN),
    "a view of the size of another": lambda y, x: y.view(x.size(0), -1, HIDDEN),
    "an item": lambda y, x: y[:, :],
    "an item of a view": lambda y, x: y.view(1, -1, HIDDEN)[0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_chain_reads_what_a_module_that_is_called_in_it_has_not_written(view: str) -> None:
    for make, is_converted in ((WrittenInBetween, False), (Beside, True)):
        torch.manual_seed(0)
        model = make(VIEWS[view])
        plain, x = copy.deepcopy(model), torch.randn(2, 5, HIDDEN)
        rows = fuser.convert(model).rows
        assert [row.is_converted for row in rows if row.path == ""] == [is_converted]
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


class Listed(FeedForward):
    """Sizes in a slice, and a list that the caller may change."""

    def forward(self, x: Any, shifts: Any) -> Any:  # type: ignore[override]
        h = self.fc2(torch.relu(self.fc1(self.norm(x))))
        return [h, shifts[: x.size(0)] + x]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_sizes_in_slices_and_lists_are_those_of_the_call(is_compiled: bool) -> None:
    torch._dynamo.reset()
    plain, model = made(Listed)
    assert fuser.convert(model).converted
    if is_compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    listed = model(data(2), data(5))
    assert type(listed) is list
    torch.testing.assert_close(listed, plain(data(2), data(5)), rtol=1e-5, atol=2e-5)


def test_compiled_reshapes_follow_the_shape() -> None:
    torch._dynamo.reset()
    plain, model = made(lambda: FeedForward(p=0))
    fuser.convert(model)
    model.compile(backend="aot_eager", fullgraph=True)
    for x in (data(2, 3), data(4, 5), data(7)):
        assert_same(model, plain, x)


@pytest.mark.parametrize("shape", [(0, 3, HIDDEN), (2, 0, HIDDEN), (0, HIDDEN)], ids=str)
def test_a_compiled_batch_without_rows_has_gradients(shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()  # which torch fills with views that have storages of their own
    model = FeedForward().eval()
    fuser.convert(model)
    model.compile(backend="aot_eager")
    x = torch.randn(shape, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
