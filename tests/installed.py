"""Checks of the installed wheel, in an environment that has nothing else: `make wheel`.

    PYTHON-OF-THAT-ENVIRONMENT -I tests/installed.py

``-I`` keeps the repository out of the path of imports. README.md is read beside this file.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "fuser-ops"
COMMANDS = {
    "doctor": "fuser runs here, ",
    "plan llama3-8b --device h200": "Plan of llama3-8b after fuser.convert(model), ",
    "demo --steps 3 --layers 1 --sample-bytes 4": "\nThis took ",
}


def files_below(folder: Path) -> set[str]:
    """The files of the library in a folder, without what Python compiles."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def readme_snippet() -> tuple[str, str]:
    """The first Python of README.md, and what README.md says that it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code, after = re.split(r"^```\n", text.split("\n```python\n", 1)[1], maxsplit=1, flags=re.M)
    return code, after.split("\n```\n", 2)[1] + "\n"


def check_files() -> None:
    """The library that is imported is the installed one, and complete."""
    import fuser

    installed = Path(fuser.__file__).parent
    assert installed.is_relative_to(sys.prefix), installed
    assert files_below(installed) == files_below(ROOT / "fuser")
    assert importlib.metadata.version(DISTRIBUTION) == fuser.__version__


def check_snippet() -> None:
    """The first code of README.md prints the plan that README.md has."""
    code, plan = readme_snippet()
    names: dict[str, Any] = {"__name__": "snippet"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape
    if names["x"].device.type == "cpu":
        assert printed.getvalue() == plan, printed.getvalue()


def check_commands() -> None:
    """The commands of the library run in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        for command, words in COMMANDS.items():
            run = subprocess.run(
                [sys.executable, "-m", "fuser", *command.split()],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            assert run.returncode == 0, run.stdout + run.stderr
            assert words in run.stdout, run.stdout


def main() -> int:
    """Run all checks; returns the exit status."""
    check_files()
    check_snippet()
    check_commands()
    print(f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} runs where it is installed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
