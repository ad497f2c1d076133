"""Writes the table of messages from the sources of the library: ``make sentences``."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import sentences
from messages import TABLE, Message, messages

# From this likeness on, a text of the same kind and module is taken for a row's text reworded.
ALIKE = 0.35
# Words that say too little for a code.
SMALL = (
    "a an and are as at be been by for from got has have here if in is it its must of on one or s "
    "so than that the their them then there these they this to was were which with would"
)


def written(rows: Iterable[Message]) -> str:
    """The text of the table's file."""
    lines = [("code", "kind", "modules", "text")]
    lines += [(row.code, row.kind, " ".join(row.modules), row.text) for row in rows]
    return "".join("\t".join(line) + "\n" for line in lines)


def renewed(old: Collection[Message], found: Iterable[sentences.Sentence]) -> list[Message]:
    """The rows of ``found``, with the codes that these had in ``old``, where they had one.

    A code is kept by a sentence that is still there, in whichever module; by one with another kind
    and the same text; and by the sentence of the same kind and module that is most like a row
    which is gone. Others get a new code.
    """
    modules: dict[tuple[str, str], list[str]] = {}
    for sentence in found:
        modules.setdefault((sentence.kind, sentence.text), []).append(sentence.module)
    gone = {row.code: row for row in old}
    codes = {(row.kind, row.text): row.code for row in old if (row.kind, row.text) in modules}
    for code in codes.values():
        del gone[code]
    for likeness in (_same_text, _reworded):
        pairs = [
            (likeness(row, key, modules[key]), row.code, key)
            for row, key in itertools.product(gone.values(), modules.keys() - codes.keys())
        ]
        for ratio, code, key in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
            if ratio and code in gone and key not in codes:
                codes[key] = code
                del gone[code]
    words: dict[str, Counter[str]] = {}
    for (_, text), places in modules.items():
        words.setdefault(places[0], Counter()).update(set(_words(text)))
    taken = set(codes.values())
    for key, places in modules.items():
        if key not in codes:
            codes[key] = new_code(*key, places[0], words[places[0]], taken)
            taken.add(codes[key])
    rows = (Message(codes[key], key[0], tuple(places), key[1]) for key, places in modules.items())
    return sorted(rows, key=lambda row: (row.modules, row.code))


def _same_text(row: Message, key: tuple[str, str], modules: list[str]) -> float:
    return row.text == key[1]


def _reworded(row: Message, key: tuple[str, str], modules: list[str]) -> float:
    if row.kind != key[0] or not set(row.modules) & set(modules):
        return 0.0
    ratio = difflib.SequenceMatcher(None, _words(row.text), _words(key[1]), autojunk=False).ratio()
    return ratio if ratio >= ALIKE else 0.0


def new_code(kind: str, text: str, module: str, others: Counter[str], taken: set[str]) -> str:
    """A code that is not ``taken``: the name of the module, and words of the text's beginning.

    ``others`` counts the module's messages by their words, of which rare ones say the most.
    """
    path = Path(module)
    named = _words(path.parent.name if path.stem == "__init__" else path.stem)
    small = {*SMALL.split(), *named, "".join(named)}
    said = [word for word in re.findall(r"\w+", text) if word.lower() not in small]
    words = list(dict.fromkeys(word for word in _words(" ".join(said)) if word not in small))
    words = words or list(dict.fromkeys(_words(text)))
    for count in range(3, 9):
        rare = sorted(words[: 2 * count], key=lambda word: others[word])[:count]
        code = "-".join([*named, *sorted(rare, key=words.index)])
        if code not in taken:
            return code
    numbered = (f"{code}-{_words(kind)[0]}-{i}" for i in itertools.count(2))
    return next(code for code in numbered if code not in taken)


def _words(text: str) -> list[str]:
    parted = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", " ", text)
    return [word.lower() for word in parted.split()]


def changes(old: Iterable[Message], new: Iterable[Message]) -> Iterator[str]:
    """A line for each code that is new, gone or has another row."""
    before, after = ({row.code: row for row in rows} for rows in (old, new))
    for code in sorted(before.keys() | after.keys()):
        if before.get(code) != after.get(code):
            kind = "gone" if code not in after else "changed" if code in before else "new"
            yield f"{kind:8} {code}: {(after.get(code) or before[code]).text}"


def main() -> int:
    """Write the table from the sources, and print what has changed in it."""
    old = messages().values() if TABLE.is_file() else ()
    new = renewed(old, sentences.sentences())
    TABLE.write_text(written(new), encoding="utf-8")
    print("\n".join(changes(old, new)) or "The table of messages has not changed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
