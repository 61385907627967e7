"""Writes GBNF as rules of an llguidance grammar.

llguidance reads each terminal as far as it goes, and GBNF has no terminals. So every character becomes a
terminal of its own, which leaves all choices to the rules.
"""

import re
from typing import Final

from worker_svc.grammars.expressions import (
    ALL,
    AnyOf,
    Chars,
    Repeat,
    Rx,
    Sequence,
    characters,
    parse_whole,
    terminal,
)
from worker_svc.grammars.grammar_writer import GrammarWriter, Repeated, Symbol
from worker_svc.grammars.limits import MAX_ALTERNATIVES, MAX_NESTING, refusal, shown

_EXAMPLE: Final = 'root ::= "yes" | "no"'
_PIECE: Final = re.compile(
    r'(?P<space>\s+|#[^\n]*)|(?P<rule>[A-Za-z_][\w.-]*)(?P<defines>\s*::=)?|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<chars>\[(?:\\.|[^\]\\])*\]|\.)|(?P<count>[*+?]|\{\d{1,9}(?:,\d{0,9})?\})|(?P<sign>[()|])",
    re.ASCII | re.DOTALL,
)
_COUNTS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LONG_ESCAPE: Final = re.compile(r"\\U([0-9a-fA-F]{8})")


def write_gbnf(text: str, writer: GrammarWriter) -> str:
    """Writes the rules of a GBNF grammar and returns the first.

    Raises:
        InvalidArgument: the text is not GBNF or exceeds a limit.
    """
    if not text.strip():
        raise refusal(f"grammar is empty; send rules such as: {_EXAMPLE}")
    if "::=" not in text:
        raise refusal(f"grammar has no rule; write GBNF, such as: {_EXAMPLE} (Lark is not supported)")
    reader = _Reader(text, writer)
    try:
        return reader.read()
    except ValueError as error:
        line = text.count("\n", 0, reader.position) + 1
        raise refusal(f"grammar {error}, in line {line}; write GBNF, such as: {_EXAMPLE}") from None


def write_characters(tree: Rx, writer: GrammarWriter) -> tuple[Symbol, ...]:
    """Writes an expression without intersections and complements, a character for each terminal."""
    match tree:
        case Sequence(parts):
            return tuple(symbol for part in parts for symbol in write_characters(part, writer))
        case AnyOf(parts):
            return (writer.shared_rule([write_characters(part, writer) for part in parts]),)
        case Repeat(part, least, most):
            return (Repeated(writer.shared_rule([write_characters(part, writer)]), least, most),)
        case _:
            return (writer.terminal(terminal(tree)),)


class _Reader:
    """Recursive descent over a grammar."""

    def __init__(self, text: str, writer: GrammarWriter) -> None:
        self._writer = writer
        self._text = text
        self._names: dict[str, str] = {}
        self._num_alternatives = 0
        self.position = 0
        """Index of the character that is read next."""
        self._kind, self._piece, self._end = "", "", 0

    def read(self) -> str:
        defined = set()
        self._next()
        while self._kind:
            name = self._piece
            if self._kind != "defines":
                raise ValueError(f"has {shown(name)} where a rule belongs")
            if name in defined:
                raise ValueError(f"defines {shown(name)} twice")
            defined.add(name)
            self._next()
            self._writer.add(self._rule(name), self._options(0))
        for name in ("root", *self._names):
            if name not in defined:
                raise ValueError(f"does not define the rule {shown(name)}")
        return self._names["root"]

    def _next(self) -> None:
        """Reads a piece, without space and comments before it."""
        kind, self.position = "space", self._end
        while kind == "space" and self.position < len(self._text):
            found = _PIECE.match(self._text, self.position)
            if found is None:
                raise ValueError(f"has {shown(self._text[self.position :][:10])}, which is not GBNF")
            kind, self._piece, self._end = str(found.lastgroup), found["rule"] or found[0], found.end()
            if kind == "space":
                self.position = self._end
        self._kind = "" if kind == "space" else kind

    def _rule(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = self._writer.new_rule("b")
        return self._names[name]

    def _options(self, depth: int) -> list[tuple[Symbol, ...]]:
        if depth > MAX_NESTING:
            raise ValueError(f"nests more than {MAX_NESTING} parentheses")
        options = [self._sequence(depth)]
        while self._piece == "|" and self._kind == "sign":
            self._num_alternatives += 1
            if self._num_alternatives > MAX_ALTERNATIVES:
                raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives")
            self._next()
            options.append(self._sequence(depth))
        return options

    def _sequence(self, depth: int) -> tuple[Symbol, ...]:
        symbols: list[Symbol] = []
        while self._kind in ("rule", "text", "chars", "count") or (self._kind, self._piece) == ("sign", "("):
            part = self._part(depth)
            while self._kind == "count":
                least, most = self._counts()
                part = (Repeated(self._writer.shared_rule([part]), least, most),)
                self._next()
            symbols += part
        return tuple(symbols)

    def _part(self, depth: int) -> tuple[Symbol, ...]:
        kind, piece = self._kind, self._piece
        if kind == "count":
            raise ValueError(f"has {piece!r} with nothing to repeat before it")
        self._next()
        match kind:
            case "rule":
                return (self._rule(piece),)
            case "text":
                return write_characters(characters(_unicode_escapes(piece[1:-1])), self._writer)
            case "chars":
                tree = parse_whole(_unicode_escapes(piece)) if piece != "." else Chars(ALL)
                return write_characters(tree, self._writer)
        options = self._options(depth + 1)
        if self._piece != ")":
            raise ValueError("has a parenthesis that is not closed")
        self._next()
        return (self._writer.shared_rule(options),)

    def _counts(self) -> tuple[int, int | None]:
        if self._piece in _COUNTS:
            return _COUNTS[self._piece]
        least, comma, most = self._piece[1:-1].partition(",")
        found = int(least), (int(most) if most else None) if comma else int(least)
        if found[1] is not None and found[1] < found[0]:
            raise ValueError("has a repetition with a minimum above its maximum")
        return found


def _unicode_escapes(text: str) -> str:
    r"""Returns a text with `\U0001F600` in the form `\u{1F600}`."""
    return _LONG_ESCAPE.sub(lambda found: f"\\u{{{found[1].lstrip('0') or '0'}}}", text)
