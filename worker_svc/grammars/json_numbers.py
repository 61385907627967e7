"""Terminals for sets of JSON numbers.

Numbers with bounds are written without exponents, so that an expression can compare their digits. All
arithmetic is exact.
"""

import json
import math
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Final, TypeAlias

Bound: TypeAlias = tuple[Decimal, bool]
"""A limit, and whether it is excluded."""

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
        """Whether a number is in the set."""
        if self.low and (value < self.low[0] or (value == self.low[0] and self.low[1])):
            return False
        if self.high and (value > self.high[0] or (value == self.high[0] and self.high[1])):
            return False
        return all(_divides(each, value) for each in self.multiples) and not any(
            _divides(each, value) for each in self.never_multiples
        )


def number_bodies(
    numbers: Numbers, excluded: frozenset[Decimal], *, integers: bool, fractions: bool
) -> list[str]:
    """Returns the bodies of terminals for a set of numbers.

    A body `%json …` is that of a rule, and `-%json …` that of a rule for the digits after the sign.

    Args:
        numbers: the set.
        excluded: numbers taken from it.
        integers: whether it contains integers.
        fractions: whether it contains other numbers.

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
    """Returns the digits before and after the point."""
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
