"""Tests of this folder need a CUDA device; without one they are skipped, counted and explained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def why_skipped() -> str | None:
    """Why the tests here cannot run, None if they can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_skipped()
    if reason is None:
        return
    for item in items:
        # The hook gets the whole session's items, not this folder's alone.
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = why_skipped()
    folder = FOLDER.relative_to(terminalreporter.config.rootpath).as_posix()
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if report.nodeid.startswith(f"{folder}/")
    ]
    if reason is not None and skipped:
        tests = "1 test was" if len(skipped) == 1 else f"{len(skipped)} tests were"
        terminalreporter.write_line(f"{tests} skipped in {folder}: {reason}.")
