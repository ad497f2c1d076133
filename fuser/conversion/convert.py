"""``fuser.convert``: the modules of a model run pipelines, and stay what they are."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch.nn.parameter import is_lazy

from fuser.conversion.converted import (
    converted_modules,
    recipe_of,
    runner_of,
    set_conversion,
    unset_conversion,
    why_no_subclass,
)
from fuser.conversion.experts import experts_unit
from fuser.conversion.gains import Gains
from fuser.conversion.held_objects import recorded_reads
from fuser.conversion.leaves import SMALLEST_LINEAR, are_close, is_fuser, linear_part, norm_part
from fuser.conversion.modules import (
    OWN_FORWARD,
    attributes_of,
    bare,
    child_of,
    hooks_of,
    joint,
    original_class,
)
from fuser.conversion.parts import PLAIN_TENSORS, Chain, LinearPart, Part
from fuser.conversion.report import ConversionReport, ConversionRow
from fuser.conversion.routers import routers
from fuser.conversion.shared_input import shared_inputs
from fuser.conversion.unit import REQUIRED, ChainPipeline, Ref, Runner, Unit, UnitStep, unit_of
from fuser.errors import FuserError, InputError, InputTypeError
from fuser.recipe import Recipe, recipe_named
from fuser.sequential import Sequential

Filter = Callable[[str, torch.nn.Module], bool]


NEVER = ", never quantized"
"""In a row of a conversion with a recipe."""
OTHER_NORM = (
    "it is no LayerNorm with a weight and a bias, and no RMSNorm with a weight, of the last "
    "dimension alone"
)


def convert(
    model: torch.nn.Module,
    *,
    recipe: Recipe | str | None = None,
    filter: Filter | None = None,
    linears: Literal["recipe", "all", "none"] = "recipe",
    norms: Literal["fused", "all", "none"] = "fused",
    keep: Sequence[str] = ("first", "last"),
    rounding: Literal["fused", "torch"] = "fused",
    strict: bool = False,
) -> ConversionReport:
    """Let the modules of a model run pipelines, in place.

    A module that computes a chain of linears, norms, activations and residual connections gets a
    subclass of its class whose forward runs the chain as a pipeline. It keeps its children,
    parameters, hooks and names, so state dicts, optimizers and wrappers see the same model. Modules
    are found by their forward, traced with torch.fx, and one chain of each kind is compared with
    the module's own values. The forward of the module itself runs as before whenever a child is no
    longer what was converted: replaced by an adapter, quantized, pruned, or with hooks.

    A second call replaces the conversion of the first, with its own options.

    Parameters
    ----------
    model
        Any module. Weights of two linears that run as one, such as gate and up, are moved into one
        memory; the parameters stay the same objects.
    recipe
        Under which the model runs, and each converted module that is called alone or by a forward
        that another library gave the model. A :class:`fuser.autocast` around the call wins, also
        one with ``enabled=False``. A recipe, or its name, such as ``"current"``. None leaves it to
        :class:`fuser.autocast`.
    filter
        Called with the path of a module and the module: False leaves it as it is, and with it
        every chain that would replace it.
    linears
        Linears outside of chains: converted with a ``recipe`` (``"recipe"``), always (``"all"``) or
        never (``"none"``). Those with fewer than 32 inputs or outputs stay, as they gain nothing;
        so do routers, whose output chooses among experts, and the report names them.
    norms
        Norms: converted in chains (``"fused"``), also alone (``"all"``), or never (``"none"``).
    keep
        Linears that run unquantized, also inside of autocast: ``"first"`` and ``"last"`` of the
        model's linears of at least 32 x 32, in the order of its modules and without routers, or
        patterns of paths, e.g. ``"*.o_proj"``. A chain with
        one of them runs unquantized as a whole, which the report says; if it holds chains without
        one, these run alone instead.
    rounding
        In 16 bits. A pipeline computes from a product to the next one in fp32, and rounds once
        (``"fused"``). torch rounds the activation, then its product with the second half, and in a
        norm of transformers the row before its gain: ``"torch"`` does the same, with torch's
        functions and norms between the linears, which fuse with nothing then.
    strict
        Whether a module that looks convertible and is not is an error.

    Returns
    -------
    The report: which modules run which chains, and why others do not.

    Raises
    ------
    InputTypeError
        If ``model`` is no module or ``recipe`` no recipe.
    InputError
        If a parameter of the model has no shape yet, as in ``LazyLinear``.
        On another value of ``linears``, ``norms`` or ``rounding``, or the name of no recipe; if
        ``keep`` matches nothing; with ``strict`` if a module was refused. The model is then as it
        was.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    _check(model, recipe, linears=linears, norms=norms, rounding=rounding)
    if recipe is None and linears == "recipe":
        linears = "none"
    if rounding == "torch" and norms == "all":
        norms = "fused"  # a norm alone is torch's
    with _plain_defaults():
        recognized = ((path, linear_part(m, "")) for path, m in model.named_modules())
        parts = {path: part for path, part in recognized if part is not None}
        shapes = {path: part.shape for path, part in parts.items()}
        chosen_by = routers(model, shapes)
        kept = _kept(shapes, keep, chosen_by)
        search = _UnitSearch(
            filter, linears, norms, kept, chosen_by, "" if recipe is None else NEVER
        )
        search.visit(model, "")
        gains = Gains(model, recipe, rounding)
        left = tuple(search.left(model, parts, gains))
    rows = {row.path for row in search.rows if row.is_converted}
    units = [unit for unit in search.units if unit[0] in rows]
    for path, module, unit in units:
        if not unit.is_quantized:
            gains.note(path, module, unit.chains, is_converted=True)
    are_quantized = [unit.is_quantized for _, _, unit in units if unit.linears]
    note = (
        f"No linear is quantized: keep={tuple(keep)!r} holds those of every chain; keep=() "
        "quantizes them."
    )
    note *= recipe is not None and are_quantized != [] and not any(are_quantized)
    report = ConversionReport(tuple(search.rows), note, tuple(chosen_by), left, gains)
    if strict and report.refused:
        raise InputError(
            "fuser.convert(strict=True) has converted nothing, because of "
            + "; ".join(f"{row.path} ({row.cls}): {row.text}" for row in report.refused[:4])
            + "."
        )
    before = {module: runner_of(module) for module in converted_modules(model)}
    for module in before:
        unset_conversion(module)
    for _, module, unit in search.units:
        runner = Runner(unit.as_torch() if rounding == "torch" else unit, module)
        runner.continue_scales(before.get(module))
        set_conversion(module, runner, recipe)
    if recipe is not None:
        for module in (model, *_holders(model)):
            set_conversion(module, None, recipe)
    return report


def _holders(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that call pipelines of fuser's own, which have no recipe of a conversion."""

    def is_own(module: torch.nn.Module) -> bool:
        return is_fuser(module) or isinstance(module, Sequential)

    for module in model.modules():
        is_holder = not is_own(module) and any(map(is_own, module.children()))
        if is_holder and why_no_subclass(module) is None:
            yield module


@contextlib.contextmanager
def _plain_defaults() -> Iterator[None]:
    """Make tensors on a CPU in fp32, whatever the contexts of a loader or a trainer say."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


def revert(model: torch.nn.Module) -> int:
    """Give every converted module of a model its own class again; returns their number.

    Parameters stay where they are: gate and up remain side by side in one memory.
    """
    modules = list(converted_modules(model))
    for module in modules:
        unset_conversion(module)
    return len(modules)


@contextlib.contextmanager
def converted(model: torch.nn.Module, **options: Any) -> Iterator[ConversionReport]:
    """A context in which a model is converted; at its end the model is as it was before.

    Takes the arguments of :func:`convert`, and gives its report.
    """
    before = [(m, runner_of(m), recipe_of(m)) for m in converted_modules(model)]
    report = convert(model, **options)
    try:
        yield report
    finally:
        revert(model)
        for conversion in reversed(before):  # what is inside of a module before it
            set_conversion(*conversion)


class _UnitSearch:
    """Finds the units of a model; ``units`` has them with their modules, innermost first.

    ``kept`` has the paths of the linears that are not quantized, and ``never`` is what their rows
    say of it.
    """

    def __init__(
        self,
        filter: Filter | None,
        linears: str,
        norms: str,
        kept: set[str],
        routers: Collection[str],
        never: str,
    ) -> None:
        self.units: list[tuple[str, torch.nn.Module, Unit]] = []
        self.rows: list[ConversionRow] = []
        self._filter = filter
        self._linears, self._norms, self._kept, self._routers = linears, norms, kept, routers
        self._never = never
        self._seen: set[torch.nn.Module] = set()
        self._known: dict[object, Unit | str | None] = {}
        self._chains: dict[torch.nn.Module, Unit] = {}
        # Linears that are converted alone, and whether they are quantized, until one forward that
        # calls them has been read.
        self._alone: dict[torch.nn.Module, tuple[LinearPart, bool]] = {}
        self._norms_of_kinds: dict[object, Part | None] = {}

    def visit(self, module: torch.nn.Module, path: str) -> None:
        """Look at a module's children, and then at the module."""
        if module in self._seen or is_fuser(module):
            return
        self._seen.add(module)
        first_row, before = len(self.rows), len(self.units)
        for name, child in module.named_children():
            self.visit(child, joint(path, name))
        stacked = any(p is not None and p.dim() == 3 for p in module._parameters.values())
        if not module._modules and not stacked:
            self._leaf(module, path)
            return
        unit = self._unit(module, path)
        if isinstance(unit, Unit):
            if self._quantizes_less(path, unit):
                return
            # The rows of its parts: they run alone only where the whole does not.
            inside = {joint(path, p) for c in unit.chains for p, _ in c.replaced}
            self.rows[first_row:] = [r for r in self.rows[first_row:] if r.path not in inside]
            self._add(path, module, unit, len(self.units) - before)
        elif (shared := self._shared(module, path)) is not None:
            names = {joint(path, name) for name in shared.linears}
            self.rows[first_row:] = [r for r in self.rows[first_row:] if r.path not in names]
            self._add(path, module, shared)
        elif unit is not None:
            self.rows.append(ConversionRow(path, _name(module), False, unit))

    def _add(self, path: str, module: torch.nn.Module, unit: Unit, inside: int = 0) -> None:
        """Convert a module; the last ``inside`` units are those of the modules in it."""
        is_kept = self._keeps(path, unit)
        if is_kept and inside:
            linears = _linears_of(path, unit)
            self.units[-inside:] = [
                (p, m, replace(u, is_in_kept=u.is_in_kept or _linears_of(p, u) <= linears))
                for p, m, u in self.units[-inside:]
            ]
        self.units.append((path, module, replace(unit, is_quantized=not is_kept)))
        text = unit.text + self._never * is_kept
        self.rows.append(ConversionRow(path, _name(module), True, text))

    def left(
        self, model: torch.nn.Module, linears: Mapping[str, LinearPart], gains: Gains
    ) -> Iterator[ConversionRow]:
        """The linears and norms that no pipeline has, and are no routers, with the reason.

        Those that an option would convert are noted in ``gains``.
        """
        taken = {path for path, _, _ in self.units} | {
            joint(path, name)
            for path, _, unit in self.units
            for chain in unit.chains
            for name, _ in chain.replaced
        }
        for path, module in model.named_modules():
            if path in taken or path in self._routers or is_fuser(module):
                continue
            part: Part | None = linears.get(path)
            if part is None:
                part = self._norm(module)
                if part is None and isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
                    yield ConversionRow(path, _name(module), False, OTHER_NORM)
                if part is None:
                    continue
            is_gained = path not in self._kept
            reason = 'outside of chains: norms="all" makes it one kernel in an eager model'
            if isinstance(part, LinearPart):
                rows, columns = part.shape
                reason = f"{columns} to {rows} features: of fewer than 32 no format gains"
                is_gained &= min(part.shape) >= SMALLEST_LINEAR
                if min(part.shape) >= SMALLEST_LINEAR:
                    reason = 'outside of chains: recipe=, or linears="all", converts it'
            refusal = part.refusal(module) if _has_plain_weights(module) else None
            refusal = refusal or why_no_subclass(module)
            if not self._accepts(path, module):
                refusal = "the filter leaves it out"
            elif hooks_of(module) == OWN_FORWARD:
                refusal = f"it has {OWN_FORWARD}"
            is_gained, reason = is_gained and not refusal, refusal or reason
            if is_gained:
                gains.note(path, module, [Chain((part,), ())], is_converted=False)
            yield ConversionRow(path, _name(module), False, reason)

    def _norm(self, module: torch.nn.Module) -> Part | None:
        """The part of a module that is a norm; of modules that are alike it is found once."""
        if module._modules:
            return None
        kind = _kind(module, ())
        if kind not in self._norms_of_kinds:
            self._norms_of_kinds[kind] = norm_part(module, "")
        return self._norms_of_kinds[kind]

    def _keeps(self, path: str, unit: Unit) -> bool:
        """Whether a linear of the unit is kept unquantized, and with it the whole unit."""
        return not self._kept.isdisjoint(_linears_of(path, unit))

    def _quantizes_less(self, path: str, unit: Unit) -> bool:
        """Whether a unit would take quantization from units inside of it that hold no kept one."""
        if not self._keeps(path, unit):
            return False
        linears = _linears_of(path, unit)
        inside = ((p, u) for p, _, u in self.units if len(u.linears) > 1)
        return any(_linears_of(p, u) <= linears and u.is_quantized for p, u in inside)

    def _accepts(self, path: str, module: torch.nn.Module) -> bool:
        return self._filter is None or bool(self._filter(path, module))

    def _leaf(self, module: torch.nn.Module, path: str) -> None:
        part: Part | None = None
        with recorded_reads() as reads:
            linear = linear_part(module, "")
            if linear is not None:
                is_worthwhile = min(linear.shape) >= SMALLEST_LINEAR and path not in self._routers
                if self._linears != "none" and is_worthwhile:
                    part = linear
            elif self._norms == "all":
                part = norm_part(module, "")
        if part is None or not self._accepts(path, module) or "forward" in module.__dict__:
            return
        unit = Unit((("input", REQUIRED),), (UnitStep(Chain((part,), ()), (Ref(0),)),), Ref(1))
        if isinstance(_runnable(module, unit), Unit):
            unit = replace(unit, reads=reads.inside(module, [""]))
            self._add(path, module, unit)
            if linear is not None and not unit.reads:
                self._alone[module] = linear, self.units[-1][2].is_quantized

    def _shared(self, module: torch.nn.Module, path: str) -> Unit | None:
        """The unit of linears that are converted alone and read one tensor of a module's forward.

        Of several such tensors that which most linears read.
        """
        is_as_written = hooks_of(module) != OWN_FORWARD and why_no_subclass(module) is None
        if not is_as_written or not self._accepts(path, module):
            return None
        alike: dict[object, list[tuple[str, LinearPart]]] = {}
        children = module._modules.items()
        linears = [n for n, c in children if c in self._alone or isinstance(c, torch.nn.Linear)]
        for number, names in enumerate(shared_inputs(module, linears)):
            for name in names:
                linear = child_of(module, name)
                part, is_quantized = self._alone.pop(linear, (None, False))
                if part is not None and not part.is_transposed:
                    kind = (number, part.shape[1], part.has_bias, linear.weight.dtype, is_quantized)
                    alike.setdefault(kind, []).append((name, part))
        chosen = max(alike.values(), key=len, default=[])
        if len(chosen) < 2:
            return None
        present = [child_of(module, name) for name, _ in chosen]
        outputs, (_, first) = tuple(part.shape[0] for _, part in chosen), chosen[0]
        shape = sum(outputs), first.shape[1]
        names = tuple(name for name, _ in chosen)
        product = LinearPart(names, shape, first.has_bias, outputs=outputs)
        replaced = tuple(zip(names, map(original_class, present), strict=True))
        step = UnitStep(Chain((product,), replaced), (Ref(0),))
        shared = Unit((("input", REQUIRED),), (step,), Ref(1), shares_input=True)
        return shared if isinstance(_runnable(module, shared), Unit) else None

    def _unit(self, module: torch.nn.Module, path: str) -> Unit | str | None:
        """What :func:`_find_unit` returns; modules that are alike are looked at once."""
        kind = _kind(module, self._chains)
        unit = self._known.get(kind)
        # Modules that are alike may still differ in what the forward reads of their children.
        has_changed = isinstance(unit, Unit) and unit.changed_read(module) is not None
        if kind not in self._known or has_changed:
            opened = [m for m in module.modules() if m in self._chains]
            with recorded_reads() as reads:
                unit = _find_unit(module, opened, takes_norms=self._norms != "none")
            if isinstance(unit, Unit):
                unit = replace(unit, reads=reads.inside(module, unit.watched))
            self._known[kind] = unit
        if not isinstance(unit, Unit):
            return unit
        for name in unit.watched:
            inner = joint(path, name)
            if not self._accepts(inner, module.get_submodule(name)):
                return f"the filter leaves out {inner or 'the model'}"
        if unit.is_one_chain and hooks_of(module) is None:
            self._chains[module] = unit
        return unit


def _kind(module: torch.nn.Module, opened: Collection[torch.nn.Module]) -> object:
    """What a module's unit depends on: equal for the layers of a model that are alike."""
    parameters = [(n, None if p is None else (*p.shape,)) for n, p in module._parameters.items()]
    children: list[tuple[str, object]] = []
    for name, child in module._modules.items():
        if child is None:
            children.append((name, None))
            continue
        # A module with children and parameters is a call in the graph, unless it is opened.
        is_call = child._modules and child not in opened and any(True for _ in child.parameters())
        children.append((name, _structure(child) if is_call else _kind(child, opened)))
    own = attributes_of(module)
    return original_class(module), hooks_of(module), own, tuple(parameters), tuple(children)


def _structure(module: torch.nn.Module) -> object:
    """The classes and names of a module and of those in it, and which parameters they have."""
    parameters = [(name, p is None) for name, p in module._parameters.items()]
    children = [(n, c and _structure(c)) for n, c in module._modules.items()]
    return original_class(module), tuple(parameters), tuple(children)


def _find_unit(
    module: torch.nn.Module, opened: Sequence[torch.nn.Module], *, takes_norms: bool
) -> Unit | str | None:
    """The unit of a module; why it has none, if it looks like one; else None."""
    unit = experts_unit(module)
    if unit is None:
        linears = [part for c in module.children() if (part := linear_part(c, "")) is not None]
        if not linears and not opened:
            return None
        if hooks_of(module) == OWN_FORWARD:
            unit = f"it has {OWN_FORWARD}"
        else:
            unit = unit_of(module, opened, takes_norms=takes_norms)
        if isinstance(unit, str):
            return unit if _look_like_a_feed_forward([part.shape for part in linears]) else None
        if unit.is_one_chain and not is_proved(module, unit):
            return "its values differ from those of " + unit.text
    return unit if isinstance(unit, str) else _runnable(module, unit)


def _runnable(module: torch.nn.Module, unit: Unit) -> Unit | str:
    """The unit; or why the module cannot run it as it is."""
    refusal = unit.refusal(module) if _has_plain_weights(module) else None
    return refusal or why_no_subclass(module) or unit


def _has_plain_weights(module: torch.nn.Module) -> bool:
    """Whether parameters are as a forward has them; those of FSDP2 are DTensors until then."""
    return all(type(p) in PLAIN_TENSORS for p in module.parameters())


def is_proved(module: torch.nn.Module, unit: Unit) -> bool:
    """Whether a unit of one chain gives a module's values, small and large, on a CPU in fp32.

    Both compute with random parameters, whose sizes are divided by what they have in common if the
    module computes with such ones.
    """
    sizes = [size for p in module.parameters() for size in p.shape]
    divisor = math.gcd(*sizes)
    for scale in dict.fromkeys((max(divisor // 4, 1), 1)):
        values = _random_parameters(module, scale)
        outcome = _compared(module, unit, values)
        if outcome is not None:
            return outcome
    return False


def _random_parameters(module: torch.nn.Module, scale: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values: dict[torch.Tensor, torch.Tensor] = {}
    for p in module.parameters():
        value = torch.randn([size // scale for size in p.shape], generator=generator)
        values[p] = value / math.sqrt(value.shape[-1])
    return {name: values[p] for name, p in module.named_parameters(remove_duplicate=False)}


def _compared(module: torch.nn.Module, unit: Unit, values: dict[str, torch.Tensor]) -> bool | None:
    """Whether the values are the same; None if the module raises with such parameters."""
    tried = bare(module, values)
    chain = unit.chains[0].sized(tried)
    pipeline = ChainPipeline(chain, tried)
    columns = chain.values(tried)[0].shape[-1]
    generator = torch.Generator().manual_seed(1)
    for spread in (0.01, 1.0, 100.0, 1e4):
        x = spread * torch.randn(5, columns, generator=generator)
        for given in (x, x.reshape(1, *x.shape)):
            with torch.no_grad():
                try:
                    expected = tried(given.clone())
                except Exception:
                    return None
                try:
                    y = pipeline(tried, [given.clone()], is_quantized=False)
                except FuserError:
                    return False
            if not are_close(y, expected):
                return False
    return True


def _look_like_a_feed_forward(shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether one of two or three linears widens, and another one takes that, or half, back."""
    pairs = ((one, two) for one in shapes for two in shapes if one[1] == two[0] != one[0])
    return 1 < len(shapes) < 4 and any(one[0] in (two[1], 2 * two[1]) for one, two in pairs)


def _linears_of(path: str, unit: Unit) -> set[str]:
    """The paths in the model of the linears of a unit's chains."""
    return {joint(path, name) for name in unit.linears}


def _kept(
    shapes: Mapping[str, tuple[int, int]], keep: Sequence[str], routers: Collection[str]
) -> set[str]:
    """The paths of the linears that are not quantized: ``routers``, and those ``keep`` names.

    ``shapes`` has the weights of all linears, by their paths.
    """
    if isinstance(keep, str):
        raise InputTypeError(f"keep is a sequence of patterns; got the string {keep!r}.")
    linears = list(shapes)
    large = [p for p, shape in shapes.items() if min(shape) >= SMALLEST_LINEAR]
    # A small linear, such as a value head behind the last layer, is neither first nor last.
    ordered = [path for path in large if path not in routers] or linears
    kept = set(routers)
    for pattern in keep:
        if pattern in ("first", "last"):
            kept.update(ordered[:1] if pattern == "first" else ordered[-1:])
            continue
        named = fnmatch.filter(linears, pattern)
        if not named:
            raise InputError(
                f"keep has {pattern!r}, which matches no linear of the model; its linears are "
                f"{', '.join(linears[:6])}{', ...' if len(linears) > 6 else ''}."
            )
        kept.update(named)
    return kept


def _check(model: object, recipe: object, **options: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputTypeError(f"fuser.convert takes a module; got a {type(model).__name__}.")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"fuser.convert got a model whose {name} has no shape yet; call the model once "
                "before it is converted."
            )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputTypeError(
            f"fuser.convert takes a recipe of fuser.recipe or None; got a {type(recipe).__name__}."
        )
    for name, value in options.items():
        choices = get_args(get_type_hints(convert)[name])
        if value not in choices:
            raise InputError(
                f"fuser.convert got {name}={value!r}; it is one of {', '.join(choices)}."
            )


def _name(module: torch.nn.Module) -> str:
    return original_class(module).__name__
