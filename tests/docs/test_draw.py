"""The picture of a plan: what it shows, that it can be read, and how it fails."""

from __future__ import annotations

import functools
import html
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import python
from hypothesis import given, settings
from hypothesis import strategies as st
from said import said

import fuser
import fuser.report.draw
from fuser.formats import DType, NumberFormat
from fuser.plan.plan import Channel, FusionPlan, Refusal, Step
from fuser.report.layout import lay_out
from fuser.report.picture import Box, Line, Picture, Text
from fuser.report.text import format_time
from fuser.specs import OpKey, PlanKey, QuantSpec, TensorKey

matplotlib = pytest.importorskip("matplotlib")

X = torch.empty(8, 64, device="meta", requires_grad=True)

LONG_REASON = (
    "the hidden size 256 is no multiple of 384, which this kernel wants because each of its "
    "thread blocks takes three tiles of 128 columns; pad the weights and it will run & <win>."
)


class AFusionWithANameThatIsFarLongerThanTheWindowItWouldHaveTaken(fuser.FusedOperation):
    """Refuses with a long sentence."""

    window = (fuser.BasicLinear, fuser.Bias)
    side = "forward"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None

    @classmethod
    def refuses(cls, *ops: Any, key: OpKey) -> str:
        return LONG_REASON


class WholeBlock(fuser.FusedOperation):
    """A joint window that a channel inside it keeps open."""

    window = (
        fuser.MakeExtraOutput,
        fuser.RMSNorm,
        fuser.BasicLinear,
        fuser.Bias,
        fuser.SwiGLU,
        fuser.BasicLinear,
        fuser.Bias,
        fuser.AddExtraInput,
    )
    side = "joint"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None


class AnOpWithAVeryLongClassNameAsPeopleWriteThemInTheirOwnProjects(fuser.Identity):
    """Passes its input on."""


def mlp_ops(channel: str = "residual") -> list[Any]:
    ops: list[Any] = [
        fuser.MakeExtraOutput(),
        fuser.RMSNorm(64),
        fuser.Linear(64, 256),
        fuser.SwiGLU(),
        fuser.Linear(128, 64),
        fuser.AddExtraInput(),
    ]
    ops[0].set_extra_output_channel(0, channel, output_to_caller=False)
    ops[-1].set_extra_input_channel(0, channel)
    return ops


def linear_gelu_linear(dtype: torch.dtype = torch.float32) -> list[Any]:
    return [fuser.Linear(64, 256, dtype=dtype), fuser.GELU(), fuser.Linear(256, 64)]


def mlp_plan() -> FusionPlan:
    return fuser.Sequential(*mlp_ops()).plan(X)


def inference_plan() -> FusionPlan:
    return fuser.Sequential(*mlp_ops()).plan(X, training=False)


def constant_input_plan() -> FusionPlan:
    return fuser.Sequential(*mlp_ops()).plan(X.detach())


def linear_gelu_linear_plan() -> FusionPlan:
    return fuser.Sequential(*linear_gelu_linear()).plan(X)


def one_op_plan() -> FusionPlan:
    return fuser.Sequential(fuser.GELU()).plan(X)


def forty_ops_plan() -> FusionPlan:
    ops = [op for block in range(5) for op in mlp_ops(f"residual {block}")]
    return fuser.Sequential(*ops).plan(X)


def experts_plan() -> FusionPlan:
    """A layer of experts, whose op of groups has notes, and channels of integers."""
    dispatch = fuser.MoeDispatch(4)
    for index, channel in enumerate(("split sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    layer = fuser.Sequential(
        dispatch,
        fuser.GroupedLinear(4, 64, 256).set_extra_input_channel(0, "split sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        fuser.GroupedLinear(4, 128, 64).set_extra_input_channel(0, "split sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    )
    indices, probs = (torch.empty(8, 2, dtype=t, device="meta") for t in (torch.int64, X.dtype))
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        return layer.plan(X, indices, probs.requires_grad_())


def mixed_dtypes_plan() -> FusionPlan:
    ops = linear_gelu_linear(torch.bfloat16)
    ops[0].bias = torch.nn.Parameter(torch.zeros(256))
    return fuser.Sequential(*ops).plan(X)


def many_refusals_plan() -> FusionPlan:
    own = (AFusionWithANameThatIsFarLongerThanTheWindowItWouldHaveTaken, WholeBlock)
    return fuser.Sequential(*mlp_ops(), fusions=fuser.FUSIONS + own).plan(X)


def extra_tensors_plan() -> FusionPlan:
    model = fuser.Sequential(
        fuser.MakeExtraOutput(),
        AnOpWithAVeryLongClassNameAsPeopleWriteThemInTheirOwnProjects(),
        fuser.Linear(64, 128),
        fuser.ScaledSwiGLU(),
        fuser.AddExtraInput(),
    )
    return model.plan(X, X.new_empty(8).requires_grad_(), X)


def split_plan() -> FusionPlan:
    """Modules before, between and after pipelines, and ops that are called as modules."""
    ops = mlp_ops()
    for op in ops[2:4]:
        op.register_forward_hook(print)
    torch_modules = [torch.nn.Identity(), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.ReLU()]
    identity, dropout, tanh, relu = torch_modules
    return fuser.Sequential(
        identity, *ops[:2], dropout, *ops[2:4], dropout, tanh, *ops[4:], relu, tanh
    ).plan(X)


def quantized_plan() -> FusionPlan:
    layers = [(fuser.RMSNorm(64), fuser.Linear(64, 256), fuser.GELU()) for _ in range(4)]
    ops = [
        op for norm, linear, gelu in layers for op in (norm, linear, gelu, fuser.Linear(256, 64))
    ]
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        return fuser.Sequential(*ops[:-1]).plan(torch.empty(32, 64, requires_grad=True))


PLANS = [
    quantized_plan,
    mlp_plan,
    inference_plan,
    constant_input_plan,
    linear_gelu_linear_plan,
    one_op_plan,
    forty_ops_plan,
    experts_plan,
    mixed_dtypes_plan,
    many_refusals_plan,
    extra_tensors_plan,
    split_plan,
]
MakePlan = Callable[[], FusionPlan]
each_plan = pytest.mark.parametrize("make_plan", PLANS)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[MakePlan], Path]:
    """The SVG of a plan, drawn once for several tests."""

    @functools.cache
    def path(make_plan: MakePlan) -> Path:
        return make_plan().draw(tmp_path_factory.mktemp("drawn") / "plan.svg")

    return path


def svg_texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def overlap(a: Sequence[float], b: Sequence[float], slack: float = 0.2) -> bool:
    return (
        a[0] < b[2] - slack and b[0] < a[2] - slack and a[1] < b[3] - slack and b[1] < a[3] - slack
    )


def check_legible(picture: Picture) -> None:
    """No text over another, none cut by a box's outline, nothing outside the picture."""
    texts = [item for item in picture.items if isinstance(item, Text)]
    boxes = [item for item in picture.items if isinstance(item, Box)]
    for a, b in combinations(texts, 2):
        assert not overlap(a.bounds, b.bounds), f"{a.string!r} overlaps {b.string!r}"
    for box in boxes:
        left, top, right, bottom = box.bounds
        for text in texts:
            x0, y0, x1, y1 = text.bounds
            inside = left <= x0 and x1 <= right and top <= y0 and y1 <= bottom
            assert inside or not overlap(box.bounds, text.bounds), f"{text.string!r} crosses {box}"
    for one, other in combinations(boxes, 2):
        nested = any(
            p[0] <= q[0] and q[2] <= p[2] and p[1] <= q[1] and q[3] <= p[3]
            for p, q in ((one.bounds, other.bounds), (other.bounds, one.bounds))
        )
        assert nested or not overlap(one.bounds, other.bounds), f"{one} overlaps {other}"
    for item in (*texts, *boxes):
        x0, y0, x1, y1 = item.bounds
        assert min(x0, y0) >= 0, item
        assert x1 <= picture.width, item
        assert y1 <= picture.height, item
    for line in (item for item in picture.items if isinstance(item, Line)):
        assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in line.points)


@each_plan
def test_svg_holds_every_name_reason_and_number_as_text(
    make_plan: MakePlan, drawn: Callable[[MakePlan], Path]
) -> None:
    plan = make_plan()
    texts = svg_texts(drawn(make_plan))
    words = " ".join(texts).replace(",", " ").split()
    for index, name in enumerate(plan.ops):
        assert name in texts
        assert str(index) in texts
    for channel in plan.channels:
        assert any(channel.name in text for text in texts)
    for refusal in plan.refusals:
        assert any(f"{refusal.fusion} over {refusal.ops[0]}" in text for text in texts)
        for word in refusal.reason.replace(",", " ").split():
            assert word in words
    # The totals are those of the printed plan.
    totals = [line for line in str(plan).splitlines() if re.match(r"  \d+ steps?, ", line)]
    assert len(totals) == 1 + bool(plan.backward)
    for number in re.findall(r"[\d.]+(?: k?B| us| ms|x)", " ".join(totals)):
        assert number in " ".join(texts), number
    for side in ("forward", "backward"):
        for step in plan.steps(side):
            assert step.fusion is None or step.fusion in texts
            assert not step.kernel or any(
                re.fullmatch(rf"[\d.]+ k?B, {format_time(step.microseconds)}", text)
                for text in texts
            )
            assert all(word in words for word in step.kernel.replace(",", " ").split())
    assert plan.key.describe() in texts


def test_arrows_carry_the_bytes_of_the_main_line(tmp_path: Path) -> None:
    plan = fuser.Sequential(fuser.Linear(64, 256, bias=False), fuser.SwiGLU()).plan(X)
    assert plan.activation_bytes == (256.0, 1024.0, 512.0)
    texts = svg_texts(plan.draw(tmp_path / "plan.svg"))
    labels = [text for text in texts if re.fullmatch(r"[\d.]+ k?B", text)]
    assert labels == ["256 B", "1.0 kB", "512 B"] * 2


@each_plan
def test_svg_is_the_same_on_every_run_and_whatever_the_users_style(
    make_plan: MakePlan, drawn: Callable[[MakePlan], Path], tmp_path: Path
) -> None:
    first = drawn(make_plan).read_bytes()
    with matplotlib.rc_context({"savefig.bbox": "tight", "font.sans-serif": ["STIXGeneral"]}):
        before = dict(matplotlib.rcParams)
        second = make_plan().draw(tmp_path / "second.svg").read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert first == second


@each_plan
def test_no_text_overlaps_or_is_clipped(make_plan: MakePlan) -> None:
    check_legible(lay_out(make_plan().to_dict()))


@pytest.mark.parametrize("make_plan", [forty_ops_plan, many_refusals_plan])
def test_painted_texts_are_where_the_layout_says(
    make_plan: MakePlan, drawn: Callable[[MakePlan], Path]
) -> None:
    picture = lay_out(make_plan().to_dict())
    root = ElementTree.parse(drawn(make_plan)).getroot()
    size = [float(number) for number in root.get("viewBox").split()]
    assert size == pytest.approx([0, 0, picture.width, picture.height], abs=1e-3)
    painted = sorted(
        (node.text, round(float(node.get("x")), 2), round(float(node.get("y")), 2))
        for node in root.iter("{http://www.w3.org/2000/svg}text")
    )
    laid_out = sorted(
        (item.string.rstrip(), round(item.x, 2), round(item.y, 2))
        for item in picture.items
        if isinstance(item, Text)
    )
    assert [text.rstrip() for text, _, _ in painted] == [text for text, _, _ in laid_out]
    for (_, *there), (_, *here) in zip(painted, laid_out, strict=True):
        assert there == pytest.approx(here, abs=0.02)


def op_boxes(picture: Picture) -> dict[str, list[Box]]:
    """The boxes that hold an op's name, by name: forward's first."""
    boxes = [item for item in picture.items if isinstance(item, Box)]
    found: dict[str, list[Box]] = {}
    for text in picture.items:
        if isinstance(text, Text) and text.tip and text.align == "center":
            around = [
                box for box in boxes if box.tip and overlap(box.bounds, text.bounds, slack=0.0)
            ]
            innermost = min(around, key=lambda box: box.width * box.height)
            found.setdefault(text.string, []).append(innermost)
    return found


def test_the_backward_of_an_op_is_drawn_under_its_forward() -> None:
    found = op_boxes(lay_out(mlp_plan().to_dict()))
    for name in ("MakeExtraOutput", "RMSNorm", "SwiGLU", "AddExtraInput"):
        forward, backward = found[name]
        assert forward.x == backward.x
        assert forward.y < backward.y


def test_forward_arrows_point_right_and_backward_arrows_left() -> None:
    picture = lay_out(linear_gelu_linear_plan().to_dict())
    arrows = [item for item in picture.items if isinstance(item, Line) and item.arrow]
    (border,) = (
        item.y
        for item in picture.items
        if isinstance(item, Text) and item.string[:9] == "backward "
    )
    forward = [line for line in arrows if line.points[0][1] < border]
    backward = [line for line in arrows if line.points[0][1] > border]
    assert len(forward) == 6
    assert all(line.points[0][0] < line.points[-1][0] for line in forward)
    assert all(line.points[0][0] > line.points[-1][0] for line in backward)


def test_no_arrow_leaves_backward_where_the_input_needs_no_gradient(tmp_path: Path) -> None:
    assert "grad input" in svg_texts(mlp_plan().draw(tmp_path / "with.svg"))
    texts = svg_texts(constant_input_plan().draw(tmp_path / "without.svg"))
    assert "grad input" not in texts
    assert "no gradient" in texts
    plan = fuser.Sequential(*linear_gelu_linear()).plan(X.detach())
    texts = svg_texts(plan.draw(tmp_path / "only wgrad.svg"))
    assert "grad input" not in texts
    assert "wgrad mm" in texts


def test_a_picture_has_the_notes_of_the_printed_plan(tmp_path: Path) -> None:
    plan = experts_plan()
    texts = svg_texts(plan.draw(tmp_path / "plan.svg"))
    start = texts.index("notes")
    said = " ".join(texts[start + 1 :])
    assert len(plan.note_lines()) == 3
    assert all(" ".join(note.split()) in said for note in plan.note_lines())
    assert "notes" not in svg_texts(mlp_plan().draw(tmp_path / "none.svg"))


def test_channels_of_integers_are_drawn_in_forward_alone(tmp_path: Path) -> None:
    texts = svg_texts(experts_plan().draw(tmp_path / "plan.svg"))
    assert texts.count("split sizes") == 2
    assert "rows" in texts
    assert [text for text in texts if text.startswith("grad of")] == [
        "grad of probs",
        "grad of extra input",
    ]


def test_fused_window_is_one_box_around_its_ops() -> None:
    found = op_boxes(lay_out(mlp_plan().to_dict()))
    (window,) = found["BackwardActivationBias"]
    activation = found["SwiGLU"][1]
    left, top, right, bottom = window.bounds
    assert left < activation.x < activation.bounds[2] < right
    assert top < activation.y < activation.bounds[3] < bottom
    assert left < found["Bias"][2].x


def test_ops_without_a_kernel_are_drawn_lighter() -> None:
    found = op_boxes(lay_out(mlp_plan().to_dict()))
    assert found["MakeExtraOutput"][0].fill == "paper"  # forward only passes a reference on
    assert found["MakeExtraOutput"][1].fill != "paper"  # backward adds
    assert found["RMSNorm"][0].fill != found["SwiGLU"][0].fill


def test_channels_and_refusals_are_dashed_and_span_their_ops() -> None:
    plan = many_refusals_plan()
    picture = lay_out(plan.to_dict())
    dashed = [item for item in picture.items if isinstance(item, Line) and item.dashed]
    legend = {
        color: [line for line in dashed if line.color == color][-1]
        for color in ("channel", "refused")
    }
    channels = [
        line for line in dashed if line.color == "channel" and line is not legend["channel"]
    ]
    brackets = [
        line for line in dashed if line.color == "refused" and line is not legend["refused"]
    ]
    assert len(channels) == 2  # forward, and its gradient
    assert len(brackets) == len(plan.refusals) >= 4
    boxes = op_boxes(picture)
    whole = max(brackets, key=lambda line: line.points[-1][0] - line.points[0][0])
    assert whole.points[0][0] == boxes["MakeExtraOutput"][0].x
    assert whole.points[-1][0] == boxes["AddExtraInput"][0].bounds[2]


def test_extra_tensors_of_the_caller_are_shown(tmp_path: Path) -> None:
    texts = svg_texts(extra_tensors_plan().draw(tmp_path / "plan.svg"))
    assert texts.count("extra input") == 2
    assert texts.count("grad of extra input") == 2
    assert texts.count("extra output") == 1


@pytest.mark.parametrize("make_plan", [split_plan, lambda: split_plan_of_blocks(6)])
def test_modules_between_pipelines_are_boxes_in_their_place(make_plan: MakePlan) -> None:
    plan = make_plan()
    picture = lay_out(plan.to_dict())
    boxes = op_boxes(picture)
    calls = [call for call in plan.modules if not call.ops]
    for name in {call.name for call in calls}:
        count = sum(call.name == name for call in calls)
        assert len(boxes[name]) == 2 * count  # forward and backward
        assert all(box.fill == "paper" for box in boxes[name])
    # From left to right, row by row: what runs, in its order.
    names = {text.string for text in picture.items if isinstance(text, Text)}
    texts = [
        text
        for text in picture.items
        if isinstance(text, Text) and text.align == "center" and text.size == 8.5
    ]
    rows = sorted({text.y for text in texts})[::2]
    drawn = [text.string for y in rows for text in sorted(texts, key=lambda t: t.x) if text.y == y]
    expected = []
    for i in range(len(plan.ops) + 1):
        expected += [call.name for call in calls if call.before == i]
        expected += plan.ops[i : i + 1]
    assert drawn == expected
    assert ("called as a module" in names) == any(call.ops for call in plan.modules)
    assert "other module, not modelled" in names


def split_plan_of_blocks(count: int) -> FusionPlan:
    """So many blocks with a module in each that they do not fit into one row."""
    modules = []
    for block in range(count):
        ops = mlp_ops(f"residual {block}")
        modules += [*ops[:4], torch.nn.Dropout(0.1), *ops[4:]]
    return fuser.Sequential(*modules).plan(X)


def test_long_pipelines_are_wrapped_and_no_op_is_lost() -> None:
    plan = forty_ops_plan()
    picture = lay_out(plan.to_dict())
    assert picture.width < 1300
    drawn = [item.string for item in picture.items if isinstance(item, Text) and item.size == 6.0]
    assert sorted(drawn, key=int) == [str(i) for i in range(40) for _ in range(2)]


def test_png_is_a_png_with_something_on_it(tmp_path: Path) -> None:
    path = mlp_plan().draw(tmp_path / "plan.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)[..., :3]
    assert pixels.shape[1] > 1000
    assert 0.02 < (pixels.min(axis=2) < 0.9).mean() < 0.5
    blue = matplotlib.colors.to_rgb(fuser.report.draw.COLORS["GEMM"][0])
    assert (abs(pixels - blue).max(axis=2) < 0.01).mean() > 0.001


@each_plan
def test_html_is_self_contained_and_holds_the_plan_as_text(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    plan = make_plan()
    page = plan.draw(tmp_path / "plan.html").read_text(encoding="utf-8")
    links = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", page)
    assert f"<pre>{html.escape(str(plan))}</pre>" in page
    assert page.count("<svg") == page.count("<!DOCTYPE") == 1
    ElementTree.fromstring(page[page.index("<svg") : page.index("</figure>")])


def test_html_tips_tell_kernels_bytes_and_time(tmp_path: Path) -> None:
    page = mlp_plan().draw(tmp_path / "plan.html").read_text(encoding="utf-8")
    (step,) = (step for step in mlp_plan().forward if step.ops == (2, 3, 4))
    tip = "<title>forward 2-4: ForwardLinearBiasActivation\naddmm, swiglu\n"
    assert f"{tip}2.8 kB, {format_time(step.microseconds)}</title>" in page


def test_html_colours_all_follow_light_and_dark_mode(tmp_path: Path) -> None:
    page = mlp_plan().draw(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in page
    picture = page[page.index("<figure>") : page.index("</figure>")]
    assert not re.search(r"(fill|stroke): #", picture)
    used = set(re.findall(r"var\((--c\d+)\)", picture))
    style = page[: page.index("</style>")]
    assert used
    assert all(style.count(f"{name}:") == 2 for name in used)


def test_ids_in_the_svg_are_unique(tmp_path: Path) -> None:
    root = ElementTree.parse(mlp_plan().draw(tmp_path / "plan.svg")).getroot()
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids))


def test_dollars_and_control_characters_do_not_break_the_svg(tmp_path: Path) -> None:
    step = Step((0,), None, "a<b&c", 256.0, 1.0)
    refusal = Refusal("Odd", "forward", (0,), "it said \x1b[31m $x_1$ \x00 and <nothing> else.")
    texts = svg_texts(plan_of(["Op$a$"], [step], [], [refusal]).draw(tmp_path / "plan.svg"))
    assert "Op$a$" in texts
    assert "a<b&c" in texts
    assert "$x_1$" in " ".join(texts)
    assert "<nothing>" in " ".join(texts)


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.svg.gz"])
def test_unknown_suffix_is_an_input_error_that_names_the_known_ones(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        fuser.InputError, match=said("draw-picture-drawn", ".html, .png, .svg")
    ) as caught:
        one_op_plan().draw(tmp_path / name)
    assert name in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_without_matplotlib_a_sentence_says_what_to_install(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(fuser.StateError, match=said("picture-drawing-needs-matplotlib")):
        one_op_plan().draw(tmp_path / f"plan{suffix}")
    assert not list(tmp_path.iterdir())


def test_the_grey_of_the_bars_is_explained_where_there_is_any(tmp_path: Path) -> None:
    note = "in grey what more torch.compile takes"
    model = fuser.Sequential(fuser.RMSNorm(64), fuser.Linear(64, 64))
    x = torch.empty(32, 64, requires_grad=True)
    of_gpu = fuser.plan(model, x, device="h200").parts[0].content
    for number, (plan, is_compared) in enumerate(((of_gpu, True), (model.plan(x), False))):
        text = " ".join(svg_texts(plan.draw(tmp_path / f"{number}.svg")))
        assert (note in text) == is_compared
        assert ("torch.compile " in text) == is_compared


def test_importing_does_not_import_matplotlib() -> None:
    code = "import sys, fuser.report.draw; sys.exit('matplotlib' in sys.modules)"
    assert python(["-c", code]).returncode == 0


# -- plans that no model needs to have -----------------------------------------


def plan_of(
    ops: Sequence[str],
    forward: Sequence[Step],
    backward: Sequence[Step] = (),
    refusals: Sequence[Refusal] = (),
    channels: Sequence[Channel] = (),
    activation_bytes: Sequence[float] | None = None,
) -> FusionPlan:
    tensor = TensorKey(torch.float32, True)
    extras = [sum(c.consumer == i for c in channels) for i in range(len(ops))]
    keys = tuple(OpKey(torch.float32, bool(backward), True, (), (tensor,) * n) for n in extras)
    return FusionPlan(
        key=PlanKey(keys, None, None, "cpu", None, ()),
        ops=tuple(ops),
        forward=tuple(forward),
        backward=tuple(backward),
        unfused_forward=tuple(forward),
        unfused_backward=tuple(backward),
        refusals=tuple(refusals),
        channels=tuple(channels),
        activation_bytes=tuple(activation_bytes or [1e3] * (len(ops) + 1)),
        grad_activation_bytes=tuple(activation_bytes or [1e3] * (len(ops) + 1)),
        nominal_tokens=8192,
        extra_outputs=(0,) * len(ops),
    )


EMITTED = QuantSpec(NumberFormat("FP8 128x128", DType.kFloat8E4M3, block_size=128**2), True, True)
names = st.sampled_from(["Bias", "GELU", "Q", "AddExtraInput", "AnOpWithALongName" * 3])
kernels = st.sampled_from(["", "mm", "dgrad mm, wgrad mm", "a_kernel_with_a_long_name, add_, sum"])
reasons = st.sampled_from(["no.", LONG_REASON, "word " * 40, "x" * 300])


@st.composite
def steps_of(draw: st.DrawFn, count: int) -> list[Step]:
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=count))})
    steps = []
    for start, stop in pairwise(cuts):
        size = stop - start
        fusion = draw(st.sampled_from(["F", "AFusionOfSomeKind"])) if size > 1 else None
        cost = draw(st.sampled_from([0.0, 5.25, 1.5e7]))
        emits = draw(st.sampled_from([None, EMITTED]))
        steps.append(Step(tuple(range(start, stop)), fusion, draw(kernels), cost * 3, cost, emits))
    return steps


@st.composite
def plans(draw: st.DrawFn) -> FusionPlan:
    count = draw(st.integers(1, 14))
    windows = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).map(sorted)
    refusals = [
        Refusal(name, side, tuple(range(first, last + 1)), reason)
        for (first, last), name, side, reason in draw(
            st.lists(
                st.tuples(
                    windows,
                    st.sampled_from(["F", "AFusionWithALongName" * 4]),
                    st.sampled_from(["forward", "backward", "joint"]),
                    reasons,
                ),
                max_size=8,
            )
        )
    ]
    ends = [pair for pair in draw(st.lists(windows, max_size=5)) if pair[0] < pair[1]]
    channels = [Channel(f"channel {n}" * (n + 1), *pair) for n, pair in enumerate(ends)]
    ops = draw(st.lists(names, min_size=count, max_size=count))
    backward = draw(steps_of(count))[::-1] if draw(st.booleans()) else []
    first = draw(st.integers(0, count))
    backward = [step for step in backward if step.ops[0] >= first]
    line = draw(
        st.lists(st.sampled_from([0.5, 999.0, 2.5e9]), min_size=count + 1, max_size=count + 1)
    )
    return plan_of(ops, draw(steps_of(count)), backward, refusals, channels, line)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_no_text_overlaps_in_random_plans(plan: FusionPlan) -> None:
    check_legible(lay_out(plan.to_dict()))


def test_a_window_that_is_wider_than_a_row_goes_on_in_the_next() -> None:
    ops = ["AnOpWithALongName"] * 20
    picture = lay_out(
        plan_of(ops, [Step(tuple(range(20)), "Everything", "all", 1.0, 1.0)]).to_dict()
    )
    titles = [
        item.string for item in picture.items if isinstance(item, Text) and "Every" in item.string
    ]
    assert titles[0] == "Everything"
    assert set(titles[1:]) == {"Everything (continued)"}
    assert len(titles) > 1
    check_legible(picture)


def test_a_column_is_wide_enough_for_its_kernels(tmp_path: Path) -> None:
    """No comma on a line of its own: widths are sums, and sums are rounded."""
    layers = (fuser.RMSNorm(64), fuser.Linear(64, 256), fuser.SwiGLU(), fuser.Linear(128, 64))
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        plan = fuser.Sequential(*layers).plan(torch.empty(32, 64, requires_grad=True))
    texts = svg_texts(plan.draw(tmp_path / "plan.svg"))
    assert "," not in texts
    assert "MXFP8 E4M3" in texts
    assert any("dgrad mm (emulated)" in text for text in texts)
