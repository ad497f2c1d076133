"""Quantizers as scripts of te.ops use them: changed by set_usage, while pipelines keep values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from said import said

import fuser
from fuser import DType, tensors
from fuser import recipe as recipes
from fuser.tensors import QuantizedTensor

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
QUANTIZERS = {
    "delayed": lambda: fuser.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), E4M3),
    "current": lambda: fuser.Float8CurrentScalingQuantizer(E4M3, torch.device("cpu")),
    "mxfp8": lambda: fuser.MXFP8Quantizer(E4M3),
    "block": lambda: fuser.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "nvfp4": lambda: fuser.NVFP4Quantizer(),
}
every_quantizer = pytest.mark.parametrize("make", QUANTIZERS.values(), ids=QUANTIZERS)
VALUES = {
    "delayed": tensors.Float8Quantizer,
    "current": tensors.Float8CurrentScalingQuantizer,
    "mxfp8": tensors.MXFP8Quantizer,
    "block": tensors.Float8BlockQuantizer,
    "nvfp4": tensors.NVFP4Quantizer,
}


def values(rows: int = 32, seed: int = 1) -> torch.Tensor:
    return oracles.random_tensor((rows, 64), torch.float32, seed)


def usages(tensor: QuantizedTensor) -> tuple[bool, bool]:
    return tensor._has("rowwise"), tensor._has("columnwise")


# -- a script's own -----------------------------------------------------------------


@every_quantizer
def test_set_usage_changes_which_copies_the_next_call_makes(make: Any) -> None:
    quantizer = make()
    both = quantizer(values())
    assert usages(both) == (True, True)
    quantizer.set_usage(columnwise=False)
    assert usages(quantizer(values())) == (True, False)
    quantizer.set_usage(rowwise=False, columnwise=True)
    assert usages(quantizer(values())) == (False, True)
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (False, True)
    assert quantizer.get_usages() == {"rowwise": False, "columnwise": True}
    quantizer.rowwise_usage = True
    assert usages(quantizer(values())) == (True, True)
    assert usages(both) == (True, True)


@every_quantizer
def test_a_change_reaches_no_tensor_that_was_made_before(make: Any) -> None:
    quantizer = make()
    made = quantizer(values())
    before, key = made._quantizer, hash(made._quantizer)
    quantizer.set_usage(rowwise=False)
    assert made._quantizer is before
    assert hash(made._quantizer) == key
    assert type(before) in VALUES.values()


@pytest.mark.parametrize(("name", "make"), QUANTIZERS.items(), ids=QUANTIZERS)
def test_it_is_equal_to_the_value_of_its_contents(name: str, make: Any) -> None:
    quantizer = make()
    value = quantizer.value()
    assert type(value) is VALUES[name]
    assert quantizer == value
    assert value == quantizer
    assert hash(quantizer) == hash(value)
    assert isinstance(value, type(quantizer))
    assert isinstance(quantizer, VALUES[name])
    others = [cls for cls in VALUES.values() if cls is not VALUES[name]]
    assert not any(isinstance(quantizer, cls) for cls in others)
    quantizer.set_usage(columnwise=False)
    assert quantizer != value
    assert quantizer == value.with_usage(rowwise=True, columnwise=False)


@every_quantizer
def test_copies_change_apart(make: Any) -> None:
    quantizer = make()
    quantizer.internal = True
    for one in (quantizer.copy(), copy.copy(quantizer)):
        assert type(one) is type(quantizer)
        assert one == quantizer
        assert one.internal
        one.set_usage(columnwise=False)
        assert quantizer.columnwise_usage
    loaded = pickle.loads(pickle.dumps(quantizer))
    assert type(loaded) is type(quantizer)
    assert loaded.get_usages() == quantizer.get_usages()


def test_any_field_may_be_set_and_takes_effect() -> None:
    quantizer: Any = fuser.Float8CurrentScalingQuantizer(E4M3)
    x = values() * 1e-3
    scale = quantizer(x)._scale_inv.clone()
    quantizer.amax_epsilon = 4.0
    assert quantizer(x)._scale_inv > 10 * scale
    assert quantizer(x)._scale_inv.item() == pytest.approx(4 / 448)
    quantizer.fp8_dtype = E5M2
    assert quantizer(x)._fp8_dtype is E5M2
    assert quantizer.dtype is E5M2


@every_quantizer
def test_update_quantized_writes_into_a_tensor_and_returns_it(make: Any) -> None:
    quantizer = make()
    target, fresh = quantizer(values()), quantizer(values(seed=2))
    pointers = [b.data_ptr() for b in target.buffers().values() if b is not None]
    assert quantizer.update_quantized(values(seed=2), target) is target
    assert torch.equal(target.dequantize(), fresh.dequantize())
    assert quantizer.quantize(values(), out=target) is target
    assert torch.equal(target.dequantize(), quantizer(values()).dequantize())
    assert [b.data_ptr() for b in target.buffers().values() if b is not None] == pointers


@every_quantizer
def test_a_noop_flag_leaves_the_tensor_as_it_is(make: Any) -> None:
    quantizer = make()
    target = quantizer(values())
    before = target.dequantize()
    quantizer.update_quantized(values(seed=2), target, noop_flag=torch.ones(1))
    assert torch.equal(target.dequantize(), before)
    quantizer.update_quantized(values(seed=2), target, noop_flag=torch.zeros(1))
    assert torch.equal(target.dequantize(), quantizer(values(seed=2)).dequantize())


def test_update_quantized_keeps_the_copies_of_the_tensor() -> None:
    quantizer = fuser.MXFP8Quantizer(E4M3)
    target = quantizer(values())
    target.update_usage(columnwise_usage=False)
    quantizer.update_quantized(values(seed=2), target)
    assert usages(target) == (True, False)


@pytest.mark.parametrize(
    ("writer", "rows"),
    [
        (fuser.MXFP8Quantizer(E5M2), 32),
        (fuser.Float8CurrentScalingQuantizer(E4M3), 32),
        (fuser.MXFP8Quantizer(E4M3), 64),
    ],
)
def test_update_quantized_refuses_another_format_or_shape(writer: Any, rows: int) -> None:
    target = fuser.MXFP8Quantizer(E4M3)(values())
    with pytest.raises(fuser.InputError, match=said("quantizers-cannot-write-format")):
        writer.update_quantized(values(rows), target)


def test_update_quantized_refuses_what_is_not_quantized() -> None:
    quantizer = fuser.Float8BlockQuantizer(E4M3)
    part_of_a_block = quantizer(values(64))[:32]
    for target in (part_of_a_block, values()):
        with pytest.raises(fuser.InputError, match=said("quantizers-update-quantized-writes")):
            quantizer.update_quantized(values(), target)


def test_a_delayed_quantizer_records_the_amax_of_what_it_writes_and_not_of_an_empty_tensor() -> (
    None
):
    amax = torch.zeros(1)
    quantizer = fuser.Float8Quantizer(torch.ones(1), amax, E4M3)
    target = quantizer.make_empty((32, 64), dtype=torch.bfloat16, device="cpu")
    assert amax.item() == 0
    quantizer.update_quantized(values(), target)
    assert amax.item() == values().abs().max().item()


@every_quantizer
def test_make_empty_makes_a_tensor_of_that_shape_to_write_to(make: Any) -> None:
    quantizer = make()
    quantizer.set_usage(columnwise=False)
    x = values().bfloat16().view(2, 16, 64)
    made = quantizer.make_empty([2, 16, 64], dtype=torch.bfloat16, device="cpu")
    assert (tuple(made.shape), made.dtype) == ((2, 16, 64), torch.bfloat16)
    assert usages(made) == (True, False)
    quantizer.update_quantized(x, made)
    assert torch.equal(made.dequantize(), quantizer(x).dequantize())
    assert quantizer.make_empty((32, 64), device="cpu", requires_grad=True).requires_grad


@every_quantizer
def test_is_quantizable_says_whether_a_call_succeeds(make: Any) -> None:
    quantizer = make()
    others = (torch.int32, torch.float64, torch.float8_e4m3fn, torch.complex64)
    for tensor in (values(), torch.ones(()), *(values().to(dtype) for dtype in others)):
        try:
            quantizer(tensor)
            succeeds = True
        except fuser.InputError:
            succeeds = False
        assert quantizer.is_quantizable(tensor) == succeeds


def test_an_amax_is_reduced_over_the_group_of_the_quantizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_reduce(amax: torch.Tensor, op: Any, group: Any) -> None:
        assert group == "a group"
        amax.mul_(4)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    alone = fuser.Float8CurrentScalingQuantizer(E4M3)
    together = fuser.Float8CurrentScalingQuantizer(
        E4M3, "cpu", with_amax_reduction=True, amax_reduction_group="a group"
    )
    expected = 4 * alone(values())._scale_inv
    assert torch.equal(together(values())._scale_inv, expected)
    assert together(values())._quantizer.reduced_amaxes is None
    for write in (
        lambda target: together.update_quantized(values(), target),
        lambda target: together.quantize(values(), out=target),
    ):
        target: Any = alone(-9 * values())
        write(target)
        assert torch.equal(target._scale_inv, expected)
        assert torch.equal(target._rowwise_data, together(values())._rowwise_data)


def test_without_a_group_an_amax_is_reduced_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = torch.distributed

    def all_reduce(amax: torch.Tensor, op: Any, group: Any) -> None:
        assert group is distributed.group.WORLD
        amax.mul_(4)

    alone, together = (
        fuser.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=is_reduced)
        for is_reduced in (False, True)
    )
    with pytest.raises(fuser.StateError, match="init_process_group first"):
        together(values())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(distributed, "all_reduce", all_reduce)
        assert torch.equal(together(values())._scale_inv, 4 * alone(values())._scale_inv)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fuser.Float8CurrentScalingQuantizer(use_existing_amax=True),
            said("quantizers-float8current-scaling-quantizer"),
        ),
        (lambda: fuser.NVFP4Quantizer(E4M3), said("quantizers-fp4-elements-k")),
        *(
            (
                lambda cls=cls: cls(fp8_dtype=DType.kFloat4E2M1),
                said("formats-k-float8e4m3-float8e5m2", cls.__name__),
            )
            for cls in (
                fuser.Float8CurrentScalingQuantizer,
                fuser.Float8Quantizer,
                fuser.Float8BlockQuantizer,
                fuser.MXFP8Quantizer,
            )
        ),
        (
            lambda: fuser.NVFP4Quantizer(with_amax_reduction=True),
            said("quantizers-nvfp4quantizer-reduction-amaxes"),
        ),
        (
            lambda: fuser.MXFP8Quantizer(E4M3).quantize(values(), dtype=torch.float16),
            said("quantizers-quantize-source-convert", None, "torch.float16", "torch.float32"),
        ),
    ],
)
def test_what_a_quantizer_cannot_do_is_refused_with_a_sentence(make: Any, words: str) -> None:
    with pytest.raises(fuser.InputError, match=words):
        make()


@pytest.mark.parametrize("dtype", [DType.kByte, DType.kInt32, DType.kFloat32, DType.kBFloat16])
@pytest.mark.parametrize(
    "cls", [fuser.Float8CurrentScalingQuantizer, fuser.MXFP8Quantizer, fuser.Float8BlockQuantizer]
)
def test_nothing_is_quantized_to_a_plain_type(cls: Any, dtype: DType) -> None:
    with pytest.raises(
        fuser.InputError, match=said("formats-k-float8e4m3-float8e5m2", cls.__name__, dtype)
    ):
        cls(dtype)
    with pytest.raises(fuser.InputError, match=said("formats-plain-type-no", dtype.name)):
        dtype.max  # noqa: B018


# -- subclasses of the user ------------------------------------------------------------


class Doubling(fuser.Float8CurrentScalingQuantizer):
    """Quantizes twice the values."""

    def buffers_of(self, rows: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return super().buffers_of(2 * rows)


def test_a_subclass_computes_by_its_own_methods_and_can_be_changed() -> None:
    quantizer = Doubling(E4M3)
    x = values()
    expected = fuser.Float8CurrentScalingQuantizer(E4M3)(2 * x).dequantize()
    made = quantizer(x)
    assert torch.equal(made.dequantize(), expected)
    narrow = quantizer.with_usage(rowwise=True, columnwise=False)
    same = quantizer.with_usage(rowwise=True, columnwise=True)
    quantizer.set_usage(rowwise=False)
    assert usages(quantizer(x)) == (False, True)
    assert torch.equal(quantizer(x).dequantize(), expected)
    assert usages(same(x)) == (True, True)
    assert usages(narrow(x)) == (True, False)
    assert made._quantizer.get_usages() == {"rowwise": True, "columnwise": True}


# -- in ops of the user -----------------------------------------------------------------


class Rounded(fuser.BasicOperation):
    """y = dequantize(quantize(x)), written as te.ops writes its linear."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def num_quantizers(self, mode: str) -> int:
        return 1

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        quantizer = self.get_quantizer("forward", 0)
        if quantizer is not None:
            quantizer.set_usage(rowwise=True, columnwise=False)

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        quantizer = self.get_quantizer("forward", 0)
        self.seen.append((prev_op_grad_output_quantizer, next_op_input_quantizer, quantizer))
        if quantizer is None:
            return input_
        x = input_.dequantize() if isinstance(input_, QuantizedTensor) else input_
        x = quantizer(x)
        assert usages(x) == (True, False)
        if next_op_input_quantizer is not None:
            next_op_input_quantizer.set_usage(rowwise=True, columnwise=False)
            y: torch.Tensor = next_op_input_quantizer(x.dequantize())
            return y
        return x.dequantize()

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        quantizer = self.get_quantizer("backward", 0)
        self.seen.append(quantizer)
        if quantizer is None:
            return grad_output, ()
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer(grad_output.dequantize()).dequantize(), ()


RECIPES = {
    **{name: formats.deterministic(cls) for name, cls in formats.RECIPES.items()},
    "delayed": recipes.DelayedScaling(amax_history_len=2),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def trained(model: Any, recipe: Any) -> list[torch.Tensor]:
    x = values().requires_grad_()
    model.zero_grad()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(values(seed=3).to(y.dtype))
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


@every_recipe
def test_an_op_changes_its_own_quantizer_and_no_other_ops(recipe: Any) -> None:
    op = Rounded()
    model = oracles.randomize(
        fuser.Sequential(fuser.BasicLinear(64, 64), op, fuser.Linear(64, 64), fuser.GELU())
    )
    twin = copy.deepcopy(model)
    first = trained(model, recipe)
    (before, after, own), backward = op.seen
    assert after.get_usages() == own.get_usages() == {"rowwise": True, "columnwise": False}
    assert own is op.get_quantizer("forward", 0)
    assert backward.get_usages() == {"rowwise": True, "columnwise": False}
    assert isinstance(before, type(backward))
    # The linear after it, narrowed by the op, reads its input columnwise in backward all the same.
    assert all(torch.isfinite(tensor).all() for tensor in first)
    if recipe is not RECIPES["delayed"]:  # whose scales have moved
        second = trained(model, recipe)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert len(model.plans) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, trained(twin, recipe), strict=True))


def test_an_op_finds_no_quantizer_in_a_forward_without_a_recipe() -> None:
    op = Rounded()
    model = fuser.Sequential(fuser.Linear(64, 64), op, fuser.Linear(64, 64))
    trained(model, RECIPES["mxfp8"])
    op.seen.clear()
    trained(model, None)
    assert op.seen == [(None, None, None), None]


@pytest.mark.parametrize("index", [0, 2])
def test_outside_an_autocast_an_op_has_the_quantizers_of_its_last_forward(index: int) -> None:
    model = fuser.Sequential(fuser.Linear(64, 64), fuser.GELU(), fuser.Linear(64, 64))
    linear = model[index].members[0]
    assert linear.get_quantizer("backward", 0) is None
    for recipe in (RECIPES["mxfp8"], RECIPES["block"]):
        trained(model, recipe)
        with fuser.autocast(recipe=recipe):
            inside = linear.get_quantizer("forward", 1)
        assert linear.get_quantizer("forward", 1) is inside
        assert linear.get_input_quantizer() == linear.get_quantizer("forward", 0)


def test_the_usage_that_an_op_has_set_stays_when_the_recipe_changes() -> None:
    op = Rounded()
    for recipe in (RECIPES["mxfp8"], RECIPES["block"], RECIPES["delayed"]):
        with fuser.autocast(recipe=recipe):
            quantizer = op.get_quantizer("forward", 0)
            assert isinstance(quantizer, fuser.MXFP8Quantizer) == (recipe is RECIPES["mxfp8"])
            assert quantizer.columnwise_usage == (recipe is RECIPES["mxfp8"])
            quantizer.set_usage(columnwise=False)


class WithUsages(fuser.FusedOperation):
    """A linear and its bias, run as te.ops would: quantizers are asked of the basic op."""

    window = (fuser.BasicLinear, fuser.Bias)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **kwargs: Any) -> Any:
        linear, bias = self.members
        for index, x in enumerate((input_, linear.weight)):
            quantizer = linear.get_quantizer("forward", index)
            quantizer.set_usage(rowwise=True, columnwise=False)
            assert usages(quantizer(x)) == (True, False)
        y = linear.op_forward(basic_op_ctxs[0], input_, None, None)
        return y + bias.bias, ((), ())


def test_a_fused_op_changes_the_quantizers_of_its_basic_ops_and_plans_stay() -> None:
    recipe = RECIPES["mxfp8"]
    plain = oracles.randomize(fuser.Sequential(fuser.Linear(64, 64)))
    model = fuser.Sequential(*plain, fusions=(WithUsages,))
    expected = trained(plain, recipe)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(trained(model, recipe), expected, strict=True))
    assert model.plans[0].forward[0].fusion == "WithUsages"
    assert len(model.plans) == 1


def test_an_op_that_overrides_get_quantizer_is_quantized_by_what_that_gives() -> None:
    class Wide(fuser.BasicLinear):
        def get_quantizer(self, mode: str, index: int, device: Any = None) -> Any:
            return fuser.Float8CurrentScalingQuantizer(E5M2)

    narrow = oracles.randomize(fuser.BasicLinear(64, 64))
    wide = Wide(64, 64)
    wide.load_state_dict(narrow.state_dict())
    x = values()
    with fuser.autocast(recipe=RECIPES["current"]):
        y = wide(x)
    quantizer = fuser.Float8CurrentScalingQuantizer(E5M2)
    expected = quantizer(x).dequantize() @ quantizer(narrow.weight).dequantize().t()
    torch.testing.assert_close(y, expected)


# -- factories of custom recipes ---------------------------------------------------------


def test_a_factory_may_change_what_it_returned_and_the_pipeline_keeps_what_it_was() -> None:
    made: list[Any] = []

    def factory(role: Any) -> Any:
        made.append(fuser.MXFP8Quantizer(E4M3))
        return made[-1]

    model = oracles.randomize(fuser.Sequential(fuser.Linear(64, 64)))
    recipe = recipes.CustomRecipe(qfactory=factory)
    first = trained(model, recipe)
    for quantizer in made:
        quantizer.fp8_dtype = E5M2
        quantizer.set_usage(rowwise=False)
    second = trained(model, recipe)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(made) == 3


def test_the_quantizer_of_a_tensor_is_handed_out_to_be_changed_and_the_tensor_is_not() -> None:
    tensor = fuser.MXFP8Quantizer(E4M3)(values())
    quantizer = tensor._get_quantizer()
    assert quantizer == tensor._quantizer
    quantizer.set_usage(columnwise=False)
    assert tensor._quantizer.columnwise
    assert usages(tensor) == (True, True)
