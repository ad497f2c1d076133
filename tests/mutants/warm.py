"""Run pytest again and again in children of one process, which has imported what takes seconds.

    python tests/mutants/warm.py torch numpy

Each line of the standard input is a request, as JSON: pytest's arguments, the file that gets what
is printed, and the seconds that it may take. The answer is a line with the exit status, or null if
it did not end. What a child imports, fuser and the tests among it, no other child has imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import types


def serve(preloaded: list[str]) -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks says when it is over
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    # As `python -m pytest` has it: not the folder of this file, and no main module that processes
    # which tests spawn would import.
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = types.ModuleType("__main__")
    for name in preloaded:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if not child:
            requests.close()
            answers.close()
            run(request["arguments"], request["output"])
        code = waited(child, request["seconds"])
        print(json.dumps(code), file=answers, flush=True)


def run(arguments: list[str], output: str) -> None:
    """Be pytest."""
    code = 3  # pytest's internal error
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        sys.argv = ["pytest", *arguments]
        pytest = importlib.import_module("pytest")
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def waited(child: int, seconds: float) -> int | None:
    """Its exit status; whatever it has started, and itself after so many seconds, is killed."""
    end = time.monotonic() + seconds
    ended = status = 0
    try:
        while not ended and time.monotonic() < end:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
    finally:  # also if this process is told to end
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    serve(sys.argv[1:])
