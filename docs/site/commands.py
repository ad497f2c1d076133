"""Directive ``command-output``: what a command of the library prints."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from typing import Any
from unittest import mock

from fuser.__main__ import main


def output(command: str) -> str:
    """The text that ``fuser`` prints for the arguments in ``command``, 80 columns wide.

    Raises
    ------
    ValueError
        The command refuses its arguments, or fails.
    """
    name, *arguments = shlex.split(command)
    assert name == "fuser", command
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.redirect_stdout(printed):
        try:
            status: Any = main(arguments)
        except SystemExit as end:  # of the help of a command with options of its own
            status = end.code
    if status:
        raise ValueError(f"{command!r} in a document ends with status {status}")
    return printed.getvalue()


def setup(app: object) -> dict[str, bool]:
    """Registers the directive."""
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.util.docutils import SphinxDirective

    class CommandOutput(SphinxDirective):
        required_arguments = 1
        final_argument_whitespace = True

        def run(self) -> list[nodes.Node]:
            text = output(self.arguments[0])
            return [nodes.literal_block(text=text, language="text")]

    assert isinstance(app, Sphinx)
    app.add_directive("command-output", CommandOutput)
    return {"parallel_read_safe": True}
