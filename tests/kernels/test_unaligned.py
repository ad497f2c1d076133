"""Launchers with a path of vectors: one tensor alone that is not aligned, and one hard value.

Each case is a launch with the names of its tensors, and what the reference computes of the same
ones. Each tensor in turn begins one element further, and each input has rows further apart.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adamw_cases
import pytest
import torch
from emulator import emulated, prepare
from pipeline_kernels import SOURCES
from quantize_cases import (
    E4M3,
    assert_same,
    block_format,
    buffers,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
    rows_format,
)
from said import said

from fuser import formats
from fuser.chain import Stage
from fuser.cuda import (
    adamw,
    block_scaling,
    fp8_scaling,
    grouped,
    mxfp8,
    normalization,
    normalization_backward,
    nvfp4,
    permutation,
    pointwise,
    rowwise_scaling,
)
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import Kernel
from fuser.cuda.tiled import as_producer, transposes_aligned
from fuser.errors import InputError, InputTypeError
from fuser.reference import adamw as reference_adamw
from fuser.reference import block_scaling as reference_block
from fuser.reference import chain as reference_chain
from fuser.reference import fp8_scaling as reference_fp8
from fuser.reference import grouped as reference_grouped
from fuser.reference import mxfp8 as reference_mxfp8
from fuser.reference import normalization as reference_norm
from fuser.reference import nvfp4 as reference_nvfp4
from fuser.reference import permutation as reference_permutation
from fuser.reference import rowwise_scaling as reference_rowwise

BF16, F32, U8, I32 = torch.bfloat16, torch.float32, torch.uint8, torch.int32
M, K = 32, 64
Tensors = dict[str, torch.Tensor]

for module in (adamw, normalization, normalization_backward, permutation):
    prepare(*module.instantiations())


@dataclass(frozen=True)
class Case:
    """A launch.

    Parameters
    ----------
    inputs, outputs
        Makes the tensors that are read, perhaps also written; those that are written alone.
    launch
        Launches with tensors by their names.
    expected
        By the reference: the values of written tensors, from copies of the inputs.
    rows
        The inputs whose rows may be further apart.
    aligned
        Tensors that are refused where they are not aligned.
    error
        Of sums in another order, to the largest value; 0 for the same bits.
    raised
        Inputs that are raised to amaxes: never infinite before.
    sources
        The folder of sources, another name of fuser's own for chains that the compile check does
        not know; None for fuser's own.
    """

    inputs: Callable[[], Tensors]
    outputs: Callable[[], Tensors]
    launch: Callable[[Tensors], None]
    expected: Callable[[Tensors], Tensors]
    rows: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()
    error: float = 0.0
    raised: tuple[str, ...] = ()
    sources: Path | None = None


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def empty(*shape: int, dtype: torch.dtype = U8) -> torch.Tensor:
    return (
        torch.full((max(1, torch.Size(shape).numel()) * dtype.itemsize,), 0xA5, dtype=U8)
        .view(dtype)
        .view(shape)
    )


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element further in memory."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are one element further apart."""
    memory = torch.empty(tensor.shape[0], tensor.shape[1] + 1, dtype=tensor.dtype)
    return memory[:, :-1].copy_(tensor)


def at_vectors(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows that begin at multiples of 64 elements, with infinities between."""
    rows, columns = tensor.shape
    memory = torch.full((rows, formats.round_up(columns, 64)), torch.inf, dtype=tensor.dtype)
    return memory[:, :columns].copy_(tensor)


def named(names: str, values: Any) -> Tensors:
    return dict(zip(names.split(), values, strict=True))


# -- the table -----------------------------------------------------------------------

CASES: dict[str, Case] = {}


def steps() -> None:
    for dtype in (BF16, F32):
        for is_decoupled in (True, False):

            def inputs(dtype: torch.dtype = dtype, seed: int = int(not is_decoupled)) -> Tensors:
                return adamw_cases.step_of((M, K), dtype, "cpu", seed=seed)._asdict()

            def expected(t: Tensors) -> Tensors:
                reference_adamw.adamw(**t)
                return {**t, "values": t["master"].to(BF16)}

            CASES[f"adamw, {'AdamW' if is_decoupled else 'Adam'}, {dtype}"] = Case(
                inputs,
                lambda: {"values": empty(M, K, dtype=BF16)},
                lambda t: adamw.adamw(
                    adamw.AdamWStep(**{n: v for n, v in t.items() if n != "values"}),
                    BF16,
                    values=t["values"],
                ),
                expected,
            )


def of_norm(t: Tensors) -> None:
    normalization.norm_forward(normalization.Forward(**t), eps=1e-5)


def of_norm_backward(t: Tensors) -> None:
    grads = {name: t[name] for name in ("dgamma", "dbeta") if name in t}
    tensors = {name: tensor for name, tensor in t.items() if name not in grads}
    normalization_backward.norm_backward(backward_of(tensors), **grads)


def backward_of(t: Tensors) -> normalization_backward.Backward:
    every: dict[str, Any] = dict.fromkeys(("gamma", "beta", "mean"))
    return normalization_backward.Backward(**(every | t))


def norms() -> None:
    def of(dtype: torch.dtype, norm: str) -> None:
        def inputs() -> Tensors:
            x = {"x": drawn(M, K, dtype=dtype), "extra": drawn(M, K, dtype=dtype, seed=1)}
            gamma = {"gamma": drawn(K, dtype=dtype, seed=2), "beta": drawn(K, dtype=dtype, seed=3)}
            return {**x, **(gamma if norm == "layernorm" else {"gamma": gamma["gamma"]})}

        def outputs() -> Tensors:
            statistics = ("mean", "rstd") if norm == "layernorm" else ("rstd",)
            written = {name: empty(M, K, dtype=dtype) for name in ("y", "z")}
            return {**written, **{name: empty(M, 1, dtype=F32) for name in statistics}}

        def expected(t: Tensors) -> Tensors:
            z = (t["x"].float() + t["extra"].float()).to(dtype)
            gain = t["gamma"].float()
            if norm == "rmsnorm":
                return named("y rstd z", (*reference_norm.rmsnorm(z, gain, 1e-5, dtype), z))
            found = reference_norm.layernorm(z, gain, t["beta"], 1e-5, dtype)
            return named("y mean rstd z", (*found, z))

        CASES[f"{norm}, {dtype}"] = Case(
            inputs, outputs, of_norm, expected, ("x", "extra"), error=1e-2
        )

        def gradients() -> Tensors:
            t = inputs()
            statistics = expected(t)
            t.pop("extra")
            t.pop("beta", None)
            t["d_extra"], t["dy"] = (drawn(M, K, dtype=dtype, seed=s) for s in (4, 5))
            return {**t, **{n: statistics[n] for n in ("mean", "rstd") if n in statistics}}

        def of_gradients() -> Tensors:
            has_beta = norm == "layernorm"
            with emulated():
                shape = normalization_backward.workspace_shape(
                    drawn(M, K, dtype=dtype), has_beta=has_beta
                )
            sums = ("dgamma", "dbeta") if has_beta else ("dgamma",)
            return {
                "dx": empty(M, K, dtype=dtype),
                **{name: empty(K, dtype=F32) for name in sums},
                "workspace": empty(*shape, dtype=F32),
            }

        def backward(t: Tensors) -> Tensors:
            x, dy, gain = t["x"], t["dy"], t["gamma"].float()
            if norm == "rmsnorm":
                found = reference_norm.rmsnorm_backward(
                    dy, x, gain, t["rstd"], (True, True), t["d_extra"]
                )
                return named("dx dgamma", found)
            every = (True, True, True)
            given = (t["mean"], t["rstd"], every, t["d_extra"])
            return named("dx dgamma dbeta", reference_norm.layernorm_backward(dy, x, gain, *given))

        CASES[f"{norm}_backward, {dtype}"] = Case(
            gradients,
            of_gradients,
            of_norm_backward,
            backward,
            ("x", "dy", "d_extra"),
            error=1e-2,
        )

        if dtype is F32:  # as where 16 bits were added to fp32
            CASES[f"{norm}_backward, {dtype} and rounded"] = Case(
                lambda: (t := gradients()) | {"dy": t["dy"].to(BF16)},
                lambda: {**of_gradients(), "rounded_dx": empty(M, K, dtype=BF16)},
                of_norm_backward,
                lambda t: (found := backward(t)) | {"rounded_dx": found["dx"].to(BF16)},
                ("x", "dy", "d_extra"),
                error=1e-2,
            )

    def of_l2(dtype: torch.dtype) -> None:
        CASES[f"l2norm, {dtype}"] = Case(
            lambda: {"x": drawn(M, K, dtype=dtype)},
            lambda: {"y": empty(M, K, dtype=dtype), "rstd": empty(M, 1, dtype=F32)},
            of_norm,
            lambda t: named("y rstd", reference_norm.l2norm(t["x"], 1e-5)),
            ("x",),
            error=1e-2,
        )
        CASES[f"l2norm_backward, {dtype}"] = Case(
            lambda: {
                "dy": drawn(M, K, dtype=dtype),
                "x": drawn(M, K, dtype=dtype, seed=1),
                "rstd": drawn(M, 1, dtype=F32, seed=2).abs(),
            },
            lambda: {"dx": empty(M, K, dtype=dtype)},
            of_norm_backward,
            lambda t: {"dx": reference_norm.l2norm_backward(t["dy"], t["x"], t["rstd"])},
            ("x", "dy"),
            error=1e-2,
        )

    for dtype in (BF16, F32):
        of(dtype, "rmsnorm")
        of(dtype, "layernorm")
        of_l2(dtype)


CHAIN = (Stage("bias"), Stage("add_extra_input"), Stage("silu"))
GATED = (Stage("swiglu"), Stage("add_extra_input"))


def chains() -> None:
    def of(name: str, stages: tuple[Stage, ...], operands: tuple[str | None, ...]) -> None:
        def wide() -> int:
            return K * (2 if stages[0].name == "swiglu" else 1)

        def shape(operand: str) -> tuple[int, ...]:
            return (wide(),) if operand == "bias" else (M, K)

        given = [n for n in operands if n is not None]

        def listed(t: Tensors) -> list[torch.Tensor | None]:
            return [None if n is None else t[n] for n in operands]

        def inputs() -> Tensors:
            more = {n: drawn(*shape(n), seed=i + 2) for i, n in enumerate(given)}
            return {"x": drawn(M, wide()), **more}

        CASES[f"pointwise, {name}"] = Case(
            inputs,
            lambda: {"y": empty(M, K, dtype=BF16)},
            lambda t: pointwise.pointwise(stages, t["x"], listed(t), t["y"]),
            lambda t: {"y": reference_chain.forward(stages, t["x"], listed(t))},
            ("x",),
            sources=SOURCES,
        )
        has_grad = [n is not None for n in operands]
        ends_in_one = operands[-1] is None  # an activation, whose output backward computes again

        def outputs() -> Tensors:
            with emulated():
                size = pointwise.workspace_size(stages, M, K, BF16, has_grad)
            work = {"workspace": empty(size, dtype=F32)} if size else {}
            return {
                "dx": empty(M, wide(), dtype=BF16),
                **{f"d_{n}": empty(*shape(n), dtype=BF16) for n in given},
                **work,
                **({"y": empty(M, K, dtype=BF16)} if ends_in_one else {}),
            }

        def launch(t: Tensors) -> None:
            grads = [None if n is None else t[f"d_{n}"] for n in operands]
            others = t["dx"], grads, t.get("workspace")
            pointwise.pointwise_backward(stages, t["dy"], t["x"], listed(t), *others, y=t.get("y"))

        def expected(t: Tensors) -> Tensors:
            dx, grads = reference_chain.backward(stages, t["dy"], t["x"], listed(t))
            pairs = zip(operands, grads, strict=True)
            found = {f"d_{n}": grad for n, grad in pairs if n is not None and grad is not None}
            y = {"y": reference_chain.forward(stages, t["x"], listed(t))} if ends_in_one else {}
            return {"dx": dx, **found, **y}

        CASES[f"pointwise_backward, {name}"] = Case(
            lambda: {**inputs(), "dy": drawn(M, K, seed=7)},
            outputs,
            launch,
            expected,
            ("x", "dy"),
            error=1e-2,
            sources=SOURCES,
        )

    of("bias, add, silu", CHAIN, ("bias", "extra", None))
    of("swiglu, add", GATED, (None, "extra"))


def formats_of_8_and_4_bits() -> None:
    def x() -> Tensors:
        return {"x": drawn(M, K)}

    def of(name: str, outputs: str, shapes: Callable[[], Tensors], **case: Any) -> None:
        launch, expected = case.pop("launch"), case.pop("expected")

        def made(t: Tensors) -> Tensors:
            return named(outputs, expected(t))

        def launched(t: Tensors) -> None:
            launch(t, buffers(**{n: t[n] for n in outputs.split()}))

        inputs = case.pop("inputs", x)
        CASES[name] = Case(inputs, shapes, launched, made, ("x",), **case)

    def data(in_a_byte: int = 1) -> Tensors:
        return {"row": empty(M, K // in_a_byte), "col": empty(K, M // in_a_byte)}

    CASES["amax"] = Case(
        lambda: {"x": drawn(M, K), "out": torch.zeros(1)},
        dict,
        lambda t: fp8_scaling.amax(t["x"], out=t["out"]),
        lambda t: {"out": reference_fp8.amax(t["x"])},
        ("x",),
        raised=("out",),
    )

    def of_a_given(kind: str) -> None:
        of(
            f"fp8 of a given {kind}",
            "row col scale_inv",
            lambda: {**data(), "scale_inv": empty(1, dtype=F32)},
            inputs=lambda: {"x": drawn(M, K), "given": torch.tensor([3.0])},
            launch=lambda t, b: fp8_scaling.quantize(
                fp8_format(), t["x"], b, **{kind + "_value" * (kind == "amax"): t["given"]}
            ),
            expected=lambda t: (
                reference_fp8.quantize_current(t["x"], E4M3, amax_value=t["given"])
                if kind == "amax"
                else reference_fp8.quantize_delayed(t["x"], t["given"], E4M3)[:3]
            ),
        )

    of(
        "fp8, one copy",
        "row scale_inv",
        lambda: {"row": empty(M, K), "scale_inv": empty(1, dtype=F32)},
        inputs=lambda: {"x": drawn(M, K), "given": torch.tensor([3.0])},
        launch=lambda t, b: fp8_scaling.quantize(fp8_format(), t["x"], b, scale=t["given"]),
        expected=lambda t: reference_fp8.quantize_delayed(t["x"], t["given"], E4M3)[::2],
    )

    def of_both(t: Tensors) -> torch.Tensor:
        largest = E4M3.max / t["amax"]
        is_less = t["amax"].isfinite() & (largest < t["scale"])
        return torch.where(is_less, largest, t["scale"])

    for amax in (1.0, 500.0):  # the scale of the one is larger than the other scale
        of(
            f"fp8 of a scale and an amax of {amax}",
            "row col scale_inv",
            lambda: {**data(), "scale_inv": empty(1, dtype=F32)},
            inputs=lambda amax=amax: {
                "x": drawn(M, K),
                "scale": torch.tensor([3.0]),
                "amax": torch.tensor([amax]),
            },
            launch=lambda t, b: fp8_scaling.quantize(
                fp8_format(), t["x"], b, scale=t["scale"], amax_value=t["amax"]
            ),
            expected=lambda t: reference_fp8.quantize_delayed(t["x"], of_both(t), E4M3)[:3],
        )

    def of_blocks(dim: int) -> None:
        of(
            f"blocks of {dim} dimensions",
            "row row_scale_inv col col_scale_inv",
            lambda: {
                **data(),
                "row_scale_inv": empty(*formats.fp8_block_scale_shape(M, K, False, dim), dtype=F32),
                "col_scale_inv": empty(*formats.fp8_block_scale_shape(M, K, True, dim), dtype=F32),
            },
            launch=lambda t, b: block_scaling.quantize(block_format(E4M3, dim), t["x"], b),
            expected=lambda t: reference_block.quantize(t["x"], E4M3, block_dim=dim, pow2=True),
            aligned=("row_scale_inv", "col_scale_inv"),
        )

    def of_mxfp8(is_square: bool) -> None:
        of(
            f"mxfp8{', squares' * is_square}",
            "row row_scale col col_scale",
            lambda: {
                "row": empty(M, K),
                "col": empty(M, K),
                "row_scale": empty(*formats.mxfp8_scale_shape(M, K, False)),
                "col_scale": empty(*formats.mxfp8_scale_shape(M, K, True)),
            },
            launch=lambda t, b: mxfp8.quantize(mxfp8_format(E4M3, is_square), t["x"], b),
            expected=lambda t: reference_mxfp8.quantize(t["x"], E4M3, two_dimensional=is_square),
            aligned=("row_scale", "col_scale"),
        )

    of(
        "nvfp4",
        "row row_scale row_amax col col_scale col_amax",
        lambda: {
            **data(2),
            "row_scale": empty(*formats.nvfp4_scale_shape(M, K, False)),
            "col_scale": empty(*formats.nvfp4_scale_shape(M, K, True)),
            **{f"{name}_amax": empty(1, dtype=F32) for name in ("row", "col")},
        },
        inputs=lambda: {"x": drawn(M, K), "amax": torch.tensor([4.0])},
        launch=lambda t, b: nvfp4.quantize(nvfp4_format(), t["x"], b, t["amax"]),
        expected=lambda t: reference_nvfp4.quantize(t["x"], amax_value=t["amax"]),
        aligned=("row_scale", "col_scale"),
    )
    of(
        "rowwise",
        "row row_scale_inv col col_scale_inv",
        lambda: {
            **data(),
            "row_scale_inv": empty(M, dtype=F32),
            "col_scale_inv": empty(K, dtype=F32),
        },
        inputs=lambda: {
            "x": drawn(M, K),
            "row_amax": drawn(M, K).float().abs().amax(1),
            "col_amax": drawn(M, K).float().abs().amax(0),
        },
        launch=lambda t, b: rowwise_scaling.quantize(
            rows_format(), t["x"], b, row_amax=t["row_amax"], col_amax=t["col_amax"]
        ),
        expected=lambda t: reference_rowwise.quantize(t["x"], E4M3),
        aligned=("row_scale_inv", "col_scale_inv"),
    )
    CASES["rowwise amaxes"] = Case(
        lambda: {"x": drawn(M, K), "row_amax": torch.zeros(M), "col_amax": torch.zeros(K)},
        dict,
        lambda t: rowwise_scaling.amaxes(**t),
        lambda t: named(
            "row_amax col_amax", [reference_nvfp4.amaxes_of_rows(v) for v in (t["x"], t["x"].t())]
        ),
        ("x",),
        raised=("row_amax", "col_amax"),
    )

    for kind in ("scale", "amax"):
        of_a_given(kind)
    for number in (1, 2):
        of_blocks(number)
        of_mxfp8(number == 2)


def decoders() -> None:
    def bytes_of(m: int = M, k: int = K) -> torch.Tensor:
        return reference_fp8.cast(drawn(m, k), torch.ones(1), E4M3)

    def out() -> Tensors:
        return {"out": empty(M, K, dtype=BF16)}

    CASES["transpose"] = Case(
        lambda: {"data": bytes_of()},
        lambda: {"out": empty(K, M)},
        lambda t: fp8_scaling.transpose(**t),
        lambda t: {"out": reference_fp8_transpose(t["data"])},
    )
    CASES["fp8 dequantize"] = Case(
        lambda: {"data": bytes_of(), "scale_inv": torch.tensor([0.5])},
        out,
        lambda t: fp8_scaling.dequantize(t["data"], t["scale_inv"], E4M3, BF16, out=t["out"]),
        lambda t: {"out": reference_fp8.dequantize(t["data"], t["scale_inv"], E4M3, BF16)},
    )

    def of_copy(columnwise: bool) -> None:
        size = (K, M) if columnwise else (M, K)
        copy = "columns" if columnwise else "rows"
        options = {"columnwise": columnwise}
        CASES[f"rowwise dequantize of {copy}"] = Case(
            lambda: {
                "data": bytes_of(*size),
                "scale_inv": drawn(size[0], dtype=F32).abs(),
            },
            out,
            lambda t: rowwise_scaling.dequantize(
                t["data"], t["scale_inv"], E4M3, BF16, out=t["out"], **options
            ),
            lambda t: {
                "out": reference_rowwise.dequantize(
                    t["data"], t["scale_inv"], E4M3, BF16, **options
                )
            },
        )
        CASES[f"fp8 dequantize of groups, {copy}"] = Case(
            lambda: {
                "data": bytes_of(*((K, 256) if columnwise else (256, K))),
                "scale_inv": torch.tensor([0.5, 2.0]),
            },
            lambda: {"out": empty(256, K, dtype=BF16)},
            lambda t: fp8_scaling.dequantize_groups(
                t["data"], t["scale_inv"], E4M3, BF16, out=t["out"], **options
            ),
            lambda t: {
                "out": reference_fp8.dequantize_groups(
                    t["data"], t["scale_inv"], E4M3, BF16, **options
                )
            },
        )
        CASES[f"block dequantize of {copy}"] = Case(
            lambda: {
                "data": bytes_of(*size),
                "scale_inv": drawn(
                    *formats.fp8_block_scale_shape(size[0], size[1], False, 1), dtype=F32
                ).abs(),
            },
            out,
            lambda t: block_scaling.dequantize(
                t["data"], t["scale_inv"], E4M3, BF16, block_dim=1, out=t["out"], **options
            ),
            lambda t: {
                "out": reference_block.dequantize(
                    t["data"], t["scale_inv"], E4M3, BF16, block_dim=1, **options
                )
            },
            aligned=("scale_inv",),
        )
        CASES[f"mxfp8 dequantize of {copy}"] = Case(
            lambda: {
                "data": bytes_of(),
                "scale": torch.randint(
                    120, 134, formats.mxfp8_scale_shape(M, K, options["columnwise"]), dtype=U8
                ),
            },
            out,
            lambda t: mxfp8.dequantize(t["data"], t["scale"], E4M3, BF16, out=t["out"], **options),
            lambda t: {
                "out": reference_mxfp8.dequantize(t["data"], t["scale"], E4M3, BF16, **options)
            },
            aligned=("scale",),
        )
        CASES[f"nvfp4 dequantize of {copy}"] = Case(
            lambda: {
                "data": torch.randint(0, 256, (size[0], size[1] // 2), dtype=U8),
                "scale": torch.randint(
                    32, 96, formats.nvfp4_scale_shape(size[0], size[1], False), dtype=U8
                ),
                "amax": torch.tensor([3.0]),
            },
            out,
            lambda t: nvfp4.dequantize(
                t["data"], t["scale"], t["amax"], BF16, out=t["out"], **options
            ),
            lambda t: {
                "out": reference_nvfp4.dequantize(t["data"], t["scale"], t["amax"], BF16, **options)
            },
            aligned=("scale",),
        )

    for columnwise in (False, True):
        of_copy(columnwise)


def reference_fp8_transpose(data: torch.Tensor) -> torch.Tensor:
    return data.t().contiguous()


ENDS = torch.tensor([10, 10, 25], dtype=I32)
ROUTES = torch.tensor([[i % 3, -1 if i % 5 == 0 else (i + 1) % 3] for i in range(16)])


def rows_of_groups() -> None:
    @functools.cache
    def maps() -> tuple[torch.Tensor, torch.Tensor]:
        _, row_map, inverse_map = reference_permutation.sort_by_expert(ROUTES, 3, M)
        return row_map, inverse_map

    def probs() -> torch.Tensor:
        return torch.rand(ROUTES.shape, generator=torch.Generator().manual_seed(1))

    def of(dtype: torch.dtype) -> None:
        CASES[f"permute, {dtype}"] = Case(
            lambda: {
                "x": drawn(16, K, dtype=dtype),
                **named("row_map inverse_map", maps()),
            },
            lambda: {"y": empty(M, K, dtype=dtype)},
            lambda t: permutation.permute(**t),
            lambda t: {"y": reference_permutation.permute(**t)},
            ("x",),
        )
        CASES[f"unpermute, {dtype}"] = Case(
            lambda: {
                "y": drawn(M, K, dtype=dtype),
                "inverse_map": maps()[1],
                "probs": probs(),
            },
            lambda: {"out": empty(16, K, dtype=dtype)},
            lambda t: permutation.unpermute(**t),
            lambda t: {"out": reference_permutation.unpermute(**t)},
            ("y",),
        )
        CASES[f"unpermute_backward, {dtype}"] = Case(
            lambda: {
                "dout": drawn(16, K, dtype=dtype),
                "y": drawn(M, K, dtype=dtype, seed=1),
                **named("row_map inverse_map", maps()),
                "probs": probs(),
            },
            lambda: {
                "dy": empty(M, K, dtype=dtype),
                "dprobs": empty(16, 2, dtype=F32),
            },
            lambda t: permutation.unpermute_backward(**t),
            lambda t: named("dy dprobs", reference_permutation.unpermute_backward(**t)),
            ("dout", "y"),
        )
        CASES[f"zero_tail, {dtype}"] = Case(
            lambda: {"ends": ENDS, "out": drawn(M, K, dtype=dtype)},
            dict,
            lambda t: grouped.zero_tail(t["ends"], out=t["out"]),
            lambda t: {"out": reference_grouped.zero_tail(t["ends"], t["out"])},
        )
        CASES[f"add_bias, {dtype}"] = Case(
            lambda: {
                "ends": ENDS,
                "bias": drawn(3, K, dtype=dtype, seed=1),
                "scales": drawn(M, dtype=dtype, seed=2),
                "out": drawn(M, K, dtype=dtype),
            },
            dict,
            lambda t: grouped.add_bias(t["ends"], t["bias"], t["scales"], out=t["out"]),
            lambda t: {
                "out": reference_grouped.add_bias(t["ends"], t["bias"], t["scales"], t["out"])
            },
        )
        CASES[f"unpad, {dtype}"] = Case(
            lambda: {
                "padded": drawn(384, K, dtype=dtype),
                "ends": ENDS,
                "padded_ends": reference_grouped.group_tiles(ENDS, 3)[0],
            },
            lambda: {"out": empty(M, K, dtype=dtype)},
            lambda t: grouped.unpad(**t),
            lambda t: {"out": reference_grouped.unpad(t["padded"], t["ends"], t["padded_ends"], M)},
        )

    for dtype in (BF16, F32):
        of(dtype)


for fill in (steps, norms, chains, formats_of_8_and_4_bits, decoders, rows_of_groups):
    fill()


# -- tests ---------------------------------------------------------------------------


def assert_as_expected(
    case: Case, change: Callable[[str, torch.Tensor], torch.Tensor], *, hard: str = ""
) -> None:
    """Launch with changed tensors; what is written has the values of the reference.

    ``hard`` is an input that a change gave other values.
    """
    inputs, outputs = case.inputs(), case.outputs()
    if hard:
        inputs[hard] = change(hard, inputs[hard])
    expected = case.expected({name: tensor.clone() for name, tensor in inputs.items()})
    tensors = {**inputs, **outputs}
    if not hard:
        tensors = {name: change(name, tensor) for name, tensor in tensors.items()}
    with emulated(written=[tensors[name] for name in outputs], sources=case.sources):
        case.launch(tensors)
    for name, wanted in expected.items():
        found = tensors[name]
        if not case.error or not wanted.is_floating_point():
            assert_same(found, wanted.to(found.dtype), name)
            continue
        # Sums in another order may be infinite where others are NaN.
        is_finite = wanted.isfinite()
        assert torch.equal(found.isfinite(), is_finite), name
        values, exact = found[is_finite].double(), wanted[is_finite].double()
        atol = case.error * float(exact.abs().max()) if len(exact) else 0.0
        torch.testing.assert_close(values, exact, rtol=case.error, atol=atol, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_launch_of_aligned_tensors_writes_what_the_reference_computes(name: str) -> None:
    assert_as_expected(CASES[name], lambda _, tensor: tensor)


@pytest.mark.parametrize("name", CASES)
def test_each_tensor_alone_may_begin_one_element_further(name: str) -> None:
    case = CASES[name]
    for one in (*case.inputs(), *case.outputs()):

        def change(of: str, tensor: torch.Tensor, one: str = one) -> torch.Tensor:
            return shifted(tensor) if of == one else tensor

        if one in case.aligned:
            with pytest.raises(InputError, match="at a multiple of 16 bytes"):
                assert_as_expected(case, change)
        else:
            assert_as_expected(case, change)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows])
def test_the_rows_of_each_input_alone_may_be_an_odd_distance_apart(name: str) -> None:
    case = CASES[name]
    for one in case.rows:

        def change(of: str, x: torch.Tensor, one: str = one) -> torch.Tensor:
            return spaced(x) if of == one else x

        assert_as_expected(case, change)


# The formats of small blocks have whole blocks alone.
ANY_WIDTH = [n for n, case in CASES.items() if case.rows and not n.startswith(("mxfp8", "nvfp4"))]


@pytest.mark.parametrize("width", [K - 3, K - 4])
@pytest.mark.parametrize("name", ANY_WIDTH)
def test_rows_of_no_whole_vectors_may_begin_at_vectors(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a matrix of the first columns of a wider one: its last vectors reach into the others."""
    case = CASES[name]
    monkeypatch.setitem(globals(), "K", width)
    assert_as_expected(case, lambda of, x: at_vectors(x) if of in case.rows else x)


@pytest.mark.parametrize("one", ["dx", "y"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_backward_of_a_norm_writes_y_beside_an_aligned_dx_alone(norm: str, one: str) -> None:
    case = CASES[f"{norm}_backward, {BF16}"]
    given = {**case.inputs(), **case.outputs(), "y": empty(M, K, dtype=BF16)}
    if norm == "layernorm":
        given["beta"] = drawn(K)
    given[one] = shifted(given[one])
    with (
        emulated(),
        pytest.raises(InputError, match=said("normalization-backward-cannot-write-too")),
    ):
        of_norm_backward(given)


def norm_tensors(norm: str, dtype: torch.dtype) -> Tensors:
    t = {name: drawn(M, K, dtype=dtype) for name in ("x", "dy", "d_extra")}
    t |= {"gamma": drawn(K, dtype=dtype), "rstd": drawn(M, dtype=F32)}
    if norm == "layernorm":
        t |= {"beta": drawn(K, dtype=dtype), "mean": drawn(M, dtype=F32)}
    return {**t, "means": empty(M, 1 + (norm == "layernorm"), dtype=F32)}


PRODUCERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "the output": (
        "x gamma beta mean rstd",
        lambda t: normalization.norm_producer(normalization.Forward(**t), t["x"].dtype).is_aligned,
    ),
    "the gradient": (
        "dy x gamma mean rstd means d_extra",
        lambda t: normalization_backward.norm_backward_producer(backward_of(t)).is_aligned,
    ),
    "the output beside the gradient": (
        "dy x gamma beta d_extra",
        lambda t: normalization_backward.writes_output(**t),
    ),
}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("made", PRODUCERS)
def test_a_norm_is_computed_by_vectors_if_each_of_its_tensors_is_aligned(
    made: str, norm: str, dtype: torch.dtype
) -> None:
    """All but its statistics, of which a thread reads one at a time."""
    names, is_by_vectors = PRODUCERS[made]
    every = norm_tensors(norm, dtype)
    given = {name: every[name] for name in names.split() if name in every}
    with emulated():
        assert is_by_vectors(given)
        for name, tensor in given.items():
            is_read_alone = name in ("mean", "rstd", "means")
            assert is_by_vectors(given | {name: shifted(tensor)}) == is_read_alone, name
            if name in ("x", "dy", "d_extra"):
                assert not is_by_vectors(given | {name: spaced(tensor)}), name


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("made", PRODUCERS)
def test_a_norm_of_no_whole_vectors_is_not_computed_by_vectors(
    made: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "K", K - 3)
    names, is_by_vectors = PRODUCERS[made]
    every = norm_tensors(norm, BF16)
    given = {name: every[name] for name in names.split() if name in every}
    given |= {n: at_vectors(t) for n, t in given.items() if n in ("x", "dy", "d_extra")}
    with emulated():
        assert not is_by_vectors(given)


def rows_apart(rows: int, columns: int, more: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(rows, columns + more, dtype=dtype)[:, :columns]


@pytest.mark.parametrize(
    ("x", "is_aligned"),
    [
        (rows_apart(3, 16, 8, BF16), True),
        (rows_apart(3, 16, 4, BF16), False),
        (rows_apart(3, 16, 4, F32), True),
        (rows_apart(3, 16, 2, F32), False),
        (rows_apart(1, 16, 1, BF16), True),
        (rows_apart(2, 16, 1, BF16), False),
        (rows_apart(3, 12, 4, BF16), False),
        (shifted(rows_apart(3, 16, 0, BF16)), False),
    ],
)
def test_a_matrix_is_loaded_by_vectors_if_each_row_begins_at_one(
    x: torch.Tensor, is_aligned: bool
) -> None:
    producer = as_producer("a test", x)
    assert producer.is_aligned == is_aligned
    assert producer.type.endswith(f"{str(is_aligned).lower()}>")


def test_a_tile_is_stored_by_vectors_if_its_copies_allow_it() -> None:
    """Rows of a transposed copy are as long as the matrix has rows."""
    row, col = empty(M, K), empty(K, M)
    whole, part = (as_producer("a test", drawn(rows, K)) for rows in (M, M - 1))
    assert transposes_aligned(whole, row, col)
    assert transposes_aligned(whole, None, col)
    assert transposes_aligned(whole, row, None)
    assert transposes_aligned(part, row, None)
    assert not transposes_aligned(part, None, col)
    assert not transposes_aligned(whole, row, shifted(col))
    assert not transposes_aligned(whole, shifted(row), col)
    assert not transposes_aligned(as_producer("a test", shifted(drawn(M, K))), row, col)


# -- tensors that do not fit ---------------------------------------------------------

Launching = tuple[Callable[[], Tensors], Callable[[Tensors], Any]]
SCALED = (Stage("bias"), Stage("silu", is_scaled=True))


def other_launchers() -> dict[str, Launching]:
    """Launchers that read no vectors, or leave the work to another kernel."""

    def of_tiles(count: int) -> Tensors:
        return {"tiles": torch.zeros(count, 4, dtype=I32)}

    def matrix() -> Producer:
        return as_producer("a test", drawn(256, K))

    def states() -> Tensors:
        amaxes = {"history": torch.zeros(4, 3), "amax": torch.zeros(3)}
        return {**amaxes, "scale": torch.ones(3), "largest": torch.ones(3)}

    def of_grouped_fp8() -> Tensors:
        data = {"row": empty(256, K), "col": empty(K, 256), "scale_inv": empty(2, dtype=F32)}
        return {**of_tiles(2), **data, **dict.fromkeys(("amax", "recorded"), torch.zeros(3))}

    def of_grouped_nvfp4() -> Tensors:
        row = {"row": empty(256, K // 2), "row_scale": empty(256, 4), "row_amax": torch.zeros(2)}
        return {**of_tiles(2), **row, "amax": torch.zeros(3, 2)}

    def scaled() -> Tensors:
        x = {"x": drawn(M, K), "dy": drawn(M, K), "bias": drawn(K), "scales": drawn(M, dtype=F32)}
        grads = {"dx": empty(M, K, dtype=BF16), "d_bias": empty(K, dtype=BF16)}
        return {**x, **grads, "d_scales": empty(M, dtype=F32), "amax": torch.zeros(1)}

    def backward_of_scaled(t: Tensors) -> None:
        with emulated():
            size = pointwise.workspace_size(SCALED, M, K, BF16, (True, True))
        pointwise.pointwise_backward(
            *(SCALED, t["dy"], t["x"], [t["bias"], t["scales"]], t["dx"]),
            *([t["d_bias"], t["d_scales"]], torch.empty(size), t["amax"]),
        )

    def maps() -> Tensors:
        return {"row_map": torch.zeros(M, dtype=I32), "inverse_map": torch.zeros(16, 2, dtype=I32)}

    def step() -> Tensors:
        return adamw_cases.step_of((M, K), BF16, "cpu")._asdict()

    return {
        "adamw with an amax": (
            lambda: {**step(), "amax": torch.zeros(1)},
            lambda t: adamw.adamw(
                adamw.AdamWStep(**{n: v for n, v in t.items() if n != "amax"}), BF16, amax=t["amax"]
            ),
        ),
        "adamw's producer": (step, lambda t: adamw.producer(adamw.AdamWStep(**t), BF16)),
        "rounded producer": (
            lambda: {"x": drawn(M, K, dtype=F32)},
            lambda t: adamw.rounded_producer(t["x"], BF16),
        ),
        "amax of groups": (
            lambda: {**of_tiles(2), "out": torch.zeros(3)},
            lambda t: fp8_scaling.amax(matrix(), **t),
        ),
        "fp8 of groups": (
            of_grouped_fp8,
            lambda t: fp8_scaling.quantize(
                *(
                    fp8_format(),
                    matrix(),
                    buffers(**{n: t[n] for n in ("row", "col", "scale_inv")}),
                ),
                amax_value=t["amax"],
                recorded=t["recorded"],
                tiles=t["tiles"],
            ),
        ),
        "delayed scaling": (
            states,
            lambda t: fp8_scaling.update_delayed(
                [t["history"]], [t["scale"]], [t["largest"]], [t["amax"]]
            ),
        ),
        "hadamard_amax": (
            lambda: {"x": drawn(M, K), "out": torch.zeros(2)},
            lambda t: nvfp4.hadamard_amax(**t),
        ),
        "hadamard_amax of groups": (
            lambda: {**of_tiles(2), "out": torch.zeros(3, 2)},
            lambda t: nvfp4.hadamard_amax(matrix(), **t),
        ),
        "nvfp4 of groups": (
            of_grouped_nvfp4,
            lambda t: nvfp4.quantize(
                nvfp4_format(),
                matrix(),
                buffers(**{n: t[n] for n in ("row", "row_scale", "row_amax")}),
                t["amax"],
                tiles=t["tiles"],
            ),
        ),
        "nvfp4 dequantize of groups": (
            lambda: {
                "data": empty(256, K // 2),
                "scale": empty(256, 4),
                "amax": torch.ones(2),
                "out": empty(256, K, dtype=BF16),
            },
            lambda t: nvfp4.dequantize(
                t["data"], t["scale"], t["amax"], BF16, columnwise=False, out=t["out"]
            ),
        ),
        "group_ends": (
            lambda: {"sizes": torch.zeros(3, dtype=I32), "out": torch.zeros(3, dtype=I32)},
            lambda t: grouped.group_ends(t["sizes"], M, out=t["out"]),
        ),
        "group_tiles": (
            lambda: {
                **dict.fromkeys(("split_sizes", "ends", "padded_ends"), torch.zeros(3, dtype=I32)),
                **of_tiles(formats.tile_count(M, 3)),
            },
            lambda t: grouped.group_tiles(rows=M, **t),
        ),
        "group_tiles of one size": (
            lambda: {
                **dict.fromkeys(("ends", "padded_ends"), torch.zeros(3, dtype=I32)),
                **of_tiles(formats.tile_count(M, 3, 5)),
            },
            lambda t: grouped.group_tiles(5, M, **t),
        ),
        "pad": (
            lambda: {"x": drawn(M, K), "out": empty(256, K, dtype=BF16)},
            lambda t: grouped.pad(t["x"], torch.zeros(2, 4, dtype=I32), out=t["out"]),
        ),
        "sum_groups": (
            lambda: {
                "parts": torch.zeros(4, K),
                "padded_ends": torch.zeros(3, dtype=I32),
                "out": empty(3, K, dtype=BF16),
            },
            lambda t: grouped.sum_groups(**t),
        ),
        "sum_parts": (
            lambda: {"parts": torch.zeros(4, K), "out": empty(K, dtype=BF16)},
            lambda t: pointwise.sum_parts(**t),
        ),
        "pointwise with scales": (
            lambda: {n: v for n, v in scaled().items() if n in ("x", "bias", "scales", "amax")},
            lambda t: pointwise.pointwise(
                SCALED, t["x"], [t["bias"], t["scales"]], empty(M, K, dtype=BF16), t["amax"]
            ),
        ),
        "pointwise_backward with scales": (scaled, backward_of_scaled),
        "sort_by_expert": (
            lambda: {
                "expert_indices": ROUTES,
                "split_sizes": torch.zeros(3, dtype=I32),
                **maps(),
            },
            lambda t: permutation.sort_by_expert(**t, counts=None),
        ),
        "gathered_rows": (
            lambda: {"x": drawn(16, K), "row_map": torch.zeros(M, dtype=I32)},
            lambda t: permutation.gathered_rows(**t, choices=2),
        ),
        "norm with an amax": (
            lambda: {"x": drawn(M, K), "gamma": drawn(K), "amax": torch.zeros(1)},
            lambda t: normalization.norm_forward(normalization.Forward(**t), eps=1e-5),
        ),
        "norm_backward with means and an amax": (
            lambda: {
                **{n: t for n, t in norm_tensors("layernorm", BF16).items() if n != "beta"},
                "amax": torch.zeros(1),
            },
            of_norm_backward,
        ),
        "norm_producer": (
            lambda: {"x": drawn(M, K), "gamma": drawn(K), "rstd": drawn(M, dtype=F32)},
            lambda t: normalization.norm_producer(normalization.Forward(**t), BF16),
        ),
        "norm_backward_producer": (
            lambda: {n: t for n, t in norm_tensors("layernorm", BF16).items() if n != "beta"},
            lambda t: normalization_backward.norm_backward_producer(backward_of(t)),
        ),
    }


LAUNCHING: dict[str, Launching] = {
    **{
        name: (lambda case=case: {**case.inputs(), **case.outputs()}, case.launch)  # type: ignore[misc]
        for name, case in CASES.items()
    },
    **other_launchers(),
}
OTHER_DTYPES = {
    BF16: (torch.int16, torch.float16),
    F32: (I32, BF16),
    U8: (torch.int8,),
    I32: (F32, torch.int64),
    torch.int64: (torch.float64,),
}
# Tensors of which a kernel takes several dtypes, and nothing else decides.
OF_SEVERAL_DTYPES = {
    *("x", "y", "dy", "gradient", "gamma", "dgamma", "scales"),
    *("sizes", "split_sizes", "zero_tail's out", "sum_groups's out", "sum_parts's out"),
}
# Sizes that only this tensor has, by its launcher.
OWN_SIZES = {
    "pointwise_backward": ("workspace 0",),
    "amax": ("x 0", "x 1"),
    "nvfp4": ("amax 0",),
    "nvfp4 dequantize of rows": ("amax 0",),
    "nvfp4 dequantize of columns": ("amax 0",),
    "permute": ("inverse_map 1",),
    "unpermute": ("y 0",),
    "zero_tail": ("ends 0", "out 0", "out 1"),
    "unpad": ("padded 0", "out 0"),
    "rounded producer": ("x 0", "x 1"),
    "amax of groups": ("out 0",),
    "delayed scaling": ("history 0",),
    "hadamard_amax of groups": ("out 0",),
    "nvfp4 of groups": ("amax 0", "amax 1"),
    "nvfp4 dequantize of groups": ("amax 0",),
    "pad": ("x 0",),
    "sum_groups": ("parts 0",),
    "sum_parts": ("parts 0",),
    "sort_by_expert": ("split_sizes 0", "row_map 0"),
    "gathered_rows": ("x 0", "x 1", "row_map 0"),
    "norm with an amax": ("x 0",),
}


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, none beside another."""
    return torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 0].copy_(tensor)


def resized(tensor: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    sizes = list(tensor.shape)
    sizes[dim] += more
    return torch.zeros(sizes, dtype=tensor.dtype)


def misfits(launcher: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that differ from one of a launcher in one property each."""
    dtypes = OTHER_DTYPES[tensor.dtype]
    if not OF_SEVERAL_DTYPES.isdisjoint((name, f"{launcher}'s {name}")):
        dtypes = dtypes[:1]
    misfits = {str(dtype): torch.zeros(tensor.shape, dtype=dtype) for dtype in dtypes}
    for dim in range(tensor.dim()):
        if f"{name} {dim}" not in OWN_SIZES.get(launcher, ()):
            misfits |= {f"size {dim}, {n:+}": resized(tensor, dim, n) for n in (-1, 1)}
    if tensor.numel() > 1:
        misfits["strides"] = apart(tensor)
    return misfits


@pytest.mark.parametrize("name", LAUNCHING)
def test_each_tensor_alone_of_another_dtype_shape_or_layout_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would read and write memory beside it."""
    monkeypatch.setattr(Kernel, "__call__", lambda *_: None)
    tensors, launch = LAUNCHING[name]
    accepted = []
    with emulated():
        launch(tensors())
        for one, tensor in tensors().items():
            for misfit, other in misfits(name.split(",")[0], one, tensor).items():
                with contextlib.suppress(InputError, InputTypeError):
                    launch(tensors() | {one: other})
                    accepted.append((one, misfit))
    assert accepted == []


HARD = {"inf": float("inf"), "-inf": -float("inf"), "NaN": float("nan")}


@pytest.mark.parametrize("name", [name for name in CASES if name != "rowwise"])
def test_one_hard_value_of_each_input_has_the_effect_that_it_has_in_the_reference(
    name: str,
) -> None:
    """On its own element, row, block or sum, and on no other.

    Not of rows' scales, whose launch takes amaxes of the values as well.
    """
    case = CASES[name]
    for one, tensor in case.inputs().items():
        if not tensor.is_floating_point() or one in ("constants", *case.raised):
            continue
        for hard in HARD.values():

            def change(_: str, x: torch.Tensor, hard: float = hard) -> torch.Tensor:
                x = x.clone()
                x.view(-1)[x.numel() // 3] = hard
                return x

            assert_as_expected(case, change, hard=one)
