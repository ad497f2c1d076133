"""Recorded passes over quantized parameters, which are inputs by their buffers.

The yardstick is a copy of the model whose passes are never recorded. It sees the same steps and the
same changes of its parameters between them. Ops compute with torch, whose calls are recorded.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from on_torch import use_torch, without_recordings
from one_launch_experts import in_one_launch
from said import said
from test_recorded_microbatches import at_once, noted
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.errors import StateError
from fuser.formats import DType
from fuser.runtime import recorded
from fuser.runtime.known_parameters import ParameterLayout
from fuser.te.pytorch import optimizers as fused
from fuser.tensors import HybridQuantizer

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
ROWS, WIDTH, EXPERTS = 64, 64, 4
RECIPES: dict[str, Any] = {
    name: formats.deterministic(cls)
    for name, cls in formats.RECIPES.items()
    if cls is not recipes.DelayedScaling
}
RECIPES["delayed"] = recipes.DelayedScaling(amax_history_len=3)
CURRENT, DELAYED = RECIPES["current"], RECIPES["delayed"]
PLAYED = ("current", "block", "mxfp8", "nvfp4", "delayed")


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch)
    at_once(monkeypatch)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sequences of recorded passes that were repeated."""
    return noted(monkeypatch, "_played")


# -- models ---------------------------------------------------------------------------------------


def dense(recipe: Any) -> fuser.Sequential:
    torch.manual_seed(0)
    residual, add = fuser.MakeExtraOutput(), fuser.AddExtraInput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    with fuser.quantized_model_init(recipe=recipe):
        return fuser.Sequential(
            residual,
            fuser.RMSNorm(WIDTH, dtype=BF16),
            fuser.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=BF16),
            fuser.SwiGLU(),
            fuser.Linear(WIDTH, WIDTH, dtype=BF16),
            add,
        )


def experts(recipe: Any, **options: Any) -> fuser.Sequential:
    torch.manual_seed(0)
    options = {"bias": False, "dtype": BF16, "device": "cpu", **options}
    with fuser.quantized_model_init(recipe=recipe):
        return fuser.Sequential(
            fuser.GroupedLinear(EXPERTS, WIDTH, 256, **options),
            fuser.ScaledSwiGLU(),
            fuser.GroupedLinear(EXPERTS, 128, 128, **options),
        )


one_weight = functools.partial(experts, single_grouped_weight=True)
MODELS: dict[str, Callable[[Any], fuser.Sequential]] = {
    "dense": dense,
    "experts": experts,
    "one weight": one_weight,
}


def device_of(model: Any) -> torch.device:
    found: torch.device = next(model.parameters()).device
    return found


def extras_of(model: Any, rows: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(model[0], fuser.GroupedLinear):
        return ()
    device = device_of(model)
    sizes = torch.tensor([10, 0, rows - 20, 10], dtype=torch.int32, device=device)
    return sizes, torch.linspace(0.5, 1.5, rows, device=device).to(BF16), sizes


def weights_of(model: torch.nn.Module) -> list[Any]:
    return [p for p in model.parameters() if isinstance(p, fuser.QuantizedTensor)]


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    values = parameter.detach()
    return values.dequantize() if isinstance(values, fuser.QuantizedTensor) else values.clone()


# -- changes --------------------------------------------------------------------------------------


def replaced(model: Any, make: Callable[[Any], torch.Tensor]) -> None:
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, fuser.QuantizedTensor):
                setattr(module, name, torch.nn.Parameter(make(weight)))


def written(model: Any) -> None:
    weights_of(model)[-1].mul_(1.5)


def of_other_values(weight: Any) -> Any:
    return weight._usage().unbound()(weight.dequantize() * 1.25)


def stepped(model: Any) -> None:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(values_of(parameter), 0.125)
    fused.FusedAdam(parameters, lr=0.05).step()
    model.zero_grad(set_to_none=True)


def given_data(model: Any) -> None:
    for weight in weights_of(model):
        weight.data = of_other_values(weight)


def given_values_apart(model: Any) -> None:
    for i, weight in enumerate(weights_of(model)):
        weight.data = weight._usage().unbound()(weight.dequantize() * (1 + i / 4))


def loaded(model: Any, *, assign: bool = False) -> None:
    other = copy.deepcopy(model)
    for weight in weights_of(other):
        weight.mul_(0.75)
    model.load_state_dict(other.state_dict(), assign=assign)


def used(model: Any, *, columnwise: bool) -> None:
    for weight in weights_of(model):
        weight.update_usage(columnwise_usage=columnwise)


def frozen(model: Any) -> None:
    for weight in weights_of(model):
        weight.requires_grad_(not weight.requires_grad)


def with_other_buffers(model: Any) -> None:
    for weight in weights_of(model):
        for name, buffer in of_other_values(weight).buffers().items():
            setattr(weight, name, buffer)


def with_one_memory(model: Any) -> None:
    """Weights of one shape hold the same buffers."""
    first, *others = weights_of(model)
    for other in others:
        if other.shape == first.shape:
            other.data = first.detach()


def of_another_format(model: Any) -> None:
    """First to E5M2; the next time the same bytes stand for numbers in E4M3."""
    for weight in weights_of(model):
        is_e5m2 = weight._quantizer.fp8_dtype is DType.kFloat8E5M2
        other = DType.kFloat8E4M3 if is_e5m2 else DType.kFloat8E5M2
        quantizer = dataclasses.replace(weight._usage().unbound(), fp8_dtype=other)
        if is_e5m2:
            weight._quantizer = quantizer
        else:
            weight.data = quantizer(weight.dequantize())


def exchanged(model: Any) -> None:
    """Plain weights for quantized ones, the next time these for those, and so on."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and weight.dim() == 2:
                other = vars(module).pop(f"other_{name}", None)
                vars(module)[f"other_{name}"] = weight
                setattr(
                    module, name, torch.nn.Parameter(values_of(weight)) if other is None else other
                )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "written": written,
    "step": stepped,
    "data": given_data,
    "load": loaded,
    "assign": functools.partial(loaded, assign=True),
    "replaced": functools.partial(replaced, make=of_other_values),
    "copied": functools.partial(replaced, make=copy.deepcopy),  # with a scale of its own
    "plain": functools.partial(replaced, make=lambda weight: weight.dequantize() * 1.25),
    "frozen": frozen,
    "other buffers": with_other_buffers,
    "one memory": with_one_memory,
    "half": lambda model: model.half().to(BF16),
    "another format": of_another_format,
}

# -- scripts --------------------------------------------------------------------------------------


def step(model: Any, recipe: Any, number: int, how: str = "", rows: int = ROWS) -> list[Any]:
    """Output and gradients of one step."""
    x = oracles.random_tensor((rows, WIDTH), BF16, number).to(device_of(model))
    x.requires_grad_(how != "no_grad")
    extras = extras_of(model, rows)
    under = fuser.autocast(enabled=recipe is not None, recipe=recipe)
    with under, torch.set_grad_enabled(how != "no_grad"):
        if how == "checkpoint":
            y = checkpoint(model, x, *extras, use_reentrant=False)
        else:
            y = model(x, *extras)
    log = [y.detach().clone()]
    if how != "no_grad":
        dy = oracles.random_tensor(tuple(y.shape), BF16, 100 + number).to(y.device)
        y.backward(dy, retain_graph=how == "retained")
        if how == "retained":
            log += [x.grad.clone()]
            y.backward(dy)
        log += [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad(set_to_none=True)
    return log


def ran(model: Any, recipe: Any, script: list[Any]) -> list[Any]:
    """Results of the steps of a script, with its changes between them, and the parameters."""
    log: list[Any] = []
    for number, event in enumerate(script):
        if callable(event):
            with torch.no_grad():
                event(model)
        elif isinstance(event, int):
            log += step(model, recipe, number, rows=event)
        else:
            log += step(model, recipe, number, event)
    return log + list(map(values_of, model.parameters()))


def assert_same(make: Callable[[Any], Any], recipe: Any, script: list[Any]) -> None:
    """Check a script against a copy without recordings."""
    model = make(recipe)
    other = copy.deepcopy(model)
    found = ran(model, recipe, script)
    with without_recordings():
        expected = ran(other, recipe, script)
    wrong = [
        i
        for i, (one, two) in enumerate(zip(found, expected, strict=True))
        if (one is None) != (two is None) or (one is not None and not torch.equal(one, two))
    ]
    assert not wrong, (len(found), wrong)


WARM = [""] * 5


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PLAYED)
def test_steps_are_replayed_with_the_bits_of_the_plans_own_code(
    recipe: str, played: list[Any]
) -> None:
    script = ["", stepped] * 8
    assert_same(dense, RECIPES[recipe], script)
    is_rounded_at_random = recipe == "nvfp4"
    assert len(played) >= (4 if is_rounded_at_random else 8), "forward, and backward, of most steps"


# On a GPU experts are replayed under recipes too: ``gpu/test_quantized_parameters_on_a_gpu.py``.
@pytest.mark.parametrize("made_under", ["current", "mxfp8", "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_without_a_recipe_are_replayed_with_the_bits_of_the_plans_own_code(
    name: str, made_under: str, played: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward reads the parameters, which contexts hold, or autograd saves."""
    if (name, made_under) == ("one weight", "delayed"):
        pytest.skip("One quantized parameter for all groups has no delayed scaling.")
    in_one_launch(monkeypatch)
    make = functools.partial(MODELS[name], RECIPES[made_under])
    assert_same(lambda _: make(), None, ["", stepped] * 6)
    assert len(played) >= 8, "forward and backward of most steps"


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_read_as_without_recordings(change: str, recipe: Any) -> None:
    changed = CHANGES[change]
    assert_same(dense, recipe, [*WARM, changed, *WARM, changed, "", "", stepped, ""])


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_read_without_a_recipe_too(
    change: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_launch(monkeypatch)
    changed, make = CHANGES[change], functools.partial(MODELS[name], CURRENT)
    assert_same(lambda _: make(), None, [*WARM, changed, *WARM, changed, "", ""])


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_a_copy_that_is_dropped_or_made_is_another_layout(recipe: Any, played: list[Any]) -> None:
    """In turn, and then each is played."""
    without, with_ = (functools.partial(used, columnwise=c) for c in (False, True))
    script = [*WARM, without, *WARM, with_, *WARM]
    assert_same(dense, recipe, script)
    assert len({id(which) for which in played}) == 4
    assert all(which in played[:2] for which in played[-10:]), "those of the first layout again"


def test_weights_that_no_longer_hold_the_same_buffers_are_read_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_one_launch(monkeypatch)
    make = functools.partial(experts, CURRENT)
    # Nothing but the sharing differs, and then each expert has other values.
    script = [given_data, with_one_memory, *WARM, given_values_apart, *WARM]
    assert_same(lambda _: make(), None, script)


def test_weights_of_two_ops_are_read_by_each(
    played: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order by the second one, whose backward finds them among those of both."""
    in_one_launch(monkeypatch)

    def tied(_: Any) -> fuser.Sequential:
        torch.manual_seed(0)
        options: dict[str, Any] = {"bias": False, "dtype": BF16, "device": "cpu"}
        with fuser.quantized_model_init(recipe=CURRENT):
            model = fuser.Sequential(
                fuser.GroupedLinear(EXPERTS, WIDTH, 2 * WIDTH, **options),
                fuser.ScaledSwiGLU(),
                fuser.GroupedLinear(EXPERTS, WIDTH, 2 * WIDTH, **options),
            )
        for group in range(EXPERTS - 1):
            setattr(model[2], f"weight{group}", getattr(model[0], f"weight{group + 1}"))
        return model

    assert_same(tied, None, [*WARM, stepped, *WARM])
    assert played


def test_two_layouts_in_turn_are_both_played(played: list[Any]) -> None:
    assert_same(dense, CURRENT, [ROWS, 32] * 6)
    assert len(played) == 2 * 8
    assert len({id(which) for which in played}) == 4


def test_plain_and_quantized_weights_in_turn_are_both_played(played: list[Any]) -> None:
    """The buffers of an earlier call are not those of this one."""
    assert_same(dense, CURRENT, [*WARM, *[exchanged, *WARM] * 3])
    assert len({id(which) for which in played}) == 4
    assert len(played) >= 2 * (2 * 3 + 2 * 5)


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
@pytest.mark.parametrize("how", ["retained", "checkpoint", "no_grad"])
def test_other_modes_have_the_bits_of_the_plans_own_code(how: str, recipe: Any) -> None:
    make = functools.partial(dense, recipe or CURRENT)
    assert_same(lambda _: make(), recipe, [how] * 5 + [stepped, how, "", how])


# -- between forward and backward -----------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
@pytest.mark.parametrize("columnwise", [True, False])
def test_a_parameter_that_is_written_before_backward_is_refused(
    columnwise: bool, recipe: Any, played: list[Any]
) -> None:
    """Also if forward has made the copy that backward reads, which has no buffer of it."""
    model = dense(recipe or CURRENT)
    used(model, columnwise=columnwise)
    ran(model, recipe, WARM)
    count = len(played)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(oracles.random_tensor((ROWS, WIDTH), BF16, 1).requires_grad_())
    assert len(played) == count + 1
    with torch.no_grad():
        weights_of(model)[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["experts", "one weight"])
def test_an_expert_that_is_written_before_backward_is_refused(
    name: str, played: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_launch(monkeypatch)
    model = MODELS[name](CURRENT)
    ran(model, None, WARM)
    count = len(played)
    y = model(
        oracles.random_tensor((ROWS, WIDTH), BF16, 1).requires_grad_(), *extras_of(model, ROWS)
    )
    assert len(played) == count + 1
    weight = weights_of(model)[-1]
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(
        StateError,
        match=said("shared-memory-parameter-shape-changed", "GroupedLinear", tuple(weight.shape)),
    ):
        y.sum().backward()


@pytest.mark.parametrize("change", ["without columns", "other buffers", "replaced", "data"])
@pytest.mark.parametrize("name", MODELS)
def test_a_backward_reads_what_a_parameter_holds_as_without_recordings(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a recipe it reads the parameter itself, whose buffers may be others by then."""
    in_one_launch(monkeypatch)
    changed = {**CHANGES, "without columns": functools.partial(used, columnwise=False)}[change]
    model = MODELS[name](CURRENT)

    def run(model: Any) -> list[torch.Tensor]:
        found = ran(model, None, WARM)
        for number in range(3):
            x = oracles.random_tensor((ROWS, WIDTH), BF16, number).requires_grad_()
            y = model(x, *extras_of(model, ROWS))
            if number:
                with torch.no_grad():
                    changed(model)
            y.backward(torch.ones_like(y))
            found += [y.detach(), x.grad]
        return found

    other = copy.deepcopy(model)
    found = run(model)
    with without_recordings():
        expected = run(other)
    assert all(map(torch.equal, found, expected))


# -- what is not played ---------------------------------------------------------------------------


def test_a_view_and_a_weight_with_its_source_run_the_plans_own_code(played: list[Any]) -> None:
    def with_source(model: Any) -> None:
        weight = weights_of(model)[0]
        weight.high_precision_source = weight.dequantize()

    def with_view(model: Any) -> None:
        whole = of_other_values(weights_of(model)[0])
        rows = torch.cat([whole.dequantize()] * 2)
        part = whole._quantizer(rows)[: len(whole)]
        model[2].weight = torch.nn.Parameter(part)

    for change in (with_source, with_view):
        assert_same(dense, CURRENT, [change, *WARM])
    assert not played


class OwnQuantizer(fuser.MXFP8Quantizer):
    """A user's, whose methods may do anything."""


@pytest.mark.parametrize("of", ["all copies", "rowwise", "columnwise"])
def test_a_users_quantizer_runs_the_plans_own_code(of: str, played: list[Any]) -> None:
    """Also if it makes one of the copies of a hybrid tensor."""

    def requantized(model: Any) -> None:
        for weight in weights_of(model):
            weight._quantizer = OwnQuantizer()

    def with_hybrids(own: type[fuser.MXFP8Quantizer]) -> Callable[[Any], None]:
        kinds = {
            f"{usage}_quantizer": fuser.MXFP8Quantizer() for usage in ("rowwise", "columnwise")
        }
        quantizer = HybridQuantizer(**{**kinds, f"{of}_quantizer": own()})
        return functools.partial(replaced, make=lambda w: quantizer(w.dequantize()))

    recipe = RECIPES["mxfp8"]
    if of == "all copies":
        assert_same(dense, recipe, [requantized, *WARM])
    else:
        assert_same(dense, recipe, [with_hybrids(fuser.MXFP8Quantizer), *WARM])
        assert played, "a hybrid tensor of this library's quantizers is"
        played.clear()
        assert_same(dense, recipe, [with_hybrids(OwnQuantizer), *WARM])
    assert not played


# -- what a backward looks at ----------------------------------------------------------------------


def test_the_layout_of_buffers_is_read_again_after_a_change_of_one() -> None:
    forward = recorded.RecordedForward([], ParameterLayout(()), {})
    memory = torch.zeros(80, dtype=torch.uint8)
    others = [torch.zeros(4, 8), torch.zeros(3)]
    layouts = [
        forward._layout_of(buffers)
        for buffers in (
            [memory[:64], *others],
            [memory[16:], *others],  # elsewhere, as far from a multiple of 16
            [memory[1:65], *others],
            [memory[:64].view(8, 8), *others],
            [memory[:64], others[0].t(), others[1]],
            [memory[:64], others[0], others[1].double()],
            [memory[:64], *others],
        )
    ]
    assert layouts[0] == layouts[1] == layouts[-1] is not None
    assert len(set(layouts)) == 5
    assert forward._layout_of([memory[:64], *others]) is layouts[-1]


def test_buffers_without_values_have_no_layout() -> None:
    forward = recorded.RecordedForward([], ParameterLayout(()), {})
    buffers = [torch.zeros(4), torch.ones(2)]
    assert forward._layout_of(buffers) is not None
    buffers[1].untyped_storage().resize_(0)
    assert forward._layout_of(buffers) is None
    assert forward._layout_of(buffers) is None
    buffers[1].untyped_storage().resize_(8)
    assert forward._layout_of(buffers) is not None
    assert forward._layout_of([buffers[0], None]) is None
