"""What compilers made is kept on disk: damaged files are made anew, once for all who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvrtc
import pytest
from emulator import compile as compilation
from needs import needs_emulator, needs_nvrtc

from fuser.cuda.module import KERNELS

RESOURCES = (10, 0, 0, 16)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept files, empty."""
    monkeypatch.setattr(compilation, "cache", lambda: tmp_path)
    return tmp_path


class Maker:
    """Makes a library, and a header beside it; counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        time.sleep(0.02)  # others ask meanwhile
        (folder / "x.so").write_bytes(b"\x7fELF of x")
        (folder / "x.gch").write_bytes(b"gpch of x")

    def file(self) -> Path:
        return compilation._cached("key", "x.so", self, "x.gch")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "garbage": lambda folder: (folder / "x.so").write_bytes(b"\xff" * 9),
    "a part": lambda folder: (folder / "x.so").write_bytes(b"\x7fELF"),
    "nothing": lambda folder: (folder / "x.so").write_bytes(b""),
    "no file": lambda folder: (folder / "x.so").unlink(),
    "garbage beside it": lambda folder: (folder / "x.gch").write_bytes(b"\xff" * 9),
    "no file beside it": lambda folder: (folder / "x.gch").unlink(),
    "the note of another version": lambda folder: (folder / "x.so.done").write_text(""),
    "a note of garbage": lambda folder: (folder / "x.so.done").write_bytes(b"\xff\x00"),
    "no note": lambda folder: (folder / "x.so.done").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_made_anew(kept: Path, damage: str) -> None:
    make = Maker()
    assert make.file() == make.file() == kept / "key" / "x.so"
    assert make.calls == 1
    DAMAGES[damage](kept / "key")
    for _ in range(2):
        assert make.file().read_bytes() == b"\x7fELF of x"
        assert (kept / "key" / "x.gch").read_bytes() == b"gpch of x"
        assert make.calls == 2


def test_a_library_that_a_process_has_loaded_stays_as_it_is(kept: Path) -> None:
    make = Maker()
    make.file().write_bytes(b"loaded")
    with (kept / "key" / "x.so").open("rb") as loaded:
        make.file()
        assert loaded.read() == b"loaded"


def test_a_library_that_does_not_compile_is_not_kept(kept: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "x.so").write_bytes(b"a part")
        raise compilation.KernelError("The kernels do not compile.")

    with pytest.raises(compilation.KernelError):
        compilation._cached("key", "x.so", fail)
    make = Maker()
    assert make.file().read_bytes() == b"\x7fELF of x"


def test_what_several_ask_for_at_once_is_made_once(kept: Path) -> None:
    make = Maker()
    together = threading.Barrier(4)

    def ask(_: int) -> bytes:
        together.wait(60)
        return make.file().read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {b"\x7fELF of x"}
    assert make.calls == 1


# -- NVRTC ------------------------------------------------------------------------


@pytest.fixture
def ask(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, ...]]:
    """The resources of a kernel, of a compiler that notes in ``compilations`` what it is given."""
    monkeypatch.setattr(nvrtc, "compilation_key", lambda *arguments: "key")
    monkeypatch.setattr(nvrtc, "_compile", compile_now)
    compilations.clear()

    def resources(symbol: str) -> tuple[int, ...]:
        (found,) = nvrtc.compiled(kept, "x", (symbol,), (9, 0), library=object())
        return found.registers, found.spill_bytes, found.stack_bytes, found.shared_bytes

    return resources


compilations: list[tuple[str, ...]] = []


def compile_now(path: Path, symbols: Sequence[str], *arguments: Any) -> dict[str, Any]:
    compilations.append(tuple(symbols))
    return dict.fromkeys(symbols, RESOURCES)


@pytest.mark.parametrize(
    "text",
    ["", '{"a": [10, 0', "\0\xff", "null", "[]", '{"a": [10, 0]}', '{"a": [10, 0, 0, "16"]}'],
    ids=["nothing", "a part", "garbage", "null", "a list", "another version", "texts"],
)
def test_damaged_resources_are_found_anew(
    kept: Path, ask: Callable[..., tuple[int, ...]], text: str
) -> None:
    assert ask("a") == ask("a") == RESOURCES
    assert compilations == [("a",)]
    (file,) = kept.glob("nvrtc-*.json")
    file.write_text(text, encoding="latin-1")
    for _ in range(2):
        assert ask("a") == RESOURCES
        assert compilations == [("a",)] * 2


def test_resources_that_two_find_at_once_are_both_kept(
    kept: Path, ask: Callable[..., tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)

    def compile_together(*arguments: Any) -> dict[str, Any]:
        together.wait(60)
        return compile_now(*arguments)

    monkeypatch.setattr(nvrtc, "_compile", compile_together)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, ("a", "b"))) == [RESOURCES] * 2
    assert len(compilations) == 2
    assert ask("a") == ask("b") == RESOURCES
    assert len(compilations) == 2


# -- clones of one machine -------------------------------------------------------------


@needs_emulator
def test_clones_whose_headers_are_elsewhere_share_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = compilation.cuda_include()
    assert there is not None
    elsewhere = tmp_path / "include"
    elsewhere.symlink_to(there)
    made = compilation._toolchain.__wrapped__
    before = made()
    monkeypatch.setattr(compilation, "cuda_include", lambda: elsewhere)
    assert made() == before


@needs_nvrtc
def test_clones_whose_nvrtc_is_elsewhere_share_resources(tmp_path: Path) -> None:
    library = nvrtc.libraries()[-1]
    elsewhere = SimpleNamespace(
        _name=str(tmp_path / Path(library._name).name), nvrtcVersion=library.nvrtcVersion
    )
    Path(elsewhere._name).symlink_to(library._name)
    path = KERNELS / "probe.cu"
    key = nvrtc.compilation_key(path, (9, 0), library)
    assert nvrtc.compilation_key(path, (9, 0), elsewhere) == key
    assert nvrtc.compilation_key(path, (8, 0), library) != key
