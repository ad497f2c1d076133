"""Cases of communication in pipelines: each runs on a rank, and returns what the tests look at."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import re
import weakref
from typing import Any

import every_format
import oracles
import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from ranks import RANKS, device_type, part
from said import said as pattern_of
from torch.distributed.device_mesh import init_device_mesh

import fuser
from fuser import gemm, modules
from fuser.communication import collectives
from fuser.plan.registered import RegisteredFusions
from fuser.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fuser.runtime import graphs, pipeline
from fuser.runtime.recorded import refusal_of

HIDDEN, TOKENS = 128, 256
E5M2 = 0.125  # the largest relative error of a rounding

X = oracles.random_tensor((TOKENS, HIDDEN), torch.float32, 1)
X[TOKENS // 2 :] *= 3
WEIGHT = oracles.random_tensor((HIDDEN, HIDDEN), torch.float32, 2)
BIAS = oracles.random_tensor((HIDDEN,), torch.float32, 4)
DY = oracles.random_tensor((TOKENS, HIDDEN), torch.float32, 3)


def run(op: Any, x: torch.Tensor, dy: torch.Tensor, recipe: Any = None) -> dict[str, Any]:
    """Three equal steps: the results of the last."""
    for _ in range(3):
        op.zero_grad()
        leaf = x.clone().requires_grad_()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = op(leaf)
        y.backward(dy)
    grads = {name: p.grad for name, p in op.named_parameters()}
    return {"y": y.detach(), "dx": leaf.grad, **grads}


# -- cases: what a rank runs --------------------------------------------------------


def gather(rank: int) -> Any:
    return run(fuser.AllGather(), part(X, rank, 0), DY * (1 + rank))


def scatter(rank: int) -> Any:
    return run(fuser.ReduceScatter(), X * (1 + rank), part(DY, rank, 0))


def reduce(rank: int) -> Any:
    x = X * (1 + rank)
    assert torch.equal(fuser.AllReduce()(x), 3 * X)
    assert torch.equal(x, X * (1 + rank))
    return run(fuser.AllReduce(reduce_in_backward=True), X * (1 + rank), DY * (1 + rank))


def reduce_forward(rank: int) -> Any:
    return run(fuser.AllReduce(), X * (1 + rank), DY * (1 + rank))


def in_a_pipeline(rank: int) -> Any:
    ops = (fuser.ConstantScale(2.0), fuser.AllGather(), fuser.SiLU(), fuser.ReduceScatter())
    model = fuser.Sequential(*ops, fuser.ConstantScale(0.5))
    return run(model, part(X, rank, 0), part(DY, rank, 0))


def gathered_linear(recipe: Any, rank: int) -> Any:
    """An AllGather before a linear, which wants quantized rows of all ranks."""
    linear = fuser.BasicLinear(HIDDEN, HIDDEN)
    with torch.no_grad():
        linear.weight.copy_(WEIGHT)
    return run(fuser.Sequential(fuser.AllGather(), linear), part(X, rank, 0), DY / RANKS, recipe)


def quantized_gather(recipe: Any, rank: int) -> Any:
    model = fuser.Sequential(fuser.Quantize(), fuser.AllGather())
    with torch.no_grad(), fuser.autocast(recipe=recipe):
        y = model(part(X, rank, 0))
    return {"type": type(y).__name__, "values": y.dequantize()}


def linear_op(mode: str, sequence: bool, rank: int) -> Any:
    op = fuser.Linear(HIDDEN, HIDDEN, tensor_parallel_mode=mode, sequence_parallel=sequence)
    with torch.no_grad():
        is_row = mode == "row"
        op.weight.copy_(part(WEIGHT, rank, int(is_row)))
        op.bias.copy_(BIAS if is_row else part(BIAS, rank, 0))
    x = part(X, rank, 1) if is_row else part(X, rank, 0) if sequence else X
    dy = DY if is_row else part(DY, rank, 1)
    dy = part(dy, rank, 0) if is_row and sequence else dy
    return run(fuser.Sequential(op), x, dy)


def mlp_parts(mlp: Any, rank: int) -> dict[str, torch.Tensor]:
    """The parameters of a rank, of those of a whole MLP."""
    dims = {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1}
    return {
        name: part(p.detach(), rank, dims[name]) if name in dims else p.detach()
        for name, p in mlp.named_parameters()
    }


def whole_mlp() -> Any:
    torch.manual_seed(1)
    return oracles.randomize(modules.LayerNormMLP(HIDDEN, 2 * HIDDEN))


def train_mlp(mlp: Any, recipe: Any, x: torch.Tensor, dy: torch.Tensor, is_shard: bool) -> Any:
    """Losses and outputs of four steps of SGD."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-4)
    outputs = []
    for _ in range(4):
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = mlp(x)
        optimizer.zero_grad()
        y.backward(dy)
        for p in mlp.parameters():
            if is_shard and getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad)
        optimizer.step()
        outputs.append(y.detach())
    return {"outputs": outputs, **{n: p.detach() for n, p in mlp.named_parameters()}}


def mlp(recipe: Any, sequence: bool, rank: int) -> Any:
    layer = modules.LayerNormMLP(
        HIDDEN,
        2 * HIDDEN,
        set_parallel_mode=True,
        tp_size=RANKS,
        sequence_parallel=sequence,
    )
    layer.load_state_dict(mlp_parts(whole_mlp(), rank), strict=False)
    x, dy = (part(t, rank, 0) if sequence else t for t in (X, DY))
    return train_mlp(layer, recipe, x, dy, is_shard=True)


def in_parts(recipe: Any, sequence: bool, rank: int) -> Any:
    """Gradients of an MLP at once, and of its input first and its parameters then."""
    layer = modules.LayerNormMLP(
        HIDDEN, 2 * HIDDEN, set_parallel_mode=True, tp_size=RANKS, sequence_parallel=sequence
    )
    layer.load_state_dict(mlp_parts(whole_mlp(), rank), strict=False)
    x, dy = (part(t, rank, 0) if sequence else t for t in (X, DY))
    x = x.clone().requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    weights = list(layer.parameters())
    grad = functools.partial(torch.autograd.grad, y, grad_outputs=dy, retain_graph=True)
    # Of the parameters alone, without what the input's part keeps, too.
    return {
        "alone": grad(weights),
        "parts": [*grad([x]), *grad(weights)],
        "all": grad([x, *weights]),
    }


def column(group: Any = None, **options: Any) -> Any:
    op = fuser.BasicLinear(
        HIDDEN,
        HIDDEN,
        tensor_parallel_mode="column",
        tensor_parallel_group=group,
        sequence_parallel=True,
        **options,
    )
    rank = dist.get_rank()
    with torch.no_grad():
        op.weight.copy_(part(WEIGHT, rank, 0))
    return op


def two_groups(rank: int) -> Any:
    """Two forwards under two groups, then both backwards: the groups of each."""
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)]
    op, seen, outputs = column(groups[0]), [], []
    original: Any = collectives._reduce_scatter

    def watched(*args: Any, group: Any, **options: Any) -> Any:
        seen.append(groups.index(group))
        return original(*args, group=group, **options)

    saved: list[Any] = []

    def kept_by_autograd(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with fuser.autocast(recipe=Float8CurrentScaling()):
        for group in groups:
            op.tensor_parallel_group = group
            x = part(X, rank, 0).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(kept_by_autograd, lambda t: t):
                outputs.append(op(x))
    collectives._reduce_scatter = watched
    try:
        for y in outputs:
            y.backward(part(DY, rank, 1))
    finally:
        collectives._reduce_scatter = original
    quantizers = [t._quantizer for t in saved if hasattr(t, "_quantizer")]
    kept = [isinstance(value, dist.ProcessGroup) for q in quantizers for value in vars(q).values()]
    return {"seen": seen, "kept": kept}


def a_destroyed_group(rank: int) -> Any:
    group = dist.new_group(list(range(RANKS)))
    op = column(group)
    y = op(part(X, rank, 0).requires_grad_())
    op.tensor_parallel_group = None
    dist.barrier()
    dist.destroy_process_group(group)
    seen = weakref.ref(group)
    del group
    assert seen() is None  # the forward, whose backward is to come, does not keep it
    with pytest.raises(
        fuser.StateError,
        match=pattern_of("groups-backward-communicates-forward", "BasicLinear"),
    ):
        y.backward(part(DY, rank, 1))
    return {}


def odd_rows(recipe: Any, rank: int) -> Any:
    """Rows of which two ranks share blocks."""
    x, dy = X[88:168], DY[:80]
    return run(column(), part(x, rank, 0), part(dy, rank, 1), recipe)


def unreduced_amaxes(rank: int) -> Any:
    recipe = DelayedScaling(reduce_amax=False, amax_history_len=2)
    return run(column(), part(X, rank, 0), part(DY, rank, 1), recipe)


def different_scales(rank: int) -> Any:
    op = column()
    with fuser.autocast(recipe=DelayedScaling()):
        op(part(X, rank, 0))
        op._delayed["forward"].scale.mul_(1 + rank)
        if device_type() == "cuda":  # where a check would wait for the device
            assert op(part(X, rank, 0)).isnan().all()
        else:
            with pytest.raises(
                fuser.StateError, match=pattern_of("quantized-gather-cannot-gathered-ranks")
            ):
                op(part(X, rank, 0))
    return {}


class _Mine(fuser.Float8CurrentScalingQuantizer):
    """A user's quantizer, which may know nothing of groups."""


def custom_recipes(rank: int) -> Any:
    """Custom recipes of the library's quantizers and of a user's; the bytes that travel."""
    found: dict[str, Any] = {}
    original = collectives._all_gather
    for name, kind in (("library", fuser.Float8CurrentScalingQuantizer), ("user", _Mine)):
        sent: list[torch.dtype] = []

        def noted(out: Any, x: torch.Tensor, sent: Any = sent, **options: Any) -> Any:
            sent.append(x.dtype)
            return original(out, x, **options)

        recipe = CustomRecipe(
            lambda role, kind=kind: kind(fuser.DType.kFloat8E4M3, device=device_type())
        )
        collectives._all_gather = noted
        try:
            found[name] = run(column(), part(X, rank, 0), part(DY, rank, 1), recipe)
        finally:
            collectives._all_gather = original
        found[name]["sent"] = [dtype is torch.uint8 for dtype in sent]
    return found


def main_grad(rank: int) -> Any:
    op = column(accumulate_into_main_grad=True)
    op.weight.main_grad = torch.ones_like(op.weight)
    run(op, part(X, rank, 0), part(DY, rank, 1))
    return {"main_grad": op.weight.main_grad}


def quantized_parameter(rank: int) -> Any:
    with fuser.quantized_model_init(recipe=MXFP8BlockScaling()):
        op = column()
    return run(op, part(X, rank, 0), part(DY, rank, 1), MXFP8BlockScaling())


def bf16(rank: int) -> Any:
    op = column()
    x = part(X, rank, 0).requires_grad_()
    with torch.autocast(device_type(), torch.bfloat16):
        y = op(x)
    y.backward(part(DY, rank, 1).bfloat16())
    return {"y": y.detach(), "dx": x.grad, "weight": op.weight.grad}


class _Fusion(fuser.FusedOperation):
    """A user's fusion, which knows nothing of ranks."""

    window = (fuser.BasicLinear, fuser.ConstantScale)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **options: Any) -> Any:
        raise AssertionError("it must not run")


def _with_registered(x: torch.Tensor) -> Any:
    """A pipeline of which a registered function gives a linear to a fusion."""

    def replace(ops: list[Any], *, recipe: Any) -> list[Any]:
        is_ours = len(ops) == 2 and isinstance(ops[1], fuser.ConstantScale)
        return [_Fusion(ops)] if is_ours else ops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_registered", RegisteredFusions(forward=(replace,)))
        return fuser.Sequential(column(), fuser.ConstantScale(2.0))(x)


def plans(rank: int) -> Any:
    model = fuser.Sequential(column(), fuser.GELU(), fuser.ReduceScatter())
    x = part(X, rank, 0).requires_grad_()
    found: dict[str, Any] = {"plain": str(model.plan(x))}
    with fuser.autocast(recipe=MXFP8BlockScaling()):
        plan = model.plan(x)
        found["mxfp8"] = str(plan)
        found["link"] = plan.forward[0].link_bytes_per_token
    row = fuser.Linear(HIDDEN, HIDDEN, tensor_parallel_mode="row")
    ops = (*model, *row.basic_ops)
    found["recordable"] = not any(map(refusal_of, ops))
    found["groups"] = [len(op.process_groups) for op in ops]
    fusions = (*fuser.FUSIONS, _Fusion)
    fused = fuser.Sequential(column(), fuser.ConstantScale(2.0), fusions=fusions)
    found["user"] = str(fused.plan(x))
    fused(x)
    # The check of a module that is to be captured, which needs no GPU for this.
    found["captured"] = said(lambda: graphs._check_module(0, model, ()))
    norm = modules.LayerNormLinear(HIDDEN, HIDDEN, parallel_mode="column")
    found["captured layer"] = said(lambda: graphs._check_module(0, norm, ()))
    found["registered"] = said(lambda: _with_registered(x))
    bias = fuser.Linear(HIDDEN, HIDDEN, tensor_parallel_mode="column")
    found["bias"] = str(fuser.Sequential(bias).plan(X))
    return found


def copies(rank: int) -> Any:
    group = dist.new_group(list(range(RANKS)))
    op = column(group)
    copied = copy.deepcopy(op)
    for one in (op, column(init_device_mesh(device_type(), (RANKS,)))):
        with pytest.raises(fuser.StateError, match=pattern_of("groups-cannot-pickled-belongs")):
            pickle.dumps(one)
    again = pickle.loads(pickle.dumps(column()))
    return {
        "same": copied.tensor_parallel_group is group,
        "y": copied(part(X, rank, 0)).detach(),
        "again": again(part(X, rank, 0)).detach(),
    }


class _Tracker:
    forks = 0

    @contextlib.contextmanager
    def fork(self) -> Any:
        _Tracker.forks += 1
        with torch.random.fork_rng():
            torch.manual_seed(dist.get_rank())
            yield


def random_weights(rank: int) -> Any:
    op = fuser.Linear(
        HIDDEN,
        HIDDEN,
        tensor_parallel_mode="row",
        rng_state_tracker_function=_Tracker,
    )
    return {"weight": op.weight.detach(), "next": torch.rand(3)}


def said(call: Any) -> str:
    with pytest.raises((fuser.InputError, fuser.StateError)) as error:
        call()
    return str(error.value)


def bad_input(rank: int) -> Any:
    first = dist.new_group([0])
    other = fuser.BasicLinear(HIDDEN, HIDDEN, tensor_parallel_mode="row", sequence_parallel=True)
    found = {
        "rows of an op": said(lambda: fuser.ReduceScatter()(X[:7])),
        "rows of a linear": said(lambda: other(part(X[:9], rank, 1))),
        "one dimension": said(lambda: fuser.AllGather()(X[0])),
        "one dimension of a linear": said(lambda: column()(X[0])),
        "features": said(lambda: other(X)),
        "row after a norm": said(
            lambda: modules.LayerNormLinear(HIDDEN, HIDDEN, parallel_mode="row")
        ),
        "two modes": said(lambda: modules.LayerNormMLP(HIDDEN, HIDDEN, parallel_mode="column")),
    }
    if rank == 1:
        found["no member"] = said(
            lambda: fuser.BasicLinear(
                HIDDEN, HIDDEN, tensor_parallel_mode="row", tensor_parallel_group=first
            )
        )
        found["no member of an op"] = said(lambda: fuser.AllReduce(first))
    else:
        alone = fuser.BasicLinear(
            HIDDEN, HIDDEN, tensor_parallel_mode="row", tensor_parallel_group=first
        )
        assert alone.weight.shape == (HIDDEN, HIDDEN)
        found["alone"] = str(said(lambda: setattr(other, "tensor_parallel_group", first)))
    return found


def different_ranks(rank: int) -> Any:
    recipe = (Float8CurrentScaling(), MXFP8BlockScaling())[rank]
    x = part(X, rank, 0)
    op = column()
    with fuser.autocast(recipe=recipe):
        of_recipes = said(lambda: op(x))
        again = said(lambda: op(x))
    assert again == of_recipes
    return {
        "recipes": of_recipes,
        "rows": said(lambda: column()(x[: 64 + rank])),
        "gradients": said(lambda: column()(x.clone().requires_grad_(rank == 0))),
        "op": said(lambda: fuser.AllReduce()(x[: 64 + rank])),
    }


def ranks_that_differ_later(rank: int) -> Any:
    """Each rank makes a call that it has made before."""
    if device_type() == "cuda":  # where a comparison would wait for the device
        return {}
    op, x = column(), part(X, rank, 0)

    def call(*, rows: int, is_quantized: bool) -> torch.Tensor:
        with fuser.autocast(enabled=is_quantized, recipe=Float8CurrentScaling()):
            y: torch.Tensor = op(x[:rows])
            return y

    expected = [call(rows=rows, is_quantized=q) for rows in (32, 64) for q in (True, False)]
    found = {
        "rows": said(lambda: call(rows=(32, 64)[rank], is_quantized=False)),
        "recipe": said(lambda: call(rows=64, is_quantized=rank == 0)),
    }
    assert torch.equal(call(rows=64, is_quantized=False), expected[-1])
    return found


def quantized_outside_autocast(rank: int) -> Any:
    """A quantized input, whose scale is that of the rank, for an unquantized product."""
    with torch.no_grad(), fuser.autocast(recipe=Float8CurrentScaling()):
        x = fuser.Quantize()(part(X, rank, 0))
    op = column()
    y = op(x)
    y.backward(part(DY, rank, 1))
    return {"x": x.dequantize(), "y": y.detach(), "weight": op.weight.grad}


def negated(rank: int) -> Any:
    """torch negates lazily, as the imaginary part of a conjugate."""
    return {"y": fuser.AllGather()(torch._neg_view(part(X, rank, 0)))}


def mesh(rank: int) -> Any:
    group = dist.device_mesh.init_device_mesh(device_type(), (RANKS,), mesh_dim_names=("tp",))
    flat = dist.device_mesh.init_device_mesh(device_type(), (1, RANKS), mesh_dim_names=("dp", "tp"))
    two = said(lambda: fuser.AllGather(flat))
    ranks = said(lambda: fuser.AllGather([0, 1]))
    return {"y": column(group)(part(X, rank, 0)).detach(), "two": two, "ranks": ranks}


def order(rank: int) -> Any:
    """The order of communication and products in the backward of a sequence parallel linear."""
    seen: list[str] = []
    op = column()
    y = op(part(X, rank, 0).requires_grad_())

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*args, **options)

        return call

    class Waited(collectives.Pending):  # type: ignore[type-arg]
        def wait(self) -> Any:
            seen.append("wait")
            return super().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_all_gather", noted("gather", collectives._all_gather))
        scatter = collectives._reduce_scatter
        patch.setattr(collectives, "_reduce_scatter", noted("scatter", scatter))
        patch.setattr(collectives, "Pending", Waited)
        for name in ("dgrad", "wgrad"):
            patch.setattr(gemm, name, noted(name, getattr(gemm, name)))
        y.backward(part(DY, rank, 1))
    return {"seen": seen}


def traffic(rank: int) -> Any:
    """By recipe and mode, the bytes that all-gathers of a training step take, and their number."""
    found: dict[str, list[int]] = {}
    original = collectives._all_gather

    def counted(out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        found[name].append(x.numel() * x.element_size())
        return original(out, x, **options)

    collectives._all_gather = counted
    try:
        for mode in ("column", "row"):
            for recipe_name, recipe in (("unquantized", None), *RECIPES.items()):
                name = f"{recipe_name} {mode}"
                op = fuser.BasicLinear(
                    HIDDEN,
                    HIDDEN,
                    tensor_parallel_mode=mode,
                    sequence_parallel=True,
                    dtype=torch.bfloat16,
                )
                is_row = mode == "row"
                x, dy = part(X, rank, int(is_row)), part(DY, rank, 1 - int(is_row))
                leaf = x.bfloat16().requires_grad_()
                found[name] = []
                with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                    y = op(leaf)
                y.backward(dy.bfloat16())
    finally:
        collectives._all_gather = original
    return found


def document(rank: int) -> Any:
    """The plan that the example of the document prints."""
    text = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
            exec(compile(block, "example", "exec"), {})
    return {"printed": printed.getvalue()}


def meta(rank: int) -> Any:
    with torch.device("meta"):
        op = fuser.BasicLinear(
            HIDDEN, HIDDEN, tensor_parallel_mode="column", sequence_parallel=True
        )
        shape = op(torch.empty(4, HIDDEN)).shape
    y = op(torch.zeros(0, HIDDEN))
    return {"shape": tuple(shape), "empty": tuple(y.shape)}


SINGLE = {
    case.__name__: case
    for case in (
        *(gather, scatter, reduce, reduce_forward, in_a_pipeline, two_groups, a_destroyed_group),
        *(
            custom_recipes,
            unreduced_amaxes,
            different_scales,
            main_grad,
            quantized_parameter,
            bf16,
            plans,
        ),
        *(
            different_ranks,
            ranks_that_differ_later,
            quantized_outside_autocast,
            negated,
            mesh,
            order,
        ),
        *(copies, random_weights, bad_input, meta, traffic, document),
    )
}
LINEARS = {
    f"{mode}{' sequence' * sequence}": (mode, sequence)
    for mode in ("column", "row")
    for sequence in (False, True)
}
RECIPES = {
    **{name: every_format.deterministic(cls) for name, cls in every_format.RECIPES.items()},
    "nvfp4 of rows": every_format.deterministic(NVFP4BlockScaling, row_scaled_activation=True),
    "nvfp4 4over6": every_format.deterministic(
        NVFP4BlockScaling, disable_rht=True, nvfp4_4over6="all"
    ),
    "delayed exact": DelayedScaling(override_linear_precision=(False, False, True)),
}
MLPS = {"unquantized": None, "current": RECIPES["current"], "delayed": RECIPES["delayed"]}


def cases() -> dict[str, Any]:
    found: dict[str, Any] = dict(SINGLE)
    for name, where in LINEARS.items():
        found[f"linear {name}"] = functools.partial(linear_op, *where)
    for name, recipe in RECIPES.items():
        found[f"gathered {name}"] = functools.partial(gathered_linear, recipe)
        found[f"quantized {name}"] = functools.partial(quantized_gather, recipe)
        found[f"odd {name}"] = functools.partial(odd_rows, recipe)
    for name, of_mlp in MLPS.items():
        for sequence in (False, True):
            found[f"mlp {name} {sequence}"] = functools.partial(mlp, of_mlp, sequence)
            found[f"in parts {name} {sequence}"] = functools.partial(in_parts, of_mlp, sequence)
    return found
