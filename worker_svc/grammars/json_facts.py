"""Facts about JSON values, into which schemas are taken apart.

`Facts` describe values of all types and can be combined. A schema is a set of alternatives. Schemas of parts
(properties, items) stay conjunctions of schemas until they are needed, so recursion ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final, TypeAlias

from worker_svc.grammars.expressions import Rx, matches
from worker_svc.grammars.json_numbers import Numbers

Literal: TypeAlias = tuple[int, tuple[str, ...], bool]
"""A schema's id, the resources entered on the way to it, and whether a value must match it or must not."""
Conjunction: TypeAlias = frozenset[Literal]
"""Schemas holding together."""
TRUE: Final[Conjunction] = frozenset()
"""Holds for every value."""
FALSE: Final[Conjunction] = frozenset({(0, (), False)})
"""Holds for no value."""

TYPES: Final = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""Types of values. A fraction is a number that is not an integer."""
NUMBERS: Final = frozenset({"integer", "fraction"})


def both(*conjunctions: Conjunction) -> Conjunction:
    """Returns the conjunction of several."""
    found = TRUE.union(*conjunctions)
    return FALSE if FALSE.issubset(found) else found


@dataclass(frozen=True)
class Texts:
    """A set of strings."""

    least: int = 0
    """The fewest characters."""
    most: int | None = None
    """The most characters."""
    must: frozenset[Rx] = frozenset()
    """Expressions that match."""
    never: frozenset[Rx] = frozenset()
    """Expressions that do not match."""

    def meet(self, other: "Texts") -> "Texts":
        """Returns the strings in both sets."""
        return Texts(
            max(self.least, other.least), lower(self.most, other.most), self.must | other.must,
            self.never | other.never,
        )  # fmt: skip

    def __contains__(self, text: str) -> bool:
        """Whether a string is in the set."""
        return (
            self.least <= len(text) <= (len(text) if self.most is None else self.most)
            and all(matches(each, text) for each in self.must)
            and not any(matches(each, text) for each in self.never)
        )


@dataclass(frozen=True)
class Contains:
    """How many items match a schema."""

    start: int
    """Index of the first counted item."""
    schema: Conjunction
    """The schema."""
    least: int = 1
    """The fewest matches."""
    most: int | None = None
    """The most matches."""


@dataclass(frozen=True)
class Items:
    """A set of arrays."""

    prefix: tuple[Conjunction, ...] = ()
    """Schemas of the first items."""
    rest: Conjunction = TRUE
    """Schema of the others."""
    least: int = 0
    """The fewest items."""
    most: int | None = None
    """The most items."""
    contains: tuple[Contains, ...] = ()
    """Numbers of certain items."""
    unique: bool = False
    """Whether all items differ."""

    def at(self, index: int) -> Conjunction:
        """Returns the schema of an item."""
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def meet(self, other: "Items") -> "Items":
        """Returns the arrays in both sets."""
        length = max(len(self.prefix), len(other.prefix))
        return Items(
            tuple(both(self.at(index), other.at(index)) for index in range(length)),
            both(self.rest, other.rest),
            max(self.least, other.least),
            lower(self.most, other.most),
            tuple(dict.fromkeys(self.contains + other.contains)),
            self.unique or other.unique,
        )


@dataclass(frozen=True)
class Others:
    """Unlisted properties matching none of some expressions, and a schema for their values."""

    names: frozenset[str]
    """Listed names."""
    patterns: frozenset[Rx]
    """Expressions."""
    schema: Conjunction
    """Schema of the values."""
    key: Conjunction = TRUE
    """Schema of the names."""
    matching: Rx | None = None
    """An expression that the names match."""

    def may_include(self, name: str) -> bool:
        """Whether a name is not listed and matches as required; `key` is not considered."""
        return (
            name not in self.names
            and not any(matches(each, name) for each in self.patterns)
            and (self.matching is None or matches(self.matching, name))
        )


@dataclass(frozen=True)
class Properties:
    """A set of objects."""

    schemas: Mapping[str, Conjunction] = field(default_factory=dict)
    """Schemas of properties by name."""
    patterns: tuple[tuple[Rx, Conjunction], ...] = ()
    """Schemas of properties by an expression that matches their names."""
    others: tuple[Others, ...] = ()
    """Schemas of all remaining properties."""
    some: tuple[Others, ...] = ()
    """Each describes a property or more."""
    names: Conjunction = TRUE
    """Schema of the names."""
    required: tuple[str, ...] = ()
    """Names of present properties."""
    least: int = 0
    """The fewest properties."""
    most: int | None = None
    """The most properties."""

    def meet(self, other: "Properties") -> "Properties":
        """Returns the objects in both sets."""
        schemas = dict(self.schemas)
        for name, schema in other.schemas.items():
            schemas[name] = both(schemas.get(name, TRUE), schema)
        return Properties(
            schemas,
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.others + other.others)),
            tuple(dict.fromkeys(self.some + other.some)),
            both(self.names, other.names),
            tuple(dict.fromkeys(self.required + other.required)),
            max(self.least, other.least),
            lower(self.most, other.most),
        )


@dataclass(frozen=True)
class Evaluated:
    """Parts of a value that some schema describes, for `unevaluatedProperties` and `unevaluatedItems`."""

    names: frozenset[str] = frozenset()
    """Names of properties."""
    patterns: frozenset[Rx] = frozenset()
    """Expressions for names of properties."""
    all_names: bool = False
    """Whether that is all properties."""
    items: int = 0
    """The number of first items."""
    matching: tuple[Conjunction, ...] = ()
    """Schemas; items matching any of them are described."""
    all_items: bool = False
    """Whether that is all items."""

    def join(self, other: "Evaluated") -> "Evaluated":
        """Returns the parts that either describes."""
        return Evaluated(
            self.names | other.names, self.patterns | other.patterns, self.all_names or other.all_names,
            max(self.items, other.items), (*self.matching, *other.matching), self.all_items or other.all_items,
        )  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """An alternative of a schema."""

    types: frozenset[str] = TYPES
    """Types of the values."""
    values: Mapping[Any, Any] | None = None
    """If only some values without parts are allowed: these, by `identity`."""
    excluded: frozenset[Any] = frozenset()
    """Identities of forbidden values."""
    numbers: Numbers = Numbers()  # noqa: RUF009 - frozen
    texts: Texts = Texts()
    items: Items = Items()
    properties: Properties = Properties()
    evaluated: Evaluated = Evaluated()

    def meet(self, other: "Facts") -> "Facts | None":
        """Returns the values in both; `None` if there plainly are none."""
        values = self.values
        if values is None:
            values = other.values
        elif other.values is not None:
            values = {key: value for key, value in values.items() if key in other.values}
        met = Facts(
            self.types & other.types, values, self.excluded | other.excluded, self.numbers.meet(other.numbers),
            self.texts.meet(other.texts), self.items.meet(other.items), self.properties.meet(other.properties),
            self.evaluated.join(other.evaluated),
        )  # fmt: skip
        return met.pruned()

    def pruned(self) -> "Facts | None":
        """Returns the facts without types plainly lacking values; `None` if no type is left."""
        types = self.types
        if self.values is not None:
            kept = {key: value for key, value in self.values.items() if self._allows(value)}
            types &= frozenset(map(type_of, kept.values()))
            return replace(self, types=types, values=kept) if kept else None
        if self.numbers.is_empty:
            types -= NUMBERS
        if self.texts.most is not None and self.texts.least > self.texts.most:
            types -= {"string"}
        if not _has_arrays(self.items):
            types -= {"array"}
        if not _has_objects(self.properties):
            types -= {"object"}
        if not types:
            return None
        return self if types == self.types else replace(self, types=types)

    def _allows(self, value: Any) -> bool:
        if type_of(value) not in self.types or identity(value) in self.excluded:
            return False
        if isinstance(value, str):
            return value in self.texts
        if isinstance(value, bool) or value is None:
            return True
        return Decimal(value) in self.numbers


def _has_arrays(items: Items) -> bool:
    if items.most is not None and items.least > items.most:
        return False
    return all(items.at(index) != FALSE for index in range(min(items.least, len(items.prefix) + 1)))


def _has_objects(properties: Properties) -> bool:
    if properties.most is not None and max(properties.least, len(properties.required)) > properties.most:
        return False
    return all(properties.schemas.get(name) != FALSE for name in properties.required)


def type_of(value: Any) -> str:
    """Returns the type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | Decimal):
        return "integer" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def identity(value: Any) -> Any:
    """Returns a hashable object that is the same for equal JSON values only; 1 and 1.0 are equal."""
    if isinstance(value, list):
        return ("array", *map(identity, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(each)) for name, each in value.items()))
    return type_of(value), value


def lower(one: int | None, other: int | None) -> int | None:
    """Returns the lower of two limits, of which `None` is none."""
    return one if other is None else other if one is None else min(one, other)
