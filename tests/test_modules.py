"""fuser.modules: layers that are pipelines."""

from __future__ import annotations

import oracles
import pytest
import torch

import fuser
from fuser import modules
from fuser import recipe as recipes


def x_of(*shape: int) -> torch.Tensor:
    return oracles.random_tensor(shape, torch.float32, 1).requires_grad_()


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "sreglu", "relu"])
def test_a_layernorm_mlp_is_its_ops(normalization: str, activation: str) -> None:
    mlp = modules.LayerNormMLP(64, 96, normalization=normalization, activation=activation)
    oracles.randomize(mlp)
    norm, up, act, down = mlp.ops
    assert type(norm).__name__ == normalization
    assert act.functor.name == activation
    x = x_of(5, 64)
    torch.testing.assert_close(mlp(x), down(act(up(norm(x)))))
    linear = ("BasicLinear", "Bias")
    assert mlp.plan(x).ops == (normalization, *linear, type(act).__name__, *linear)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize(
    "make", [recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling, recipes.Float8BlockScaling]
)
def test_under_an_override_the_mlp_equals_its_halves_bit_for_bit(make: type, override: str) -> None:
    whole = oracles.randomize(modules.LayerNormMLP(64, 96, activation="relu"))
    first, second = modules.LayerNormLinear(64, 96), modules.Linear(96, 64)
    first.ops[0].load_state_dict(whole.ops[0].state_dict())
    first.ops[1].load_state_dict(whole.ops[1].state_dict())
    second.ops[0].load_state_dict(whole.ops[3].state_dict())
    grads = []
    for call in (whole, lambda x: second(fuser.ReLU()(first(x)))):
        x = x_of(32, 64)
        with fuser.autocast(recipe=make(backward_override=override)):
            y = call(x)
        y.backward(oracles.random_tensor((32, 64), torch.float32, 2))
        grads.append((y.detach(), x.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    for a, b in zip(whole.parameters(), [*first.parameters(), *second.parameters()], strict=True):
        assert torch.equal(a.grad, b.grad)


def test_options_reach_the_ops() -> None:
    layer = modules.LayerNormLinear(
        8, 4, bias=False, eps=0.5, zero_centered_gamma=True, dtype=torch.bfloat16
    )
    norm, linear = layer.ops
    assert (norm.eps, norm.zero_centered_gamma) == (0.5, True)
    assert linear.bias is None
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalization": "BatchNorm"}, ("'BatchNorm'", "LayerNorm or RMSNorm")),
        ({"activation": "tanh"}, ("'tanh'", "swiglu")),
    ],
)
def test_unknown_names_are_refused_with_those_there_are(
    options: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(fuser.InputError) as caught:
        modules.LayerNormMLP(8, 8, **options)
    assert all(word in str(caught.value) for word in words)


def test_a_layer_keeps_quantized_weights_across_microbatches() -> None:
    layer = modules.LayerNormMLP(64, 128)
    x = torch.randn(32, 64)
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        plain = layer(x)
        outputs = [layer(x, is_first_microbatch=is_first) for is_first in (True, False)]
    assert all(torch.equal(y, plain) for y in outputs)
    linears = [op.members[0] for op in layer.ops if isinstance(op, fuser.Linear)]
    assert all(linear._kept_weight is not None for linear in linears)
