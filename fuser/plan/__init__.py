"""Plans: the graph of a pipeline, windows that fusions match, the cover, and what is said of it."""

from fuser.plan.plan import FusionPlan, ModuleCall, Refusal, Step
from fuser.plan.window import Many, OneOf, Optional

__all__ = ["FusionPlan", "Many", "ModuleCall", "OneOf", "Optional", "Refusal", "Step"]
