"""Rows of the arguments of methods of ops: of hooks that authors of ops and fusions call too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from argument_checks import (
    BF16,
    E4M3,
    FP32,
    QUANTIZED,
    TOLERANCES,
    agrees,
    fill,
    gathered,
    leaves,
    near,
    rank_0_of_2,
    refuses,
    scattered,
)
from argument_rows import Of, ignores, set_in, sets
from oracles import random_tensor
from rows_of_container_methods import Factor
from rows_of_groups import check_delayed, grouped
from rows_of_linears import check_dropout, lora
from torch.testing import assert_close

import fuser
from fuser import gemm, tensors
from fuser.communication import PlannedGroup, collectives
from fuser.functional.grouped import padded_groups
from fuser.functional.lazy import materialize
from fuser.op import OperationContext

Given = dict[str, Any]
X = random_tensor((4, 6), BF16, 1)
DY = random_tensor((4, 8), BF16, 2)
ADDED = random_tensor((4, 8), BF16, 3)
ADDED_IN_BACKWARD = random_tensor((4, 6), BF16, 4)
OFFSET = random_tensor((8,), BF16, 5)
MXFP8 = tensors.MXFP8Quantizer()
HOOK = "fuser.BasicOperation"
FUSIBLE = "fuser.FusibleOperation"
METHODS = (
    "fuser.Activation.returns_extra_output",
    "fuser.Activation.set_extra_input_channel",
    "fuser.Activation.set_extra_output_channel",
    "fuser.Bias.shard",
    "fuser.recipe.DelayedScaling.keeps_columns",
)
"""Methods of which all arguments have rows."""


# -- channels and states --------------------------------------------------------------------


@sets("fuser.Activation.set_extra_output_channel", output_to_caller=False)
def _an_extra_output_that_is_not_returned(given: Given) -> None:
    """In one pipeline, and from one to another."""
    for between in ([], [torch.nn.Identity()]):
        first = fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", **given)
        last = fuser.AddExtraInput().set_extra_input_channel(0, "residual")
        model = fuser.Sequential(first, fuser.ConstantScale(3.0), *between, last)
        for _ in range(3):
            (x,) = leaves([X.float()])
            y = model(x)
            assert type(y) is torch.Tensor
            assert_close(y, 4 * x)
            y.backward(torch.ones_like(x))
            assert_close(x.grad, torch.full_like(x, 4.0))


@sets("fuser.Activation.set_extra_output_channel", name=Of("b", instead="a"))
@sets("fuser.Activation.set_extra_input_channel", name=Of("b", instead="a"))
def _the_channel_between_two_ops(given: Given) -> None:
    """Of two channels, each side in turn has the name."""
    for is_output in (True, False):
        one, two = (given["name"], "b") if is_output else ("b", given["name"])
        first = fuser.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=False)
        second = fuser.MakeExtraOutput().set_extra_output_channel(0, one, output_to_caller=False)
        third = fuser.AddExtraInput().set_extra_input_channel(0, two)
        last = fuser.AddExtraInput().set_extra_input_channel(0, "a")
        scale = fuser.ConstantScale(3.0)
        model = fuser.Sequential(first, scale, second, third, last)
        assert_close(model(X.float()), 7 * X.float())


@sets("fuser.Activation.set_extra_input_channel", index=Of(1, instead=0))
def _the_input_that_a_channel_ends_at(given: Given) -> None:
    """A grouped linear gets its sizes from the caller, and from a channel what scales its bias."""
    op = fuser.GroupedLinear(2, 6, 8, scale_bias=True)
    fill(op)
    dispatch = fuser.MoeDispatch(2).set_extra_output_channel(1, "probs", output_to_caller=False)
    op.set_extra_input_channel(name="probs", **given)
    indices, probs = torch.tensor([[0], [1], [0], [1]]), random_tensor((4, 1), FP32, 7)
    y = fuser.Sequential(dispatch, op)(X.float(), indices, probs, torch.tensor([2, 2]))[0]
    order = [0, 2, 1, 3]
    parameters = [p.detach().double() for p in op.parameters()]
    rows, scales = X.double()[order], probs.double()[order].view(-1)
    exact = grouped({"scale_bias": True})(rows, *parameters, torch.tensor([2, 2]), scales)
    near(y, exact, TOLERANCES[FP32])


@sets("fuser.Activation.set_extra_output_channel", index=Of(1, instead=0))
@sets("fuser.Activation.returns_extra_output", index=Of(1, instead=0))
def _the_output_that_a_channel_begins_at(given: Given) -> None:
    op = fuser.MoeDispatch(4)
    op.set_extra_output_channel(given["index"], "probs", output_to_caller=False)
    assert [op.returns_extra_output(index) for index in range(3)] == [True, False, True]


@sets("fuser.recipe.DelayedScaling.keeps_columns", role=Of("weight", instead="input"))
def _tensors_that_no_weight_gradient_reads(given: Given) -> None:
    recipe = fuser.recipe.DelayedScaling(override_linear_precision=(False, False, True))
    assert not recipe.keeps_columns(**given)
    assert recipe.keeps_columns("input")


@sets("fuser.Activation.load_state_dict", strict=False)
def _a_state_of_some_parameters(given: Given) -> None:
    for model in (fuser.Linear(6, 8), fuser.Sequential(fuser.Linear(6, 8))):
        weight = next(iter(model.state_dict()))
        state = {weight: torch.ones(8, 6), "other": torch.ones(1)}
        missing, unexpected = model.load_state_dict(state, **given)
        assert unexpected == ["other"]
        assert len(missing) == 1
        assert_close(model(X.float()).float(), X.float().sum(1, keepdim=True).expand(4, 8))


@sets("fuser.Activation.load_state_dict", assign=True)
def _a_state_of_which_the_tensors_are_taken(given: Given) -> None:
    for model in (fuser.BasicLinear(6, 8), fuser.Sequential(fuser.BasicLinear(6, 8))):
        model(X.float())
        state = {next(iter(model.state_dict())): torch.ones(8, 6, dtype=BF16)}
        model.load_state_dict(state, **given)
        (parameter,) = model.parameters()
        assert parameter.data_ptr() == next(iter(state.values())).data_ptr()
        assert model(X).dtype is BF16


# -- hooks of pipelines ---------------------------------------------------------------------

set_in(
    "tests/ops/test_custom_ops.py::test_pre_forward_hooks_are_called_once_and_each_time",
    f"{FUSIBLE}.pre_fuser_forward",
    "requires_grad",
)
ignores("fuser.AllGather.pre_fuser_forward", "the ranks are those of all calls", "requires_grad")


class Noting(fuser.BasicOperation):
    """Passes its input on, and notes what its hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        self.noted.append(requires_grad)

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        self.noted.append(prev_op_grad_output_quantizer)
        return input_


@sets("fuser.FusedOperation.pre_fuser_forward", requires_grad=Of(True, instead=False))
def _a_fused_op_asks_its_ops(given: Given) -> None:
    op = fuser.FusedOperation([Noting(), Noting()])
    op.pre_fuser_forward(**given)
    assert [member.noted for member in op.basic_ops] == [[True], [True]]


def _forward(op: Any, x: torch.Tensor, given: Given, ops: int = 1) -> tuple[torch.Tensor, Any]:
    defaults: Given = {
        "basic_op_extra_inputs": [()] * ops,
        "prev_op_grad_output_quantizer": None,
        "next_op_input_quantizer": None,
        "basic_op_kwargs": [{}] * ops,
    }
    y, extras = op.fuser_forward([OperationContext() for _ in range(ops)], x, **defaults | given)
    return y, extras


@sets(f"{HOOK}.fuser_forward", basic_op_extra_inputs=Of([(X,)], instead=[(2 * X,)]))
def _extra_inputs_of_an_op(given: Given) -> None:
    assert torch.equal(_forward(fuser.AddExtraInput(), X, given)[0], 2 * X)


@sets(f"{HOOK}.fuser_forward", basic_op_kwargs=Of([{"factor": 3.0}], instead=[{}]))
def _keywords_of_an_op(given: Given) -> None:
    assert torch.equal(_forward(Factor(), X, given)[0], 3 * X)


@sets(f"{HOOK}.fuser_forward", next_op_input_quantizer=Of(MXFP8, instead=None))
def _an_output_that_the_next_op_reads(given: Given) -> None:
    x = random_tensor((32, 32), FP32, 1)
    y: Any = _forward(fuser.GELU(), x, given)[0]
    assert torch.equal(y.dequantize(), MXFP8(fuser.GELU()(x)).dequantize())


@sets(f"{HOOK}.fuser_forward", prev_op_grad_output_quantizer=Of(MXFP8, instead=None))
def _a_gradient_that_the_op_before_reads(given: Given) -> None:
    op = Noting()
    _forward(op, X, given)
    assert op.noted == [MXFP8]


@sets(f"{HOOK}.fuser_backward", basic_op_grad_extra_outputs=Of([(X,)], instead=[(2 * X,)]))
def _gradients_of_extra_outputs(given: Given) -> None:
    dx, params, extras = fuser.MakeExtraOutput().fuser_backward([OperationContext()], X, **given)
    assert torch.equal(dx, 2 * X)
    assert [*params] == [*extras] == [()]


class Stepping(fuser.FusedOperation):
    """Two additions, whose step is that of the library's own fusions."""

    window = (fuser.AddExtraInput, fuser.AddExtraInput)
    side = "forward"

    def step_forward(self, ctxs: Any, x: torch.Tensor, inputs: Any) -> Any:
        first, second = inputs.extras
        factors = [kwargs.get("factor", 1.0) for kwargs in inputs.kwargs]
        y = x + factors[0] * first + factors[1] * second
        return (y if inputs.quantizer is None else inputs.quantizer(y)), ()

    def step_backward(self, ctxs: Any, dy: torch.Tensor, grad_extras: Any) -> Any:
        return dy + sum(grad_extras), (), (dy, 2 * dy)


def _stepping(given: Given, x: torch.Tensor = X) -> Any:
    op = Stepping([fuser.AddExtraInput(), fuser.AddExtraInput()])
    extras = {"basic_op_extra_inputs": [(x,), (4 * x,)]}
    return _forward(op, x, extras | given, 2)[0]


@sets(f"{FUSIBLE}.fuser_forward", basic_op_extra_inputs=Of([(X,), (8 * X,)], instead=[(X,), (X,)]))
def _extra_inputs_of_a_fusion(given: Given) -> None:
    assert torch.equal(_stepping(given), 10 * X)


@sets(f"{FUSIBLE}.fuser_forward", basic_op_kwargs=Of([{}, {"factor": 2.0}], instead=[{}, {}]))
def _keywords_of_a_fusion(given: Given) -> None:
    assert torch.equal(_stepping(given), 10 * X)


@sets(f"{FUSIBLE}.fuser_forward", next_op_input_quantizer=Of(MXFP8, instead=None))
def _an_output_of_a_fusion_that_the_next_op_reads(given: Given) -> None:
    x = random_tensor((32, 32), FP32, 1)
    assert torch.equal(_stepping(given, x).dequantize(), MXFP8(6 * x).dequantize())


ignores(
    f"{FUSIBLE}.fuser_forward",
    "the contexts of a plan have the quantizer of the op before",
    "prev_op_grad_output_quantizer",
)


@sets(f"{FUSIBLE}.fuser_backward", basic_op_grad_extra_outputs=Of([(X,), (X,)], instead=[(), ()]))
def _gradients_of_extra_outputs_of_a_fusion(given: Given) -> None:
    op = Stepping([fuser.AddExtraInput(), fuser.AddExtraInput()])
    dx, params, extras = op.fuser_backward([OperationContext()] * 2, X, **given)
    assert torch.equal(dx, 3 * X)
    assert [len(tuple(of_op)) for of_op in params] == [0, 0]
    (first,), (second,) = extras
    assert torch.equal(first, X)
    assert torch.equal(second, 2 * X)


for _name in ("quantizer_value", "get_quantizer"):

    @sets(f"{HOOK}.{_name}", device=torch.device("meta"))
    def _where_a_scale_is_made(given: Given, name: str = _name) -> None:
        op = fuser.BasicLinear(32, 32)
        with fuser.autocast(recipe=fuser.recipe.DelayedScaling()):
            quantizer: Any = getattr(op, name)("forward", 0, **given)
        assert quantizer.scale.device.type == "meta"


# -- products of a linear -------------------------------------------------------------------


def _linear(own: Callable[..., Any], *, side: str, cls: Any = fuser.BasicLinear) -> Any:
    """The class of a linear whose passes, on one side, are ``own(op, ctx, tensor)``."""

    class Own(cls):  # type: ignore[misc]
        if side == "forward":

            def op_forward(self, ctx: Any, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
                y: torch.Tensor = own(self, ctx, input_)
                return y

        else:

            def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
                return own(self, ctx, grad_output)

    return Own


PRECISIONS = ((FP32, None, TOLERANCES[FP32]), (BF16, None, TOLERANCES[BF16]), (BF16, E4M3, 0.08))


Exact = Callable[[torch.Tensor], torch.Tensor]


def _follows_a_product(argument: str, value: Any, changed: Exact) -> None:
    """A row of ``scale * x @ w.T + bias + addend``."""

    @sets("fuser.BasicLinear.matmul", **{argument: value})
    def values(given: Given) -> None:
        for dtype, recipe, tolerance in PRECISIONS:
            options = _in(dtype, given)
            cls = _linear(lambda op, ctx, x, o=options: op.matmul(ctx, x, **o), side="forward")
            op = cls(6, 8, dtype=dtype)
            (weight,) = fill(op)
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = op(X.to(dtype))
            near(y, changed(X.double() @ weight.detach().double().T), tolerance)


def _in(dtype: torch.dtype, given: Given) -> Given:
    return {n: v.to(dtype) if isinstance(v, torch.Tensor) else v for n, v in given.items()}


_follows_a_product("bias", OFFSET, lambda y: y + OFFSET)
_follows_a_product("addend", ADDED, lambda y: y + ADDED)
_follows_a_product("scale", -3.0, lambda y: -3 * y)


def _follows_products_of_backward(argument: str, value: Any, of_x: Exact, of_w: Exact) -> None:
    """A row of ``scale * dy @ w + addend``, and ``scale * dy.T @ x``."""

    @sets("fuser.BasicLinear.op_backward", **{argument: value})
    def gradients(given: Given) -> None:
        for dtype, recipe, tolerance in PRECISIONS:
            options = _in(dtype, given)

            def backward(op: Any, ctx: Any, dy: torch.Tensor, options: Given = options) -> Any:
                return fuser.BasicLinear.op_backward(op, ctx, dy, **options)

            op = _linear(backward, side="backward")(6, 8, dtype=dtype)
            (weight,) = fill(op)
            (x,) = leaves([X.to(dtype)])
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                op(x).backward(DY.to(dtype))
            near(x.grad, of_x(DY.double() @ weight.detach().double()), tolerance)
            near(weight.grad, of_w(DY.double().T @ X.double()), tolerance)


_follows_products_of_backward("scale", -3.0, lambda dx: -3 * dx, lambda dw: -3 * dw)
_follows_products_of_backward(
    "addend", ADDED_IN_BACKWARD, lambda dx: dx + ADDED_IN_BACKWARD, lambda dw: dw
)


@sets("fuser.BasicLinear.weight_gradient", is_quantized=True)
def _a_weight_gradient_of_bytes(given: Given) -> None:
    def backward(op: Any, ctx: Any, dy: torch.Tensor) -> Any:
        x, _ = op.saved_operands(ctx)
        bytes_of_dy = fuser.Float8CurrentScalingQuantizer()(dy)
        return None, (op.weight_gradient(ctx, bytes_of_dy, x, -3.0, **given),)

    op = _linear(backward, side="backward")(6, 8, dtype=BF16)
    product = mock.patch.object(gemm, "quantized_wgrad", wraps=gemm.quantized_wgrad)
    with fuser.autocast(recipe=E4M3), product as quantized:
        op(X).backward(DY)
    assert quantized.call_count == 1
    near(op.weight.grad, -3 * DY.double().T @ X.double(), 0.08)


def _is_kept(make: Callable[..., Any], given: Given) -> None:
    """A later microbatch multiplies by the weight of the first, also in a second pipeline."""
    first, last = make(6, 8), make(8, 6)
    model = fuser.Sequential(first, torch.nn.Identity(), fuser.GELU(), last)

    def run(is_first: Any) -> torch.Tensor:
        kwargs = {"is_first_microbatch": is_first}
        y: torch.Tensor = model(X, op_kwargs={first: kwargs, last: kwargs})
        return y

    with fuser.autocast(recipe=E4M3), torch.no_grad():
        for op in (first, last):
            y = run(True)
            op.weight.data.mul_(2.0)  # which torch does not count
            for _ in range(3):
                assert torch.equal(run(given.get("is_first_microbatch")), y)
        assert not torch.equal(run(True), y)


@sets("fuser.BasicLinear.op_forward", is_first_microbatch=False)
def _a_linear_in_a_later_microbatch(given: Given) -> None:
    _is_kept(partial(fuser.BasicLinear, dtype=BF16), given)


@sets("fuser.LoRALinear.op_forward", is_first_microbatch=False)
def _a_linear_with_adapters_in_a_later_microbatch(given: Given) -> None:
    _is_kept(partial(fuser.LoRALinear, rank=2, dtype=BF16), given)


@sets("fuser.BasicLinear.matmul", is_first_microbatch=False)
def _a_product_in_a_later_microbatch(given: Given) -> None:
    own: Given = {"is_first_microbatch": True}
    op = _linear(lambda op, ctx, x: op.matmul(ctx, x, **own), side="forward")(6, 8, dtype=BF16)
    with fuser.autocast(recipe=E4M3), torch.no_grad():
        y = op(X)
        op.weight.data.mul_(2.0)  # which torch does not count
        own.update(given or {"is_first_microbatch": None})
        assert torch.equal(op(X), y)


# -- norms ----------------------------------------------------------------------------------

NORMS: tuple[tuple[Any, Any], ...] = (
    (fuser.LayerNorm, torch.nn.functional.layer_norm),
    (fuser.RMSNorm, torch.nn.functional.rms_norm),
)


@sets("fuser.LayerNorm.normalize", extra=ADDED)
def _a_norm_of_a_sum(given: Given) -> None:
    for cls, formula in NORMS:
        y, total = cls(8).normalize(_no_gradient(), DY.float(), **_in_fp32(given))
        exact = formula((DY + ADDED).double(), (8,), eps=1e-5)
        near(y, exact, 1e-2)
        assert total is None


@sets("fuser.LayerNorm.normalize", wants_sum=True)
def _a_norm_and_the_sum(given: Given) -> None:
    for cls, formula in NORMS:
        op, ctx = cls(8), _no_gradient()
        y, total = op.normalize(ctx, DY.float(), ADDED.float(), **given)
        near(y, formula((DY.float() + ADDED.float()).double(), (8,), eps=1e-5), 1e-5)
        assert torch.equal(total, DY.float() + ADDED.float())


def _no_gradient() -> OperationContext:
    ctx = OperationContext()
    ctx.requires_grad = False
    return ctx


def _in_fp32(given: Given) -> Given:
    return {name: value.float() for name, value in given.items()}


def _norm_backward(given: Given, compare: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """``compare`` gets the gradient of the input, and that of torch in fp64."""
    for cls, formula in NORMS:

        def backward(op: Any, ctx: Any, dy: torch.Tensor, cls: Any = cls) -> Any:
            return cls.input_grad_and_param_grads(op, ctx, dy, **given)

        op = _linear(backward, side="backward", cls=cls)(8)
        (x,) = leaves([DY.float()])
        op(x).backward(OFFSET.float().expand(4, 8))
        (x64,) = leaves([DY.double()])
        formula(x64, (8,), eps=1e-5).backward(OFFSET.double().expand(4, 8))
        compare(x.grad, x64.grad)


@sets("fuser.LayerNorm.input_grad_and_param_grads", d_extra=ADDED.float())
def _a_gradient_that_is_added_to_a_norms(given: Given) -> None:
    _norm_backward(given, lambda dx, exact: near(dx, exact + ADDED.double(), 1e-5))


@sets("fuser.LayerNorm.input_grad_and_param_grads", rounded_dx=Of("bf16", instead=None))
def _a_gradient_that_is_rounded_too(given: Given) -> None:
    for cls, formula in NORMS:
        rounded = torch.full((4, 8), torch.nan, dtype=BF16)
        own = {"rounded_dx": given["rounded_dx"] and rounded}

        def backward(op: Any, ctx: Any, dy: torch.Tensor, cls: Any = cls, own: Any = own) -> Any:
            return cls.input_grad_and_param_grads(op, ctx, dy.bfloat16(), **own)

        op = _linear(backward, side="backward", cls=cls)(8)
        (x,) = leaves([DY.float()])
        op(x).backward(OFFSET.float().expand(4, 8))
        (x64,) = leaves([DY.double()])
        formula(x64, (8,), eps=1e-5).backward(OFFSET.double().expand(4, 8))
        near(rounded, x64.grad, 1e-2)


# -- groups of processes --------------------------------------------------------------------


@contextlib.contextmanager
def _groups_used() -> Iterator[list[Any]]:
    """The groups over which tensors go from here on."""
    used: list[Any] = []

    def noting(run: Any) -> Any:
        def noted(*args: Any) -> Any:
            used.append(args[-1])
            return run(*args)

        return noted

    names = ("_gather", "_scatter", "_add", "_exchange")
    noted = {name: noting(getattr(collectives, name)) for name in names}
    with mock.patch.multiple(collectives, **noted):
        yield used


def _is_over(op: Any, attribute: str, value: Any, *inputs: torch.Tensor) -> None:
    """Forward and backward of later calls are over a group that is set after some calls."""
    second = torch.distributed.new_group([0, 1])
    for is_set in (False, True):
        if is_set:
            setattr(op, attribute, second if value == "the second" else op.process_groups[0])
        with _groups_used() as used:
            for _ in range(4):
                first, *rest = leaves(inputs)
                y = op(first, *rest)
                (y[0] if isinstance(y, tuple) else y).sum().backward()
        assert used
        assert all(group is second for group in used) == is_set
    refuses(lambda: _set_and_run(op, attribute, *inputs), "ranks")


def _set_and_run(op: Any, attribute: str, *inputs: torch.Tensor) -> None:
    setattr(op, attribute, torch.distributed.new_group([0]))
    op(*inputs)


@sets("fuser.AllGather.process_group", group=Of("the second", instead="the first"))
def _a_group_that_is_set(given: Given) -> None:
    with rank_0_of_2():
        for cls in (fuser.AllGather, fuser.ReduceScatter, fuser.AllReduce):
            op = cls(torch.distributed.group.WORLD)
            _is_over(op, "process_group", given["group"], X.float())


@sets("fuser.BasicLinear.tensor_parallel_group", group=Of("the second", instead="the first"))
def _a_group_of_a_linear_that_is_set(given: Given) -> None:
    with rank_0_of_2():
        for mode, columns in (("column", 6), ("row", 3)):
            op = fuser.BasicLinear(
                *(6, 8),
                tensor_parallel_mode=mode,
                tensor_parallel_group=torch.distributed.group.WORLD,
                sequence_parallel=True,
            )
            _is_over(op, "tensor_parallel_group", given["group"], X.float()[:, :columns])


@sets("fuser.MoeCombine.expert_parallel_group", group=Of("the second", instead="the first"))
def _a_group_of_experts_that_is_set(given: Given) -> None:
    indices, probs = torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1)
    with rank_0_of_2():
        op = fuser.MoeDispatch(4, expert_parallel_group=torch.distributed.group.WORLD)
        _is_over(op, "expert_parallel_group", given["group"], X.float(), indices, probs)


def _rows_of_experts(**given: Any) -> Any:
    indices, probs = torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1)
    op = fuser.MoeDispatch(4, expert_parallel_group=torch.distributed.group.WORLD)
    tokens = X.float().repeat(1, 4)  # whole words of bytes
    return op.rows_of_experts(_no_gradient(), tokens, (indices, probs), FP32, **given)[0]


@sets("fuser.MoeDispatch.rows_of_experts", is_lazy=True)
def _rows_that_are_not_sent_yet(given: Given) -> None:
    with rank_0_of_2():
        at_once = _rows_of_experts()
        with _groups_used() as used:
            rows = _rows_of_experts(**given)
            count = len(used)
            assert torch.equal(materialize(rows), at_once)
            assert len(used) > count


set_in(
    "tests/sharded/test_recorded_ranks.py::"
    "test_replays_of_experts_whose_rows_are_counted_have_the_bits_of_exact_exchanges",
    "fuser.MoeDispatch.rows_of_experts",
    "block",
)


@sets("fuser.MoeDispatch.rows_of_experts", may_send_bytes=True)
def _rows_that_are_sent_as_bytes(given: Given) -> None:
    """Each of two experts gets two rows of each rank, in tiles of 128 rows."""
    sizes = torch.tensor([4, 4])
    with rank_0_of_2():
        at_once = _rows_of_experts()
        rows = _rows_of_experts(is_lazy=True, **given)
        quantizers = [tensors.Float8Quantizer(scale=torch.ones(1)) for _ in sizes]
        groups = padded_groups(sizes, len(sizes), len(at_once), at_once.device)
        tensor = rows.quantized(quantizers, groups, rowwise=True, columnwise=False)
    values = tensor.dequantize()
    exact = at_once.to(torch.float8_e4m3fn).float()
    assert torch.equal(torch.cat([values[:4], values[128:132]]), exact)
    assert bool(exact.any())


def _sharded(cls: Any, mode: str, has_bias: bool, given: Given) -> Callable[..., Any]:
    """Makes a linear of one rank, whose parameters are replaced by their shards."""

    def make(dtype: torch.dtype) -> Any:
        options = {"bias": has_bias} if cls is fuser.Linear else {}
        op = cls(6, 8, dtype=dtype, **options)
        op.shard(mode, torch.distributed.group.WORLD, **given)
        weight = op.weight.detach()
        op.weight = torch.nn.Parameter(weight[:4] if mode == "column" else weight[:, :3].clone())
        if has_bias:
            op.bias = torch.nn.Parameter(op.bias.detach()[:4])
        return op

    return make


def _linear_of_rows(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    return gathered(x) @ weight.T + (bias[0] if bias else 0.0)


for _cls in (fuser.BasicLinear, fuser.Linear):

    @sets(f"fuser.{_cls.__name__}.shard", sequence_parallel=True)
    def _ranks_have_some_rows(given: Given, cls: Any = _cls) -> None:
        with rank_0_of_2():
            has_bias = cls is fuser.Linear
            agrees(_sharded(cls, "column", has_bias, given), _linear_of_rows, X)
            agrees(
                _sharded(cls, "row", False, given),
                lambda x, weight: scattered(x @ weight.T),
                X[:, :3],
            )


@sets("fuser.BasicLinear.shard", group=PlannedGroup(4))
def _ranks_of_a_shard(given: Given) -> None:
    with rank_0_of_2():
        for mode, features in (("column", (8, 2)), ("row", (2, 8))):
            op = fuser.BasicLinear(8, 8)
            op.shard(mode, **given)
            assert (op.local_in_features, op.local_out_features) == features
            assert op.tensor_parallel_size == 4
            assert op.tensor_parallel_group is given["group"]


@sets("fuser.Bias.shard", group=Of(PlannedGroup(4), instead=PlannedGroup(2)))
def _ranks_of_a_bias(given: Given) -> None:
    op = fuser.Bias(8)
    op.shard(**given)
    assert op.local_size == 2
    assert op.placement_of("bias") == (0, given["group"])


@sets("fuser.LoRALinear.shard", group=PlannedGroup(4), sequence_parallel=True)
def _adapters_are_not_sharded(given: Given) -> None:
    op = fuser.LoRALinear(6, 8, rank=2)
    if "group" in given:
        op.shard(None, **given)
        assert op.tensor_parallel_group is given["group"]
        assert op.tensor_parallel_size == 1
    else:
        refuses(lambda: op.shard(None, **given), "sequence_parallel")
    refuses(lambda: op.shard("column", **given), "is not column parallel")


# -- groups of experts, and adapters ----------------------------------------------------------


@sets("fuser.GroupedLinear.delay_wgrad_compute", value=Of(True, instead=False))
def _weight_gradients_come_later_once_it_is_set(given: Given) -> None:
    def make(dtype: torch.dtype) -> Any:
        op = fuser.GroupedLinear(2, 6, 8, dtype=dtype)
        op.delay_wgrad_compute = given["value"]
        return op

    check_delayed(make, grouped({}), FP32, TOLERANCES[FP32], None)
    check_delayed(make, grouped({}), BF16, QUANTIZED, E4M3)
    op = make(FP32)
    op(X.float(), torch.tensor([1, 3]))
    refuses(lambda: setattr(op, "delay_wgrad_compute", False), "after the first call")


ADAPT = "fuser.LoRAGroupedLinear.from_linear"


def _adapted(given: Given, dtype: torch.dtype, **others: Any) -> list[Any]:
    """Adapters for a linear of torch, one of fuser, and one of groups."""
    options = {"rank": 2, **others, **given}
    return [
        fuser.LoRALinear.from_linear(torch.nn.Linear(6, 6, dtype=dtype), **options),
        fuser.LoRALinear.from_linear(fuser.Linear(6, 6, dtype=dtype), **options),
        fuser.LoRAGroupedLinear.from_linear(fuser.GroupedLinear(2, 6, 6, dtype=dtype), **options),
    ]


@sets(ADAPT, rank=Of(3, instead=2))
def _the_rank_of_adapters(given: Given) -> None:
    for op in _adapted(given, FP32):
        shapes = {tuple(p.shape) for name, p in op.named_parameters() if "lora" in name}
        assert shapes == {(3, 6), (6, 3)}


@sets(ADAPT, alpha=5.0)
def _the_factor_of_adapters(given: Given) -> None:
    for place in (0, 1, 2):
        inputs = (X, torch.tensor([1, 3])) if place == 2 else (X,)
        formula = grouped({}, rank=2, factor=2.5) if place == 2 else lora(2.5)
        make = partial(lambda dtype, place: _adapted(given, dtype)[place], place=place)
        agrees(make, formula, *inputs, in_pipelines=False)


@sets(ADAPT, dropout=0.5)
def _dropout_before_adapters_of_a_linear(given: Given) -> None:
    for op in _adapted(given, FP32, rank=6):
        with torch.no_grad():
            for name, parameter in op.named_parameters():
                if "bias" in name:
                    parameter.zero_()
        named = dict(op.named_parameters())
        weights = [p for name, p in named.items() if "weight" in name]
        adapters = [p for name, p in named.items() if "lora" in name]
        extras = (torch.tensor([32, 32]),) if len(weights) > 1 else ()
        check_dropout(op, weights, adapters, FP32, *extras)


@sets(ADAPT, adapter_dtype=FP32)
def _the_dtype_of_adapters(given: Given) -> None:
    for op in _adapted(given, BF16):
        for name, parameter in op.named_parameters():
            assert parameter.dtype is (FP32 if "lora" in name else BF16)


@sets("fuser.LoRAGroupedLinear.as_parameter", name="bias0")
def _a_bias_is_not_quantized(given: Given) -> None:
    with fuser.quantized_model_init(recipe=E4M3):
        op = fuser.LoRAGroupedLinear(2, 32, 32, rank=2)
    fresh = torch.nn.Parameter(torch.ones(32, 32), requires_grad=False)
    assert isinstance(op.as_parameter(fresh, "weight0"), fuser.QuantizedTensor)
    assert op.as_parameter(fresh, **given) is fresh


ignores("fuser.BasicLinear.as_parameter", "such a linear has one weight", "name")


@sets("fuser.LoRAGroupedLinear.adapters_backward", addend=ADDED_IN_BACKWARD)
def _a_gradient_that_is_added_to_that_of_adapters(given: Given) -> None:
    for dtype, tolerance in TOLERANCES.items():
        own = {name: value.to(dtype) for name, value in given.items()}

        def backward(op: Any, ctx: Any, dy: torch.Tensor, own: Given = own) -> Any:
            saved = op.take_saved(ctx)
            dx, grad_a, grad_b = op.adapters_backward(ctx, gemm, saved, dy, **own)
            return dx, (None, None, grad_a, grad_b)

        cls = _linear(backward, side="backward", cls=fuser.LoRALinear)
        op = cls(6, 8, rank=2, alpha=5.0, dtype=dtype)
        fill(op)
        (x,) = leaves([X.to(dtype)])
        op(x).backward(DY.to(dtype))
        exact = 2.5 * DY.double() @ op.lora_B.detach().double() @ op.lora_A.detach().double()
        near(x.grad, exact + ADDED_IN_BACKWARD, tolerance)


@sets("fuser.LoRALinear.op_backward", scale=-3.0, addend=ADDED_IN_BACKWARD.float())
def _no_fusion_has_the_backward_of_adapters(given: Given) -> None:
    def backward(op: Any, ctx: Any, dy: torch.Tensor) -> Any:
        return fuser.LoRALinear.op_backward(op, ctx, dy, **given)

    op = _linear(backward, side="backward", cls=fuser.LoRALinear)(6, 8, rank=2)
    (x,) = leaves([X.float()])
    is_refused = False
    try:
        op(x).backward(DY.float())
    except AssertionError:
        is_refused = True
    assert is_refused
