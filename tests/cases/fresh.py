"""Python programs in processes that have torch and nothing of fuser.

They are forked from one process, which has imported torch: that takes two of the three seconds of
``import fuser``. Where processes cannot be forked they start as others do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def python(
    arguments: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """What ``python`` does with arguments: ``-W action``, and then ``-c``, ``-m`` or a script.

    ``environment`` comes on top of that of this process.
    """
    words = [str(word) for word in arguments]
    variables = {**os.environ, **(environment or {})}
    where = str(folder or Path.cwd())
    if sys.platform != "linux":
        return subprocess.run(
            [sys.executable, *words], env=variables, cwd=where, capture_output=True, text=True
        )
    with tempfile.TemporaryDirectory() as made:
        outputs = [Path(made, name) for name in ("stdout", "stderr")]
        request = {"words": words, "environment": variables, "folder": where}
        status = _parent().ask({**request, "outputs": list(map(str, outputs))})
        printed = (path.read_text(encoding="utf-8", errors="replace") for path in outputs)
        return subprocess.CompletedProcess([sys.executable, *words], status, *printed)


class _Parent:
    """The process that has imported torch."""

    def __init__(self) -> None:
        without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=without,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def ask(self, request: dict[str, Any]) -> int:
        """Fork a process; its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


_parent = functools.cache(_Parent)


# -- in that process, and in those that are forked ------------------------------------------


def _serve() -> None:
    import torch  # noqa: F401

    if os.environ.get("FUSER_TEST_OTHER_SUMS"):
        import other_sums  # noqa: F401  processes add as that of the tests does

    gc.collect()
    gc.freeze()
    del sys.path[0]  # the folder of this file
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in iter(requests.readline, ""):
        child = os.fork()
        if child == 0:
            requests.close()
            answers.close()
            _be(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _be(request: dict[str, Any]) -> None:
    """Be the program, to its end."""
    status = 1
    try:
        for number, path in enumerate(request["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [os.path.abspath(path) for path in paths if path]
        status = _status_of(request["words"])
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status_of(words: list[str]) -> int:
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        del words[:2]
    try:
        if words[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        elif words[0] == "-m":
            sys.argv, sys.path[:0] = words[1:], [""]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = words, [str(Path(words[0]).parent)]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
