"""Linears that read one tensor in a forward which stays the module's own: one product."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_sums import IS_TRIED
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fuser
from fuser import recipe as recipes
from fuser.conversion.modules import child_of
from fuser.conversion.shared_input import SharedProduct, shared_inputs
from fuser.runtime.joined_weights import memory_of

HIDDEN, WIDE, ROWS = 128, 256, 32
QKV = ("q_proj", "k_proj", "v_proj")
TEXT = "q_proj and k_proj and v_proj, which read one tensor, as one product"
CURRENT = recipes.Float8CurrentScaling()
BY_ROWS_OR_BLOCKS = {
    "rowwise": recipes.Float8RowwiseScaling(),
    "128-block": recipes.Float8BlockScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
}


class Projections(nn.Module):
    """Queries, keys and values of one tensor; subclasses have other forwards."""

    def __init__(self, bias: bool = False, sizes: tuple[int, ...] = (WIDE, HIDDEN, HIDDEN)) -> None:
        super().__init__()
        for name, size in zip(QKV, sizes, strict=True):
            self.add_module(name, nn.Linear(HIDDEN, size, bias=bias))

    def between(self) -> None:
        """What a subclass does between the first projection and the second."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries = self.q_proj(hidden)
        self.between()
        keys, values = self.k_proj(hidden), self.v_proj(hidden)
        return queries, keys, values


class Summed(Projections):
    """One output of the size of the input."""

    def __init__(self) -> None:
        super().__init__(sizes=(HIDDEN,) * 3)

    def forward(self, hidden: torch.Tensor) -> Any:
        queries, keys = self.q_proj(hidden), self.k_proj(hidden)
        return torch.cumsum(queries * keys.sigmoid(), 1) + self.v_proj(hidden)


class Cross(Projections):
    """Keys and values of another tensor."""

    def forward(self, hidden: torch.Tensor, encoded: torch.Tensor) -> Any:  # type: ignore[override]
        queries = self.q_proj(hidden)
        return queries, self.k_proj(encoded), self.v_proj(encoded)


class Cached(Projections):
    """Keys and values in one branch alone."""

    def forward(self, hidden: torch.Tensor, known: Any = None) -> Any:
        queries = self.q_proj(hidden)
        if known is None:
            known = self.k_proj(hidden), self.v_proj(hidden)
        return queries, *known


class Sometimes(Projections):
    def forward(self, hidden: torch.Tensor) -> Any:
        keys = self.k_proj(hidden) if self.training else hidden
        return self.q_proj(hidden), keys, next(self.v_proj(hidden) for _ in range(1))


class Changed(Projections):
    """The variable has another value before the last projection."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries, keys = self.q_proj(hidden), self.k_proj(hidden)
        hidden = hidden * 2
        return queries, keys, self.v_proj(hidden)


class Replaced(Projections):
    """The variable has another tensor before the last projection."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries, keys = self.q_proj(hidden), self.k_proj(hidden)
        hidden = torch.zeros(2, ROWS, HIDDEN)
        return queries, keys, self.v_proj(hidden)


class InPlace(Projections):
    """The variable has other values before the last projection."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries, keys = self.q_proj(hidden), self.k_proj(hidden)
        hidden.mul_(2)
        return queries, keys, self.v_proj(hidden)


class Twice(Projections):
    """A linear that is called a second time has no part left."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden), self.v_proj(hidden)


class Handing(Projections):
    """Hands the input on between two projections."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries = self.q_proj(hidden)
        self.keep(hidden)
        return queries, self.k_proj(hidden), self.v_proj(hidden)

    def keep(self, x: torch.Tensor) -> None:
        """What may write to it."""


class Aliased(Projections):
    """Another variable has the memory of the input."""

    def forward(self, hidden: torch.Tensor) -> Any:
        shape = hidden.shape[:-1]
        rows = hidden.flatten(0, 1)
        rows = rows[1:]
        queries = self.q_proj(hidden).view(*shape, -1)
        keys = self.k_proj(hidden).view(*shape, -1)
        torch.square(rows)
        return queries, keys, self.v_proj(hidden)


class Early(Projections):
    """A forward that may end before the last projections."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries = self.q_proj(hidden)
        if hidden.numel() == 0:
            return queries
        return queries, self.k_proj(hidden), self.v_proj(hidden)


class Indexed(Projections):
    def forward(self, hidden: torch.Tensor) -> Any:
        queries, other = self.q_proj(hidden), torch.zeros(3)
        other[0] = 1
        return queries, self.k_proj(hidden), self.v_proj(hidden)


class Into(Projections):
    def forward(self, hidden: torch.Tensor) -> Any:
        queries, other = self.q_proj(hidden), torch.zeros(3)
        torch.add(other, 1, out=other)
        return queries, self.k_proj(hidden), self.v_proj(hidden)


class Writing(Projections):
    """Writes to the input where no text tells it."""

    other: torch.Tensor

    def between(self) -> None:
        self.other.mul_(2)


class Keeping(Projections):
    """Sets an attribute in each forward, as attentions do that keep their scores."""

    def between(self) -> None:
        self.last = torch.zeros(3)


class Model(nn.Module):
    """A module between two linears, which a conversion keeps unquantized."""

    def __init__(self, make: Callable[[], nn.Module] = Projections) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.inner = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.isnan().any():
            return x
        outputs = self.inner(x * 1)
        y: torch.Tensor = self.last(x + sum(part.reshape(-1, HIDDEN).mean() for part in outputs))
        return y


def _input(*, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS, HIDDEN, generator=generator).requires_grad_(requires_grad)


def _step(module: nn.Module, *others: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of a module, and the gradients of its input and its parameters."""
    first = next(module.parameters())
    x = _input().to(first.device, first.dtype).requires_grad_()
    module.zero_grad()
    outputs = module(x * 1, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((part * part.detach().cos()).sum() for part in outputs).backward()
    grads = [x.grad, *(p.grad for p in module.parameters())]
    return [t.detach() for t in (*outputs, *grads) if t is not None]


def _assert_close(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def _converted(model: nn.Module, **options: Any) -> nn.Module:
    fuser.convert(model, **{"linears": "all", "keep": (), **options})
    return model


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of the linears of each product that is shared, as they are computed."""
    computed: list[tuple[str, ...]] = []
    plain = SharedProduct.output_of

    def output_of(self: SharedProduct, name: str, *call: Any) -> torch.Tensor | None:
        output = plain(self, name, *call)
        if output is not None and name == self.names[0]:
            computed.append(self.names)
        return output

    monkeypatch.setattr(SharedProduct, "output_of", output_of)
    return computed


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_has_the_values_and_gradients_of_three(
    bias: bool, products: list[tuple[str, ...]]
) -> None:
    module = Projections(bias, (WIDE, HIDDEN, HIDDEN + 32))
    expected = _step(copy.deepcopy(module).double())
    keys, objects = list(module.state_dict()), list(module.parameters())
    report = fuser.convert(module, linears="all", keep=())
    assert [(row.path, row.text) for row in report.converted] == [("", TEXT)]
    assert report.left == report.refused == ()
    _assert_close(_step(module), expected)
    assert products == [QKV]
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), objects, strict=True))
    assert memory_of([child_of(module, name).weight for name in QKV]) is not None


@pytest.mark.parametrize("name", BY_ROWS_OR_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_by_rows_or_blocks_give_the_outputs_of_three_products(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"recipe": BY_ROWS_OR_BLOCKS[name]}
    module = Model().to(dtype)
    together = _converted(copy.deepcopy(module), **options)
    monkeypatch.setattr(sys.modules["fuser.conversion.convert"], "shared_inputs", lambda *_: [])
    alone = _converted(module, **options)
    x = _input().to(dtype)
    for one, other in zip(together.inner(x), alone.inner(x), strict=True):
        if IS_TRIED:  # sums in an order of their own
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
        else:
            assert torch.equal(one, other)


def test_one_scale_of_three_weights_quantizes_a_small_one_more_coarsely() -> None:
    module = Projections()
    with torch.no_grad():
        module.k_proj.weight.mul_(1e-6)
    x = _input()
    exact = module.k_proj(x)
    _, keys, _ = _converted(module, recipe=CURRENT)(x)
    error = (keys - exact).norm() / exact.norm()
    assert 0.5 < error <= 1  # below the smallest number of E4M3 beside weights of 1e-1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Projections, [QKV]),
        (Cross, [QKV[1:]]),
        (Cached, []),
        (Sometimes, []),
        (Changed, [QKV[:2]]),
        (Replaced, [QKV[:2]]),
        (InPlace, [QKV[:2]]),
        (Twice, [QKV[:2]]),
        (Handing, [QKV[1:]]),
        (Aliased, [QKV[:2]]),
        (Early, [QKV[1:]]),
        (Indexed, [QKV[1:]]),
        (Into, [QKV[1:]]),
        (Writing, [QKV]),
        (Keeping, [QKV]),
        (nn.Linear, []),
    ],
)
def test_linears_of_one_variable_are_read_in_the_source(kind: Any, expected: Any) -> None:
    module = nn.Linear(8, 8) if kind is nn.Linear else kind()
    assert shared_inputs(module, QKV) == expected


@pytest.mark.parametrize("kind", [Cached, Sometimes, Changed, Twice, Keeping])
def test_forwards_of_every_kind_have_their_own_values(kind: Any) -> None:
    module = kind()
    expected = _step(copy.deepcopy(module).double())
    _converted(module)
    for _ in range(4):
        _assert_close(_step(module), expected)


@pytest.mark.parametrize("kind", [InPlace, Writing])
@torch.no_grad()
def test_an_input_that_is_written_to_between_products(kind: Any) -> None:
    module, x = kind(), _input().double()
    plain = copy.deepcopy(module).double()
    plain.other = x[:]
    expected = plain(x)
    _converted(module)
    for _ in range(4):
        x = _input()
        module.other = x[:]
        _assert_close(list(module(x)), list(expected))


def test_keys_and_values_of_another_tensor(products: list[tuple[str, ...]]) -> None:
    module, encoded = Cross(), torch.randn(2, 7, HIDDEN)
    expected = _step(copy.deepcopy(module).double(), encoded.double())
    _assert_close(_step(_converted(module), encoded), expected)
    assert products == [QKV[1:]]


def test_a_forward_that_keeps_something_shares_products(products: list[tuple[str, ...]]) -> None:
    module = _converted(Keeping())
    for _ in range(3):
        _step(module)
    assert products == [QKV] * 3


def test_linears_that_differ_are_apart() -> None:
    without_bias, in_16_bits, small, kept = (Projections(True) for _ in range(4))
    without_bias.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
    small.v_proj = nn.Linear(HIDDEN, 16)
    in_16_bits.q_proj = in_16_bits.q_proj.half()

    def rows(module: nn.Module, **options: Any) -> list[str]:
        report = fuser.convert(module, **{"linears": "all", "keep": (), **options})
        return [row.text for row in report.converted if not row.path]

    read = ", which read one tensor, as one product"
    assert rows(without_bias) == [f"q_proj and v_proj{read}"]
    assert rows(small) == [f"q_proj and k_proj{read}"]
    assert rows(in_16_bits) == [f"k_proj and v_proj{read}"]
    assert rows(kept, recipe=CURRENT, keep=("q_proj",)) == [f"k_proj and v_proj{read}"]
    assert rows(Projections(), filter=lambda path, module: path != "") == []
    assert rows(Projections(), filter=lambda path, module: path != "k_proj") == [
        f"q_proj and v_proj{read}"
    ]
    assert rows(Projections(), linears="none") == []


def _doubled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def test_hooks_replacements_and_pruning_leave_the_others_alone(
    products: list[tuple[str, ...]],
) -> None:
    def hooked(module: Any) -> None:
        module.k_proj.register_forward_pre_hook(_doubled)

    def replaced(module: Any) -> None:
        module.v_proj = nn.Sequential(module.v_proj, nn.Tanh())

    def pruned(module: Any) -> None:
        prune.l1_unstructured(module.q_proj, "weight", 0.5)

    def own(module: Any) -> None:
        forward = module.k_proj.forward
        module.k_proj.forward = lambda x: forward(x) + 1

    for change in (hooked, replaced, pruned, own):
        plain, module = Projections(), _converted(Projections())
        module.load_state_dict(plain.state_dict())
        change(plain)
        change(module)
        _assert_close(_step(module), [t.double() for t in _step(plain)])
    assert products == []


def test_an_adapter_around_a_linear_reads_its_own_part() -> None:
    class Adapter(nn.Module):
        """The way of LoRA."""

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.down = base, nn.Linear(HIDDEN, 4, bias=False)
            self.up = nn.Linear(4, HIDDEN, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.base_layer(x) + self.up(self.down(x))

    torch.manual_seed(3)
    plain = Projections()
    module = _converted(copy.deepcopy(plain))
    adapter = Adapter(plain.k_proj)
    module.k_proj, plain.k_proj = copy.deepcopy(adapter), adapter
    module.k_proj.base_layer.load_state_dict(plain.k_proj.base_layer.state_dict())
    _assert_close(_step(module), _step(plain.double()))


def test_frozen_linears_get_no_gradient() -> None:
    module = Projections()
    module.k_proj.weight.requires_grad_(False)
    expected = _step(copy.deepcopy(module).double())
    _converted(module)
    _assert_close(_step(module), expected)
    assert module.k_proj.weight.grad is None


@pytest.mark.parametrize("recipe", [None, CURRENT, recipes.DelayedScaling()])
def test_copies_pickles_and_conversions_share_as_the_first(
    recipe: Any, products: list[tuple[str, ...]]
) -> None:
    module = _converted(Projections(), recipe=recipe)
    x = _input()
    for _ in range(2):
        _step(module)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    with torch.no_grad():
        expected = module(x)
        products.clear()
        for other in copies:
            for one, same in zip(other(x), expected, strict=True):
                assert torch.equal(one, same)
        assert products == [QKV] * 2
        _converted(module, recipe=recipe)
        assert all(map(torch.equal, module(x), expected))
        with fuser.converted(module, recipe=recipe, linears="none"):
            module(x)
        assert products == [QKV] * 3
        assert all(map(torch.equal, module(x), expected))
        assert products == [QKV] * 4
        fuser.revert(module)
        module(x)
    assert products == [QKV] * 4
    assert type(module) is Projections


def test_a_checkpoint_shares_again(products: list[tuple[str, ...]]) -> None:
    module = Projections()
    expected = _step(copy.deepcopy(module).double())
    _converted(module)
    for is_reentrant in (False, True):
        products.clear()
        results = _step(_Checkpointed(module, is_reentrant))
        _assert_close(results, expected)
        # A recomputation that has what it needs stops in the product.
        assert products == [QKV] * (1 + is_reentrant)


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


@pytest.mark.parametrize("recipe", [None, CURRENT])
@pytest.mark.parametrize("kind", [Projections, Changed, Cross])
def test_a_compiled_forward_is_one_graph(recipe: Any, kind: Any) -> None:
    module = _converted(kind(), recipe=recipe)
    others = [torch.randn(2, 7, HIDDEN)] if kind is Cross else []
    expected = _step(module, *others)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = _step(compiled, *others)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _selective() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        is_kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("recipe", [None, CURRENT, recipes.DelayedScaling()], ids=str)
@pytest.mark.parametrize("contexts", [None, _selective], ids=["whole", "selective"])
def test_a_checkpoint_in_a_compiled_graph_shares(recipe: Any, contexts: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Summed(), Summed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            options = {} if contexts is None else {"context_fn": contexts}
            y: torch.Tensor = self.first(x)  # not all of them in checkpoints
            z: torch.Tensor = checkpoint(self.second, y, use_reentrant=False, **options)
            return z

    torch.manual_seed(0)
    module = Model()
    report = fuser.convert(module, recipe=recipe, linears="all", keep=())
    assert [row.text.count("as one product") for row in report.converted] == [1, 1]
    expected = _step(copy.deepcopy(module))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for one, other in zip(_step(compiled), expected, strict=True):
        assert torch.equal(one, other)


def test_a_linear_that_is_called_from_outside_computes_its_own(
    products: list[tuple[str, ...]],
) -> None:
    module = _converted(Projections())
    x = _input()
    expected = module(x)
    products.clear()
    for name, part in zip(QKV, expected, strict=True):
        torch.testing.assert_close(module.get_submodule(name)(x), part)
    assert products == []


def test_nothing_is_held_after_a_forward_also_if_it_fails() -> None:
    class Failing(Projections):
        def between(self) -> None:
            raise ArithmeticError("between")

    for kind in (Projections, Failing):
        module = _converted(kind())
        x = _input()
        reference = weakref.ref(x)
        try:
            with torch.no_grad():
                module(x)
        except ArithmeticError:
            assert kind is Failing
        del x
        gc.collect()
        assert reference() is None


def test_outputs_are_contiguous_and_may_be_written() -> None:
    class InPlaceAfter(Projections):
        def forward(self, hidden: torch.Tensor) -> Any:
            queries, keys = self.q_proj(hidden), self.k_proj(hidden)
            queries.mul_(0.5)
            return queries.view(-1, 8), keys.view(-1, 8), self.v_proj(hidden).view(-1, 8)

    module = InPlaceAfter()
    expected = _step(copy.deepcopy(module).double())
    _assert_close(_step(_converted(module)), expected)


def test_modes_that_change_between_projections_are_those_of_each() -> None:
    class Partly(Projections):
        def between(self) -> None:
            torch.set_grad_enabled(False)

        def forward(self, hidden: torch.Tensor) -> Any:
            queries = self.q_proj(hidden)
            self.between()
            keys = self.k_proj(hidden)
            torch.set_grad_enabled(True)
            return queries, keys, self.v_proj(hidden)

    module = _converted(Partly())
    queries, keys, values = module(_input())
    assert [t.requires_grad for t in (queries, keys, values)] == [True, False, True]


def test_threads_share_within_their_own_calls() -> None:
    module = _converted(Projections())
    inputs = [_input() + i for i in range(4)]
    with torch.no_grad():
        expected = [module(x) for x in inputs]
    failures: list[int] = []

    def call(i: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                for one, other in zip(module(inputs[i]), expected[i], strict=True):
                    if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                        failures.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_part_is_that_of_the_same_tensor_alone() -> None:
    class Asking(Projections):
        """A helper calls a linear with another tensor."""

        def between(self) -> None:
            self.keys_of_ones = self.k_proj(torch.ones(2, ROWS, HIDDEN))

    module = _converted(Asking())
    ones = module.k_proj(torch.ones(2, ROWS, HIDDEN))
    _, keys, _ = module(_input())
    torch.testing.assert_close(module.keys_of_ones, ones)
    torch.testing.assert_close(keys, module.k_proj(_input()))


def test_functions_in_a_forward_may_write_to_its_variables() -> None:
    class Inner(Projections):
        def forward(self, hidden: torch.Tensor) -> Any:
            def double() -> None:
                hidden.mul_(2)

            queries = self.q_proj(hidden)
            double()
            return queries, self.k_proj(hidden), self.v_proj(hidden)

    assert shared_inputs(Inner(), QKV) == [QKV[1:]]


def test_a_part_is_given_once() -> None:
    class Again(Projections):
        """A linear is called a second time by a helper, with the tensor of the first call."""

        def again(self, x: torch.Tensor) -> Any:
            return self.v_proj(x)

        def forward(self, hidden: torch.Tensor) -> Any:
            queries, keys, values = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
            return queries, keys, values, self.again(hidden)

    *_, values, others = _converted(Again())(_input())
    assert values.data_ptr() != others.data_ptr()
    torch.testing.assert_close(values, others)
