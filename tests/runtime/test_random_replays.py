"""Random pipelines, called several times with changes in between: replays against no recordings.

Each seed makes a pipeline, recipes and a list of events: calls, backwards in another order, and
changes of parameters, attributes, layouts and modes between them. Two copies of the pipeline see
the same events, one of them without recordings. All results, gradients, scales and random numbers
have equal bits. Ops compute with torch, whose calls are recorded, so nothing is compiled.

``FUSER_REPLAY_SECONDS=600 pytest tests/runtime/test_random_replays.py`` tries more seeds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_graphs import StandIn, use_stand_in
from on_torch import use_torch, without_recordings
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.plan import cuts
from fuser.runtime import recorded

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16, FP32 = torch.bfloat16, torch.float32
SEEDS, SECONDS = 24, float(os.environ.get("FUSER_REPLAY_SECONDS", 0))
WIDTH = 32


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch)
    for name in ("FIRST_BYTES", "BUCKET_BYTES"):  # hooks cut wherever it is possible
        monkeypatch.setattr(cuts, name, 1)


# -- pipelines and events -------------------------------------------------------------------------


def pipeline(r: random.Random) -> fuser.Sequential:
    like: dict[str, Any] = {"dtype": r.choice((BF16, BF16, FP32))}
    width, ops = WIDTH, []
    channels: list[tuple[str, int]] = []
    kinds = "linear linear single bias act act gated norm norm l2 scale dropout make add quantize"
    for _ in range(r.randint(2, 7)):
        kind = r.choice(kinds.split())
        if kind in ("linear", "single"):
            out = r.choice((32, 64))
            made = fuser.Linear if kind == "linear" else fuser.BasicLinear
            ops.append(made(width, out, **like))
            width = out
        elif kind == "bias":
            ops.append(fuser.Bias(width, **like))
        elif kind == "act":
            ops.append(r.choice((fuser.GELU, fuser.SiLU, fuser.ReLU))())
        elif kind == "gated" and width == 64:
            ops.append(r.choice((fuser.SwiGLU, fuser.GEGLU))())
            width = 32
        elif kind == "norm":
            ops.append(r.choice((fuser.LayerNorm, fuser.RMSNorm))(width, **like))
        elif kind == "l2":
            ops.append(fuser.L2Normalization())
        elif kind == "scale":
            ops.append(fuser.ConstantScale(r.choice((0.5, -1.5))))
        elif kind == "dropout":
            ops.append(fuser.Dropout(0.3))
        elif kind == "make":
            ops.append(fuser.MakeExtraOutput())
            ops[-1].set_extra_output_channel(0, f"c{len(channels)}", output_to_caller=False)
            channels.append((f"c{len(channels)}", width))
        elif kind == "add" and (fitting := [name for name, w in channels if w == width]):
            ops.append(fuser.AddExtraInput())
            ops[-1].set_extra_input_channel(0, r.choice(fitting))
        elif kind == "quantize":
            ops.append(fuser.Quantize(True, r.random() < 0.5))
    model = fuser.Sequential(*ops, fuser.Linear(width, 32, **like))
    bound = {name for op in ops if isinstance(op, fuser.AddExtraInput) for name in op.channels}
    for (name, _), op in zip(
        channels, [op for op in ops if isinstance(op, fuser.MakeExtraOutput)], strict=True
    ):
        if name not in bound:
            op.set_extra_output_channel(0, name, output_to_caller=True)
    return model


RECIPES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: recipes.DelayedScaling(amax_history_len=2),
    lambda: recipes.Float8CurrentScaling(),
    lambda: recipes.MXFP8BlockScaling(),
    lambda: recipes.Float8BlockScaling(),
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "fewer rows": lambda x: x[:32].clone(),
    "wide": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "odd": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "turned": lambda x: x.t().contiguous().t(),
    "lazily negated": torch._neg_view,
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}
OFTEN = ("train", "train", "checkpoint")
MODES = (*OFTEN, "train", "no_grad", "inference", "reentrant", "profiled")
BETWEEN = ("data_wide", "data_odd", "data_new", "data_dtype", "eps", "scale", "recipe", "nothing")
CHANGES = (*BETWEEN, "write", "replace", "tie", "freeze", "eval", "train", "load", "copy", "hook")


def events(r: random.Random) -> list[tuple[str, Any]]:
    """Calls of a base layout mostly, so that passes are replayed."""
    base = {"layout": r.choice(list(LAYOUTS)[:5]), "mode": r.choice(OFTEN), "amp": False}
    script: list[tuple[str, Any]] = []
    flags = r.choice(((None,), (True, False, False), (True, False, None)))
    if r.random() < 0.3:
        script.append(("change", ("hook", r.randrange(100))))
    for number in range(r.randint(6, 9)):
        call = dict(base, data=r.randrange(1 << 20), flags=r.choices(flags, k=3))
        if number >= 3 and r.random() < 0.5:
            script.append(("change", (r.choice(CHANGES), r.randrange(100))))
        if number >= 2 and r.random() < 0.3:
            name = r.choice(("layout", "mode", "amp"))
            call[name] = {"layout": r.choice(list(LAYOUTS)), "mode": r.choice(MODES), "amp": True}[
                name
            ]
        script.append(("call", call))
        if number >= 2 and r.random() < 0.3:
            script.append(("change", (r.choice(BETWEEN), r.randrange(100))))
        if r.random() < 0.85:  # else later, after another call
            gradient = r.choice(["plain"] * 4 + list(LAYOUTS)[2:])
            how = r.choice(("plain",) * 4 + ("twice", "profiled", "amp", "some"))
            script.append(("backward", (gradient, how, r.randrange(1 << 20))))
    return [*script, ("backward", ("plain", "plain", 1)), ("backward", ("plain", "plain", 2))]


# -- one of the two sides --------------------------------------------------------------------------


class Side:
    """A pipeline, and all that its events returned."""

    def __init__(self, model: fuser.Sequential, recipes_: list[Any]) -> None:
        self.model, self.recipes = model, recipes_
        self.log: list[Any] = []
        self.waiting: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def run(self, script: list[tuple[str, Any]]) -> list[Any]:
        torch.manual_seed(0)
        for what, given in script:
            try:
                getattr(self, what)(given)
            except Exception as error:
                self.log.append(f"{type(error).__name__}: {str(error)[:80]}")
                self.model.zero_grad()
            self.log.append(torch.get_rng_state())
            self.note_states()
        return self.log

    def note_states(self) -> None:
        for module in self.model.modules():
            for _, state in sorted(getattr(module, "_delayed", {}).items()):
                self.log += [state.scale.clone(), state.amax_history.clone()]

    def call(self, given: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(given["data"])
        dtype = next(self.model.parameters()).dtype
        x = LAYOUTS[given["layout"]](torch.randn(64, WIDTH, generator=generator).to(dtype))
        x, mode = x.detach().requires_grad_(), given["mode"]
        torch.manual_seed(given["data"])
        recipe = self.recipes[0]
        with contextlib.ExitStack() as stack:
            if recipe is not None:
                stack.enter_context(fuser.autocast(recipe=recipe))
            if given["amp"]:
                stack.enter_context(torch.autocast("cpu", dtype=BF16))
            if mode in ("no_grad", "inference"):
                context = torch.no_grad if mode == "no_grad" else torch.inference_mode
                stack.enter_context(context())
            if mode == "profiled":
                stack.enter_context(profiler())
            kinds = (fuser.Linear, fuser.BasicLinear)
            linears = [op for op in self.model if isinstance(op, kinds)]
            flags = zip(linears, itertools.cycle(given["flags"]), strict=False)
            kwargs = {op: {"is_first_microbatch": flag} for op, flag in flags if flag is not None}
            options: dict[str, Any] = {"op_kwargs": kwargs} if kwargs else {}
            if mode in ("reentrant", "checkpoint"):
                call = functools.partial(self.model, **options)
                y = checkpoint(call, x, use_reentrant=mode == "reentrant")
            else:
                y = self.model(x, **options)
        outputs = y if isinstance(y, tuple) else (y,)
        self.log += [tensor.detach().clone() for tensor in outputs]
        if outputs[0].requires_grad:
            self.waiting.append((outputs[0], [x, *self.model.parameters()]))

    def backward(self, given: tuple[str, str, int]) -> None:
        if not self.waiting:
            return
        layout, how, seed = given
        y, leaves = self.waiting.pop(seed % len(self.waiting))
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
        dy = LAYOUTS[layout](dy) if layout != "fewer rows" else dy
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        with contextlib.ExitStack() as stack:
            if how == "profiled":
                stack.enter_context(profiler())
            if how == "amp":
                stack.enter_context(torch.autocast("cpu", dtype=BF16))
            if how == "some":
                self.log += torch.autograd.grad(y, leaves[::2], dy, allow_unused=True)
                return
            y.backward(dy, retain_graph=how == "twice")
            if how == "twice":
                y.backward(dy)
        self.log += [leaf.grad if leaf.grad is None else leaf.grad.clone() for leaf in leaves]

    @torch.no_grad()
    def change(self, given: tuple[str, int]) -> None:
        kind, seed = given
        params = list(self.model.parameters())
        parameter = params[seed % len(params)]
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 8
        noise = noise.to(parameter.dtype)
        ops = [op for op in self.model.modules() if isinstance(op, fuser.BasicOperation)]
        owner, name = next((o, n) for o in ops for n, p in o._parameters.items() if p is parameter)
        if kind in ("data_wide", "data_odd"):
            parameter.data = LAYOUTS[kind.removeprefix("data_")](parameter.data)
        elif kind == "data_new":
            parameter.data = parameter.data + noise
        elif kind == "data_dtype":
            parameter.data = parameter.data.to(FP32 if parameter.dtype == BF16 else BF16)
        elif kind == "write":
            parameter.add_(noise)
        elif kind == "replace":
            setattr(owner, name, Parameter(parameter.data + noise))
        elif kind == "tie":
            twins = [p for p in params if p is not parameter and p.shape == parameter.shape]
            if twins and twins[0].dtype == parameter.dtype:
                setattr(owner, name, twins[0])
        elif kind == "freeze":
            parameter.requires_grad_(not parameter.requires_grad)
        elif kind in ("eval", "train"):
            self.model.train(kind == "train")
        elif kind == "load":
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()), assign=seed % 2 == 1)
        elif kind == "copy" and not self.waiting:
            self.model = copy.deepcopy(self.model)
        elif kind == "hook":
            parameter.register_post_accumulate_grad_hook(lambda p: None)
        elif kind == "recipe":
            self.recipes.append(self.recipes.pop(0))
        else:
            values = {"eps": ("eps", 1.0), "scale": ("scale", 3.0)}
            attribute, value = values.get(kind, ("", None))
            for op in ops:
                if attribute in op.__dict__:
                    setattr(op, attribute, value)


def profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [t.detach().contiguous().view(torch.uint8) for t in (one, other)]  # of NaNs too
    return torch.equal(*bits)


def check(seed: int) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    model, script = pipeline(r), events(r)
    chosen = r.sample(RECIPES, 2)
    found = Side(copy.deepcopy(model), [make() for make in chosen]).run(script)
    with without_recordings():
        expected = Side(copy.deepcopy(model), [make() for make in chosen]).run(script)
    pairs = zip(found, expected, strict=False)
    wrong = next((i for i, pair in enumerate(pairs) if not same(*pair)), None)
    assert wrong is None, (seed, wrong, str(found[wrong])[:200], str(expected[wrong])[:200], model)
    assert len(found) == len(expected)


# -- captures, and cuts ----------------------------------------------------------------------------

KEPT = ("nothing", "write", "hook", "load")
"""Changes that a graph sees in its memory, or that do not concern it."""
AFTER_CAPTURE = (*KEPT, *KEPT, "data_new", "eps", "scale", "replace", "freeze", "eval", "capture")
CAPTURES = 8


class Captured(Side):
    """The same with the pipeline in graphs; ``is_captured`` is False for the other side."""

    def __init__(self, model: fuser.Sequential, recipe: Any, *, is_captured: bool) -> None:
        super().__init__(model, [recipe])
        self.is_captured = is_captured

    def run(self, script: list[tuple[str, Any]]) -> list[Any]:
        super().run(script)
        super().note_states()
        return self.log

    def note_states(self) -> None:
        """At the end alone: a replay makes its states later than a call of the ops."""

    def capture(self) -> None:
        if self.is_captured:
            dtype, recipe = next(self.model.parameters()).dtype, self.recipes[0]
            sample = torch.zeros(64, WIDTH, dtype=dtype, requires_grad=True)
            options = {"recipe": recipe, "enabled": recipe is not None, "num_warmup_iters": 1}
            fuser.make_graphed_callables(self.model, (sample,), **options)

    def change(self, given: tuple[str, int]) -> None:
        super().change(given)
        if given[0] == "capture":
            self.capture()


def check_captures(seed: int) -> int:
    """Events with a capture before them, and maybe another; the number of replays."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    model, make = pipeline(r), r.choice(RECIPES)
    script: list[tuple[str, Any]] = [("change", ("hook", r.randrange(100)))] * r.randint(0, 1)
    script.append(("change", ("capture", 0)))
    for number in range(6):
        call: dict[str, Any] = {"layout": "plain", "mode": "train", "amp": False}
        call |= {"data": r.randrange(1 << 20), "flags": (None,)}
        if number >= 2 and r.random() < 0.5:
            script.append(("change", (r.choice(AFTER_CAPTURE), r.randrange(100))))
        script += [("call", call), ("backward", ("plain", "plain", r.randrange(1 << 20)))]
    replays, replay = [0], StandIn.replay

    def counted(graph: StandIn) -> None:
        replays[0] += 1
        replay(graph)

    with pytest.MonkeyPatch.context() as patch:
        use_stand_in(patch)
        patch.setattr(StandIn, "replay", counted)
        found = Captured(copy.deepcopy(model), make(), is_captured=True).run(script)
    with without_recordings():
        expected = Captured(copy.deepcopy(model), make(), is_captured=False).run(script)
    pairs = zip(found, expected, strict=False)
    wrong = next((i for i, pair in enumerate(pairs) if not same(*pair)), None)
    assert wrong is None, (seed, wrong, str(found[wrong])[:200], str(expected[wrong])[:200], model)
    assert len(found) == len(expected)
    return replays[0]


@pytest.mark.filterwarnings("ignore:Graphed module 0 .* runs without its graph")
def test_captures_of_random_pipelines_have_the_bits_of_their_plans_own_code() -> None:
    """Cut ones too, and with changes between the replays."""
    assert sum(check_captures(seed) for seed in range(CAPTURES)) >= 6 * CAPTURES


@pytest.mark.parametrize("seed", range(SEEDS))
def test_replays_of_a_random_pipeline_have_the_bits_of_its_plans_own_code(seed: int) -> None:
    check(seed)


def test_the_random_pipelines_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above tests something; and it goes on for as long as was asked."""
    count, play = [0], recorded._played

    def counted(*args: Any) -> Any:
        count[0] += 1
        return play(*args)

    monkeypatch.setattr(recorded, "_played", counted)
    end, seed = time.monotonic() + SECONDS, SEEDS
    while seed < SEEDS + 6 or time.monotonic() < end:
        check(seed)
        seed += 1
    assert count[0] >= 12
