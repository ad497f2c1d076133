"""Cases: parameters that are DTensors, on two ranks: styles, checkpoints, and refusals."""

from __future__ import annotations

import copy
import functools
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import oracles
import sharded_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import device_type
from sharded_models import assert_same_bytes, rank, said, shared_folder
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import modules
from fuser.distributed import (
    Colwise,
    Replicated,
    Rowwise,
    distribute_parameters,
    gather_quantized,
    init_delayed_scaling,
)
from fuser.errors import InputError, InputTypeError
from fuser.plan import cuts
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fuser.runtime import graphs
from fuser.runtime.cut import CutPlan

HIDDEN, WIDTH, ROWS = 64, 128, 64
RECIPES: dict[str, Callable[[], Any]] = {
    "unquantized": lambda: None,
    "current": Float8CurrentScaling,
    "mxfp8": MXFP8BlockScaling,
    "delayed": functools.partial(DelayedScaling, amax_history_len=4),
}
LIMITS = {"unquantized": 1e-5, "mxfp8": 1e-5, "current": 0.125, "delayed": 0.125}
"""Errors relative to one rank: parts of weights have scales of their own, in FP8 formats."""

Case = Callable[[], None]
CASES: dict[str, Case] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def each(**choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a case of a function for each value of its one argument."""
    ((argument, values),) = choices.items()

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for value in values:
            bound = functools.partial(function, **{argument: value})
            CASES[f"{function.__name__} [{value}]"] = bound
        return function

    return add


@functools.cache
def mesh() -> Any:
    return init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))


def mlp(recipe: Any = None, seed: int = 1, **options: Any) -> fuser.Sequential:
    """The whole model, equal on all ranks; quantized under a recipe."""
    torch.manual_seed(seed)
    with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe, **options):
        return fuser.Sequential(
            fuser.RMSNorm(HIDDEN),
            fuser.Linear(HIDDEN, WIDTH),
            fuser.GELU(),
            fuser.Linear(WIDTH, HIDDEN),
        )


def parallel(layers: Any, *, is_sequence: bool = True) -> Any:
    plan = {"0": Replicated, "1": Colwise, "3": Rowwise}
    plan = {path: style(sequence_parallel=is_sequence) for path, style in plan.items()}
    return parallelize_module(layers, mesh(), plan)


def inputs(seed: int = 3, rows: int = ROWS, features: int = HIDDEN) -> torch.Tensor:
    return oracles.random_tensor((rows, features), torch.float32, seed)


def own(x: torch.Tensor, *, is_part: bool = True, dim: int = 0) -> torch.Tensor:
    return x.chunk(2, dim)[rank()].contiguous() if is_part else x


def assert_close(found: Any, expected: Any, limit: float = 1e-5) -> None:
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error < limit, error


def step(layers: Any, x: torch.Tensor, recipe: Any = None) -> torch.Tensor:
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y: torch.Tensor = layers(x)
    (y.square().sum() / 100).backward()
    return y.detach()


def values_of(layers: Any) -> dict[str, torch.Tensor]:
    """The whole values of a state, gathered; ``_extra_state`` too."""
    found = {}
    for name, value in layers.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        is_quantized = isinstance(whole, fuser.QuantizedTensor)
        found[name] = (whole.dequantize() if is_quantized else whole).clone()
    return {name: value for name, value in found.items() if value.numel()}


# -- styles ------------------------------------------------------------------------------


def train(name: str, *, is_sequence: bool, is_quantized: bool) -> None:
    recipe = RECIPES[name]()
    whole, parts = (mlp(recipe if is_quantized else None) for _ in range(2))
    step(parts, inputs(), None)  # plans of the whole model are not used after it
    parts.zero_grad()
    parallel(parts, is_sequence=is_sequence)
    placements = [Replicate(), Shard(0), Shard(0), Shard(1), Replicate()]
    assert [p.placements for p in parts.parameters()] == [(each,) for each in placements]
    assert list(parts.state_dict()) == list(whole.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, parts)]
    limit = LIMITS[name]
    for turn in range(3):
        x = inputs(turn)
        expected = step(whole, x, recipe)
        leaf = own(x, is_part=is_sequence).requires_grad_()
        assert_close(step(parts, leaf, recipe), own(expected, is_part=is_sequence), limit)
        for parameter, other in zip(parts.parameters(), whole.parameters(), strict=True):
            assert parameter.grad.placements == parameter.placements
            assert_close(parameter.grad.full_tensor(), other.grad, 2 * limit)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (whole, parts)]
        assert_close(norms[1].full_tensor(), norms[0], limit)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@each(name=RECIPES)
def an_mlp_trains_as_on_one_rank(name: str) -> None:
    for is_sequence in (False, True):
        train(name, is_sequence=is_sequence, is_quantized=False)


@each(name=[name for name in RECIPES if name != "unquantized"])
def quantized_parameters_train_as_on_one_rank(name: str) -> None:
    train(name, is_sequence=True, is_quantized=True)


@each(name=sharded_models.RECIPES)
def a_quantized_part_has_the_bytes_of_its_values(name: str) -> None:
    recipe = sharded_models.RECIPES[name]()
    for is_kept in (False, True):
        whole = mlp(recipe, preserve_high_precision_init_val=is_kept)
        layers = parallel(mlp(recipe, preserve_high_precision_init_val=is_kept))
        for place, dim in ((1, 0), (3, 1)):
            weight, part = whole[place].weight, layers[place].weight.to_local()
            kept = weight.get_high_precision_init_val()
            values = own(weight.dequantize().detach() if kept is None else kept, dim=dim)
            assert_same_bytes(part, part._quantizer.unbound()(values.to(part.device)))
        step(layers, own(inputs()), recipe)
        torch.optim.AdamW(layers.parameters(), lr=0.01).step()
        assert type(layers[1].weight.to_local()) is type(whole[1].weight)
        assert torch.isfinite(step(layers, own(inputs()), recipe)).all()


@case
def a_sharded_sequential_is_one_pipeline_of_fusions() -> None:
    layers = parallel(mlp())
    text = str(layers.plan(own(inputs())))
    assert "6 ReduceScatter" in text
    assert "all-gather input (2 ranks" in text
    assert re.search(r"^  1-3 +ForwardLinearBiasActivation", text, re.M)
    step(layers, own(inputs()))
    assert len(layers[3].members) == 3


def of_layers() -> dict[str, tuple[Callable[[], Any], Any, int | None, int | None]]:
    """By name: the module, its style, and the dimensions of input and output on a rank."""
    gated = {"activation": "swiglu", "activation_params": {"glu_interleave_size": 16}}
    made: dict[str, tuple[Callable[[], Any], Any, int | None, int | None]] = {}
    for is_sequence in (False, True):
        rows, options = 0 if is_sequence else None, {"sequence_parallel": is_sequence}
        for kind in (fuser.BasicLinear, fuser.Linear, modules.Linear, modules.LayerNormLinear):
            make = functools.partial(kind, HIDDEN, WIDTH)
            made[f"{kind.__module__} {kind.__name__} column {is_sequence}"] = (
                *(make, Colwise(**options)),
                *(rows, 1),
            )
            if kind is not modules.LayerNormLinear:
                made[f"{kind.__module__} {kind.__name__} row {is_sequence}"] = (
                    *(make, Rowwise(**options)),
                    *(1, rows),
                )
        for more in ({}, gated):
            mlp_of = functools.partial(modules.LayerNormMLP, HIDDEN, WIDTH, **more)
            made[f"LayerNormMLP {len(more)} {is_sequence}"] = mlp_of, Colwise(**options), rows, rows
    made["Bias"] = functools.partial(fuser.Bias, HIDDEN), Colwise(), 1, 1
    made["norm of rows"] = (
        *(functools.partial(fuser.LayerNorm, HIDDEN), Replicated(sequence_parallel=True)),
        *(0, 0),
    )
    return made


@case
def every_kind_of_op_and_layer_is_that_of_one_rank() -> None:
    for name, (make, style, of_input, of_output) in of_layers().items():
        torch.manual_seed(2)
        whole = make()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter) / 8)
        parts = parallelize_module(copy.deepcopy(whole), mesh(), style)
        x = inputs().requires_grad_()
        y = whole(x)
        dy = oracles.random_tensor(y.shape, torch.float32, 5)
        y.backward(dy)
        leaf = x.detach() if of_input is None else own(x.detach(), dim=of_input)
        leaf.requires_grad_()
        z = parts(leaf)
        z.backward(dy if of_output is None else own(dy, dim=of_output))
        expected = (y.detach(), x.grad)
        for found, (whole_value, dim) in zip(
            (z.detach(), leaf.grad), zip(expected, (of_output, of_input), strict=True), strict=True
        ):
            assert_close(found, whole_value if dim is None else own(whole_value, dim=dim), 1e-5)
        for (key, parameter), other in zip(
            parts.named_parameters(), whole.parameters(), strict=True
        ):
            found = parameter.grad.full_tensor()
            assert float((found - other.grad).norm() / other.grad.norm()) < 1e-5, (name, key)


@case
def a_parameter_that_is_frozen_stays_frozen_when_it_is_sharded() -> None:
    """Every second one, and then the others, of every kind of op and layer, quantized too."""
    for recipe in (None, MXFP8BlockScaling()):
        for name, (make, style, _, _) in of_layers().items():
            for first in (0, 1):
                with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe):
                    whole = make()
                for place, parameter in enumerate(whole.parameters()):
                    parameter.requires_grad_(place % 2 == first)
                expected = {key: p.requires_grad for key, p in whole.named_parameters()}
                parts = parallelize_module(whole, mesh(), style)
                found = {key: p.requires_grad for key, p in parts.named_parameters()}
                assert found == expected, (name, found)
    layers = mlp()
    for frozen in (layers[0].weight, layers[1].weight, layers[3].bias):
        frozen.requires_grad_(False)
    expected = {key: p.requires_grad for key, p in layers.named_parameters()}
    layers = parallel(layers)
    step(layers, own(inputs()))
    assert {key: p.grad is not None for key, p in layers.named_parameters()} == expected


@case
def plans_of_the_whole_model_are_not_those_of_its_parts() -> None:
    torch.manual_seed(1)
    whole = fuser.Sequential(fuser.BasicLinear(HIDDEN, WIDTH), fuser.Bias(WIDTH))
    with torch.no_grad():
        whole[1].bias.normal_()
    parts = copy.deepcopy(whole)
    expected = [whole(inputs()).detach(), parts(inputs()).detach()][0]
    plan: dict[str, Any] = {"0": Rowwise(), "1": Replicated()}
    parallelize_module(parts, mesh(), plan)
    assert_close(parts(own(inputs(), dim=1)).detach(), expected)


@case
def layouts_of_torch_are_taken_where_they_mean_the_same() -> None:
    assert Colwise(input_layouts=Shard(0)).is_sequence
    assert not Colwise(input_layouts=Replicate(), output_layouts=Shard(-1)).is_sequence
    assert Rowwise(output_layouts=Shard(0), input_layouts=Shard(-1)).is_sequence
    for make, text in (
        (lambda: Colwise(input_layouts=Shard(1)), r"input_layouts=S"),
        (lambda: Colwise(output_layouts=Replicate()), "the output is S"),
        (lambda: Rowwise(output_layouts=Shard(1)), "the output is Replicate(), or Shard(0)"),
        (lambda: Rowwise(input_layouts=Replicate()), "the input is S"),
        (lambda: Rowwise(use_local_output=False), "no DTensor"),
        (
            lambda: Colwise(input_layouts=Replicate(), sequence_parallel=True),
            "sequence_parallel=True",
        ),
    ):
        assert text in said(InputError, make), text


@case
def a_pipeline_between_layers_of_torch_styles_waits_for_their_collectives() -> None:
    """Of whole rows, and of parts of them: torch reduces its input and its gradient."""
    for layout in (Replicate(), Shard(0)):
        torch.manual_seed(1)
        before, after = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        whole = torch.nn.Sequential(before, mlp(), after)
        layers = copy.deepcopy(whole)
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
            "2": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
        }
        parallelize_module(layers, mesh(), plan)
        kinds: list[Any] = []
        layers[1].register_forward_pre_hook(lambda _, given, to=kinds: to.append(type(given[0])))
        found, expected = (step(m, inputs()) for m in (layers, whole))
        assert kinds == [AsyncCollectiveTensor]
        assert_close(found, expected)
        for part, own_part in zip(layers[1].parameters(), whole[1].parameters(), strict=True):
            grad = part.grad
            if layout != Replicate():
                dist.all_reduce(grad)
            assert_close(grad, own_part.grad)


@case
def what_cannot_be_sharded_is_refused_and_unchanged() -> None:
    def refused(module: Any, style: Any, on: Any = None) -> str:
        before = [(id(p), tuple(p.shape)) for p in module.parameters()]
        sentence = said(InputError, lambda: parallelize_module(module, on or mesh(), style))
        assert [(id(p), tuple(p.shape)) for p in module.parameters()] == before
        return sentence

    assert "got a Sequential" in refused(mlp(), Colwise())
    assert "got a GroupedLinear" in refused(fuser.GroupedLinear(2, 8, 8), Colwise())
    assert refused(modules.LayerNormMLP(8, 8), Rowwise()).endswith(
        "got a LayerNormMLP. The style for LayerNormMLP is Colwise."
    )
    for norm in (fuser.RMSNorm(8), fuser.LayerNorm(8)):
        for style in (Colwise(), Rowwise()):
            wanted = f"The style for {type(norm).__name__} is Replicated."
            assert refused(norm, style).endswith(wanted)
    assert refused(fuser.Bias(8), Rowwise()).endswith("for Bias is Colwise or Replicated.")
    assert refused(modules.Linear(8, 8), Replicated()).endswith("for Linear is Colwise or Rowwise.")
    odd = fuser.Linear(8, 5)
    assert "is 5, and 2 ranks do not divide it" in refused(odd, Colwise())
    assert odd(torch.ones(2, 8)).shape == (2, 5)
    odd = fuser.Linear(5, 8)
    assert "is 5, and 2 ranks do not divide it" in refused(odd, Rowwise())
    assert odd(torch.ones(2, 5)).shape == (2, 8)
    assert "is 7, and 2 ranks" in refused(modules.LayerNormMLP(8, 7), Colwise())
    gated = modules.LayerNormMLP(8, 16, activation="swiglu")
    assert "would not have the gates of its values" in refused(gated, Colwise())
    assert "gathers nothing" in refused(fuser.Bias(8), Colwise(sequence_parallel=True))
    adding = fuser.Linear(8, 8, accumulate_into_main_grad=True)
    assert "accumulate_into_main_grad=True" in refused(adding, Colwise())
    done = parallelize_module(fuser.Linear(8, 8), mesh(), Colwise())
    assert "tensor parallel already" in refused(done, Rowwise())
    plain = gather_quantized(fuser.Sequential(fuser.Linear(64, 64)), MXFP8BlockScaling())
    assert "MasterWeight" in refused(plain[0], Colwise())
    square = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("a", "b"))
    assert "a mesh of 2 dimensions ('a', 'b')" in refused(fuser.Linear(8, 8), Colwise(), square)
    sliced = parallelize_module(fuser.Linear(8, 8), square["a"], Colwise())
    assert sliced(torch.ones(2, 8)).shape == (2, 4)
    alone = parallelize_module(fuser.Linear(8, 8), square["b"], Rowwise())
    assert alone(torch.ones(2, 8)).shape == (2, 8)
    assert "nn.Linear" in said(
        NotImplementedError, lambda: parallelize_module(odd, mesh(), ColwiseParallel())
    )


@case
def a_gate_of_consecutive_outputs_is_refused() -> None:
    for size in (None, 16):
        torch.manual_seed(1)
        whole = fuser.Sequential(
            fuser.Linear(HIDDEN, 2 * WIDTH),
            fuser.SwiGLU(glu_interleave_size=size),
            fuser.Linear(WIDTH, HIDDEN),
        )
        parts = copy.deepcopy(whole)
        plan: dict[str, Any] = {"0": Colwise(), "2": Rowwise()}
        parallelize_module(parts, mesh(), plan)
        if size is not None:
            assert_close(parts(inputs()), whole(inputs()).detach())
            continue
        sentence = said(InputError, lambda m=parts: m(inputs()))
        assert "SwiGLU gets 128 consecutive ones of the 256 outputs" in sentence


# -- DTensors of the user ----------------------------------------------------------------------


@case
def a_weight_that_the_user_distributes_is_used() -> None:
    torch.manual_seed(1)
    whole = fuser.Linear(HIDDEN, WIDTH)
    for mode, dim in (("column", 0), ("row", 1)):
        options = {"tensor_parallel_mode": mode, "tensor_parallel_group": mesh()}
        op: Any = fuser.Linear(HIDDEN, WIDTH, **options)
        weight = distribute_tensor(whole.weight.detach(), mesh(), [Shard(dim)])
        op.weight = torch.nn.Parameter(weight)
        with torch.no_grad():
            op.bias.copy_(own(whole.bias, is_part=mode == "column"))
        x = inputs() if mode == "column" else own(inputs(), dim=1)
        y = op(x)
        expected = whole(inputs()).detach()
        assert_close(y.detach(), own(expected, is_part=mode == "column", dim=1))
        y.sum().backward()
        assert op.weight.grad.placements == (Shard(dim),)


@case
def a_weight_with_other_placements_is_refused() -> None:
    column = {"tensor_parallel_mode": "column", "tensor_parallel_group": mesh()}
    values, x = inputs(rows=WIDTH), inputs()
    whole = torch.nn.Parameter(distribute_tensor(values, mesh(), [Replicate()]))
    rows, columns = (
        torch.nn.Parameter(distribute_tensor(values, mesh(), [Shard(dim)])) for dim in (0, 1)
    )
    op, plain = fuser.BasicLinear(HIDDEN, WIDTH, **column), fuser.BasicLinear(HIDDEN, WIDTH)
    kept = plain.weight
    for module, weight, text in (
        (op, whole, "takes Shard(dim=0), in equal parts, over the ranks [0, 1]"),
        (op, columns, "with the placements (Shard(dim=1),) on the ranks [0, 1]"),
        (plain, rows, "parallelize_module with fuser.distributed.Colwise or Rowwise"),
    ):
        module.weight = weight
        sentence = said(InputError, lambda m=module: m(x))
        assert text in sentence
        assert module._parameters["weight"] is weight
    plain.weight, op.weight = whole, rows
    assert torch.equal(plain(x), x @ values.t())
    assert torch.equal(op(x), x @ own(values).t())
    plain.weight = kept
    assert plain(x).shape == (ROWS, WIDTH)
    alone = [dist.new_group([each]) for each in range(2)][rank()]
    op = fuser.BasicLinear(HIDDEN, WIDTH, **{**column, "tensor_parallel_group": alone})
    op.weight = rows
    assert "not tensor parallel" in said(InputError, lambda: op(x))
    uneven = fuser.BasicLinear(HIDDEN, 5)
    uneven.weight = torch.nn.Parameter(distribute_tensor(values[:5], mesh(), [Shard(0)]))
    assert "not tensor parallel" in said(InputError, lambda: uneven(x))
    adding = fuser.BasicLinear(HIDDEN, WIDTH, accumulate_into_main_grad=True)
    adding.weight = whole
    assert "accumulate_into_main_grad=True" in said(InputError, lambda: adding(x))


@case
def an_input_that_is_a_dtensor_is_refused() -> None:
    x = distribute_tensor(inputs(), mesh(), [Shard(0)])
    for layers in (mlp(), parallel(mlp())):
        assert "Use to_local()" in said(InputTypeError, lambda m=layers: m(x))
        layers(own(inputs()))


# -- the rest of torch -------------------------------------------------------------------------


@case
def steps_with_checkpoints_copies_and_frozen_parameters_are_those_of_one_rank() -> None:
    recipe, x = MXFP8BlockScaling(), own(inputs())
    layers = parallel(mlp())
    expected = step(layers, x.clone().requires_grad_(), recipe)
    grads = [p.grad.full_tensor() for p in layers.parameters()]
    copied = copy.deepcopy(layers)
    copied.zero_grad()
    assert torch.equal(step(copied, x, recipe), expected)
    for p, grad in zip(copied.parameters(), grads, strict=True):
        assert torch.equal(p.grad.full_tensor(), grad)
    step(copied, x, recipe)  # gradients accumulate
    for p, grad in zip(copied.parameters(), grads, strict=True):
        assert torch.equal(p.grad.full_tensor(), 2 * grad)
    for is_reentrant in (False, True):
        copied.zero_grad()
        with fuser.autocast(recipe=recipe):
            y = checkpoint(copied, x.clone().requires_grad_(), use_reentrant=is_reentrant)
        (y.square().sum() / 100).backward()
        assert torch.equal(y.detach(), expected)
        for p, grad in zip(copied.parameters(), grads, strict=True):
            assert torch.equal(p.grad.full_tensor(), grad), is_reentrant
    with torch.no_grad(), fuser.autocast(recipe=recipe):
        assert torch.equal(copied(x), expected)
    with torch.inference_mode(), fuser.autocast(recipe=recipe):
        assert torch.equal(copied(x), expected)
    copied.zero_grad()
    for p in copied[1].parameters():
        p.requires_grad_(False)
    step(copied, x.clone().requires_grad_(), recipe)
    assert all(p.grad is None for p in copied[1].parameters())
    assert torch.equal(copied[3].weight.grad.full_tensor(), grads[3])
    hooked = copy.deepcopy(layers)
    hooked.zero_grad()
    seen = []
    hooked[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    step(hooked, x, recipe)
    assert seen == [(ROWS, WIDTH // 2)]
    for p, grad in zip(hooked.parameters(), grads, strict=True):
        assert_close(p.grad.full_tensor(), grad)


@case
def a_parameter_that_changes_before_its_backward_is_refused() -> None:
    layers, x = parallel(mlp()), own(inputs()).requires_grad_()
    y = layers(x)
    with torch.no_grad():
        layers[1].weight.mul_(2)
    sentence = said(fuser.StateError, lambda: y.sum().backward())
    assert "a parameter of BasicLinear, was changed in place after the forward" in sentence
    layers.zero_grad()
    y = layers(x)
    with torch.no_grad():
        layers[1].bias.mul_(2)  # which no backward reads
    y.sum().backward()


@case
def an_optimizer_in_backward_gets_gradients_from_several_nodes() -> None:
    def train(layers: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in layers.parameters()}

        def update(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return [step(layers, x) for x in xs]

    with mock.patch.object(cuts, "FIRST_BYTES", 1), mock.patch.object(cuts, "BUCKET_BYTES", 1):
        xs = [inputs(seed) for seed in range(3)]
        expected = train(mlp(), xs)
        layers = parallel(mlp())
        call = CutPlan.call
        with mock.patch.object(CutPlan, "call", autospec=True, side_effect=call) as calls:
            found = train(layers, [own(x) for x in xs])
        parts = [len(each.args[0].nodes) for each in calls.call_args_list]
        assert parts == 3 * [len(layers.plan(own(xs[0])).nodes)]
        assert parts[0] > 1
    for one, other in zip(found, expected, strict=True):
        assert_close(one, own(other))


@case
def hooks_of_shards_cut_neither_a_call_nor_its_plan() -> None:
    """``fully_shard`` calls such hooks itself, after it has added the gradients."""
    with mock.patch.object(cuts, "FIRST_BYTES", 1), mock.patch.object(cuts, "BUCKET_BYTES", 1):
        layers = mlp()
        seen: list[Any] = []
        assert layers.plan(inputs()).nodes
        fully_shard(layers, mesh=mesh())
        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(seen.append)
        assert not layers.plan(inputs()).nodes
        with mock.patch.object(CutPlan, "call", autospec=True) as calls:
            layers(inputs()).sum().backward()
        calls.assert_not_called()
        assert len(seen) == len(list(layers.parameters()))


@case
def a_cuda_graph_is_refused() -> None:
    row = parallelize_module(modules.Linear(HIDDEN, WIDTH), mesh(), Rowwise())
    sentence = said(fuser.StateError, lambda: graphs._check_module(0, row, ()))
    assert "does not repeat its communication" in sentence
    norm = parallelize_module(fuser.RMSNorm(HIDDEN), mesh(), Replicated())
    sentence = said(InputError, lambda: graphs._check_module(0, norm, ()))
    assert "holds a DTensor of shape (64,)" in sentence


@case
def a_kept_weight_of_microbatches_is_quantized_once() -> None:
    layers = parallel(mlp())
    op = layers[1].members[0]
    outputs, x = [], own(inputs())
    for is_first in (True, False):
        with fuser.autocast(recipe=MXFP8BlockScaling()):
            outputs.append(layers(x, op_kwargs={op: {"is_first_microbatch": is_first}}))
        kept = next(iter(op._kept_weight.values())).made
        outputs.append(kept)
    assert outputs[1] is outputs[3]
    assert torch.equal(outputs[0], outputs[2])
    with torch.no_grad():
        op.weight.mul_(2)
    with fuser.autocast(recipe=MXFP8BlockScaling()):
        y = layers(x, op_kwargs={op: {"is_first_microbatch": False}})
    assert not torch.equal(y, outputs[0])


@case
def a_model_on_meta_is_sharded_and_then_initialised() -> None:
    for recipe in (None, MXFP8BlockScaling(), DelayedScaling()):
        with torch.device("meta"):
            layers = parallel(mlp(recipe))
        layers.to_empty(device=device_type())
        torch.manual_seed(rank())  # on a CPU torch draws the same numbers on ranks of one seed
        for module in layers.modules():
            if isinstance(module, (fuser.BasicLinear, fuser.Bias, fuser.RMSNorm)):
                module.reset_parameters()
        kind = type(layers[3].weight.to_local())
        assert (kind is torch.Tensor) == (recipe is None), kind
        whole = mlp()
        whole.load_state_dict(
            {name: v for name, v in values_of(layers).items() if "extra" not in name}, strict=False
        )
        limit = 1 / HIDDEN**0.5
        for weight in (whole[1].weight, whole[3].weight):
            assert 0.9 * limit * HIDDEN**0.5 / weight.shape[1] ** 0.5 < float(weight.abs().max())
            assert not torch.equal(*weight.chunk(2, 0))
            assert not torch.equal(*weight.chunk(2, 1))
        limit = 1e-5 if not isinstance(recipe, DelayedScaling) else 0.125
        assert_close(step(layers, own(inputs()), recipe), own(step(whole, inputs(), recipe)), limit)


# -- checkpoints --------------------------------------------------------------------------------


def gathered(layers: Any) -> Any:
    """The model under ``fully_shard``."""
    for layer in (layers[1], layers[3]):
        fully_shard(layer)
    return fully_shard(layers)


@each(name=RECIPES)
def checkpoints_go_between_tensor_parallel_and_fully_sharded_models(name: str) -> None:
    recipe, folder = RECIPES[name](), shared_folder()
    kinds = {"parallel": parallel, "gathered": gathered}
    for source, make in kinds.items():
        layers = make(mlp(recipe))
        if isinstance(recipe, DelayedScaling):
            step(layers, own(inputs()), recipe)
        dcp.save(layers.state_dict(), checkpoint_id=f"{folder}/{source}")
        expected = values_of(layers)
        for target in kinds:
            loaded = kinds[target](mlp(recipe, seed=9))
            if isinstance(recipe, DelayedScaling):
                init_delayed_scaling(loaded, recipe)
            state = loaded.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{source}")
            loaded.load_state_dict(state)
            found = values_of(loaded)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert_close(found[key], value, 1e-6 if source == target else 0.04)
                if name in ("unquantized", "mxfp8") or source == target:
                    assert torch.equal(found[key], value), key
            step(loaded, own(inputs()), recipe)
        if rank() == 0:
            alone = mlp(recipe, seed=9)
            if isinstance(recipe, DelayedScaling):
                init_delayed_scaling(alone, recipe)
            state = alone.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{source}", no_dist=True)
            alone.load_state_dict(state)
            for key, value in values_of(alone).items():
                assert_close(value, expected[key], 0.04)
        dist.barrier()


@each(name=RECIPES)
def a_full_state_dict_of_parts_has_plain_values(name: str) -> None:
    recipe = RECIPES[name]()
    layers, whole = parallel(mlp(recipe)), values_of(mlp(recipe))
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(layers, options=options)
    for key, value in full.items():
        assert type(value) is torch.Tensor
        if value.numel() and "extra" not in key:
            assert_close(value, whole[key], 1e-6 if name != "delayed" else 0.04)
    loaded = parallel(mlp(recipe, seed=9))
    set_model_state_dict(loaded, dict(full), options=options)
    assert_close(values_of(loaded)["3.basic_ops.0.weight"], full["3.basic_ops.0.weight"], 1e-6)
    cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert bool(get_model_state_dict(layers, options=cpu)) == (rank() == 0)


@each(name=RECIPES)
def an_async_checkpoint_has_the_state_from_before_training_goes_on(name: str) -> None:
    recipe, folder = RECIPES[name](), shared_folder()
    workers = dist.new_group(backend="gloo")
    for kind, make in (("parallel", parallel), ("gathered", gathered)):
        layers = make(mlp(recipe))
        step(layers, own(inputs()), recipe)
        expected = values_of(layers)
        saving = dcp.async_save(
            layers.state_dict(), checkpoint_id=f"{folder}/{kind}", process_group=workers
        )
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.add_(1.0)
        step(layers, 10 * own(inputs()), recipe)
        saving.result()
        loaded = make(mlp(recipe, seed=9))
        if isinstance(recipe, DelayedScaling):
            init_delayed_scaling(loaded, recipe)
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        loaded.load_state_dict(state)
        for key, value in values_of(loaded).items():
            assert torch.equal(value, expected[key]), (kind, key)
        assert not torch.equal(values_of(layers)["0.weight"], expected["0.weight"])


@case
def parts_of_process_groups_are_saved_as_dtensors() -> None:
    recipe, folder = MXFP8BlockScaling(), shared_folder()
    whole = mlp()

    def built() -> Any:
        torch.manual_seed(1)
        options = {"tensor_parallel_group": mesh().get_group(), "sequence_parallel": True}
        with fuser.quantized_model_init(recipe=recipe):
            layers = fuser.Sequential(
                fuser.RMSNorm(HIDDEN),
                fuser.Linear(HIDDEN, WIDTH, tensor_parallel_mode="column", **options),
                fuser.GELU(),
                fuser.Linear(WIDTH, HIDDEN, tensor_parallel_mode="row", **options),
            )
        with torch.no_grad():
            layers[1].weight.copy_(own(whole[1].weight))
            layers[1].bias.copy_(own(whole[1].bias))
            layers[3].weight.copy_(own(whole[3].weight, dim=1))
            layers[3].bias.copy_(whole[3].bias)
        return layers

    layers, before = built(), built()
    x = own(inputs())
    expected = step(before, x, recipe)
    distribute_parameters(layers, mesh())
    layers[0].rows_are_sharded = True
    assert torch.equal(step(layers, x, recipe), expected)
    assert torch.equal(layers[3].weight.grad.to_local(), before[3].weight.grad)
    norm = before[0].weight.grad.clone()
    dist.all_reduce(norm)
    assert torch.equal(layers[0].weight.grad.to_local(), norm)
    dcp.save(layers.state_dict(), checkpoint_id=folder)
    other = gathered(mlp(recipe, seed=9))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    assert_close(values_of(other)["3.basic_ops.0.weight"], whole[3].weight.detach(), 0.04)
    assert "which is a DTensor" in said(InputError, lambda: distribute_parameters(layers, mesh()))
    alone = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("a", "b"))["b"]
    sentence = said(InputError, lambda: distribute_parameters(before, alone))
    assert f"a mesh of the ranks [{rank()}]" in sentence
    assert "over the ranks [0, 1]" in sentence
    assert all(type(p) is not type(layers[0].weight) for p in before.parameters())
    marked = modules.LayerNormLinear(
        *(HIDDEN, WIDTH),
        parallel_mode="column",
        tp_group=mesh(),
        sequence_parallel=True,
    )
    marked.weight.requires_grad_(False)
    distribute_parameters(marked, mesh())
    trained = {name for name, parameter in marked.named_parameters() if parameter.requires_grad}
    assert trained == {"layer_norm_weight", "layer_norm_bias", "bias"}
    assert marked.ops[0].rows_are_sharded
    assert marked(x).shape == (ROWS, WIDTH // 2)
    assert "no state" in said(InputError, lambda: init_delayed_scaling(layers, recipe))


@case
def different_experts_of_ranks_are_not_made_one_parameter() -> None:
    """A checkpoint would have those of one rank for all."""
    layers = fuser.Sequential(
        fuser.RMSNorm(HIDDEN),
        fuser.MoeDispatch(4, expert_parallel_group=mesh()),
        fuser.GroupedLinear(2, HIDDEN, WIDTH),
    )
    sentence = said(InputError, lambda: distribute_parameters(layers, mesh()))
    assert "GroupedLinear(2, 64, 128)" in sentence
    assert "a MoeDispatch of 4 experts on the ranks [0, 1]" in sentence
    assert all(type(p) is torch.nn.Parameter for p in layers.parameters())
    alone = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("a", "b"))["b"]
    distribute_parameters(layers, alone)  # no other rank of this mesh has experts
    assert all(type(p) is not torch.nn.Parameter for p in layers.parameters())


@case
def a_checkpoint_of_another_recipe_is_loaded_with_a_warning() -> None:
    for first, second, is_warned in (
        (MXFP8BlockScaling(), Float8CurrentScaling(), True),
        (MXFP8BlockScaling(), NVFP4BlockScaling(), True),
        (Float8CurrentScaling(), DelayedScaling(), False),
        (None, MXFP8BlockScaling(), False),
        (MXFP8BlockScaling(), None, False),
    ):
        folder = shared_folder()
        layers = parallel(mlp(first))
        state = {name: v for name, v in layers.state_dict().items() if "extra" not in name}
        dcp.save(state, checkpoint_id=folder)
        for source in ("dcp", "load_state_dict"):
            loaded = parallel(mlp(second, seed=9))
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                if source == "dcp":
                    own_state = loaded.state_dict()
                    own_state = {n: v for n, v in own_state.items() if "extra" not in n}
                    dcp.load(own_state, checkpoint_id=folder)
                else:
                    loaded.load_state_dict(layers.state_dict(), strict=False)
            texts = [str(w.message) for w in seen if "another recipe" in str(w.message)]
            assert bool(texts) == is_warned, (first, second, source, texts)
            if is_warned:
                assert "MXFP8Tensor" in texts[0]
                assert type(loaded[1].weight.to_local()).__name__ in texts[0]
            assert_close(
                values_of(loaded)["1.basic_ops.0.weight"],
                values_of(layers)["1.basic_ops.0.weight"],
                0.15,
            )


# -- groups ---------------------------------------------------------------------------------------


@case
def two_forwards_reduce_amaxes_over_their_own_groups() -> None:
    """Also in their backwards, which both run after both forwards."""
    pair, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(2)][rank()]
    recipe = DelayedScaling(amax_history_len=4)
    ops = [fuser.BasicLinear(32, 32) for _ in range(2)]
    x = inputs(rows=32, features=32) * (1 + rank())
    outputs = []
    for op, group in zip(ops, (pair, alone), strict=True):
        with fuser.autocast(recipe=recipe, amax_reduction_group=group):
            outputs.append(op(x.clone().requires_grad_()))
    dy = inputs(5, rows=32, features=32) * (1 + rank())
    for y in outputs:
        y.backward(dy)
    largest = {pair: 2.0, alone: 1.0 + rank()}
    for op, group in zip(ops, (pair, alone), strict=True):
        for mode, top, of_one in (("forward", 448, x), ("backward", 57344, dy)):
            amax = float(of_one.abs().max()) / (1 + rank()) * largest[group]
            found = float(op._delayed[mode].scale[0])
            assert abs(found / (top / amax) - 1) < 1e-6, (mode, found, top / amax)


@case
def two_forwards_of_one_op_reduce_over_two_groups_in_turn() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    op, recipe, seen = fuser.BasicLinear(32, 32), DelayedScaling(amax_history_len=4), []
    original = dist.all_reduce

    def watched(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            seen.append(groups.index(group))
        return original(tensor, op, group=group, **more)

    dist.all_reduce = watched  # type: ignore[assignment]
    try:
        outputs = []
        for group in groups:
            with fuser.autocast(recipe=recipe, amax_reduction_group=group):
                outputs.append(op(inputs(rows=32, features=32).requires_grad_()))
        for y in outputs:
            y.sum().backward()
    finally:
        dist.all_reduce = original
    # Forward's states, then backward's; a group adds states in a reduction of its own.
    assert seen == [0, 0, 1, 1, 0, 0, 1, 1], seen


@case
def a_graph_does_not_keep_the_groups_of_its_forward() -> None:
    """Neither the amax group nor the tensor parallel one; the error of backward names it."""
    amaxes, parts = (dist.new_group([0, 1]) for _ in range(2))
    op = fuser.Sequential(
        fuser.BasicLinear(32, 32, tensor_parallel_mode="column", tensor_parallel_group=parts)
    )
    refs = [weakref.ref(amaxes), weakref.ref(parts)]
    with fuser.autocast(recipe=DelayedScaling(), amax_reduction_group=amaxes):
        y = op(inputs(rows=32, features=32).requires_grad_())
    op[0].tensor_parallel_group = None
    for group in (amaxes, parts):
        dist.destroy_process_group(group)
    del amaxes, parts, group
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    sentence = said(fuser.StateError, lambda: y.sum().backward())
    assert "has been destroyed since" in sentence
