"""Directive ``command-output``: what a command of the library prints."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys


def output(command: str) -> str:
    """The text that ``fuser`` prints for the arguments in ``command``, 80 columns wide."""
    name, *arguments = shlex.split(command)
    assert name == "fuser", command
    return subprocess.run(
        [sys.executable, "-m", "fuser", *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout


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
