"""The operations of graphs by torch's own checks: schemas, fakes, and their registration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from pipeline_kernels import on_kernels
from test_compiled import (
    BF16,
    CURRENT,
    DELAYED,
    MXFP8,
    WIDTH,
    Blocks,
    _nothing_compiled_yet,
    rows,
    step,
    under,
)
from test_compiled_experts import Layer, tokens
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import fuser
from fuser import modules
from fuser import recipe as recipes
from fuser.op import FusibleOperation

__all__ = ["_nothing_compiled_yet"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

RECIPES = [None, CURRENT, recipes.Float8BlockScaling(), MXFP8, DELAYED]


Call: TypeAlias = "tuple[Any, tuple[Any, ...]]"


def calls_of(model: Any, x: torch.Tensor, recipe: Any) -> list[Call]:
    """The calls of fuser's operations in a compiled step, with real tensors."""
    found: list[Call] = []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "namespace", "") == "fuser":
                found.append((target, args))
            return super().call_function(target, args, kwargs)

    def recorded(graph: torch.fx.GraphModule, examples: Any) -> Any:
        return make_boxed_func(Recorder(graph).run)

    backend = aot_autograd(fw_compiler=recorded, bw_compiler=recorded)
    with under(recipe):
        step(torch.compile(model, backend=backend, fullgraph=True), model, x)
    return found


def check(function: Any, args: tuple[Any, ...]) -> None:
    """Real and fake results have equal shapes, strides, dtypes and numbers; no argument changes."""
    torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor"))


MODELS: dict[str, tuple[Callable[[torch.dtype], Any], Callable[[torch.dtype], torch.Tensor]]] = {
    "blocks": (lambda dtype: Blocks(1, dtype=dtype), lambda dtype: rows(dtype=dtype)),
    "experts": (lambda dtype: Layer("ops", dtype=dtype), lambda dtype: tokens(dtype=dtype)),
    "functions": (
        lambda dtype: Layer("probs of rows", dtype=dtype),
        lambda dtype: tokens(dtype=dtype),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_call_of_a_step_passes_the_checks_of_torch(
    name: str, recipe: Any, kernels: bool
) -> None:
    make, given = MODELS[name]
    with on_kernels() if kernels else contextlib.nullcontext(), under(recipe):
        calls = calls_of(make(BF16), given(BF16), recipe)
        names = {function.__name__.partition(".")[0] for function, _ in calls}
        assert names >= {"host_forward", "host_backward"} or names >= {"forward", "backward"}
        if name == "functions":
            assert names >= {"route", "permute", "unpermute"}
        for function, args in calls:
            # Under delayed scaling a call has an effect on its op: the checks would repeat it.
            if not function.__name__.startswith("host_"):
                check(function, args)


def test_each_kind_of_op_passes_them() -> None:
    """Alone, in its default shape."""
    width = {"in_features": WIDTH, "out_features": WIDTH}
    made: dict[str, FusibleOperation | torch.nn.Module] = {
        "BasicLinear": fuser.BasicLinear(WIDTH, WIDTH),
        "Bias": fuser.Bias(WIDTH),
        "LayerNorm": fuser.LayerNorm(WIDTH),
        "RMSNorm": fuser.RMSNorm(WIDTH),
        "Dropout": fuser.Dropout(0.5),
        "Linear": fuser.Linear(WIDTH, WIDTH),
        "modules.Linear": modules.Linear(**width),
        "modules.LayerNormLinear": modules.LayerNormLinear(**width),
        "modules.LayerNormMLP": modules.LayerNormMLP(WIDTH, 2 * WIDTH),
    }
    for name in ("GELU", "ReLU", "SiLU", "SwiGLU", "GEGLU", "ReGLU", "QGELU", "SReLU"):
        made[name] = getattr(fuser, name)()
    for name, op in made.items():
        torch._dynamo.reset()
        calls = calls_of(op, rows(), None)
        assert calls, name
        for function, args in calls:
            check(function, args)


def test_operations_that_read_no_values_are_captured() -> None:
    """Inductor leaves out of CUDA graphs what has this tag, and nothing else of fuser."""
    unsafe = torch.Tag.cudagraph_unsafe
    names = ("forward", "backward", "route", "permute", "unpermute", "unpermute_backward")
    for name in names:
        assert unsafe not in getattr(torch.ops.fuser, name).default.tags
    for name in ("host_forward", "host_backward"):
        assert unsafe in getattr(torch.ops.fuser, name).default.tags
