"""Python calls and calls of torch in a warm step: a change that adds calls to a step fails here.

A small step takes as long as its calls on the host. Times vary with the machine; counts do not. The
launch backend does nothing, so the counts are those of a step on a GPU: the code that is generated
for the driver runs, over addresses of the CPU.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_launch_experts import in_one_launch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.cuda import launch, module, sequence
from fuser.cuda.arguments import encode
from fuser.functional import pointwise
from fuser.gemm import native
from fuser.precision import contexts
from fuser.runtime import pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
T, H, F = 64, 128, 256
WARM_STEPS = 5
# Files of this library, generated code, and torch's operations where they have no faster name.
COUNTED = (str(Path(fuser.__file__).parent), "<fuser", torch._ops.__file__)


_library = torch.library.Library("call_counts", "DEF")
_library.define("product(Tensor a, Tensor b, ScalarType dtype) -> Tensor")
_library.impl("product", lambda a, b, dtype: torch.empty(len(a), b.shape[1], dtype=dtype), "CPU")


@pytest.fixture(autouse=True)
def hopper_that_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches and native products do nothing, as on a GPU, where they run later."""
    backend = launch.LaunchBackend()
    for name, value in {
        "device_type": "cpu",
        "refusal": lambda: None,
        "run": lambda *_: None,
        "multiprocessors": lambda _: 132,
        "shared_bytes": lambda _: 227 * 1024,
    }.items():
        setattr(backend, name, value)
    monkeypatch.setattr(launch, "backend", backend)
    size = type("Size", (), {"value": 0})()
    given = (lambda *_: None, bytearray(launch.MAX_ARGUMENT_BYTES), size, 0, 0)
    monkeypatch.setattr(sequence, "begin", lambda device: given)
    monkeypatch.setattr(
        sequence,
        "prepared",
        lambda kernel, grid, format_, device: launch.Prepared(
            1, grid.sizes, grid.shared_bytes, struct.Struct(format_)
        ),
    )
    monkeypatch.setattr(sequence, "encode", lambda symbol, args: encode(symbol, args, "cpu"))
    monkeypatch.setattr(module, "driver_memset", lambda: lambda *_: None)
    monkeypatch.setattr(sequence, "cuda_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(pointwise, "FEW_ELEMENTS", 0)  # as for blocks of real size
    monkeypatch.setattr(contexts, "is_autocast_used", True)  # as after any other test

    def scaled_mm(a: Any, b: Any, *_: Any, out_dtype: Any, **__: Any) -> Any:
        return torch.ops.call_counts.product(a, b, out_dtype)

    monkeypatch.setattr(native, "torch_cuda", lambda: (13, 0))
    native.native_gemm.cache_clear()
    monkeypatch.setattr("fuser.gemm.matmul.architecture", lambda device: (9, 0))
    monkeypatch.setattr(pipeline, "architecture", lambda device: (9, 0))
    monkeypatch.setattr(native, "scaled_mm", scaled_mm)
    yield
    native.native_gemm.cache_clear()


def gelu() -> torch.nn.Module:
    return fuser.Sequential(
        fuser.Linear(H, F, dtype=BF16), fuser.GELU(), fuser.Linear(F, H, dtype=BF16)
    )


def swiglu() -> torch.nn.Module:
    residual, add = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    return fuser.Sequential(
        residual,
        fuser.RMSNorm(H, dtype=BF16),
        fuser.Linear(H, 2 * F, bias=False, dtype=BF16),
        fuser.SwiGLU(),
        fuser.Linear(F, H, bias=False, dtype=BF16),
        add,
    )


class Counted(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def python_calls(call: Callable[[], Any]) -> Counter[str]:
    """How often each function of this library was called, and operations by torch's slow names."""
    calls: Counter[str] = Counter()

    def noted(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(COUNTED):
            calls[f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"] += 1

    outer = sys.getprofile()
    sys.setprofile(noted)
    try:
        call()
    finally:
        sys.setprofile(outer)
    return calls


RECIPES: dict[str, Any] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "block": recipes.Float8BlockScaling(),
}
# Python calls of forward and backward, and operations of torch in both.
MOST = {
    ("gelu", "none"): (15, 9, 21),  # one of them computes the GELU again
    ("gelu", "current"): (23, 9, 47),
    ("gelu", "delayed"): (52, 34, 45),
    ("gelu", "block"): (23, 9, 85),
    ("swiglu", "none"): (15, 10, 23),
    ("swiglu", "current"): (23, 10, 47),
    ("swiglu", "delayed"): (52, 35, 45),
    ("swiglu", "block"): (23, 10, 80),
}


@pytest.mark.parametrize(("name", "recipe"), MOST)
def test_a_warm_step_makes_few_calls(name: str, recipe: str) -> None:
    model = {"gelu": gelu, "swiglu": swiglu}[name]()
    x = torch.randn(T, H, dtype=BF16, requires_grad=True)
    dy = torch.randn(T, H, dtype=BF16)
    made: list[torch.Tensor] = []

    def forward() -> None:
        under: Any = contextlib.nullcontext()
        if RECIPES[recipe] is not None:
            under = fuser.autocast(recipe=RECIPES[recipe])
        with under:
            made[:] = [model(x)]

    def backward() -> None:
        made.pop().backward(dy)

    for _ in range(WARM_STEPS):
        forward()
        backward()
    there, back = python_calls(forward), python_calls(backward)
    with Counted() as operations:
        forward()
        backward()
    found = (there.total(), back.total(), operations.count)
    assert all(one <= most for one, most in zip(found, MOST[name, recipe], strict=True)), (
        f"{found}; forward {there.most_common(15)}, backward {back.most_common(15)}"
    )


# Python calls of a forward in a checkpoint, and of its backward with the recomputation. The latter
# is not recorded under delayed scaling: it has other scales by then. Without frames of the stack.
# Both look whether a checkpoint is around them, in which plans keep everything.
MOST_IN_CHECKPOINTS = {
    "none": (30, 43),
    "current": (39, 43),
    "delayed": (67, 503),
    "block": (39, 43),
}


@pytest.mark.parametrize("recipe", MOST_IN_CHECKPOINTS)
def test_a_warm_step_in_a_checkpoint_makes_few_calls(recipe: str) -> None:
    model = swiglu()
    outputs: list[torch.Tensor] = []
    x = torch.randn(T, H, dtype=BF16, requires_grad=True)
    dy = torch.randn(T, H, dtype=BF16)

    def forward() -> None:
        under: Any = contextlib.nullcontext()
        if RECIPES[recipe] is not None:
            under = fuser.autocast(recipe=RECIPES[recipe])
        with under:
            outputs[:] = [checkpoint(model, x, use_reentrant=False)]

    def backward() -> None:
        outputs.pop().backward(dy)

    for _ in range(WARM_STEPS):
        forward()
        backward()
    there, back = python_calls(forward), python_calls(backward)
    totals = [calls.total() - calls["torch_private.py:frames"] for calls in (there, back)]
    most = MOST_IN_CHECKPOINTS[recipe]
    assert all(one <= bound for one, bound in zip(totals, most, strict=True)), (
        f"{totals}; forward {there.most_common(15)}, backward {back.most_common(15)}"
    )


# Python calls of the forward of a microbatch that quantizes the weights, of the forward of one that
# reads what was kept, and of a backward; more where FSDP2 was imported.
MOST_OF_MICROBATCHES = {"current": (93, 75, 9), "delayed": (121, 103, 34), "block": (93, 75, 9)}


@pytest.mark.parametrize("recipe", MOST_OF_MICROBATCHES)
def test_a_warm_microbatch_makes_few_calls(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = sys.modules.get("torch.distributed._composable_state")
    if states is not None:  # the lookup of a gathered weight visits sharded models of other tests
        monkeypatch.setattr(states, "_module_state_mapping", {})
    model = gelu()
    made: list[torch.Tensor] = []
    x = torch.randn(T, H, dtype=BF16, requires_grad=True)
    dy = torch.randn(T, H, dtype=BF16)

    def forward(is_first: bool) -> None:
        kwargs = {op: {"is_first_microbatch": is_first} for op in (0, 2)}
        with fuser.autocast(recipe=RECIPES[recipe]):
            made[:] = [model(x, op_kwargs=kwargs)]

    def backward() -> None:
        made.pop().backward(dy)

    def counted(is_first: bool) -> tuple[int, int]:
        there = python_calls(lambda: forward(is_first)).total()
        return there, python_calls(backward).total()

    for _ in range(WARM_STEPS):
        for is_first in (True, False, False):
            forward(is_first)
            backward()
    counted(True)
    counted(False)  # the first one reads the layout of what was kept
    again, back = counted(False)
    first, back_of_first = counted(True)
    found = (first, again, max(back, back_of_first))
    most = MOST_OF_MICROBATCHES[recipe]
    assert all(one <= bound for one, bound in zip(found, most, strict=True)), found


# -- separate weights ---------------------------------------------------------------------------

EXPERTS = (8, 64)
# Calls of this library's functions in forward and backward, operations of torch in the forward, and
# such operations in the backward for each weight: torch keeps a gradient by one of them.
MOST_OF_EXPERTS = (19, 11, 11, 1)


def experts(count: int) -> torch.nn.Module:
    options: dict[str, Any] = {"bias": False, "dtype": BF16, "device": "cpu"}
    return fuser.Sequential(
        fuser.GroupedLinear(count, H, 2 * F, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(count, F, H, **options),
    )


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    is_wgrad = b.dim() == 2
    return a.new_empty(offs.shape[0], a.shape[0], b.shape[1]) if is_wgrad else a @ b[0]


def every_call(call: Callable[[], Any]) -> int:
    """The number of calls of Python functions and of C functions, by Python."""
    events: Counter[str] = Counter()
    outer = sys.getprofile()
    sys.setprofile(lambda frame, event, _: events.update([event]))
    try:
        call()
    finally:
        sys.setprofile(outer)
    return events["call"] + events["c_call"]


def counts_of_experts(count: int) -> list[tuple[Counter[str], int, int]]:
    """Of a warm forward and backward: the calls of this library, all calls, torch's operations."""
    model = experts(count)
    x = torch.randn(T, H, dtype=BF16, requires_grad=True)
    sizes, scales = torch.full((count,), T // count), torch.rand(T, dtype=BF16)
    dy = torch.randn(T, H, dtype=BF16)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made[:] = [model(x, sizes, scales, sizes)]

    def backward() -> None:
        made.pop().backward(dy)

    def ready(call: Callable[[], None]) -> None:
        model.zero_grad(set_to_none=True)
        if call is backward:
            forward()

    for _ in range(WARM_STEPS):
        ready(backward)
        backward()
    found = []
    for call in (forward, backward):
        ready(call)
        of_library = python_calls(call)
        ready(call)
        every = every_call(call)
        ready(call)
        with Counted() as operations:
            call()
        found.append((of_library, every, operations.count))
    return found


def test_calls_of_a_warm_step_do_not_depend_on_the_number_of_separate_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_one_launch(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    few, many = map(counts_of_experts, EXPERTS)
    for side, (some, others) in enumerate(zip(few, many, strict=True)):
        of_library, every, operations = others
        assert of_library.total() == some[0].total() <= MOST_OF_EXPERTS[side], of_library
        assert every == some[1]
        slope = MOST_OF_EXPERTS[3] if side else 0
        assert operations - some[2] <= slope * 2 * (EXPERTS[1] - EXPERTS[0])
    assert few[0][2] <= MOST_OF_EXPERTS[2]
