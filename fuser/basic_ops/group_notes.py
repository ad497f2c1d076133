"""Notes of a plan on groups of rows: their padding, and what the bits of a row depend on."""

from __future__ import annotations

import torch

from fuser.formats import GROUP_TILE, tile_count
from fuser.precision.quantizer_for import role_format
from fuser.recipe import Recipe

OWN_BITS = "The bits of a row depend on that row and its group alone"


def padding_note(
    recipe: Recipe | None, groups: int, rows: int, *, is_one_launch: bool
) -> str | None:
    """The rows that quantizing adds to ``rows`` rows in groups.

    None if it adds no rows, if there are none, or if the recipe is custom. A group ends on average
    in the middle of its last tile, or block of a format.
    """
    if recipe is None or recipe.custom():
        return None
    multiple = GROUP_TILE if is_one_launch else role_format(recipe, "input").multiple
    if multiple == 1 or rows == 0:  # of a dispatch with a capacity of 0
        return None
    more = groups * multiple // 2
    text = (
        f"Each group is padded to a multiple of {multiple} rows: about {multiple // 2} more a "
        f"group, of {rows} rows {_percent(more, rows)}."
    )
    if not is_one_launch:
        return text
    buffer = tile_count(rows, groups) * GROUP_TILE
    return (
        f"{text} Sizes are not known when memory is allocated, so a padded matrix of T rows has "
        f"up to T + {GROUP_TILE - 1} x {groups} rows: here {buffer}, "
        f"{_percent(buffer - rows, rows)}."
    )


def _percent(more: int, rows: int) -> str:
    return f"{100 * more / rows:.1f}% more"


def bits_note(recipe: Recipe | None, dtype: torch.dtype) -> str | None:
    """A note on other rows that change the bits of a row; None if that is not known."""
    if recipe is None:
        is_torchs = dtype is torch.float32
        but = ", if torch's product does not depend on the number of rows" if is_torchs else ""
        return f"{OWN_BITS}{but}."
    if recipe.custom():
        return None
    if recipe.delayed():
        return f"{OWN_BITS}, and on scales of earlier steps."
    shared = {role: _rows_of_a_scale(recipe, role) for role in ("input", "grad_output")}
    if not recipe.quantizes_backward:
        del shared["grad_output"]
    sharing = [
        f"its {tensor} shares a scale with {shared[role]} of its group"
        for role, tensor in (("input", "input"), ("grad_output", "gradient"))
        if shared.get(role)
    ]
    if not sharing:
        return f"{OWN_BITS}."
    return f"The bits of a row may depend on other rows: {', and '.join(sharing)}."


def _rows_of_a_scale(recipe: Recipe, role: str) -> str:
    """The rows with which a row shares a scale; empty if it has scales of its own."""
    layout = role_format(recipe, role).layout
    names = {*layout.rowwise, *layout.shared}
    if not names <= layout.rows.keys():
        return "all rows"
    most = max(layout.rows[name][1] for name in names)
    return f"{most - 1} rows" if most > 1 else ""
