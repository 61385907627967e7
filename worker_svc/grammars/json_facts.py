"""Facts about JSON values, into which schemas are taken apart, and terminals for sets of numbers.

`Facts` describe values of all types and can be combined. A schema is a set of alternatives. Schemas of parts
(properties, items) stay conjunctions of schemas until they are needed, so recursion ends. Numbers with bounds
are written without exponents, so that an expression can compare their digits. All arithmetic is exact.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, TypeAlias

from worker_svc.grammars.expressions import Rx, matches

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


Bound: TypeAlias = tuple[Decimal, bool]
"""A limit, and whether it is excluded."""


@dataclass(frozen=True)
class Numbers:
    """A set of numbers."""

    low: Bound | None = None
    """The least number."""
    high: Bound | None = None
    """The greatest number."""
    multiples: frozenset[Decimal] = frozenset()
    """Divisors of all members."""
    never_multiples: frozenset[Decimal] = frozenset()
    """Divisors of no member."""

    def meet(self, other: "Numbers") -> "Numbers":
        """Returns the numbers in both sets."""
        return Numbers(
            _tighter(self.low, other.low, sign=1),
            _tighter(self.high, other.high, sign=-1),
            self.multiples | other.multiples,
            self.never_multiples | other.never_multiples,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the bounds exclude every number."""
        if self.low is None or self.high is None:
            return False
        (low, open_low), (high, open_high) = self.low, self.high
        return low > high or (low == high and (open_low or open_high))

    def __contains__(self, value: Decimal) -> bool:
        if self.low and (value < self.low[0] or (value == self.low[0] and self.low[1])):
            return False
        if self.high and (value > self.high[0] or (value == self.high[0] and self.high[1])):
            return False
        return all(_divides(each, value) for each in self.multiples) and not any(
            _divides(each, value) for each in self.never_multiples
        )


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
    numbers: Numbers = Numbers()
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


_ANY_NUMBER: Final = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/"
_WHOLE: Final = "(0|[1-9][0-9]*)"
# Digits of a number without its sign, by the kinds of numbers it may be.
_FORMS: Final = {
    (True, True): rf"{_WHOLE}(\.[0-9]+)?",
    (True, False): _WHOLE,
    (False, True): rf"{_WHOLE}\.[0-9]*[1-9][0-9]*",
}
# Digits of a bound; more make an expression that takes too long. Numbers under larger bounds stay below this.
_MAX_DIGITS: Final = 320
_HUGE: Final = Decimal(10) ** _MAX_DIGITS
# llguidance computes multiples with binary floating point, which is exact up to here.
_MAX_EXACT: Final = 2**53
_MAX_FACTOR: Final = 100_000


def number_bodies(
    numbers: Numbers, excluded: frozenset[Decimal], *, integers: bool, fractions: bool
) -> list[str]:
    """Returns the bodies of terminals for a set of numbers.

    A body `%json …` is that of a rule, and `-%json …` that of a rule for the digits after the sign.

    Raises:
        ValueError: the set cannot be enforced; worded to follow "the schema …".
    """
    if integers and not fractions:
        numbers = replace(numbers, low=_whole(numbers.low, 1), high=_whole(numbers.high, -1))
    if numbers.is_empty:
        return []
    if numbers.high is not None and numbers.high[0] > _HUGE:
        numbers = replace(numbers, high=(_HUGE, True))
    if numbers.low is not None and numbers.low[0] < -_HUGE:
        numbers = replace(numbers, low=(-_HUGE, True))
    for bound in (numbers.low, numbers.high):
        if bound and (
            abs(bound[0].adjusted()) > _MAX_DIGITS or len(bound[0].as_tuple().digits) > _MAX_DIGITS
        ):
            raise ValueError(f"has a bound of more than {_MAX_DIGITS} digits")
    if numbers.multiples - {Decimal(1)} or (fractions and numbers.multiples) or numbers.never_multiples:
        return _multiples(numbers, excluded, integers=integers, fractions=fractions)
    form = _FORMS[integers, fractions]
    if not excluded and numbers.low is None and numbers.high is None:
        return [_ANY_NUMBER if integers and fractions else f"/-?{form}/"]
    signs = []
    if numbers.high is None or numbers.high[0] >= 0:
        signs.append(_magnitudes(form, numbers.low, numbers.high, excluded))
    if numbers.low is None or numbers.low[0] <= 0:
        low, high = _negated(numbers.high), _negated(numbers.low)
        signs.append(f"/-/ {_magnitudes(form, low, high, frozenset(-each for each in excluded))}")
    return [f"({' | '.join(signs)})"]


def _magnitudes(form: str, low: Bound | None, high: Bound | None, excluded: frozenset[Decimal]) -> str:
    """Returns a terminal for the numbers of at least zero between two bounds."""
    parts = [f"/{form}/"]
    if low is not None and low[0] >= 0:
        parts.append(f"/{_at_least(low[0])}/")
        if low[1]:
            parts.append(f"~(/{_equal(low[0])}/)")
    if high is not None:
        parts.append(
            f"~(/{_at_least(high[0])}/)" if high[1] else f"(~(/{_at_least(high[0])}/) | /{_equal(high[0])}/)"
        )
    parts += [f"~(/{_equal(each)}/)" for each in sorted(excluded) if each >= 0]
    return f"({' & '.join(parts)})"


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _at_least(value: Decimal) -> str:
    """Returns an expression for numbers without a sign of at least `value`."""
    whole, fraction = _digits(value)
    any_fraction = r"(\.[0-9]+)?"
    options = [f"[1-9][0-9]{{{len(whole)},}}{any_fraction}"]
    # Whatever follows the last other digit is at least as much as zeros.
    leading = whole if fraction else whole.rstrip("0") or "0"
    options += [
        f"{whole[:at]}[{int(digit) + 1}-9][0-9]{{{len(whole) - at - 1}}}{any_fraction}"
        for at, digit in enumerate(leading)
        if digit != "9"
    ]
    if not fraction:
        options.append(f"{leading}[0-9]{{{len(whole) - len(leading)}}}{any_fraction}")
    else:
        larger = [
            f"{fraction[:at]}[{int(digit) + 1}-9][0-9]*" for at, digit in enumerate(fraction) if digit != "9"
        ]
        options.append(rf"{whole}\.({'|'.join([*larger, f'{fraction}[0-9]*'])})")
    return f"({'|'.join(options)})"


def _equal(value: Decimal) -> str:
    whole, fraction = _digits(value)
    return rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?"


def _multiples(
    numbers: Numbers, excluded: frozenset[Decimal], *, integers: bool, fractions: bool
) -> list[str]:
    if numbers.never_multiples or not integers or excluded:
        raise ValueError("excludes multiples or values beside multipleOf, which cannot be enforced")
    factors = [Fraction(each) for each in numbers.multiples] + ([] if fractions else [Fraction(1)])
    factor = Fraction(math.lcm(*(each.numerator for each in factors)), math.gcd(*(each.denominator for each in factors)))  # fmt: skip
    scale = 0
    while (factor * 10**scale).denominator != 1:
        scale += 1
    bounds = [bound for bound in (numbers.low, numbers.high) if bound is not None]
    if (
        factor * 10**scale > _MAX_FACTOR
        or scale > 9
        or any(abs(bound[0]) * 10**scale > _MAX_EXACT for bound in bounds)
    ):
        raise ValueError(
            f"has a multipleOf of more than {_MAX_FACTOR} units, or bounds beyond it, which cannot be enforced"
        )
    # llguidance finds multiples of at least zero only.
    bodies = []
    for sign, low, high in (
        ("", numbers.low, numbers.high),
        ("-", _negated(numbers.high), _negated(numbers.low)),
    ):
        digits = Numbers(_tighter(low, (Decimal(0), False), sign=1), high)
        if digits.is_empty or (sign and high is not None and not high[0]):
            continue
        schema: dict[str, object] = {
            "type": "number" if fractions else "integer",
            "multipleOf": float(factor),
        }
        for bound, name in ((digits.low, "inimum"), (high, "aximum")):
            if bound is not None:
                schema[f"exclusiveM{name}" if bound[1] else f"m{name}"] = float(bound[0])
        options = {"whitespace_flexible": False}
        bodies.append(f"{sign}%json {json.dumps({**schema, 'x-guidance': options})}")
    return bodies


def _divides(factor: Decimal, value: Decimal) -> bool:
    return Fraction(value) % Fraction(factor) == 0


def _tighter(one: Bound | None, other: Bound | None, *, sign: int) -> Bound | None:
    bounds = [bound for bound in (one, other) if bound is not None]
    return max(bounds, key=lambda bound: (sign * bound[0], bound[1]), default=None)


def _whole(bound: Bound | None, sign: int) -> Bound | None:
    """Returns the same bound of integers as an inclusive integer."""
    if bound is None:
        return None
    limit = Fraction(bound[0]) * sign
    whole = math.floor(limit) + 1 if bound[1] else math.ceil(limit)
    return Decimal(whole * sign), False


def _negated(bound: Bound | None) -> Bound | None:
    return None if bound is None else (-bound[0], bound[1])
