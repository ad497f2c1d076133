"""What fuser raises: every message is a sentence with the values in it."""

from __future__ import annotations


class FuserError(Exception):
    """Base of every error that fuser raises itself."""


class InputError(FuserError, ValueError):
    """An argument or tensor has a value, shape, dtype or device that cannot be used."""


class InputIndexError(InputError, IndexError):
    """An index names nothing that is there."""


class InputTypeError(FuserError, TypeError):
    """An argument is of the wrong kind altogether."""


class StateError(FuserError, RuntimeError):
    """A call came at a moment, or on an object, where it cannot be honoured."""


class KernelUnavailable(StateError):
    """A kernel cannot be had on this machine; plain torch can do its work."""
