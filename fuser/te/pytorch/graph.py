"""``transformer_engine.pytorch.graph``: modules as CUDA graphs."""

from fuser.runtime.graphs import make_graphed_callables

__all__ = ["make_graphed_callables"]
