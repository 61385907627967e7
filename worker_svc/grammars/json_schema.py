"""Takes JSON schemas (2020-12, and older spellings) apart into alternatives without combinators.

Each conjunction of schemas becomes a list of `Facts`, of which a value must fit at least one. Negation is
pushed to the keywords, so `not`, `oneOf`, `if` and the like leave nothing but facts. Unknown keywords are
annotations. `format` is enforced where the same schema has a `type` with strings; elsewhere it is one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import Any, Final, TypeAlias

from protos.errors import InvalidArgument
from worker_svc.grammars.expressions import AllOf, Rx, is_empty, parse_search, parse_whole, terminal
from worker_svc.grammars.json_documents import Documents
from worker_svc.grammars.json_facts import (
    FALSE,
    NUMBERS,
    TRUE,
    TYPES,
    Conjunction,
    Contains,
    Evaluated,
    Facts,
    Items,
    Literal,
    Numbers,
    Others,
    Properties,
    Texts,
    both,
    identity,
    type_of,
)
from worker_svc.grammars.limits import refuse_schema, shown

Alternatives: TypeAlias = Sequence[Facts]
"""Values fitting any of some facts."""

_EVERY: Final[Alternatives] = (Facts(),)
_TYPE_NAMES: Final[Mapping[str, frozenset[str]]] = {
    **{name: frozenset({name}) for name in TYPES - {"fraction"}}, "number": NUMBERS
}  # fmt: skip
_MAX_ALTERNATIVES: Final = 512
_MAX_WORK: Final = 100_000
_MAX_COUNT: Final = 100_000
_MAX_DEPTH: Final = 64
# The work of telling two branches of a oneOf apart, and that of an enum's value, in combined alternatives.
_OVERLAP_WORK: Final = 10
_VALUE_WORK: Final = 5
# Branches of an anyOf whose combinations are told apart for unevaluatedProperties and unevaluatedItems.
_MAX_TRACKED: Final = 6
_MAX_BRANCHES: Final = 100

# Expressions for `format`. Each describes texts that every strict parser accepts, which may be fewer than
# the standard allows.
_YEAR: Final = "[12][0-9]{3}"
_LEAP: Final = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|2[048]00|1[26]00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_NUMBER: Final = "[0-9]{1,4}"
_DAYS: Final = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_HOURS: Final = f"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST: Final = f"{_LABEL}(?:\\.{_LABEL}){{0,4}}"
_ATOM: Final = "[a-zA-Z0-9_+-]{1,20}"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_PCHAR: Final = f"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_PATH: Final = f"{_PCHAR}*"
_TAIL: Final = f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_PORT: Final = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4})"
_EMAIL: Final = f"{_ATOM}(?:\\.{_ATOM}){{0,4}}@{_LABEL}(?:\\.{_LABEL}){{1,4}}"
_URI: Final = (
    f"(?:(?:https?|ftp|file|wss?)://{_HOST}(?::{_PORT})?(?:/{_PATH})*{_TAIL}|mailto:{_EMAIL}"
    f"|urn:[a-z0-9][a-z0-9-]{{0,20}}[a-z0-9]:{_PCHAR}{{1,100}}|tel:\\+[0-9]{{3,15}})"
)
_POINTER: Final = "(?:/(?:[a-zA-Z0-9_. -]|~[01])*)*"

FORMATS: Final[dict[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_NUMBER}W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "ipv4": f"{_BYTE}(?:\\.{_BYTE}){{3}}",
    "ipv6": f"(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}(?::{_GROUP}){{0,2}})?::(?:{_GROUP}(?::{_GROUP}){{0,3}})?)",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|(?:/?[a-zA-Z0-9._~-]+(?:/{_PATH})*|/)?{_TAIL})",
    "uri-template": "(?:[a-zA-Z0-9._~/-]|\\{[a-zA-Z_][a-zA-Z0-9_]*\\})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,4}})(?:#|{_POINTER})",
}
"""Expressions by format name; each describes the whole text and has no anchors."""


class Schemas:
    """The schemas of a document."""

    def __init__(self, root: Any) -> None:
        if not isinstance(root, dict | bool):
            refuse_schema("$", "must be an object (or true)")
        self.documents = Documents(root)
        self._nodes: dict[int, Any] = {}
        self._made: dict[Any, Any] = {}
        self._known: dict[tuple[Literal, bool], Alternatives] = {}
        self._conjunctions: dict[Conjunction, Alternatives] = {}
        self._overlaps: dict[Conjunction, bool] = {}
        self._open: set[tuple[Literal, bool]] = set()
        self._work = 0
        self.root = self.schema(root, ())

    def place(self, schema: Conjunction) -> str:
        """Returns the path of a conjunction's first schema, for errors."""
        return min((self.documents.place(self._nodes.get(number)) for number, _, _ in schema), default="$")

    def schema(self, node: Any, scope: tuple[str, ...], *, holds: bool = True) -> Conjunction:
        """Returns a conjunction of one schema, which holds or must not."""
        # A reference alone stands for its target, so that uses of a definition share what is known of it.
        for _ in range(_MAX_DEPTH):
            if isinstance(node, bool) or node == {}:
                return TRUE if (node is not False) == holds else FALSE
            if not isinstance(node, dict):
                refuse_schema("$", f"has {shown(node)} where a schema belongs: an object, or true")
            base = self.documents.base(node)
            scope = scope if base in scope else (*scope, base)
            if node.keys() != {"$ref"}:
                break
            node = self.documents.resolve(node["$ref"], node)
        self._nodes[id(node)] = node
        return frozenset({(id(node), scope, holds)})

    def alternatives(self, schema: Conjunction) -> Alternatives:
        """Returns the alternatives of a conjunction; refuses a part that cannot be enforced."""
        if schema not in self._conjunctions:
            if schema >= FALSE:
                return ()
            self._conjunctions[schema] = self.product(
                *(self._literal(each, tracked=False) for each in sorted(schema, key=lambda each: (not each[2], each[:2]))),
                where=self.place(schema),
            )  # fmt: skip
        return self._conjunctions[schema]

    def _literal(self, literal: Literal, *, tracked: bool) -> Alternatives:
        key = literal, tracked
        if key not in self._known:
            number, scope, holds = literal
            node = self._nodes[number]
            where = self.documents.place(node)
            if key in self._open:
                refuse_schema(where, "refers to itself without an object or array in between")
            if len(self._open) > _MAX_DEPTH:
                refuse_schema(where, "is nested too deep")
            self._open.add(key)
            try:
                reader = _Reader(self, node, scope, where, tracked=tracked)
                self._known[key] = reader.holds() if holds else reader.fails()
            finally:
                self._open.discard(key)
        return self._known[key]

    def tracked(self, schema: Conjunction) -> Alternatives:
        """Like `alternatives` for one schema, with the parts evaluated."""
        if schema >= FALSE:
            return ()
        return self.product(*(self._literal(each, tracked=True) for each in schema), where="$")

    def product(self, *factors: Alternatives, where: str) -> Alternatives:
        """Returns the alternatives of values fitting all factors."""
        found: Alternatives = _EVERY
        for factor in factors:
            if len(factor) == 1 and factor[0] == _EVERY[0]:
                continue
            self.spend(
                len(found) * len(factor), where, "combines too many alternatives; describe less of the output"
            )
            met = (one.meet(other) for one in found for other in factor)
            found = [each for each in met if each is not None]
            if len(found) > _MAX_ALTERNATIVES:
                refuse_schema(
                    where, f"has more than {_MAX_ALTERNATIVES} alternatives; describe less of the output"
                )
        return found

    def overlap(self, one: Conjunction, other: Conjunction) -> bool:
        """Whether a value may match both; never false by mistake."""
        pair = both(one, other)
        if pair not in self._overlaps:
            self.spend(_OVERLAP_WORK, self.place(one), "is in a oneOf of too many schemas; use anyOf")
            self._overlaps[pair] = not self._is_empty(pair, 2)
        return self._overlaps[pair]

    def _is_empty(self, schema: Conjunction, depth: int) -> bool:
        """Whether a conjunction plainly matches nothing, looking `depth` levels into required parts."""
        if schema >= FALSE:
            return True
        try:
            return all(self._facts_are_empty(facts, depth) for facts in self.alternatives(schema))
        except InvalidArgument:
            return False  # it is being read, or cannot be enforced; the latter is reported elsewhere

    def _facts_are_empty(self, facts: Facts, depth: int) -> bool:
        if not depth or not facts.types <= {"array", "object"}:
            return False
        for kind in facts.types:
            if kind == "array":
                parts = [facts.items.at(index) for index in range(min(facts.items.least, 8))]
            else:
                parts = [
                    both(facts.properties.schemas.get(name, TRUE), *(
                        each.schema for each in facts.properties.others if each.may_include(name)
                    ))
                    for name in facts.properties.required
                ]  # fmt: skip
            if not any(self._is_empty(part, depth - 1) for part in parts):
                return False
        return True

    def node(self, schema: Conjunction) -> Any:
        """Returns the schema of which `schema` was made."""
        return next((self._nodes[number] for number, _, holds in schema if holds), schema == TRUE)

    def made(self, node: Mapping[str, Any], like: Mapping[str, Any]) -> Any:
        """Returns a schema outside the document; `like` is the schema it replaces."""
        key = id(like), identity(node)
        if key not in self._made:
            self.documents._index(node, self.documents.base(like), self.documents.place(like))  # noqa: SLF001
            self._made[key] = node
        return self._made[key]

    def expression(self, pattern: Any, where: str, *, whole: bool = False) -> Rx:
        """Returns a parsed expression; refuses one that cannot be enforced."""
        if not isinstance(pattern, str):
            refuse_schema(where, f"has the pattern {shown(pattern)}, which is not a text")
        try:
            return parse_whole(pattern) if whole else parse_search(pattern)
        except ValueError as error:
            refuse_schema(where, f"has the pattern {shown(pattern, width=60)}, which {error}")

    def spend(self, work: int, where: str, refusal: str) -> None:
        """Counts work against the budget of the document; beyond it, the schema is refused."""
        self._work += work
        if self._work > _MAX_WORK:
            refuse_schema(where, refusal)


class _Reader:
    """Reads a schema."""

    def __init__(
        self, schemas: Schemas, node: Mapping[str, Any], scope: tuple[str, ...], where: str, *, tracked: bool
    ) -> None:
        self._schemas = schemas
        self._node = node
        self._scope = scope
        self._where = where
        self._tracked = tracked or any(name in node for name in ("unevaluatedProperties", "unevaluatedItems"))

    def holds(self) -> Alternatives:
        found = self.product(*(read() for read in self._keywords()))
        return self._unevaluated_items(self._unevaluated_properties(found, holds=True), holds=True)

    def fails(self) -> Alternatives:
        found: list[Facts] = []
        for failing in (
            self._wrong_type, self._wrong_value, self._wrong_number, self._wrong_text, self._wrong_items,
            self._wrong_properties, self._wrong_combination,
        ):  # fmt: skip
            found += failing()
        if "unevaluatedProperties" in self._node or "unevaluatedItems" in self._node:
            rest = self.product(*(read() for read in self._keywords()))
            found += self._unevaluated_properties(rest, holds=False)
            found += self._unevaluated_items(self._unevaluated_properties(rest, holds=True), holds=False)
        return [replace(each, evaluated=Evaluated()) for each in found]

    def _keywords(self) -> Sequence[Callable[[], Alternatives]]:
        return (
            self._type, self._value, self._number, self._text, self._items, self._properties,
            self._dependencies, self._references, self._combinations, self._condition,
        )  # fmt: skip

    # -- parts of a schema

    def product(self, *factors: Alternatives) -> Alternatives:
        return self._schemas.product(*factors, where=self._where)

    def _refuse(self, what: str) -> Any:
        refuse_schema(self._where, what)

    def _part(self, node: Any, *, holds: bool = True) -> Conjunction:
        return self._schemas.schema(node, self._scope, holds=holds)

    def _inside(self, node: Any, *, holds: bool = True) -> Alternatives:
        """Returns the alternatives of a schema for the same value."""
        part = self._part(node, holds=holds)
        if self._tracked and holds:
            return self._schemas.tracked(part)
        return self._schemas.alternatives(part)

    def _named(self, keyword: str) -> Mapping[str, Any]:
        value = self._node.get(keyword)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._refuse(f"has {keyword} that are not an object")
        return value  # type: ignore[no-any-return]

    def _listed(self, keyword: str) -> list[Any]:
        value = self._node[keyword]
        if not isinstance(value, list) or not value:
            self._refuse(f"has a {keyword} that is not a list of at least one schema")
        return value  # type: ignore[no-any-return]

    def _names(self, value: Any, keyword: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._refuse(f"has a {keyword} that is not a list of names")
        return value  # type: ignore[no-any-return]

    def _count(self, keyword: str) -> int | None:
        value = self._node.get(keyword)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | Decimal)
            or value != int(value)
            or value < 0
        ):
            self._refuse(f"has a {keyword} that is not a non-negative integer")
        if value > _MAX_COUNT:
            if keyword.startswith("max"):
                return None if keyword != "maxContains" else _MAX_COUNT
            self._refuse(f"has the {keyword} {shown(value)}; at most {_MAX_COUNT} is supported")
        return int(value)

    # -- types, values, numbers, texts

    def _types(self) -> frozenset[str]:
        value = self._node.get("type")
        if value is None:
            return TYPES
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in _TYPE_NAMES for name in names):
            self._refuse(
                f"has the type {shown(value)}; it must be one of {', '.join(sorted(_TYPE_NAMES))}, or a list of them"
            )
        return TYPES & frozenset().union(*(_TYPE_NAMES[name] for name in names))

    def _type(self) -> Alternatives:
        return (Facts(types=self._types()),)

    def _wrong_type(self) -> Alternatives:
        types = TYPES - self._types()
        return (Facts(types=types),) if types else ()

    def _allowed(self) -> list[list[Any]]:
        """Returns the values of `const` and of `enum`, as far as they are present."""
        lists = []
        if "const" in self._node:
            lists.append([self._node["const"]])
        if "enum" in self._node:
            values = self._node["enum"]
            if not isinstance(values, list):
                self._refuse("has an enum that is not a list of values")
            lists.append(values)
        work = _VALUE_WORK * sum(map(len, lists))
        self._schemas.spend(work, self._where, "has too many enum values; describe less of the output")
        return lists

    def _value(self) -> Alternatives:
        return self.product(*(
            [*self._simple(values), *(each for value in values for each in self._structured(value, holds=True))]
            for values in self._allowed()
        ))  # fmt: skip

    def _simple(self, values: Iterable[Any]) -> Alternatives:
        simple = {
            identity(value): value for value in reversed(list(values)) if not isinstance(value, list | dict)
        }
        if not simple:
            return ()
        ordered = dict(reversed(simple.items()))
        return (Facts(frozenset(map(type_of, ordered.values())), ordered),)

    def _structured(self, value: Any, *, holds: bool) -> Alternatives:
        if isinstance(value, list):
            schema: dict[str, Any] = {
                "type": "array", "minItems": len(value), "prefixItems": [{"const": each} for each in value], "items": False
            }  # fmt: skip
        elif isinstance(value, dict):
            schema = {
                "type": "object", "required": list(value), "additionalProperties": False,
                "properties": {name: {"const": each} for name, each in value.items()},
            }  # fmt: skip
        else:
            return ()
        return self._schemas.alternatives(self._part(self._schemas.made(schema, self._node), holds=holds))

    def _wrong_value(self) -> Alternatives:
        found: list[Facts] = []
        for values in self._allowed():
            simple = frozenset(identity(value) for value in values if not isinstance(value, list | dict))
            found += self.product(
                (Facts(excluded=simple),),
                *(self._structured(value, holds=False) for value in values if isinstance(value, list | dict)),
            )
        return found

    def _bounds(self) -> list[Numbers]:
        found = []
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            value = self._node.get(name)
            if value is None or (isinstance(value, bool) and name.startswith("exclusive")):
                continue
            if isinstance(value, bool) or not isinstance(value, int | Decimal):
                self._refuse(f"has a {name} that is not a number")
            bound = Decimal(value)
            if name == "multipleOf":
                if bound <= 0:
                    self._refuse("has a multipleOf that is not a number above 0")
                found.append(Numbers(multiples=frozenset({bound})))
            elif "inimum" in name:
                found.append(
                    Numbers(low=(bound, name[0] == "e" or self._node.get("exclusiveMinimum") is True))
                )
            else:
                found.append(
                    Numbers(high=(bound, name[0] == "e" or self._node.get("exclusiveMaximum") is True))
                )
        return found

    def _number(self) -> Alternatives:
        numbers = Numbers()
        for each in self._bounds():
            numbers = numbers.meet(each)
        return _pruned(Facts(numbers=numbers))

    def _wrong_number(self) -> Alternatives:
        found = []
        for each in self._bounds():
            if each.low is not None:
                wrong = Numbers(high=(each.low[0], not each.low[1]))
            elif each.high is not None:
                wrong = Numbers(low=(each.high[0], not each.high[1]))
            else:
                wrong = Numbers(never_multiples=each.multiples)
            found.append(Facts(NUMBERS, numbers=wrong))
        return found

    def _expressions(self) -> list[Rx]:
        found = []
        if self._node.get("pattern") is not None:
            found.append(self._schemas.expression(self._node["pattern"], self._where))
        name = self._node.get("format")
        if isinstance(name, str) and name in FORMATS and "type" in self._node and "string" in self._types():
            form = self._schemas.expression(FORMATS[name], self._where, whole=True)
            # A pattern may be wider than our expression, as that of zod for times without an offset.
            if not is_empty(terminal(AllOf((*found, form)))):
                found.append(form)
        return found

    def _text(self) -> Alternatives:
        texts = Texts(self._count("minLength") or 0, self._count("maxLength"), frozenset(self._expressions()))
        return _pruned(Facts(texts=texts))

    def _wrong_text(self) -> Alternatives:
        wrong = [Texts(never=frozenset({each})) for each in self._expressions()]
        wrong += self._outside(Texts, "Length")
        return [Facts(frozenset({"string"}), texts=each) for each in wrong]

    def _outside(self, kind: Callable[..., Any], what: str) -> list[Any]:
        """Returns the sets with fewer and with more parts than `min…` and `max…` allow."""
        least, most = self._count(f"min{what}"), self._count(f"max{what}")
        fewer = [kind(most=least - 1)] if least else []
        return fewer if most is None else [*fewer, kind(least=most + 1)]

    # -- arrays

    def _array_parts(self) -> tuple[list[Any], Any]:
        """Returns the schemas of the first items, and of the rest (`None` if it is not described)."""
        prefix, rest = self._node.get("prefixItems"), self._node.get("items")
        if isinstance(rest, list):  # draft 7
            if prefix is not None:
                self._refuse("has items as a list beside prefixItems; use prefixItems alone")
            prefix, rest = rest, self._node.get("additionalItems")
        prefix = [] if prefix is None else prefix
        if not isinstance(prefix, list):
            self._refuse("has prefixItems that are not a list")
        return prefix, rest

    def _contains(self) -> Contains | None:
        if "contains" not in self._node:
            return None
        least, most = self._count("minContains"), self._count("maxContains")
        return Contains(0, self._part(self._node["contains"]), 1 if least is None else least, most)

    def _items(self) -> Alternatives:
        prefix, rest = self._array_parts()
        contains = self._contains()
        items = Items(
            tuple(map(self._part, prefix)),
            TRUE if rest is None else self._part(rest),
            self._count("minItems") or 0,
            self._count("maxItems"),
            () if contains is None or (not contains.least and contains.most is None) else (contains,),
            self._node.get("uniqueItems") is True,
        )
        evaluated = Evaluated(
            items=len(prefix),
            all_items=rest is not None,
            matching=() if contains is None else (contains.schema,),
        )
        return _pruned(Facts(items=items, evaluated=evaluated))

    def _wrong_items(self) -> Alternatives:
        prefix, rest = self._array_parts()
        wrong = [
            Items((*[TRUE] * index, self._part(schema, holds=False)), least=index + 1)
            for index, schema in enumerate(prefix)
        ]
        if rest is not None:
            wrong.append(Items(contains=(Contains(len(prefix), self._part(rest, holds=False)),)))
        wrong += self._outside(Items, "Items")
        if (contains := self._contains()) is not None:
            if contains.least == 1:
                wrong.append(Items(rest=self._part(self._node["contains"], holds=False)))
            elif contains.least:
                wrong.append(Items(contains=(replace(contains, least=0, most=contains.least - 1),)))
            if contains.most is not None:
                wrong.append(Items(contains=(replace(contains, least=contains.most + 1, most=None),)))
        if self._node.get("uniqueItems") is True:
            self._refuse("excludes arrays with uniqueItems, which cannot be enforced")
        return _pruned(*(Facts(frozenset({"array"}), items=each) for each in wrong))

    # -- objects

    def _described(self) -> tuple[frozenset[str], dict[Rx, Any]]:
        """Returns the names in `properties`, and the schemas in `patternProperties`."""
        patterns = {
            self._schemas.expression(pattern, self._where): schema
            for pattern, schema in self._named("patternProperties").items()
        }
        return frozenset(self._named("properties")), patterns

    def _properties(self) -> Alternatives:
        names, patterns = self._described()
        rest = self._node.get("additionalProperties")
        key = self._node.get("propertyNames")
        properties = Properties(
            {name: self._part(schema) for name, schema in self._named("properties").items()},
            tuple((rx, self._part(schema)) for rx, schema in patterns.items()),
            () if rest is None or rest is True else (Others(names, frozenset(patterns), self._part(rest)),),
            names=TRUE if key is None else self._part(key),
            required=tuple(dict.fromkeys(self._required())),
            least=self._count("minProperties") or 0,
            most=self._count("maxProperties"),
        )
        evaluated = Evaluated(names, frozenset(patterns), all_names=rest is not None)
        return _pruned(Facts(properties=properties, evaluated=evaluated))

    def _required(self) -> list[str]:
        value = self._node.get("required")
        if value is None or isinstance(value, bool):  # a boolean is draft 3's
            return []
        return self._names(value, "required")

    def _wrong_properties(self) -> Alternatives:
        names, patterns = self._described()
        wrong = [
            Properties({name: self._part(schema, holds=False)}, required=(name,))
            for name, schema in self._named("properties").items()
        ]
        nothing = frozenset[Any]()
        some = [
            Others(nothing, nothing, self._part(schema, holds=False), matching=rx)
            for rx, schema in patterns.items()
        ]
        if self._node.get("additionalProperties") is not None:
            some.append(
                Others(
                    names, frozenset(patterns), self._part(self._node["additionalProperties"], holds=False)
                )
            )
        if self._node.get("propertyNames") is not None:
            some.append(
                Others(nothing, nothing, TRUE, key=self._part(self._node["propertyNames"], holds=False))
            )
        wrong += [Properties(some=(each,)) for each in some if FALSE not in (each.schema, each.key)]
        wrong += [Properties({name: FALSE}) for name in self._required()]
        wrong += self._outside(Properties, "Properties")
        for name, dependent in self._dependents():
            if isinstance(dependent, list):
                wrong += [
                    Properties({other: FALSE}, required=(name,)) for other in dependent if other != name
                ]
        return _pruned(*(Facts(frozenset({"object"}), properties=each) for each in wrong))

    def _dependents(self) -> list[tuple[str, Any]]:
        """Returns names and, for each, the names or the schema that its presence requires."""
        found = list(self._named("dependentSchemas").items())
        for keyword in ("dependentRequired", "dependencies"):
            for name, value in self._named(keyword).items():
                schema = keyword == "dependencies" and isinstance(value, dict | bool)
                found.append((name, value if schema else self._names(value, keyword)))
        return found

    def _dependencies(self) -> Alternatives:
        factors = []
        for name, dependent in self._dependents():
            absent = Facts(properties=Properties({name: FALSE}))
            if isinstance(dependent, list):
                if not dependent:
                    continue
                factors.append([absent, _present(*dependent, name)])
            else:
                factors.append([absent, *self.product(self._inside(dependent), (_present(name),))])
        return self.product(*factors)

    # -- combinations

    def _references(self) -> Alternatives:
        return self.product(*(self._inside(target) for target in self._targets()))

    def _targets(self) -> list[Any]:
        documents, found = self._schemas.documents, []
        if "$ref" in self._node:
            found.append(documents.resolve(self._node["$ref"], self._node))
        if "$dynamicRef" in self._node:
            found.append(documents.resolve_dynamic(self._node["$dynamicRef"], self._node, self._scope))
        return found

    def _combinations(self) -> Alternatives:
        factors: list[Alternatives] = []
        if "allOf" in self._node:
            factors += [self._inside(each) for each in self._listed("allOf")]
        if "anyOf" in self._node:
            factors.append(self._any_of(self._listed("anyOf")))
        if "oneOf" in self._node:
            factors.append(self._one_of(self._listed("oneOf")))
        if "not" in self._node:
            factors.append(self._inside(self._node["not"], holds=False))
        return self.product(*factors)

    def _any_of(self, branches: list[Any]) -> Alternatives:
        if not self._tracked:
            return [each for branch in branches for each in self._inside(branch)]
        if len(branches) > _MAX_TRACKED:
            self._refuse(f"has more than {_MAX_TRACKED} schemas in an anyOf beside an unevaluated keyword")
        found: list[Facts] = []
        for count in range(1, len(branches) + 1):
            for chosen in combinations(range(len(branches)), count):
                found += self.product(*(
                    self._inside(branch, holds=index in chosen) for index, branch in enumerate(branches)
                ))  # fmt: skip
        return found

    def _one_of(self, branches: list[Any]) -> Alternatives:
        if len(branches) > _MAX_BRANCHES:
            self._refuse(f"has a oneOf of more than {_MAX_BRANCHES} schemas; use anyOf")
        parts = [self._part(branch) for branch in branches]
        found: list[Facts] = []
        for index, branch in enumerate(branches):
            others = [
                self._inside(other, holds=False)
                for at, other in enumerate(branches)
                if at != index and self._schemas.overlap(parts[index], parts[at])
            ]
            found += self.product(self._inside(branch), *others)
        return found

    def _condition(self) -> Alternatives:
        if "if" not in self._node:
            return _EVERY
        then, otherwise = self._node.get("then", True), self._node.get("else", True)
        if then is True and otherwise is True and not self._tracked:
            return _EVERY
        return [
            *self.product(self._inside(self._node["if"]), self._inside(then)),
            *self.product(self._inside(self._node["if"], holds=False), self._inside(otherwise)),
        ]

    def _wrong_combination(self) -> Alternatives:
        node, found = self._node, list[Facts]()
        for each in [*self._targets(), *(self._listed("allOf") if "allOf" in node else ())]:
            found += self._inside(each, holds=False)
        if "anyOf" in node:
            found += self.product(*(self._inside(each, holds=False) for each in self._listed("anyOf")))
        if "oneOf" in node:
            branches = self._listed("oneOf")[: _MAX_BRANCHES + 1]
            found += self.product(*(self._inside(each, holds=False) for each in branches))
            for one, other in combinations(branches, 2):
                if self._schemas.overlap(self._part(one), self._part(other)):
                    found += self.product(self._inside(one), self._inside(other))
        if "not" in node:
            found += self._inside(node["not"])
        if "if" in node:
            then, otherwise = node.get("then", True), node.get("else", True)
            found += self.product(self._inside(node["if"]), self._inside(then, holds=False))
            found += self.product(self._inside(node["if"], holds=False), self._inside(otherwise, holds=False))
        for name, dependent in self._dependents():
            if not isinstance(dependent, list):
                found += self.product((_present(name),), self._inside(dependent, holds=False))
        return found

    # -- unevaluated parts

    def _unevaluated_properties(self, found: Alternatives, *, holds: bool) -> Alternatives:
        if "unevaluatedProperties" not in self._node:
            return found if holds else ()
        schema = self._part(self._node["unevaluatedProperties"], holds=holds)
        changed: list[Facts] = []
        for facts in found:
            seen = facts.evaluated
            if seen.all_names:
                changed += (facts,) if holds else ()
                continue
            others = (Others(seen.names, seen.patterns, schema),)
            extra = Properties(others=others) if holds else Properties(some=others)
            kinds = TYPES if holds else frozenset({"object"})
            if holds or schema != FALSE:
                changed += self.product(
                    (facts,), (Facts(kinds, properties=extra, evaluated=Evaluated(all_names=True)),)
                )
        return changed

    def _unevaluated_items(self, found: Alternatives, *, holds: bool) -> Alternatives:
        if "unevaluatedItems" not in self._node:
            return found if holds else ()
        value = self._node["unevaluatedItems"]
        changed: list[Facts] = []
        for facts in found:
            seen = facts.evaluated
            if seen.all_items:
                changed += (facts,) if holds else ()
                continue
            schema = self._part(value, holds=holds)
            if seen.matching:
                nodes = [self._schemas.node(each) for each in seen.matching]
                either = self._schemas.made({"anyOf": [*nodes, value]}, self._node)
                schema = self._part(either, holds=holds)
            if holds:
                extra = Items(tuple([TRUE] * seen.items), schema)
            else:
                extra = Items(contains=(Contains(seen.items, schema),))
            kinds = TYPES if holds else frozenset({"array"})
            changed += self.product(
                (facts,), (Facts(kinds, items=extra, evaluated=Evaluated(all_items=True)),)
            )
        return changed


def _pruned(*facts: Facts) -> Alternatives:
    return [each for each in (one.pruned() for one in facts) if each is not None]


def _present(*names: str) -> Facts:
    return Facts(frozenset({"object"}), properties=Properties(dict.fromkeys(names, TRUE), required=names))
