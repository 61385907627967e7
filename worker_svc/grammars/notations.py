"""Writes values of JSON schemas in the notations of models' tool calls, other than JSON.

A structural tag names a notation as the style of a JSON schema. Nothing escapes the mark after a plain
string, so no string contains it. Marks and the names next to them are a terminal together: llguidance reads
each terminal as far as it goes, and a mark alone may begin another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from worker_svc.grammars.expressions import (
    ANY,
    EMPTY,
    NOTHING,
    AllOf,
    AnyOf,
    Chars,
    Not,
    Repeat,
    Rx,
    complement,
    is_empty,
    literal,
    parse_whole,
    terminal,
)
from worker_svc.grammars.expressions import Sequence as Joined
from worker_svc.grammars.grammar_writer import GrammarWriter
from worker_svc.grammars.json_facts import Conjunction, Facts, Texts
from worker_svc.grammars.json_grammar import (
    JsonWriter,
    Punctuation,
    Symbols,
    text_expression,
    value_text,
)
from worker_svc.grammars.json_schema import Schemas
from worker_svc.grammars.limits import MAX_WHITESPACE, refusal, shown

_FIELDS: Final[Mapping[str, Mapping[str, type]]] = {
    "tagged": {"key": str, "key_end": str, "json_key_ends": list, "value_end": str},
    "python": {},
    "loose": {"quote": str},
    "elements": {"prefix": str},
}
# Characters that no unlisted name contains where names stand without quotation marks.
_NAME_STOPS: Final = " \t\n\r<>[]{}\"':,|/="
_IDENTIFIER: Final = parse_whole(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Marks:
    """Writes texts of which a model may write parts as special tokens."""

    text: Callable[[str, Rx], Symbols]
    """A text and an expression after it."""
    until: Callable[[Rx, str, str], Symbols]
    """A text that fits an expression and lacks the third argument, and the mark after it."""


def notation(style: Any, schemas: Schemas, writer: GrammarWriter, marks: Marks) -> JsonWriter:
    """Returns the writer of a style; refuses any other."""
    if style in (None, "json"):
        return JsonWriter(schemas, writer)
    kind = style.get("type") if isinstance(style, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise refusal(f"structural_tag has the style {shown(style)}, which is not supported")
    if style.keys() != {"type", *fields} or not all(
        isinstance(style[name], form)
        and all(isinstance(each, str) and each for each in (style[name] if form is list else [style[name]]))
        for name, form in fields.items()
    ):
        raise refusal(f"structural_tag has a style {kind} that needs, as texts: {', '.join(fields)}")
    match kind:
        case "python":
            return _Python(schemas, writer)
        case "loose":
            return _Loose(schemas, writer, marks, style["quote"])
        case "elements":
            return _Elements(schemas, writer, marks, style["prefix"])
    return _Tagged(schemas, writer, marks, style)


def _name(key: str | Rx, stops: Iterable[str] = ()) -> Rx:
    """Returns an expression for the name of a property without quotation marks."""
    if isinstance(key, str):
        return literal(key)
    chars = complement([(ord(char), ord(char)) for char in {*_NAME_STOPS, *stops}])
    return AllOf((key, Repeat(Chars(chars), 1, None)))


def _is_empty_without(rx: Rx, text: str) -> bool:
    """Whether all texts of an expression contain a text."""
    return rx != ANY and is_empty(terminal(AllOf((rx, Not(Joined((ANY, literal(text), ANY)))))))


class _Python(JsonWriter):
    """Writes keyword arguments and, in them, literals of Python."""

    words: ClassVar[Mapping[Any, str]] = {None: "None", True: "True", False: "False"}

    def _root(self) -> str:
        return self._members(Punctuation((), ("COMMA",), ()), self._keyword)

    def _keyword(self, key: str | Rx, value: Conjunction) -> Symbols:
        name = literal(key) if isinstance(key, str) else AllOf((key, _IDENTIFIER))
        return (self._writer.terminal(terminal(Joined((name, literal("="))))), self._rule(value))

    def _literals(self, values: Iterable[Any]) -> Iterator[Symbols]:
        bodies = [
            _quoted(literal(value)) if isinstance(value, str) else f'"{self._word(value)}"'
            for value in values
        ]
        yield (self._writer.terminal(f"({' | '.join(bodies)})"),)

    def _word(self, value: Any) -> str:
        return self.words[value] if value is None or isinstance(value, bool) else value_text(value)

    def _text(self, texts: Texts) -> Iterator[Symbols]:
        is_free = not texts.must and not texts.never and texts.most != 0
        body = _quoted(text_expression(texts), texts if is_free else None)
        if not is_empty(body):
            yield (self._writer.terminal(body),)

    def _key(self, key: str | Rx) -> str:
        return _quoted(literal(key) if isinstance(key, str) else key, Texts() if key == ANY else None)


def _quoted(rx: Rx, free: Texts | None = None) -> str:
    """Returns the body of a terminal for a Python string; a free one may contain any escapes."""
    options = []
    for quote in "'\"":
        inner = terminal(rx, quote=quote)
        if free is not None:
            char = (
                rf"/[^\x{{{ord(quote):x}}}\\\x{{0}}-\x{{1f}}]|\\[\x{{22}}\x{{27}}\\abfnrtv]|\\x[0-9a-fA-F]{{2}}"
                r"|\\u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})|\\U000[1-9a-fA-F][0-9a-fA-F]{4}/"
            )
            inner = f"({char}){{{free.least},{'' if free.most is None else free.most}}}"
        mark = terminal(literal(quote))
        options.append(f"({mark} {inner} {mark})")
    return f"({' | '.join(options)})"


class _Plain(JsonWriter):
    """A writer of strings without quotation marks around and escapes in them."""

    def __init__(self, schemas: Schemas, writer: GrammarWriter, marks: Marks, stop: str) -> None:
        """`stop` is the text that no string contains."""
        super().__init__(schemas, writer)
        self._marks = marks
        self._stop = stop

    def _strings(self, facts: Facts) -> tuple[Rx | None, Facts]:
        """Returns an expression for the strings that fit some facts, and the facts of other values."""
        if facts.values is not None:
            strings = [value for value in facts.values.values() if isinstance(value, str)]
            others = {key: value for key, value in facts.values.items() if not isinstance(value, str)}
            rx: Rx = AnyOf(tuple(literal(value) for value in strings if self._stop not in value))
            return (rx if rx != NOTHING else None), replace(facts, values=others)
        if "string" not in facts.types:
            return None, facts
        rx, rest = text_expression(self._texts(facts)), replace(facts, types=facts.types - {"string"})
        return (None if _is_empty_without(rx, self._stop) else rx), rest


class _Loose(_Plain):
    """Writes `{a:1,b:"text"}` with other quotation marks."""

    objects = Punctuation(('"{"',), ('","',), ('"}"',))
    arrays = Punctuation(('"["',), ('","',), ('"]"',))

    def options(self, facts: Facts, schema: Conjunction) -> Iterator[Symbols]:
        string, rest = self._strings(facts)
        if string is not None:
            quote = self._stop
            yield (*self._marks.text(quote, EMPTY), *self._marks.until(string, quote, quote))
        yield from super().options(rest, schema)

    def _key(self, key: str | Rx) -> str:
        return terminal(Joined((_name(key), literal(":"))))

    def _member(self, key: str | Rx, value: Conjunction) -> Symbols:
        return (self._writer.terminal(self._key(key)), self._rule(value))


class _Elements(_Plain):
    """Writes `<a>1</a>`, each tag after a prefix, nested; items of arrays as `<item>`.

    The two tags of an unlisted property may have different names.
    """

    objects = arrays = Punctuation()

    def __init__(self, schemas: Schemas, writer: GrammarWriter, marks: Marks, stop: str) -> None:
        super().__init__(schemas, writer, marks, stop)
        self._elements: dict[tuple[str | Rx, Conjunction], str] = {}
        self._waiting: list[tuple[str | Rx, Conjunction]] = []

    def _root(self) -> str:
        blank = self._writer.terminal(rf"/[ \t\n\r]{{1,{MAX_WHITESPACE}}}/")
        gap = (self._writer.shared_rule([(blank,), ()]),)
        return self._members(Punctuation(gap, gap, gap), self._member)

    def write_pending(self) -> None:
        while self._waiting:
            key, schema = self._waiting.pop()
            start = self._marks.text(self._stop, Joined((literal("<"), _name(key), literal(">"))))
            options = [
                (*start, *value)
                for facts in self._schemas.alternatives(schema)
                for value in self._ended(key, facts, schema)
            ]
            self._writer.add(self._elements[key, schema], dict.fromkeys(options))

    def _ended(self, key: str | Rx, facts: Facts, schema: Conjunction) -> Iterator[Symbols]:
        """Yields the ways to write a value and the tag after it."""
        string, rest = self._strings(facts)
        if string is not None and isinstance(key, str):
            yield self._marks.until(string, f"{self._stop}</{key}>", self._stop)
        elif string is not None:
            tag = self._writer.terminal(terminal(Joined((_name(key), literal(">")))))
            yield (*self._marks.until(string, f"{self._stop}</", self._stop), tag)
        end = self._marks.text(self._stop, Joined((literal("</"), _name(key), literal(">"))))
        for symbols in self.options(rest, schema):
            yield (*symbols, *end)

    def _item(self, value: Conjunction) -> Symbols:
        return self._member("item", value)

    def _unique_item(self, value: Any) -> Symbols:
        text = value if isinstance(value, str) else value_text(value)
        return self._marks.text(f"{self._stop}<item>{text}{self._stop}</item>", EMPTY)

    def _member(self, key: str | Rx, value: Conjunction) -> Symbols:
        if (key, value) not in self._elements:
            self._elements[key, value] = self._writer.new_rule("e")
            self._waiting.append((key, value))
        return (self._elements[key, value],)


class _Tagged(_Plain):
    """Writes properties between tags, strings in them as plain text, other values as JSON."""

    def __init__(
        self, schemas: Schemas, writer: GrammarWriter, marks: Marks, style: Mapping[str, Any]
    ) -> None:
        """Takes the texts of a style."""
        super().__init__(schemas, writer, marks, style["value_end"].strip())
        self._style = style
        self._json = _WithoutText(schemas, writer, self._stop)
        ends: Sequence[str] = style["json_key_ends"] or [style["key_end"]]
        self._json_start = (writer.shared_rule([marks.text(end, EMPTY) for end in ends]),)

    def _root(self) -> str:
        return self._members(Punctuation(), self._member)

    def write_pending(self) -> None:
        super().write_pending()
        self._json.write_pending()

    def _member(self, key: str | Rx, value: Conjunction) -> Symbols:
        stops = [end[0] for end in (self._style["key_end"], *self._style["json_key_ends"])]
        return (*self._marks.text(self._style["key"], _name(key, stops)), self._rule(value))

    def options(self, facts: Facts, schema: Conjunction) -> Iterator[Symbols]:
        string, rest = self._strings(facts)
        end = self._style["value_end"]
        if string is not None:
            start = self._marks.text(self._style["key_end"], EMPTY)
            yield (*start, *self._marks.until(string, end, self._stop))
        for symbols in self._json.options(rest, schema):
            yield (*self._json_start, *symbols, *self._marks.text(end, EMPTY))


class _WithoutText(JsonWriter):
    """Writes JSON without a text in its strings."""

    def __init__(self, schemas: Schemas, writer: GrammarWriter, text: str) -> None:
        super().__init__(schemas, writer)
        self._never = Joined((ANY, literal(text), ANY))

    def _text(self, texts: Texts) -> Iterator[Symbols]:
        yield from super()._text(replace(texts, never=texts.never | {self._never}))
