"""Plans as people and programs see them: frozen values, text, dict, DOT, and what keys hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

import models
import pytest
import torch
from one_launch_experts import one_by_one
from said import said
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fuser
from fuser.basic_ops.grouped_products import quantizes_groups_of
from fuser.formats import GROUP_TILE, tile_count
from fuser.op import FusedOperation
from fuser.plan.plan import Baseline, Channel, Kept, ModuleCall, Node, Note, Refusal, merged
from fuser.report.text import format_bytes, format_flops, format_share, format_time
from fuser.specs import TensorSpec


def mlp(width: int = 8, **options: Any) -> fuser.Sequential:
    return models.mlp(width, 2 * width, randomized=False, **options)


def residual(width: int = 8, **options: Any) -> fuser.Sequential:
    return models.residual_block(width, width, randomized=False, **options)


class _Choosy(FusedOperation):
    """Refuses with a sentence that a test can look for."""

    window = (fuser.BasicLinear, fuser.Bias)
    side = "forward"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None

    @classmethod
    def refuses(cls, *ops: Any, key: fuser.PlanKey) -> str | None:
        return "it is choosy."


class _RealOps(TorchDispatchMode):
    """Collects every operator that makes or changes a tensor with data."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and not t.is_meta for t in tree_leaves(result)):
            self.seen.append(str(func))
        return result


# -- values -----------------------------------------------------------------------


def test_plans_steps_and_refusals_are_frozen() -> None:
    plan = mlp(fusions=(*fuser.FUSIONS, _Choosy)).plan(torch.empty(2, 8))
    for value in (plan, plan.forward[0], plan.backward[0], plan.refusals[0], plan.key):
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
    for part in (plan.ops, plan.forward, plan.backward, plan.refusals, plan.forward[0].ops):
        assert isinstance(part, tuple)


def test_steps_of_a_known_pipeline() -> None:
    plan = mlp().plan(torch.empty(2, 8, requires_grad=True))
    assert plan.ops == ("BasicLinear", "Bias", "GELU", "BasicLinear", "Bias")
    assert [(step.ops, step.fusion) for step in plan.forward] == [
        ((0, 1, 2), "ForwardLinearBiasActivation"),
        ((3, 4), "ForwardLinearBiasActivation"),
    ]
    assert [(step.ops, step.fusion) for step in plan.backward] == [
        ((4,), None),
        ((3,), None),
        ((1, 2), "BackwardActivationBias"),
        ((0,), None),
    ]
    assert [step.kernel for step in plan.forward] == ["addmm, gelu", "addmm"]
    assert [step.ops for step in plan.unfused_forward] == [(i,) for i in range(5)]
    assert [step.ops for step in plan.unfused_backward] == [(i,) for i in reversed(range(5))]
    assert all(step.fusion is None for step in plan.unfused_forward + plan.unfused_backward)


@pytest.mark.parametrize("make", [mlp, residual])
@pytest.mark.parametrize("training", [True, False])
def test_forward_runs_from_the_first_op_and_backward_from_the_last(
    make: Callable[[], fuser.Sequential], training: bool
) -> None:
    plan = make().plan(torch.empty(2, 8, requires_grad=True), training=training)
    everything = list(range(len(plan.ops)))
    for fused in (True, False):
        assert [i for step in plan.steps("forward", fused=fused) for i in step.ops] == everything
        backward = [i for step in plan.steps("backward", fused=fused) for i in reversed(step.ops)]
        assert backward == (everything[::-1] if training else [])


def test_backward_ends_where_nothing_earlier_needs_a_gradient() -> None:
    model = mlp()
    for parameter in (model[0].weight, model[0].bias):
        parameter.requires_grad_(False)
    plan = model.plan(torch.empty(2, 8))
    assert [step.ops for step in plan.backward] == [(4,), (3,)]
    assert [step.ops for step in plan.unfused_backward] == [(4,), (3,)]
    assert plan.backward[-1].kernel == "wgrad mm"
    refused = [r for r in plan.refusals if r.side == "backward"]
    assert refused == []


def test_nothing_is_cheaper_than_it_would_be_unfused() -> None:
    plan = residual().plan(torch.empty(2, 8, requires_grad=True))
    for side in ("forward", "backward"):
        fused, plain = (
            sum(step.microseconds for step in plan.steps(side, fused=fused))
            for fused in (True, False)
        )
        assert 0 < fused <= plain
    assert len(plan.forward) < len(plan.unfused_forward)


def test_evaluation_has_no_backward() -> None:
    plan = mlp().plan(torch.empty(2, 8), training=False)
    assert plan.backward == plan.unfused_backward == ()
    assert not plan.key.requires_grad
    assert "backward: nothing needs a gradient" in str(plan)
    with torch.no_grad():
        assert mlp().plan(torch.empty(2, 8), training=True).backward != ()


def test_every_refusal_names_its_window_and_its_reason() -> None:
    model = mlp(fusions=(*fuser.FUSIONS, _Choosy))
    plan = model.plan(torch.empty(2, 8))
    choosy = [refusal for refusal in plan.refusals if refusal.fusion == "_Choosy"]
    assert [(r.side, r.ops, r.reason) for r in choosy] == [
        ("forward", (0, 1), "it is choosy."),
        ("forward", (3, 4), "it is choosy."),
    ]


class _Joint(FusedOperation):
    """A joint fusion of four kernels: dearer than what it stands for."""

    window = (fuser.GELU, fuser.SiLU)
    side: ClassVar[Any] = "joint"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None

    @classmethod
    def kernels(cls, *ops: Any, side: str, key: fuser.PlanKey) -> tuple[tuple[str, int], ...]:
        return (("first", 1), ("wasteful", 0), ("wasteful", 0), ("second", 1))


def test_a_possible_window_that_lost_is_listed_whatever_its_side() -> None:
    class Forward(_Joint):
        side = "forward"

    class Backward(_Joint):
        side = "backward"

    for fusion in (Forward, Backward, _Joint):
        model = fuser.Sequential(fuser.GELU(), fuser.SiLU(), fusions=(fusion,))
        plan = model.plan(torch.empty(2, 8, requires_grad=True))
        assert all(step.fusion is None for step in plan.forward + plan.backward)
        found = [(r.fusion, r.side, r.ops) for r in plan.refusals]
        assert found == [(fusion.__name__, fusion.side, (0, 1))], f"side {fusion.side}"
        assert re.search(said("cover-chosen-us-cheaper"), plan.refusals[0].reason)


# -- planning runs nothing ---------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_a_meta_tensor_gives_the_plan_of_a_real_one(training: bool) -> None:
    for make in (mlp, residual):
        model = make()
        x = torch.randn(3, 8, requires_grad=True)
        stand_in = x.detach().to("meta").requires_grad_()
        assert model.plan(stand_in, training=training) == model.plan(x, training=training)
        assert make().plan(stand_in, training=training) == model.plan(x, training=training)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_planning_runs_nothing(device: str) -> None:
    model = fuser.Sequential(*residual(), torch.nn.Linear(8, 8), *mlp())
    x = torch.empty(2, 8, device=device, requires_grad=True)
    before = torch.get_rng_state()
    with _RealOps() as watch:
        model.plan(x)
        model.plan(x, training=False)
    assert watch.seen == []
    assert torch.equal(torch.get_rng_state(), before)


def test_planning_does_not_make_deferred_parameters() -> None:
    model = fuser.Sequential(
        fuser.LayerNorm(8, device="meta"), fuser.Linear(8, 8, device="meta"), fuser.GELU()
    )
    x = torch.randn(2, 8)
    plan = model.plan(x)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.plan(x.to("meta")) == plan
    model(x)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.plans == (plan,)


def test_planning_then_running_plans_once() -> None:
    model = mlp()
    plan = model.plan(torch.empty(5, 8, device="meta"))
    assert model.plans == (plan,)
    model(torch.randn(2, 3, 8))
    assert model.plans == (plan,)
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert len(model.plans) == 2
    assert model.plans[1] == model.plan(torch.empty(1, 8), training=False)


@pytest.mark.parametrize(
    "shape", [(8,), (1, 8), (7, 8), (2, 3, 8), (4, 1, 2, 8), (0, 8), (2, 0, 8)]
)
def test_the_number_of_tokens_changes_nothing(shape: tuple[int, ...]) -> None:
    expected = residual().plan(torch.empty(2, 8, requires_grad=True))
    assert residual().plan(torch.empty(shape, requires_grad=True)) == expected


@pytest.mark.parametrize("shape", [(8,), (7, 8), (0, 8), (2, 0, 8)])
def test_the_number_of_tokens_changes_nothing_with_extra_inputs(shape: tuple[int, ...]) -> None:
    def plan(shape: tuple[int, ...]) -> fuser.FusionPlan:
        model = fuser.Sequential(
            fuser.Linear(8, 8), fuser.AddExtraInput(), fuser.RMSNorm(8), fuser.ScaledSwiGLU()
        )
        return model.plan(torch.empty(shape), torch.empty(shape), torch.empty(shape[:-1]))

    assert plan(shape) == plan((3, 8))


# -- text ---------------------------------------------------------------------------


def test_text_says_what_runs_what_it_moves_and_what_was_refused() -> None:
    model = residual(fusions=(*fuser.FUSIONS, _Choosy))
    plan = model.plan(torch.empty(2, 8, requires_grad=True))
    lines = str(plan).splitlines()
    assert_a_line_holds(lines, "8 ops", "float32 on cpu", "training", "no recipe")
    assert_a_line_holds(lines, "'residual'", "op 0", "op 7")
    listed = " ".join(str(plan).split())
    for index, name in enumerate(plan.ops):
        assert f"{index} {name}" in listed
    for side in ("forward", "backward"):
        steps = plan.steps(side)
        for step in steps:
            span = f"{step.ops[0]}-{step.ops[-1]}" if len(step.ops) > 1 else str(step.ops[0])
            name = step.fusion or plan.ops[step.ops[0]]
            numbers = (f"{step.bytes_per_token:.0f} B", f"{step.microseconds:.1f}")
            assert_a_line_holds(lines, f" {span} ", name, step.kernel, *numbers)
        moved = f"{sum(step.bytes_per_token for step in steps):.0f} B"
        time = f"{sum(step.microseconds for step in steps):.1f} us"
        assert_a_line_holds(lines, f"{len(steps)} steps", moved, time)
    assert len(plan.refusals) >= 3
    for refusal in plan.refusals:
        span = f"{refusal.ops[0]}-{refusal.ops[-1]}"
        assert_a_line_holds(lines, refusal.side, refusal.fusion, span, refusal.reason)


def assert_a_line_holds(lines: list[str], *words: str) -> None:
    """That one line has all ``words`` in this order."""
    pattern = ".*".join(map(re.escape, words))
    assert any(re.search(pattern, line) for line in lines), (words, lines)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_text_says_what_is_before_emulated_products() -> None:
    x = torch.empty(32, 64, requires_grad=True)
    model = fuser.Sequential(fuser.Linear(64, 64))
    said = "An emulated product dequantizes its operands before it."
    assert said not in str(model.plan(x))
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        assert str(model.plan(x)).endswith(said)


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_text_says_of_either_side_what_its_steps_do(side: str) -> None:
    """The links of a column parallel linear carry bytes in backward alone, those of a row's not."""
    plan = mlp().plan(torch.empty(2, 8, requires_grad=True))
    link = "Bytes sent to other ranks take the time of the link, without overlap."
    emulated = "An emulated product dequantizes its operands before it."
    for change, sentence in (
        ({"link_bytes_per_token": 4.0}, link),
        ({"kernel": "mm (emulated)"}, emulated),
    ):
        first, *rest = plan.steps(side)
        steps = {side: (dataclasses.replace(first, **change), *rest)}
        assert sentence not in str(plan).splitlines()
        assert sentence in str(dataclasses.replace(plan, **steps)).splitlines()


def test_text_says_what_is_kept_of_each_op() -> None:
    kept = (
        Kept((0,), "input", 12.0, reason="it is the first"),
        Kept((0,), "weight", 0.0, 2048),
        Kept((1,), "input", 0.0),
        Kept((2,), "input", 6.0, rounded_to="FP8"),
        Kept((3,), "weight", 0.0),
        Kept((3,), "input", 0.0, rebuilt_by=(1, 2)),
    )
    plan = mlp().plan(torch.empty(2, 8, requires_grad=True))
    line = "kept for backward: 18 B a token"
    assert dataclasses.replace(plan, kept=(kept[0], kept[3])).kept_line() == line
    plan = dataclasses.replace(plan, kept=kept)
    assert plan.kept_line() == f"{line}, and 2.0 kB of quantized weights"
    assert plan.to_dict()["sentences"]["kept"] == [
        plan.kept_line(),
        "0 BasicLinear: input 12 B (it is the first), weight 2.0 kB",
        "1 Bias: input as above",
        "2 GELU: input 6 B rounded to FP8",
        "3 BasicLinear: weight quantized again, input computed again by 1-2",
    ]
    assert f'label="{plan.kept_line()}"' in plan.to_dot()
    assert "label=" not in dataclasses.replace(plan, kept=()).to_dot().split("subgraph")[0]


def test_text_and_dict_say_what_ops_are_and_what_they_compute() -> None:
    model = fuser.Sequential(fuser.Linear(8, 16), fuser.MakeExtraOutput(), fuser.SwiGLU())
    plan = model.plan(torch.empty(2, 8))
    data = plan.to_dict()
    assert data["wholes"] == ["Linear", "Linear", "", ""]
    assert data["extra_outputs"] == [0, 0, 1, 0]
    assert data["input_requires_grad"] is False
    plan = model.plan(torch.empty(2, 8, requires_grad=True))
    assert plan.to_dict()["input_requires_grad"] is True
    for side, shape_of_linear, shape_of_activation in (
        ("forward", "8 -> 16", "16 -> 8"),
        ("backward", "16 -> 8", "8 -> 16"),
    ):
        by_op = {op: step for step in plan.steps(side, fused=False) for op in step.ops}
        shapes = [plan.shape_of(by_op[op], side) for op in (0, 3)]
        assert shapes == [shape_of_linear, shape_of_activation]
        unfused = dataclasses.replace(plan, **{side: plan.steps(side, fused=False)})
        rows = {line.split()[1]: line.split()[-3] for line in unfused.side_lines(side)[1:-1]}
        assert [rows[name] == "-" for name in ("BasicLinear", "SwiGLU")] == [False, True]


def test_text_says_where_quantized_tensors_pass_a_cut_if_some_do() -> None:
    plan = mlp().plan(torch.empty(2, 8, requires_grad=True))
    for takes_quantized in (False, True):
        nodes = (Node((0, 1)), Node((2, 3, 4), is_cut=True, takes_quantized=takes_quantized))
        for waiting in ("", "a hook waits"):
            found = dataclasses.replace(plan, nodes=nodes, waiting=waiting).node_lines()
            assert len(found) == 1 + (takes_quantized and bool(waiting))
            assert "cut before op 2" in found[0]


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_labels_of_tensors_have_the_formats_in_which_steps_write_them(recipe: str) -> None:
    model = fuser.Sequential(
        fuser.RMSNorm(32), fuser.Linear(32, 64), fuser.SwiGLU(), fuser.Linear(32, 16)
    )
    x = torch.empty(16, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with fuser.autocast(recipe=fuser.recipe.recipe_named(recipe)):
        plan = model.to("meta", torch.bfloat16).plan(x, device="h200")
    for side in ("forward", "backward"):
        formats = {}
        for step in plan.steps(side):
            if step.emits is not None:
                gap = step.ops[-1] + 1 if side == "forward" else step.ops[0]
                formats[gap] = [str(step.emits.format)]
        labels = [plan.gap_labels(side, gap)[1:] for gap in range(len(plan.ops) + 1)]
        assert labels == [formats.get(gap, []) for gap in range(len(plan.ops) + 1)]
        assert formats
        assert any(len(step.ops) > 1 and step.emits for step in plan.steps(side))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (format_bytes(999.4), "999 B"),
        (format_bytes(999.6), "1.0 kB"),
        (format_bytes(999_949), "999.9 kB"),
        (format_bytes(999_951), "1.0 MB"),
        (format_bytes(1e15), "1000.0 TB"),  # there is no larger unit
        (format_time(999.94), "999.9 us"),
        (format_time(999.96), "1.0 ms"),
        (format_time(999_960), "1.0 s"),
        (format_flops(999.4), "999"),
        (format_flops(999.6), "1.0 k"),
        (format_share(0.00123), "0.12%"),
        (format_share(0.0996), "10%"),
        (format_share(0.9949), "99%"),
        (format_share(0.9951), "100%"),
        (format_share(1.0), "100%"),
    ],
)
def test_a_number_that_is_rounded_up_has_the_unit_of_its_text_and_no_exponent(
    number: str, text: str
) -> None:
    assert number == text


def test_text_keeps_large_numbers_short() -> None:
    text = str(mlp(4096).plan(torch.empty(2, 4096, device="meta")))
    assert re.search(r"\d+\.\d kB", text)
    assert all(len(line) < 160 for line in text.splitlines())


def experts(recipe: Any = None, **options: Any) -> fuser.FusionPlan:
    """The plan of a layer of 4 experts for 512 tokens and 2 experts a token, in bf16."""
    sizes = {"bias": False, "dtype": torch.bfloat16, "device": "cpu"}
    dispatch = fuser.MoeDispatch(4, **options)
    for index, channel in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    layer = fuser.Sequential(
        dispatch,
        fuser.GroupedLinear(4, 64, 256, **sizes).set_extra_input_channel(0, "sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        fuser.GroupedLinear(4, 128, 64, **sizes).set_extra_input_channel(0, "sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    )
    x = torch.empty(512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    indices = torch.empty(512, 2, dtype=torch.int64, device="meta")
    probs = torch.empty(512, 2, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        return layer.plan(x, indices, probs)


def notes_of(plan: fuser.FusionPlan, *ops: int) -> str:
    return " ".join(note.text for note in plan.notes if note.ops == ops)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a GPU on which all groups are one launch."""

    def runs_at_once(self: fuser.GroupedLinear, key: fuser.PlanKey) -> bool:
        return quantizes_groups_of(key.recipe)

    monkeypatch.setattr(fuser.GroupedLinear, "runs_at_once", runs_at_once)


def test_text_has_notes_only_if_an_op_has_some() -> None:
    assert "\nnotes\n" not in str(mlp().plan(torch.empty(2, 8)))
    text = " ".join(str(experts()).split("\nnotes\n")[1].split("\n\n")[0].split())
    both = "GroupedLinear over 1, 3: 4 groups, one after the other; split sizes are read on the"
    assert text.count("GroupedLinear over") == 1
    assert both in text
    assert "padded" not in text
    assert "MoeDispatch over 0: 4 experts; no fixed capacity" in text


def test_a_note_has_the_capacity_of_a_dispatch() -> None:
    assert "a capacity of 96 rows" in notes_of(experts(capacity=96), 0)
    assert 'drop_policy "probs"' in notes_of(experts(capacity=96, drop_policy="probs"), 0)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_notes_have_the_padding_of_groups_and_its_cost(at_once: None) -> None:
    plan = experts(fuser.recipe.Float8CurrentScaling())
    rows = 2 * plan.nominal_tokens
    said = notes_of(plan, 1)
    assert "4 groups, one launch for all; split sizes are not read on the host" in said
    assert f"a multiple of 128 rows: about 64 more a group, of {rows} rows 1.6% more." in said
    largest = tile_count(rows, 4) * GROUP_TILE
    assert largest == (rows + 127 * 4) // 128 * 128
    assert f"up to T + 127 x 4 rows: here {largest}, {100 * (largest / rows - 1):.1f}%" in said
    assert notes_of(plan, 1) == notes_of(plan, 3)
    assert "rows stay padded between the products" in notes_of(plan, 0, 1, 2, 3)
    assert "padded" not in notes_of(experts(), 1)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_notes_of_groups_that_are_quantized_alone_have_the_padding_of_the_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_by_one(monkeypatch)
    plan = experts(fuser.recipe.NVFP4BlockScaling())
    said = notes_of(plan, 1)
    assert "split sizes are read on the host" in said
    assert "a multiple of 16 rows: about 8 more a group" in said
    assert "T + 127" not in said
    assert notes_of(plan, 1, 2, 3) == ""
    assert "padded" not in notes_of(experts(fuser.recipe.Float8RowwiseScaling()), 1)


OWN = "The bits of a row depend on that row and its group alone"
SHARED = "The bits of a row may depend on other rows: its"
BITS = {
    "none": (None, f"{OWN}."),
    "rowwise": (fuser.recipe.Float8RowwiseScaling(), f"{OWN}."),
    "mxfp8": (fuser.recipe.MXFP8BlockScaling(), f"{OWN}."),
    "block": (fuser.recipe.Float8BlockScaling(), f"{OWN}."),
    "delayed": (fuser.recipe.DelayedScaling(), f"{OWN}, and on scales of earlier steps."),
    "rows": (
        fuser.recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        f"{SHARED} input shares a scale with 127 rows of its group.",
    ),
    "rows of gradients": (
        fuser.recipe.Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
        f"{SHARED} gradient shares a scale with 127 rows of its group.",
    ),
    "current": (
        fuser.recipe.Float8CurrentScaling(),
        f"{SHARED} input shares a scale with all rows of its group, and its gradient shares a "
        "scale with all rows of its group.",
    ),
    "nvfp4": (
        fuser.recipe.NVFP4BlockScaling(backward_override="high_precision"),
        f"{SHARED} input shares a scale with all rows of its group.",
    ),
}


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize(("recipe", "said"), BITS.values(), ids=BITS)
def test_a_note_says_what_the_bits_of_a_row_depend_on(recipe: Any, said: str) -> None:
    assert notes_of(experts(recipe), 1).endswith(said)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_long_list_of_kernels_has_several_lines(at_once: None) -> None:
    plan = experts(fuser.recipe.MXFP8BlockScaling())
    lines = str(plan).split("\nnotes")[0].splitlines()
    assert max(map(len, lines)) < 140
    assert max(len(step.kernel) for step in plan.backward) > 160
    printed = " ".join(" ".join(lines).split())
    words = [word for step in plan.forward for word in step.kernel.split(", ")]
    assert all(word in printed for word in words)


def test_a_channel_of_integers_has_no_gradient() -> None:
    has = {channel.name: channel.has_gradient for channel in experts().channels}
    assert has == {"sizes": False, "probs": True, "rows": False}


def test_text_is_an_ipython_block() -> None:
    plan = mlp().plan(torch.empty(2, 8))
    assert plan._repr_html_().startswith("<pre>Fusion plan of 5 ops")


# -- dict ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, residual])
def test_the_dict_is_json_and_holds_the_plan(make: Callable[..., fuser.Sequential]) -> None:
    plan = make(fusions=(*fuser.FUSIONS, _Choosy)).plan(torch.empty(2, 8, requires_grad=True))
    data = json.loads(json.dumps(plan.to_dict()))
    assert data == plan.to_dict()
    for side in ("forward", "backward", "unfused_forward", "unfused_backward"):
        rebuilt = tuple(fuser.Step(**{**step, "ops": tuple(step["ops"])}) for step in data[side])
        assert rebuilt == getattr(plan, side)
    refusals = (fuser.Refusal(**{**r, "ops": tuple(r["ops"])}) for r in data["refusals"])
    assert tuple(refusals) == plan.refusals
    assert tuple(Channel(**channel) for channel in data["channels"]) == plan.channels
    assert tuple(data["ops"]) == plan.ops
    assert tuple(data["activation_bytes"]) == plan.activation_bytes
    assert data["nominal_tokens"] == plan.nominal_tokens
    assert data["key"] == plan.key.describe()


def test_changing_the_dict_leaves_the_plan_alone() -> None:
    plan = residual().plan(torch.empty(2, 8))
    before = plan.to_dict()
    changed = plan.to_dict()
    changed["forward"][0]["kernel"] = "changed"
    changed["channels"][0]["name"] = "changed"
    changed["ops"].clear()
    assert plan.to_dict() == before


# -- DOT ------------------------------------------------------------------------------

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[A-Za-z_0-9]+|[{}\[\];=,]|\S')


def parsed_dot(text: str) -> tuple[dict[str, str], list[tuple[str, str, str]], int]:
    """Nodes with labels, edges with labels, and clusters of a DOT text; checks its structure."""
    tokens = TOKEN.findall(text)
    # What no pattern but the last takes is an unbalanced quote or a stray character.
    assert not [token for token in tokens if token in ('"', "\\")], text
    assert tokens[:3] == ["digraph", "plan", "{"]
    assert tokens[-1] == "}"
    nodes: dict[str, str] = {}
    edges: list[tuple[str, str, str]] = []
    depth = clusters = 0
    statement: list[str] = []
    for token in tokens[2:]:
        if token in "{};":
            depth += {"{": 1, "}": -1}.get(token, 0)
            clusters += token == "{" and statement[:1] == ["subgraph"]
            if token == ";":
                _read(statement, nodes, edges)
            statement = []
            assert depth >= 0
            continue
        statement.append(token)
    assert depth == 0
    return nodes, edges, clusters


def _read(statement: list[str], nodes: dict[str, str], edges: list[tuple[str, str, str]]) -> None:
    """Note one statement: ``a [label=..]``, ``a -> b [label=..]``, or an attribute."""
    if len(statement) == 3 and statement[1] == "=":
        return
    label = ""
    if "[" in statement:
        attributes = statement[statement.index("[") + 1 :]
        assert attributes[-1] == "]", statement
        if attributes[:2] == ["label", "="]:
            label = json.loads(attributes[2])
    if statement[1] == "->":
        edges.append((statement[0], statement[2], label))
    elif statement[0] != "node":
        assert statement[0] not in nodes, f"node {statement[0]} stands in two clusters"
        nodes[statement[0]] = label


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [mlp, residual])
def test_dot_shows_every_op_every_step_and_every_tensor(
    make: Callable[[], fuser.Sequential], training: bool
) -> None:
    plan = make().plan(torch.empty(2, 8, requires_grad=True), training=training)
    nodes, edges, clusters = parsed_dot(plan.to_dot())
    count = len(plan.ops)
    expected = {f"f{i}": f"{i} {name}" for i, name in enumerate(plan.ops)}
    for line in plan.to_dict()["sentences"]["kept"][1:]:
        op, text = line.split(": ", 1)
        expected[f"f{op.split()[0]}"] += f"\nfor backward: {text}"
    assert any("for backward: " in label for label in expected.values()) == training
    if training:
        expected |= {f"b{i}": f"{i} {name}" for i, name in enumerate(plan.ops)}
    assert nodes == expected
    assert clusters == len(plan.forward) + len(plan.backward)
    assert all(a in nodes and b in nodes for a, b, _ in edges)
    line = [(a, b) for a, b, label in edges if label.endswith("/token")]
    wanted = [(f"f{i}", f"f{i + 1}") for i in range(count - 1)]
    if training:
        wanted += [(f"b{i + 1}", f"b{i}") for i in reversed(range(count - 1))]
    assert line == wanted
    for channel in plan.channels:
        assert (f"f{channel.producer}", f"f{channel.consumer}", channel.name) in edges
    for step in plan.forward:
        if step.fusion is not None:
            assert step.fusion in plan.to_dot()


AWKWARD_NAMES = ('a "quoted" name', "{braces}; [and] -> arrows", "back\\slash", "\\")


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_dot_survives_a_channel_of_any_name(name: str) -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, name),
        fuser.GELU(),
        fuser.AddExtraInput().set_extra_input_channel(0, name),
    )
    plan = model.plan(torch.empty(2, 8))
    nodes, edges, _ = parsed_dot(plan.to_dot())
    assert len(nodes) == 3
    assert ("f0", "f2", name) in edges


def test_drawing_into_an_unknown_format_is_refused(tmp_path: Any) -> None:
    plan = mlp().plan(torch.empty(2, 8))
    with pytest.raises(fuser.InputError, match=said("draw-picture-drawn", None, "'plan.jpeg2000'")):
        plan.draw(tmp_path / "plan.jpeg2000")
    assert list(tmp_path.iterdir()) == []


# -- several pipelines -----------------------------------------------------------------


def mixed() -> fuser.Sequential:
    """A pipeline of 5 basic ops, a plain module, a pipeline of 8, a plain one, one of 1."""
    return fuser.Sequential(
        *mlp(), torch.nn.Linear(8, 8), *residual(), torch.nn.Tanh(), fuser.GELU()
    )


def test_plans_of_several_pipelines_are_merged_with_running_indices() -> None:
    model = mixed()
    x = torch.empty(2, 8, requires_grad=True)
    plan = model.plan(x)
    parts = [mlp().plan(x), residual().plan(x), fuser.Sequential(fuser.GELU()).plan(x)]
    shifts = (0, 5, 13)
    assert plan.ops == parts[0].ops + parts[1].ops + parts[2].ops

    def moved(steps: tuple[fuser.Step, ...], by: int) -> tuple[fuser.Step, ...]:
        return tuple(dataclasses.replace(s, ops=tuple(i + by for i in s.ops)) for s in steps)

    for fused in (True, False):
        forward = [
            moved(p.steps("forward", fused=fused), s) for p, s in zip(parts, shifts, strict=True)
        ]
        backward = [
            moved(p.steps("backward", fused=fused), s) for p, s in zip(parts, shifts, strict=True)
        ]
        assert plan.steps("forward", fused=fused) == sum(forward, ())
        assert plan.steps("backward", fused=fused) == sum(reversed(backward), ())
    assert plan.channels == (Channel("residual", 5, 12),)
    assert len(plan.activation_bytes) == len(plan.ops) + 1
    assert len(plan.key.ops) == len(plan.ops)
    assert {refusal.ops for refusal in plan.refusals} == {
        tuple(i + shift for i in refusal.ops)
        for part, shift in zip(parts, shifts, strict=True)
        for refusal in part.refusals
    }
    nodes, _, _ = parsed_dot(plan.to_dot())
    assert len(nodes) == 2 * (len(plan.ops) + 2)
    assert "14 ops" in str(plan)


def of_one_pipeline(first: int, last: int, waiting: str) -> fuser.FusionPlan:
    """A plan of three ops in which every field has something in it."""
    model = fuser.Sequential(fuser.Linear(first, last), fuser.GELU())
    plan = model.plan(torch.empty(2, first, device="meta", requires_grad=True), device="h200")
    (note,) = (Note((0, 1), f"of {first}", "Fused", "forward"),)
    nodes = (Node((0, 1)), Node((2,), is_cut=True, takes_quantized=True)) if waiting else ()
    fields = dict.fromkeys(("layout", "padding", "notes", "replays"), (note,))
    return dataclasses.replace(
        plan,
        **fields,
        refusals=(*plan.refusals, Refusal("Fused", "joint", (1, 2), f"of {first}")),
        nodes=nodes,
        waiting=waiting,
        extra_outputs=(0, first, 1),
        wholes=("Linear", "Linear", f"GELU{first}"),
    )


def test_a_plan_of_two_pipelines_has_all_that_is_in_theirs() -> None:
    one, other = of_one_pipeline(8, 16, ""), of_one_pipeline(16, 4, "a hook waits")
    calls = ModuleCall("Tanh", "it has hooks", (0,)), ModuleCall("Identity", "it is no op")
    channels = (Channel("x", 0, 5),)
    plan = merged((one, calls[0], other, calls[1]), channels)

    def moved(items: tuple[Any, ...], names: tuple[str, ...] = ("ops",)) -> tuple[Any, ...]:
        later = [{n: tuple(i + 3 for i in getattr(item, n)) for n in names} for item in items]
        pairs = zip(items, later, strict=True)
        return tuple(dataclasses.replace(item, **fields) for item, fields in pairs)

    why = "input of a pipeline: Tanh is called as a module, it has hooks"
    kept = [dataclasses.replace(k, reason=why) if "pipeline" in k.reason else k for k in other.kept]
    in_order = ["forward", "unfused_forward", "refusals", "layout", "padding", "notes", "replays"]
    expected: dict[str, Any] = {
        **{name: getattr(one, name) + moved(getattr(other, name)) for name in in_order},
        **{
            name: moved(getattr(other, name)) + getattr(one, name)
            for name in ("backward", "unfused_backward")
        },
        **{
            name: getattr(one, name) + getattr(other, name)
            for name in ("ops", "extra_outputs", "wholes")
        },
        **{
            name: getattr(one, name)[:-1] + getattr(other, name)
            for name in ("features", "activation_bytes", "grad_activation_bytes")
        },
        "kept": one.kept + moved(tuple(kept), ("ops", "rebuilt_by")),
        "nodes": (Node((0, 1, 2)), *moved(other.nodes)),
        "waiting": "a hook waits",
        "channels": channels,
        "modules": (
            ModuleCall("Tanh", "it has hooks", (3,), before=3),
            ModuleCall("Identity", "it is no op", before=6),
        ),
        "key": dataclasses.replace(one.key, ops=one.key.ops + other.key.ops),
        "baselines": tuple(
            Baseline(a.name, a.forward + b.forward, a.backward + b.backward)
            for a, b in zip(one.baselines, other.baselines, strict=True)
        ),
        "target": one.target,
        "nominal_tokens": one.nominal_tokens,
        "memory": one.memory.followed_by(other.memory, 3),
    }
    found = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    assert set(found) == set(expected)
    assert [name for name in found if found[name] != expected[name]] == []
    assert len(one.baselines) == 2
    curves = one.memory.every, other.memory.every
    for cost, a, b in zip(plan.memory.every, *curves, strict=True):
        assert cost.nbytes == a.nbytes + b.nbytes
        assert cost.microseconds == a.microseconds + b.microseconds
        assert cost.inputs == a.inputs + tuple(i + 3 for i in b.inputs)
    parts = [mlp().plan(torch.empty(2, 8), training=False) for _ in range(2)]
    assert merged(parts, ()).nodes == ()


def split_by_modules() -> fuser.Sequential:
    """A block whose channel passes modules and hooked ops, with modules at both ends."""
    make = fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "residual")
    model = fuser.Sequential(
        torch.nn.Identity(),
        make,
        fuser.RMSNorm(8),
        torch.nn.Dropout(0.1),
        fuser.Linear(8, 16),
        fuser.SwiGLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Tanh(),
        add,
        torch.nn.ReLU(),
    )
    model[4].register_forward_hook(print)
    model[5].register_forward_hook(print)
    return model


def test_a_plan_shows_modules_between_pipelines_and_channels_across_them() -> None:
    plan = split_by_modules().plan(torch.empty(2, 8, device="meta", requires_grad=True))
    assert plan.ops == (
        "MakeExtraOutput",
        "RMSNorm",
        "BasicLinear",
        "Bias",
        "SwiGLU",
        "AddExtraInput",
    )
    calls = [(call.name, call.before, call.ops) for call in plan.modules]
    assert calls == [
        ("Identity", 0, ()),
        ("Dropout", 2, ()),
        ("Linear", 2, (2, 3)),
        ("SwiGLU", 4, (4,)),
        ("Dropout", 5, ()),
        ("Tanh", 5, ()),
        ("ReLU", 6, ()),
    ]
    assert plan.channels == (Channel("residual", 0, 5),)
    text = str(plan)
    line = " ".join(text.splitlines()[1:3])
    places = [
        line.index(name) for name in ("[Identity]", "0 Make", "1 RMS", "[Dropout]", "2 Basic")
    ]
    assert places == sorted(places)
    assert line.index("4 SwiGLU") < line.rindex("[Dropout]") < line.index("[Tanh]")
    assert line.index("[Tanh]") < line.index("5 Add") < line.index("[ReLU]")
    assert line.count("[Dropout]") == 2
    assert (
        "called as a module (it is not an op of fuser): [Identity], [Dropout], [Tanh], [ReLU]"
        in text
    )
    assert "called as a module (it has hooks): Linear over 2-3, SwiGLU over 4" in text
    assert "channel 'residual': op 0 to op 5" in text
    assert "Modules in brackets are not counted." in text
    data = json.loads(json.dumps(plan.to_dict()))
    found = (ModuleCall(**{**m, "ops": tuple(m["ops"])}) for m in data["modules"])
    assert tuple(found) == plan.modules


def test_dot_has_modules_on_the_main_line_both_ways() -> None:
    plan = split_by_modules().plan(torch.empty(2, 8, device="meta", requires_grad=True))
    dot = plan.to_dot()
    assert "  f1 -> fm1;\n" in dot  # a tensor that a module may change has no label
    assert f'  f5 -> fm6 [label="{plan.gap_labels("forward", 6)[0]}"];\n' in dot
    forward = re.findall(r"  (f\w+) -> (f\w+)", dot)
    line = [source for source, target in forward if (source, target) != ("f0", "f5")]
    assert line == ["fm0", "f0", "f1", "fm1", "f2", "f3", "f4", "fm4", "fm5", "f5"]
    backward = re.findall(r"  (b\w+) -> (b\w+)", dot)
    assert [(t.replace("b", "f"), s.replace("b", "f")) for s, t in backward][::-1] == [
        pair for pair in forward if pair != ("f0", "f5")
    ]
    for number, name in ((0, "Identity"), (1, "Dropout"), (5, "Tanh"), (6, "ReLU")):
        assert f'fm{number} [label="{name}"' in dot


def test_refusals_that_say_the_same_are_printed_once_with_their_windows() -> None:
    layers = [op for _ in range(24) for op in (fuser.Linear(8, 16), fuser.SwiGLU())]
    plan = fuser.Sequential(*layers).plan(torch.empty(2, 8, device="meta"))
    text = str(plan)
    alike: dict[tuple[str, str, str], list[tuple[int, ...]]] = {}
    for refusal in plan.refusals:
        alike.setdefault((refusal.side, refusal.fusion, refusal.reason), []).append(refusal.ops)
    assert max(map(len, alike.values())) == 24
    for (_, fusion, reason), windows in alike.items():
        assert len(re.findall(rf"{fusion} over [\w, -]+: {re.escape(reason)}", text)) == 1
        for ops in windows:
            assert re.search(rf"\b{ops[0]}(-{ops[-1]})?\b", text[text.index("not used") :])
    assert all(len(line) < 130 for line in text.splitlines())


def test_running_a_mixed_model_uses_the_plans_it_was_shown() -> None:
    model = mixed()
    x = torch.randn(2, 8, requires_grad=True)
    model.plan(x)
    shown = model.plans
    model(x).sum().backward()
    assert model.plans == shown
    assert [len(plan.ops) for plan in shown] == [5, 8, 1]


def test_a_frozen_first_pipeline_still_has_no_backward_when_merged() -> None:
    model = fuser.Sequential(*mlp(), torch.nn.Tanh(), *mlp())
    for parameter in [*model[0].parameters(), *model[2].parameters()]:
        parameter.requires_grad_(False)
    plan = model.plan(torch.empty(2, 8))
    assert {i for step in plan.backward for i in step.ops} == set(range(5, 10))
    model(torch.randn(2, 8))
    assert [bool(part.backward) for part in model.plans] == [False, True]


def test_a_model_without_fusible_ops_has_no_plan() -> None:
    with pytest.raises(fuser.InputError, match=said("segments-holds-no-fusible")):
        fuser.Sequential(torch.nn.Linear(4, 4)).plan(torch.empty(2, 4))
    assert fuser.Sequential(torch.nn.Linear(4, 4)).plans == ()


# -- keys --------------------------------------------------------------------------------


def key_of(
    model: fuser.Sequential | None = None, x: torch.Tensor | None = None, **kwargs: Any
) -> fuser.PlanKey:
    return (model or mlp()).plan(torch.empty(2, 8) if x is None else x, **kwargs).key


def test_keys_of_equal_pipelines_are_equal_and_hash_alike() -> None:
    assert key_of() == key_of()
    assert hash(key_of()) == hash(key_of())
    assert key_of() is not key_of()
    assert {key_of(): "plan"}[key_of(x=torch.empty(3, 4, 5, 8, device="meta"))] == "plan"


def test_each_dependency_of_a_plan_changes_its_key() -> None:
    frozen = mlp()
    frozen[2].weight.requires_grad_(False)
    half = mlp().to(torch.bfloat16)
    recipe = fuser.recipe.MXFP8BlockScaling
    keys = {
        "as it is": key_of(),
        "evaluation": key_of(training=False),
        "input needs a gradient": key_of(x=torch.empty(2, 8, requires_grad=True)),
        "input dtype": key_of(x=torch.empty(2, 8, dtype=torch.bfloat16)),
        "parameter dtype": key_of(half),
        "a frozen parameter": key_of(frozen),
        "fusions in force": key_of(mlp(fusions=())),
    }
    with torch.autocast("cpu", torch.bfloat16):
        keys["torch autocast"] = key_of()
    for name, made in {
        "a recipe": recipe(),
        "other contents": recipe(enable_2d_quantization=True),
        "an override": recipe(backward_override="dequantized"),
        "another override": recipe(backward_override="high_precision"),
    }.items():
        with fuser.autocast(recipe=made):
            keys[name] = key_of()
    assert len(set(keys.values())) == len(keys)


# Of each field a value that is not the default.
OF_A_KEY: dict[str, Any] = {
    "recipe": fuser.recipe.MXFP8BlockScaling(),
    "autocast_dtype": torch.bfloat16,
    "device": "cuda",
    "arch": (9, 0),
    "fusions": (),
    "registered": ("a function",),
    "no_kernels": "there is no compiler",
    "is_elsewhere": True,
}
OF_AN_OP: dict[str, Any] = {
    "input_dtype": torch.float16,
    "requires_grad": False,
    "input_requires_grad": True,
    "params": (),
    "extra_inputs": (fuser.specs.TensorKey(torch.float32, True),),
    "keeps_input": False,
    "keeps_source": True,
    "keeps_weight": False,
    "rounds_input": True,
}
QUANTIZED = ("input", "output", "grad_output", "grad_input")


def test_each_field_of_a_key_and_of_its_first_and_last_op_counts() -> None:
    key = key_of()
    assert {"ops", *OF_A_KEY} == {field.name for field in dataclasses.fields(key)}
    assert {*OF_AN_OP, *QUANTIZED} == {field.name for field in dataclasses.fields(key.ops[0])}
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        quantized = mlp().plan(torch.empty(64, 8)).key.ops
    specs = {name: getattr(op, name) for op in quantized for name in QUANTIZED}
    spec = next(spec for spec in specs.values() if spec is not None)
    keys = [key, *(dataclasses.replace(key, **{name: value}) for name, value in OF_A_KEY.items())]
    for place in (0, len(key.ops) - 1):
        for name, value in {**OF_AN_OP, **dict.fromkeys(QUANTIZED, spec)}.items():
            ops = list(key.ops)
            if getattr(ops[place], name) == value:
                value = not value
            ops[place] = dataclasses.replace(ops[place], **{name: value})
            keys.append(dataclasses.replace(key, ops=tuple(ops)))
    assert len(set(keys)) == len(keys)
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_a_key_narrowed_to_a_window_keeps_everything_else() -> None:
    key = dataclasses.replace(key_of(), **OF_A_KEY)
    for start, stop in ((0, 1), (1, 3), (4, 5), (0, 5)):
        part = key.window(start, stop)
        assert part.ops == key.ops[start:stop]
        assert dataclasses.replace(part, ops=key.ops) == key
    assert len(key.ops) == 5


def test_a_key_says_what_each_op_gets_and_needs() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    key = key_of(model)
    assert [op.requires_grad for op in key.ops] == [False, True, True, True, True]
    assert [op.input_requires_grad for op in key.ops] == [False, False, True, True, True]
    assert {op.input_dtype for op in key.ops} == {torch.float32}
    assert [len(op.params) for op in key.ops] == [1, 1, 0, 1, 1]
    assert key.requires_grad
    assert (key.device, key.arch, key.recipe, key.autocast_dtype) == ("cpu", None, None, None)


def test_a_product_has_the_elements_of_its_operands_and_its_result() -> None:
    x, y = TensorSpec((7, 3), torch.float32), TensorSpec((7, 5), torch.float32)
    one = fuser.BasicLinear(3, 5).product(x, y)
    experts = fuser.GroupedLinear(2, 3, 5).product(x, y)
    assert (one.flops, *one.operands) == (2 * 7 * 3 * 5, 7 * 3, 3 * 5, 7 * 5)
    assert (experts.flops, *experts.operands) == (2 * 7 * 3 * 5, 7 * 3, 2 * 3 * 5, 7 * 5)


def test_a_norm_saves_its_statistics_of_each_row() -> None:
    x = TensorSpec((2, 7, 3), torch.bfloat16)
    one = (fuser.RMSNorm(3), fuser.L2Normalization())
    two = (fuser.LayerNorm(3), fuser.AdaptiveLayerNorm(3))
    assert [norm.saved_bytes(x) for norm in (*one, *two)] == [56, 56, 112, 112]


def test_tensor_specs_count_bytes() -> None:
    assert TensorSpec((2, 3, 5), torch.bfloat16).nbytes == 60
    assert TensorSpec((0, 4), torch.float32).nbytes == 0
    assert TensorSpec((), torch.float32).nbytes == 4


def test_what_a_call_saves_once_does_not_count_for_each_token() -> None:
    model = fuser.Sequential(fuser.BasicLinear(4, 4, device="meta"), fuser.Dropout(0.5))
    plans = [model.plan(torch.empty((*leading, 4), device="meta")) for leading in ((), (5,))]
    assert plans[0] == plans[1]


def test_an_op_that_is_called_as_a_module_is_planned_for_the_gpu_that_is_asked_for() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64, dtype=torch.bfloat16), fuser.GELU())
    model[1].register_forward_hook(lambda module, args, output: None)
    x = torch.empty(4096, 64, dtype=torch.bfloat16, requires_grad=True)
    for device in ("h200", "b200"):
        alone = fuser.Sequential(fuser.GELU()).plan(x, device=device)
        plan = model.plan(x, device=device)
        for side in ("forward", "backward"):
            (step,) = (step for step in plan.steps(side) if step.ops == (1,))
            (expected,) = alone.steps(side)
            assert (step.kernel, step.microseconds) == (expected.kernel, expected.microseconds)
