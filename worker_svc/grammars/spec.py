"""What a request's output must match, and everything about it that is refused before a compiler sees it."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from protos.wire import MAX_GRAMMAR_BYTES
from worker_svc.grammars.lowering.json_schema import Limits, lower_schema
from worker_svc.grammars.lowering.limits import MAX_ALTERNATIVES, MAX_NESTING, MAX_TAGS, MAX_WHITESPACE, PARAM
from worker_svc.grammars.lowering.limits import refused as _refused
from worker_svc.grammars.lowering.regex import lower_regex

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
Source = Literal["json", "regex", "ebnf", "tag"]
"""What a compiler is given."""

# What `additionalProperties` of a schema becomes is the schema's business; any object at all is this.
_ANY_OBJECT: Final = '{"type": "object", "additionalProperties": true}'

# Texts of JSON as wholes, and what opens and closes.
# What is never closed goes on to the end: every character is read once, whatever the text.
_JSON_PIECES: Final = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
# Literals, character classes and comments of a grammar as wholes, and what is counted.
_GRAMMAR_PIECES: Final = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\n]*|[()|]', re.DOTALL
)

# How a structural tag of the form that older clients send is written today.
_LEGACY_TAG: Final = "structures"


@dataclass(frozen=True)
class Spec:
    """One constraint, as sent."""

    kind: Kind
    text: str = ""
    """A schema, expression, grammar or tag; the choices as a JSON list; empty for any JSON object."""

    @cached_property
    def key(self) -> bytes:
        """Equal for equal specs, and for no others."""
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode(errors="surrogatepass")).digest()


def check_size(spec: Spec) -> None:
    """Bounds what is looked at at all.

    Raises:
        InvalidArgument: if the spec is too large.
    """
    size = len(spec.text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise _refused(
            f"{spec.kind} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are compiled, so describe less of the output"
        )


def lower(spec: Spec) -> tuple[Source, str]:
    """What xgrammar is to compile.

    Raises:
        InvalidArgument: if the spec is too large, deep or branched, is no such thing, or asks for what cannot be enforced.
    """
    check_size(spec)
    match spec.kind:
        case "json_object":
            return "json", _ANY_OBJECT
        case "json_schema":
            schema = _parsed(spec)
            return "json", json.dumps(lower_schema(schema, Limits()))
        case "regex":
            return "regex", lower_regex(spec.text, PARAM)
        case "grammar":
            _check_grammar(spec.text)
            return "ebnf", spec.text
        case "choice":
            return "ebnf", _choices(spec)
        case "structural_tag":
            return "tag", json.dumps(_lower_tag(_parsed(spec)))


def _parsed(spec: Spec) -> Any:
    """A spec's JSON, whose depth is bounded before it is read."""
    depth = deepest = 0
    for piece in _JSON_PIECES.finditer(spec.text):
        depth += (piece.group() in "[{") - (piece.group() in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise _refused(f"{spec.kind} is nested {deepest} deep; at most {MAX_NESTING} levels are compiled")
    try:
        return json.loads(spec.text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise _refused(f"{spec.kind} is not valid JSON: {error}") from error


def _finite(text: str) -> float:
    """A number; JSON knows no others, but Python does."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number that JSON can hold")
    return value


def _check_grammar(text: str) -> None:
    example = 'root ::= "yes" | "no"'
    if not text.strip():
        raise _refused(f"grammar is empty; send rules such as: {example}")
    if "::=" not in text:
        raise _refused(f"grammar has no rule; write GBNF, such as: {example} (Lark is not served)")
    depth = deepest = alternatives = 0
    for piece in _GRAMMAR_PIECES.finditer(text):
        char = piece.group()
        alternatives += char == "|"
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise _refused(f"grammar nests {deepest} parentheses; at most {MAX_NESTING} are compiled")
    if alternatives > MAX_ALTERNATIVES:
        raise _refused(f"grammar has {alternatives} alternatives; at most {MAX_ALTERNATIVES} are compiled")


def _choices(spec: Spec) -> str:
    """A grammar of a list of texts."""
    values = _parsed(spec)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise _refused("choice must be a list of at least one text")
    if "" in values:
        raise _refused("choice must not contain an empty text")
    if len(values) > MAX_ALTERNATIVES:
        raise _refused(f"choice has {len(values)} texts; at most {MAX_ALTERNATIVES} are compiled")
    return "root ::= " + " | ".join(f'"{_escaped(value)}"' for value in dict.fromkeys(values))


def _escaped(text: str) -> str:
    """A text as a literal of GBNF."""
    return "".join(
        f"\\{char}"
        if char in '"\\'
        else f"\\u{ord(char):04x}"
        if ord(char) < 0x20 or ord(char) == 0x7F
        else char
        for char in text
    )


def _lower_tag(tag: Any) -> Any:
    if not isinstance(tag, dict):
        raise _refused("structural_tag must be a JSON object")
    if _LEGACY_TAG in tag:
        tag = _modern_tag(tag)
    budget = Limits()
    count = 0

    def lowered(node: Any) -> Any:
        nonlocal count
        if isinstance(node, list):
            return [lowered(item) for item in node]
        if not isinstance(node, dict):
            return node
        count += 1
        if count > MAX_TAGS:
            raise _refused(f"structural_tag has more than {MAX_TAGS} parts")
        changed = {
            name: lower_schema(value, budget) if name == "json_schema" else lowered(value)
            for name, value in node.items()
        }
        if "json_schema" in node:
            # As in a schema by itself: a model that writes nothing but white space would never end.
            asked = node.get("max_whitespace_cnt")
            changed["max_whitespace_cnt"] = (
                min(asked, MAX_WHITESPACE) if type(asked) is int else MAX_WHITESPACE
            )
        if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
            changed["pattern"] = lower_regex(node["pattern"], PARAM)
        if node.get("type") == "grammar" and isinstance(node.get("grammar"), str):
            _check_grammar(node["grammar"])
        return changed

    return lowered(tag)


def _modern_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`` in today's form."""
    structures, triggers = tag[_LEGACY_TAG], tag.get("triggers")
    if not isinstance(structures, list) or not all(
        isinstance(each, dict) and {"begin", "end", "schema"} <= each.keys() for each in structures
    ):
        raise _refused("structural_tag's structures must each have begin, schema and end")
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": [
                {
                    "type": "tag",
                    "begin": each["begin"],
                    "content": {"type": "json_schema", "json_schema": each["schema"]},
                    "end": each["end"],
                }
                for each in structures
            ],
        },
    }
