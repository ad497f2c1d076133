"""Python calls and calls of torch in a warm step: a change that changes them fails here.

A small step takes as long as its calls on the host. Times vary with the machine; counts do not. The
launch backend does nothing, so the counts are those of a step on a GPU: the code that is generated
for the driver runs, over addresses of the CPU.

The most that a step may make is in ``call_counts.json``, which ``make counts`` rewrites, so that a
change is a diff to review. It has a part for some releases of Python and torch, which differ.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_launch_experts import in_one_launch
from paths import BENCHMARKS
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

sys.path.append(str(BENCHMARKS))

from planning import feed_forward_ops

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
T, H, F = 64, 128, 256
COUNTS = Path(__file__).with_name("call_counts.json")
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
        "has_wgmma": lambda _: True,
        "tensor_map": lambda matrix, _: (matrix,),
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
    importlib.import_module("torch.distributed.fsdp")  # where it is there, steps ask it

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


class Recorded:
    """Compares the counts of a test with those of the file, or writes them into it.

    Parameters
    ----------
    case
        The test and its parameters.
    is_written
        Whether they go into the file.
    """

    def __init__(self, case: str, is_written: bool) -> None:
        self.case = case
        self.is_written = is_written

    def __call__(self, **found: int | Counter[str]) -> None:
        counts = {k: v if isinstance(v, int) else v.total() for k, v in found.items()}
        file: Counts = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
        if self.is_written:
            file.setdefault(RELEASES, {})[self.case] = counts
            COUNTS.write_text(as_text(file), encoding="utf-8")
            return
        most = {name: most_of(file, self.case, name) for name in counts}
        functions = {k: v.most_common(15) for k, v in found.items() if isinstance(v, Counter)}
        assert all(count <= most[name] for name, count in counts.items()), (
            f"{self.case}: {counts}, and the file has {most}. `make counts` rewrites it, if the "
            f"change is meant. The most frequent: {functions}"
        )


Counts = dict[str, dict[str, dict[str, int]]]
"""By releases and case."""
RELEASES = "Python {}.{}, torch {}.{}".format(
    *sys.version_info[:2], *torch.__version__.split(".")[:2]
)
OTHER_RELEASES = 1.25
"""How many times as many calls there may be with releases that the file does not have."""


def most_of(file: Counts, case: str, name: str) -> float:
    """The most calls of a case: those of these releases, or those of the others and a quarter."""
    own = file.get(RELEASES, {}).get(case)
    if own is not None:
        return own.get(name, 0)
    return OTHER_RELEASES * max(cases.get(case, {}).get(name, 0) for cases in file.values())


def as_text(file: Counts) -> str:
    """The file: a line for each case of each releases."""
    parts = []
    for releases, cases in sorted(file.items()):
        rows = (f"    {json.dumps(case)}: {json.dumps(cases[case])}" for case in sorted(cases))
        parts.append(f"  {json.dumps(releases)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Recorded:
    case = request.node.name.removeprefix("test_")
    return Recorded(case, request.config.getoption("--write-counts"))


RECIPES: dict[str, Any] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "block": recipes.Float8BlockScaling(),
}
MODELS = {"gelu": gelu, "swiglu": swiglu}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_warm_step_makes_few_calls(name: str, recipe: str, recorded: Recorded) -> None:
    count_step(MODELS[name](), recipe, recorded)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
def test_a_warm_step_over_quantized_parameters_makes_few_calls(
    recipe: str, recorded: Recorded
) -> None:
    with fuser.quantized_model_init(recipe=RECIPES[recipe]):
        model = swiglu()
    count_step(model, recipe, recorded)


def count_step(model: torch.nn.Module, recipe: str, recorded: Recorded) -> None:
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
    recorded(forward=there, backward=back, operations=operations.count)


# The backward has the recomputation, which is not recorded under delayed scaling: it has other
# scales by then. Both look whether a checkpoint is around them, in which plans keep everything.
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_warm_step_in_a_checkpoint_makes_few_calls(recipe: str, recorded: Recorded) -> None:
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
    for calls in (there, back):
        del calls["torch_private.py:frames"]  # those of the stack, which pytest makes deeper
    recorded(forward=there, backward=back)


# The first microbatch quantizes the weights, and later ones read what was kept.
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
def test_a_warm_microbatch_makes_few_calls(
    recipe: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def counted(is_first: bool) -> tuple[Counter[str], Counter[str]]:
        there = python_calls(lambda: forward(is_first))
        return there, python_calls(backward)

    for _ in range(WARM_STEPS):
        for is_first in (True, False, False):
            forward(is_first)
            backward()
    counted(True)
    counted(False)  # the first one reads the layout of what was kept
    again, back = counted(False)
    first, back_of_first = counted(True)
    most = max(back, back_of_first, key=Counter.total)
    recorded(first=first, again=again, backward=most)


# -- separate weights ---------------------------------------------------------------------------

EXPERTS = (8, 64)
OPERATIONS_OF_A_WEIGHT = 1
"""In backward: torch keeps a gradient by one."""


def experts(count: int) -> torch.nn.Module:
    options: dict[str, Any] = {"bias": False, "dtype": BF16, "device": "cpu"}
    return fuser.Sequential(
        fuser.GroupedLinear(count, H, 2 * F, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(count, F, H, **options),
    )


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    is_wgrad = b.dim() == 2
    return a.new_zeros(offs.shape[0], a.shape[0], b.shape[1]) if is_wgrad else a @ b[0]


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


def counts_of_experts(model: Any) -> list[tuple[Counter[str], int, int]]:
    """Of a warm forward and backward: the calls of this library, all calls, torch's operations."""
    count = model[0].num_groups
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
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_launch(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    few, many = (counts_of_experts(experts(count)) for count in EXPERTS)
    for is_backward, (some, others) in enumerate(zip(few, many, strict=True)):
        assert others[0].total() == some[0].total(), others[0]
        if sys.version_info < (3, 12):  # later ones also tell of len() and isinstance()
            assert others[1] == some[1]
        slope = OPERATIONS_OF_A_WEIGHT if is_backward else 0
        assert others[2] - some[2] <= slope * 2 * (EXPERTS[1] - EXPERTS[0])
    recorded(forward=few[0][0], backward=few[1][0], operations=few[0][2])


def test_a_warm_step_over_quantized_experts_makes_few_calls(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_launch(monkeypatch)
    with fuser.quantized_model_init(recipe=RECIPES["block"]):
        model = experts(EXPERTS[0])
    there, back = counts_of_experts(model)
    recorded(forward=there[0], backward=back[0])


# -- planning -------------------------------------------------------------------------------------


def test_planning_forty_ops_makes_few_calls(recorded: Recorded) -> None:
    """What they cost: ``benchmarks/planning.py``."""
    x = torch.randn(4, 8, requires_grad=True)
    fuser.Sequential(*feed_forward_ops(40)).plan(x)  # what the first plan of a process makes
    model, plans = fuser.Sequential(*feed_forward_ops(40)), []
    calls = python_calls(lambda: plans.append(model.plan(x)))
    (plan,) = plans
    assert len(plan.ops) == 40
    assert len(plan.forward) < 40
    recorded(calls=calls)
