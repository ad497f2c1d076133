"""Operations of compiled graphs: ``torch.ops.fuser``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

library = torch.library.Library("fuser", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    schema: str, real: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Any:
    """The operation of a schema ``name(arguments) -> results``, on tensors and on fake tensors.

    Its results share no memory with its arguments, nor with each other.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    library.impl(name, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fuser::{name}", fake, lib=library)
    return getattr(torch.ops.fuser, name)
