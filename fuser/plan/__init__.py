"""Plans: the graph of a pipeline, windows of fusions, costs, covers, and plans as text."""

from fuser.plan.plan import FusionPlan, ModuleCall, Refusal, Step
from fuser.plan.window import Many, OneOf, Optional

__all__ = ["FusionPlan", "Many", "ModuleCall", "OneOf", "Optional", "Refusal", "Step"]
