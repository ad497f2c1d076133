"""Packages of the environment that runs this, lent to another: torch takes minutes to install.

    PYTHON tests/lent.py .venv-wheel fuser-ops
    PYTHON tests/lent.py .venv-integrations

The first links what ``fuser-ops`` requires, and nothing else: a requirement that is missing in its
metadata is missing there too. The second lends all packages, after those of the environment itself.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement


def required_by(name: str) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that one requires without its extras, directly or not; not itself."""
    known: dict[str, importlib.metadata.Distribution] = {}
    left = [(name, "")]
    while left:
        name, extra = left.pop()
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                other = re.sub(r"[-_.]+", "-", requirement.name).lower()
                if other not in known:
                    known[other] = importlib.metadata.distribution(other)
                    left += [(other, extra) for extra in ("", *requirement.extras)]
    return known


def link(name: str, packages: Path) -> None:
    """Link into a folder of packages what a distribution requires."""
    for distribution in required_by(name).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():  # folders such as `nvidia` belong to several
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def lend(packages: Path) -> None:
    """Let an environment with this folder of packages import all that this one does."""
    own = sysconfig.get_path("purelib")
    (packages / "lent.pth").write_text(f"import site; site.addsitedir({own!r})\n")


def main(argv: Sequence[str]) -> None:
    """Lend to an environment what a distribution requires, or everything."""
    environment, *names = argv
    paths = {"base": environment, "platbase": environment}
    packages = Path(sysconfig.get_path("purelib", vars=paths)).absolute()
    for name in names:
        link(name, packages)
    if not names:
        lend(packages)


if __name__ == "__main__":
    main(sys.argv[1:])
