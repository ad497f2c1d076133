"""Messages of the library: their table, their cures, and how tests assert them by a code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cures
import messages
import pytest
import sentences
import write_messages
from paths import ROOT
from said import holds, said, sentence

FOUND = list(sentences.sentences())


def test_every_kind_of_message_is_listed() -> None:
    kinds = {message.kind for message in FOUND}
    assert {"InputError", "InputTypeError", "StateError", "warning", "refusal"} <= kinds
    packages = {message.module.partition("/")[0] for message in FOUND}
    assert packages <= sentences.TITLES.keys()


def test_each_raise_of_an_own_error_with_a_text_is_listed() -> None:
    listed = {(message.module, message.text) for message in FOUND}
    raised = set()
    for path in sorted(sentences.FUSER.rglob("*.py")):
        module = path.relative_to(sentences.FUSER).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = node.exc.args[0]
                own = ast.unparse(node.exc.func) in ("InputError", "InputTypeError", "StateError")
                if own and isinstance(text, ast.Constant) and " " in text.value:
                    raised.add((module, " ".join(text.value.split())))
    assert len(raised) > 20
    assert raised <= listed


def test_every_message_says_its_cure_or_has_one_in_the_table() -> None:
    without = [m for m in FOUND if not m.says_cure and m.cure is None]
    assert not without, "\n".join(f"{m.module}: {m.text}" for m in without)


def test_every_cure_is_of_a_message() -> None:
    codes = {m.code for m in FOUND if not m.says_cure}
    assert cures.CURES.keys() <= codes
    others = [m for m in FOUND if not m.says_cure and m.code not in cures.CURES]
    for place, kind, cure in cures.CURES_OF_PLACES:
        assert any(
            m.cure == cure and m.module.startswith(place) and m.kind.startswith(kind)
            for m in others
        ), (place, kind)


def test_the_table_of_messages_is_that_of_the_sources() -> None:
    rows = write_messages.renewed(messages.messages().values(), FOUND)
    difference = "\n".join(write_messages.changes(messages.messages().values(), rows))
    assert not difference, f"Run `make sentences`, which writes messages.tsv again:\n{difference}"
    assert messages.TABLE.read_text(encoding="utf-8") == write_messages.written(rows)


def test_a_code_is_kept_by_a_sentence_that_is_reworded_or_moved() -> None:
    def sentence(text: str, module: str = "op.py", kind: str = "InputError") -> sentences.Sentence:
        return sentences.Sentence(kind, text, module)

    def codes(*found: sentences.Sentence) -> dict[str, str]:
        return {row.text: row.code for row in write_messages.renewed(rows, found)}

    rows: list[messages.Message] = []
    shape, rank = "… got shape …; it takes …, e.g. a vector.", "… has no rank …: give another."
    rows = write_messages.renewed([], [sentence(shape), sentence(rank)])
    code = codes(sentence(shape))[shape]
    assert code == "op-shape-takes-e"
    other = "… got a tensor of shape …; it takes …, such as a vector."
    assert codes(sentence(other), sentence(rank))[other] == code
    assert codes(sentence(shape, "fused.py"))[shape] == code
    assert codes(sentence(shape, kind="InputTypeError"))[shape] == code
    # Another module's sentence, or one that is not like it, has a code of its own.
    assert codes(sentence(other, "fused.py"))[other] != code
    assert codes(sentence("… got dtype …; it is float32."))["… got dtype …; it is float32."] != code
    both = codes(sentence(shape), sentence(other))
    assert both[shape] == code != both[other]


def test_every_code_that_a_test_names_is_in_the_table() -> None:
    named = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "from said import" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "said",
                "sentence",
                "pattern_of",
            ):
                code = node.args[0] if node.args else None
                if isinstance(code, ast.Constant) and path.name != Path(__file__).name:
                    said(code.value, *[None for _ in node.args[1:]])  # or it raises
                    named += 1
    assert named > 300


def test_a_sentence_of_two_modules_has_one_row() -> None:
    found = [sentences.Sentence("refusal", "it has hooks", name) for name in ("a.py", "b.py")]
    (row,) = write_messages.renewed([], found)
    assert row.modules == ("a.py", "b.py")


def test_a_sentence_is_asserted_by_its_code_and_values() -> None:
    text = "ReLU got shape (3,); it takes 7, e.g. a vector."
    row = messages.Message(
        "op-shape", "InputError", ("op.py",), "… got shape …; it takes …, e.g. a vector."
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(messages.messages(), row.code, row)
        for values in ((), ("ReLU",), (None, (3,), 7), (holds("R", "U"),)):
            assert re.search(said("op-shape", *values), text), values
        for values in (("GELU",), (None, (3,), 1), ("Re",), (holds("U", "R"),)):
            assert not re.search(said("op-shape", *values), text), values
        assert not re.search(said("op-shape"), f"{text} More.")
        assert sentence("op-shape", "ReLU", (3,), 7) == text
        with pytest.raises(ValueError, match="op-shape has 3 values"):
            said("op-shape", 1, 2, 3, 4)
        with pytest.raises(ValueError, match="op-shape has 3 values"):
            sentence("op-shape", 1)
        with pytest.raises(KeyError, match=r"no code 'op-shap'; like it are .*'op-shape'"):
            said("op-shap")


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("Linear got 3 weights; it takes one for each group.", "it takes one for each group."),
        ("The op has a hook: remove it, or call the module.", "remove it, or call the module."),
        ("A file is missing. Install fuser again.", "Install fuser again."),
        ("Router takes x on a GPU; got one on a CPU.", "Router takes x on a GPU;"),
        ("Linear got 3 weights for 4 groups.", None),
        ("The keep of the model has no linear.", None),
        ("Stage 2 takes no operand; got one.", None),
    ],
)
def test_the_cure_of_an_error_is_the_clause_that_says_what_to_do(
    text: str, cure: str | None
) -> None:
    message = sentences.Sentence("InputError", text, "new.py")
    assert [clause for clause, is_cure in message.clauses if is_cure] == ([cure] if cure else [])
    assert message.cure is None


def test_a_rule_in_a_refusal_is_no_cure() -> None:
    assert not sentences.Sentence("refusal", "a chain takes one gate.", "new.py").says_cure


def test_a_message_has_an_ellipsis_for_each_value() -> None:
    (text,) = {
        message.text
        for message in FOUND
        if message.module == "basic_ops/lora_adapters.py" and "dropout=" in message.text
    }
    assert text == "… got dropout=…; it is between 0 and 1."
