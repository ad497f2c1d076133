"""Mixture of experts: the router, and the permutation of tokens to rows sorted by expert."""

from fuser.moe.permutation import Permuted, permute, unpermute
from fuser.moe.router import Router, Routing

__all__ = ["Permuted", "Router", "Routing", "permute", "unpermute"]


def __dir__() -> list[str]:
    return __all__
