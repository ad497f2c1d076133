"""MoeDispatch and MoeCombine: the pipeline form of fuser.moe.permute and unpermute, on a CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from needs import needs_emulator
from one_launch_experts import in_one_launch
from pipeline_kernels import on_kernels
from said import holds, said

import fuser
from fuser import recipe as recipes
from fuser.basic_ops import moe
from fuser.communication import PlannedGroup
from fuser.errors import InputError, InputTypeError, StateError
from fuser.moe import permute, unpermute
from fuser.recipe import BACKWARD_OVERRIDES
from fuser.runtime import recorded
from fuser.specs import TensorSpec

EXPERTS, CHOICES, HIDDEN, WIDTH, TOKENS = 4, 2, 32, 48, 30
FP32, BF16 = torch.float32, torch.bfloat16
CHANNELS = ("split_sizes", "probs", "rows")


def experts(dtype: torch.dtype = FP32) -> list[Any]:
    """The ops of a grouped MLP, with the same parameters at every call."""
    sizes = ((HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN))
    options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": "cpu"}
    up, down = (
        oracles.randomize(
            fuser.GroupedLinear(EXPERTS, *size, single_grouped_weight=True, **options)
        )
        for size in sizes
    )
    return [up, fuser.ScaledSwiGLU(), down]


def layer(
    dtype: torch.dtype = FP32, *, returns: bool = False, pieces: bool = False, **options: Any
) -> fuser.Sequential:
    """A layer of experts; ``pieces``: with a module between the ops."""
    dispatch = fuser.MoeDispatch(EXPERTS, **options)
    for index, channel in enumerate(CHANNELS):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=returns)
    up, act, down = experts(dtype)
    ops = [
        dispatch,
        up.set_extra_input_channel(0, "split_sizes"),
        act.set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "split_sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    ]
    if pieces:
        ops = [part for op in ops for part in (torch.nn.Identity(), op)]
    return fuser.Sequential(*ops)


def routing(dropped: float = 0.2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert indices, of which some are -1, and probabilities."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :CHOICES]
    is_dropped = torch.rand(order.shape, generator=generator) < dropped
    probs = torch.rand(TOKENS, CHOICES, generator=generator) + 0.1
    return order.masked_fill(is_dropped, -1), probs


def tokens(dtype: torch.dtype = FP32, seed: int = 1) -> torch.Tensor:
    return oracles.random_tensor((TOKENS, HIDDEN), dtype, seed)


def by_functions(
    mlp: Any, x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, **options: Any
) -> torch.Tensor:
    """The same layer by the functions around a pipeline."""
    rows = permute(x, indices, probs, num_experts=EXPERTS, **options)
    return unpermute(mlp(rows.x, rows.split_sizes, rows.probs, rows.split_sizes), rows)


def step(function: Any, x: torch.Tensor, probs: torch.Tensor, parameters: Any) -> list[Any]:
    """Output and all gradients of ``function(x, probs)``."""
    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    y = function(*leaves)
    dy = oracles.random_tensor(tuple(y.shape), y.dtype, 7)
    return [y, *torch.autograd.grad(y, [*leaves, *parameters], dy)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


OPTIONS = {
    "as many rows as needed": {},
    "unused rows": {"capacity": 75},
    "position": {"capacity": 31},
    "probs": {"capacity": 31, "drop_policy": "probs"},
    "no rows": {"capacity": 0},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@EVERY_OPTION
@pytest.mark.parametrize("pieces", [False, True], ids=["one pipeline", "in pieces"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_layer_has_the_bits_of_permute_and_unpermute(
    dtype: torch.dtype, pieces: bool, options: dict[str, Any]
) -> None:
    model, mlp = layer(dtype, pieces=pieces, **options), fuser.Sequential(*experts(dtype))
    indices, probs = routing()
    found = step(lambda x, p: model(x, indices, p), tokens(dtype), probs, model.parameters())
    expected = step(
        lambda x, p: by_functions(mlp, x, indices, p, **options),
        *(tokens(dtype), probs, mlp.parameters()),
    )
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("override", [None, *BACKWARD_OVERRIDES], ids=str)
@pytest.mark.parametrize("name", formats.RECIPES)
def test_a_layer_under_a_recipe_has_the_bits_of_permute_and_unpermute(
    name: str, override: str | None
) -> None:
    if override is not None and not formats.RECIPES[name].accepts_backward_override:
        pytest.skip("this recipe has no override.")
    options = {} if override is None else {"backward_override": override}
    recipe = formats.deterministic(formats.RECIPES[name], **options)
    model, mlp = layer(BF16, capacity=70), fuser.Sequential(*experts(BF16))
    indices, probs = routing()
    with fuser.autocast(recipe=recipe):
        found = step(lambda x, p: model(x, indices, p), tokens(BF16), probs, model.parameters())
    with fuser.autocast(recipe=recipe):
        expected = step(
            lambda x, p: by_functions(mlp, x, indices, p, capacity=70),
            *(tokens(BF16), probs, mlp.parameters()),
        )
    assert_same(found, expected)


def test_rows_are_copied_in_the_dtype_of_autocast() -> None:
    model, mlp = layer(), fuser.Sequential(*experts())
    indices, probs = routing()
    with torch.autocast("cpu", BF16):
        found = step(lambda x, p: model(x, indices, p), tokens(), probs, model.parameters())
        expected = step(
            lambda x, p: by_functions(mlp, x.to(BF16), indices, p),
            *(tokens(), probs, mlp.parameters()),
        )
        rows = fuser.MoeDispatch(EXPERTS)(tokens(), indices, probs)[0]
    assert rows.dtype is BF16
    assert_same(found, expected)


@EVERY_OPTION
def test_a_layer_equals_a_loop_over_tokens(options: dict[str, Any]) -> None:
    model = layer(returns=True, **options)
    indices, probs = routing()
    x = tokens()
    leaves = [x.double().requires_grad_(), probs.double().requires_grad_()]
    *_, places = model(x, indices, probs)
    up, down = (model[i].weight.detach().double() for i in (1, 3))
    out = []
    for t in range(TOKENS):
        total = torch.zeros(HIDDEN).double()
        for j in range(CHOICES):
            if places[t, j] < 0:
                continue
            a, b = (up[indices[t, j]] @ leaves[0][t]).chunk(2)
            hidden = torch.nn.functional.silu(a) * b * leaves[1][t, j]
            total = total + down[indices[t, j]] @ hidden
        out.append(total)
    expected = torch.stack(out)
    found = step(lambda x, p: model(x, indices, p)[0], x, probs, ())
    dy = oracles.random_tensor((TOKENS, HIDDEN), FP32, 7).double()
    wanted = [expected]
    if expected.requires_grad:
        wanted += torch.autograd.grad(expected, leaves, dy)
    else:
        wanted += map(torch.zeros_like, leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_the_plan_has_the_kernels_of_both_ops_and_no_unwanted_gradient() -> None:
    model = layer()
    indices, probs = routing()
    plan = model.plan(tokens().requires_grad_(), indices, probs.clone().requires_grad_())
    assert plan.forward[0].kernel == "sort by expert, permute probs, permute"
    assert plan.forward[-1].kernel == "unpermute"
    assert plan.backward[0].kernel == "permute"
    assert plan.backward[-1].kernel == "unpermute, unpermute probs"
    only = model.plan(tokens(), indices, probs.clone().requires_grad_())
    assert only.backward[-1].kernel == "unpermute probs"
    frozen = model.plan(tokens(), indices, probs)
    assert not any("unpermute" in step.kernel for step in frozen.backward)


def test_a_frozen_input_leaves_the_probabilities_their_gradient() -> None:
    model, indices = layer(), routing()[0]
    probs, x = routing()[1].requires_grad_(), tokens().requires_grad_()
    model(x, indices, probs).sum().backward()
    expected = probs.grad.clone()
    probs.grad = None
    model(tokens(), indices, probs).sum().backward()
    assert torch.equal(probs.grad, expected)
    model(x.detach(), indices, probs.detach()).sum().backward()
    with torch.no_grad():
        assert not model(x, indices, probs).requires_grad


def test_what_the_caller_gets_back_has_a_gradient_if_it_is_floating() -> None:
    model = layer(returns=True, capacity=70)
    indices, probs = routing()
    x, probs = tokens().requires_grad_(), probs.requires_grad_()
    rows = permute(x, indices, probs, num_experts=EXPERTS, capacity=70)
    _, sizes, row_probs, places = model(x, indices, probs)
    assert (sizes.requires_grad, row_probs.requires_grad, places.requires_grad) == (0, 1, 0)
    assert torch.equal(sizes, rows.split_sizes)
    assert torch.equal(row_probs, rows.probs)
    assert torch.equal(places, rows.inverse_map)
    weights = oracles.random_tensor((70,), FP32, 3)
    found = torch.autograd.grad((row_probs * weights).sum(), probs)
    assert torch.equal(found[0], torch.autograd.grad((rows.probs * weights).sum(), probs)[0])
    row_probs.mul_(2)  # no view of anything


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_in_unused_rows_reaches_a_result_or_a_gradient(poison: float) -> None:
    indices, probs = routing()
    used = int((indices >= 0).sum())
    places = permute(tokens(), indices, num_experts=EXPERTS, capacity=70).inverse_map
    y = oracles.random_tensor((70, HIDDEN), FP32, 2)
    dirty = y.clone()
    dirty[used:] = poison
    dirty.requires_grad_()
    combine, dispatch = fuser.MoeCombine(), fuser.MoeDispatch(EXPERTS, capacity=70)
    out = combine(dirty, places)
    assert torch.equal(out, combine(y, places))
    dout = oracles.random_tensor((TOKENS, HIDDEN), FP32, 3)
    out.backward(dout)
    assert torch.equal(dirty.grad, permute(dout, indices, num_experts=EXPERTS, capacity=70).x)
    x, probs = tokens().requires_grad_(), probs.requires_grad_()
    rows, _, row_probs, _ = dispatch(x, indices, probs)
    dy, dp = dirty.detach(), dirty.detach()[:, 0]
    found = torch.autograd.grad((rows, row_probs), (x, probs), (dy, dp), retain_graph=True)
    wanted = torch.autograd.grad((rows, row_probs), (x, probs), (y, y[:, 0]))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_has_the_same_bits(use_reentrant: bool) -> None:
    model = layer(BF16)
    indices, probs = routing()
    checkpointed = lambda x, p: fuser.checkpoint(  # noqa: E731
        model, x, indices, p, use_reentrant=use_reentrant
    )
    results = []
    for function in (lambda x, p: model(x, indices, p), checkpointed):
        model.zero_grad()
        x, p = tokens(BF16).requires_grad_(), probs.clone().requires_grad_()
        y = function(x, p)
        y.sum().backward()
        results.append([y.detach(), x.grad, p.grad, *(w.grad.clone() for w in model.parameters())])
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_quantize_ops_may_be_next_to_both() -> None:
    """An input, or a gradient, that arrives quantized is dequantized before rows are moved."""
    indices, probs = routing()
    both = fuser.Quantize(forward=True, backward=True)
    dispatch, combine = fuser.MoeDispatch(EXPERTS), fuser.MoeCombine()
    for index, channel in enumerate(CHANNELS):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    combine.set_extra_input_channel(0, "rows")
    model = fuser.Sequential(both, dispatch, both, combine, both)
    x = tokens(BF16).requires_grad_()
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        y = model(x, indices, probs)
    y = y.dequantize() if isinstance(y, fuser.QuantizedTensor) else y
    counts = (indices >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(y, x * counts, rtol=0.2, atol=0.2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, counts.to(BF16).expand_as(x), rtol=0.2, atol=0.2)


def test_tokens_may_have_more_dimensions_any_strides_and_there_may_be_none() -> None:
    model = layer()
    indices, probs = routing()
    wide = oracles.random_tensor((5, 6, 2 * HIDDEN), FP32, 1)
    expected = model(wide[..., ::2].reshape(TOKENS, HIDDEN), indices, probs)
    x = wide[..., ::2].requires_grad_()
    y = model(x, indices.t().contiguous().t().int(), probs.t().contiguous().t())
    assert torch.equal(y, expected)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape
    none = model(tokens()[:0].requires_grad_(), indices[:0], probs[:0].requires_grad_())
    assert none.shape == (0, HIDDEN)
    none.sum().backward()


@needs_emulator
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_kernels_every_call_follows_its_own_routing(dtype: torch.dtype) -> None:
    model, mlp = layer(dtype, capacity=64), fuser.Sequential(*experts(dtype))
    for seed in range(5):
        indices, probs = routing(seed=seed)
        results = []
        for kernels in (on_kernels(), contextlib.nullcontext()):
            with kernels:
                results.append(
                    step(
                        lambda x, p, i=indices: model(x, i, p),
                        *(tokens(dtype, seed), probs, model.parameters()),
                    )
                )
        wanted = step(
            lambda x, p, i=indices: by_functions(mlp, x, i, p, capacity=64),
            *(tokens(dtype, seed), probs, mlp.parameters()),
        )
        bound = 1e-3 if dtype is FP32 else 0.05
        for a, b, c in zip(*results, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)
            torch.testing.assert_close(a, c, rtol=bound, atol=bound)


@needs_emulator
@pytest.mark.parametrize("options", [{}, *list(OPTIONS.values())[1:4]], ids=str)
def test_recorded_passes_follow_the_routing_of_each_call(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where no index is read: a recording is repeated for other indices."""
    monkeypatch.setattr(moe, "check_values", lambda *args: None)
    monkeypatch.setattr(moe, "_check_rows", lambda *args: None)
    dispatch, combine = fuser.MoeDispatch(EXPERTS, **options), fuser.MoeCombine()
    for index, channel in enumerate(CHANNELS):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    model = fuser.Sequential(
        dispatch,
        fuser.ScaledSReLU().set_extra_input_channel(0, "probs"),
        combine.set_extra_input_channel(0, "rows"),
    )
    played: list[int] = []
    play = recorded._played

    def counted(*args: Any) -> Any:
        played.append(1)
        return play(*args)

    monkeypatch.setattr(recorded, "_played", counted)

    def plainly(x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows = permute(x, indices, probs, num_experts=EXPERTS, **options)
        return unpermute(rows.x.relu().square() * rows.probs[:, None].to(BF16), rows)

    def steps(function: Any) -> list[list[Any]]:
        given = [(tokens(BF16, seed), *routing(seed=seed)) for seed in range(5)]
        return [
            step(lambda x, p, i=indices: function(x, i, p), x, probs, ())
            for x, indices, probs in given
        ]

    with on_kernels():
        found = steps(model)
    for some, others in zip(found, steps(plainly), strict=True):
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.2)
    assert len(played) == 6  # forwards and backwards of the last three steps


@needs_emulator
@pytest.mark.parametrize("options", [{}, OPTIONS["unused rows"]], ids=str)
def test_a_whole_layer_is_recorded_where_no_size_is_read(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Hopper GPU in bf16."""
    in_one_launch(monkeypatch)
    monkeypatch.setattr(moe, "check_values", lambda *args: None)
    monkeypatch.setattr(moe, "_check_rows", lambda *args: None)
    model, mlp = layer(BF16, **options), fuser.Sequential(*experts(BF16))
    played: list[int] = []
    play = recorded._played

    def counted(*args: Any) -> Any:
        played.append(1)
        return play(*args)

    monkeypatch.setattr(recorded, "_played", counted)
    given = [(tokens(BF16, seed), *routing(seed=seed)) for seed in range(5)]
    with on_kernels():
        found = [
            step(lambda x, p, i=i: model(x, i, p), x, p, model.parameters()) for x, i, p in given
        ]
    assert len(played) == 6  # forwards and backwards of the last three steps
    wanted = [
        step(lambda x, p, i=i: by_functions(mlp, x, i, p, **options), x, p, mlp.parameters())
        for x, i, p in given
    ]
    for some, others in zip(found, wanted, strict=True):
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.3)


@EVERY_OPTION
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_both_ops_tell_the_plan_the_shapes_and_dtypes_that_they_give(
    choices: int, options: dict[str, Any]
) -> None:
    indices = torch.arange(TOKENS * choices).view(TOKENS, choices) % EXPERTS
    given = tokens(BF16), indices, torch.ones(TOKENS, choices)
    dispatch, combine = fuser.MoeDispatch(EXPERTS, **options), fuser.MoeCombine()
    rows, *others = dispatch(*given)
    x, *extras = map(spec_of, given)
    of_rows, of_others = (
        dispatch.output_spec(x, extras, None),
        dispatch.extra_output_specs(x, extras),
    )
    assert [of_rows, *of_others] == list(map(spec_of, (rows, *others)))
    assert combine.output_spec(of_rows, of_others[2:], None) == spec_of(combine(rows, others[2]))


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


# -- bad input --------------------------------------------------------------------


def bad_dispatches() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    indices, probs = routing()
    beyond = indices.clone()
    beyond[3, 1] = EXPERTS
    return {
        "floating indices": (
            {"indices": indices.float()},
            said("routing-indices-int32-int64", None, holds("torch.float32")),
        ),
        "indices of another batch": (
            {"indices": indices[1:]},
            said("routing-indices-k-because", None, 30, 30, holds((29, 2))),
        ),
        "flat indices": (
            {"indices": indices.view(-1)},
            said("routing-indices-k-because", None, 30, None, holds((60,))),
        ),
        "probs of another shape": (
            {"probs": probs[:, :1]},
            said("routing-probs-shape-each", None, (30, 2), holds((30, 1))),
        ),
        "integer probs": (
            {"probs": probs.int()},
            said("routing-float64-float32-float16", None, "probs", holds("torch.int32")),
        ),
        "an expert too many": (
            {"indices": beyond},
            said("routing-token-choice-0", "MoeDispatch", 4, 3, 1, 3),
        ),
    }


@pytest.mark.parametrize("name", bad_dispatches())
def test_a_bad_dispatch_gets_a_sentence_and_the_next_call_works(name: str) -> None:
    change, sentence = bad_dispatches()[name]
    indices, probs = routing()
    given = {"indices": indices, "probs": probs, **change}
    for _ in range(2):
        model = layer()
        for _ in range(2):
            with pytest.raises(InputError, match=sentence):
                model(tokens(), given["indices"], given["probs"])
        assert model(tokens(), indices, probs).shape == (TOKENS, HIDDEN)
        with pytest.raises(InputError, match=sentence):
            model(tokens(), given["indices"], given["probs"])


def test_a_combine_refuses_what_are_not_rows_of_its_input() -> None:
    indices, _ = routing(dropped=0)
    places = permute(tokens(), indices, num_experts=EXPERTS).inverse_map
    rows = oracles.random_tensor((60, HIDDEN), FP32, 2)
    op = fuser.MoeCombine()
    for x, extra, sentence in (
        (rows[:40], places, said("moe-row-input-rows", None, 40)),
        (rows[:59], places, said("moe-row-input-rows", 59, 59)),
        (rows, places - 2, said("moe-row-input-rows", -2, 60)),
        (rows, indices.int(), said("moe-row-times-assignment")),
        (rows, indices, said("moe-takes-each-token", "torch.int64")),
        (rows, places.view(-1), said("moe-takes-each-token", "torch.int32", (60,))),
        (rows.view(2, 30, -1), places, said("moe-takes-shape-hidden", (2, 30, 32))),
    ):
        with pytest.raises(InputError, match=sentence):
            op(x, extra)
        assert op(rows, places).shape == (TOKENS, HIDDEN)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"num_experts": 0},
            InputError,
            said("routing-it-is-to", "MoeDispatch", "num_experts", 0, 1),
        ),
        ({"num_experts": 4.0}, InputTypeError, said("routing-takes-int", None, "num_experts", 4.0)),
        ({"capacity": -1}, InputError, said("routing-it-is-to", None, "capacity", -1, 0)),
        ({"drop_policy": "last"}, InputError, said("routing-drop-policy-position", None, "'last'")),
    ],
)
def test_a_dispatch_is_made_with_numbers_that_fit(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fuser.MoeDispatch(**{"num_experts": 4, **options})


@pytest.mark.parametrize("op", [lambda **o: fuser.MoeDispatch(4, **o), fuser.MoeCombine])
def test_a_group_needs_process_groups(op: Any) -> None:
    """With ranks: test_expert_parallel.py."""
    assert op(expert_parallel_group=None).expert_parallel_size == 1
    with pytest.raises(
        StateError, match=said("groups-communicates-torch-distributed", holds("Moe"))
    ):
        op(expert_parallel_group=torch.distributed.ProcessGroup(0, 2))  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_group_of_experts_that_is_set_later_is_the_one_of_the_op(kind: str) -> None:
    first, second = PlannedGroup(2), PlannedGroup(2)
    options: Any = {"expert_parallel_group": first}
    op: Any = fuser.MoeCombine(**options)
    if kind == "dispatch":
        op = fuser.MoeDispatch(EXPERTS, **options)
    op.expert_parallel_group = second
    assert op.expert_parallel_group is second
    (group,) = op.process_groups
    assert group is second
    for other in (PlannedGroup(4), None):
        with pytest.raises(InputError, match=said("expert-parallel-made-make-op", None, 2)):
            op.expert_parallel_group = other
    assert op.expert_parallel_group is second
