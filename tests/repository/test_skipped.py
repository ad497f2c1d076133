"""Tests that a machine cannot run are skipped, and the summary says which and why."""

from __future__ import annotations

import importlib.util
import socket
import sys
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from paths import TESTS


def skipped(nodeid: str, reason: str) -> Any:
    """The report of a skipped test."""
    return SimpleNamespace(nodeid=nodeid, longrepr=("conftest.py", 1, f"Skipped: {reason}"))


def test_the_summary_has_a_line_for_each_thing_that_a_machine_lacks() -> None:
    spec = importlib.util.spec_from_file_location("conftest_of_tests", TESTS / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    lathe, ports = "needs a lathe: there is none.", "needs free ports: there are none."
    reports = [
        skipped("tests/a/test_two.py::test_x[1]", lathe),
        skipped("tests/a/test_two.py::test_x[2]", lathe),
        skipped("tests/b/test_one.py::test_y", lathe),
        skipped("tests/b/test_one.py::test_z", ports),
        skipped("tests/b/test_one.py::test_z", "has nothing to do"),
        SimpleNamespace(nodeid="tests/b/test_one.py::test_x", longrepr="an expected failure"),
    ]
    assert conftest.not_tested(reports) == [
        "3 skipped, of test_one.py, test_two.py: needs a lathe: there is none.",
        "1 skipped, of test_one.py: needs free ports: there are none.",
    ]


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert needs.why_no_compiler.__wrapped__() == (
        "there is no no-such-compiler; CXX may name another compiler."
    )
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(needs.sysconfig, "get_path", lambda name: "/no/such/folder")
    assert "Python.h" in needs.why_no_compiler.__wrapped__()


def test_a_machine_without_ports_skips_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    reason = needs.why_no_ports.__wrapped__()
    assert reason == "127.0.0.1 takes no connection: [Errno 1] Operation not permitted."
    monkeypatch.setattr(needs, "why_no_ports", lambda: reason)
    with pytest.raises(pytest.skip.Exception, match=r"^needs free ports: 127\.0\.0\.1 takes no"):
        needs.skip_without_ports()
