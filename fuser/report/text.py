"""Text of plans: numbers with units, ranges, columns and wrapped lists."""

from __future__ import annotations

from collections.abc import Sequence


def span(ops: Sequence[int]) -> str:
    """A range of op indices as text: ``3`` or ``3-5``."""
    return str(ops[0]) if len(ops) == 1 else f"{ops[0]}-{ops[-1]}"


def format_bytes(count: float) -> str:
    """A number of bytes as text, such as ``516 B`` or ``4.1 kB``."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def format_time(microseconds: float) -> str:
    """A time as text, such as ``21.4 us`` or ``3.4 ms``."""
    return _scaled(microseconds, ("us", "ms", "s"), digits=1)


def format_flops(count: float) -> str:
    """A number of operations as text, such as ``8.4 M``; ``-`` for none."""
    return _scaled(count, ("", "k", "M", "G", "T")).strip() if count else "-"


def format_share(share: float) -> str:
    """A share as text of two digits, such as ``0.12%``; ``100%`` from 99.5% on."""
    percent = 100 * share
    return f"{percent:.2g}%" if percent < 99.5 else f"{percent:.0f}%"


def _scaled(value: float, units: tuple[str, ...], digits: int = 0) -> str:
    text = f"{value:.{digits}f} {units[0]}"
    for unit in units[1:]:
        if round(value, digits) < 1000:
            break
        value, digits = value / 1000, 1
        text = f"{value:.1f} {unit}"
    return text


def listed(names: Sequence[str]) -> str:
    """``1, 2 and 3``."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


def columns(rows: Sequence[tuple[str, ...]], *, left: int) -> list[str]:
    """Rows of cells as indented lines: the first ``left`` columns to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrapped(indent: str, words: list[str], width: int = 96) -> list[str]:
    """``words`` with commas between them, in lines of ``width`` that begin with ``indent``."""
    lines = [indent]
    for number, word in enumerate(words):
        piece = word + (", " if number + 1 < len(words) else "")
        if len(lines[-1]) + len(piece) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def quoted(text: str) -> str:
    """``text`` as a string of DOT."""
    # A label's own line breaks are written as a backslash and an n.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
