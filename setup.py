"""The parts of the metadata that follow from README.md and from one URL in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def repository() -> str:
    """Where the repository is; "" if pyproject.toml does not say it."""
    # Python 3.10 has no parser of TOML.
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^repository = "(.*)"$', settings, re.M)[1]


def version() -> str:
    """The version, without an import of the library, which needs torch."""
    text = (ROOT / "fuser/version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.*)"$', text, re.M)[1]


def urls(home: str) -> dict[str, str]:
    """The URLs of the package, by the names that the package index knows."""
    if not home:
        return {}
    files = f"{home}/blob/v{version()}"
    return {
        "Repository": home,
        "Documentation": f"{files}/README.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def readme(home: str) -> str:
    """README.md with links that also lead somewhere from outside of the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not home:
        return text
    text = text.replace("# in a clone of this repository; for a CPU", "# a CPU")
    text = text.replace('pip install ".[', 'pip install "fuser-ops[')
    # A page of the repository's host, such as a workflow's, relative to the page of README.md.
    text = re.sub(r"\]\(\.\./\.\./", f"]({home}/", text)
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/raw/v{version()}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{home}/blob/v{version()}/", text)


setup(
    long_description=readme(repository()),
    long_description_content_type="text/markdown",
    project_urls=urls(repository()),
)
