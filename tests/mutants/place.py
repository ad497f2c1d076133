"""Where a mutant is planted: code in one function, found by its tokens and not by its lines.

Line breaks, comments, quotes, trailing commas, and parentheses that a formatter puts around a long
expression make no difference; nor do the names of local variables and parameters.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import functools
import itertools
import keyword
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

STRING = r"(?P<prefix>[a-zA-Z]{0,2})(?P<quote>\"\"\"|'''|\"|')"
PYTHON = re.compile(
    rf"(?P<newline>\n)|(?P<space>[ \t\f\r]+|\\\n|#[^\n]*)|(?P<string>{STRING})"
    r"|(?P<name>[^\W\d]\w*)|(?P<number>\.?\d(?:[eE][+-]|[\w.])*)"
    r"|(?P<other>\.\.\.|->|:=|(?:\*\*|//|<<|>>|[+\-*/%@&|^=!<>])=|\*\*|//|<<|>>|.)"
)
CUDA = re.compile(
    r"(?P<directive>^[ \t]*#(?:\\\n|[^\n])*)"
    r"|(?P<space>\n|[^\S\n]+|\\\n|//[^\n]*|/\*.*?\*/)"
    r"|(?P<text>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+')|(?P<name>[^\W\d]\w*)"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)"
    r"|(?P<other>->|::|&&|\|\||\+\+|--|[+\-*/%&|^=!]=|.)",
    re.DOTALL | re.MULTILINE,
)
CUDA_WORDS = frozenset(
    re.findall(
        r"\w+",
        "alignas alignof auto bool break case char class const const_cast constexpr continue "
        "decltype default delete do double dynamic_cast else enum explicit extern false float "
        "for friend goto if inline int long mutable namespace new noexcept nullptr operator "
        "private protected public reinterpret_cast return short signed sizeof static "
        "static_assert static_cast struct switch template this throw true try typedef typename "
        "union unsigned using virtual void volatile while asm __asm__ __device__ __global__ "
        "__host__ __shared__ __forceinline__ __restrict__ __launch_bounds__",
    )
)
CUDA_TYPES = frozenset(
    re.findall(r"\w+", "int float bool auto double unsigned char const long short")
)
# After these they may stand around all the rest of a statement, or of its condition.
BEFORE_PARENTHESES = frozenset(
    ("return", "if", "elif", "while", "in", "=", "+=", "-=", "*=", "/=", "|=", "&=")
)
OPEN, CLOSE = {"(", "[", "{"}, {")", "]", "}"}


@dataclass(eq=False, slots=True)
class Token:
    """A word, number, operator, or text in quotes; of an f-string the text between braces."""

    text: str
    key: Hashable
    """What has to be equal in another token."""
    start: int
    is_name: bool
    depth: int
    """How many brackets are open before it."""
    starts_line: bool = False
    """Whether it is the first of a statement (Python)."""
    indent: int = 0
    """The column at which its statement starts."""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


# -- tokens -----------------------------------------------------------------------


def python_tokens(text: str, depth: int = 0, start: int = 0, end: int | None = None) -> list[Token]:
    """The tokens of a part of a text; ``depth`` brackets are open before it."""
    reader = _Python(text, depth, start, len(text) if end is None else end)
    reader.read(start)
    return reader.tokens


class _Python:
    def __init__(self, text: str, depth: int, start: int, end: int) -> None:
        self.text = text
        self.end = end
        self.depth = depth
        self.tokens: list[Token] = []
        self.line_began = start
        self.is_new_line = True
        self.indent = 0

    def add(self, start: int, end: int, key: Hashable, is_name: bool = False) -> None:
        if self.is_new_line:
            self.indent = start - self.line_began
        new, self.is_new_line = self.is_new_line, False
        token = Token(self.text[start:end], key, start, is_name, self.depth, new, self.indent)
        self.tokens.append(token)

    def read(self, at: int, is_field: bool = False) -> int:
        """Read to the end, or in an f-string to where the braces of a field end."""
        outside = self.depth
        while at < self.end:
            found = PYTHON.match(self.text, at)
            assert found
            kind, start, at = found.lastgroup, at, found.end()
            if kind == "newline":
                self.line_began = at
                self.is_new_line |= self.depth == 0
            elif found["string"] is not None:
                at = self.string(start, at, found["prefix"].lower(), found["quote"])
            elif kind in ("name", "number"):
                self.add(start, at, found[0], kind == "name" and not keyword.iskeyword(found[0]))
            elif kind == "other":
                if is_field and self.depth == outside and found[0] in ("}", ":"):
                    return start
                self.depth = max(self.depth - (found[0] in CLOSE), 0)
                self.add(start, at, found[0])
                self.depth += found[0] in OPEN
        return at

    def string(self, start: int, at: int, prefix: str, quote: str) -> int:
        """Read a string from its prefix on, or an f-string with all that is in it."""
        if "f" in prefix:
            return self.pieces(start, at, quote, quote)
        end = re.compile(rf"(?:\\.|(?!{quote}).)*(?:{quote}|$)", re.DOTALL).match(self.text, at)
        assert end
        self.add(start, end.end(), _value(self.text[start : end.end()], prefix, quote))
        return end.end()

    def pieces(self, start: int, at: int, stop: str, quote: str) -> int:
        """Read the text and the fields of an f-string up to ``stop``, or of a field's format."""
        piece = at
        while at < self.end:
            is_end = self.text.startswith(stop, at)
            two = self.text[at : at + 2]
            if not is_end and (two[0] == "\\" or (stop == quote and two in ("{{", "}}"))):
                at += 2
            elif is_end or self.text[at] == "{":
                at += len(stop) if is_end and stop == quote else not is_end
                written = self.text[piece:at].removesuffix(quote if is_end else "{")
                key = ("f", re.sub(r"\\(['\"])", r"\1", written), is_end, start == piece)
                if at > start:
                    self.add(start, at, key)
                if is_end:
                    return at
                self.depth += 1
                at = self.read(at, is_field=True)
                if self.text.startswith(":", at):
                    at = self.pieces(at, at + 1, "}", quote)
                self.depth -= 1
                start, piece, at = at, at + 1, at + 1
            else:
                at += 1
        return at


def _value(raw: str, prefix: str, quote: str) -> Hashable:
    if not prefix and "\\" not in raw:
        return ("string", raw[len(quote) : -len(quote)])
    try:
        return ("string", ast.literal_eval(raw))
    except (SyntaxError, ValueError):  # a piece of a program may end in it
        return ("string", raw)


def cuda_tokens(text: str, depth: int = 0) -> list[Token]:
    """The tokens of CUDA C++."""
    tokens = []
    for found in CUDA.finditer(text):
        if found.lastgroup != "space":
            depth = max(depth - (found[0] in CLOSE), 0)
            is_name = found.lastgroup == "name" and found[0] not in CUDA_WORDS
            key = " ".join(found[0].split()) if found.lastgroup == "directive" else found[0]
            tokens.append(Token(found[0], key, found.start(), is_name, depth))
            depth += found[0] in OPEN
    return tokens


def partners(tokens: Sequence[Token]) -> dict[int, int]:
    """The places of brackets by the place of the other one of the pair."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for i, token in enumerate(tokens):
        if token.key in OPEN:
            opened.append(i)
        elif token.key in CLOSE and opened:
            pairs[i] = opened.pop()
            pairs[pairs[i]] = i
    return pairs


def _follows_value(tokens: Sequence[Token], i: int) -> bool:
    """Whether the bracket there calls or indexes what is before it."""
    before = tokens[i - 1] if i else None
    return before is not None and (before.key in (")", "]", "import") or before.is_name)


def unneeded(tokens: Sequence[Token]) -> tuple[set[int], set[int]]:
    """Places of trailing commas, and of parentheses around all the rest of a statement."""
    pairs = partners(tokens)
    commas = [i for i, token in enumerate(tokens) if token.key == ","]
    trailing: set[int] = set()
    around: set[int] = set()
    for i, token in enumerate(tokens[1:], 1):
        if token.key in CLOSE and tokens[i - 1].key == ",":
            opened = pairs.get(i)
            is_call = opened is None or (_follows_value(tokens, opened) and token.key == ")")
            is_list = opened is not None and not _follows_value(tokens, opened)
            within = commas[bisect.bisect(commas, opened or 0) : bisect.bisect(commas, i)]
            several = sum(tokens[j].depth == token.depth + 1 for j in within) > 1
            if is_call or several or (is_list and token.key != ")"):
                trailing.add(i - 1)
        elif token.key == "(" and tokens[i - 1].key in BEFORE_PARENTHESES and token.depth == 0:
            end = pairs.get(i, len(tokens))
            if end == i + 1 or not _ends_expression(tokens, end):
                continue
            inside = {t.key for t in tokens[i + 1 : end] if t.depth == 1}
            may_be_tuple = tokens[i - 1].key in ("return", "=")
            if not inside & {":=", "for", "yield", "await", *(() if may_be_tuple else (",",))}:
                around |= {i, end}
    return trailing, around


def _ends_expression(tokens: Sequence[Token], i: int) -> bool:
    if i + 1 >= len(tokens):
        return i < len(tokens)
    return tokens[i + 1].starts_line or tokens[i + 1].key == ":"


# -- names ------------------------------------------------------------------------


def plain_names(tokens: Sequence[Token]) -> list[bool]:
    """Whether each can name a variable: it is no attribute, and no keyword of a call."""
    opened: list[int] = []
    lambdas: list[int] = []
    plain: list[bool] = []
    for i, token in enumerate(tokens):
        if token.key == "lambda":
            lambdas.append(token.depth)
        elif token.key == ":" and lambdas and lambdas[-1] == token.depth:
            lambdas.pop()
        before = tokens[i - 1].key if i else None
        after = tokens[i + 1] if i + 1 < len(tokens) else None
        is_plain = token.is_name and before not in (".", "->", "::")
        is_argument = before in ("(", ",", None) and lambdas[-1:] != [token.depth]
        if is_plain and is_argument and after and after.key == "=":
            # Of what is not all there, spaces tell an assignment from an argument.
            is_plain = is_parameter(tokens, opened[-1]) if opened else after.start > token.end
        plain.append(is_plain)
        if token.key in OPEN:
            opened.append(i)
        elif token.key in CLOSE and opened:
            opened.pop()
    return plain


def is_parameter(tokens: Sequence[Token], opened: int) -> bool:
    """Whether a name before "=" in this bracket is not a keyword of a call."""
    is_call = tokens[opened].key == "(" and _follows_value(tokens, opened)
    return not is_call or (opened > 1 and tokens[opened - 2].key == "def")


def names_of(tokens: Sequence[Token]) -> set[str]:
    return {t.text for t, plain in zip(tokens, plain_names(tokens), strict=True) if plain}


def bound_by(tokens: Sequence[Token]) -> set[str]:
    """Names to which the code itself gives a value, and not from the value that they had."""
    names: set[str] = set()
    targets = False
    for i, (token, plain) in enumerate(zip(tokens, plain_names(tokens), strict=True)):
        targets = token.key in ("for", "lambda") or (targets and token.key not in ("in", ":"))
        after = tokens[i + 1].key if i + 1 < len(tokens) else None
        if plain and (targets or after == ":=" or (i and tokens[i - 1].key == "as")):
            names.add(token.text)
        elif plain and after == "=":
            rest = itertools.takewhile(lambda t: not t.starts_line, tokens[i + 2 :])
            if token.text not in {other.text for other in rest}:
                names.add(token.text)
    return names


# -- functions --------------------------------------------------------------------


@dataclass(eq=False)
class Scope:
    """A function, a class or the module: where its own code is, and what names are in it."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    """From where to where in the text; of a class and a module without functions in them."""
    nodes: list[ast.AST] = field(default_factory=list)
    """In Python, what binds its names: the outermost function that it is in, or itself."""
    declared: set[str] = field(default_factory=set)
    """In CUDA, the names that it declares."""

    @functools.cached_property
    def bound(self) -> set[str]:
        """Local variables and parameters, those of functions around it included."""
        return self.declared.union(*map(_bound_in, self.nodes))


@dataclass(eq=False)
class Run:
    """Tokens without a gap between them."""

    tokens: list[Token]
    plain: list[bool]
    trailing: set[int]
    around: set[int]
    """See ``unneeded``; both are empty in CUDA."""

    def forms(self) -> list[list[int]]:
        """The places of tokens that make a difference, with and without parentheses."""
        form = [i for i in range(len(self.tokens)) if i not in self.trailing]
        bare = [i for i in form if i not in self.around]
        return [form, bare] if self.around else [form]


def run_of(tokens: list[Token], is_python: bool) -> Run:
    trailing, around = unneeded(tokens) if is_python else (set[int](), set[int]())
    return Run(tokens, plain_names(tokens), trailing, around)


class Source:
    """A file's functions, and their tokens."""

    def __init__(self, text: str, is_python: bool) -> None:
        self.text = text
        self.is_python = is_python
        self._runs: dict[str, list[Run]] = {}
        # Names that stand for the same everywhere in the file.
        self.known: set[str]
        if is_python:
            self.scopes, self.known = _python_scopes(text)
            return
        self._tokens = cuda_tokens(text)
        self.scopes = _cuda_scopes(self._tokens)
        inside: set[str] = set().union(*(scope.bound for scope in self.scopes.values()))
        self.known = {token.text for token in self._tokens if token.is_name} - inside | CUDA_WORDS

    def read(self, code: str, depth: int = 0) -> list[Token]:
        """The tokens of other code in this language."""
        return python_tokens(code, depth) if self.is_python else cuda_tokens(code, depth)

    def runs(self, where: str) -> list[Run]:
        """The tokens of a function."""
        if where not in self._runs:
            self._runs[where] = runs = []
            for start, end in self.scopes[where].ranges:
                if self.is_python:
                    tokens = python_tokens(self.text, 0, start, end)
                else:
                    tokens = [token for token in self._tokens if start <= token.start < end]
                runs.append(run_of(tokens, self.is_python))
        return self._runs[where]


@functools.lru_cache(maxsize=512)
def source_of(text: str, is_python: bool) -> Source:
    """The functions of a file's text."""
    return Source(text, is_python)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _python_scopes(text: str) -> tuple[dict[str, Scope], set[str]]:
    tree = ast.parse(text)
    lines = [0, *(found.end() for found in re.finditer("\n", text)), len(text)]
    scopes: dict[str, Scope] = {}

    def visit(node: ast.AST, name: str, start: int, end: int, binds: ast.AST | None) -> None:
        holes: list[tuple[int, int]] = []
        for child in _definitions_in(node):
            first = min([child.lineno, *(part.lineno for part in child.decorator_list)])
            place = lines[first - 1], lines[child.end_lineno or first]
            holes.append(place)
            outer = child if binds is None and isinstance(child, FUNCTIONS) else binds
            visit(child, f"{name}.{child.name}".lstrip("."), *place, outer)
        scope = scopes.setdefault(name, Scope())
        scope.nodes.append(binds or node)
        scope.ranges += _without([] if isinstance(node, FUNCTIONS) else holes, start, end)

    visit(tree, "", 0, len(text), None)
    return scopes, _bound_at_the_top(tree) | {*dir(builtins), "self", "cls"}


def _definitions_in(
    node: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes of a body, those under conditions included."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                yield child
            else:
                yield from _definitions_in(child)


def _bound_names(node: ast.AST) -> list[str | None]:
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return [node.name]
    if isinstance(node, ast.MatchMapping):
        return [node.rest]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    return [node.name] if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else []


def _bound_in(scope: ast.AST) -> set[str]:
    """The local variables and parameters in it, but for ``self``."""
    if not isinstance(scope, (*FUNCTIONS, *COMPREHENSIONS)):
        inner = (node for node in _outside_of_functions(scope) if isinstance(node, COMPREHENSIONS))
        return set().union(*map(_bound_in, inner))
    nodes = [node for node in ast.walk(scope) if node is not scope]
    names = {name for node in nodes for name in _bound_names(node) if name} - {"self", "cls"}
    return names.difference(*(node.names for node in nodes if isinstance(node, ast.Global)))


def _outside_of_functions(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (*FUNCTIONS, *COMPREHENSIONS)):
            yield from _outside_of_functions(node)


def _bound_at_the_top(tree: ast.Module) -> set[str]:
    """The names of the module, and those of classes, which code in their bodies may use."""
    return {name for node in _outside_of_functions(tree) for name in _bound_names(node) if name}


def _cuda_scopes(tokens: Sequence[Token]) -> dict[str, Scope]:
    """Functions and structs by the names before their braces; namespaces do not count."""
    scopes: dict[str, Scope] = {"": Scope()}
    holes: dict[str, list[tuple[int, int]]] = {"": []}
    opened: list[tuple[str, int]] = []
    in_function = 0
    began = 0
    for i, token in enumerate(tokens):
        if token.key == "{" and in_function:
            in_function += 1
        elif token.key == "{":
            name, is_function = _cuda_header(tokens[began:i])
            in_function = int(is_function)
            opened.append((name, began))
            began = i + 1
        elif token.key == "}" and in_function > 1:
            in_function -= 1
        elif token.key == "}" and opened:
            name, first = opened.pop()
            outer = "::".join(name for name, _ in opened if name)
            if name:
                full = f"{outer}::{name}" if outer else name
                place = tokens[first].start, token.end
                scope = scopes.setdefault(full, Scope())
                scope.ranges += _without(holes.pop(full, []), *place)
                scope.declared |= _declared(tokens[first:i]) - {name} if in_function else set()
                holes.setdefault(outer, []).append(place)
            in_function = 0
            began = i + 1
        elif token.key == ";" and not in_function:
            began = i + 1
    scopes[""].ranges += _without(holes[""], 0, tokens[-1].end if tokens else 0)
    return scopes


def _without(holes: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    ranges = []
    for hole in sorted(holes):
        ranges.append((start, hole[0]))
        start = hole[1]
    return [*ranges, (start, end)]


def _cuda_header(header: Sequence[Token]) -> tuple[str, bool]:
    """The name of what begins after these tokens, and whether it is a function."""
    angles = brackets = 0
    words = [token for token in header if not token.text.lstrip().startswith("#")]
    for i, token in enumerate(words):
        before = words[i - 1].key if i else None
        if token.key == "<" and (angles or before == "template"):
            angles += 1
        elif token.key == ">" and angles:
            angles -= 1
        elif angles:
            continue
        elif token.key in ("struct", "class", "union"):
            names = [t.text for t in words[i:] if t.is_name]
            return (names[0] if names else ""), False
        elif token.key in ("namespace", "enum", "="):
            return "", False
        elif token.key == "(" and not brackets and before == "operator":
            return "operator()", True
        elif token.key == "(" and not brackets and i and words[i - 1].is_name:
            return words[i - 1].text, True
        brackets += (token.key in OPEN) - (token.key in CLOSE)
    return "", False


def _declared(tokens: Sequence[Token]) -> set[str]:
    """Names that a function declares, as far as the tokens around them tell."""
    names: set[str] = set()
    for i, token in enumerate(tokens[1:-1], 1):
        before, after = tokens[i - 1], tokens[i + 1]
        if token.is_name and after.key in set("=;,)[{:>("):
            if before.is_name or before.key in CUDA_TYPES or before.key in ("*", "&", "&&", ">"):
                names.add(token.text)
        elif token.key == "[" and (before.key == "auto" or tokens[i - 2].key == "auto"):
            rest = (j for j in range(i, len(tokens)) if tokens[j].key == "]")
            names |= {t.text for t in tokens[i : next(rest, i)] if t.is_name}
    return names


# -- a piece of code in a function ------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a piece of code was found: its first and last token, and what its names are there."""

    run: Run
    first: int
    last: int
    kept: list[int]
    """The form of the run in which it was found."""
    renamed: dict[str, str]


def places(source: Source, where: str, anchor: Run) -> list[Place]:
    """Where the code is, with its own names or, if it is nowhere, with other local ones."""
    bound = source.scopes[where].bound
    # A name that the function still has stands for itself, and so does one of the module.
    for known in (None, source.known, set[str]()):
        found: dict[int, Place] = {}
        for form in anchor.forms():
            wanted = [anchor.tokens[i] for i in form]
            free = [
                known is not None and anchor.plain[i] and anchor.tokens[i].text not in bound | known
                for i in form
            ]
            if known is not None and not any(free):
                continue
            fixed = {
                anchor.tokens[i].text
                for i, is_free in zip(form, free, strict=True)
                if anchor.plain[i] and not is_free
            }
            for run in source.runs(where):
                for kept in run.forms():
                    for place in _in_form(run, kept, bound, wanted, free, fixed):
                        found.setdefault(run.tokens[place.first].start, place)
        if found:
            return [found[start] for start in sorted(found)]
    return []


def _in_form(
    run: Run,
    kept: list[int],
    bound: set[str],
    wanted: Sequence[Token],
    free: Sequence[bool],
    fixed: set[str],
) -> Iterator[Place]:
    tokens, plain = run.tokens, run.plain
    for begin in range(len(kept) - len(wanted) + 1):
        names: dict[str, str] = {}
        for offset, want in enumerate(wanted):
            at = kept[begin + offset]
            token = tokens[at]
            if free[offset] and plain[at] and token.text in bound:
                if names.setdefault(want.text, token.text) != token.text:
                    break
            elif want.key != token.key:
                break
        else:
            others = set(names.values())
            if wanted and len(others) == len(names) and not others & fixed:
                yield Place(run, kept[begin], kept[begin + len(wanted) - 1], kept, names)


def planted(text: str, is_python: bool, where: str, old: str, new: str) -> str:
    """The text with ``new`` where ``old`` is in the function ``where``.

    Raises
    ------
    LookupError
        With the end of a sentence, if the function, the code, or a name of ``new`` is not there.
    """
    source = source_of(text, is_python)
    scope = source.scopes.get(where)
    if scope is None:
        raise LookupError(f"has no {where}; it was renamed or is gone.")
    anchor = run_of(source.read(old), is_python)
    found = places(source, where, anchor)
    if len(found) != 1:
        inside = f" in {where}" if where else " outside of functions"
        raise LookupError(f"has {old!r} {len(found)} times{inside}; it is to be once.")
    place = found[0]
    first = place.run.tokens[place.first]
    tokens = source.read(new, first.depth)
    unknown = _unknown(tokens, place, anchor.tokens, source, where)
    if unknown:
        raise LookupError(
            f"has no {', '.join(sorted(unknown))} in {where or 'its module'} any more, and the "
            "text that is replaced does not tell what became of it."
        )
    plain = plain_names(tokens)
    names = [
        place.renamed.get(token.text, token.text) if is_plain else token.text
        for token, is_plain in zip(tokens, plain, strict=True)
    ]
    if not is_python:
        return _joined(text, place, new, tokens, names)
    return _with_lines(text, place, old, new, tokens, names)


def _unknown(
    tokens: Sequence[Token],
    place: Place,
    anchor: Sequence[Token],
    source: Source,
    where: str,
) -> set[str]:
    """The names of a replacement that nothing tells the value of."""
    wanted = names_of(tokens) - names_of(anchor) - set(place.renamed)
    if source.is_python:
        return wanted - source.scopes[where].bound - source.known - bound_by(tokens)
    inside = {token.text for run in source.runs(where) for token in run.tokens}
    # What is called, or has template arguments, may come from any header.
    variables = {
        token.text
        for i, token in enumerate(tokens)
        if i + 1 == len(tokens) or tokens[i + 1].key not in ("(", "<", "::")
    }
    return {
        name
        for name in (wanted & variables) - inside - source.known - _declared(tokens)
        if name[:1].islower() and not re.match("k[A-Z]", name)
    }


def _joined(
    text: str,
    place: Place,
    new: str,
    tokens: Sequence[Token],
    names: Sequence[str],
) -> str:
    """The text with other code in a place, where lines and columns make no difference."""
    parts, at = [text[: place.run.tokens[place.first].start]], 0
    for token, name in zip(tokens, names, strict=True):
        parts += [new[at : token.start], name]
        at = token.end
    if tokens and tokens[0].text.lstrip().startswith("#"):
        parts.insert(1, "\n")
    if tokens and tokens[-1].text.lstrip().startswith("#"):
        parts.append("\n")
    return "".join([*parts, text[place.run.tokens[place.last].end :]])


def _gap(text: str, start: int, end: int) -> str:
    """What is between two tokens of a statement, on one line."""
    gap = text[start:end]
    return " " if "\n" in gap or "#" in gap else gap


def _with_lines(
    text: str,
    place: Place,
    old: str,
    new: str,
    tokens: Sequence[Token],
    names: Sequence[str],
) -> str:
    """The text with other statements in a place: all that it touches are on one line each.

    The first line of the place is at the column of ``old``'s first line.
    """
    whole = place.run.tokens
    begin, end = place.first, place.last
    while begin and not whole[begin].starts_line:
        begin -= 1
    while end + 1 < len(whole) and not whole[end + 1].starts_line:
        end += 1
    pairs = partners(whole[begin : end + 1])
    inside = range(place.first, place.last + 1)
    kept = set(place.kept)
    gone = {
        begin + i
        for i, j in pairs.items()
        if begin + i not in kept and (begin + j in inside) != (begin + i in inside)
    }
    move = whole[begin].indent - (len(old) - len(old.lstrip(" ")))
    parts: list[str] = []
    for i in range(begin, place.first):
        parts += [whole[i].text] if i not in gone else []
        parts.append(_gap(text, whole[i].end, whole[i + 1].start))
    is_first = whole[place.first].starts_line
    for i, (token, name) in enumerate(zip(tokens, names, strict=True)):
        if token.starts_line and (i or is_first):
            parts += ["\n" * bool(i), " " * (token.indent + move)]
        elif i:
            parts.append(_gap(new, tokens[i - 1].end, token.start))
        parts.append(name)
    for i in range(place.last + 1, end + 1):
        if i not in gone | place.run.trailing:
            parts += [_gap(text, whole[i - 1].end, whole[i].start), whole[i].text]
    start = whole[begin].start - (whole[begin].indent if is_first else 0)
    return "".join([text[:start], *parts, text[whole[end].end :]])
