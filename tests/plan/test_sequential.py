"""Sequential: torch's container behaviour, extra tensors, op_kwargs, channels, plans, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import (
    Draw,
    assert_no_worse_than_torch,
    leaf,
    params_of,
    random_tensor,
    randomize,
    run_formula,
    run_module,
)
from said import holds, said

import fuser
from fuser.runtime.pipeline import OperationFuser

N = 6
FP32 = torch.float32
DRAWS = range(8)


def tensor(seed: int = 1, grad: bool = False, rows: int = 4) -> torch.Tensor:
    return random_tensor((rows, N), FP32, seed).requires_grad_(grad)


def whole() -> torch.Tensor:
    """Small whole numbers, whose products with small factors are exact."""
    return torch.arange(-12.0, 12.0).view(4, N)


def scale(factor: float) -> fuser.ConstantScale:
    return fuser.ConstantScale(factor)


def mlp() -> fuser.Sequential:
    model = fuser.Sequential(
        fuser.RMSNorm(N), fuser.Linear(N, 16), fuser.SwiGLU(), fuser.Linear(8, N)
    )
    randomize(model)
    return model


# -- the container -----------------------------------------------------------------


@pytest.fixture
def ops() -> list[fuser.BasicOperation]:
    return [scale(float(k)) for k in range(2, 6)]


def test_index_slice_iteration_and_length_are_torchs(ops: list[Any]) -> None:
    model = fuser.Sequential(*ops)
    assert isinstance(model, torch.nn.Sequential)
    assert len(model) == 4
    assert list(model) == ops
    assert [model[i] for i in range(-4, 4)] == [*ops, *ops]
    assert model["2"] is ops[2]
    assert list(model.children()) == ops
    for part in (slice(1, 3), slice(None, None, 2), slice(-1, None), slice(0, 0)):
        assert list(model[part]) == ops[part]
        assert type(model[part]) is fuser.Sequential
    for index in (4, -5):
        with pytest.raises(IndexError):
            model[index]
    with pytest.raises(KeyError):
        model["4"]


def test_a_slice_keeps_the_names_and_the_fusions_in_force(ops: list[Any]) -> None:
    model = fuser.Sequential(*ops, fusions=())
    assert list(model[1:3]._modules) == ["1", "2"]
    assert model[1:3].fusions == ()
    assert (model + fuser.Sequential()).fusions == ()
    assert fuser.Sequential().fusions == fuser.FUSIONS


@pytest.mark.parametrize("kind", [OrderedDict, dict])
def test_a_dict_names_the_modules(kind: Callable[..., Any], ops: list[Any]) -> None:
    model = fuser.Sequential(kind([("first", ops[0]), ("second", ops[1])]))
    assert model.first is ops[0] is model["first"] is model[0]
    assert dict(model.named_children()) == {"first": ops[0], "second": ops[1]}
    assert torch.equal(model(tensor()), 6 * tensor())


EDITS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[list[Any], Any], list[Any]]]] = {
    "append": (lambda m, op: m.append(op), lambda ops, op: [*ops, op]),
    "extend": (lambda m, op: m.extend([op, op]), lambda ops, op: [*ops, op, op]),
    "extend-sequential": (
        lambda m, op: m.extend(fuser.Sequential(op)),
        lambda ops, op: [*ops, op],
    ),
    "insert": (lambda m, op: m.insert(1, op), lambda ops, op: [ops[0], op, *ops[1:]]),
    "insert-first": (lambda m, op: m.insert(0, op), lambda ops, op: [op, *ops]),
    "pop": (lambda m, op: m.pop(1), lambda ops, op: [ops[0], *ops[2:]]),
    "pop-last": (lambda m, op: m.pop(-1), lambda ops, op: ops[:-1]),
    "set": (lambda m, op: m.__setitem__(2, op), lambda ops, op: [*ops[:2], op, ops[3]]),
    "set-negative": (lambda m, op: m.__setitem__(-1, op), lambda ops, op: [*ops[:3], op]),
    "set-by-name": (lambda m, op: setattr(m, "0", op), lambda ops, op: [op, *ops[1:]]),
    "delete": (lambda m, op: m.__delitem__(0), lambda ops, op: ops[1:]),
    "delete-slice": (
        lambda m, op: m.__delitem__(slice(1, 3)),
        lambda ops, op: [ops[0], ops[3]],
    ),
    "iadd": (lambda m, op: m.__iadd__(fuser.Sequential(op)), lambda ops, op: [*ops, op]),
    "register": (lambda m, op: m.add_module("tail", op), lambda ops, op: [*ops, op]),
    "swap": (
        lambda m, op: m.__setitem__(0, m[1]) or m.__setitem__(1, op),
        lambda ops, op: [ops[1], op, *ops[2:]],
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_takes_effect_before_and_after_the_first_call(edit: str) -> None:
    change, expected = EDITS[edit]
    for called in (False, True):
        ops, new = [scale(float(k)) for k in range(2, 6)], scale(0.5)
        model, x = fuser.Sequential(*ops), whole()
        if called:
            assert torch.equal(model(x), 120 * x)
        change(model, new)
        wanted = expected(ops, new)
        assert list(model) == wanted
        factor = 1.0
        for op in wanted:
            factor *= op.scale
        assert torch.equal(model(x), factor * x)
        assert len(model.plan(x).ops) == len(wanted)


def test_iadd_edits_in_place_and_add_makes_a_new_container(ops: list[Any]) -> None:
    model = kept = fuser.Sequential(*ops[:2])
    model += fuser.Sequential(ops[2])
    assert model is kept
    assert list(model) == ops[:3]
    longer = model + fuser.Sequential(ops[3])
    assert list(longer) == ops
    assert list(model) == ops[:3]
    assert type(longer) is fuser.Sequential
    x = whole()
    assert torch.equal(longer(x), 120 * x)
    assert torch.equal(model(x), 24 * x)


def test_an_empty_container_is_the_identity_and_has_nothing_to_plan() -> None:
    model, x = fuser.Sequential(), tensor()
    assert model(x) is x
    with pytest.raises(ValueError, match=said("segments-holds-no-fusible")):
        model.plan(x)
    assert model.plans == ()


def test_an_edit_that_changes_fusion_replans() -> None:
    model = fuser.Sequential(fuser.Linear(N, N))
    x = tensor(grad=True)
    assert model.plan(x).forward[0].ops == (0, 1)
    model.append(fuser.GELU())
    assert model.plan(x).forward[0].ops == (0, 1, 2)
    model.insert(1, scale(1.0))
    assert model.plan(x).forward[0].ops == (0, 1)


# -- plain modules in between ------------------------------------------------------


def test_plain_modules_run_between_pipelines_with_right_gradients() -> None:
    model = fuser.Sequential(
        torch.nn.Tanh(),
        fuser.Linear(N, 8),
        fuser.GELU(),
        torch.nn.Softplus(),
        torch.nn.Linear(8, 8),
        fuser.LayerNorm(8),
        fuser.Linear(8, N, bias=False),
        torch.nn.Sigmoid(),
    )
    randomize(model)
    functional = torch.nn.functional

    def formula(
        x: torch.Tensor, w1: Any, b1: Any, w2: Any, b2: Any, g: Any, b: Any, w3: Any
    ) -> Any:
        x = functional.gelu(torch.tanh(x) @ w1.T + b1, approximate="tanh")
        x = functional.softplus(x) @ w2.T + b2
        return torch.sigmoid(functional.layer_norm(x, (8,), g, b) @ w3.T)

    draws = []
    for seed in DRAWS:
        x = tensor(seed)
        tensors = {"x": x, **params_of(model)}
        plain, exact = (run_formula(formula, tensors, d) for d in (FP32, torch.float64))
        draws.append(Draw(run_module(model, leaf(x)), plain, exact))
    assert_no_worse_than_torch(*draws)
    assert len(model.plans) == 2


def test_a_nested_sequential_runs_as_a_module_of_its_own() -> None:
    inner = fuser.Sequential(fuser.Linear(N, N), fuser.GELU())
    model = fuser.Sequential(scale(2.0), inner, scale(3.0))
    randomize(model)
    flat = fuser.Sequential(scale(2.0), *inner, scale(3.0))
    x = tensor()
    expected, actual = run_module(flat, leaf(x)), run_module(model, leaf(x))
    renamed = {
        name.replace("gradient of 1.", "gradient of 1.0."): t for name, t in expected.items()
    }
    assert set(actual) == set(renamed)
    assert all(torch.equal(actual[name], renamed[name]) for name in actual)


def test_a_mixed_models_plan_counts_the_ops_of_every_pipeline() -> None:
    model = fuser.Sequential(
        fuser.Linear(N, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), fuser.Linear(4, N), fuser.GELU()
    )
    x = tensor(grad=True)
    plan = model.plan(x)
    assert plan.ops == ("BasicLinear", "Bias", "BasicLinear", "Bias", "GELU")
    assert [step.ops for step in plan.forward] == [(0, 1), (2, 3, 4)]
    assert sorted(i for step in plan.backward for i in step.ops) == list(range(5))
    assert plan.backward[0].ops[-1] == 4
    model(x)
    assert [part.ops for part in model.plans] == [plan.ops[:2], plan.ops[2:]]


def test_planning_a_mixed_model_runs_nothing_and_needs_no_data() -> None:
    class Loud(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(N))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.is_meta
            self.calls.add_(1)
            return x * self.weight

    model = fuser.Sequential(fuser.Linear(N, N), Loud(), fuser.Bias(N))
    for x in (tensor(grad=True), torch.empty(4, N, device="meta")):
        plan = model.plan(x)
        assert plan.ops == ("BasicLinear", "Bias", "Bias")
        assert plan.key.requires_grad
        assert model.plan(x, training=False).backward == ()
    assert float(model[1].calls) == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_nested_model_can_be_planned() -> None:
    inner = fuser.Sequential(fuser.Linear(N, 8), fuser.GELU())
    model = fuser.Sequential(inner, fuser.Linear(8, N))
    x = tensor()
    assert model.plan(x).ops == ("BasicLinear", "Bias")
    randomize(model)
    assert torch.equal(model(x), model[1](inner(x)))


# -- extra inputs and outputs ------------------------------------------------------


def test_extra_inputs_are_handed_out_in_op_order_across_pipelines() -> None:
    model = fuser.Sequential(
        fuser.AddExtraInput(),
        scale(10.0),
        fuser.AddExtraInput(),
        torch.nn.Identity(),
        scale(10.0),
        fuser.AddExtraInput(),
    )
    x, first, second, third = (leaf(torch.full((2, 2), float(k))) for k in (1, 2, 3, 4))
    y = model(x, first, second, third)
    assert torch.equal(y, torch.full((2, 2), ((1 + 2) * 10 + 3) * 10.0 + 4))
    y.sum().backward()
    assert [float(t.grad[0, 0]) for t in (x, first, second, third)] == [100, 100, 10, 1]


def test_extra_outputs_follow_the_main_output_in_op_order_across_pipelines() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput(),
        scale(2.0),
        fuser.MakeExtraOutput(),
        torch.nn.Identity(),
        scale(3.0),
        fuser.MakeExtraOutput(),
    )
    x = leaf(torch.ones(2, 2))
    outputs = model(x)
    assert isinstance(outputs, tuple)
    assert [float(t.detach()[0, 0]) for t in outputs] == [6, 1, 2, 6]
    sum((k + 1) * t.sum() for k, t in enumerate(outputs)).backward()
    assert torch.equal(x.grad, torch.full((2, 2), 1.0 * 6 + 2 * 1 + 3 * 2 + 4 * 6))


@pytest.mark.parametrize("mixed", [False, True], ids=["one-pipeline", "mixed"])
@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_wrong_number_of_extra_inputs_names_the_ops_that_want_them(
    given: int, mixed: bool
) -> None:
    between = [torch.nn.Identity()] if mixed else []
    model = fuser.Sequential(fuser.AddExtraInput(), *between, scale(2.0), fuser.ScaledSReLU())
    x, extras = tensor(), [tensor(), tensor()[:, 0]]
    wanted = "2 extra inputs (for op 0, AddExtraInput; for op 2, ScaledSReLU)"
    for call in (model, model.plan):
        with pytest.raises(ValueError, match=said("segments-takes", "Sequential", wanted, given)):
            call(x, *([tensor()] * given))
    assert model(x, *extras).shape == x.shape


def test_a_channels_extra_input_is_not_counted_among_those_wanted() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        fuser.AddExtraInput(),
        fuser.AddExtraInput().set_extra_input_channel(0, "r"),
        torch.nn.Identity(),
    )
    x = tensor()
    with pytest.raises(
        ValueError, match=said("segments-takes", None, "1 extra input (for op 1, AddExtraInput)", 2)
    ):
        model(x, x, x)
    assert torch.equal(model(x, x), x + x + x)


def test_an_output_before_the_first_gradient_collects_none() -> None:
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.Linear(N, N))
    y, made = model(tensor())
    assert y.requires_grad
    assert not made.requires_grad


# -- op_kwargs ---------------------------------------------------------------------


class Recording(fuser.BasicOperation):
    """The identity; keeps the keyword arguments of every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        self.seen.append(kwargs)
        return input_.clone()

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


class Composite(fuser.FusedOperation):
    """Two recording ops behind one name."""

    def __init__(self) -> None:
        super().__init__([Recording(), Recording()])


def test_op_kwargs_reach_the_op_named_by_index_or_by_itself() -> None:
    a, b, c = Recording(), Recording(), Recording()
    model = fuser.Sequential(a, scale(2.0), b, torch.nn.Identity(), c)
    x = tensor()
    model(x, op_kwargs={0: {"flag": 1}, b: {"flag": 2, "other": 3}, -1: {"flag": 4}})
    model(x, op_kwargs={})
    model(x)
    assert a.seen == [{"flag": 1}, {}, {}]
    assert b.seen == [{"flag": 2, "other": 3}, {}, {}]
    assert c.seen == [{"flag": 4}, {}, {}]


def test_op_kwargs_reach_the_op_under_autograd_too() -> None:
    op = Recording()
    fuser.Sequential(fuser.Linear(N, N), op)(tensor(), op_kwargs={1: {"flag": True}})
    assert op.seen == [{"flag": True}]


def test_op_kwargs_of_a_composite_go_to_its_first_basic_op_or_the_one_named() -> None:
    pair = Composite()
    model = fuser.Sequential(scale(1.0), pair)
    first, second = pair.basic_ops
    model(tensor(), op_kwargs={1: {"to": "first"}})
    model(tensor(), op_kwargs={pair: {"to": "pair"}})
    model(tensor(), op_kwargs={second: {"to": "second"}})
    assert first.seen == [{"to": "first"}, {"to": "pair"}, {}]
    assert second.seen == [{}, {}, {"to": "second"}]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (3, "3"),
        (-4, "-4"),
        ("0", "'0'|str"),
        (None, "None"),
        (1.0, "float|1.0"),
        (1, "1"),
        (fuser.GELU(), "GELU"),
    ],
    ids=["past-the-end", "before-the-start", "text", "none", "float", "plain-module", "stranger"],
)
def test_an_unknown_target_of_op_kwargs_is_a_sentence(target: Any, said: str) -> None:
    op = Recording()
    model, x = fuser.Sequential(op, torch.nn.Identity(), scale(2.0)), tensor()
    with pytest.raises(ValueError, match=f"op_kwargs.*({said}).*0 Recording.*2 ConstantScale"):
        model(x, op_kwargs={target: {"flag": 1}})
    assert op.seen == []
    assert torch.equal(model(x), 2 * x)


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_keyword_that_its_op_does_not_take_is_refused_fused_or_not(
    target: int, fusions: Any
) -> None:
    model = fuser.Sequential(fuser.BasicLinear(N, N), fuser.Bias(N), fuser.GELU(), fusions=fusions)
    model(tensor())
    with pytest.raises(
        (TypeError, ValueError), match=said("checks-no-keyword-argument", None, holds("colour"))
    ):
        model(tensor(), op_kwargs={target: {"colour": "red"}})


@pytest.mark.parametrize("key", [1, None, b"flag", ("flag",)], ids=repr)
@pytest.mark.parametrize("op", [Recording, fuser.GELU, fuser.Bias], ids=lambda op: op.__name__)
def test_a_keyword_that_is_no_text_is_refused_by_an_op_that_takes_any_and_by_others(
    op: Any, key: Any
) -> None:
    model = fuser.Sequential(op(N) if op is fuser.Bias else op())
    with pytest.raises(
        fuser.errors.InputTypeError, match=said("checks-no-keyword-argument", None, repr(key))
    ):
        model(tensor(), op_kwargs={0: {key: 1}})


# -- channels ----------------------------------------------------------------------


def test_channel_setters_return_their_op() -> None:
    make, add = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    assert make.set_extra_output_channel(0, "r") is make
    assert add.set_extra_input_channel(0, "r") is add


def residual_block(
    output_to_caller: bool, readers: int = 1, fusions: Any = fuser.FUSIONS
) -> fuser.Sequential:
    """``h = x; x = norm(x); x = linear(x) + h`` with the last two repeated by ``readers``."""
    layers = [
        op
        for _ in range(readers)
        for op in (
            fuser.Linear(N, N, bias=False),
            fuser.AddExtraInput().set_extra_input_channel(0, "h"),
        )
    ]
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "h", output_to_caller=output_to_caller),
        fuser.RMSNorm(N),
        *layers,
        fusions=fusions,
    )
    randomize(model)
    return model


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("output_to_caller", [True, False])
def test_a_channel_carries_the_value_and_fan_out_sums_the_gradients(
    output_to_caller: bool, readers: int, fusions: Any
) -> None:
    model = residual_block(output_to_caller, readers, fusions)

    def formula(x: torch.Tensor, gamma: torch.Tensor, *weights: torch.Tensor) -> Any:
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gamma
        for weight in weights:
            y = y @ weight.T + x
        return (y, x.clone()) if output_to_caller else y

    draws = []
    for seed in DRAWS:
        x = tensor(seed)
        tensors = {"x": x, **params_of(model)}
        plain, exact = (run_formula(formula, tensors, d) for d in (FP32, torch.float64))
        draws.append(Draw(run_module(model, leaf(x)), plain, exact))
    assert_no_worse_than_torch(*draws)


def test_channels_take_no_extra_input_from_the_caller_and_stand_in_the_plan() -> None:
    model = residual_block(output_to_caller=False)
    plan = model.plan(tensor(grad=True))
    (channel,) = plan.channels
    assert (channel.name, channel.producer, channel.consumer) == ("h", 0, 3)
    assert "channel 'h': op 0 to op 3" in str(plan)
    with pytest.raises(ValueError, match=said("checks-pipeline", "0 extra inputs", 1)):
        model(tensor(), tensor())


def test_a_channel_without_readers_is_a_plain_extra_output() -> None:
    x = tensor()
    kept = fuser.Sequential(fuser.MakeExtraOutput().set_extra_output_channel(0, "r"), scale(2.0))
    y, made = kept(x)
    assert torch.equal(y, 2 * x)
    assert torch.equal(made, x)
    hidden = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        scale(2.0),
    )
    x = leaf(x)
    hidden(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_channels_and_the_callers_extra_inputs_mix_in_op_order() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=False),
        fuser.AddExtraInput(),
        scale(10.0),
        fuser.AddExtraInput().set_extra_input_channel(0, "a"),
        fuser.AddExtraInput(),
    )
    x, first, second = (leaf(torch.full((2, 2), float(k))) for k in (1, 2, 3))
    y = model(x, first, second)
    assert torch.equal(y, torch.full((2, 2), (1 + 2) * 10.0 + 1 + 3))
    y.sum().backward()
    assert [float(t.grad[0, 0]) for t in (x, first, second)] == [11, 10, 1]


def test_two_channels_cross() -> None:
    def make(name: str) -> Any:
        return fuser.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False)

    def add(name: str) -> Any:
        return fuser.AddExtraInput().set_extra_input_channel(0, name)

    model = fuser.Sequential(
        make("a"), scale(2.0), make("b"), scale(5.0), add("a"), scale(3.0), add("b")
    )
    x = leaf(torch.ones(2, 2))
    y = model(x)
    assert torch.equal(y, torch.full((2, 2), (2 * 5 + 1) * 3.0 + 2))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 35.0))


def _make(name: str = "r") -> fuser.BasicOperation:
    return fuser.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False)


def _add(name: str = "r") -> fuser.BasicOperation:
    return fuser.AddExtraInput().set_extra_input_channel(0, name)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: [_make(), scale(1.0), _make(), _add()],
            ["two producers", "op 0 (MakeExtraOutput)", "op 2 (MakeExtraOutput)"],
        ),
        (lambda: [scale(1.0), _add()], ["no producer", "op 1 (AddExtraInput)"]),
        (lambda: [_make("other"), _add()], ["no producer", "op 1 (AddExtraInput)"]),
        (
            lambda: [_add(), _make()],
            ["before", "op 0 (AddExtraInput)", "op 1 (MakeExtraOutput)"],
        ),
    ],
    ids=["two-producers", "no-producer", "another-name", "consumer-first"],
)
def test_a_channel_that_cannot_be_routed_is_named_with_its_ops(make: Any, said: list[str]) -> None:
    model = fuser.Sequential(*make())
    x = tensor()
    for call in (model, model.plan, model):
        with pytest.raises(ValueError, match="'r'") as error:
            call(x)
        for part in said:
            assert part in str(error.value)


def test_after_a_refused_channel_the_op_can_be_bound_and_the_model_runs() -> None:
    make, add = fuser.MakeExtraOutput(), _add()
    model, x = fuser.Sequential(make, scale(2.0), add), tensor()
    with pytest.raises(ValueError, match=said("graph-no-reads-bind")):
        model(x)
    make.set_extra_output_channel(0, "r", output_to_caller=False)
    assert torch.equal(model(x), 3 * x)


@pytest.mark.parametrize("index", [1, -1, 7])
def test_a_channel_needs_an_existing_extra_tensor(index: int) -> None:
    for bind, name, count in (
        (fuser.MakeExtraOutput().set_extra_output_channel, "MakeExtraOutput", 1),
        (fuser.AddExtraInput().set_extra_input_channel, "AddExtraInput", 1),
        (fuser.GELU().set_extra_input_channel, "GELU", 0),
    ):
        words = said("channels-asks-count-0", "'r'", holds(f" {index}"), name, count)
        with pytest.raises(ValueError, match=words):
            bind(index, "r")


def test_rebinding_a_channel_after_a_pipeline_captured_the_op_is_refused() -> None:
    make, add = _make(), _add()
    model, x = fuser.Sequential(make, scale(2.0), add), tensor()
    make.set_extra_output_channel(0, "s", output_to_caller=False)
    add.set_extra_input_channel(0, "s")
    assert torch.equal(model(x), 3 * x)
    with pytest.raises(
        RuntimeError, match=said("channels-cannot-bound-pipeline", "'t'", "MakeExtraOutput")
    ):
        make.set_extra_output_channel(0, "t")
    with pytest.raises(
        RuntimeError, match=said("channels-cannot-bound-pipeline", "'t'", "AddExtraInput")
    ):
        add.set_extra_input_channel(0, "t")
    assert torch.equal(model(x), 3 * x)


def test_a_copy_of_a_captured_op_may_be_bound_again() -> None:
    model, x = fuser.Sequential(_make(), scale(2.0), _add()), tensor()
    model(x)
    twin = copy.deepcopy(model)
    twin[0].set_extra_output_channel(0, "s", output_to_caller=True)
    twin[2].set_extra_input_channel(0, "s")
    y, made = twin(x)
    assert torch.equal(y, 3 * x)
    assert torch.equal(made, x)
    assert torch.equal(model(x), 3 * x)


# -- plans and their cache ---------------------------------------------------------


def test_a_plan_is_made_once_for_each_way_of_calling_and_never_again() -> None:
    pipeline = OperationFuser([fuser.Linear(N, N), fuser.GELU()])
    x = tensor()

    def no_grad() -> None:
        with torch.no_grad():
            pipeline(x)

    def no_grad_of_a_leaf() -> None:
        with torch.no_grad():
            pipeline(leaf(x))

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            pipeline(x)

    def inference() -> None:
        with torch.inference_mode():
            pipeline(x)

    ways = [
        lambda: pipeline.plan(x),
        lambda: pipeline(x),
        lambda: pipeline(leaf(x)),
        no_grad,
        no_grad_of_a_leaf,
        inference,
        lambda: pipeline.plan(x, training=False),
        autocast,
    ]
    counts = []
    for way in [*ways, *ways, *ways[::-1]]:
        way()
        counts.append(pipeline.planned_count)
    # A plan made ahead is the one that runs, and inference_mode wants what no_grad does.
    assert counts == [1, 1, 2, 3, 3, 3, 3, 4] + [4] * 16
    assert len(pipeline.plans) == len(set(pipeline.plans)) == 4


def test_shapes_do_not_enter_the_plans_key() -> None:
    pipeline = OperationFuser([fuser.Linear(N, N), fuser.GELU()])
    for leading in ((4,), (1,), (0,), (2, 3), ()):
        pipeline(torch.zeros(*leading, N))
    assert pipeline.planned_count == 1


def test_freezing_a_parameter_plans_anew_and_thawing_finds_the_old_plan() -> None:
    model, x = mlp(), tensor(grad=True)
    model(x)
    model[1].weight.requires_grad_(False)
    model(x)
    assert len(model.plans) == 2
    model[1].weight.requires_grad_(True)
    model(x)
    assert len(model.plans) == 2


def test_planning_ahead_is_the_plan_that_runs() -> None:
    model, x = mlp(), tensor(grad=True)
    plans = [model.plan(x), model.plan(x, training=False)]
    model(x)
    with torch.no_grad():
        model(x)
    assert list(model.plans) == plans


def test_a_meta_tensor_plans_for_the_device_of_the_parameters() -> None:
    model = mlp()
    meta = torch.empty(1_000_000, N, device="meta")
    plan = model.plan(meta)
    assert plan.key.device == "cpu"
    model(tensor())
    assert model.plans == (plan,)


def test_recipes_with_equal_contents_share_a_plan_and_others_do_not() -> None:
    pipeline, x = OperationFuser([fuser.Linear(N, N)]), tensor()
    recipes = [
        fuser.recipe.Float8CurrentScaling(),
        fuser.recipe.Float8CurrentScaling(),
        fuser.recipe.Float8CurrentScaling(use_power_2_scales=True),
        fuser.recipe.Float8CurrentScaling(backward_override="high_precision"),
    ]
    counts = []
    for recipe in [*recipes, *recipes]:
        with fuser.autocast(recipe=recipe):
            pipeline(x)
        counts.append(pipeline.planned_count)
    assert counts == [1, 1, 2, 3, 3, 3, 3, 3]


def test_a_single_op_is_planned_once_and_cached() -> None:
    for op in (fuser.Linear(N, N), fuser.GELU()):
        op(tensor())
        runner = op._runner
        op(tensor())
        assert op._runner is runner
        is_composite = isinstance(op, fuser.FusedOperation)
        (pipeline,) = runner.pipelines() if is_composite else [op._own_pipeline()]
        assert pipeline.planned_count == 1


# -- copies ------------------------------------------------------------------------


def through_pickle(model: torch.nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_is_independent_and_plans_anew(copied: Any, called: bool) -> None:
    model, x = mlp(), tensor()
    model.append(fuser.MakeExtraOutput()).append(fuser.GELU())
    if called:
        run_module(model, leaf(x))
    twin = copied(model)
    assert type(twin) is fuser.Sequential
    assert twin.fusions == model.fusions
    assert twin.plans == ()
    expected = run_module(model, leaf(x))
    actual = run_module(twin, leaf(x))
    assert set(actual) == set(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert len(twin.plans) == 1
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert all(ours[name] is not theirs[name] for name in ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(torch.equal(expected[f"output {k}"], y) for k, y in enumerate(model(x)))
    assert not twin(x)[0].any()
    assert twin[1].weight is twin[1].basic_ops[0].weight


@pytest.mark.parametrize("called", [False, True], ids=["before-a-call", "after-a-call"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_single_op_is_independent(copied: Any, called: bool) -> None:
    op, x = randomize(fuser.Linear(N, N)), tensor()
    if called:
        op(x)
    twin = copied(op)
    before = op(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(x).any()
    assert torch.equal(op(x), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_of_an_op_that_was_called_alone_may_be_bound(copied: Any) -> None:
    make, add, x = fuser.MakeExtraOutput(), fuser.AddExtraInput(), tensor()
    make(x)
    add(x, x)
    make, add = copied(make), copied(add)
    make.set_extra_output_channel(0, "s", output_to_caller=False)
    add.set_extra_input_channel(0, "s")
    assert torch.equal(fuser.Sequential(make, scale(2.0), add)(x), 3 * x)


def test_a_deepcopy_keeps_shared_parameters_shared() -> None:
    model = fuser.Sequential(fuser.Linear(N, N), fuser.Linear(N, N))
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not model[0].weight


def test_the_containers_print_names_every_op() -> None:
    text = repr(mlp())
    for part in ("RMSNorm", "Linear(6, 16)", "SwiGLU"):
        assert part in text


def test_the_print_of_a_linear_is_one_line_unless_its_ops_were_exchanged() -> None:
    assert repr(fuser.Linear(8, 4)) == "Linear(8, 4)"
    linear = fuser.Linear(8, 4, bias=False)
    assert repr(linear) == "Linear(8, 4, bias=False)"

    class Adapted(fuser.BasicLinear):
        pass

    linear.basic_ops[0].__class__ = Adapted
    assert "(0): Adapted(" in repr(linear)


def test_the_print_of_an_op_has_its_channels() -> None:
    taking, making = fuser.AddExtraInput(), fuser.MakeExtraOutput()
    assert (repr(taking), repr(making)) == ("AddExtraInput()", "MakeExtraOutput()")
    taking.set_extra_input_channel(0, "residual")
    making.set_extra_output_channel(0, "residual")
    assert repr(taking) == "AddExtraInput(channel='residual')"
    assert repr(making) == "MakeExtraOutput(channel='residual')"


def test_the_repr_of_a_plan_is_one_line() -> None:
    model, x = fuser.Sequential(fuser.Linear(8, 4), fuser.GELU()), torch.empty(2, 8)
    plan = model.plan(x)
    assert repr(plan) == (
        f"<FusionPlan of 3 ops: {len(plan.forward)} steps forward, {len(plan.backward)} steps "
        f"backward; {plan.key.describe()}>"
    )
    assert repr(model.plan(x, training=False)).count("steps") == 1
    text = repr(fuser.plan(torch.nn.Sequential(model, torch.nn.Tanh()), x))
    assert text == "<ModelPlan of Sequential: 1 pipelines, 1 other modules; [2, 8] float32>"


def test_a_hook_on_another_module_leaves_the_plans() -> None:
    model = fuser.Sequential(fuser.Linear(N, N), fuser.GELU(), torch.nn.Tanh(), fuser.GELU())
    model(tensor())
    plans = model.plans
    assert len(plans) == 2
    other = fuser.GELU()
    with other.register_forward_hook(lambda *_: None):
        model(tensor())
        assert all(one is plan for one, plan in zip(model.plans, plans, strict=True))


def test_without_a_budget_of_its_own_a_container_has_that_of_its_context() -> None:
    assert fuser.Sequential().memory_budget is None
    own = fuser.Sequential(memory_budget=0)
    assert own.memory_budget is not None
    own.memory_budget = None
    assert own.memory_budget is None
