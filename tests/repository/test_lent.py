"""Packages that an environment lends to another: what a distribution requires, or all of them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import lent
import pytest

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="fuser-ops")), reason="fuser is not installed"
)
OF = """
import sys
try:
    import {name}
    print({name}.__file__)
except ImportError as error:
    print(error)
"""


def imported(name: str, packages: Path) -> str:
    """Where a new process without packages finds a module in a folder of packages, or its error."""
    code = f"import site; site.addsitedir({str(packages)!r})" + OF.format(name=name)
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_what_fuser_requires_is_all_that_is_linked(tmp_path: Path) -> None:
    required = lent.required_by("fuser-ops")
    assert required.keys() >= {"torch", "numpy", "networkx", "sympy", "mpmath"}
    assert not required.keys() & {"fuser-ops", "pytest", "matplotlib", "hypothesis"}
    lent.link("fuser-ops", tmp_path)
    assert imported("numpy", tmp_path) == str(tmp_path / "numpy" / "__init__.py")
    assert imported("pytest", tmp_path) == "No module named 'pytest'"
    assert imported("fuser", tmp_path) == "No module named 'fuser'"
    distributions = importlib.metadata.distributions(path=[str(tmp_path)])
    assert {d.metadata["Name"].lower() for d in distributions} >= {"torch", "numpy", "networkx"}


def test_everything_is_lent_and_what_is_there_already_comes_first(tmp_path: Path) -> None:
    lent.lend(tmp_path)
    assert imported("_pytest", tmp_path) == sys.modules["_pytest"].__file__
    (tmp_path / "_pytest.py").touch()
    assert imported("_pytest", tmp_path) == str(tmp_path / "_pytest.py")


def test_the_folder_is_that_of_the_named_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent_to: list[tuple[str, ...]] = []
    monkeypatch.setattr(lent, "link", lambda *arguments: lent_to.append(arguments))
    monkeypatch.setattr(lent, "lend", lambda *arguments: lent_to.append(arguments))
    monkeypatch.chdir(tmp_path)
    lent.main([".venv-wheel", "fuser-ops"])
    lent.main([".venv-integrations"])
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    wheel, integrations = (
        tmp_path / name / "lib" / version / "site-packages"
        for name in (".venv-wheel", ".venv-integrations")
    )
    assert lent_to == [("fuser-ops", wheel), (integrations,)]
