"""Cases of the normalization kernels, run in the emulator or on a GPU, and what must come out.

What is true is computed in fp64. The kernels may be at most twice as far from it as plain torch is,
which computes in fp32 (``fuser.reference.normalization``), with a floor of two fp32 roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from said import said

from fuser.cuda import launch as launching
from fuser.cuda import normalization as launchers
from fuser.cuda import normalization_backward as backward_launchers
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import Kernel, Launch
from fuser.cuda.norm_common import DTYPE_PAIRS
from fuser.cuda.normalization import Forward
from fuser.cuda.normalization_backward import Backward
from fuser.errors import InputError
from fuser.reference import normalization as reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROUNDINGS = 2.0**-23

Tensors = dict[str, Any]
Running = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
"""A context in which launchers run and must write the given tensors completely."""


@dataclass(frozen=True)
class Case:
    """One call forward and one backward.

    ``parameter`` is the dtype of gamma and beta. ``spacing`` elements lie between rows of the
    inputs, and all tensors begin ``offset`` elements after an aligned address. ``extra`` is the
    dtype of the tensor that the forward adds; None is that of x.
    """

    norm: str
    x: torch.dtype
    y: torch.dtype
    parameter: torch.dtype
    rows: int
    columns: int
    adds: bool = False
    is_zero_centered: bool = False
    eps: float = 1e-5
    spacing: int = 0
    offset: int = 0
    extra: torch.dtype | None = None

    def __str__(self) -> str:
        names = [str(d).removeprefix("torch.") for d in (self.x, self.y, self.parameter)]
        said = f"{self.norm}-{self.rows}x{self.columns}-{'-'.join(names)}"
        flags = (("add", self.adds), ("zero_centered", self.is_zero_centered))
        said += "".join(f"-{name}" for name, is_on in flags if is_on)
        if self.extra is not None:
            said += f"-{str(self.extra).removeprefix('torch.')}"
        places = (("spacing", self.spacing), ("offset", self.offset))
        return said + "".join(f"-{name}{n}" for name, n in places if n)


# Columns at which something changes: a vector has 8 or 4 elements, a row 1 to 32 lanes and then
# whole warps, of which the backward's threads hold two vectors or four. With more than 256 lanes,
# two blocks run on a multiprocessor up to 320; a block has at most 640, or 512 with four vectors.
BACKWARD_PAIRED, BACKWARD_FEW, BACKWARD_MANY = 2 * 256, 2 * 640, 4 * 512
CASES = (
    Case("rmsnorm", BF16, BF16, BF16, 1, 8),
    Case("rmsnorm", BF16, BF16, F32, 5, 64, adds=True),
    Case("rmsnorm", BF16, BF16, F16, 37, 520, is_zero_centered=True),
    Case("rmsnorm", BF16, BF16, BF16, 13, 2048, adds=True, eps=0.1),
    Case("rmsnorm", BF16, BF16, BF16, 3, 8 * BACKWARD_FEW + 8, adds=True),
    Case("rmsnorm", BF16, BF16, BF16, 2, 8 * BACKWARD_MANY + 8, adds=True),
    Case("rmsnorm", BF16, BF16, BF16, 5, 8 * BACKWARD_PAIRED + 8, adds=True),
    Case("rmsnorm", BF16, BF16, BF16, 3, 8 * BACKWARD_FEW - 8, adds=True),
    Case("rmsnorm", BF16, BF16, BF16, 3, 8 * BACKWARD_FEW - 8, offset=1),
    Case("layernorm", BF16, BF16, F32, 5, 8 * BACKWARD_PAIRED + 8, adds=True),
    Case("layernorm", F16, F16, F16, 3, 8 * BACKWARD_FEW - 8),
    Case("rmsnorm", BF16, BF16, F32, 4, 1),
    Case("rmsnorm", BF16, BF16, BF16, 9, 77, adds=True, is_zero_centered=True),
    Case("rmsnorm", BF16, BF16, BF16, 3, 64, adds=True, offset=1),
    Case("rmsnorm", BF16, BF16, F32, 12, 256, adds=True, spacing=24),
    Case("rmsnorm", F32, F32, F32, 6, 100),
    Case("rmsnorm", F32, F32, F16, 11, 1028, adds=True, is_zero_centered=True),
    Case("layernorm", F16, F16, F16, 7, 40, adds=True),
    Case("layernorm", F16, F16, F32, 21, 1040, is_zero_centered=True),
    Case("layernorm", F16, F16, F16, 4, 31, adds=True),
    Case("layernorm", F32, BF16, BF16, 10, 132, adds=True),
    Case("layernorm", F32, BF16, F32, 3, 4 * BACKWARD_FEW + 4, adds=True),
    Case("layernorm", F32, BF16, F16, 2, 4 * BACKWARD_MANY + 4, adds=True),
    Case("layernorm", F32, BF16, F32, 5, 64, adds=True, spacing=3),
    Case("rmsnorm", F32, BF16, F32, 6, 516, adds=True, extra=BF16),
    Case("rmsnorm", F32, F16, F16, 4, 77, adds=True, extra=F16, is_zero_centered=True),
    Case("rmsnorm", F32, BF16, F32, 3, 64, adds=True, extra=BF16, offset=1),
    Case("rmsnorm", F32, F16, F32, 2, 4 * 4096 + 4, adds=True, extra=F16),
    Case("layernorm", F32, F16, F32, 7, 1028, adds=True, extra=F16, spacing=4),
    Case("layernorm", F32, BF16, F32, 5, 31, adds=True, extra=BF16),
    Case("layernorm", F32, BF16, BF16, 1, 4, adds=True, extra=BF16),
    Case("l2norm", BF16, BF16, F32, 9, 128, eps=1e-6),
    Case("l2norm", F32, F32, F32, 5, 9, eps=0.5),
)
# Every kernel, and sizes of models.
GPU_CASES = (
    *(
        Case(norm, x, y, parameter, rows, columns, adds=True, offset=offset)
        for norm in ("rmsnorm", "layernorm")
        for x, y in DTYPE_PAIRS
        for parameter, rows, columns, offset in (
            (F32, 333, 1536, 0),
            (y, 300, 5120 * 2 // x.itemsize, 0),
            (y, 300, 5120 * 2 // x.itemsize, 1),
            (y, 50, 10240 * 2 // x.itemsize, 0),
            (y, 50, 10248 * 2 // x.itemsize, 0),
            (F16, 77, 300, 1),
        )
    ),
    *(
        Case(norm, BF16, BF16, parameter, 3001, columns, adds=True)
        for norm in ("rmsnorm", "layernorm")
        for parameter in (F32, BF16)
        for columns in (64, 128, 1024, 3072, 4096, 8192, 16384)
    ),
    *(
        Case(norm, F32, y, F32, rows, columns, adds=True, offset=offset, extra=y)
        for norm in ("rmsnorm", "layernorm")
        for y in (BF16, F16)
        for rows, columns, offset in ((333, 1536, 0), (50, 16388, 0), (77, 300, 1), (3001, 4096, 0))
    ),
    Case("rmsnorm", F32, BF16, F32, 700, 16384, adds=True),
    Case("layernorm", F32, F32, F32, 300, 12288, adds=True),
    Case("layernorm", BF16, BF16, BF16, 65, 196608, adds=True),
    Case("l2norm", F16, F16, F32, 4000, 128, eps=1e-6),
)


# -- recording ----------------------------------------------------------------


class Recorder(launching.LaunchBackend):
    """Runs nothing, and notes which kernels would."""

    def __init__(self) -> None:
        self.kernels: dict[Kernel, None] = {}

    def run(self, kernel: Kernel, launch: Launch, args: tuple[Any, ...]) -> None:
        self.kernels[kernel] = None

    def multiprocessors(self, device: torch.device) -> int:
        return 2

    def shared_bytes(self, device: torch.device) -> int:
        return 227 * 1024

    @contextmanager
    def running(self, written: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, launches are recorded."""
        before = launching.backend
        launching.backend = self
        try:
            yield
        finally:
            launching.backend = before


# -- tensors ------------------------------------------------------------------


def placed(tensor: torch.Tensor, spacing: int = 0, offset: int = 0) -> torch.Tensor:
    """A copy whose rows are ``spacing`` elements apart, ``offset`` elements past an alignment."""
    *rows, columns = tensor.shape
    width = columns + spacing
    memory = tensor.new_zeros(max(tensor.numel(), 1) // columns * width + offset)
    view = memory[offset : offset + tensor.numel() // columns * width].view(*rows, width)
    view = view[..., :columns]
    view.copy_(tensor)
    return view


def inputs_of(case: Case, device: str = "cpu", seed: int = 0) -> Tensors:
    """Random x, dy, and as the case wants them gamma, beta, extra and d_extra."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], dtype: torch.dtype, spacing: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).to(dtype)
        return placed(values.to(device), spacing, case.offset)

    shape = (case.rows, case.columns)
    # A mean that is not 0, for LayerNorm to take out.
    made = {"x": random(shape, case.x, case.spacing).add_(0.5)}
    made["dy"] = random(shape, case.y, case.spacing)
    if case.norm != "l2norm":
        made["gamma"] = random((case.columns,), case.parameter, 0)
    if case.norm == "layernorm":
        made["beta"] = random((case.columns,), case.parameter, 0)
    if case.adds:
        made["extra"] = random(shape, case.extra or case.x, case.spacing)
        made["d_extra"] = random(shape, case.x, case.spacing)
    return made


def empty(case: Case, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> Any:
    """An output, where the case has its tensors begin."""
    return placed(like.new_zeros(shape, dtype=dtype), 0, case.offset)


# -- the kernels --------------------------------------------------------------


def forward(
    case: Case,
    given: Tensors,
    running: Running,
    amax: torch.Tensor | None = None,
    has_y: bool = True,
) -> Tensors:
    """What the kernel writes, with y or without."""
    x = given["x"]
    made = {"y": empty(case, x.shape, case.y, x)} if has_y else {}
    made["rstd"] = empty(case, (case.rows, 1), F32, x)
    if case.norm == "layernorm":
        made["mean"] = empty(case, (case.rows, 1), F32, x)
    if case.adds:
        made["z"] = empty(case, x.shape, case.x, x)
    parameters = {name: given.get(name) for name in ("gamma", "beta")}
    with running(tuple(made.values())):
        launchers.norm_forward(
            Forward(x, given.get("extra"), **parameters, **made, amax=amax),
            eps=case.eps,
            zero_centered_gamma=case.is_zero_centered,
            y_dtype=case.y,
        )
    return made


def backward(
    case: Case,
    given: Tensors,
    statistics: Tensors,
    running: Running,
    amax: torch.Tensor | None = None,
    has_dx: bool = True,
    has_means: bool = False,
    has_rounded_dx: bool = False,
    has_y: bool = False,
) -> Tensors:
    """What the kernel writes from the statistics of a forward; x is the forward's z."""
    x, dy, rstd = given["x"], given["dy"], statistics["rstd"]
    made = {"dx": empty(case, x.shape, case.x, x)} if has_dx else {}
    if has_y:
        made["y"] = empty(case, x.shape, case.y, x)
    if has_rounded_dx:
        made["rounded_dx"] = empty(case, x.shape, case.y, x)
    if has_means:
        made["means"] = empty(case, (case.rows, 1 + (case.norm == "layernorm")), F32, x)
    if case.norm != "l2norm":
        made["dgamma"] = empty(case, (case.columns,), case.parameter, x)
    if case.norm == "layernorm":
        made["dbeta"] = empty(case, (case.columns,), case.parameter, x)
    with running(tuple(made.values())):
        workspace = None
        if case.norm != "l2norm":
            shape = backward_launchers.workspace_shape(x, has_beta=case.norm == "layernorm")
            workspace = torch.full(shape, float("nan"), device=x.device)
        grads = {name: made.get(name) for name in ("dgamma", "dbeta")}
        written = {name: tensor for name, tensor in made.items() if name not in grads}
        written.setdefault("y", given.get("y"))
        beta = given.get("beta") if written["y"] is not None else None
        read = (dy, x, given.get("gamma"), beta, statistics.get("mean"), rstd, given.get("d_extra"))
        backward_launchers.norm_backward(
            Backward(*read, **written, workspace=workspace, amax=amax),
            **grads,
            zero_centered_gamma=case.is_zero_centered,
        )
    return made


def producer(case: Case, given: Tensors, statistics: Tensors) -> Producer:
    """The producer of y; x is the forward's z."""
    options: Any = {name: given.get(name) for name in ("gamma", "beta")}
    options |= {name: statistics.get(name) for name in ("mean", "rstd")}
    tensors = Forward(given["x"], **options)
    return launchers.norm_producer(tensors, case.y, zero_centered_gamma=case.is_zero_centered)


def backward_producer(case: Case, given: Tensors, statistics: Tensors) -> Producer:
    """The producer of dx, from the statistics of both passes; x is the forward's z."""
    read = (given["dy"], given["x"], given.get("gamma"), None, statistics.get("mean"))
    tensors = Backward(*read, statistics["rstd"], given.get("d_extra"), means=statistics["means"])
    return backward_launchers.norm_backward_producer(
        tensors, zero_centered_gamma=case.is_zero_centered
    )


# -- what must come out -------------------------------------------------------


def plain(case: Case, given: Tensors) -> Tensors:
    """The same by plain torch, whose gradients are those of z."""
    z = given["x"] + given["extra"] if case.adds else given["x"]
    if case.norm == "l2norm":
        y, rstd = reference.l2norm(z, case.eps)
        return {"y": y, "rstd": rstd, "dx": reference.l2norm_backward(given["dy"], z, rstd)}
    gain, d_extra = given["gamma"].float() + int(case.is_zero_centered), given.get("d_extra")
    grads: tuple[torch.Tensor | None, ...]
    if case.norm == "rmsnorm":
        y, rstd = reference.rmsnorm(z, gain, case.eps, case.y)
        made = {"y": y, "rstd": rstd}
        grads = reference.rmsnorm_backward(given["dy"], z, gain, rstd, d_extra=d_extra)
    else:
        y, mean, rstd = reference.layernorm(z, gain, given["beta"], case.eps, case.y)
        made = {"y": y, "mean": mean, "rstd": rstd}
        grads = reference.layernorm_backward(given["dy"], z, gain, mean, rstd, d_extra=d_extra)
    for name, grad in zip(("dx", "dgamma", "dbeta"), grads, strict=False):
        assert grad is not None
        made[name] = grad if name == "dx" else grad.to(case.parameter)
    if case.adds:
        made["z"] = z
    return made


def exact(case: Case, given: Tensors) -> Tensors:
    """The same in fp64, from z as its dtype rounds it."""
    z = (given["x"] + given["extra"] if case.adds else given["x"]).double().requires_grad_()
    leaves = {"dx": z}
    for name in ("gamma", "beta"):
        if name in given:
            leaves[f"d{name}"] = given[name].double().requires_grad_()
    made: Tensors = {}
    if case.norm == "l2norm":
        made["rstd"] = torch.rsqrt(z.square().sum(-1, keepdim=True) + case.eps)
        made["y"] = z * made["rstd"]
    else:
        centered = z
        if case.norm == "layernorm":
            made["mean"] = z.mean(-1, keepdim=True)
            centered = z - made["mean"]
        made["rstd"] = torch.rsqrt(centered.square().mean(-1, keepdim=True) + case.eps)
        gain = leaves["dgamma"] + int(case.is_zero_centered)
        made["y"] = centered * made["rstd"] * gain + leaves.get("dbeta", 0.0)
    grads = torch.autograd.grad(made["y"], list(leaves.values()), given["dy"].double())
    made |= dict(zip(leaves, grads, strict=True))
    if case.adds:
        made["z"] = z
        made["dx"] = made["dx"] + given["d_extra"].double()
    return {name: tensor.detach() for name, tensor in made.items()}


def assert_close_as_torch(got: Tensors, plain_torch: Tensors, truth: Tensors) -> None:
    """Every tensor of ``got`` is at most twice as far from the truth as plain torch's."""
    for name, tensor in got.items():
        own = (plain_torch[name].double() - truth[name]).abs().max().item()
        limit = 2 * own + ROUNDINGS * truth[name].abs().max().item()
        error = (tensor.double() - truth[name]).abs().max().item()
        assert error <= limit, f"{name}: off by {error}, torch by {own}"


def check_dx_is_rounded_once(case: Case, running: Running, device: str = "cpu") -> None:
    """``d_extra`` is added in fp32, so that dx has the error of one rounding; two have more."""
    given = {**inputs_of(case, device), "extra": None}
    alone = replace(case, adds=False)
    statistics = forward(alone, given, running)
    d_extra = given["d_extra"].double()
    truth = exact(alone, given)["dx"] + d_extra
    fused = backward(case, given, statistics, running)["dx"]
    in_steps = backward(alone, {**given, "d_extra": None}, statistics, running)["dx"]
    in_steps = in_steps + given["d_extra"]

    def error(dx: torch.Tensor) -> float:
        return float((dx.double() - truth).square().mean().sqrt())

    once = error(truth.to(case.x))
    # fp32 moves a few sums over the middle between two numbers.
    assert error(fused) <= 1.01 * once
    assert error(in_steps) > 1.1 * once


def check_dx_is_written_in_16_bits_too(case: Case, running: Running, device: str = "cpu") -> None:
    """The rounded dx has the bits of torch's cast of dx, and changes no other output."""
    given = inputs_of(case, device)
    statistics = forward(case, given, running)
    given["x"] = placed(statistics.get("z", given["x"]), case.spacing, case.offset)
    expected = backward(case, given, statistics, running)
    got = backward(case, given, statistics, running, has_rounded_dx=True)
    assert same_bits(got.pop("rounded_dx"), expected["dx"].to(case.y))
    assert all(same_bits(got[name], expected[name]) for name in expected)


def check_y_is_written_again(case: Case, running: Running, device: str = "cpu") -> None:
    """With the bits of forward, in memory of its own and over dy; no other output changes."""
    given = inputs_of(case, device)
    statistics = forward(case, given, running)
    given["x"] = placed(statistics.get("z", given["x"]), case.spacing, case.offset)
    read = [given.get(name) for name in ("dy", "x", "gamma", "beta", "d_extra")]
    with running(()):
        can_write = backward_launchers.writes_output(*read)
    if not can_write:
        with pytest.raises(InputError, match=said("normalization-backward-cannot-write-too")):
            backward(case, given, statistics, running, has_y=True)
        return
    expected = backward(case, given, statistics, running) | {"y": statistics["y"]}
    got = backward(case, given, statistics, running, has_y=True)
    assert all(same_bits(got[name], expected[name]) for name in expected)
    over = placed(given["dy"], 0, case.offset)
    got = backward(case, {**given, "dy": over, "y": over}, statistics, running) | {"y": over}
    assert all(same_bits(got[name], expected[name]) for name in expected)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integers), b.contiguous().view(integers)
    )
