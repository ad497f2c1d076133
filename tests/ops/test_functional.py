"""The layer between tensors and kernels: whichever runs, the same bytes; in the emulator."""

from __future__ import annotations

from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from emulator import emulated
from pipeline_kernels import on_kernels

import fuser
from fuser import recipe as recipes
from fuser.chain import Stage
from fuser.cuda.launch import kernels_support
from fuser.formats import DType
from fuser.functional import grouped
from fuser.functional.permutation import sort_by_expert
from fuser.reference import permutation as reference

QUANTIZERS: dict[str, Any] = {
    **formats.QUANTIZERS,
    "current-pow2-E5M2": fuser.Float8CurrentScalingQuantizer(
        DType.kFloat8E5M2, force_pow_2_scales=True
    ),
    "mxfp8-2d": fuser.MXFP8Quantizer(with_2d_quantization=True),
    "block-1d": fuser.Float8BlockQuantizer(block_scaling_dim=1),
    "block-2d": fuser.Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    "nvfp4-2d": fuser.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-random": fuser.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, seed=7),
}
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
RECIPES = {
    **{name: cls() for name, cls in formats.RECIPES.items()},
    "delayed": recipes.DelayedScaling(amax_history_len=2),
    "mxfp8-dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_kernels_and_torch_quantize_to_the_same_bytes(
    name: str, dtype: torch.dtype, copies: tuple[bool, bool]
) -> None:
    quantizer = QUANTIZERS[name].with_usage(rowwise=copies[0], columnwise=copies[1])
    x = oracles.random_tensor((2, 32, 96), dtype, 1)
    expected = quantizer(x)
    with emulated():
        assert kernels_support(x)
        found = quantizer(x)
        values = found.dequantize()
    for buffer, value in expected.buffers().items():
        other = found.buffers()[buffer]
        assert (value is None) == (other is None), buffer
        assert value is None or torch.equal(value, other), buffer
    assert torch.equal(values, expected.dequantize())


@pytest.mark.parametrize("name", ["current", "mxfp8", "block-1d", "nvfp4"])
def test_turned_rows_empty_tensors_and_views_are_taken(name: str) -> None:
    quantizer = QUANTIZERS[name]
    turned = oracles.random_tensor((64, 32), torch.float32, 1).t()
    empty = torch.empty(0, 64)
    with emulated():
        found = [quantizer(x) for x in (turned, empty)]
        view = found[0][:5].dequantize()
    assert torch.equal(found[0].dequantize(), quantizer(turned).dequantize())
    assert found[1].dequantize().shape == (0, 64)
    assert torch.equal(view, quantizer(turned)[:5].dequantize())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_split_sizes_of_any_stride_are_taken(dtype: torch.dtype) -> None:
    sizes, x = torch.tensor([3, 99, 0, 99, 9, 99], dtype=dtype)[::2], torch.zeros(20, 4)
    with emulated():
        ends = grouped.group_ends(sizes, x)
        padded = grouped.padded_groups(sizes, 3, 20, x.device)
    assert ends.tolist() == padded.ends.tolist() == [3, 3, 12]
    assert padded.padded_ends.tolist() == [128, 128, 256]


@pytest.mark.parametrize("experts", [1, 1024, 1025])
def test_any_number_of_experts_is_sorted(experts: int) -> None:
    indices = torch.tensor([[experts - 1, -1], [0, experts // 2], [experts, 0]])
    with emulated():
        found = sort_by_expert(indices, experts, 6)
    expected = reference.sort_by_expert(indices, experts, 6)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {one.dtype for one in found} == {torch.int32}
    kept = indices[(indices >= 0) & (indices < experts)]
    assert found[0].tolist() == torch.bincount(kept, minlength=experts).tolist()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_training_with_kernels_equals_training_with_torch(recipe: Any) -> None:
    """Two steps of linears and a gated activation, bit for bit, state included.

    Kernels give this activation torch's bits; another would be as right, but not the same.
    """

    def train(model: fuser.Sequential) -> list[Any]:
        found: list[Any] = []
        for step in range(2):
            torch.manual_seed(5)  # of stochastic rounding
            x = oracles.random_tensor((32, 32), torch.bfloat16, step).requires_grad_()
            with fuser.autocast(recipe=recipe):
                y = model(x)
            y.backward(oracles.random_tensor(y.shape, torch.bfloat16, 9))
            found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        return found + [v for n, v in model.state_dict().items() if n.endswith("_extra_state")]

    def block() -> fuser.Sequential:
        first = fuser.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        second = fuser.Linear(32, 32, dtype=torch.bfloat16)
        return oracles.randomize(fuser.Sequential(first, fuser.ReGLU(), second))

    expected = train(block())
    with on_kernels():
        found = train(block())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_a_stage_is_does_not_depend_on_what_was_saved_with_it() -> None:
    """Whole modules are pickled with their stages, of which earlier releases stored other facts."""
    stage, of_fields = Stage("swiglu", interleave=4), object.__new__(Stage)
    names = ("name", "scalars", "interleave", "is_scaled", "_bits")
    of_fields.__dict__.update({name: getattr(stage, name) for name in names})
    assert of_fields.is_activation
    assert of_fields.is_gated
    assert of_fields == stage
