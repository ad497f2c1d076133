"""Sources of kernels: fuser's own by name, a user's by path, and the files that those include."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from fuser.errors import InputError, StateError

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


def checked_source(path: Path) -> Path:
    """The absolute path of a user's ``.cu``; InputError if it is not there, or is another file."""
    resolved = path.resolve()
    if resolved.suffix != ".cu" or not resolved.is_file():
        fault = "is not there" if resolved.suffix == ".cu" else "is not a .cu file"
        raise InputError(f"The source of a kernel is a .cu file; {resolved} {fault}.")
    return resolved


def shown(module: str | Path) -> str:
    """A source in messages, as compilers name it."""
    return str(module) if isinstance(module, Path) else f"fuser/cuda/kernels/{module}.cu"


def source_text(root: Path, module: str | Path, headers: Iterable[Path] = ()) -> str:
    """The text of a ``.cu``; a line before it lets compiler errors name the file.

    ``root`` is the folder of fuser's own sources; ``headers`` of users are included first.
    StateError if there is no such file.
    """
    path = module if isinstance(module, Path) else root / f"{module}.cu"
    if not path.is_file():
        known = ", ".join(sorted(other.stem for other in root.glob("*.cu"))) or "none"
        hint = "" if isinstance(module, Path) else f"; the kernel sources are {known}"
        raise StateError(f"There is no {shown(module)}{hint}.")
    included = "".join(f'#include "{header}"\n' for header in headers)
    return f'{included}#line 1 "{shown(module)}"\n{path.read_text(encoding="utf-8")}'


def own_files(top: Path) -> tuple[Path, ...]:
    """A user's source or header, and the files that it includes, theirs too.

    They are looked for beside the file that includes them and beside ``top``; others, such as
    ``<fuser/packed.cuh>``, are not the user's.
    """
    files = {top: None}
    waiting = [top]
    while waiting:
        path = waiting.pop()
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            there = next(
                (f for folder in (path.parent, top.parent) if (f := folder / name).is_file()), None
            )
            if there is not None and there.resolve() not in files:
                files[there.resolve()] = None
                waiting.append(there.resolve())
    return tuple(files)


def own_options(tops: Iterable[Path]) -> tuple[str, ...]:
    """Compiler options of users' files: their folders, and a digest of all that they include.

    CuPy's cache on disk is keyed by the source and the options: the digest makes an edited header
    a new key.
    """
    digest = hashlib.sha256()
    folders: dict[str, None] = {}
    for top in tops:
        folders[f"-I{top.parent}"] = None
        for path in own_files(top):
            contents = path.read_bytes()
            digest.update(f"{path}\0{len(contents)}\0".encode())
            digest.update(contents)
    return (*folders, f"-DFUSER_OWN_SOURCES={digest.hexdigest()}") if folders else ()
