"""The list of slow files is right: its files exist, and a slow file outside it fails a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow_files import ALLOWED_SECONDS, SLOW_FILES, SLOW_SECONDS, unlisted

TESTS = Path(__file__).parent
pytest_plugins = ["pytester"]


def test_every_slow_file_exists() -> None:
    assert {path.name for path in TESTS.rglob("test_*.py")} >= SLOW_FILES


def test_a_file_is_allowed_more_than_what_puts_it_into_the_list() -> None:
    assert 0 < 2 * SLOW_SECONDS <= ALLOWED_SECONDS
    slow, limit = min(SLOW_FILES), ALLOWED_SECONDS
    seconds = {slow: 10 * limit, "test_new.py": limit + 1, "test_fast.py": limit - 1}
    assert unlisted(seconds) == {"test_new.py": limit + 1}


def test_a_run_with_a_slow_file_that_is_not_listed_fails_and_names_it(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    listed = (TESTS / "slow_files.py").read_text()
    listed = listed.replace(f"ALLOWED_SECONDS = {ALLOWED_SECONDS}", "ALLOWED_SECONDS = 0.0")
    slow = "def test_x():\n    assert sum(range(10**6))\n"
    pytester.makepyfile(
        slow_files=listed, other_sums="", test_new=slow, **{min(SLOW_FILES)[:-3]: slow}
    )
    run = pytester.runpytest_subprocess("--check-slow-files")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(passed=2)
    (named,) = (line for line in run.outlines if "put it into SLOW_FILES" in line)
    assert named.startswith("test_new.py took ")
