"""Messages of fuser in tests, by their codes: docs/site/messages.tsv has each sentence once.

``pytest.raises(InputError, match=said("layers-parallel-mode-give", "Linear"))`` asserts the whole
sentence of that code. Values are given in the order of the sentence's ellipses, as these are
printed; None, and those that are left out, may be any text.
"""

from __future__ import annotations

import difflib
import re

from messages import messages


class Said(str):
    """A regular expression that knows its code, which names the test of a parameter."""

    code: str


class Holds(tuple[str, ...]):
    """A value in a message that has these texts in it, in this order."""


def holds(*texts: object) -> Holds:
    """A value for ``said`` of which only parts are known."""
    return Holds(map(str, texts))


def said(code: str, *values: object) -> Said:
    """A regular expression that the sentence of ``code`` matches if it has these values."""
    parts = _parts(code, len(values))
    # The texts that must follow one another, each anywhere after the one before.
    runs = [parts[0]]
    given = [*values, *[None] * (len(parts) - 1 - len(values))]
    for part, value in zip(parts[1:], given, strict=True):
        if value is None:
            runs.append(part)
        elif isinstance(value, Holds):
            runs += [*value, part]
        else:
            runs[-1] += f"{value}{part}"
    if len(runs) > 1 and not runs[-1]:
        runs[-2] = runs[-2].rstrip()  # a value at the end may be empty
    first, *others = (re.escape(run).replace("\\ ", r"\s+") for run in runs)
    # As in fnmatch: what is found first needs no other try.
    tries = [rf"(?=(?P<g{i}>.*?{run}))(?P=g{i})" for i, run in enumerate(others[:-1])]
    pattern = "".join([first, *tries, *(f".*{last}" for last in others[-1:])])
    result = Said(rf"(?s:\A{pattern}\Z)")
    result.code = code
    return result


def sentence(code: str, *values: object) -> str:
    """The sentence of ``code`` with these values, of which there must be all."""
    parts = _parts(code, len(values))
    if len(values) != len(parts) - 1:
        raise ValueError(f"{code} has {len(parts) - 1} values; got {values}.")
    return "".join(f"{part}{value}" for part, value in zip(parts, [*values, ""], strict=True))


def _parts(code: str, count: int) -> list[str]:
    """The texts of a sentence between its values, of which at most ``count`` are given."""
    if code not in messages():
        near = difflib.get_close_matches(code, messages(), n=5, cutoff=0.4)
        raise KeyError(f"docs/site/messages.tsv has no code {code!r}; like it are {near}.")
    parts = messages()[code].text.split("…")
    if count > len(parts) - 1:
        raise ValueError(f"{code} has {len(parts) - 1} values; got {count}.")
    return parts
