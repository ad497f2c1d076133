"""Errors and warnings of fuser: each message is a sentence with the values concerned."""

from __future__ import annotations


class FuserError(Exception):
    """Base of every error that fuser raises itself."""


class InputError(FuserError, ValueError):
    """An argument or tensor has a value, shape, dtype or device that cannot be used."""


class InputIndexError(InputError, IndexError):
    """An index is out of range, or a key is unknown."""


class InputTypeError(FuserError, TypeError):
    """An argument has the wrong type."""


class StateError(FuserError, RuntimeError):
    """A call is not possible at this time, or in this state of the object."""


class KernelUnavailable(StateError):
    """A kernel is not available on this machine; PyTorch can compute the same."""


class FuserWarning(UserWarning):
    """Category of the warnings of fuser, but for deprecated names."""


class EmulationWarning(FuserWarning):
    """Category of the warning that the products of a recipe are emulated on a device."""
