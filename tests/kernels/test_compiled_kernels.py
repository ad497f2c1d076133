"""The record of compiled kernels: it is of these texts, and only a compilation writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compiled_kernels
import nvrtc
import pytest
from compiled_kernels import digest, entry_of, is_recorded, read, without_comments, write
from needs import needs_nvrtc
from nvrtc import CompileError, Resources
from scripts import refusal_by

from fuser.cuda import module

SOURCE = "#include <fuser/one.cuh>\n#include <fuser/other.cuh>\n__global__ void fuser_x() {}\n"
HEADER = "// A number.\nconstexpr int kOne = 1;  /* one */\n"
TEXT = r"""
#define A  1  // one
/* two
   lines */
auto s = "// no /* comment";   auto c = '"'; // "
int x = 1'000'000 / 2;
"""


def test_a_text_without_comments_has_its_strings_and_lines() -> None:
    assert without_comments(TEXT) == (
        "#define A 1\nauto s = \"// no /* comment\"; auto c = '\"';\nint x = 1'000'000 / 2;"
    )
    assert without_comments("int/**/x;") == "int x;"
    assert without_comments("#define A 1\n2") != without_comments("#define A 1 2")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of a source with two headers, of which one includes a third."""
    (tmp_path / "fuser").mkdir()
    (tmp_path / "x.cu").write_text(SOURCE)
    (tmp_path / "fuser" / "one.cuh").write_text(HEADER)
    (tmp_path / "fuser" / "other.cuh").write_text("#include <fuser/third.cuh>\n")
    (tmp_path / "fuser" / "third.cuh").write_text("constexpr int kThree = 3;\n")
    return tmp_path


def digest_of(sources: Path, symbols: tuple[str, ...] = ("fuser_x",)) -> str:
    return digest(sources / "x.cu", (9, 0), symbols, compiled_kernels.library_for((9, 0)))


COMMENTED = HEADER.replace("A number", "One").replace(" = ", "  =  ").replace("one */", "*/")
CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "the source": lambda f, _: (f / "x.cu").write_text(SOURCE.replace("{}", "{ return; }")),
    "a header": lambda f, _: (f / "fuser" / "one.cuh").write_text(HEADER.replace("1", "2")),
    "a header of a header": lambda f, _: (f / "fuser" / "third.cuh").write_text(HEADER),
    "options": lambda _, patch: patch.setattr(nvrtc, "CUPY_OPTIONS", ("-ftz=false",)),
    "the compiler": lambda _, patch: patch.setattr(nvrtc, "version", lambda library: (99, 0)),
}


@needs_nvrtc
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_what_is_compiled_changes_the_digest(
    sources: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = digest_of(sources)
    CHANGES[change](sources, monkeypatch)
    assert digest_of(sources) != before


@needs_nvrtc
def test_the_digest_depends_on_symbols_and_architecture(sources: Path) -> None:
    library = compiled_kernels.library_for((8, 0))
    of_others = [
        digest(sources / "x.cu", other, ("fuser_x",), library) for other in ((8, 0), (8, 9))
    ]
    assert len({digest_of(sources), digest_of(sources, ("fuser_x", "fuser_y")), *of_others}) == 4


@needs_nvrtc
def test_comments_spaces_and_folders_do_not_change_the_digest(
    sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = digest_of(sources)
    (sources / "fuser" / "one.cuh").write_text(COMMENTED)
    (sources / "x.cu").write_text("// New.\n\n" + SOURCE)
    assert digest_of(sources) == before
    moved = tmp_path_factory.mktemp("moved") / "sources"
    sources.rename(moved)
    assert digest_of(moved) == before


# -- the record ------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Source and architecture of each compilation; nothing is compiled."""
    calls: list[tuple[str, str]] = []

    def compiled(sources: Path, name: str, symbols: Any, capability: Any, *_: Any) -> Any:
        arch = module.arch_name(capability)
        calls.append((name, arch))
        return [Resources(symbol, arch, 10, 0, 0, 0) for symbol in symbols]

    monkeypatch.setattr(nvrtc, "compiled", compiled)
    return calls


@needs_nvrtc
def test_what_differs_from_the_record_is_compiled_and_recorded(
    tmp_path: Path, compilations: list[tuple[str, str]]
) -> None:
    record = tmp_path / "compiled.json"
    assert read(record) == {}
    assert write(["probe", "grouped_gemm"], record) == 5 + 24
    assert sorted(compilations) == sorted(
        [
            *(("probe", module.arch_name(capability)) for capability in nvrtc.CAPABILITIES),
            ("grouped_gemm", "sm_90a"),
        ]
    )
    assert is_recorded("probe", (8, 0), read(record))
    assert (
        read(record)["grouped_gemm"]["sm_90a"].items() >= {"kernels": 24, "registers": 10}.items()
    )
    compilations.clear()
    assert write(["probe", "grouped_gemm"], record) == 0
    assert compilations == []
    entries = read(record)
    entries["probe"]["sm_80"]["digest"] = "of another text"
    entries["gone"] = entries["probe"]
    record.write_text(json.dumps(entries))
    assert not is_recorded("probe", (8, 0), read(record))
    assert not is_recorded("permutation", (8, 0), read(record))
    assert write(["probe"], record) == 1
    assert compilations == [("probe", "sm_80")]
    assert set(read(record)) == {"probe", "grouped_gemm"}


@needs_nvrtc
@pytest.mark.parametrize(("spilled", "stack"), [(4, 0), (0, 8)])
def test_a_kernel_that_keeps_data_in_local_memory_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilled: int, stack: int
) -> None:
    resources = Resources("fuser_probe", "sm_80", 255, spilled, stack, 0)
    monkeypatch.setattr(nvrtc, "compiled", lambda *_: [resources])
    with pytest.raises(CompileError, match=r"local memory is used:\nsm_80 +255 registers"):
        write(["probe"], tmp_path / "compiled.json")
    assert not is_recorded("probe", (8, 0), read(tmp_path / "compiled.json"))


@needs_nvrtc
def test_a_source_that_changes_while_it_compiles_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, compilations: list[tuple[str, str]]
) -> None:
    digests = iter(("before", "after"))
    monkeypatch.setattr(compiled_kernels, "digest", lambda *_: next(digests))
    with pytest.raises(CompileError, match=r"probe\.cu or one of its headers has changed"):
        entry_of("probe", (8, 0))


@needs_nvrtc
def test_an_entry_is_what_nvrtc_found() -> None:
    (kernel,) = nvrtc.compiled(
        module.KERNELS,
        "probe",
        compiled_kernels.symbols_of("probe", (8, 0)),
        (8, 0),
        compiled_kernels.library_for((8, 0)),
    )
    entry = entry_of("probe", (8, 0))
    assert (entry["kernels"], entry["registers"]) == (1, kernel.registers)


def test_an_unknown_source_is_answered_with_a_sentence() -> None:
    assert "nothing" in refusal_by(compiled_kernels.main, ["nothing"])


def test_the_record_has_sources_that_there_are() -> None:
    assert set(read()) <= {path.stem for path in module.KERNELS.glob("*.cu")}
