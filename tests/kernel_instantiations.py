"""Every kernel that the launchers may ask for; the compile check compiles just these.

A launcher module names them in one of two ways: a :class:`fuser.cuda.launch.Kernel` that stands in
the module, or a function ``instantiations()`` that returns the kernels which it makes on demand.

Chains into stores are pairs of two launchers' templates, without end; :func:`chains_into_stores`
has all pairs of one stage and one store in the common dtypes, and what the tests launch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

import pointwise_instantiations
import torch
from pointwise_instantiations import (
    BIAS_GELU,
    BIAS_SWIGLU,
    EVERYTHING,
    GELU,
    SCALED_SWIGLU,
    SWIGLU,
    producer_types,
)

import fuser.cuda
from fuser.chain import ACTIVATIONS, STAGES, Stage
from fuser.cuda import adamw, block_scaling, fp8_scaling, mxfp8, nvfp4
from fuser.cuda.arguments import ELEMENTS
from fuser.cuda.launch import Kernel
from fuser.cuda.permutation import gathers
from fuser.cuda.tiled import ALIGNED, loads, pair_of
from fuser.formats import DType

COMMON_DTYPES = (torch.bfloat16, torch.float32)
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


@functools.cache
def instantiations() -> dict[str, tuple[str, ...]]:
    """The symbols that launchers may ask for, sorted, by the name of the ``.cu``."""
    found: dict[str, set[str]] = {}
    for launcher in launchers():
        for kernel in kernels_of(launcher):
            found.setdefault(kernel.module, set()).add(kernel.symbol)
    others = groups_into_stores() | pairs_of_tiles() | steps_into_stores()
    others |= {*pointwise_instantiations.instantiations()}
    for kernel in chains_into_stores() | norms_into_stores() | others:
        found.setdefault(kernel.module, set()).add(kernel.symbol)
    return {name: tuple(sorted(symbols)) for name, symbols in sorted(found.items())}


def single_stages() -> tuple[Stage, ...]:
    """Every stage that there is."""
    return (
        *(Stage(name, (1.0,) * STAGES[name].scalars) for name in ACTIVATIONS),
        *(Stage("bias"), Stage("constant_scale", (0.7,)), Stage("add_extra_input")),
        *(Stage("dropout", (0.3,)), Stage("srelu", is_scaled=True)),
    )


def launchers() -> list[ModuleType]:
    """The modules of fuser.cuda."""
    names = sorted(launcher.name for launcher in pkgutil.iter_modules(fuser.cuda.__path__))
    return [importlib.import_module(f"fuser.cuda.{name}") for name in names]


def into_stores(producer: str, aligned: bool = True, to: DType = E4M3) -> set[Kernel]:
    """A producer into each store policy once; of NVFP4 into the plainest."""
    plainest = [k for k in nvfp4.stores(producer, aligned) if "Nvfp4Store<false, false" in k.symbol]
    others = [f for f in launchers() if hasattr(f, "stores") and f is not nvfp4]
    return {*(kernel for f in others for kernel in f.stores(producer, to, aligned)), *plainest}


@functools.cache
def chains_into_stores() -> frozenset[Kernel]:
    """All pairs of one stage and one store in the common dtypes, and what the tests launch."""
    bf16 = torch.bfloat16
    found: set[Kernel] = set()
    for dtype in COMMON_DTYPES:
        for stage in single_stages():
            for producer in producer_types((stage,), dtype):
                found |= into_stores(producer)
    for producer in producer_types(SWIGLU, bf16):
        found |= into_stores(producer, to=E5M2)
        found.update(nvfp4.stores(producer, True))
    for producer in producer_types(EVERYTHING, bf16):
        found |= into_stores(producer)
    # What the tests launch. Each store where producer and store are aligned, and in bf16 where
    # neither is; one family where that is otherwise.
    for stages, saved, with_sums in LAUNCHED:
        for dtype in ELEMENTS:
            for of_producer, of_store in ALIGNED:
                for producer in producer_types(
                    stages, dtype, aligned=of_producer, saved=saved, with_sums=with_sums
                ):
                    if of_store or (dtype == bf16 and not of_producer):
                        found |= into_stores(producer, of_store)
                    else:
                        found.update(block_scaling.stores(producer, E4M3, of_store))
                if with_sums:  # a kernel that looks for amaxes leaves none
                    alone = producer_types(stages, dtype, aligned=of_producer, saved=saved)[1]
                    found.update(k for k in into_stores(alone, of_store) if "Amax" in k.symbol)
    for producer in producer_types(BIAS_SWIGLU, bf16, with_sums=True):
        found.update(block_scaling.stores(producer, E4M3, True))
    return frozenset(found)


@functools.cache
def pairs_of_tiles() -> frozenset[Kernel]:
    """Gradients of activations, each beside the activation, into the stores of FP8 formats."""
    found: set[Kernel] = set()
    for stages, saved, with_sums in (*LAUNCHED, (SWIGLU, 0, True)):
        forward = producer_types(stages[-1:], torch.bfloat16)[0]
        backward = producer_types(stages, torch.bfloat16, saved=saved, with_sums=with_sums)[1]
        for launcher in (fp8_scaling, block_scaling, mxfp8):
            others = launcher.stores(forward, E4M3, True)
            for kernel in launcher.stores(backward, E5M2, True):
                found |= {pair for other in others if (pair := pair_of(kernel, other))}
    return frozenset(found)


@functools.cache
def groups_into_stores() -> frozenset[Kernel]:
    """Padded groups of rows into their stores: of matrices, tokens by index, scaled SwiGLU."""
    found: set[Kernel] = set()
    for dtype in ELEMENTS:
        for aligned in (True, False):
            for inner in producer_types(SCALED_SWIGLU, dtype, aligned=aligned, scales=dtype):
                producer = f"fuser::GroupedProducer<{inner}>"
                for to in (E4M3, E5M2):
                    found.update(fp8_scaling.stores(producer, to, aligned))
                    found.update(block_scaling.stores(producer, to, aligned))
                    found.update(mxfp8.stores(producer, to, aligned))
                found.update(nvfp4.stores(producer, aligned))
    found |= gradients_beside()
    for element in ELEMENTS.values():
        for of_producer, of_store in ALIGNED:
            for inner in (loads(element, of_producer), gathers(element, of_producer)):
                producer = f"fuser::GroupedProducer<{inner}>"
                for to in (E4M3, E5M2):
                    found.update(block_scaling.stores(producer, to, of_store))
                    found.update(mxfp8.stores(producer, to, of_store))
                    found.update(fp8_scaling.stores(producer, to, of_store))
            found.update(nvfp4.stores(producer, of_store))
    return frozenset(found)


def gradients_beside() -> set[Kernel]:
    """Gradients of scaled activations in padded groups, with those of scales and biases beside."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: set[Kernel] = set()

    def producers(
        stage: Stage, dtype: torch.dtype, scales: torch.dtype, aligned: bool
    ) -> tuple[str, ...]:
        """With neither, with those of scales, and with both."""
        flags = ((False, False), (True, False), (True, True))
        made = (
            producer_types(
                (stage,),
                dtype,
                aligned=aligned,
                with_sums=with_sums,
                scales=scales,
                with_row_parts=with_rows,
            )[1]
            for with_rows, with_sums in flags
        )
        return tuple(f"fuser::GroupedProducer<{inner}>" for inner in made)

    stages = {
        name: Stage(name, (1.0,) * STAGES[name].scalars, is_scaled=True)
        for name in ("swiglu", "situglu", "clamped_swiglu", "srelu", "tanh_srelu")
    }
    for aligned in (True, False):
        for stage in stages.values():
            for producer in producers(stage, bf16, bf16, aligned):
                found.update(fp8_scaling.stores(producer, E5M2, aligned))
        for dtype, scales in ((fp16, fp32), (fp32, fp16)):
            for producer in producers(stages["swiglu"], dtype, scales, aligned):
                found.update(fp8_scaling.stores(producer, E5M2, aligned))
    for name in ("swiglu", "situglu", "srelu"):
        for producer in producers(stages[name], bf16, bf16, True)[1:]:
            found.update(block_scaling.stores(producer, E5M2, True))
            found.update(mxfp8.stores(producer, E5M2, True))
            found.update(nvfp4.stores(producer, True)[1:])
    return found


@functools.cache
def norms_into_stores() -> frozenset[Kernel]:
    """Norms and their gradients in bf16 into each store."""
    found: set[Kernel] = set()
    for norm in ("fuser::RMSNorm", "fuser::LayerNorm"):
        types = f"{norm}, fuser::bf16, fuser::bf16, fuser::bf16"
        found |= into_stores(f"fuser::NormProducer<{types}, true>")
        for adds in ("false", "true"):
            found |= into_stores(f"fuser::NormBackwardProducer<{types}, {adds}, true>")
    return frozenset(found)


@functools.cache
def steps_into_stores() -> frozenset[Kernel]:
    """Steps of AdamW, and weights that were stepped before, into each store."""
    found: set[Kernel] = set()
    for element, gradient in adamw.element_types():
        found |= into_stores(adamw.producer_type(element, gradient, writes=True))
        found |= into_stores(adamw.rounded_type(element))
        alone = into_stores(adamw.producer_type(element, gradient, writes=False))
        found.update(k for k in alone if "Amax" in k.symbol)
    of_bf16 = [adamw.producer_type("fuser::bf16", "fuser::bf16", w) for w in (True, False)]
    for producer in (*of_bf16, adamw.rounded_type("fuser::bf16")):
        found.update(nvfp4.stores(producer, True))
    return frozenset(found)


# Stages, saved, and whether backward leaves sums.
LAUNCHED = ((GELU, 0, False), (SWIGLU, 0, False), (BIAS_GELU, 1, True))


def kernels_of(launcher: ModuleType) -> set[Kernel]:
    """The kernels that one launcher module names."""
    kernels = {value for value in vars(launcher).values() if isinstance(value, Kernel)}
    if hasattr(launcher, "instantiations"):
        kernels |= set(launcher.instantiations())
    return kernels
