"""gather_quantized: unquantized weights that ``fully_shard`` (FSDP2) gathers quantized."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch

from fuser.basic_ops import BasicLinear, GroupedLinear
from fuser.communication import is_distributed
from fuser.errors import FuserWarning, InputError, InputTypeError
from fuser.formats import GROUP_TILE
from fuser.op import HiddenOps, modules_and_ops
from fuser.precision.contexts import ParameterInit, weight_quantizer
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import DelayedScaling, Recipe
from fuser.report.text import listed
from fuser.tensors import QuantizedTensor, stack_quantizer
from fuser.tensors.joined_gathering import can_join
from fuser.tensors.master_weight import Joint, MasterWeight
from fuser.tensors.sharding import check_is_of_one_format


def gather_quantized(module: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """Make ``fully_shard`` gather the weights of linears as bytes and scales of ``recipe``.

    Each rank keeps its rows of a weight unquantized, for the optimizer, and quantizes them before
    they are gathered. A forward computes with the quantized weight, also outside ``autocast``.
    Under ``autocast`` with the same recipe it gives the numbers of an unsharded model. Under
    another recipe it is refused with an ``InputError``.

    Call it before ``fully_shard``; a module runs only after that.

    Parameters
    ----------
    module
        Its ``BasicLinear`` ops, also those of composites and of layers, get another ``weight``,
        which shares memory with the old one; so do ``GroupedLinear`` ops, of which each expert has
        a weight, and linears of :func:`fuser.convert`, except for those of experts and weights that
        other modules have too. Converted linears that are one product have one scale, in formats
        with one for a weight.
    recipe
        Its quantizer of weights is used. Not ``DelayedScaling``: its scales are an op's state.

    Returns
    -------
    ``module``.

    Raises
    ------
    InputError
        If the recipe is ``DelayedScaling`` or has ``backward_override="high_precision"``, if a
        weight is quantized, gathered quantized or sharded already, if the recipe cannot quantize
        one parameter for all experts or makes weights in two formats, or if the module has no
        linear.
    InputTypeError
        If the recipe is not an object of one of ``fuser.recipe``'s classes.
    """
    if not isinstance(recipe, Recipe):
        raise InputTypeError(
            f"gather_quantized got the recipe {recipe!r}; it takes one of fuser.recipe's classes, "
            "such as MXFP8BlockScaling()."
        )
    if isinstance(recipe, DelayedScaling):
        raise InputError(
            f"gather_quantized got the recipe {recipe!r}, whose scales belong "
            "to the state of an op; give one whose scales follow from the weight."
        )
    if recipe.backward_override == "high_precision":
        raise InputError(
            f"gather_quantized got the recipe {recipe!r}, whose backward reads the unquantized "
            'weight, which is not gathered. Use backward_override="dequantized".'
        )
    masters: dict[int, torch.nn.Parameter] = {}
    owners: list[torch.nn.Module] = []
    for path, op in modules_and_ops(module):
        if isinstance(op, HiddenOps):
            owners.append(op)
        if not isinstance(op, (BasicLinear, GroupedLinear)):
            continue
        owners.append(op)
        for name in (op.parameter_names or ())[: op.main_grad_count]:
            weight = getattr(op, name)
            if id(weight) not in masters:
                masters[id(weight)] = _master(weight, recipe, path, name)
    owners += _converted(module, recipe, masters)
    if not masters:
        raise InputError(
            f"gather_quantized got a {type(module).__name__} without a BasicLinear, GroupedLinear "
            "or converted linear that runs quantized."
            " Call it with a module that has one."
        )
    for owner in owners:
        for name, parameter in owner._parameters.items():
            owner._parameters[name] = masters.get(id(parameter), parameter)
    return module


def _converted(
    module: torch.nn.Module, recipe: Recipe, masters: dict[int, torch.nn.Parameter]
) -> list[torch.nn.Module]:
    """Add the ``masters`` of converted linears by their weights; returns these linears.

    Several with one product are taken if their bytes can be those of one weight.
    """
    conversions = sys.modules.get("fuser.conversion.converted")
    if conversions is None:
        return []
    holders = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    taken: list[torch.nn.Module] = []
    for linears in conversions.joined_linears(module):
        weights = [linear._parameters.get("weight") for _, linear in linears]
        known = {type(one) for one in weights} <= {torch.nn.Parameter, MasterWeight}
        if not known or any(holders[id(one)] > 1 for one in weights):
            continue
        paths = tuple(f"{path}.weight" for path, _ in linears)
        quantizer = weight_quantizer(
            ParameterInit(recipe, preserve_high_precision_init_val=False),
            make_quantizer(recipe, "weight", name=linears[0][0]),
        )
        joint = None
        if len(linears) > 1:
            if not can_join(quantizer, [len(one) for one in weights]):
                rows = listed([str(len(weight)) for weight in weights])
                warnings.warn(
                    f"gather_quantized leaves {', '.join(paths)} unquantized: fuser.convert made "
                    f"one product of them, and they have {rows} rows: their bytes are "
                    f"those of one weight for multiples of {GROUP_TILE} rows. Leave their module "
                    "out with fuser.convert(..., filter=).",
                    FuserWarning,
                    stacklevel=3,
                )
                continue
            joint = Joint(paths)
        for (path, linear), weight in zip(linears, weights, strict=True):
            masters[id(weight)] = _master(weight, recipe, path, "weight", joint)
            taken.append(linear)
    return taken


def _master(
    weight: torch.nn.Parameter, recipe: Recipe, path: str, name: str, joint: Joint | None = None
) -> torch.nn.Parameter:
    full_name = f"{path}.{name}"
    kind = "sharded" if is_distributed(weight) else ""
    if isinstance(weight, MasterWeight):
        kind = f"gathered quantized under {weight._state.recipe}"
    if isinstance(weight, QuantizedTensor):
        kind = "quantized"
    if kind:
        raise InputError(
            f"gather_quantized got {full_name} of shape {tuple(weight.shape)}, which is {kind} "
            "already; call it once, with unquantized weights, before fully_shard."
        )
    quantizer = weight_quantizer(
        ParameterInit(recipe, preserve_high_precision_init_val=False),
        make_quantizer(recipe, "weight", name=path),
    )
    check_is_of_one_format(quantizer, f"{full_name} of shape {tuple(weight.shape)}")
    if weight.dim() == 3:
        stacked = stack_quantizer(quantizer, weight.shape[1])
        if stacked is None:
            raise InputError(
                f"gather_quantized got {full_name} of shape {tuple(weight.shape)}, one parameter "
                f"for all experts, and {recipe}; it takes such a parameter under "
                "Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling and "
                "NVFP4BlockScaling without nvfp4_4over6, with out_features that are a multiple of "
                f"{GROUP_TILE}. Make "
                "GroupedLinear with single_grouped_weight=False."
            )
        quantizer = stacked
    master = MasterWeight(weight.detach(), recipe, quantizer, joint)
    return torch.nn.Parameter(master, requires_grad=weight.requires_grad)
