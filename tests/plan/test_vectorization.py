"""What a plan says about the layout of a call's tensors, against what kernels then do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oracles
import pytest
import torch
from oracles import random_tensor
from pipeline_kernels import on_kernels
from torch.utils._python_dispatch import TorchDispatchMode

import fuser
from fuser import recipe as recipes
from fuser.cuda.launch import Kernel, Launch
from fuser.plan.plan import Note

BF16, F32 = torch.bfloat16, torch.float32
ROWS, COLUMNS = 32, 64


# -- what happens -----------------------------------------------------------------


class _Copies(TorchDispatchMode):
    """Counts the tensors that are copied because of how they lie, and no single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten.clone.default and args[0].numel() > 1
        return function(*args, **(kwargs or {}))


class _Seen:
    """The kernels that were launched, and whether one of them takes single elements."""

    def __init__(self) -> None:
        self.symbols: list[str] = []
        self.copies = 0

    @property
    def moves_single_elements(self) -> bool:
        return any(map(_is_unaligned, self.symbols))


def _is_unaligned(symbol: str) -> bool:
    name, _, arguments = symbol.removeprefix("fuser_").partition("<")
    if name == "norm":  # ... , in registers and by vectors, writes
        return arguments.endswith(("false, false>", "false, true>"))
    if name.startswith(
        "pointwise"
    ):  # ..., rows, vector, amax, and in backward whether y is written
        return arguments.split(", ")[-3 if name == "pointwise_backward" else -2] == "1"
    if name == "tiled":
        return re.search(r"Producer<.*, false>, fuser::\w+Store", arguments) is not None
    return name == "norm_backward_in_chunks" or (
        name in ("amax", "fp8_cast") and arguments.endswith("false>")
    )


@contextmanager
def seeing(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Seen]:
    """What kernels do inside."""
    seen = _Seen()
    call = Kernel.__call__

    def noted(kernel: Kernel, launch: Launch, *args: Any) -> None:
        seen.symbols.append(kernel.symbol)
        call(kernel, launch, *args)

    with monkeypatch.context() as patch, _Copies() as copies:
        patch.setattr(Kernel, "__call__", noted)
        yield seen
    seen.copies = copies.count


# -- layouts ----------------------------------------------------------------------


def _clean(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((ROWS, COLUMNS), dtype, 1)


def _transposed(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((COLUMNS, ROWS), dtype, 1).t()


def _every_other_column(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((ROWS, 2 * COLUMNS), dtype, 1)[:, ::2]


def _spaced(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((ROWS, 2 * COLUMNS), dtype, 1)[:, COLUMNS:]


def _oddly_spaced(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((ROWS, COLUMNS + 1), dtype, 1)[:, :COLUMNS]


def _spaced_by_half_a_run(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((ROWS, COLUMNS + 4), dtype, 1)[:, :COLUMNS]


def _odd_offset(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((ROWS * COLUMNS + 1,), dtype, 1)[1:].view(ROWS, COLUMNS)


def _sequence_first(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((4, ROWS // 4, COLUMNS), dtype, 1).transpose(0, 1)


def _channels_of_batches(dtype: torch.dtype) -> torch.Tensor:
    return random_tensor((4, ROWS // 4, 2 * COLUMNS), dtype, 1)[:, :, :COLUMNS]


LAYOUTS = (
    *(_clean, _transposed, _every_other_column, _spaced, _oddly_spaced, _odd_offset),
    *(_spaced_by_half_a_run, _sequence_first, _channels_of_batches),
)

LOSSY = fuser.activation_memory_budget(1, lossy_activation_inputs=True)
MXFP8 = recipes.MXFP8BlockScaling()
CURRENT = recipes.Float8CurrentScaling()
MODELS: dict[str, tuple[Callable[[], fuser.Sequential], Any]] = {
    "rmsnorm": (lambda: fuser.Sequential(fuser.RMSNorm(COLUMNS)), None),
    "layernorm of rows": (lambda: fuser.Sequential(fuser.LayerNorm((ROWS, COLUMNS))), None),
    "l2norm": (lambda: fuser.Sequential(fuser.L2Normalization()), None),
    "swiglu": (lambda: fuser.Sequential(fuser.SwiGLU()), None),
    "bias": (lambda: fuser.Sequential(fuser.Bias(COLUMNS)), None),
    "gelu, cached": (lambda: fuser.Sequential(fuser.GELU(cache_quantized_input=True)), None),
    "swiglu, rounded": (lambda: fuser.Sequential(fuser.SwiGLU(), memory_budget=LOSSY), None),
    "gelu and linear, rounded": (
        lambda: fuser.Sequential(fuser.GELU(), fuser.BasicLinear(COLUMNS, 32), memory_budget=LOSSY),
        None,
    ),
    "dropout": (lambda: fuser.Sequential(fuser.Dropout(0.5)), None),
    "chain": (lambda: fuser.Sequential(fuser.Bias(COLUMNS), fuser.GELU()), None),
    "mxfp8 linear": (lambda: fuser.Sequential(fuser.BasicLinear(COLUMNS, 32)), MXFP8),
    "fp8 linear": (lambda: fuser.Sequential(fuser.BasicLinear(COLUMNS, 32)), CURRENT),
    "fp8 block linear": (
        lambda: fuser.Sequential(fuser.BasicLinear(COLUMNS, 128)),
        recipes.Float8BlockScaling(),
    ),
    "mxfp8 norm and linear": (
        lambda: fuser.Sequential(fuser.RMSNorm(COLUMNS), fuser.BasicLinear(COLUMNS, 32)),
        MXFP8,
    ),
    "mxfp8 gelu and linear": (
        lambda: fuser.Sequential(fuser.GELU(), fuser.BasicLinear(COLUMNS, 32)),
        MXFP8,
    ),
}


def noted(notes: tuple[Note, ...], side: str) -> tuple[bool, bool]:
    """Whether a side's kernels read a copy, and whether they move one element at a time."""
    texts = [note.text for note in notes if note.side == side]
    return (
        any(text.startswith("copies ") for text in texts),
        any(text.startswith("moves one element at a time: ") for text in texts),
    )


def assert_says_what_kernels_do(
    model: fuser.Sequential,
    recipe: Any,
    x: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    *extras: torch.Tensor,
) -> None:
    """Hold the notes of a plan to the kernels that run, and to the copies that are made."""
    training = x.requires_grad
    with (
        on_kernels(),
        torch.set_grad_enabled(training),
        fuser.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        notes = model.plan(x, *extras, training=training).layout
        with seeing(monkeypatch) as forward:
            y = model(x, *extras)
    assert noted(notes, "forward") == (forward.copies > 0, forward.moves_single_elements)
    if training:
        with on_kernels(), seeing(monkeypatch) as backward:
            torch.autograd.grad(y, (x, *model.parameters()), torch.ones_like(y))
        assert noted(notes, "backward") == (backward.copies > 0, backward.moves_single_elements)


CASES = [
    *((name, BF16) for name in MODELS),
    *((name, F32) for name in ("rmsnorm", "chain", "fp8 linear", "mxfp8 norm and linear")),
]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_plan_says_what_kernels_then_do(
    name: str,
    layout: Callable[[torch.dtype], torch.Tensor],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, recipe = MODELS[name]
    if name == "layernorm of rows" and layout(dtype).dim() != 2:
        pytest.skip("it normalizes over both dimensions of a matrix.")
    model = oracles.randomize(make()).to(dtype)
    assert_says_what_kernels_do(model, recipe, layout(dtype).requires_grad_(), monkeypatch)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("layout", [_clean, _transposed, _spaced, _odd_offset])
@pytest.mark.parametrize("name", ["rmsnorm", "l2norm", "chain", "mxfp8 linear"])
def test_a_plan_says_what_kernels_then_do_with_what_autocast_casts(
    name: str,
    layout: Callable[[torch.dtype], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, recipe = MODELS[name]
    with torch.autocast("cpu", BF16):
        assert_says_what_kernels_do(
            oracles.randomize(make()), recipe, layout(F32).requires_grad_(), monkeypatch
        )


@pytest.mark.parametrize("layout", [_clean, _transposed, _spaced, _oddly_spaced, _odd_offset])
@pytest.mark.parametrize(
    "make",
    [
        lambda: fuser.Sequential(fuser.AddExtraInput()),
        lambda: fuser.Sequential(fuser.AddExtraInput(), fuser.RMSNorm(COLUMNS)),
        lambda: fuser.Sequential(fuser.AddExtraInput(), fuser.GELU()),
        lambda: fuser.Sequential(fuser.GELU(), fuser.AddExtraInput()),
    ],
)
def test_a_plan_says_what_kernels_then_do_with_an_extra_input(
    make: Callable[[], fuser.Sequential],
    layout: Callable[[torch.dtype], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = _clean(BF16).requires_grad_()
    assert_says_what_kernels_do(make(), None, x, monkeypatch, layout(BF16))
    assert_says_what_kernels_do(make(), None, x.detach(), monkeypatch, layout(BF16))


@pytest.mark.parametrize("layout", [_clean, _odd_offset, _channels_of_batches])
@pytest.mark.parametrize("make", [lambda: fuser.Dropout(0.5), lambda: fuser.RMSNorm(COLUMNS)])
def test_a_plan_says_what_kernels_then_do_after_a_reshape(
    make: Callable[[], fuser.BasicOperation],
    layout: Callable[[torch.dtype], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fuser.Sequential(fuser.Reshape((-1, COLUMNS)), make())
    assert_says_what_kernels_do(model, None, layout(F32).requires_grad_(), monkeypatch)


def test_a_reshape_that_copies_leaves_nothing_to_note() -> None:
    model = fuser.Sequential(fuser.Reshape((-1, COLUMNS)), fuser.RMSNorm(COLUMNS))
    assert plan_of(model, _sequence_first(F32)).layout == ()


def test_a_plan_says_what_kernels_then_do_with_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random_tensor((2 * ROWS + 1,), BF16, 1)
    for scales in (numbers[:ROWS], numbers[1 : ROWS + 1], numbers[: 2 * ROWS : 2]):
        model = fuser.Sequential(fuser.ScaledSwiGLU())
        assert_says_what_kernels_do(model, None, _clean(BF16), monkeypatch, scales)
        x = _clean(BF16).requires_grad_()
        assert_says_what_kernels_do(model, None, x, monkeypatch, scales)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("columns", [27, 28, 36, 40])
def test_a_plan_says_what_kernels_then_do_with_rows_of_an_odd_width(
    columns: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[tuple[fuser.Sequential, Any]] = [
        (fuser.Sequential(fuser.RMSNorm(columns)), None),
        (fuser.Sequential(fuser.Bias(columns), fuser.GELU()), None),
        (fuser.Sequential(fuser.BasicLinear(columns, 32)), CURRENT),
    ]
    if columns % 2 == 0:
        models.append((fuser.Sequential(fuser.SwiGLU()), None))
    if not training:
        models.append((fuser.Sequential(fuser.Quantize(), fuser.GELU()), CURRENT))
    for model, recipe in models:
        x = random_tensor((ROWS, columns), F32, 1).requires_grad_(training)
        assert_says_what_kernels_do(oracles.randomize(model), recipe, x, monkeypatch)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("layout", [_clean, _transposed, _odd_offset])
@pytest.mark.parametrize("shape", [(5, 64), (32, 27), (5, 40), (32, 64)], ids=str)
def test_a_plan_says_what_kernels_then_do_with_what_is_padded(
    shape: tuple[int, int], layout: Callable[[torch.dtype], torch.Tensor], monkeypatch: Any
) -> None:
    """Torch pads what arrives, whatever its layout; what is made on the way is written plainly."""
    rows, columns = shape
    x = layout(BF16)[:rows, :columns]
    for before in ((), (fuser.RMSNorm(columns),), (fuser.GELU(),)):
        model = oracles.randomize(fuser.Sequential(*before, fuser.Quantize()).to(BF16))
        assert_says_what_kernels_do(model, MXFP8, x, monkeypatch)


def plan_of(model: fuser.Sequential, *inputs: torch.Tensor) -> fuser.FusionPlan:
    """The plan of an evaluation where kernels run."""
    with on_kernels():
        return model.plan(*inputs, training=False)


# -- what is said -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (_transposed, "copies the input first: its rows are not contiguous (shape (32, 64), "
         "strides (1, 32))."),
        (_odd_offset, "moves one element at a time: the input begins 2 bytes after a multiple of "
         "16."),
        (_oddly_spaced, "moves one element at a time: the input has its rows 130 bytes apart, no "
         "multiple of 16."),
    ],
)  # fmt: skip
def test_a_note_says_which_tensor_what_happens_and_why(
    layout: Callable[[torch.dtype], torch.Tensor], text: str
) -> None:
    model = fuser.Sequential(fuser.RMSNorm(COLUMNS)).to(BF16)
    plan = plan_of(model, layout(BF16))
    assert plan.layout == (Note((0,), text, side="forward"),)
    heading, line = str(plan).splitlines()[-5:-3]
    assert heading == "inputs that kernels cannot read in 16-byte vectors"
    assert line == f"  forward  RMSNorm over 0 {text}"
    assert json.loads(json.dumps(plan.to_dict()))["layout"] == [
        {"side": "forward", "fusion": None, "ops": [0], "text": text}
    ]


def test_a_tensor_of_whole_rows_that_is_copied_is_not_said_to_have_others() -> None:
    (note,) = plan_of(fuser.Sequential(fuser.RMSNorm(COLUMNS)), _sequence_first(F32)).layout
    assert note.text == (
        "copies the input first: it is not contiguous (shape (8, 4, 64), strides (64, 512, 1))."
    )


def test_rows_of_an_odd_width_are_noted_also_where_only_their_halves_are() -> None:
    odd = plan_of(fuser.Sequential(fuser.RMSNorm(27)), torch.empty(4, 27))
    halves = plan_of(fuser.Sequential(fuser.SwiGLU()), torch.empty(4, 28, dtype=BF16))
    even = plan_of(fuser.Sequential(fuser.SwiGLU()), torch.empty(4, 32, dtype=BF16))
    (note,) = odd.layout
    assert "the input is read in rows of 27 float32, no multiple of 4" in note.text
    (note,) = halves.layout
    assert "the input is read in rows of 14 bfloat16, no multiple of 8" in note.text
    assert even.layout == ()


def test_a_note_is_in_what_is_returned_and_not_in_what_is_kept() -> None:
    model = fuser.Sequential(fuser.RMSNorm(COLUMNS))
    with on_kernels():
        turned, clean = model.plan(_transposed(F32)), model.plan(_clean(F32))
    assert turned.layout
    assert clean.layout == ()
    assert model.plans == (clean,)
    assert "16-byte vectors" not in str(clean)


def test_extra_inputs_and_those_that_a_channel_brings_are_looked_at() -> None:
    turned = _transposed(F32)
    added = plan_of(
        fuser.Sequential(fuser.AddExtraInput(), fuser.RMSNorm(COLUMNS)), _clean(F32), turned
    )
    scaled = plan_of(fuser.Sequential(fuser.ScaledSReLU()), _clean(F32), turned[:, 0])
    residual = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        fuser.RMSNorm(COLUMNS),
        fuser.AddExtraInput().set_extra_input_channel(0, "r"),
    )
    passed = plan_of(residual, turned)
    assert [note.text.partition(":")[0] for note in added.layout] == ["copies extra input 0 first"]
    assert scaled.layout == ()
    assert [(note.ops, note.text.partition(":")[0]) for note in passed.layout] == [
        ((1,), "copies the input first"),
        ((2,), "copies the input first"),
    ]


def test_what_backward_computes_again_is_read_in_its_own_width() -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.BasicLinear(COLUMNS, 33))
    with on_kernels():
        plan = model.plan(_clean(F32).requires_grad_())
    assert [kept.rebuilt_by for kept in plan.kept if kept.name == "input"] == [(), (0,)]
    assert plan.layout == ()


def test_ops_of_a_second_pipeline_are_counted_on() -> None:
    model = fuser.Sequential(fuser.GELU(), torch.nn.Flatten(1, 2), fuser.RMSNorm(27))
    plan = plan_of(model, torch.empty(4, 3, 9))
    assert {note.ops for note in plan.layout} == {(0,), (1,)}


def test_tensors_on_meta_have_strides_and_no_address() -> None:
    model = fuser.Sequential(fuser.RMSNorm(COLUMNS))
    x = torch.empty(COLUMNS, ROWS + 1, device="meta")
    assert [n.text[:12] for n in plan_of(model, x.t()[1:]).layout] == ["copies the i"]
    odd_offset = torch.empty(ROWS * COLUMNS + 1, device="meta")[1:].view(ROWS, COLUMNS)
    assert plan_of(model, odd_offset).layout == ()


def test_nothing_is_said_where_torch_reads() -> None:
    linear = fuser.Sequential(fuser.BasicLinear(COLUMNS, COLUMNS), fuser.AddExtraInput())
    for x in (_transposed(F32), _odd_offset(F32), _sequence_first(F32).flatten(0, 1)):
        assert fuser.Sequential(fuser.RMSNorm(COLUMNS)).plan(x).layout == ()  # no kernels here
        assert plan_of(linear, x, x).layout == ()
