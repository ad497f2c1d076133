"""Mixture of experts: the router, and the permutation of tokens to rows sorted by expert."""

from fuser.functional.routing import DropPolicy
from fuser.moe.permutation import Permuted, permute, unpermute
from fuser.moe.router import Router, Routing, Score

__all__ = ["DropPolicy", "Permuted", "Router", "Routing", "Score", "permute", "unpermute"]
__dir__ = __all__.copy  # dir() shows public names alone
