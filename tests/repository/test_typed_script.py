"""Types in a user's script: a type checker refuses a misspelled option, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import typing

import pytest
from paths import ROOT

from fuser.modules import arguments, layers

SCRIPT = "tests/cases/typed_script.py"


def test_a_type_checker_refuses_what_the_script_says() -> None:
    pytest.importorskip("mypy")
    # With the options of `make lint`, whose cache it shares.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", SCRIPT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not run.stderr, run.stderr
    errors: dict[int, str] = {}
    for number, message in re.findall(rf"^{SCRIPT}:(\d+): error: (.*)$", run.stdout, re.MULTILINE):
        errors[int(number)] = errors.get(int(number), "") + message
    lines = (ROOT / SCRIPT).read_text(encoding="utf-8").splitlines()
    matches = {i: re.search(r"  # refused: (.*)$", line) for i, line in enumerate(lines, 1)}
    refused = {i: match.group(1) for i, match in matches.items() if match is not None}
    assert {i: lines[i - 1] for i in errors.keys() ^ refused.keys()} == {}, run.stdout
    assert [lines[i - 1] for i, words in refused.items() if words not in errors[i]] == []


def test_benchmarks_and_examples_are_checked_as_strictly_as_the_library() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    off = re.findall(r"^disable_error_code = (.*)$", settings, re.MULTILINE)
    on = re.findall(r"^module = \[([^]]*)\]\nenable_error_code = (.*)$", settings, re.MULTILINE)
    ((modules, codes),) = on
    assert [codes] == off
    scripts = {
        path.stem for name in ("benchmarks", "examples") for path in ROOT.glob(f"{name}/*.py")
    }
    assert scripts == set(re.findall(r'"(\w+)"', modules)) - {"typed_script"}


def test_every_option_and_activation_of_a_layer_has_a_type() -> None:
    typed = arguments.LayerOptions.__optional_keys__
    names = {name for pair in arguments._LINEAR_NAMES.items() for name in pair}
    assert typed == {*names, *arguments.OFF, *arguments.IGNORED, "tp_size"}
    assert set(typing.get_args(layers.ActivationName)) == layers.ACTIVATIONS.keys()
    assert set(typing.get_args(layers.Normalization)) == layers.NORMALIZATIONS.keys()
