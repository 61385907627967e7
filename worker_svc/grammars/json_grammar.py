"""Writes values of JSON schemas as rules of an llguidance grammar (Lark), in JSON.

Properties follow the schema's order, unlisted properties come last, and no listed name occurs twice.
White space is free up to a limit. Rules without a finite text are removed with their users.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

from worker_svc.grammars.expressions import (
    ALL,
    ANY,
    FREE_CHARACTER,
    AllOf,
    AnyOf,
    Chars,
    Not,
    Repeat,
    Rx,
    is_empty,
    literal,
    matches,
    terminal,
)
from worker_svc.grammars.grammar_writer import GrammarWriter, Repeated, Symbol, texts_terminal
from worker_svc.grammars.json_facts import (
    FALSE,
    NUMBERS,
    TRUE,
    Conjunction,
    Facts,
    Items,
    Others,
    Properties,
    Texts,
    both,
    lower,
    number_bodies,
)
from worker_svc.grammars.json_schema import Schemas
from worker_svc.grammars.limits import refuse_schema

_MAX_KEY_PATTERNS: Final = 6
_MAX_UNIQUE: Final = 64
_MAX_STATES: Final = 2000


@dataclass(frozen=True)
class _Object:
    """A set of objects, ready to be written."""

    listed: tuple[tuple[str, Conjunction, bool], ...]
    """Name, schema, and whether it is required."""
    others: tuple[tuple[Rx, Conjunction], ...]
    """Expression for further names, and the schema of their values."""
    some: tuple[tuple[Rx, Conjunction], ...] = ()
    """If not empty: further properties, any of which is present."""
    least: int = 0
    most: int | None = None


Symbols: TypeAlias = tuple[Symbol, ...]
Member: TypeAlias = Callable[[str | Rx, Conjunction], Symbols]
"""Writes a property: its name, or an expression for it, and its value."""


@dataclass(frozen=True)
class Punctuation:
    """Symbols around and between the parts of a value."""

    opening: Symbols = ()
    comma: Symbols = ()
    closing: Symbols = ()


class JsonWriter:
    """Writes the rules of a schema. Subclasses write values in other notations."""

    objects = Punctuation(("OPEN_OBJECT",), ("COMMA",), ("CLOSE_OBJECT",))
    arrays = Punctuation(("OPEN_ARRAY",), ("COMMA",), ("CLOSE_ARRAY",))
    words: ClassVar[Mapping[Any, str]] = {None: "null", True: "true", False: "false"}

    def __init__(self, schemas: Schemas, writer: GrammarWriter) -> None:
        self._schemas = schemas
        self._writer = writer
        self._names: dict[Conjunction, str] = {}
        self._pending: list[Conjunction] = []

    def write(self) -> str:
        """Writes all rules and returns the first; refuses a schema that cannot be enforced."""
        root = self._root()
        self.write_pending()
        return root

    def _root(self) -> str:
        return self._rule(self._schemas.root)

    def _members(self, punctuation: Punctuation, member: Member) -> str:
        """Returns a rule for the root's properties, written in another way than nested ones."""
        root = self._schemas.root
        return self._writer.add(
            self._writer.new_rule("m"),
            dict.fromkeys(
                self._object(form, punctuation, member)
                for facts in self._schemas.alternatives(root)
                if facts.values is None and "object" in facts.types
                for form in self._objects(facts.properties, root)
            ),
        )

    def write_pending(self) -> None:
        """Writes the rules that others need."""
        while self._pending:
            schema = self._pending.pop()
            name = self._names[schema]
            options = [
                symbols
                for facts in self._schemas.alternatives(schema)
                for symbols in self.options(facts, schema)
            ]
            self._writer.add(name, dict.fromkeys(options))

    def _rule(self, schema: Conjunction) -> str:
        if schema not in self._names:
            self._names[schema] = self._writer.new_rule("r")
            self._pending.append(schema)
        return self._names[schema]

    def _refuse(self, schema: Conjunction, what: str) -> NoReturn:
        refuse_schema(self._schemas.place(schema), what)

    def options(self, facts: Facts, schema: Conjunction) -> Iterator[Symbols]:
        """Yields the ways to write a value fitting some facts."""
        if facts.values is not None:
            if facts.values:
                yield from self._literals(facts.values.values())
            return
        if "null" in facts.types and ("null", None) not in facts.excluded:
            yield (f'"{self.words[None]}"',)
        if "boolean" in facts.types:
            for value in (True, False):
                if ("boolean", value) not in facts.excluded:
                    yield (f'"{self.words[value]}"',)
        if facts.types & NUMBERS:
            yield from self._number(facts, schema)
        if "string" in facts.types:
            yield from self._text(self._texts(facts))
        if "array" in facts.types:
            yield self._array(facts.items, schema)
        if "object" in facts.types:
            for properties in self._objects(facts.properties, schema):
                yield self._object(properties, self.objects, self._member)

    def _literals(self, values: Iterable[Any]) -> Iterator[Symbols]:
        """Yields the ways to write some values without parts."""
        texts = sorted(map(value_text, values), key=lambda text: text in ("null", "true", "false"))
        # One terminal for all texts keeps long lists fast.
        yield (self._writer.terminal(texts_terminal(texts)),)

    def _number(self, facts: Facts, schema: Conjunction) -> Iterator[Symbols]:
        excluded = frozenset(Decimal(value) for kind, value in facts.excluded if kind in NUMBERS)
        try:
            bodies = number_bodies(
                facts.numbers,
                excluded,
                integers="integer" in facts.types,
                fractions="fraction" in facts.types,
            )
        except ValueError as error:
            self._refuse(schema, str(error))
        for body in bodies:
            sign, is_rule, schema_text = body.partition("%json")
            if not is_rule:
                yield (self._writer.terminal(body),)
                continue
            rule = self._writer.add_body(is_rule + schema_text)
            yield ('"-"', rule) if sign else (rule,)

    # -- strings

    def _texts(self, facts: Facts) -> Texts:
        excluded = [literal(value) for kind, value in facts.excluded if kind == "string"]
        return replace(facts.texts, never=facts.texts.never | frozenset(excluded))

    def _text(self, texts: Texts) -> Iterator[Symbols]:
        body = text_terminal(texts)
        if not is_empty(body):
            yield (self._writer.terminal(f'"\\"" {body} "\\""'),)

    def _member(self, key: str | Rx, value: Conjunction) -> Symbols:
        return (self._writer.terminal(self._key(key)), "COLON", self._rule(value))

    def _key(self, key: str | Rx) -> str:
        """Returns the body of a terminal for a property's name."""
        if isinstance(key, str):
            return texts_terminal([value_text(key)])
        name = f"{FREE_CHARACTER}*" if key == ANY else terminal(key, quote='"')
        return f'"\\"" {name} "\\""'

    # -- arrays

    def _item(self, value: Conjunction) -> Symbols:
        return (self._rule(value),)

    def _unique_item(self, value: Any) -> Symbols:
        (written,) = self._literals([value])
        return written

    def _array(self, items: Items, schema: Conjunction) -> Symbols:
        if items.rest == FALSE:
            items = replace(items, most=lower(items.most, len(items.prefix)))
        if items.unique and (items.most is None or items.most > 1):
            return self._unique(items, schema)
        if items.contains:
            return (*self.arrays.opening, self._counted(items, schema))
        if not items.prefix:
            item = self._item(items.rest)
            opening, comma, closing = self.arrays.opening, self.arrays.comma, self.arrays.closing
            if items.most == 0:
                return (*opening, *closing)
            following = self._writer.add(self._writer.new_rule("i"), [(*comma, *item)])
            most = None if items.most is None else items.most - 1
            some = (*item, Repeated(following, max(items.least - 1, 0), most), *closing)
            rest = self._writer.add(
                self._writer.new_rule("a"), [some, *([closing] if not items.least else [])]
            )
            return (*opening, rest)
        return (*self.arrays.opening, self._counted(items, schema))

    def _counted(self, items: Items, schema: Conjunction) -> str:
        """Returns a rule for the items of an array and its end: one state for each position and count."""
        writer, names = self._writer, dict[tuple[int, ...], str]()
        longest = max(
            len(items.prefix), items.least, 0 if items.most is None else items.most + 1,
            *(each.start for each in items.contains), 0,
        )  # fmt: skip
        caps = [each.least if each.most is None else max(each.most, each.least) for each in items.contains]
        pending: list[tuple[int, ...]] = []

        def name_of(state: tuple[int, ...]) -> str:
            if state not in names:
                names[state] = writer.new_rule("c")
                pending.append(state)
                if len(names) > _MAX_STATES:
                    self._refuse(schema, "counts too many items; use smaller limits")
            return names[state]

        first = name_of((0,) * (len(caps) + 1))
        while pending:
            state = pending.pop()
            at, counts = state[0], state[1:]
            options: list[Symbols] = []
            if at >= items.least and all(
                count >= each.least for count, each in zip(counts, items.contains, strict=True)
            ):
                options.append(self.arrays.closing)
            if items.most is None or at < items.most:
                for chosen in product((False, True), repeat=len(caps)):
                    found = self._chosen(items, at, counts, chosen, caps)
                    if found is not None:
                        value, after = found
                        comma = self.arrays.comma if at else ()
                        following = name_of((min(at + 1, max(longest, 1)), *after))
                        options.append((*comma, *self._item(value), following))
            writer.add(names[state], options)
        return first

    def _chosen(
        self, items: Items, at: int, counts: tuple[int, ...], chosen: tuple[bool, ...], caps: list[int]
    ) -> tuple[Conjunction, tuple[int, ...]] | None:
        """Returns the schema of an item that counts for some of the limits, and the counts after it."""
        parts, after = [items.at(at)], []
        for each, count, counting, cap in zip(items.contains, counts, chosen, caps, strict=True):
            if counting and (at < each.start or (each.most is not None and count >= each.most)):
                return None
            if counting:
                parts.append(each.schema)
            elif each.most is not None and at >= each.start:
                parts.append(self._negated(each.schema))
            after.append(min(count + counting, cap))
        value = both(*parts)
        return None if value == FALSE else (value, tuple(after))

    def _negated(self, schema: Conjunction) -> Conjunction:
        if schema in (TRUE, FALSE):
            return FALSE if schema == TRUE else TRUE
        ((number, scope, holds),) = schema
        return frozenset({(number, scope, not holds)})

    def _unique(self, items: Items, schema: Conjunction) -> Symbols:
        """Returns the symbols of an array without equal items, whose values must be few."""
        found: dict[Any, Any] = {}
        alternatives = self._schemas.alternatives(items.rest)
        for facts in alternatives:
            values = facts.values
            if values is None and facts.types <= {"boolean", "null"}:
                values = {
                    key: key[1]
                    for key in (("null", None), ("boolean", True), ("boolean", False))
                    if key[0] in facts.types and key not in facts.excluded
                }
            if values is None:
                found.clear()
                break
            found.update(values)
        if not found or len(found) > _MAX_UNIQUE or items.prefix or items.contains:
            self._refuse(
                schema,
                "has uniqueItems, which can be enforced only if the items are listed in an enum; omit it",
            )
        writer, first, following = self._writer, self._writer.new_rule("u"), self._writer.new_rule("u")
        most = len(found) if items.most is None else min(items.most, len(found))
        for bit, value in enumerate(found.values()):
            written = self._unique_item(value)
            for name, comma in ((first, ()), (following, self.arrays.comma)):
                writer.add_if(
                    name,
                    (*comma, *written, f"{following}::set_bit({bit})"),
                    f"and(bit_clear({bit}), bit_count_lt(_, {most}))",
                )
        writer.add_if(following, self.arrays.closing, f"bit_count_ge(_, {items.least})")
        if not items.least:
            writer.add_if(first, self.arrays.closing, "is_zeros(_)")
        if items.least > most:
            return (*self.arrays.opening, writer.add(writer.new_rule("u"), []))
        return (*self.arrays.opening, f"{first}::0x0")

    # -- objects

    def _objects(self, properties: Properties, schema: Conjunction) -> Iterator[_Object]:
        """Yields the forms of an object: several if one of its properties must have something in common."""
        names = [
            *properties.schemas,
            *(name for name in properties.required if name not in properties.schemas),
        ]
        listed = {name: self._value_of(name, properties) for name in names}
        required = set(properties.required)
        if any(listed[name] == FALSE for name in required):
            return
        classes = self._classes(properties, listed, schema)
        choices: list[list[tuple[str | None, Others]]] = []
        for some in properties.some:
            options: list[tuple[str | None, Others]] = [(None, some)]
            options += [
                (name, some)
                for name in listed
                if some.may_include(name) and self._allows_name(some.key, name)
            ]
            choices.append(options)
        for chosen in product(*choices):
            values, needed, some_of = dict(listed), set(required), list[tuple[Rx, Conjunction]]()
            for name, some in chosen:
                if name is not None:
                    values[name] = both(values[name], some.schema)
                    needed.add(name)
                elif some_of:
                    self._refuse(
                        schema, "needs several properties that it does not name, which cannot be enforced"
                    )
                else:
                    some_of = [
                        (rx, both(value, some.schema))
                        for rx, value in self._classes(properties, listed, schema, some)
                    ]
                    some_of = [each for each in some_of if each[1] != FALSE]
            if any(values[name] == FALSE for name in needed) or (
                not some_of and any(name is None for name, _ in chosen)
            ):
                continue
            kept = tuple((name, value, name in needed) for name, value in values.items() if value != FALSE)
            yield self._counted_object(
                _Object(kept, classes, tuple(some_of), properties.least, properties.most), schema
            )

    def _counted_object(self, form: _Object, schema: Conjunction) -> _Object:
        """Checks that the number of properties can be enforced; drops limits without effect."""
        required = sum(needed for _, _, needed in form.listed) + bool(form.some)
        least = 0 if form.least <= required else form.least
        # The grammar cannot tell whether two further properties have the same name.
        if least > required + 1 and form.others:
            self._refuse(
                schema,
                f"has the minProperties {least} and allows properties that it does not list, which cannot be"
                " enforced together; list or require more of them",
            )
        most = form.most
        if most is not None and not form.others and not form.some and most >= len(form.listed):
            most = None
        return replace(form, least=least, most=most)

    def _value_of(self, name: str, properties: Properties) -> Conjunction:
        if not self._allows_name(properties.names, name):
            return FALSE
        return both(
            properties.schemas.get(name, TRUE),
            *(value for rx, value in properties.patterns if matches(rx, name)),
            *(each.schema for each in properties.others if each.may_include(name)),
        )

    def _allows_name(self, schema: Conjunction, name: str) -> bool:
        if schema == TRUE:
            return True
        return any(
            facts.meet(Facts(frozenset({"string"}), {("string", name): name})) is not None
            for facts in self._schemas.alternatives(schema)
        )

    def _classes(
        self, properties: Properties, listed: Iterable[str], schema: Conjunction, some: Others | None = None
    ) -> tuple[tuple[Rx, Conjunction], ...]:
        """Returns the kinds of unlisted names, and the schemas of their values."""
        patterns = dict.fromkeys(rx for rx, _ in properties.patterns)
        for each in properties.others:
            patterns.update(dict.fromkeys(each.patterns))
        if len(patterns) > _MAX_KEY_PATTERNS:
            self._refuse(schema, f"describes names by more than {_MAX_KEY_PATTERNS} expressions")
        common: list[Rx] = self._name_expressions(properties.names)
        if listed := list(listed):
            common.append(Not(AnyOf(tuple(map(literal, listed)))))
        if some is not None:
            common += [
                *self._name_expressions(some.key),
                *(() if some.matching is None else (some.matching,)),
            ]
            common += [
                Not(rx) for rx in (*sorted(some.patterns, key=repr), *map(literal, sorted(some.names)))
            ]
        found = []
        for chosen in product((True, False), repeat=len(patterns)):
            matching = {rx for rx, is_chosen in zip(patterns, chosen, strict=True) if is_chosen}
            value = both(
                *(value for rx, value in properties.patterns if rx in matching),
                *(each.schema for each in properties.others if not each.patterns & matching),
            )
            if value == FALSE:
                continue
            parts = [*(rx if rx in matching else Not(rx) for rx in patterns), *common]
            name = ANY if not parts else parts[0] if len(parts) == 1 else AllOf(tuple(parts))
            if not is_empty(terminal(name, quote='"')):
                found.append((name, value))
        return tuple(found)

    def _name_expressions(self, schema: Conjunction) -> list[Rx]:
        if schema == TRUE:
            return []
        options: list[Rx] = []
        for facts in self._schemas.alternatives(schema):
            if facts.values is not None:
                options += [literal(value) for value in facts.values.values() if isinstance(value, str)]
            elif "string" in facts.types:
                options.append(text_expression(self._texts(facts)))
        return [AnyOf(tuple(options))] if len(options) != 1 else options

    def _object(self, form: _Object, punctuation: Punctuation, member: Member) -> Symbols:
        writer = self._writer
        extra = [member(rx, value) for rx, value in form.others]
        needed = [member(rx, value) for rx, value in form.some]
        names: dict[tuple[int, int], str] = {}
        pending: list[tuple[int, int]] = []
        cap = max(form.least, 0 if form.most is None else form.most + 1, 1)

        def state(at: int, count: int) -> str:
            key = at, min(count, cap)
            if key not in names:
                names[key] = writer.new_rule("o")
                pending.append(key)
            return names[key]

        # Positions after the listed properties: before, and after, the one that must be present.
        last = len(form.listed) + bool(needed)
        first = state(0, 0)
        while pending:
            at, count = pending.pop()
            comma = punctuation.comma if count else ()
            is_full = form.most is not None and count >= form.most
            options: list[Symbols] = []
            if at < len(form.listed):
                name, value, is_required = form.listed[at]
                if not is_full:
                    options.append((*comma, *member(name, value), state(at + 1, count + 1)))
                if not is_required:
                    options.append((state(at + 1, count),))
            else:
                if at == last and count >= form.least:
                    options.append(punctuation.closing)
                if not is_full:
                    options += [(*comma, *each, state(at, count + 1)) for each in extra]
                    options += [(*comma, *each, state(at + 1, count + 1)) for each in needed if at < last]
            writer.add(names[at, count], options)
        return (*punctuation.opening, first)


def text_expression(texts: Texts) -> Rx:
    """Returns an expression for a set of strings."""
    parts = [*sorted(texts.must, key=repr), *(Not(each) for each in sorted(texts.never, key=repr))]
    if texts.least or texts.most is not None:
        parts.insert(0, Repeat(Chars(ALL), texts.least, texts.most))
    return ANY if not parts else parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def text_terminal(texts: Texts) -> str:
    """Returns the body of a terminal for the characters of a set of strings in JSON."""
    if not texts.must and not texts.never and texts.most != 0:
        most = "" if texts.most is None else texts.most
        return (
            f"({FREE_CHARACTER}){{{texts.least},{most}}}"
            if texts.least or texts.most is not None
            else f"{FREE_CHARACTER}*"
        )
    return terminal(text_expression(texts), quote='"')


def value_text(value: Any) -> str:
    """Returns a JSON value without parts as text, numbers as they were written."""
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)
