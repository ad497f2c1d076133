"""Messages of fuser in tests, by their codes: docs/site/messages.tsv has each sentence once.

``pytest.raises(InputError, match=said("layers-parallel-mode-give", "Linear"))`` asserts the whole
sentence of that code. Values are given in the order of the sentence's ellipses, as these are
printed; None, and those that are left out, may be any text.
"""

from __future__ import annotations

import difflib
import re

from messages import messages


class Holds:
    """A value in a message that has these texts in it, in this order."""

    def __init__(self, *texts: object) -> None:
        self.pattern = ".*?".join(["", *(re.escape(str(text)) for text in texts), ""])


def holds(*texts: object) -> Holds:
    """A value for ``said`` of which only parts are known."""
    return Holds(*texts)


def said(code: str, *values: object) -> str:
    """A regular expression that the sentence of ``code`` matches if it has these values."""
    parts = _parts(code)
    if len(values) > len(parts) - 1:
        raise ValueError(f"{code} has {len(parts) - 1} values; got {values}.")
    holes = [_pattern(value) for value in values]
    holes += [".*?"] * (len(parts) - 1 - len(holes))
    fixed = [re.escape(part).replace("\\ ", r"\s+") for part in parts]
    if len(parts) > 1 and fixed[-2].endswith(r"\s+") and not fixed[-1] and holes[-1] == ".*?":
        fixed[-2], holes[-1] = fixed[-2].removesuffix(r"\s+"), r"(?:\s.*)?"  # an empty end
    pairs = zip(fixed, [*holes, ""], strict=True)
    return rf"(?s:\A{''.join(text for pair in pairs for text in pair)}\Z)"


def sentence(code: str, *values: object) -> str:
    """The sentence of ``code`` with these values, of which there must be all."""
    parts = _parts(code)
    if len(values) != len(parts) - 1:
        raise ValueError(f"{code} has {len(parts) - 1} values; got {values}.")
    return "".join(f"{part}{value}" for part, value in zip(parts, [*values, ""], strict=True))


def _parts(code: str) -> list[str]:
    """The texts of a sentence between its values."""
    if code not in messages():
        near = difflib.get_close_matches(code, messages(), n=5, cutoff=0.4)
        raise KeyError(f"docs/site/messages.tsv has no code {code!r}; like it are {near}.")
    return messages()[code].text.split("…")


def _pattern(value: object) -> str:
    if value is None:
        return ".*?"
    return value.pattern if isinstance(value, Holds) else re.escape(str(value))
