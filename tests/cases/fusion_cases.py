"""What the tests of fusions share: pipelines that each fusion takes, and comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from oracles import (
    ACTIVATIONS,
    DTYPES,
    Case,
    bias,
    layernorm,
    leaf,
    linear,
    random_tensor,
    randomize,
    rmsnorm,
    run_module,
    torch_layernorm,
    torch_rmsnorm,
    worst_error,
)

import fuser
import fuser.runtime.pipeline

DRAWS = range(8)
FEATURES = 6
# A fused half adds or multiplies at another place than the unfused one, which
# moves at most four roundings of the largest value.
MOVED_ROUNDINGS = 4
# Multiples of 1/256 below 4 have products of 20 bits, and FEATURES of these a sum of 23, which fp32
# holds. An activation can amplify an error of its input many times. If its input is exact in every
# order of the sum, no order decides how wrong either side is.
GRID = 256.0


# -- pipelines that a fusion takes -------------------------------------------------------


def _linear(outputs: int = FEATURES) -> Case:
    return Case(
        "BasicLinear",
        lambda dtype: fuser.BasicLinear(FEATURES, outputs, dtype=dtype),
        linear,
        (FEATURES,),
    )


def _bias(size: int = FEATURES) -> Case:
    return Case("Bias", lambda dtype: fuser.Bias(size, dtype=dtype), bias, (size,))


ADD = Case("AddExtraInput", lambda dtype: fuser.AddExtraInput(), lambda x, e: x + e, (), "same")
MAKE = Case(
    "MakeExtraOutput", lambda dtype: fuser.MakeExtraOutput(), lambda x: (x.clone(), x.clone()), ()
)
SCALE = Case("ConstantScale", lambda dtype: fuser.ConstantScale(-1.5), lambda x: x * -1.5, ())
RMSNORM = Case(
    "RMSNorm",
    lambda dtype: fuser.RMSNorm(FEATURES, dtype=dtype),
    rmsnorm(),
    (FEATURES,),
    native=torch_rmsnorm((FEATURES,)),
)
LAYERNORM = Case(
    "LayerNorm",
    lambda dtype: fuser.LayerNorm(FEATURES, dtype=dtype),
    layernorm(),
    (FEATURES,),
    native=torch_layernorm((FEATURES,)),
)


@dataclass(frozen=True)
class Window:
    """A pipeline in which ``fusion`` takes the ops ``ops`` on ``side``, as ``kernels``."""

    fusion: str
    side: str
    cases: tuple[Case, ...]
    kernels: str
    features: int = FEATURES

    def __str__(self) -> str:
        return f"{self.fusion}-{'-'.join(c.name for c in self.cases)}"

    @property
    def ops(self) -> tuple[int, ...]:
        return tuple(range(len(self.cases)))

    @property
    def gradient_may_jump(self) -> bool:
        """Whether the last bit of a GEMM's 16-bit output decides on which side of a kink it is."""
        return self.cases[0].name == "BasicLinear" and any(c.has_kink for c in self.cases)

    def model(
        self, dtype: torch.dtype = torch.float32, fusions: Any = fuser.FUSIONS
    ) -> fuser.Sequential:
        model = fuser.Sequential(*[c.make(dtype) for c in self.cases], fusions=fusions)
        randomize(model)
        return model

    def inputs(self, dtype: torch.dtype, seed: int, leading: Any = (5,)) -> list[torch.Tensor]:
        """The main input, and the extra ones, all in the shape of the main line there."""
        x = random_tensor((*leading, self.features), dtype, seed)
        inputs = [x]
        features: Any = self.features
        for number, c in enumerate(self.cases):
            if c.name == "BasicLinear":
                features = c.make(dtype).out_features
            if c.extra == "same":
                inputs.append(random_tensor((*leading, features), dtype, 30 + seed + number))
        return inputs

    def formula(self, model: fuser.Sequential, *, plain: bool = False) -> Callable[..., Any]:
        """The pipeline's formula, or what plain torch runs, over x, parameters, extra inputs."""
        counts = [len(list(op.parameters())) for op in model]

        def run(x: torch.Tensor, *tensors: torch.Tensor) -> Any:
            params, extras = iter(tensors[: sum(counts)]), iter(tensors[sum(counts) :])
            returned: list[Any] = []
            for c, count in zip(self.cases, counts, strict=True):
                own = [*itertools.islice(params, count)]
                own += [next(extras)] if c.extra else []
                x = (c.plain if plain else c.formula)(x, *own)
                if isinstance(x, tuple):
                    x, made = x
                    returned.append(made)
            return (x, *returned)

        return run


WINDOWS = [
    *[
        Window(
            "ForwardLinearBiasActivation",
            "forward",
            (_linear(c.shape[0]), _bias(c.shape[0]), c),
            "addmm, ",
        )
        for c in ACTIVATIONS
    ],
    Window("ForwardLinearBiasActivation", "forward", (_linear(5), _bias(5)), "addmm"),
    Window("ForwardLinearBiasAdd", "forward", (_linear(5), ADD), "addmm"),
    Window("ForwardLinearBiasAdd", "forward", (_linear(5), _bias(5), ADD), "addmm, add"),
    Window("ForwardLinearScaleAdd", "forward", (_linear(5), SCALE, ADD), "addmm"),
    Window("ForwardAddRMSNorm", "forward", (ADD, RMSNORM), "add, rmsnorm"),
    Window("ForwardAddRMSNorm", "forward", (ADD, MAKE, RMSNORM), "add, rmsnorm"),
    Window("ForwardAddLayerNorm", "forward", (ADD, LAYERNORM), "add, layernorm"),
    Window("ForwardAddLayerNorm", "forward", (ADD, MAKE, LAYERNORM), "add, layernorm"),
    Window("BackwardLinearAdd", "backward", (MAKE, _linear(5)), "wgrad mm, dgrad addmm"),
    Window("BackwardLinearScale", "backward", (_linear(5), SCALE), "dgrad mm, wgrad mm"),
    *[
        Window(
            "BackwardActivationBias",
            "backward",
            (_bias(c.shape[0]), c),
            "_backward, sum",
            c.shape[0],
        )
        for c in ACTIVATIONS
    ],
    Window("BackwardAddRMSNorm", "backward", (MAKE, RMSNORM), "rmsnorm_backward, add_"),
    Window("BackwardAddLayerNorm", "backward", (MAKE, LAYERNORM), "layernorm_backward, add_"),
]

every_window = pytest.mark.parametrize("window", WINDOWS, ids=str)
every_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def fused_steps(plan: fuser.FusionPlan, fusion: str) -> dict[str, list[tuple[int, ...]]]:
    """Where ``fusion`` runs, by side."""
    return {
        side: [step.ops for step in plan.steps(side) if step.fusion == fusion]
        for side in ("forward", "backward")
    }


def put_on_grid(tensors: Iterable[torch.Tensor]) -> None:
    """Round fp32 values in place to the grid on which products are exact in every order."""
    with torch.no_grad():
        for t in tensors:
            if t.dtype == torch.float32:
                t.mul_(GRID).round_().div_(GRID)


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf(t) for t in tensors]


def run(
    model: torch.nn.Module, inputs: list[torch.Tensor], autocast: torch.dtype | None = None
) -> dict[str, Any]:
    return run_module(model, inputs[0], inputs[1:], autocast)


def assert_only_roundings_moved(fused: dict[str, Any], unfused: dict[str, Any]) -> None:
    assert set(fused) == set(unfused)
    for name, expected in unfused.items():
        assert (fused[name] is None) == (expected is None), name
        if expected is not None and expected.numel():
            allowed = (
                MOVED_ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
            )
            assert worst_error(fused[name], expected) <= allowed, name


fused_or_not = pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])


class Opaque(fuser.BasicOperation):
    """The identity, without a word to the planner about its output."""

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        return input_.clone()

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


def refusal(plan: fuser.FusionPlan, fusion: str, ops: tuple[int, ...]) -> str:
    """Why ``fusion`` does not run ``ops``; fails unless there is exactly one reason."""
    (reason,) = [r.reason for r in plan.refusals if (r.fusion, r.ops) == (fusion, ops)]
    return reason


FP32, BF16 = torch.float32, torch.bfloat16


def tensor_of(dtype: torch.dtype, grad: bool = True, features: int = FEATURES) -> torch.Tensor:
    return random_tensor((4, features), dtype, 1).requires_grad_(grad)


class Residual(fuser.FusedOperation):
    """``y = scale * x + x``, which no kernel can run while a channel carries x."""

    window = (fuser.MakeExtraOutput, fuser.ConstantScale, fuser.AddExtraInput)
    side = "forward"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None


class ScaleTwice(fuser.FusedOperation):
    """``y = b * (a * x)`` in one product; remembers what ran."""

    window: ClassVar[Any] = (fuser.ConstantScale, fuser.ConstantScale)
    side: ClassVar[Any] = "forward"
    ran: ClassVar[list[Any]] = []

    def product(self) -> Any:
        return self.basic_ops[0].scale * self.basic_ops[1].scale

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **unused: Any) -> Any:
        ScaleTwice.ran.append(("forward", self))
        return input_ * self.product(), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ScaleTwice.ran.append(("backward", self))
        return grad_output * self.product(), [(), ()], [(), ()]


class ScaleTwiceBackward(ScaleTwice):
    side = "backward"


def scales(*fusions: type[fuser.FusedOperation], count: int = 2) -> fuser.Sequential:
    return fuser.Sequential(
        *[fuser.ConstantScale(2.0) for _ in range(count)], fusions=fuser.FUSIONS + fusions
    )
