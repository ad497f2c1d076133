"""The test files that a change affects, and the times that a run prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import affected
import pytest
from affected import Imports, changed_files
from paths import TESTS

pytest_plugins = ["pytester"]

FILES = {
    "fuser/__init__.py": "from fuser.deep import deep as renamed, shallow\n",
    "fuser/deep/__init__.py": (
        "from fuser.deep import registry\n"
        "from fuser.deep.bottom import deep\n"
        "from fuser.deep.top import shallow\n"
        "__all__ = ['deep', 'registry', 'shallow']\n"
    ),
    "fuser/deep/bottom.py": "deep = 1\n",
    "fuser/deep/top.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fuser.deep.bottom import deep\n"
        "shallow = 2\n"
    ),
    "fuser/deep/registry.py": "known = {}\n",
    "fuser/sums.py": "from .deep import shallow\n",
    "fuser/cuda/__init__.py": "",
    "fuser/cuda/norms.py": "KERNEL = 'norms'\n",
    "fuser/cuda/kernels/norms.cu": "#include <fuser/rows.cuh>\n",
    "fuser/cuda/kernels/fuser/rows.cuh": "#include <fuser/bits.cuh>\n",
    "fuser/cuda/kernels/fuser/bits.cuh": "",
    "docs/page.md": "",
    "tests/conftest.py": "",
    "tests/cases/models.py": "import fuser.sums\n",
    "tests/plan/test_direct.py": "import fuser\nprint(fuser.renamed)\n",
    "tests/plan/test_helped.py": "from models import anything\n",
    "tests/plan/test_norms.py": "def test_x():\n    from fuser.cuda import norms\n",
    "tests/docs/test_documents.py": "",
    "tests/docs/test_page.py": "PAGE = 'docs/page.md'\n",
    "tests/repository/test_floors.py": "",
    "tests/gpu/test_gpu.py": "import fuser\nprint(fuser.renamed)\n",
}
READERS = "test_floors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "steps", "chosen"),
    [
        ("fuser/deep/bottom.py", 1, f"test_direct {READERS}"),  # renamed by a package
        ("fuser/deep/top.py", 1, READERS),
        ("fuser/deep/top.py", 3, f"test_helped {READERS}"),
        ("fuser/sums.py", 1, READERS),
        ("fuser/sums.py", 2, f"test_helped {READERS}"),
        ("fuser/deep/registry.py", 2, f"test_direct {READERS}"),
        ("tests/cases/models.py", 1, "test_helped"),
        ("tests/plan/test_direct.py", 0, "test_direct"),
        ("tests/gpu/test_gpu.py", 9, ""),
        ("fuser/cuda/kernels/norms.cu", 1, "test_norms"),
        ("fuser/cuda/kernels/fuser/bits.cuh", 1, "test_norms"),
        ("docs/page.md", 0, "test_documents test_page"),
        ("fuser/not_there_any_more.py", 2, READERS),
    ],
)
def test_tests_are_chosen_by_what_they_import(
    file: str, steps: int, chosen: str, root: Path
) -> None:
    files = Imports(root).tests([file], steps)
    assert {Path(path).stem for path in files} == set(chosen.split())


def test_a_change_of_what_all_tests_share_chooses_all(root: Path) -> None:
    assert len(Imports(root).tests(["docs/page.md", "tests/conftest.py"])) == 6


def test_a_file_counts_as_changed_if_it_differs_from_main_or_is_new(root: Path) -> None:
    def git(*arguments: str) -> None:
        names = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", "-C", str(root), *names, *arguments], check=True)

    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    git("checkout", "--quiet", "-b", "work")
    (root / "fuser/sums.py").write_text("committed = 1\n")
    git("commit", "--quiet", "--all", "--message=second")
    (root / "fuser/deep/top.py").write_text("edited = 1\n")
    (root / "fuser/new.py").write_text("")
    edited = ["fuser/deep/top.py", "fuser/new.py"]
    assert changed_files(None, root) == [*edited, "fuser/sums.py"]
    assert changed_files("HEAD", root) == edited


@pytest.fixture(scope="module")
def of_this_repository() -> Imports:
    """Reading all files takes seconds."""
    return Imports()


def test_the_imports_of_this_repository_are_found(
    of_this_repository: Imports,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imports = of_this_repository
    monkeypatch.setattr(affected, "Imports", lambda: imports)
    assert imports.imported_by("quantize_cases") >= {"emulator.backend", "fuser.formats"}
    near = imports.tests(["fuser/cuda/kernels/mxfp8.cu"])
    assert "tests/kernels/test_cuda_mxfp8.py" in near
    assert len(near) < sum(module.is_test for module in imports.modules.values()) / 2
    assert affected.main(["--since", "HEAD"]) == 0
    assert "changed files" in capsys.readouterr().err


def test_the_nearest_files_are_chosen_then_the_quickest_until_the_time_is_used() -> None:
    near = {"changed": 0, "slow": 1, "quick": 1, "far": 2, "unknown": 2}
    known = {"changed": 50.0, "slow": 20.0, "quick": 1.0, "far": 4.0}
    assert affected.within(near, 100, known) == ["changed", "far", "quick", "slow", "unknown"]
    assert affected.within(near, 60, known) == ["changed", "far", "quick"]
    assert affected.within(near, 52, known) == ["changed", "quick"]
    assert affected.within(near, 1, known) == ["changed"]
    assert affected.within(near, 0, {}) == sorted(near)


def test_a_change_of_any_op_runs_in_its_time_with_what_was_measured(
    of_this_repository: Imports,
) -> None:
    imports, known = of_this_repository, affected.known_seconds()
    for file in ("pointwise_ops.py", "normalization.py", "grouped_linear.py"):
        near = imports.nearest([f"fuser/basic_ops/{file}"])
        chosen = affected.within(near, affected.SECONDS, known)
        assert sum(known.get(path, 0.0) for path in chosen) <= affected.SECONDS
        assert len(chosen) > 40


def test_a_run_prints_the_seconds_of_folders_and_files(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makeini(f"[pytest]\nmarkers = sampled\npythonpath = {TESTS / 'cases'} {TESTS}\n")
    burn = "import subprocess, sys\ndef test_x():\n    subprocess.run([sys.executable, '-c', {}])\n"
    for file, code in {"a/test_slow": "'sum(range(10**8))'", "b/test_fast": "''"}.items():
        path = pytester.path / f"{file}.py"
        path.parent.mkdir()
        path.write_text(burn.format(code))
    run = pytester.runpytest_inprocess()
    run.assert_outcomes(passed=2)
    folders, files = (line for line in run.outlines if "by CPU seconds" in line)
    assert folders.startswith("Folders by CPU seconds: a ")
    assert files.startswith("Slowest files by CPU seconds: test_slow.py ")
    assert int(files.split()[6].strip(",")) >= 1
