"""Cases: a model with experts on a mesh of 2 x 2 ranks, against one rank with all tokens.

The second dimension of the mesh has experts of each rank (``expert_parallel_group``), and perhaps
parts of linears. ``fully_shard`` (FSDP2) shards the parameters of such ranks over the first, and
all others over all four ranks. Every rank has tokens of its own; its loss is a mean over them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import oracles
import other_sums
import torch
from ranks import device_type
from sharded_models import RECIPES, rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import fuser
from fuser.distributed import Colwise, Replicated, Rowwise, gather_quantized

HIDDEN, WIDTH, EXPERTS, INNER = 64, 64, 4, 2
CHANNELS = ("split sizes", "probs", "rows")
EXACT = 1e-6
"""Relative error of norms: gradients are added in another order, and products may be."""
OTHER_BYTES = 0.01
"""The same under a recipe, where torch adds in other orders: a last bit may be another byte of a
quantized operand. Of six orders the worst error was 0.0025."""
TOKENS = (12, 7, 0, 9)
ALIKE = (8, 8, 8, 8)
"""Tokens of each rank; those of sequence parallel linears are equally many."""

Case = Callable[[], None]
CASES: dict[str, Case] = {}


@functools.cache
def mesh() -> Any:
    return init_device_mesh(device_type(), (2, INNER), mesh_dim_names=("dp", "ep"))


@functools.cache
def every_rank() -> Any:
    return init_device_mesh(device_type(), (4,), mesh_dim_names=("all",))


class Kind(NamedTuple):
    """How parameters are made: of the dense linears and of the experts.

    Each is ``"plain"``, ``"quantized"`` or ``"gathered quantized"``.
    """

    dense: str = "plain"
    experts: str = "plain"
    is_one: bool = False
    """One parameter for all experts of a rank, of which the first dimension is not split again."""
    is_tensor_parallel: bool = False

    def __str__(self) -> str:
        one = ", one weight for all" if self.is_one else ""
        return f"{self.dense} linears, {self.experts} experts{one}"


class Model(torch.nn.Module):
    """Dense layers, experts that are chosen by the caller, and a last linear."""

    def __init__(self, kind: Kind, recipe: Any, count: int = EXPERTS, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        with made_as(kind.dense, recipe):
            self.dense = fuser.Sequential(
                fuser.RMSNorm(HIDDEN),
                fuser.Linear(HIDDEN, 2 * WIDTH),
                fuser.SwiGLU(glu_interleave_size=8),
                fuser.Linear(WIDTH, HIDDEN),
            )
            self.last = fuser.Sequential(fuser.Linear(HIDDEN, HIDDEN))
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        dispatch = fuser.MoeDispatch(EXPERTS, expert_parallel_group=group)
        for index, channel in enumerate(CHANNELS):
            dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
        options = {"single_grouped_weight": kind.is_one, "single_grouped_bias": kind.is_one}
        with made_as(kind.experts, recipe):
            up = fuser.GroupedLinear(count, HIDDEN, 2 * WIDTH, **options)
            down = fuser.GroupedLinear(count, WIDTH, HIDDEN, **options)
        combine = fuser.MoeCombine(expert_parallel_group=group)
        self.experts = fuser.Sequential(
            dispatch,
            up.set_extra_input_channel(0, CHANNELS[0]),
            fuser.ScaledSwiGLU().set_extra_input_channel(0, CHANNELS[1]),
            down.set_extra_input_channel(0, CHANNELS[0]),
            combine.set_extra_input_channel(0, CHANNELS[2]),
        )

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dense(x)

    def mixed(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        probs = self.router(x).softmax(-1).gather(1, chosen)
        return x + self.experts(x, chosen, probs)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.last(self.mixed(self.first(x), chosen))


def made_as(how: str, recipe: Any) -> Any:
    if how != "quantized":
        return contextlib.nullcontext()
    return fuser.quantized_model_init(recipe=recipe)


def spread(kind: Kind, recipe: Any, whole: Model) -> Model:
    """The model of this rank, with the values of ``whole``, under ``fully_shard``."""
    model = Model(kind, recipe, EXPERTS // INNER, mesh()["ep"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain(part(name, whole)))
    if kind.is_tensor_parallel:
        styles = {"0": Replicated, "1": Colwise, "3": Rowwise}
        plan = {path: style(sequence_parallel=True) for path, style in styles.items()}
        parallelize_module(model.dense, mesh()["ep"], plan)
    for how, parts in ((kind.dense, (model.dense, model.last)), (kind.experts, (model.experts,))):
        if how == "gathered quantized":
            for each in parts:
                gather_quantized(each, recipe)
    options: dict[str, Any] = {"mesh": mesh()["dp"]}
    if kind.is_one:
        options["shard_placement_fn"] = lambda _: Shard(1)
    for layer in (model.experts[1], model.experts[3], model.experts):
        fully_shard(layer, **options)
    inner = mesh()["dp"] if kind.is_tensor_parallel else every_rank()
    for layer in (model.dense[1], model.dense[3], model.dense):
        fully_shard(layer, mesh=inner)
    fully_shard(model, mesh=every_rank())
    return model


def part(name: str, whole: Model) -> torch.Tensor:
    """The values or the gradient's owner of parameter ``name`` of a rank, in the whole model."""
    path, _, own = name.rpartition(".")
    if not path.startswith("experts."):
        return whole.get_parameter(name)
    first = mesh()["ep"].get_local_rank() * (EXPERTS // INNER)
    what = own.rstrip("0123456789")
    if what == own:
        return whole.get_parameter(name)[first : first + EXPERTS // INNER]
    return whole.get_parameter(f"{path}.{what}{first + int(own.removeprefix(what))}")


def gradient(name: str, whole: Model) -> Any:
    """The gradient of parameter ``name`` of a rank, in the whole model."""
    path, _, own = name.rpartition(".")
    if path.startswith("experts.") and own in ("weight", "bias"):
        first = mesh()["ep"].get_local_rank() * (EXPERTS // INNER)
        return whole.get_parameter(name).grad[first : first + EXPERTS // INNER]
    return part(name, whole).grad


def plain(tensor: Any) -> torch.Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.dequantize() if isinstance(found, fuser.QuantizedTensor) else found


def batches(step: int, counts: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """By rank: tokens, the experts of each, and a gradient. Not all ranks have rows of each."""
    found: list[tuple[torch.Tensor, ...]] = []
    for place, count in enumerate(counts):
        x, dy, order = (
            oracles.random_tensor((count, size), torch.float32, 100 * step + 10 * place + i)
            for i, size in enumerate((HIDDEN, HIDDEN, EXPERTS))
        )
        order[:, place % EXPERTS] = -10
        found.append(((1 + place) * x, order.topk(2).indices, dy / max(count, 1)))
    return found


def autocast(recipe: Any) -> Any:
    return fuser.autocast(enabled=recipe is not None, recipe=recipe)


def step_of_one_rank(
    whole: Model, given: Sequence[tuple[torch.Tensor, ...]], recipe: Any, *, is_together: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients of the tokens of all ranks; the loss is the mean of those of ranks.

    Experts have the tokens of ``INNER`` ranks; so have dense layers if ``is_together``.
    """
    outputs: list[torch.Tensor] = []
    leaves: list[Any] = []
    for start in range(0, len(given), INNER):
        own = [x.clone().requires_grad_() for x, _, _ in given[start : start + INNER]]
        counts = [len(x) for x in own]
        with autocast(recipe):
            first = whole.first(torch.cat(own)).split(counts) if is_together else None
            first = [whole.first(x) for x in own] if first is None else first
            chosen = [chosen for _, chosen, _ in given[start : start + INNER]]
            mixed = whole.mixed(torch.cat(list(first)), torch.cat(chosen))
            found = [whole.last(x) for x in mixed.split(counts)]
        gradients = [dy for _, _, dy in given[start : start + INNER]]
        torch.autograd.backward(found, [dy / len(given) for dy in gradients])
        outputs += [y.detach() for y in found]
        leaves += own
    return outputs, [x.grad * len(given) for x in leaves]


def assert_close(found: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= limit, (what, error)


def train(name: str, kind: Kind, limit: float = EXACT) -> None:
    """Three steps; ``limit`` is that of outputs, and half of that of gradients."""
    recipe = None if name == "unquantized" else RECIPES[name]()
    is_exact = limit == EXACT
    if is_exact and recipe is not None and other_sums.IS_TRIED:
        limit = OTHER_BYTES
    whole = Model(kind, recipe)
    model = spread(kind, recipe, whole)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (whole, model)]
    sums = list(model.experts.parameters())
    sums += list(model.dense.parameters()) if kind.is_tensor_parallel else []
    for turn in range(3):
        given = batches(turn, ALIKE if kind.is_tensor_parallel else TOKENS)
        outputs, dxs = step_of_one_rank(whole, given, recipe, is_together=kind.is_tensor_parallel)
        x, chosen, dy = given[rank()]
        own = x.clone().requires_grad_()
        with autocast(recipe):
            y = model(own, chosen)
        y.backward(dy)
        assert_close(y.detach(), outputs[rank()], limit, "output")
        assert_close(own.grad, dxs[rank()], 2 * limit, "gradient of tokens")
        for parameter in sums:  # sums over the ranks of a group, where others are means
            parameter.grad.div_(INNER)
        for key, parameter in model.named_parameters():
            found, expected = parameter.grad.full_tensor(), gradient(key, whole)
            assert_close(found, expected, 2 * limit, key)
            if is_exact:  # a last bit would be a byte of a quantized weight
                expected.copy_(found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for key, parameter in model.named_parameters():
            found, expected = (plain(p).detach() for p in (parameter, part(key, whole)))
            assert_close(found, expected, limit, key)


PLAIN, ONE = Kind(), Kind(is_one=True)
QUANTIZED = Kind(dense="quantized", experts="quantized")
GATHERED = Kind(dense="gathered quantized", experts="gathered quantized")
MIXED = Kind(dense="gathered quantized", experts="quantized")
TRAINED: dict[str, tuple[Kind, ...]] = {
    "unquantized": (PLAIN, ONE),
    "current": (GATHERED,),
    "mxfp8": (ONE, QUANTIZED),
    "nvfp4": (MIXED,),
}
# Parts of linears have scales of their own, and their products are added in another order.
TENSOR_PARALLEL: dict[str, tuple[float, tuple[Kind, ...]]] = {
    "unquantized": (1e-5, (ONE,)),
    "current": (0.125, (PLAIN,)),
    "mxfp8": (0.02, (PLAIN, QUANTIZED)),
}
for _name, _kinds in TRAINED.items():
    for _kind in _kinds:
        _title = f"training on a mesh is that of one rank [{_name}, {_kind}]"
        CASES[_title] = functools.partial(train, _name, _kind)
for _name, (_limit, _kinds) in TENSOR_PARALLEL.items():
    for _kind in _kinds:
        _title = f"so is tensor parallel training [{_name}, {_kind}]"
        _kind = _kind._replace(is_tensor_parallel=True)
        CASES[_title] = functools.partial(train, _name, _kind, _limit)
