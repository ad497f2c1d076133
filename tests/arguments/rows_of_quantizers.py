"""Rows of the arguments of quantizers and quantized tensors: bytes, against the formats in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import number_formats as numbers
import numpy as np
import operands_in_fp64 as formats
import torch
from argument_rows import Of, ignores, sets
from number_formats import E5M2
from operands_in_fp64 import Copies, Format
from rows_of_recipes import Given, beside_a_larger_rank, refuses
from torch.testing import assert_close

import fuser
from fuser import DType
from fuser.te.tensors import Float8BlockScaleTensorFormat
from fuser.tensors.base import RowsOf

one, rows, blocks, mxfp8, nvfp4 = (
    formats.one_scale,
    formats.rows,
    formats.blocks,
    formats.mxfp8,
    formats.nvfp4,
)
IN_E5M2 = DType.kFloat8E5M2
USAGES = ("rowwise", "columnwise")
FLOOR = 1e6

OPTIONS: dict[str, tuple[str, ...]] = {
    "fuser.Float8CurrentScalingQuantizer": (*USAGES, "force_pow_2_scales", "amax_epsilon"),
    "fuser.Float8BlockQuantizer": (
        *(*USAGES, "amax_epsilon", "force_pow_2_scales", "block_scaling_dim"),
    ),
    "fuser.NVFP4Quantizer": (
        *("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max", "nvfp4_4over6_err_mode"),
        "seed",
    ),
    # Those of each class of quantized tensors: they share a constructor.
    "fuser.Float8BlockwiseQTensor": (
        *("data", "data_transpose", "fp8_scale_inv", "rowwise_data", "rowwise_scale_inv"),
        *("columnwise_data", "columnwise_scale_inv", "amax_rowwise", "amax_columnwise"),
        *("fp8_dtype", "fp4_dtype", "is_2D_scaled", "with_gemm_swizzled_scales", "data_format"),
    ),
}


def sample() -> torch.Tensor:
    """Whole blocks of NVFP4, and a part of one of 128."""
    return formats.samples()[1][:, :144].contiguous()


def assert_copies(tensor: Any, expected: Copies, usages: tuple[str, ...] = USAGES) -> None:
    """The copies that there are, to the rounding of a dequantized value."""
    assert tensor.get_usages() == {usage: usage in usages for usage in USAGES}
    for usage in usages:
        values = expected.rowwise if usage == "rowwise" else expected.columns()
        found = tensor.with_usage(usage).dequantize().double().numpy()
        sizes = np.abs(values)
        if expected.signs is not None and usage == "columnwise":  # a transform mixes 16 values
            sizes = sizes.reshape(-1, 16, values.shape[1]).max(1).repeat(16, 0)
        assert (np.abs(found - values) <= 1e-5 * sizes).all(), usage


def even() -> torch.Tensor:
    """Values of like sizes: in each block one of two scales has the smaller error by far."""
    return torch.randn(144, 144, generator=torch.Generator().manual_seed(0))


def makes(
    name: str,
    expected: Format,
    argument: str,
    value: Any,
    values: Callable[[], torch.Tensor] = sample,
    **others: Any,
) -> None:
    """A row: the copies of a tensor are those of this format."""
    make = getattr(fuser, name)

    @sets(f"fuser.{name}", **{argument: value})
    def copies(given: Given) -> None:
        x = values()
        assert_copies(make(**others, **given)(x), expected(x.numpy()))


def has_usages(name: str, expected: Format, **others: Any) -> None:
    """Rows of ``rowwise`` and ``columnwise``: the other copy alone is made, with its own bytes."""
    make = getattr(fuser, name)
    for usage, other in (USAGES, USAGES[::-1]):

        @sets(f"fuser.{name}", **{usage: False})
        def copy(given: Given, other: str = other) -> None:
            x = sample()
            assert_copies(make(**others, **given)(x), expected(x.numpy()), (other,))


# -- formats with scales of the values ---------------------------------------------------

has_usages("Float8CurrentScalingQuantizer", one())
makes("Float8CurrentScalingQuantizer", one(E5M2), "fp8_dtype", IN_E5M2)
makes("Float8CurrentScalingQuantizer", one(pow2=True), "force_pow_2_scales", True)
makes("Float8CurrentScalingQuantizer", one(eps=FLOOR), "amax_epsilon", FLOOR)
has_usages("Float8RowwiseQuantizer", rows())
makes("Float8RowwiseQuantizer", rows(E5M2), "fp8_dtype", IN_E5M2)
makes("Float8RowwiseQuantizer", rows(pow2=True), "force_pow_2_scales", True)
makes("Float8RowwiseQuantizer", rows(eps=FLOOR), "amax_epsilon", FLOOR)
has_usages("Float8BlockQuantizer", blocks(2))
makes("Float8BlockQuantizer", blocks(2, E5M2), "fp8_dtype", IN_E5M2)
makes("Float8BlockQuantizer", blocks(2, pow2=False), "force_pow_2_scales", False)
makes("Float8BlockQuantizer", blocks(2, eps=FLOOR), "amax_epsilon", FLOOR)
makes("Float8BlockQuantizer", blocks(1), "block_scaling_dim", 1)
has_usages("MXFP8Quantizer", mxfp8())
makes("MXFP8Quantizer", mxfp8(E5M2), "fp8_dtype", IN_E5M2)
makes("MXFP8Quantizer", mxfp8(is_square=True), "with_2d_quantization", True)

refuses(
    "fuser.Float8BlockQuantizer",
    fuser.Float8BlockQuantizer,
    "one layout",
    all_gather_usage=True,
)
refuses(
    "fuser.Float8CurrentScalingQuantizer",
    fuser.Float8CurrentScalingQuantizer,
    "which are written nowhere else",
    scale=torch.ones(1),
    amax=torch.ones(1),
)
ignores("fuser.Float8CurrentScalingQuantizer", "a tensor is quantized on its own device", "device")
refuses(
    "fuser.Float8CurrentScalingQuantizer",
    fuser.Float8CurrentScalingQuantizer,
    "computes the amax of the tensor at every call",
    use_existing_amax=True,
)


@sets("fuser.Float8CurrentScalingQuantizer", with_amax_reduction=True)
def _scale_of_all_ranks(given: Given) -> None:
    x = sample()
    with beside_a_larger_rank(4.0) as groups:
        tensor = fuser.Float8CurrentScalingQuantizer(**given)(x)
        assert groups == [torch.distributed.group.WORLD]
    assert_copies(tensor, one(amax=4 * float(x.abs().max()))(x.numpy()))


SOME_RANKS: Any = object()


@sets("fuser.Float8CurrentScalingQuantizer", amax_reduction_group=SOME_RANKS)
def _ranks_of_a_scale(given: Given) -> None:
    x = sample()
    with beside_a_larger_rank(4.0) as groups:
        tensor = fuser.Float8CurrentScalingQuantizer(with_amax_reduction=True, **given)(x)
    assert groups == [SOME_RANKS]
    assert_copies(tensor, one(amax=4 * float(x.abs().max()))(x.numpy()))


# -- NVFP4 ----------------------------------------------------------------------------------

has_usages("NVFP4Quantizer", nvfp4())
makes("NVFP4Quantizer", nvfp4(is_square=True), "with_2d_quantization", True)
makes("NVFP4Quantizer", nvfp4(hadamard=True), "with_rht", True)
makes(
    "NVFP4Quantizer", nvfp4(hadamard=True, signs=0), "with_random_sign_mask", False, with_rht=True
)
makes("NVFP4Quantizer", nvfp4(of_rows=True), "row_scaled_nvfp4", True)
chooses: dict[str, Any] = {"nvfp4_use_4over6": True}
makes("NVFP4Quantizer", nvfp4(error="MAE"), "nvfp4_use_4over6", True, even)
makes("NVFP4Quantizer", nvfp4(error="MSE"), "nvfp4_4over6_err_mode", "MSE", even, **chooses)
makes("NVFP4Quantizer", nvfp4(error="MAE", largest=256), "nvfp4_e4m3_max", 256, even, **chooses)


def rounds_with_a_seed(argument: str, value: Any, **others: Any) -> None:
    @sets("fuser.NVFP4Quantizer", **{argument: value})
    def bytes_of_random_words(given: Given) -> None:
        """Each copy has random words of its own."""
        x = sample()
        tensor: Any = fuser.NVFP4Quantizer(**others, **given)(x)
        for stream, (usage, values) in enumerate(zip(USAGES, (x, x.t()), strict=True)):
            source = np.ascontiguousarray(values.numpy())
            words = numbers.random_words(7, 0, source.shape, stream)
            data, scales, amax = numbers.nvfp4_copy(source, words=words)
            assert np.array_equal(getattr(tensor, f"_{usage}_data").numpy(), data)
            assert np.array_equal(getattr(tensor, f"_{usage}_scale_inv").numpy(), scales)
            assert getattr(tensor, f"_amax_{usage}").item() == amax[0]


rounds_with_a_seed("stochastic_rounding", True, seed=7)
rounds_with_a_seed("seed", 7, stochastic_rounding=True)
ignores(
    "fuser.NVFP4Quantizer",
    "the amax of a transformed copy is always that of its transformed values",
    "with_post_rht_amax",
)
ignores("fuser.NVFP4Quantizer", "amaxes of NVFP4 are not reduced", "amax_reduction_group")
refuses(
    "fuser.NVFP4Quantizer",
    fuser.NVFP4Quantizer,
    "not reduced over a group yet",
    with_amax_reduction=True,
)
refuses("fuser.NVFP4Quantizer", fuser.NVFP4Quantizer, "E2M1", fp4_dtype=DType.kFloat8E4M3)


# -- a scale of earlier steps -----------------------------------------------------------------

has_usages("Float8Quantizer", formats.a_scale(1.0))
makes("Float8Quantizer", formats.a_scale(1.0, E5M2), "fp8_dtype", IN_E5M2)
makes("Float8Quantizer", formats.a_scale(0.25), "scale", torch.tensor([0.25]))
makes("Float8Quantizer", one(), "saturates", False)


@sets("fuser.Float8Quantizer", amax=Of(torch.tensor([2.0**20]), instead=None))
def _largest_amax_of_all_calls(given: Given) -> None:
    """Amaxes are recorded in the memory of the argument."""
    amax = None if given["amax"] is None else given["amax"].clone()
    quantizer = fuser.Float8Quantizer(amax=amax)
    assert amax is not None
    quantizer(sample())
    assert amax.item() == 2.0**20
    quantizer(torch.full((16, 16), -(2.0**21)))
    assert amax.item() == 2.0**21
    assert fuser.Float8Quantizer(amax=None).amax is None


# -- a quantizer for each copy, and none -------------------------------------------------------


def hybrid(**given: Any) -> fuser.HybridQuantizer:
    parts = {
        "rowwise_quantizer": fuser.MXFP8Quantizer(),
        "columnwise_quantizer": fuser.Float8RowwiseQuantizer(),
    }
    return fuser.HybridQuantizer(**{**parts, **given})


def mxfp8_beside_rows(x: Any) -> Copies:
    return Copies(mxfp8()(x).rowwise, rows()(x).columnwise)


has_usages(
    "HybridQuantizer",
    mxfp8_beside_rows,
    rowwise_quantizer=fuser.MXFP8Quantizer(),
    columnwise_quantizer=fuser.Float8RowwiseQuantizer(),
)


@sets(
    "fuser.HybridQuantizer",
    rowwise_quantizer=Of(fuser.MXFP8Quantizer(), instead=fuser.Float8RowwiseQuantizer()),
    columnwise_quantizer=Of(fuser.Float8RowwiseQuantizer(), instead=fuser.MXFP8Quantizer()),
)
def _copies_of_two_quantizers(given: Given) -> None:
    x = sample()
    assert_copies(hybrid(**given)(x), mxfp8_beside_rows(x.numpy()))


@sets("fuser.HybridQuantizer", columnwise_source="rowwise_dequantized")
def _columns_of_the_rounded_values(given: Given) -> None:
    x = sample()
    rounded = mxfp8()(x.numpy()).rowwise
    again = rows()(rounded.astype(np.float32)).columnwise
    assert_copies(hybrid(**given)(x), Copies(rounded, again))


has_usages("IdentityQuantizer", formats.unquantized)


@sets("fuser.IdentityQuantizer", dtype=torch.bfloat16)
def _values_in_a_dtype(given: Given) -> None:
    x = sample()
    rounded = x.bfloat16().double().numpy()
    assert_copies(fuser.IdentityQuantizer(**given)(x), Copies(rounded, rounded))


class Halves(fuser.Quantizer):
    """A quantizer of a user, made by the constructor of its base."""

    tensor_class = fuser.IdentityTensor
    format = fuser.IdentityQuantizer().format

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        half = x / 2
        return self.copies(half if self.rowwise else None, half if self.columnwise else None)


for _usage, _other in (USAGES, USAGES[::-1]):

    @sets("fuser.Quantizer", **{_usage: False})
    def _copy_of_a_users_quantizer(given: Given, other: str = _other) -> None:
        x = sample()
        assert_copies(Halves(**given)(x), formats.unquantized(x.double().numpy() / 2), (other,))


# -- quantized tensors --------------------------------------------------------------------------

TENSOR = "fuser.Float8BlockwiseQTensor"
MAKERS: dict[type[fuser.QuantizedTensor], tuple[Any, Format]] = {
    fuser.Float8Tensor: (fuser.Float8CurrentScalingQuantizer(), one()),
    fuser.Float8BlockwiseQTensor: (fuser.Float8BlockQuantizer(), blocks(2)),
    fuser.NVFP4Tensor: (fuser.NVFP4Quantizer(), nvfp4()),
}
BLOCKS: Any = MAKERS[fuser.Float8BlockwiseQTensor][0]


def parts_of(tensor: Any, *left_out: str) -> dict[str, Any]:
    """The arguments that make ``tensor`` again."""
    parts = {
        "buffers": tensor.buffers(),
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "quantizer": tensor._quantizer,
    }
    return {name: value for name, value in parts.items() if name not in left_out}


@sets(TENSOR, buffers=Of(BLOCKS(sample()).buffers(), instead=BLOCKS(sample() * -3).buffers()))
def _bytes_of_a_tensor(given: Given) -> None:
    x = sample()
    made = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(x), "buffers"), **given)
    assert_copies(made, blocks(2)(x.numpy()))


@sets(TENSOR, quantizer=Of(BLOCKS, instead=fuser.Float8BlockQuantizer(IN_E5M2)))
def _format_of_a_tensor(given: Given) -> None:
    x = sample()
    made = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(x), "quantizer"), **given)
    assert_copies(made, blocks(2)(x.numpy()))


@sets(TENSOR, shape=(12, 12, 144))
def _shape_of_a_tensor(given: Given) -> None:
    x = sample()
    made = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(x), "shape"), **given)
    assert torch.equal(made.dequantize(), BLOCKS(x).dequantize().view(12, 12, 144))


@sets(TENSOR, dtype=torch.bfloat16)
def _dtype_of_a_tensor(given: Given) -> None:
    x = sample()
    made = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(x), "dtype"), **given)
    assert made.dtype is torch.bfloat16
    rounded = torch.from_numpy(blocks(2)(x.numpy()).rowwise).bfloat16()
    assert torch.equal(made.dequantize(), rounded)


@sets(TENSOR, device=torch.device("meta"))
def _device_of_a_tensor(given: Given) -> None:
    """The one that the tensor says it is on: its buffers are where they are."""
    made: Any = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(sample())), **given)
    assert made.device.type == "meta"
    assert made._rowwise_data.device.type == "cpu"


@sets(TENSOR, requires_grad=True)
def _gradient_of_a_tensor(given: Given) -> None:
    x, dy = sample(), sample().flip(0)
    made = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(x)), **given)
    made.dequantize().backward(dy)
    assert made.grad is not None
    assert torch.equal(made.grad, dy)


@sets(TENSOR, strides=(1, 144))
def _strides_of_a_tensor(given: Given) -> None:
    made = fuser.Float8BlockwiseQTensor(**parts_of(BLOCKS(sample())), **given)
    assert made.stride() == (1, 144)


ROOT: Any = fuser.Float8CurrentScalingQuantizer()(sample())


@sets(TENSOR, view_of=RowsOf(ROOT, 0))
def _view_of_a_tensor(given: Given) -> None:
    """A write to it quantizes the whole tensor again, which has one scale."""
    ROOT.copy_(sample())
    view = fuser.Float8Tensor(**parts_of(ROOT[:16]), **given)
    values = ROOT.dequantize()
    values[:16] = 3e5
    view.fill_(3e5)
    assert_copies(ROOT, one()(values.numpy()))


def takes_buffers(cls: type[fuser.QuantizedTensor], *names: str) -> None:
    """Rows of keywords: each is one of the buffers of a tensor."""
    quantizer, expected = MAKERS[cls]
    own, other = (quantizer(x).get_metadata() for x in (sample(), sample() * -3))
    for name in names:
        rest = {key: value for key, value in own.items() if key != name}

        @sets(TENSOR, **{name: Of(own[name], instead=other[name])})
        def buffers(given: Given, rest: Given = rest) -> None:
            x = sample()
            made: Any = cls(shape=x.shape, dtype=x.dtype, **rest, **given)
            assert_copies(made, expected(x.numpy()))


takes_buffers(fuser.Float8Tensor, "data", "data_transpose", "fp8_scale_inv")
takes_buffers(
    fuser.Float8BlockwiseQTensor,
    *("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"),
)
takes_buffers(fuser.NVFP4Tensor, "amax_rowwise", "amax_columnwise")


def without_a_quantizer(argument: str, value: Any, expected: Format, **options: Any) -> None:
    """A row of a keyword that says the format, as a quantizer would."""

    @sets(TENSOR, **{argument: value})
    def values_of_buffers(given: Given) -> None:
        x = sample()
        keywords = fuser.Float8BlockQuantizer(**options)(x).get_metadata()
        for name in ("quantizer", "fp8_dtype", "is_2D_scaled"):
            if name == "quantizer" or name == argument:
                del keywords[name]
        made = fuser.Float8BlockwiseQTensor(shape=x.shape, dtype=x.dtype, **keywords, **given)
        assert_copies(made, expected(x.numpy()))


without_a_quantizer("fp8_dtype", IN_E5M2, blocks(2, E5M2), fp8_dtype=IN_E5M2)
without_a_quantizer("is_2D_scaled", False, blocks(1), block_scaling_dim=1)


def made_again(cls: type[fuser.QuantizedTensor], **given: Any) -> Any:
    keywords = MAKERS[cls][0](sample()).get_metadata()
    return cls(shape=(144, 144), dtype=torch.float32, **{**keywords, **given})


refuses(
    TENSOR,
    lambda **given: made_again(fuser.Float8BlockwiseQTensor, **given),
    "the only supported value is False",
    with_gemm_swizzled_scales=True,
)
refuses(
    TENSOR,
    lambda **given: made_again(fuser.Float8BlockwiseQTensor, **given),
    "the only supported value is <Float8BlockScaleTensorFormat.GEMM_READY",
    data_format=Float8BlockScaleTensorFormat.COMPACT,
)
refuses(
    TENSOR,
    lambda **given: made_again(fuser.NVFP4Tensor, **given),
    "the only supported value is",
    fp4_dtype=DType.kFloat8E4M3,
)

SIZES = (48, 80)
_GROUPED = fuser.GroupedTensor.quantize(sample()[:128], torch.tensor(SIZES), fuser.MXFP8Quantizer())
_OTHER = fuser.GroupedTensor.quantize(
    sample()[16:], torch.tensor(SIZES[::-1]), fuser.MXFP8Quantizer(IN_E5M2)
)


@sets(
    "fuser.GroupedTensor",
    **{
        name: Of(getattr(_GROUPED, name), instead=getattr(_OTHER, name))
        for name in ("padded", "groups", "quantizer")
    },
)
def _groups_of_rows(given: Given) -> None:
    """As a whole, and taken apart."""
    own = {name: getattr(_GROUPED, name) for name in ("padded", "groups", "quantizer")}
    tensor = fuser.GroupedTensor(**{**own, **given})
    parts = sample()[:128].split(SIZES)
    for member, x in zip(tensor.members(), parts, strict=True):
        assert_copies(member, mxfp8()(x.numpy()))
    rowwise = [torch.from_numpy(mxfp8()(x.numpy()).rowwise).float() for x in parts]
    assert_close(tensor.dequantize(), torch.cat(rowwise), rtol=1e-6, atol=0)
