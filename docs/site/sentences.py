"""Directive ``sentences``: each error, refusal and warning with its cure, from the sources."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cures import CURES, CURES_OF_PLACES
from messages import code_of

FUSER = Path(__file__).resolve().parents[2] / "fuser"
ERRORS = ("Error", "Untraceable", "Unavailable")
# Functions of these names return why something is not done, or None.
REASONS = ("refus", "why", "reason", "unsupported", "does_not")
# So do those whose docstrings begin so.
SAYS_REASON = r"^(?:The reason|The refusal|Why)\b|^[^\n]*, as a sentence"
TITLES = {
    "basic_ops": "Ops",
    "chain.py": "Stages of chains",
    "communication": "Collectives",
    "conversion": "fuser.convert",
    "cuda": "Kernels",
    "distributed": "Sharded parameters",
    "doors.py": "Doors of the core",
    "errors.py": "Arguments and names",
    "formats.py": "Formats",
    "functional": "Routing and products",
    "fused_ops": "Fusions",
    "gemm": "Matrix products",
    "inspection": "fuser.inspect",
    "integrations": "Other libraries",
    "__main__.py": "Command line",
    "modules": "Layers",
    "moe": "Experts",
    "op": "Base classes of ops",
    "plan": "Plans",
    "precision": "Recipes in contexts",
    "recipe.py": "Recipes",
    "reference": "Reference kernels",
    "report": "Pictures and reports",
    "runtime": "Calls, graphs and recordings",
    "sequential.py": "Sequential",
    "specs.py": "Inputs",
    "te": "Names of te.ops",
    "tensors": "Quantized tensors",
    "testing": "fuser.testing",
    "wrapper_tensor.py": "Quantized tensors",
}


# Imperatives with which a clause of advice begins, or goes on after a comma, "or", "and" or "then".
VERBS = (
    "add|ask|bind|build|call|capture|change|check|choose|clone|compile|compute|convert|copy|count|"
    "dequantize|enter|export|freeze|gather|give|implement|initialise|install|keep|leave|load|look|"
    "make|merge|move|multiply|name|pad|pass|pip|put|quantize|reduce|register|remove|rename|replace|"
    "return|run|save|set|shard|share|start|take|undo|update|use|wait|write"
)
ADVICE = re.compile(
    rf"^(?:{VERBS.title()}|{VERBS})\b(?! has\b| is\b)|(?:, |\bor |\band |\bthen )(?:{VERBS})\b"
)
# How errors state what is accepted: "it takes one for each of its 8 groups".
RULES = (
    r"(?<!would )\btakes? (?!no\b)",
    r"\bmust (?:not )?(?:be|have|keep|implement|cover|end|quantize|write|return)\b",
    r"^it (?:has|needs|returns|is (?!on |at |an? …))(?!no\b|none\b)",
    r"^there are\b|^an? [\w ]+ is\b|^each row has\b|\bits linears are\b|\bplans a\b|e\.g\. ",
    r"^the (?:… is|(?:most is|formats are|elements of \w+ are)\b)",
    r"^the (?:recipes that accept one|accepted values) are\b",
    r"^a (?:graph|CUDA graph|pipeline) (?:reads|returns|runs|adds)\b",
    r"\b(?:at most|at least|unless|or more|or later|or less|one for each|is one of)\b",
    r"\bonly (?:supported value|accepted value|element type|activations)\b",
    r"\bneeds? (?:another|a contiguous|a capture|\w+=)|\bis initialised after\b|\breturns \(",
    r"\b(?:is|are) (?:an? )?(?:True or False|named by|made of|drawn as|sharded along|float32)\b",
    r"\b(?:is|are) an? (?:sequence|dict|list|tuple|function) (?:of|or)\b",
)
RULE = re.compile("|".join(RULES))
CLAUSE = re.compile(r"(?<=[.;:])(?<!e\.g\.) ")


class Sentence(NamedTuple):
    """A message: what raises, warns or refuses with it, its text, and the module."""

    kind: str
    text: str
    module: str

    @property
    def clauses(self) -> list[tuple[str, bool]]:
        """The clauses of the text, and whether each is advice, or a rule that an error states."""
        return [(clause, self._cures(clause)) for clause in CLAUSE.split(self.text)]

    def _cures(self, clause: str) -> bool:
        if ADVICE.search(clause):
            return True
        return self.kind != "refusal" and RULE.search(clause) is not None

    @property
    def says_cure(self) -> bool:
        """Whether a clause of the text is the cure."""
        return any(is_cure for _, is_cure in self.clauses)

    @property
    def code(self) -> str | None:
        """The code that the table has for it."""
        return code_of(self.kind, self.text)

    @property
    def cure(self) -> str | None:
        """The cure of its code, or of the first entry of its file or folder and kind, or None."""
        if self.code in CURES:
            return CURES[self.code]
        for place, kind, cure in CURES_OF_PLACES:
            if self.module.startswith(place) and self.kind.startswith(kind):
                return cure
        return None


def sentences() -> Iterator[Sentence]:
    """All messages, in the order of the sources."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FUSER.rglob("*.py")}
    returned = {path: _returned(tree) for path, tree in trees.items()}
    for path, tree in sorted(trees.items()):
        module = path.relative_to(FUSER).as_posix()
        known = {**_imported(tree, returned), **returned[path]}
        seen: set[tuple[str, str]] = set()
        for kind, text in _of(tree, known):
            if " " in text.strip("… ") and (kind, text) not in seen:
                seen.add((kind, text))
                yield Sentence(kind, text, module)


def _of(tree: ast.Module, returned: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Kind and text of every message in a module."""
    constants = {**returned, **_named(tree.body, returned)}
    reasons = _returned_reasons(tree)
    for nodes in _scopes(tree):
        named = {**constants, **_named(nodes, returned)}
        for node in nodes:
            for kind, value in _messages_at(node, node in reasons):
                yield from ((kind, text) for text in _texts(value, named))


def _returned(tree: ast.Module) -> dict[str, list[str]]:
    """The texts of the functions of a module that return nothing but sentences, by their names."""
    constants = _named(tree.body, {})
    result: dict[str, list[str]] = {}
    for node in [*tree.body, *tree.body]:  # twice: they call one another
        if not isinstance(node, ast.FunctionDef) or node.returns is None:
            continue
        if ast.unparse(node.returns) in ("str", "str | None"):
            named = {**constants, **result, **_named(ast.walk(node), result)}
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
            values = [value for each in returns for value in _branches(each) if not _is_none(value)]
            texts = [text for value in values for text in _alternatives(value, named)]
            if texts and all(len(text.split()) > 3 for text in texts):
                result[node.name] = texts
    return result


def _imported(
    tree: ast.Module, returned: Mapping[Path, Mapping[str, list[str]]]
) -> dict[str, list[str]]:
    """The texts of functions that a module imports from the modules that have them."""
    result: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            path = FUSER.parent / f"{node.module.replace('.', '/')}.py"
            texts = returned.get(path, {})
            result |= {name.name: texts[name.name] for name in node.names if name.name in texts}
    return result


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _scopes(node: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes of each outermost function, and each node outside of functions."""
    if isinstance(node, ast.FunctionDef):
        yield list(ast.walk(node))
    else:
        yield [node]
        for child in ast.iter_child_nodes(node):
            yield from _scopes(child)


def _returned_reasons(tree: ast.Module) -> set[ast.AST]:
    """The statements that return why something is not done."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {
        node
        for function in functions
        if any(word in function.name for word in REASONS)
        or re.search(SAYS_REASON, ast.get_docstring(function) or "")
        for node in ast.walk(function)
        if isinstance(node, ast.Return)
    }


def _messages_at(node: ast.AST, is_reason: bool) -> Iterator[tuple[str, ast.expr]]:
    """Kind and expression of the message that a node makes."""
    made = (
        node.exc
        if isinstance(node, ast.Raise)
        else node.value
        if isinstance(node, ast.Return)
        else None
    )
    if isinstance(made, ast.Call) and made.args and _name(made.func).endswith(ERRORS):
        yield _name(made.func), made.args[0]
    elif isinstance(node, ast.Call) and node.args:
        name = _name(node.func)
        if name == "warn":
            yield "warning", node.args[0]
        elif name == "refuse":
            yield "refusal", node.args[0]
        elif name == "Refusal":
            yield "refusal", node.args[-1]
    elif is_reason and isinstance(node, ast.Return) and node.value is not None:
        yield "refusal", node.value


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _named(nodes: Iterable[ast.AST], returned: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The texts of names to which sentences are assigned; an ellipsis is one that is not known."""
    texts: dict[str, list[str]] = {}
    added = set()
    for node in nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            added.add(node.target.id)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            branches = _branches(node.value)
            found = [text for branch in branches for text in _alternatives(branch, returned)]
            is_known = all(not text or len(text.split()) > 2 for text in found)
            texts.setdefault(node.targets[0].id, []).extend(found if is_known else ["…"])
    for name in added & texts.keys():
        texts[name] += [f"{text}…" for text in texts[name]]
    return {name: found for name, found in texts.items() if found != ["…"]}


def _texts(value: ast.expr, named: Mapping[str, list[str]]) -> list[str]:
    """The texts that an expression may have, with an ellipsis for the values side by side in it.

    ``named`` has those of names, and of functions, that stand for a sentence.
    """
    texts = [text for branch in _branches(value) for text in _alternatives(branch, named)]
    merged = (re.sub("…(?: ?…)+", "…", " ".join(text.split())) for text in texts)
    return list(dict.fromkeys(text for text in merged if text.strip("… ")))


def _branches(value: ast.expr) -> list[ast.expr]:
    """The expressions of which one is the value."""
    if isinstance(value, ast.IfExp):
        return _branches(value.body) + _branches(value.orelse)
    if isinstance(value, ast.BoolOp):
        return [branch for each in value.values for branch in _branches(each)]
    return [value]


def _alternatives(value: ast.expr, named: Mapping[str, list[str]]) -> list[str]:
    """The texts of an expression, among which a lone ellipsis is one that is not known."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [value.value]
    if isinstance(value, ast.Name):
        return named.get(value.id, ["…"])
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return named.get(value.func.id, ["…"])
    if isinstance(value, ast.FormattedValue):
        found = _alternatives(value.value, named)
        is_plain = isinstance(value.value, (ast.Name, ast.Call)) and value.conversion < 0
        return found if is_plain and "…" not in found else ["…"]
    if isinstance(value, ast.Call) and _name(value.func) in ("strip", "rstrip"):
        return _alternatives(value.func.value, named)
    parts: list[ast.expr] = []
    if isinstance(value, ast.JoinedStr):
        parts = value.values
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        parts = [value.left, value.right]
    if not parts:
        return ["…"]
    return ["".join(row) for row in itertools.product(*(_alternatives(p, named) for p in parts))]


def setup(app: object) -> dict[str, bool]:
    """Registers the directive."""
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.util.docutils import SphinxDirective

    class Sentences(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            groups: dict[str, list[Sentence]] = {}
            for sentence in sentences():
                groups.setdefault(sentence.module.partition("/")[0], []).append(sentence)
            result: list[nodes.Node] = []
            for folder, members in sorted(groups.items(), key=lambda g: TITLES.get(g[0], g[0])):
                title = TITLES.get(folder, folder)
                section = nodes.section(ids=[nodes.make_id(f"messages of {title}")])
                section += nodes.title(text=title)
                by_cure: dict[str | None, list[Sentence]] = {None: []}
                for member in members:
                    cure = None if member.says_cure else member.cure
                    by_cure.setdefault(cure, []).append(member)
                for cure, same in by_cure.items():
                    section += [_list(same), *([] if cure is None else [_note(cure)])]
                result.append(section)
            return result

    anchored: set[str] = set()  # a message of two modules is listed twice, and has one anchor

    def _list(members: list[Sentence]) -> nodes.bullet_list:
        rows = nodes.bullet_list()
        for sentence in members:
            paragraph = nodes.paragraph()
            if sentence.code is not None and sentence.code not in anchored:
                anchored.add(sentence.code)
                paragraph["ids"].append(f"message-{sentence.code}")
            paragraph += nodes.literal(text=sentence.kind)
            for clause, is_cure in sentence.clauses:
                paragraph += nodes.Text(" ")
                paragraph += nodes.strong(text=clause) if is_cure else nodes.Text(clause)
            rows += nodes.list_item("", paragraph)
        return rows

    def _note(cure: str) -> nodes.paragraph:
        """A cure of the messages above it."""
        paragraph = nodes.paragraph(classes=["cure"])
        paragraph += nodes.Text("→ ")
        for i, part in enumerate(cure.split("`")):
            words = nodes.strong(text=part) if i % 2 == 0 else nodes.literal(text=part)
            paragraph += words
        return paragraph

    assert isinstance(app, Sphinx)
    app.add_directive("sentences", Sentences)
    return {"parallel_read_safe": True}
