"""Transformer Engine's import paths: what programs find, what they do not, and what is counted."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fresh import python
from said import said

import fuser
from fuser.te import import_paths


def run(code: str, **environment: str) -> str:
    """The output of Python code in a process of its own."""
    done = python(["-c", textwrap.dedent(code)], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", import_paths.SOURCES)
def test_each_path_has_the_names_of_its_sources(path: str) -> None:
    for source in import_paths.SOURCES[path]:
        module = importlib.import_module(source)
        assert module.__all__
        for name in module.__all__:
            assert hasattr(module, name), (source, name)


def test_programs_find_modules_classes_and_the_version() -> None:
    output = run(
        """
        import fuser.te
        fuser.te.install()
        fuser.te.install()
        import transformer_engine, transformer_engine.pytorch as te
        from transformer_engine.common import recipe
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, check_mxfp8_support
        from transformer_engine.pytorch.ops import BasicLinear, Sequential
        import transformer_engine.pytorch.ops.basic as basic
        import importlib.metadata, importlib.util
        assert transformer_engine.pytorch is te
        assert te.Linear is not fuser.Linear and issubclass(te.Linear, fuser.modules.Linear)
        assert te.ops.Sequential is Sequential is fuser.Sequential
        assert issubclass(BasicLinear, fuser.BasicLinear) and basic.BasicLinear is BasicLinear
        assert recipe.MXFP8BlockScaling is fuser.recipe.MXFP8BlockScaling
        assert isinstance(fuser.recipe.DelayedScaling(), recipe.DelayedScaling)
        assert not isinstance(fuser.recipe.MXFP8BlockScaling(), recipe.DelayedScaling)
        assert recipe.DelayedScaling(params_dtype=None).margin == 0
        assert importlib.metadata.version("transformer-engine") == transformer_engine.__version__
        assert importlib.util.find_spec("transformer_engine.pytorch") is not None
        assert not FP8GlobalStateManager.is_fp8_enabled()
        with te.autocast(recipe=recipe.MXFP8BlockScaling()):
            assert FP8GlobalStateManager.is_fp8_enabled()
            assert FP8GlobalStateManager.get_fp8_recipe() == recipe.MXFP8BlockScaling()
        assert check_mxfp8_support()[0]
        import transformer_engine_torch as tex
        assert te.MXFP8Quantizer(tex.DType.kFloat8E5M2)
        assert te.get_cpu_offload_context()
        print(fuser.te.missing())
        """
    )
    assert output.strip() == "{}"


def test_names_that_are_not_here_raise_and_are_counted() -> None:
    output = run(
        """
        import fuser.te
        fuser.te.install()
        import transformer_engine.pytorch as te
        for _ in range(2):
            assert not hasattr(te, "cpp_extensions")
        try:
            import transformer_engine.pytorch.ep
        except ImportError:
            pass
        try:
            from transformer_engine.pytorch.ops.basic.grouped_linear import OUTPUT_BUFFER_KEY
        except ImportError:
            print(fuser.te.missing())
        assert not hasattr(te, "layers") and not hasattr(te, "__wrapped__")
        """
    )
    counted = eval(output)
    assert counted["transformer_engine.pytorch.cpp_extensions"] == 2
    assert counted["transformer_engine.pytorch.ep"] == 1
    assert "transformer_engine.pytorch.ops.basic.grouped_linear" in counted
    assert "transformer_engine.pytorch.__wrapped__" not in counted


def test_all_names_of_a_path_are_imported_by_a_star() -> None:
    run(
        """
        import fuser.te
        fuser.te.install()
        from transformer_engine.pytorch import *
        from transformer_engine.pytorch.optimizers import *
        assert issubclass(Linear, fuser.modules.Linear) and FusedAdam and DotProductAttention
        """
    )


def test_the_real_library_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine.py").write_text("REAL = True\n")
    output = run(
        """
        import fuser
        import transformer_engine
        assert transformer_engine.REAL
        try:
            fuser.te.install()
        except fuser.StateError as error:
            print(error)
        assert transformer_engine.REAL
        """,
        PYTHONPATH=f"{tmp_path}:{Path(fuser.__file__).parents[1]}",
    )
    assert output.startswith("fuser.te.install: the real transformer_engine has been imported")


def test_no_file_is_named_as_the_real_library() -> None:
    root = Path(fuser.__file__).parent
    assert not [path for path in root.rglob("*") if path.name.startswith("transformer_engine")]


def test_another_version_is_told_if_asked_for_at_first() -> None:
    output = run(
        """
        import fuser.te
        fuser.te.install("2.4.0")
        import transformer_engine
        assert transformer_engine.__version__ == "2.4.0"
        try:
            fuser.te.install("2.5.0")
        except fuser.InputError as error:
            print(error)
        fuser.te.install("2.4.0")
        """
    )
    assert "is installed as '2.4.0' already" in output


def test_the_environment_installs_it() -> None:
    code = "import fuser, transformer_engine; print(transformer_engine.__name__)"
    assert run(code, FUSER_AS_TE="1").strip() == "transformer_engine"
    with pytest.raises(AssertionError, match="No module named 'transformer_engine'"):
        run(code, FUSER_AS_TE="0")


def test_the_command_runs_a_script_and_says_what_was_missing(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\nimport helper\nimport transformer_engine.pytorch as te\n"
        "print(__name__, sys.argv[1:], te.Linear.__name__, hasattr(te, 'userbuffers'))\n"
    )
    (tmp_path / "helper.py").write_text("")
    command = [sys.executable, "-m", "fuser", "te", "--missing", "--", str(script), "--a", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "__main__ ['--a', '1'] Linear False"
    assert done.stderr.split() == ["1", "transformer_engine.pytorch.userbuffers"]


def test_an_error_of_a_script_has_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import transformer_engine.pytorch as te\n\nte.Linear(8, 8, bias=3, no=1)\n")
    done = python(["-m", "fuser", "te", script])
    assert done.returncode == 1
    assert 'script.py", line 3' in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.py"], said("import-paths-python-script-not", "'nothing.py'")),
        (["-m"], said("import-paths-python-m-module")),
    ],
)
def test_a_script_that_is_not_there_is_refused(arguments: Any, sentence: str) -> None:
    with pytest.raises(fuser.InputError, match=sentence):
        import_paths.program(arguments)
