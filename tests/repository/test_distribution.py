"""The distribution: what the wheel and the source archive hold, the metadata, the release."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import installed
import pytest
import release
from paths import ROOT

import fuser

SETTINGS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
HOME = "https://host.invalid/owner/name"
LIBRARY = installed.files_below(ROOT / "fuser")
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
# What a build of the metadata alone needs.
SMALL = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fuser/version.py")


@dataclass(frozen=True)
class Distribution:
    """A wheel or a source archive: its files with their texts, and its metadata."""

    name: str
    files: dict[str, bytes]

    @property
    def metadata(self) -> Message:
        (text,) = (
            text
            for name, text in self.files.items()
            if re.fullmatch(r"[^/]+(\.dist-info/METADATA|/PKG-INFO)", name)
        )
        return Parser().parsestr(text.decode())


def built(kind: str, source: Path, out: Path) -> Distribution:
    """What the build backend makes of a tree, without a network."""
    out.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(out)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    path = out / run.stdout.splitlines()[-1]
    files: dict[str, bytes] = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist()}
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if (content := archive.extractfile(member)) is not None:
                    files[member.name] = content.read()
    return Distribution(path.name, files)


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("setuptools 77 or later reads the license of pyproject.toml.")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, without environments and what programs have left."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    left = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "out", "shared", "site"
    )
    shutil.copytree(ROOT, folder, ignore=left)
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Distribution:
    return built("wheel", tree, tree.parent / "wheel")


@pytest.fixture(scope="module")
def archive(tree: Path) -> Distribution:
    return built("sdist", tree, tree.parent / "archive")


def metadata_with(folder: Path, home: str) -> Message:
    """The metadata of a wheel, if the repository has that URL."""
    for name in SMALL:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    changed, count = re.subn(r'^repository = ".*"$', f'repository = "{home}"', SETTINGS, flags=re.M)
    assert count == 1
    (folder / "pyproject.toml").write_text(changed, encoding="utf-8")
    return built("wheel", folder, folder / "dist").metadata


def test_the_wheel_has_every_file_of_the_library_and_no_other(wheel: Distribution) -> None:
    of_library = {name for name in wheel.files if not name.startswith("fuser_ops-")}
    assert of_library == {f"fuser/{name}" for name in LIBRARY}
    kernels = [name for name in LIBRARY if name.endswith((".cu", ".cuh"))]
    assert len(kernels) > 40
    assert "py.typed" in LIBRARY
    others = {name.partition("/")[2] for name in wheel.files if name.startswith("fuser_ops-")}
    assert others == {"METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE"}
    assert wheel.name == f"fuser_ops-{fuser.__version__}-py3-none-any.whl"
    for name in LIBRARY:
        assert wheel.files[f"fuser/{name}"] == (ROOT / "fuser" / name).read_bytes(), name


def test_the_source_archive_has_what_a_build_needs_and_no_tests(archive: Distribution) -> None:
    names = {name.partition("/")[2] for name in archive.files}
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "PKG-INFO"}
    assert names >= needed | {f"fuser/{name}" for name in LIBRARY}
    rest = {
        name for name in names - needed if not name.startswith(("fuser/", "fuser_ops.egg-info"))
    }
    assert rest == {"setup.cfg"}


def test_a_wheel_built_from_the_source_archive_is_the_same(
    archive: Distribution, wheel: Distribution, tmp_path: Path
) -> None:
    for name, text in archive.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (unpacked,) = tmp_path.iterdir()
    again = built("wheel", unpacked, tmp_path / "dist")
    assert again.files == wheel.files


def test_the_metadata_is_complete(wheel: Distribution) -> None:
    said = wheel.metadata
    assert (said["Name"], said["Version"]) == (installed.DISTRIBUTION, fuser.__version__)
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert said["Author"] == "The fuser authors"
    assert said["Requires-Python"] == ">=3.10"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said["Summary"]
    assert said["Keywords"]
    classifiers = said.get_all("Classifier", [])
    assert classifiers == sorted(set(classifiers))
    # An SPDX expression takes their place, and the package index refuses both.
    assert not any(name.startswith("License ::") for name in classifiers)
    required = [line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == ["torch>=2.11", "networkx>=3.0", "numpy>=1.24"]


def test_no_requirement_names_the_other_project_that_is_called_fuser() -> None:
    for file in ("pyproject.toml", "forecast/pyproject.toml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.findall(r'"fuser(?:\[\w+\])?(?:[<>=~!].*)?"', text.split("[tool.", 1)[0]) == []


def test_urls_of_the_package_follow_from_one_that_pyproject_names(tmp_path: Path) -> None:
    said = metadata_with(tmp_path, HOME)
    version = fuser.__version__
    assert dict(url.split(", ") for url in said.get_all("Project-URL", [])) == {
        "Repository": HOME,
        "Documentation": f"{HOME}/blob/v{version}/README.md",
        "Changelog": f"{HOME}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{HOME}/issues",
    }
    description = str(said.get_payload())
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert f"![The plan of this model, drawn by plan.draw]({HOME}/raw/v{version}/" in description
    assert f"]({HOME}/blob/v{version}/docs/memory.md#activation-memory-budget)" in description
    assert f"({HOME}/actions/workflows/tests.yml)" in description
    assert description.count('pip install "fuser-ops[draw') == 3
    assert 'pip install ".' not in description


def test_without_a_url_nothing_is_invented(tmp_path: Path) -> None:
    said = metadata_with(tmp_path, "")
    assert said.get_all("Project-URL") is None
    assert str(said.get_payload()).strip() == (ROOT / "README.md").read_text("utf-8").strip()


def test_the_floors_are_the_oldest_releases_that_the_metadata_allows() -> None:
    names = "torch", "networkx", "numpy", "matplotlib"
    floors = {name: re.findall(rf'"{name}>=([\d.]+)"', SETTINGS)[0] for name in names}
    pins = dict(re.findall(r"^(\w+)==(.*)$", (ROOT / "constraints-floors.txt").read_text(), re.M))
    assert pins.keys() == floors.keys()
    for name, pin in pins.items():
        assert pin in (floors[name], f"{floors[name]}.0"), name


def test_every_tool_of_the_tests_is_pinned() -> None:
    pins = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    extras = SETTINGS.split("[project.optional-dependencies]")[1].split("\n[tool")[0]
    tools = (
        extras.split("\ntest = [")[1].split("\n# The libraries")[0] + extras.split("\ndev = ")[1]
    )
    names = set(re.findall(r'"([\w-]+)>=', tools)) | {"torch", "networkx", "numpy", "matplotlib"}
    build = re.findall(r"-c constraints.txt (build .*)$", (ROOT / "Makefile").read_text(), re.M)
    names |= set(build[0].split())
    assert names - pins == set()
    assert {"pytest", "ruff", "mypy", "twine"} <= names


def test_the_snippet_that_the_installed_wheel_runs_is_that_of_the_readme() -> None:
    code, plan = installed.readme_snippet()
    assert "fuser.Sequential(" in code
    assert plan.startswith("Plan of Sequential, 12.6 M parameters: training")
    installed.check_snippet()


def test_the_check_of_an_installed_wheel_sees_a_file_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / "fuser" / "plan"))
    with pytest.raises(AssertionError, match="fuser"):
        installed.check_files()
    monkeypatch.setattr(sys, "prefix", str(ROOT))
    monkeypatch.setattr(installed, "files_below", lambda folder: {folder.parent.name})
    monkeypatch.setattr(installed, "ROOT", Path("elsewhere"))
    with pytest.raises(AssertionError):
        installed.check_files()


# -- the release ------------------------------------------------------------------

FILES = {
    "fuser/version.py": '__version__ = "1.2.3"\n',
    "pyproject.toml": f'[tool.fuser]\nrepository = "{HOME}"\n',
    "CHANGELOG.md": (
        "# Changelog\n\n## [Unreleased]\n\n"
        "## [1.2.3] - 2026-01-02\n\n- New.\n\n## [1.2.2]\n\n- Old.\n"
    ),
    "CITATION.cff": "version: 1.2.3\ndate-released: 2026-01-02\n",
}


def refused(folder: Path, tag: str = "v1.2.3", home: str = HOME, **files: tuple[str, str]) -> str:
    """What the check of a release says, after a replacement in one of its files."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        old, new = files.get(Path(name).stem.lower(), ("", ""))
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
    return "\n".join(release.Release.of(folder).complaints(tag, home))


def test_a_release_in_which_all_agrees_can_be_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(tmp_path) == ""
    assert release.main(["check", "--tag", "v1.2.3", "--repository", HOME], tmp_path) == 0
    assert capsys.readouterr().out == "v1.2.3 can be published.\n"
    assert release.main(["notes"], tmp_path) == 0
    assert capsys.readouterr().out == "- New.\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tag": "v1.2.4"}, "The tag is 'v1.2.4', and fuser/version.py has 1.2.3."),
        ({"tag": "1.2.3"}, "The tag is '1.2.3'"),
        ({"changelog": ("- New.", "")}, r"CHANGELOG.md has nothing under \[1.2.3\]."),
        ({"changelog": (" - 2026-01-02", "")}, "CHANGELOG.md has the date '' for 1.2.3."),
        ({"changelog": ("2026-01-02", "today")}, "CHANGELOG.md has the date 'today' for 1.2.3."),
        ({"changelog": ("\n\n## [1.2.3]", "\n- Next.\n\n## [1.2.3]")}, "lines under .Unreleased."),
        ({"citation": ("1.2.3", "1.2.2")}, "CITATION.cff has 1.2.2 of 2026-01-02, and the release"),
        ({"citation": ("01-02", "01-03")}, "CITATION.cff has 1.2.3 of 2026-01-03"),
        ({"pyproject": (HOME, "")}, "pyproject.toml does not say where the repository is"),
        ({"home": f"{HOME}s"}, f"pyproject.toml has '{HOME}', and this is '{HOME}s'."),
    ],
)
def test_a_release_that_disagrees_is_refused_with_a_sentence(
    change: dict[str, str], said: str, tmp_path: Path
) -> None:
    sentences = refused(tmp_path, **change)
    assert re.fullmatch(f".*{said}.*", sentences), sentences


def test_the_release_of_this_repository_lacks_at_most_its_url(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = release.Release.of(ROOT)
    assert held.version == fuser.__version__
    home = held.repository or HOME
    url = "pyproject.toml does not say where the repository is: [tool.fuser]."
    unreleased = "CHANGELOG.md has lines under [Unreleased]."
    status = release.main(["check", "--tag", f"v{held.version}", "--repository", home])
    sentences = set(capsys.readouterr().out.splitlines())
    assert sentences <= {url, unreleased, f"v{held.version} can be published."}
    assert status == int(f"v{held.version} can be published." not in sentences)
    assert (url in sentences) is (not held.repository)
