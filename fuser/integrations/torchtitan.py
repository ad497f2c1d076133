"""torchtitan: models that run pipelines, converted where they are built, on meta.

:class:`FuserConverter` converts a whole model, :func:`converted` any part of one, in a factory of
torchtitan's ``@override``. :func:`fuser_blocks` is such a factory, for all blocks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fuser.conversion.convert import Filter, convert
from fuser.conversion.converted import (
    converted_modules,
    recipe_of,
    runner_of,
    set_conversion,
    unset_conversion,
)
from fuser.conversion.modules import child_of
from fuser.conversion.unit import Runner
from fuser.errors import InputError
from fuser.recipe import Recipe, recipe_named

try:
    from torchtitan.config import override
    from torchtitan.models.common.decoder import TransformerBlock
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError as error:
    raise ImportError(
        "fuser.integrations.torchtitan needs torchtitan 0.3 or later and what it imports "
        f"(triton): pip install torchtitan. Python says: {error}"
    ) from error

logger = logging.getLogger(__name__)


class FuserConverter(ModelConfigConverter):
    """Converts the model that a configuration builds, with the options of :func:`fuser.convert`.

    Give its ``Config`` to a model's ``model_registry(..., converters=[...])``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The options of :func:`fuser.convert`; ``recipe`` may be the name of one."""

        recipe: Recipe | str | None = None
        filter: Filter | None = None
        linears: Literal["recipe", "all", "none"] = "recipe"
        norms: Literal["fused", "all", "none"] = "fused"
        keep: Sequence[str] = ("first", "last")
        rounding: Literal["fused", "torch"] = "fused"
        strict: bool = False

        def to_dict(self) -> dict[str, Any]:
            """Values that JSON has: torchtitan writes configurations."""
            values = {f.name: getattr(self, f.name) for f in fields(self)}
            plain = (str, bool, type(None))
            texts = {name: v if isinstance(v, plain) else str(v) for name, v in values.items()}
            return {**texts, "keep": list(self.keep)}

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The configuration of the same model, converted."""
        parent: Any = type(model_config)
        given = {f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init}
        return _config_class(parent)(**{**given, "conversion": self.config})


def converted(config: Any, **options: Any) -> Any:
    """A configuration that builds what ``config`` builds, converted.

    Parameters
    ----------
    config
        Of a module of torchtitan: of a model, a block, or a part of one.
    options
        Those of :func:`fuser.convert`. ``recipe`` may also be a name, as "Float8CurrentScaling".
    """
    return FuserConverter(FuserConverter.Config(**options)).convert(config)


def fuser_blocks(config: Any, *, keep: Sequence[str] = (), **options: Any) -> Any:
    """Each block, converted: ``--override.imports fuser.integrations.torchtitan.fuser_blocks``.

    Options are those of :func:`fuser.convert`; the recipe is that of the blocks alone.
    """
    return converted(config, keep=keep, **options)


override(target=TransformerBlock.Config, description="Blocks that run pipelines of fuser.")(
    fuser_blocks
)


@functools.cache
def _config_class(parent: Any) -> Any:
    """The configuration of a subclass of the module that ``parent`` builds."""
    owner = parent._owner

    @dataclass(kw_only=True, slots=True)
    class Config(parent):
        conversion: FuserConverter.Config

        def build(self, **keywords: Any) -> Any:
            module = parent.build(self, **keywords)
            options = {f.name: getattr(self.conversion, f.name) for f in fields(self.conversion)}
            if isinstance(options["recipe"], str):
                options["recipe"] = recipe_named(options["recipe"])
            report = convert(module, **options)
            logger.info("%s: %s", owner.__name__, report)
            return module

    def parallelize(self: Any, parallel_dims: Any) -> None:
        _parallelize(self, parallel_dims, owner.parallelize)

    names = {"__module__": owner.__module__, "__qualname__": owner.__qualname__}
    members = {**names, "Config": Config, "parallelize": parallelize}
    subclass: Any = type(owner.__name__, (owner,), members)
    return subclass.Config


def _parallelize(module: Any, parallel_dims: Any, parallelize: Any) -> None:
    """Let torchtitan place parameters; its forwards around those of parts would do nothing.

    Raises
    ------
    InputError
        If these forwards would communicate: pipelines would not.
    """
    degrees = {"tensor": parallel_dims.tp, "context": parallel_dims.cp}
    for kind, degree in degrees.items():
        if degree > 1:
            raise InputError(
                f"A model that fuser has converted got {kind}_parallel_degree={degree} with "
                f"spmd_backend={parallel_dims.spmd_backend!r}: torchtitan would replace the "
                "forwards of its parts by others, which communicate, and none would run a "
                "pipeline. Take FuserConverter out, or shard by data."
            )
    if parallel_dims.spmd_backend == "full_dtensor":
        raise InputError(
            "A model that fuser has converted got spmd_backend='full_dtensor', in which weights "
            "and inputs are DTensors, and no pipeline would run: use 'spmd_types' or "
            "'partial_dtensor'."
        )
    conversions = []
    for owner in list(converted_modules(module)):
        runner = runner_of(owner)
        unit = None if runner is None else runner.present_unit(owner)
        conversions.append((owner, unit, recipe_of(owner)))
        unset_conversion(owner)
    parallelize(module, parallel_dims)
    for owner, unit, recipe in conversions:
        for path in unit.watched if unit else [""]:
            child_of(owner, path).__dict__.pop("forward", None)
        set_conversion(owner, Runner(unit, owner) if unit else None, recipe)
