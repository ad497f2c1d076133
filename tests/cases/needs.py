"""What some tests need of a machine; where it is not there, they are skipped and say so.

pytest's summary has a line for each reason that begins with "needs".
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sysconfig
from pathlib import Path

import nvrtc
import pytest
from emulator import why_unavailable as why_no_emulator


@functools.cache
def why_no_compiler() -> str | None:
    """Why torch's Inductor compiles nothing for a CPU here, as a sentence; None if it does."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no {compiler}; CXX may name another compiler."
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there is no Python.h, which packages such as python3-dev bring."
    return None


@functools.cache
def why_no_ports() -> str | None:
    """Why processes cannot meet here, as a sentence; None if they can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        return f"127.0.0.1 takes no connection: {error}."
    return None


def _needs(what: str, reason: str | None) -> pytest.MarkDecorator:
    return pytest.mark.skipif(reason is not None, reason=f"needs {what}: {reason}")


needs_compiler = _needs("a C++ compiler", why_no_compiler())
needs_emulator = _needs("the emulator", why_no_emulator())
needs_nvrtc = _needs("NVRTC", nvrtc.why_unavailable())


def skip_without_ports() -> None:
    """Skip a test whose processes would not meet."""
    if (reason := why_no_ports()) is not None:
        pytest.skip(f"needs free ports: {reason}")
