"""Channels: an extra output of one op becomes an extra input of a later op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuser.errors import InputError, InputIndexError, InputTypeError, StateError

if TYPE_CHECKING:
    from typing_extensions import Self


class ChannelBindings:
    """Bindings of an op's extra inputs and outputs to channels."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _input_channels: dict[int, str]
    _output_channels: dict[int, tuple[str, bool]]
    _captured: bool

    def set_extra_output_channel(
        self, index: int, name: str, *, output_to_caller: bool = True
    ) -> Self:
        """Send extra output ``index`` to later extra inputs that are bound to ``name``.

        With ``output_to_caller=False`` the pipeline does not also return it.
        Returns the op itself.

        Raises
        ------
        InputIndexError
            If the op has no such extra output.
        InputError, InputTypeError
            If the name is empty, or an argument is of another type.
        StateError
            If a pipeline already holds the op.
        """
        self._check_channel("output", index, self.num_extra_outputs, name)
        if not isinstance(output_to_caller, bool):
            raise InputTypeError(
                f"output_to_caller of channel {name!r} is True or False; got {output_to_caller!r}."
            )
        # A new dict, because setting it counts as a change of the op.
        self._output_channels = {**self._output_channels, index: (name, output_to_caller)}
        return self

    def set_extra_input_channel(self, index: int, name: str) -> Self:
        """Take extra input ``index`` from the channel ``name`` instead of the caller.

        Returns the op itself. Raises as :meth:`set_extra_output_channel`.
        """
        self._check_channel("input", index, self.num_extra_inputs, name)
        self._input_channels = {**self._input_channels, index: name}
        return self

    def returns_extra_output(self, index: int) -> bool:
        """Whether extra output ``index`` goes back to the caller."""
        return self._output_channels.get(index, ("", True))[1]

    @property
    def channels(self) -> frozenset[str]:
        """Names of all channels that the op's extra inputs and outputs are bound to."""
        return frozenset(self._input_channels.values()) | {
            name for name, _ in self._output_channels.values()
        }

    def channel_text(self) -> str:
        """For a repr: the channels of the op, ``"channel='residual'"``; empty without one."""
        names = ", ".join(map(repr, sorted(self.channels)))
        return f"channel{'s' * (len(self.channels) > 1)}={names}" * bool(names)

    def _check_channel(self, kind: str, index: int, count: int, name: str) -> None:
        if not isinstance(name, str):
            raise InputTypeError(f"A channel is named by a str; got {name!r}.")
        if not name:
            raise InputError(
                f"Extra {kind} {index} of {type(self).__name__} got a channel with an empty name."
                " Give it a name."
            )
        if not isinstance(index, int) or isinstance(index, bool):
            raise InputTypeError(
                f"Channel {name!r} asks for an extra {kind} by its number; got {index!r}."
            )
        if not 0 <= index < count:
            raise InputIndexError(
                f"Channel {name!r} asks for extra {kind} {index} of {type(self).__name__}, "
                f"which has {count}."
                " Count from 0."
            )
        if self._captured:
            raise StateError(
                f"Channel {name!r} cannot be bound: a pipeline has captured this "
                f"{type(self).__name__} already. Bind channels before the first call or plan."
            )
