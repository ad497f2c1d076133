"""Every field of every quantizer and producer, with two values of it each.

Quantizers and stages are dataclasses and producers have constructors. So a field that is added is
found here, and its test asks for two values.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from normalization_cases import same_bits
from pointwise_cases import SCALARS

import fuser.tensors
from fuser.chain import STAGES, Stage
from fuser.formats import DType
from fuser.functional import adamw, grouped, normalization, permutation, pointwise
from fuser.functional.lazy import LazyTensor
from fuser.reference.permutation import sort_by_expert
from fuser.tensors import Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS = 32, 64
CALLS = 4

Results = list[torch.Tensor | None]
Options = dict[str, Any]
Running = Callable[[], AbstractContextManager[Any]]
"""A context in which kernels run, and none of them has before."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two things to run on a device, which differ in one field.

    ``contexts`` has them for different values of the other fields: the first in which they give
    different results will do.
    """

    name: str
    contexts: tuple[tuple[Callable[[str], Results], Callable[[str], Results]], ...]
    has_effect: bool = True

    def __str__(self) -> str:
        return self.name


def check(pair: Pair, running: Running, device: str = "cpu") -> None:
    """One value and the other in turn give what each gives where nothing is remembered."""
    has_effect = False
    for runs in pair.contexts:
        expected = []
        for run in runs:
            forget()
            with running():
                expected.append(run(device))
        with running():
            for _ in range(CALLS):
                for run, wanted in zip(runs, expected, strict=True):
                    assert are_same(run(device), wanted), pair.name
        has_effect = not are_same(*expected)
        if has_effect:
            break
    assert has_effect is pair.has_effect, "the two values must give different results"


def forget() -> None:
    """Drop what launchers have found out so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("fuser.cuda.", "fuser.functional.")) and name != "fuser.cuda.module":
            for found in list(vars(module).values()):
                if hasattr(found, "cache_clear") and found.__module__ == name:
                    found.cache_clear()


def are_same(some: Results, others: Results) -> bool:
    """Whether all are there, or not, and have the same bits."""
    return len(some) == len(others) and all(
        one is other
        if one is None or other is None
        else one.shape == other.shape and same_bits(one, other)
        for one, other in zip(some, others, strict=True)
    )


def drawn(seed: int, columns: int = COLUMNS, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random numbers, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, columns, generator=generator).to(dtype)


# -- quantizers ---------------------------------------------------------------

# Two values of what is no flag.
OF_QUANTIZERS: dict[str, tuple[Any, Any]] = {
    "fp8_dtype": (DType.kFloat8E4M3, DType.kFloat8E5M2),
    "amax_epsilon": (0.0, 100.0),
    "block_scaling_dim": (1, 2),
    "seed": (3, 4),
    "scale": (2.0, 4.0),
    "amax": (0.0, 100.0),
    "device": (None, "cpu"),
    "group": (None, None),
    "nvfp4_e4m3_max": (448, 256),
    "nvfp4_4over6_err_mode": ("MAE", "MSE"),
    "dtype": (torch.float32, torch.float16),
    "rowwise_quantizer": (fuser.tensors.MXFP8Quantizer(), fuser.tensors.NVFP4Quantizer()),
    "columnwise_quantizer": (fuser.tensors.MXFP8Quantizer(), fuser.tensors.NVFP4Quantizer()),
    "columnwise_source": ("original", "rowwise_dequantized"),
}
# What goes with no other flag is on alone, and is on for what has no effect without it.
ALONE = ("row_scaled_nvfp4", "nvfp4_use_4over6")
NEEDS = dict.fromkeys(("nvfp4_e4m3_max", "nvfp4_4over6_err_mode"), "nvfp4_use_4over6")
STATE = ("scale", "amax")
# A device is accepted and not looked at; with a group nothing is remembered.
# Saturation makes a difference only beyond what the scale holds; without it nothing is cached.
WITHOUT_EFFECT = ("device", "group", "saturates")
# Off, the first two leave nothing to compare, and the last nothing that is cached.
ON = ("rowwise", "columnwise", "saturates")


def of_quantizers() -> Iterator[Pair]:
    """A pair for each field, in the context of all other flags off and on."""
    shipped = [getattr(fuser.tensors, name) for name in fuser.tensors.__all__]
    for cls in shipped:
        if not (inspect.isclass(cls) and issubclass(cls, Quantizer)) or cls is Quantizer:
            continue
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        flags = {name for name, field in fields.items() if isinstance(field.default, bool)}
        known = {name: OF_QUANTIZERS[name][0] for name in fields if name in OF_QUANTIZERS}
        for name in fields:
            if name not in flags and name not in known:
                pytest.fail(f"{cls.__name__}.{name} is new: OF_QUANTIZERS needs two values of it.")
            values = (False, True) if name in flags else OF_QUANTIZERS[name]
            contexts = []
            for others in (False, True):
                alone = name if name in ALONE else NEEDS.get(name)
                are_on = others and alone is None
                base = known | {
                    flag: (are_on and flag not in ALONE) or flag in (*ON, alone) for flag in flags
                }
                contexts.append(tuple(_quantizing(cls, {**base, name: v}) for v in values))
            has_effect = name not in WITHOUT_EFFECT
            yield Pair(f"{cls.__name__}.{name}", tuple(contexts), has_effect)


def _quantizing(cls: type[Quantizer], options: dict[str, Any]) -> Callable[[str], Results]:
    def run(device: str) -> Results:
        given = {
            name: torch.tensor([value], device=device) if name in STATE else value
            for name, value in options.items()
        }
        quantizer = cls(**given)
        made = quantizer(drawn(1).to(device))
        of_values = quantizer(pointwise._Forward((Stage("gelu"),), drawn(2).to(device), (None,)))
        return [*made.buffers().values(), *of_values.buffers().values(), *quantizer.state_tensors()]

    return run


# -- producers ----------------------------------------------------------------

GAMMA, BETA = (drawn(seed)[0].clone() for seed in (7, 8))
MEAN, RSTD = (drawn(seed, 1, F32).abs() for seed in (9, 10))
BIAS = drawn(11)[0].clone()
SCALES = drawn(12, 1, F32).flatten()
SEED = torch.tensor([2**40, 2**61])

# Rows of padded groups, one tile for each of two groups.
PADDED = torch.cat([drawn(seed) for seed in range(256 // ROWS)])


def padded(*sizes: int) -> grouped.PaddedGroups:
    groups = grouped.padded_groups(torch.tensor(sizes), len(sizes), ROWS, torch.device("cpu"))
    assert groups.padded_rows == len(PADDED)
    return groups


# The gradients of scales are undefined in padding, of which these groups have none.
WHOLE_TILES: Options = {"groups": grouped.padded_groups(128, 2, 256, torch.device("cpu"))}


def maps(seed: int, choices: int) -> Options:
    """The maps of a permutation to ROWS rows."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 4, (ROWS, choices), generator=generator)
    _, row_map, inverse_map = sort_by_expert(indices, 4, ROWS)
    return {"row_map": row_map, "inverse_map": inverse_map}


def step_of(seed: int, dtype: torch.dtype = BF16) -> adamw.Step:
    """A step of AdamW on ROWS rows."""
    master, average, squares = (drawn(3 * seed + k, dtype=F32) for k in range(3))
    constants = torch.linspace(0.1, 0.9, 9)
    return adamw.Step(master, drawn(seed, dtype=dtype), average, squares.abs(), constants)


GELU, SWIGLU = Stage("gelu"), Stage("swiglu")

# Gradients of the biases of groups, beside values of whole tiles.
OF_GROUPS: Options = {
    "stages": (Stage("srelu", is_scaled=True),),
    "dy": PADDED,
    "x": PADDED.flip(0),
    "operands": (drawn(12, 8, F32).flatten(),),
    "grads": (None,),
    "groups": padded(20, 12),
    "dbias": torch.zeros(2, COLUMNS, dtype=BF16),
}

BASES: dict[type[LazyTensor], Options] = {
    normalization._Norm: {
        "x": drawn(1, dtype=F32),
        "dtype": BF16,
        "parameters": (GAMMA,),
        "eps": 1e-5,
    },
    normalization._NormBackward: {
        "dy": drawn(2),
        "x": drawn(1, dtype=F32),
        "parameters": (GAMMA,),
        "statistics": (RSTD,),
        "needed": (True,),
    },
    pointwise._Forward: {"stages": (GELU,), "x": drawn(1), "operands": (None,)},
    pointwise.BackwardChain: {
        "stages": (GELU,),
        "dy": drawn(2),
        "x": drawn(1),
        "operands": (None,),
        "grads": (None,),
    },
    grouped._BackwardOfGroups: OF_GROUPS,
    grouped._PaddedRows: {"rows": drawn(1), "groups": padded(20, 12), "is_padded": False},
    permutation._GatheredRows: {"x": drawn(1), **maps(1, 1)},
    adamw._Updated: {"step": step_of(1), "dtype": BF16},
}
# Where a tensor with one scale does not fit: rows after the last group are undefined, and rows by
# index have an amax in groups alone.
QUANTIZERS: dict[type[LazyTensor], Quantizer] = {
    grouped._PaddedRows: MXFP8Quantizer(),
    permutation._GatheredRows: MXFP8Quantizer(),
}
EXTRA = drawn(6, dtype=F32)
LAYERNORM = {"parameters": (GAMMA, BETA), "statistics": (MEAN, RSTD), "needed": (True, True)}


def _chain_of(given: Options) -> LazyTensor:
    """The output of the chain whose gradient has these options."""
    return pointwise._Forward(given["stages"], given["x"], given["operands"])


def _norm_of(given: Options) -> LazyTensor:
    """The output of the norm whose gradient has these options, with its statistics."""
    output = normalization._Norm(given["x"], given["dy"].dtype, given["parameters"], 1e-5)
    output.statistics, output.has_statistics = given["statistics"], True
    return output


BIASED = {"stages": (Stage("bias"), GELU), "operands": (BIAS, None)}
# What differs from the base, twice.
OF_PRODUCERS: dict[type[LazyTensor], dict[str, tuple[Options, Options]]] = {
    normalization._Norm: {
        "x": ({}, {"x": drawn(5, dtype=F32)}),
        "dtype": ({}, {"dtype": F16}),
        "parameters": ({}, {"parameters": (GAMMA, BETA)}),
        "eps": ({}, {"eps": 1.0}),
        "zero_centered": ({}, {"zero_centered": True}),
        "extra": ({}, {"extra": EXTRA}),
        "wants_sum": ({"extra": EXTRA}, {"extra": EXTRA, "wants_sum": True}),
    },
    normalization._NormBackward: {
        "dy": ({}, {"dy": drawn(5)}),
        "x": ({}, {"x": drawn(5, dtype=F32)}),
        "parameters": ({}, LAYERNORM),
        "statistics": ({}, {"statistics": (2 * RSTD,)}),
        "needed": ({}, {"needed": (False,)}),
        "zero_centered": ({}, {"zero_centered": True}),
        "d_extra": ({}, {"d_extra": EXTRA}),
        "rounded_dx": ({}, {"rounded_dx": drawn(2)}),
        "output": ({}, {"output": _norm_of}),
    },
    pointwise._Forward: {
        "x": ({}, {"x": drawn(5)}),
        "operands": (BIASED, {**BIASED, "operands": (2 * BIAS, None)}),
    },
    pointwise.BackwardChain: {
        "dy": ({}, {"dy": drawn(5)}),
        "x": ({}, {"x": drawn(5)}),
        "operands": (
            {**BIASED, "grads": (None, None)},
            {**BIASED, "grads": (None, None), "operands": (2 * BIAS, None)},
        ),
        "grads": ({**BIASED, "grads": (None, None)}, {**BIASED, "grads": (BIAS, None)}),
        "saved": (
            {**BIASED, "grads": (None, None)},
            {**BIASED, "grads": (None, None), "saved": 1},
        ),
        "output": ({}, {"output": _chain_of}),
    },
    grouped._BackwardOfGroups: {
        "dy": ({}, {"dy": PADDED + 1}),
        "x": ({}, {"x": PADDED}),
        "operands": ({}, {"operands": (2 * OF_GROUPS["operands"][0],)}),
        "grads": (WHOLE_TILES, {**WHOLE_TILES, "grads": (torch.zeros(256, dtype=F32),)}),
        "groups": ({}, {"groups": padded(12, 20)}),
        "dbias": ({}, {"dbias": None}),
    },
    grouped._PaddedRows: {
        "rows": ({}, {"rows": drawn(5)}),
        "groups": ({}, {"groups": padded(12, 20)}),
        "is_padded": ({"rows": PADDED}, {"rows": PADDED, "is_padded": True}),
    },
    permutation._GatheredRows: {
        "x": ({}, {"x": drawn(5)}),
        "row_map": ({}, maps(2, 1)),
        "inverse_map": ({}, maps(1, 2)),
    },
    adamw._Updated: {
        "step": ({}, {"step": step_of(2, F32)}),
        "dtype": ({"step": step_of(1, F32)}, {"step": step_of(1, F32), "dtype": F16}),
    },
}


def of_producers() -> Iterator[Pair]:
    """A pair for each parameter of each constructor; the stages of a chain have theirs below."""
    for cls in (*LazyTensor.__subclasses__(), *pointwise.BackwardChain.__subclasses__()):
        if not cls.__module__.startswith("fuser.") or cls.launch_key is LazyTensor.launch_key:
            continue
        for name in list(inspect.signature(cls).parameters):
            if name == "stages":
                continue
            if name not in OF_PRODUCERS.get(cls, {}):
                pytest.fail(f"{cls.__name__}({name}) is new: OF_PRODUCERS needs two values of it.")
            pair = OF_PRODUCERS[cls][name]
            yield Pair(f"{cls.__name__}.{name}", (_two(cls, *pair),))


# Two stages and their operands.
OF_STAGES: dict[str, tuple[tuple[Stage, Any], tuple[Stage, Any]]] = {
    "name": ((GELU, None), (Stage("silu"), None)),
    "interleave": ((SWIGLU, None), (Stage("swiglu", interleave=8), None)),
    "is_scaled": ((SWIGLU, None), (Stage("swiglu", is_scaled=True), SCALES)),
}


def of_stages() -> Iterator[Pair]:
    """A pair for each field of a stage, and for each scalar of each op that has some."""
    pairs: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(Stage):
        if field.init and field.name != "scalars":
            if field.name not in OF_STAGES:
                pytest.fail(f"Stage.{field.name} is new: OF_STAGES needs two values of it.")
            pairs[field.name] = OF_STAGES[field.name]
    counts = {name: traits.scalars for name, traits in STAGES.items()}
    for name, i in ((name, i) for name, count in counts.items() for i in range(count)):
        scalars = SCALARS.get(name, (0.5,))
        other = (*scalars[:i], scalars[i] / 2, *scalars[i + 1 :])
        operand = SEED if name == "dropout" else None
        pairs[f"{name}[{i}]"] = tuple((Stage(name, s), operand) for s in (scalars, other))
    for a, b in itertools.combinations((0.0, -0.0, float("nan")), 2):
        pairs[f"constant_scale {a} {b}"] = tuple(
            (Stage("constant_scale", (v,)), None) for v in (a, b)
        )
    for name, stages in pairs.items():
        forward, backward = [], []
        for stage, operand in stages:
            # Two stages: torch does the work of one sum or product.
            options: Options = {"stages": (stage, Stage("constant_scale", (2.0,)))}
            options["operands"] = (operand, None)
            forward.append(options)
            dy = drawn(2, COLUMNS // (1 + stage.is_gated))
            backward.append({**options, "dy": dy, "grads": (None, None)})
        yield Pair(f"_Forward.{name}", (_two(pointwise._Forward, *forward),))
        yield Pair(f"BackwardChain.{name}", (_two(pointwise.BackwardChain, *backward),))


def _two(cls: type[LazyTensor], one: Options, other: Options) -> tuple[Any, Any]:
    base = BASES[cls]
    return _producing(cls, base | one), _producing(cls, base | other)


def _producing(cls: type[LazyTensor], options: Options) -> Callable[[str], Results]:
    """What is written plainly and quantized, and what is written beside it."""

    def on(device: str, value: Any) -> Any:
        if isinstance(value, (grouped.PaddedGroups, adamw.Step)):
            return type(value)._make(on(device, item) for item in value)
        if isinstance(value, tuple):
            return tuple(on(device, item) for item in value)
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    def run(device: str) -> Results:
        results: Results = []
        for quantizer in (None, QUANTIZERS.get(cls, Float8CurrentScalingQuantizer())):
            given = {name: on(device, value) for name, value in options.items()}
            given |= {name: value(given) for name, value in given.items() if callable(value)}
            values = cls(**given)
            beside = list(given.get("grads", getattr(values, "grads", ())))
            beside += [*getattr(values, "statistics", ()), getattr(values, "z", None)]
            beside.append(given.get("dbias"))
            if quantizer is None:
                results.append(values.tensor())
                beside.append(getattr(values, "rounded_dx", None))
                beside.append(getattr(given.get("output"), "values", None))
            else:
                groups = given.get("groups") if cls is grouped._BackwardOfGroups else None
                rows: Any = values
                if groups is not None:
                    rows = grouped.padded_rows(values, groups, is_padded=True)
                    quantizer = MXFP8Quantizer()
                results += quantizer(rows).buffers().values()
            results += beside
        return results

    return run


def pairs() -> list[Pair]:
    """Every pair of this file."""
    return [*of_quantizers(), *of_producers(), *of_stages()]
