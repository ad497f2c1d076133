"""PEFT: LoRA adapters on the linears of fuser, also inside of a Sequential.

PEFT knows a linear by its class, so that by itself it refuses those of fuser, and skips them where
``target_modules="all-linear"`` looks for torch's. :func:`prepared` makes a configuration with which
it finds them.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch

from fuser.basic_ops import BasicLinear, GroupedLinear, LoRAGroupedLinear, LoRALinear
from fuser.errors import InputError, StateError
from fuser.fused_ops import Linear
from fuser.modules import LayerNormLinear, LayerNormMLP
from fuser.modules import Linear as LinearLayer
from fuser.op import FusedOperation, Stateful
from fuser.tensors import QuantizedTensor

try:
    import peft
    from peft.tuners import lora, tuners_utils
except ImportError as error:
    raise ImportError(
        "fuser.integrations.peft needs PEFT 0.17 or later: pip install peft"
    ) from error

# What PEFT does not promise: how it finds linears, and what its documents recommend for others.
_with_all_linears = operator.attrgetter("_maybe_include_all_linear_layers")(tuners_utils)
_REGISTER = "_register_custom_module"

LINEARS = (Linear, BasicLinear, LinearLayer)
"""The classes that take adapters."""
_HAVE_ADAPTERS = (LoRALinear, LoRAGroupedLinear)
_HOLD_LINEARS = (LayerNormLinear, LayerNormMLP, GroupedLinear)
# Ways to initialise that do not decompose or write the weight.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal")


class LoraLinear(lora.Linear):
    """PEFT's LoRA layer around a linear of fuser, which keeps its recipe and its kernels.

    Adapters are PEFT's own modules, in 16 or 32 bits under a recipe too. The base layer may have a
    quantized weight, which is neither merged nor decomposed.
    """

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight, as PEFT does.

        Raises
        ------
        StateError
            If the weight is quantized: it would round the adapters away.
        """
        weight = self.get_base_layer().weight
        if isinstance(weight, QuantizedTensor):
            raise StateError(
                f"The weight of this {type(self.get_base_layer()).__name__} is a "
                f"{type(weight).__name__}, whose steps are wider than what adapters add: merge "
                "into a model with weights of 16 or 32 bits."
            )
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)


def get_peft_model(model: torch.nn.Module, config: Any, *arguments: Any, **options: Any) -> Any:
    """``peft.get_peft_model`` for a model with linears of fuser; the arguments are PEFT's.

    Raises
    ------
    InputError
        As :func:`prepared`; the model has not changed then.
    """
    return peft.get_peft_model(model, prepared(model, config), *arguments, **options)


def prepared(model: torch.nn.Module, config: Any) -> Any:
    """A copy of a ``LoraConfig`` with which PEFT puts adapters on linears of fuser in ``model``.

    ``fuser.Linear``, ``fuser.BasicLinear`` and ``fuser.modules.Linear`` are targets as
    ``torch.nn.Linear`` is, however they are named: by suffixes, a regular expression,
    ``"all-linear"``, or with ``layers_to_transform``. Give the result to any function of PEFT, and
    to ``PeftModel.from_pretrained`` as its ``config``.

    Raises
    ------
    InputError
        If the configuration names something of fuser that takes no adapters, if it is of another
        method than LoRA and names a linear of fuser, or if ``"all-linear"`` would leave linears
        out.
    """
    config = copy.deepcopy(config)
    is_lora = config.peft_type == peft.PeftType.LORA
    named = dict(model.named_modules())
    ours = {name: module for name, module in named.items() if isinstance(module, Stateful)}
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        _check_all_linear(ours)
        linears = {
            n for n, m in ours.items() if isinstance(m, LINEARS) and _takes_adapters(n, m, ours)
        }
        head_of: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = head_of()
        linears = {name for name in linears if head is None or named[name] is not head}
        config = _with_all_linears(config, model)
        config.target_modules = set(config.target_modules) | linears
    for name, module in ours.items():
        if name and _matches(config, name):
            reason = _refusal(name, module, ours)
            if reason is None and not is_lora:
                reason = f"{config.peft_type.value} adapters are for linears of torch"
            if reason is None and isinstance(module.weight, QuantizedTensor):
                reason = _refusal_of_quantized(config)
            if reason is not None:
                raise InputError(
                    f"The target {name!r} is a fuser {type(module).__name__} that takes no "
                    f"adapters: {reason}."
                )
    for target in getattr(config, "target_parameters", None) or ():
        for parameter in _parameters_named(target, ours):
            raise InputError(
                f"target_parameters names {parameter!r}, a parameter of an op of fuser, which PEFT "
                "cannot compute anew at each call: name its linear in target_modules."
            )
    if is_lora:
        operator.methodcaller(_REGISTER, dict.fromkeys(LINEARS, LoraLinear))(config)
    return config


def _matches(config: Any, name: str) -> bool:
    if getattr(config, "target_modules", None) is None:
        return False
    return bool(tuners_utils.check_target_module_exists(config, name))


def _takes_adapters(name: str, module: torch.nn.Module, ours: dict[str, Stateful]) -> bool:
    """Whether it is a linear that is not a part of another one, and has no adapters yet."""
    return not isinstance(module, _HAVE_ADAPTERS) and _composite_of(name, ours) is None


def _composite_of(name: str, ours: dict[str, Stateful]) -> str | None:
    """The name of the composite whose basic op it is; None if it is none."""
    parent = re.sub(r"\.?basic_ops\.\d+$", "", name)
    return parent if parent != name and isinstance(ours.get(parent), FusedOperation) else None


def _refusal(name: str, module: torch.nn.Module, ours: dict[str, Stateful]) -> str | None:
    """The reason why ``module`` takes no adapters, as the end of a sentence; None if it does."""
    composite = _composite_of(name, ours)
    if composite is not None:
        return f"it is a part of {composite!r}, which is the target to name"
    if isinstance(module, _HAVE_ADAPTERS):
        return "it has adapters of its own"
    if isinstance(module, GroupedLinear):
        return "PEFT has none for it; fuser.LoRAGroupedLinear.from_linear(...) does"
    if not isinstance(module, LINEARS):
        names = ", ".join(f"fuser.{cls}" for cls in ("Linear", "BasicLinear", "modules.Linear"))
        return f"linears do, {names}"
    linear = module.ops[0] if isinstance(module, LinearLayer) else module
    linear = linear if isinstance(linear, BasicLinear) else linear.members[0]
    if linear.mode_and_ranks is not None:
        return "its features are shared by several ranks"
    return None


def _refusal_of_quantized(config: Any) -> str | None:
    if config.init_lora_weights in _PLAIN_INITS and not config.use_dora:
        return None
    return (
        f"its weight is quantized, and init_lora_weights={config.init_lora_weights!r} with "
        f"use_dora={config.use_dora} reads or writes its values"
    )


def _check_all_linear(ours: dict[str, Stateful]) -> None:
    left_out = [
        f"{name or 'the model'!r}, a {type(module).__name__}"
        for name, module in ours.items()
        if isinstance(module, _HOLD_LINEARS) and not isinstance(module, _HAVE_ADAPTERS)
    ]
    if left_out:
        raise InputError(
            f"target_modules='all-linear' would leave out the linears in {'; '.join(left_out)}: "
            "name the targets that you mean."
        )


def _parameters_named(target: str, ours: dict[str, Stateful]) -> Iterator[str]:
    """The parameters that PEFT finds by ``target``, by names in fuser and plain ones."""
    for path, module in ours.items():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        for name in (*own, *(plain for plain in module.plain_names().values() if plain)):
            full = f"{path}.{name}" if path else name
            if full == target or full.endswith(f".{target}"):
                yield full
