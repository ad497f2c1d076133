"""The modules whose arguments have rows, and classes that users read and never make."""

from __future__ import annotations

# Imported for their rows.
import rows_of_container_methods
import rows_of_functions
import rows_of_op_methods
import rows_of_ops
import rows_of_quantizers
import rows_of_recipes  # noqa: F401
import rows_of_te
import rows_of_tensor_methods

MODULES = ("fuser", "fuser.modules", "fuser.moe", "fuser.recipe", *rows_of_te.MODULES)
METHODS = (
    *rows_of_container_methods.METHODS,
    *rows_of_op_methods.METHODS,
    *rows_of_te.METHODS,
    *rows_of_tensor_methods.METHODS,
)
"""Methods of which all arguments have rows; those of other methods that are options have too."""

# By path: arguments that a function takes by ``**options``, and its signature does not name.
OPTIONS: dict[str, tuple[str, ...]] = {
    **rows_of_functions.OPTIONS,
    **rows_of_ops.OPTIONS,
    **rows_of_quantizers.OPTIONS,
    **rows_of_te.OPTIONS,
}

_RESULT = "made by the library; its fields are what a plan, a router or a report says"
RESULTS: dict[str, str] = {
    "fuser.ConversionReport": _RESULT,
    "fuser.FusionPlan": _RESULT,
    "fuser.ModelPlan": _RESULT,
    "fuser.PlanKey": _RESULT,
    "fuser.Refusal": _RESULT,
    "fuser.Step": _RESULT,
    "fuser.moe.Permuted": _RESULT,
    "fuser.moe.Routing": _RESULT,
    **rows_of_te.RESULTS,
}
