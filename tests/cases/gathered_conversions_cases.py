"""Converted models whose weights ``fully_shard`` gathers quantized: each case runs on a rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import oracles
import pytest
import torch
from ranks import RANKS, device_type, part
from recorded_ranks_cases import as_recorded, counted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.conversion.converted import runner_of
from fuser.tensors import gathering, sharding
from fuser.tensors.master_weight import MasterWeight

DIM, HEADS, HIDDEN, TOKENS, STEPS = 256, 4, 384, 64, 5
RECIPES: dict[str, Callable[[], Any]] = {
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "rowwise": recipes.Float8RowwiseScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "dequantized": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
}


class Attention(torch.nn.Module):
    """Queries of four heads, keys and values of two."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(DIM, DIM)
        self.k_proj = torch.nn.Linear(DIM, DIM // 2)
        self.v_proj = torch.nn.Linear(DIM, DIM // 2)
        self.o_proj = torch.nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        q = self.q_proj(x).view(rows, HEADS, -1).transpose(0, 1)
        k = self.k_proj(x).view(rows, HEADS // 2, -1).transpose(0, 1)
        v = self.v_proj(x).view(rows, HEADS // 2, -1).transpose(0, 1)
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(y.transpose(0, 1).reshape(rows, -1))
        return out


class FeedForward(torch.nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(DIM, hidden, bias=False)
        self.up_proj = torch.nn.Linear(DIM, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(
            torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        )
        return y


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.norm = (torch.nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x))
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


def model_of(how: str) -> torch.nn.Module:
    torch.manual_seed(0)
    dtype = torch.float32 if how == "masters in fp32" else torch.bfloat16
    layers = [Layer().to(device_type(), dtype) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    if how == "frozen":
        for layer in layers:
            layer.attention.q_proj.weight.requires_grad_(False)
            layer.mlp.gate_proj.weight.requires_grad_(False)
            layer.mlp.up_proj.weight.requires_grad_(False)
    return model


def sharded(model: torch.nn.Module, how: str) -> None:
    mesh = init_device_mesh(device_type(), (RANKS,))
    options: dict[str, Any] = {"reshard_after_forward": how != "stays gathered"}
    if how == "masters in fp32":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if how == "on the CPU":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.children() if how != "copied" else ():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def joined_in(model: Any) -> list[Any]:
    """What makes gathered weights one, of all pipelines of a model."""
    runners = [runner_of(module) for module in model.modules()]
    pipelines = [p for r in runners if r is not None for p in r.pipelines.values()]
    return [gathering for p in pipelines for gathering in p._gathered.values()]


def bytes_of_joined(model: torch.nn.Module) -> int:
    tensors = [t for gathering in joined_in(model) for t in gathering.memory.values()]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@contextlib.contextmanager
def gathered_copies() -> Iterator[list[Any]]:
    """Yield a list that gets the copies of weights that are gathered at a time."""
    found: list[Any] = []
    read = gathering._copies_read

    def noted(*given: Any) -> Any:
        found.append([" and ".join(read(*given))])
        return read(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_copies_read", noted)
        yield found


def trained(name: str, how: str, rank: int, *, is_gathered: bool) -> dict[str, Any]:
    """Outputs and gradients of some steps, and the shards after them."""
    recipe = RECIPES[name]()
    model = model_of(how)
    fuser.convert(model, recipe=recipe)
    if how == "compiled":
        torch._dynamo.reset()  # each model has classes of its own, and a frame eight graphs at most
        for layer in model.children():
            layer.compile(backend="aot_eager")
    if is_gathered:
        assert fuser.distributed.gather_quantized(model, recipe) is model
    if how == "copied":
        model = copy.deepcopy(model)
        double = torch.nn.Sequential(*model.children(), *copy.deepcopy(model).children())
        with torch.no_grad():  # so that a scale of both is one of neither
            for layer in list(double.children())[2:]:
                for linear in layer.mlp.children():
                    linear.weight.mul_(1.5)
        model = double
    if how == "pickled":
        model = pickle.loads(pickle.dumps(model))
        assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
        if is_gathered:  # a pickle has plain weights
            fuser.distributed.gather_quantized(model, recipe)
    sharded(model, how)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.02)
    x = part(oracles.random_tensor((TOKENS * RANKS, DIM), torch.bfloat16, 1), rank, 0)
    found: list[Any] = []
    with contextlib.ExitStack() as stack:
        if how != "without kernels":
            as_recorded(stack.enter_context(pytest.MonkeyPatch.context()))
        plays = stack.enter_context(counted("replays"))
        copies = stack.enter_context(gathered_copies())
        for number in range(STEPS):
            leaf = x + number
            if how == "ranks of other sizes" and rank == 1 and number % 2 == 0:
                leaf = leaf[: TOKENS // 2]
            leaf.requires_grad_()
            h = leaf
            for layer in [model] if how == "copied" else model.children():
                at_times = how in ("checkpoint at times", "ranks of other sizes")
                is_kept = how != "checkpoint" and (not at_times or number % 2 == 0)
                h = layer(h) if is_kept else checkpoint(layer, h, use_reentrant=False)
            memory = bytes_of_joined(model)
            (h.float() ** 2).mean().backward()
            memory += bytes_of_joined(model)
            if not number:  # there was no earlier forward to say what backward reads
                copies.clear()
            found += [h.detach(), leaf.grad]
            found += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
            if how == "loaded" and number == 2:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            optimizer.step()
            optimizer.zero_grad()
    shards = [p.to_local().detach() for p in model.parameters()]
    found += [getattr(shard, "_plain", shard).clone() for shard in shards]
    return {
        "values": found,
        "plays": len(plays),
        "copies": {name for row in copies for name in row},
        "memory": memory,
        "joined": len(joined_in(model)),
        "keys": list(model.state_dict()),
    }


def compared(name: str, how: str, rank: int) -> dict[str, Any]:
    own, other = (trained(name, how, rank, is_gathered=is_it) for is_it in (True, False))
    pairs = list(zip(own["values"], other["values"], strict=True))
    return {
        "same": [torch.equal(a.cpu(), b.cpu()) for a, b in pairs],
        "keys": own["keys"] == other["keys"],
        "memory": own["memory"],
        "copies": own["copies"],
        "joined": (own["joined"], other["joined"]),
        "plays": (own["plays"], other["plays"]),
    }


def given_apart(rank: int) -> dict[str, Any]:
    """Gate and up, quantized apart, with larger weights of up: the error of the output."""
    outputs = []
    for is_gathered in (True, False):
        model: Any = model_of("")
        with torch.no_grad():
            model[0].mlp.up_proj.weight.mul_(8)
        recipe = recipes.Float8CurrentScaling() if is_gathered else None
        fuser.convert(model, recipe=recipe)
        for linear in (model[0].mlp.gate_proj, model[0].mlp.up_proj) if is_gathered else ():
            fuser.distributed.gather_quantized(linear, recipe)
        sharded(model, "")
        x = oracles.random_tensor((TOKENS, DIM), torch.bfloat16, 1)
        outputs.append(model(x).detach().float())
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    return {"error": float(error)}


def refused(rank: int) -> dict[str, str]:
    """What is said of weights that cannot be gathered as one."""
    found: dict[str, str] = {}
    recipe = recipes.Float8CurrentScaling()
    model: Any = model_of("")
    fuser.convert(model, recipe=recipe)
    fuser.distributed.gather_quantized(model, recipe)
    mesh = init_device_mesh(device_type(), (RANKS,))
    for layer in model:
        fully_shard(layer.mlp.gate_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    x = oracles.random_tensor((TOKENS, DIM), torch.bfloat16, 1)
    with pytest.raises(fuser.StateError) as error:
        model(x)
    found["apart"] = str(error.value)
    again = torch.nn.Sequential(*[FeedForward(96) for _ in range(3)])
    fuser.convert(again, recipe=recipe)
    with pytest.warns(fuser.FuserWarning) as warned:
        fuser.distributed.gather_quantized(again, recipe)
    found["rows"] = str(warned[0].message)
    assert not isinstance(again[1].gate_proj.weight, MasterWeight)
    assert isinstance(again[1].down_proj.weight, MasterWeight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
        with pytest.raises(fuser.InputError) as missing:
            fuser.distributed.gather_quantized(plain, recipe)
    found["none"] = str(missing.value)
    with pytest.raises(fuser.InputError) as twice:
        fuser.distributed.gather_quantized(again, recipe)
    found["twice"] = str(twice.value)
    cut: Any = model_of("")
    fuser.convert(cut, recipe=recipe)
    fuser.distributed.gather_quantized(cut, recipe)
    sharded(cut, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "is_exact", lambda *_: False)  # as if ranks cut blocks of rows
        with pytest.raises(fuser.StateError) as error:
            cut(x)
    found["cut"] = str(error.value)
    return found


PAIRS = [(name, "plain") for name in RECIPES]
PAIRS += [
    (name, how)
    for how in (
        *("without kernels", "stays gathered", "checkpoint", "frozen", "loaded"),
        *("masters in fp32", "copied"),
    )
    for name in ("current", "block")
]
PAIRS += [("block", "on the CPU"), ("current", "compiled")]
PAIRS += [("mxfp8", "checkpoint at times"), ("mxfp8", "ranks of other sizes"), ("mxfp8", "pickled")]


def cases() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        f"{name}, {how}": functools.partial(compared, name, how) for name, how in PAIRS
    }
    found |= {"refused": refused, "given apart": given_apart}
    return found
