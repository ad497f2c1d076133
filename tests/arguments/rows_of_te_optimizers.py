"""Rows of the arguments of FusedAdam, FusedSGD, lists of tensors, and weights of shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from argument_rows import Of, ignores, refuses, sets
from rows_of_te_layers import Given
from torch.testing import assert_close

import fuser
from fuser import recipe
from fuser.te.pytorch import layers, master_weights, optimizers

HERE = "fuser.te.pytorch.optimizers"
ADAM, SGD = f"{HERE}.FusedAdam", f"{HERE}.FusedSGD"
METHODS = (
    *(f"{ADAM}.{name}" for name in ("step", "initialize_state", "zero_grad", "load_state_dict")),
    f"{SGD}.step",
)
STEPS = 3


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    shapes = ((4, 3), (5,))
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def trained(
    optimizer: Any, trained_: list[torch.nn.Parameter], name: str = "grad"
) -> list[torch.Tensor]:
    """The parameters after some steps, with gradients of one seed."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for parameter in trained_:
            gradient = torch.randn(parameter.shape, generator=generator) + 0.3
            setattr(parameter, name, gradient.to(parameter.dtype))
        optimizer.step()
    return [parameter.detach() for parameter in trained_]


def _are_close(values: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value, own in zip(values, expected, strict=True):
        assert_close(value, own, atol=1e-6, rtol=1e-6)


def _row_of_adam(argument: str, value: Any, made: Given | None = None, **options: Any) -> None:
    """The steps are those of torch's optimizer with ``options``."""

    @sets(ADAM, **{argument: value})
    def _steps_of_adam(given: Given) -> None:
        ours, theirs = parameters(), parameters()
        optimizer = optimizers.FusedAdam(ours, **{"lr": 0.1, **(made or {}), **given})
        is_adam = options.get("is_adam", False)
        own = {
            "lr": 0.1,
            "weight_decay": 0.0,
            **{k: v for k, v in options.items() if k != "is_adam"},
        }
        reference = (torch.optim.Adam if is_adam else torch.optim.AdamW)(theirs, **own)
        _are_close(trained(optimizer, ours), trained(reference, theirs))


_row_of_adam("lr", 0.03, lr=0.03)
_row_of_adam("betas", (0.5, 0.7), betas=(0.5, 0.7))
_row_of_adam("eps", 0.3, eps=0.3)
_row_of_adam("weight_decay", 0.2, weight_decay=0.2)
_row_of_adam("adam_w_mode", False, {"weight_decay": 0.2}, weight_decay=0.2, is_adam=True)


@sets(ADAM, params=Of(0, instead=1))
@sets(SGD, params=Of(0, instead=1))
def _parameters_that_are_trained(given: Given) -> None:
    for cls in (optimizers.FusedAdam, optimizers.FusedSGD):
        both = parameters()
        before = [parameter.detach().clone() for parameter in both]
        trained(cls([both[given["params"]]], lr=0.1), both)
        assert not torch.equal(both[0], before[0])
        assert torch.equal(both[1], before[1])


@sets(ADAM, capturable=True)
def _a_count_of_steps_on_the_device(given: Given) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = optimizers.FusedAdam(ours, 0.1, **given)
    _are_close(
        trained(optimizer, ours), trained(torch.optim.AdamW(theirs, 0.1, weight_decay=0.0), theirs)
    )
    assert torch.equal(optimizer.param_groups[0]["step"], torch.tensor(3.0))


@sets(ADAM, master_weights=True)
@sets(SGD, master_weights=True)
def _values_in_fp32_of_parameters_in_16_bits(given: Given) -> None:
    references = {
        optimizers.FusedAdam: (torch.optim.AdamW, {"weight_decay": 0.0}),
        optimizers.FusedSGD: (torch.optim.SGD, {}),
    }
    for cls, (reference, own) in references.items():
        ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
        masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in theirs]
        optimizer, options = cls(ours, lr=0.01, **given), {"lr": 0.01, **own}
        generator = torch.Generator().manual_seed(1)
        theirs_ = reference(masters, **options)
        for _ in range(STEPS):
            for parameter, master in zip(ours, masters, strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
                master.grad = parameter.grad.float()
            optimizer.step()
            theirs_.step()
        for parameter, master in zip(ours, masters, strict=True):
            assert_close(optimizer.state[parameter]["master_param"], master.detach())
            assert torch.equal(parameter, optimizer.state[parameter]["master_param"].bfloat16())


@sets(ADAM, use_decoupled_grad=True)
def _gradients_of_another_name(given: Given) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = optimizers.FusedAdam(ours, 0.1, **given)
    reference = torch.optim.AdamW(theirs, 0.1, weight_decay=0.0)
    _are_close(trained(optimizer, ours, "decoupled_grad"), trained(reference, theirs))
    optimizer.zero_grad()
    assert all(parameter.decoupled_grad is None for parameter in ours)


@sets(
    ADAM,
    bias_correction=False,
    amsgrad=True,
    master_weight_dtype=torch.float16,
    exp_avg_dtype=torch.float16,
    exp_avg_sq_dtype=torch.float16,
    store_param_remainders=True,
)
def _what_the_state_cannot_be(given: Given) -> None:
    refuses(lambda: optimizers.FusedAdam(parameters(), **given), "FusedAdam got", *given)


_UNUSED = "`zero_grad` of both libraries takes `set_to_none`"
ignores(ADAM, _UNUSED, "set_grad_none")
ignores(SGD, _UNUSED, "set_grad_none")
ignores(SGD, "gradients are read as they are", "materialize_master_grads")


@sets(f"{ADAM}.step", closure=True)
@sets(f"{SGD}.step", closure=True)
def _a_closure_computes_the_loss_again(given: Given) -> None:
    for cls in (optimizers.FusedAdam, optimizers.FusedSGD):
        (parameter,) = ours = parameters()[:1]

        def closure(parameter: torch.nn.Parameter = parameter) -> torch.Tensor:
            loss = parameter.square().sum()
            loss.backward()
            return loss

        before = parameter.detach().clone()
        loss = cls(ours, lr=0.1).step(**dict.fromkeys(given, closure))
        assert float(loss.detach()) == float(before.square().sum())
        assert not torch.equal(parameter, before)


@sets(f"{ADAM}.step", grad_scaler=object())
def _gradients_are_read_as_they_are(given: Given) -> None:
    refuses(lambda: optimizers.FusedAdam(parameters()).step(**given), "got a grad_scaler")


@sets(f"{ADAM}.initialize_state", param=Of(0, instead=1))
def _the_state_of_a_parameter(given: Given) -> None:
    ours = parameters()
    optimizer = optimizers.FusedAdam(ours)
    optimizer.initialize_state(ours[given["param"]])
    assert set(optimizer.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}
    assert not any(bool(moment.any()) for moment in optimizer.state[ours[0]].values())
    assert not optimizer.state[ours[1]]


ignores(f"{ADAM}.initialize_state", "the constructor refuses remainders", "store_param_remainders")


@sets(f"{ADAM}.zero_grad", set_to_none=False)
def _gradients_become_zeros(given: Given) -> None:
    ours = parameters()
    optimizer = optimizers.FusedAdam(ours, 0.1)
    trained(optimizer, ours)
    optimizer.zero_grad(**given)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ours)


@sets(f"{ADAM}.load_state_dict", state_dict=Of(0.9, instead=0.5))
def _a_state_goes_on(given: Given) -> None:
    def states(beta: float) -> tuple[list[torch.Tensor], Any]:
        ours = parameters()
        optimizer = torch.optim.AdamW(ours, 0.1, betas=(beta, 0.999), weight_decay=0.0)
        return trained(optimizer, ours), optimizer

    (values, reference), (_, given_) = states(0.9), states(given["state_dict"])
    ours = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = optimizers.FusedAdam(ours)
    optimizer.load_state_dict(given_.state_dict())
    theirs = reference.param_groups[0]["params"]
    _are_close(trained(optimizer, ours), trained(reference, theirs))


def _row_of_sgd(argument: str, value: Any, made: Given | None = None, **options: Any) -> None:
    @sets(SGD, **{argument: value})
    def _steps_of_sgd(given: Given) -> None:
        ours, theirs = parameters(), parameters()
        optimizer = optimizers.FusedSGD(ours, **{"lr": 0.1, **(made or {}), **given})
        reference = torch.optim.SGD(theirs, **{"lr": 0.1, **options})
        _are_close(trained(optimizer, ours), trained(reference, theirs))


_row_of_sgd("lr", Of(0.03, instead=0.1), lr=0.03)
_row_of_sgd("momentum", 0.8, momentum=0.8)
_row_of_sgd("dampening", 0.5, {"momentum": 0.8}, momentum=0.8, dampening=0.5)
_row_of_sgd("weight_decay", 0.2, weight_decay=0.2)
_row_of_sgd("nesterov", True, {"momentum": 0.8}, momentum=0.8, nesterov=True)


@sets(SGD, wd_after_momentum=True)
def _weight_decay_is_before_momentum(given: Given) -> None:
    refuses(lambda: optimizers.FusedSGD(parameters(), 0.1, **given), "wd_after_momentum=True")


# -- lists of tensors ------------------------------------------------------------------

_LIST = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
_OTHER_LIST = [torch.tensor([1.0]), torch.tensor([1.0])]
_L2NORM, _SCALE = f"{HERE}.multi_tensor_l2norm", f"{HERE}.multi_tensor_scale"


@sets(_L2NORM, tensor_lists=Of([_LIST], instead=[_OTHER_LIST]), per_tensor=True)
def _norms_of_a_list(given: Given) -> None:
    call: Given = {"chunk_size": 0, "noop_flag": torch.zeros(1), "tensor_lists": [_LIST], **given}
    norm, each = optimizers.multi_tensor_l2norm(**call)
    assert norm.tolist() == [13.0]
    if given.keys() != {"tensor_lists"}:
        assert each is not None
        assert each.tolist() == [5.0, 12.0]


@sets(_SCALE, scale=Of(2.0, instead=3.0), noop_flag=Of(True, instead=False))
def _a_list_is_written_scaled(given: Given) -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    unread = torch.zeros(1, dtype=torch.int32)
    targets = [torch.zeros(2), torch.zeros(1)]
    sources = [torch.tensor([1.0, float("inf")]), torch.tensor([2.0])]
    chosen = flag if given.get("noop_flag", True) else unread
    optimizers.multi_tensor_scale(0, chosen, [sources, targets], given.get("scale", 2.0))
    assert [target.tolist() for target in targets] == [[2.0, float("inf")], [4.0]]
    assert flag.tolist() == [1]


@sets(_SCALE, tensor_lists=Of(_LIST, instead=_OTHER_LIST))
def _the_list_that_is_read(given: Given) -> None:
    targets = [torch.zeros_like(value) for value in given["tensor_lists"]]
    flag = torch.zeros(1, dtype=torch.int32)
    optimizers.multi_tensor_scale(0, flag, [given["tensor_lists"], targets], 2.0)
    assert [target.tolist() for target in targets] == [[6.0, 8.0], [24.0]]
    assert flag.tolist() == [0]


@sets(
    f"{HERE}.multi_tensor_applier",
    op=Of(optimizers.multi_tensor_l2norm, instead=lambda *given: given),
    noop_flag=Of("the flag", instead="another"),
    tensor_lists=Of([_LIST], instead=[_OTHER_LIST]),
)
def _a_function_of_lists(given: Given) -> None:
    flags = []

    def op(chunk: int, flag: Any, lists: Any, *rest: Any) -> Any:
        flags.append(flag)
        return given.get("op", optimizers.multi_tensor_l2norm)(chunk, flag, lists, *rest)

    call = {"noop_flag": "the flag", "tensor_lists": [_LIST], **given}
    lists: Any = call["tensor_lists"]
    norm, each = optimizers.multi_tensor_applier(op, call["noop_flag"], lists, True)
    assert flags == ["the flag"]
    assert norm.tolist() == [13.0]
    assert each.tolist() == [5.0, 12.0]


_ALL_AT_ONCE = "a list is computed at once"
ignores(_L2NORM, _ALL_AT_ONCE, "chunk_size")
ignores(_SCALE, _ALL_AT_ONCE, "chunk_size")
ignores(_L2NORM, "norms are not skipped", "noop_flag")


# -- weights of shards -----------------------------------------------------------------

_MODULE = "fuser.te.pytorch.master_weights"
_CAST = f"{_MODULE}.cast_master_weights_to_fp8"


def weight(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with fuser.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        return layers.Linear(32, 16, bias=False).weight


_VALUES = torch.randn(512, generator=torch.Generator().manual_seed(1))


def cast(given: Given, of_ranks: torch.Tensor | None = None) -> list[Any]:
    """Two weights, of which the first gets half of the new values, or what ``given`` says.

    ``of_ranks`` is the amax that a reduction over a group of two ranks has.
    """
    weights = [weight(), weight(1)]

    def reduce(amaxes: torch.Tensor, op: Any, group: Any) -> None:
        assert group == "both ranks"
        assert op is dist.ReduceOp.MAX
        assert of_ranks is not None
        amaxes.copy_(of_ranks[None])

    call = {"master_weights": _VALUES[:256], "start_offsets": 0, "group": None, **given}
    group, others = call["group"], {"fsdp_shard_model_weights"} & call.keys()
    ranks = {"both ranks": 2}
    with (
        mock.patch.object(
            master_weights, "dist", SimpleNamespace(all_reduce=reduce, ReduceOp=dist.ReduceOp)
        ),
        mock.patch.object(
            master_weights, "get_distributed_world_size", lambda group: ranks.get(group, 1)
        ),
    ):
        master_weights.cast_master_weights_to_fp8(
            [weights[call.get("model_weights", 0)]],
            [call["master_weights"]],
            [call["start_offsets"]],
            group,
            **{name: [call[name]] for name in others},
        )
    return weights


def quantized(amax: torch.Tensor) -> Any:
    """The first half of the new values with a scale of this amax."""
    return weight()._quantizer.with_amaxes(amax[None])(_VALUES[None, :256])


_AMAX = _VALUES[:256].abs().amax()


@sets(
    _CAST,
    model_weights=Of(0, instead=1),
    master_weights=Of(_VALUES[:256], instead=2 * _VALUES[:256]),
    start_offsets=Of(0, instead=256),
)
def _a_shard_of_new_values(given: Given) -> None:
    written, expected = cast(given)[0], quantized(_AMAX)
    assert torch.equal(written._data.view(-1)[:256], expected._data.view(-1))
    assert torch.equal(written._data[8:], weight()._data[8:])
    assert torch.equal(written._scale_inv, expected._scale_inv)


@sets(_CAST, group=Of("both ranks", instead=None))
def _the_scale_of_all_ranks(given: Given) -> None:
    written, expected = cast(given, of_ranks=3 * _AMAX)[0], quantized(3 * _AMAX)
    assert torch.equal(written._data.view(-1)[:256], expected._data.view(-1))
    assert torch.equal(written._scale_inv, expected._scale_inv)


@sets(_CAST, fsdp_shard_model_weights=True)
def _bytes_that_are_written_elsewhere(given: Given) -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    written, expected = cast(dict.fromkeys(given, buffer))[0], quantized(_AMAX)
    assert torch.equal(buffer, expected._data.view(-1))
    assert torch.equal(written._data, weight()._data)
    assert torch.equal(written._scale_inv, expected._scale_inv)


ignores(
    _CAST, "transposed copies are made where they are read", "manual_post_all_gather_processing"
)


@sets(f"{_MODULE}.post_all_gather_processing", model_weights=Of(0, instead=1))
def _bytes_that_a_collective_has_written(given: Given) -> None:
    weights = [weight(), weight(1)]
    for each in weights:
        assert each._has("columnwise")
        each._data.fill_(56)  # 1.0 in E4M3
    master_weights.post_all_gather_processing([weights[given["model_weights"]]])
    values = weights[0].dequantize()
    ones = torch.full_like(values, float(weights[0]._scale_inv))
    assert torch.equal(values, ones)
    columns = weights[0]._columnwise_data
    assert columns is None or bool((columns == 56).all())


@sets(
    f"{_MODULE}.replace_raw_data",
    tensor=Of(0, instead=1),
    new_raw_data=Of(512, instead=511),
)
def _bytes_in_another_buffer(given: Given) -> None:
    weights = [weight(), weight(1)]
    values = weights[0].dequantize()
    buffer = torch.zeros(given.get("new_raw_data", 512), dtype=torch.uint8)
    master_weights.replace_raw_data(weights[given.get("tensor", 0)], buffer)
    assert weights[0]._data.data_ptr() == buffer.data_ptr()
    assert torch.equal(weights[0].dequantize(), values)
