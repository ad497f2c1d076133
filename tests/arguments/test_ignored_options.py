"""Arguments of contexts, functions and quantizers that are accepted and change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import arguments_listed  # noqa: F401  imported for its rows
import operands_in_fp64 as formats
import pytest
import torch
from argument_rows import IGNORED, found
from paths import ROOT

import fuser

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated", "ignore:fuser.fp8_autocast is now")
OURS = {
    name: reason
    for name, reason in IGNORED.items()
    if name[0].count(".") == 1
    and not name[0].startswith(("fuser.te.", "fuser.modules.", "fuser.moe."))
    and not (inspect.isclass(found(name[0])) and issubclass(found(name[0]), torch.nn.Module))
}
Results = list[torch.Tensor]


def steps_in(make: Callable[..., Any], **given: Any) -> Results:
    """Two steps of a linear: the second has the scales of the first."""
    x, weight, dy = formats.samples()
    linear = fuser.BasicLinear(formats.INPUTS, formats.OUTPUTS)
    with torch.no_grad():
        linear.weight.copy_(weight)
    results: Results = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        with make(**given):
            y = linear(leaf)
        y.backward(dy)
        results += [y.detach(), *(t.grad for t in (leaf, linear.weight) if t.grad is not None)]
    return results


def buffers_of(quantizer: fuser.Quantizer) -> Results:
    buffers = quantizer(formats.samples()[1]).buffers().values()
    return [buffer for buffer in buffers if buffer is not None]


def recomputed(**given: Any) -> Results:
    x = formats.samples()[0].requires_grad_()
    y = fuser.checkpoint(torch.sin, x, **given)
    y.sum().backward()
    return [y.detach(), *([] if x.grad is None else [x.grad])]


def plain_state(**given: Any) -> Results:
    torch.manual_seed(0)
    model = fuser.Sequential(fuser.Linear(4, 4))
    state = dict(model.state_dict())
    fuser.plain_keys(model, state, "", **{"local_metadata": {}, **given})
    assert sorted(state) == ["0.bias", "0.weight"]
    return [state["0.weight"]]


RUNS: dict[tuple[str, str], tuple[Callable[..., Results], Any]] = {
    ("fuser.autocast", "calibrating"): (lambda **given: steps_in(fuser.autocast, **given), True),
    ("fuser.fp8_autocast", "calibrating"): (
        lambda **given: steps_in(fuser.fp8_autocast, **given),
        True,
    ),
    ("fuser.checkpoint", "tp_group"): (recomputed, "a group"),
    ("fuser.Float8CurrentScalingQuantizer", "device"): (
        lambda **given: buffers_of(fuser.Float8CurrentScalingQuantizer(**given)),
        "cuda",
    ),
    ("fuser.NVFP4Quantizer", "with_post_rht_amax"): (
        lambda **given: buffers_of(fuser.NVFP4Quantizer(with_rht=True, **given)),
        True,
    ),
    ("fuser.NVFP4Quantizer", "amax_reduction_group"): (
        lambda **given: buffers_of(fuser.NVFP4Quantizer(**given)),
        "a group",
    ),
    ("fuser.plain_keys", "local_metadata"): (plain_state, {"version": 7}),
}


@pytest.mark.parametrize(("path", "argument"), OURS)
def test_an_ignored_argument_changes_no_bit(path: str, argument: str) -> None:
    run, value = RUNS[path, argument]
    without, with_it = run(), run(**{argument: value})
    assert all(tensor.any() for tensor in without)
    assert len(without) == len(with_it)
    assert all(map(torch.equal, without, with_it))


def test_ignored_arguments_of_hooks_of_ops_change_nothing() -> None:
    with fuser.quantized_model_init():
        op = fuser.BasicLinear(32, 32)
    fresh = torch.nn.Parameter(formats.samples()[1][:32, :32].contiguous())
    one, other = (op.as_parameter(fresh, name) for name in ("weight", "weight0"))
    assert torch.equal(one.dequantize(), other.dequantize())
    for requires_grad in (True, False):
        fuser.AllGather().pre_fuser_forward(requires_grad=requires_grad)


@pytest.mark.parametrize(("path", "argument"), OURS)
def test_the_documents_print_an_ignored_argument(path: str, argument: str) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Arguments that change nothing")
    rows = [row.split("|") for row in section.partition("\n## ")[0].splitlines() if "|" in row]
    of_argument = [row for row in rows if f"`{argument}`" in row[1]]
    owner = f"`{path.rpartition('.')[2]}`"
    assert any(owner in row[2] and OURS[path, argument] in row[3] for row in of_argument)
