"""What a release needs: `make release-check` before a tag is published, `make release-notes`.

    python tests/release.py check --tag v0.2.0 --repository https://HOST/OWNER/NAME
    python tests/release.py notes

Reads files alone, so that any Python can run it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Release:
    """What the files of a repository say about the release that it holds.

    ``dates`` are those of the sections of the changelog, "" where a section has none.
    """

    version: str
    repository: str
    dates: dict[str, str]
    notes: dict[str, str]
    cited: tuple[str, str]

    @classmethod
    def of(cls, root: Path) -> Release:
        """Read the files below ``root``."""
        texts = {
            name: (root / name).read_text(encoding="utf-8")
            for name in ("fuser/version.py", "pyproject.toml", "CHANGELOG.md", "CITATION.cff")
        }
        sections = re.split(r"^## \[(.+?)\](?: - (.*))?\n", texts["CHANGELOG.md"], flags=re.M)
        titles, dates, notes = sections[1::3], sections[2::3], sections[3::3]
        return cls(
            version=one(r'^__version__ = "(.*)"$', texts["fuser/version.py"]),
            repository=one(r'^repository = "(.*)"$', texts["pyproject.toml"]),
            dates=dict(zip(titles, (date or "" for date in dates), strict=True)),
            notes=dict(zip(titles, (text.strip() for text in notes), strict=True)),
            cited=(
                one(r"^version: (.*)$", texts["CITATION.cff"]),
                one(r"^date-released: (.*)$", texts["CITATION.cff"]),
            ),
        )

    def complaints(self, tag: str, repository: str) -> list[str]:
        """A sentence for each reason not to publish ``tag`` from ``repository``."""
        result = []
        if tag != f"v{self.version}":
            result.append(f"The tag is {tag!r}, and fuser/version.py has {self.version}.")
        if not self.notes.get(self.version):
            result.append(f"CHANGELOG.md has nothing under [{self.version}].")
        date = self.dates.get(self.version, "")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            result.append(f"CHANGELOG.md has the date {date!r} for {self.version}.")
        elif self.cited != (self.version, date):
            result.append(
                f"CITATION.cff has {' of '.join(self.cited)}, and the release is {self.version} of "
                f"{date}."
            )
        if self.notes.get("Unreleased"):
            result.append("CHANGELOG.md has lines under [Unreleased].")
        if not self.repository:
            result.append("pyproject.toml does not say where the repository is: [tool.fuser].")
        elif self.repository != repository:
            result.append(f"pyproject.toml has {self.repository!r}, and this is {repository!r}.")
        return result


def one(pattern: str, text: str) -> str:
    """What the only match of a pattern with a group has in it."""
    (value,) = re.findall(pattern, text, re.M)
    return str(value)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("notes", help="print the changelog of this version")
    check = commands.add_parser("check", help="say what is missing for a release")
    check.add_argument("--tag", required=True)
    check.add_argument("--repository", required=True, help="where the tag was pushed")
    options = parser.parse_args(argv)
    release = Release.of(root)
    if options.command == "notes":
        print(release.notes[release.version])
        return 0
    complaints = release.complaints(options.tag, options.repository)
    print("\n".join(complaints) or f"{options.tag} can be published.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
