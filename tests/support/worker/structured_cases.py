"""Schemas like those of JSON Schema's public test suite, expressions and grammars for constrained output.

The cases are deterministic: the same number gives the same schema.
"""

import ast
import random
import re
from collections.abc import Callable
from typing import Any

_WORDS = ("id", "name", "kind", "size", "when", "tags", "owner", "note", "total", "active", "city", "score")
_PATTERNS = (
    "^[A-Z]{2}[0-9]{4}$", "^[a-z]+(-[a-z]+)*$", "^(red|green|blue)$", "^#[0-9a-f]{6}$", "^v[0-9]+\\.[0-9]+$",
    "[0-9]{3}", "^\\d{1,3}%$", "^[^\\s,]{1,12}$", "^(\\+1 )?[0-9]{3}-[0-9]{4}$", "^.{1,10}$", "^[\\w.]{2,8}$",
)  # fmt: skip
_FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip


def schema(number: int) -> dict[str, Any]:
    """Returns one case: mostly an object, as tools and clients send, sometimes another type."""
    rng = random.Random(number)
    if number % 25 == 24:
        return _recursive(rng)
    if number % 6 == 5:
        return _any(rng, 2)
    return _with_definitions(rng) if number % 7 == 3 else _object(rng, 3)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[Callable[[random.Random], dict[str, Any]]] = [
        _string,
        _integer,
        _number,
        _enum,
        _const,
        lambda _: {"type": "boolean"},
        lambda _: {"type": "null"},
    ]
    if depth and rng.random() < 0.5:
        return rng.choice([_object, _array, _tuple, _union, _one_of, _map])(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _string(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case 2:
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(12)}
        case _:
            return {"type": "string", "maxLength": 30, "description": "a few words"}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    bounds: list[dict[str, Any]] = [
        {}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + rng.randrange(3000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randrange(50)}, {"minimum": low + 0.5},
    ]  # fmt: skip
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random) -> dict[str, Any]:
    low = round(rng.uniform(-100, 100), rng.randrange(4))
    bounds: list[dict[str, Any]] = [
        {}, {"minimum": low}, {"exclusiveMaximum": low}, {"minimum": low, "maximum": round(low + rng.uniform(1, 50), 2)},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    ]  # fmt: skip
    return {"type": "number", **rng.choice(bounds)}


def _enum(rng: random.Random) -> dict[str, Any]:
    values = ["low", "medium", "high", 1, 2.5, None, True, [1, 2], {"a": "b"}, 'say "hi"', "naïve", "a\nb"]
    return {"enum": rng.sample(values, rng.randrange(1, 6))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 0, False, None, {"x": [1]}])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    result: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    match rng.randrange(6):
        case 0:
            result["additionalProperties"] = False
        case 1:
            result["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
            result["maxProperties"] = len(names) + 1
        case 2:
            result["title"] = "A thing"
        case 3:
            result["minProperties"] = 1
            result["additionalProperties"] = False
        case _:
            pass
    return result


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    value = _any(rng, min(depth, 1))
    keys: list[dict[str, Any]] = [
        {"patternProperties": {"^[a-z]{2,5}$": value}, "additionalProperties": False, "maxProperties": 3},
        {"propertyNames": {"enum": ["north", "south"]}, "additionalProperties": value, "maxProperties": 2},
        {"propertyNames": {"pattern": "^[a-z]{1,4}$"}, "additionalProperties": value, "maxProperties": 3},
    ]
    return {"type": "object", **rng.choice(keys)}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    return {
        "type": "array",
        "items": _any(rng, depth),
        "minItems": low,
        "maxItems": low + rng.randrange(1, 3),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    prefix = [_any(rng, depth) for _ in range(rng.randrange(1, 4))]
    if rng.random() < 0.5:
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}
    return {"type": "array", "prefixItems": prefix, "items": {"type": "boolean"}, "maxItems": len(prefix) + 2}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": rng.sample(["string", "integer", "null", "boolean"], 2)}
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randrange(2, 4))]}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"oneOf": [_string(rng), _integer(rng), {"type": "null"}]}
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, kind: _any(rng, depth)},
                "required": ["type", kind],
            }
            for kind in ("circle", "square")
        ]
    }


def _with_definitions(rng: random.Random) -> dict[str, Any]:
    where = rng.choice(["$defs", "definitions"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        where: {"address": _object(rng, 1), "amount": _number(rng)},
        "type": "object",
        "properties": {
            "home": {"$ref": f"#/{where}/address"},
            "price": {"$ref": f"#/{where}/amount"},
            "others": {"type": "array", "items": {"$ref": f"#/{where}/address"}, "maxItems": 2},
        },
        "required": ["home", "price"],
    }


def _recursive(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "value": _integer(rng),
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["value"],
    }


REGEXES = (
    r"[a-z]+", r"[A-Z][a-z]{2,9}", r"\d{3}-\d{4}", r"(yes|no|maybe)", r"[0-9a-f]{8}", r"\(\d{3}\) \d{3}-\d{4}",
    r"(19|20)\d\d-(0[1-9]|1[0-2])", r"[a-z]+@[a-z]+\.(com|org|net)", r"v\d+\.\d+\.\d+", r"#[0-9a-fA-F]{3}([0-9a-fA-F]{3})?",
    r"-?\d+(\.\d+)?", r"(\d{1,3}\.){3}\d{1,3}", r"a*b+c?", r"(ab)+", r"[^aeiou\s]{5}", r"\w+ \w+", r"x{3,5}", r"(a|b|c)(d|e)",
    r"^start.*end$", r"[A-Z]{2}\d{2} ?\d[A-Z]{2}", r"\$\d+\.\d\d", r"(Mon|Tue|Wed|Thu|Fri), \d{1,2}:\d\d", r"[01]{8}",
    r"(https?)://[a-z]+\.[a-z]{2,3}(/[a-z0-9]*)*", r"[a-zA-Z_][a-zA-Z0-9_]*", r"(true|false)", r"\{\w+: \d+\}", r"\[\d+(, \d+)*\]",
    r"[\w.-]{3,12}", r"(one|two|three)( (one|two|three)){2}", r"\+\d{1,3} \d{6,10}", r"[aA][bB][cC]", r"(?:foo|bar)baz", r"\d+%",
    r"[\u00e0-\u00ff]{2,4}", r"[A-Za-z ]{10,20}\.", r"(\w+, ){2}\w+", r"\d{2}:\d{2}:\d{2}", r"([a-f]\d){4}", r"Q[1-4] 20\d\d",
    r"(left|right) (up|down)", r"[!-~]{4,8}", r"\S{1,10}", r"a.c", r"(the|a) (cat|dog) (sat|ran)\.", r"[0-9]{1,2}(st|nd|rd|th)",
    r"ISBN \d{3}-\d{10}", r"[MDCLXVI]{1,6}", r"(0|[1-9]\d{0,3}),\d", r"<b>[a-z ]{1,20}</b>",
)  # fmt: skip


def _arithmetic(text: str) -> bool:
    ast.parse(text.strip(), mode="eval")
    return re.fullmatch(r"[0-9+*() -]+", text) is not None


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += {"(": 1, ")": -1}[char]
        if depth < 0:
            return False
    return depth == 0


def _nested(pairs: dict[str, str]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        stack: list[str] = []
        for char in text:
            if char in pairs:
                stack.append(pairs[char])
            elif not stack or stack.pop() != char:
                return False
        return not stack

    return check


def _same_count(text: str) -> bool:
    half = len(text) // 2
    return text == "a" * half + "b" * half and half > 0


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def _python(text: str) -> bool:
    ast.parse(text)
    return True


GRAMMARS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ('root ::= "yes" | "no"', _matches("yes|no")),
    ('root ::= expr\nexpr ::= term (" + " term)*\nterm ::= [1-9] [0-9]? | "(" expr ")"', _arithmetic),
    ('root ::= "(" root ")" | "(" ")" ', _balanced),
    ('root ::= pair+\npair ::= "(" pair? ")"', _balanced),
    ('root ::= "a" root "b" | "ab"', _same_count),
    ('root ::= "[" root? "]" | "{" root? "}"', _nested({"[": "]", "{": "}"})),
    ('root ::= [a-z]{3,8} "\\n" [0-9]+', _matches("[a-z]{3,8}\n[0-9]+")),
    (
        'root ::= "SELECT " name (", " name)? " FROM " name\nname ::= [a-z]+ ',
        _matches("SELECT [a-z]+(, [a-z]+)? FROM [a-z]+"),
    ),
    (
        'root ::= item ("\\n" item){0,3}\nitem ::= "- " [A-Za-z ]{1,20}',
        _matches("- [A-Za-z ]{1,20}(\n- [A-Za-z ]{1,20}){0,3}"),
    ),
    (
        'root ::= name " = " value\nname ::= [a-z_]{1,8} "_x"\nvalue ::= [1-9] [0-9]{0,4} | "\\"" [a-z ]* "\\""',
        _python,
    ),
    ('root ::= "if x:\\n    y = " [0-9] ("\\nelse:\\n    y = " [0-9])?', _python),
    (
        'root ::= (key ": " val "\\n"){1,3}\nkey ::= "host" | "port"\nval ::= [a-z0-9]{1,9}',
        _matches("((host|port): [a-z0-9]{1,9}\n){1,3}"),
    ),
    ('root ::= "<p>" [^<>]{0,30} "</p>"', _matches("<p>[^<>]{0,30}</p>")),
    ('# a comment\nroot ::= "x" | # another\n "y"', _matches("x|y")),
    ('root ::= digit{2} ":" digit{2}\ndigit ::= [0-9]', _matches(r"\d\d:\d\d")),
    ('root ::= "é" | "日本" | "🙂"', lambda text: text in {"é", "日本", "🙂"}),
    ('root ::= ("north" | "south") " " ("east" | "west")', _matches("(north|south) (east|west)")),
    ('root ::= a | b\na ::= "1" b?\nb ::= "0" a?', _matches("(10)*1?|(01)*0?")),
    (
        'root ::= "[" (num ("," num)*)? "]"\nnum ::= "-"? [0-9]{1,3}',
        _matches(r"\[(-?\d{1,3}(,-?\d{1,3})*)?\]"),
    ),
    (
        'root ::= "move " [a-h] [1-8] " " [a-h] [1-8] ("=" [QRBN])?',
        _matches("move [a-h][1-8] [a-h][1-8](=[QRBN])?"),
    ),
)
"""Grammars, each with an independent check of its texts."""
