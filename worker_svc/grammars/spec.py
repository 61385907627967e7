"""The constraint on a request's output, and the checks and rewrites that precede compilation."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from protos.limits import MAX_GRAMMAR_BYTES
from protos.triptych.v1 import common_pb2
from protos.validation import EMPTY_CONSTRAINT
from worker_svc.grammars.lowering.json_schema import SchemaBudget, lower_schema
from worker_svc.grammars.lowering.limits import MAX_ALTERNATIVES, MAX_NESTING, MAX_TAGS, MAX_WHITESPACE
from worker_svc.grammars.lowering.refusals import refusal
from worker_svc.grammars.lowering.regex import lower_regex

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
"""The kinds of constraint that a request may send."""
Source = Literal["json", "regex", "ebnf", "tag"]
"""The kinds of text that xgrammar compiles."""

# Matches any JSON object.
_ANY_OBJECT: Final = '{"type": "object", "additionalProperties": true}'

# Matches JSON strings whole, and brackets. An unclosed string extends to the end of the text, so every text
# is scanned in linear time.
_JSON_PIECES: Final = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
# The same for GBNF: literals, classes and comments whole, and the characters that are counted.
_GRAMMAR_PIECES: Final = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\n]*|[()|]', re.DOTALL
)

# Marks a structural tag in the form that older clients send.
_LEGACY_TAG: Final = "structures"


@dataclass(frozen=True)
class Spec:
    """One constraint, as the client sent it."""

    kind: Kind
    """How to read `text`."""
    text: str = ""
    """A schema, expression, grammar or tag; a JSON list of choices; empty for any JSON object."""

    @cached_property
    def key(self) -> bytes:
        """Digest that identifies the spec."""
        text = f"{self.kind}\0{self.text}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def spec_of(structured: common_pb2.StructuredOutput) -> Spec:
    """Reads a constraint; the caller checks it.

    Raises:
        InvalidArgument: if it is empty.
    """
    match structured.WhichOneof("spec"):
        case "json_object":
            return Spec("json_object")
        case "choice":
            return Spec("choice", json.dumps(list(structured.choice.values)))
        case "json_schema" | "regex" | "grammar" | "structural_tag" as kind:
            return Spec(kind, getattr(structured, kind))
        case _:
            raise refusal(EMPTY_CONSTRAINT)


def check_size(spec: Spec) -> None:
    """Checks the size of a spec.

    Raises:
        InvalidArgument: the spec is too large.
    """
    size = len(spec.text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise refusal(
            f"{spec.kind} has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}; describe less of the output"
        )


def lower(spec: Spec) -> tuple[Source, str]:
    """Returns the text that xgrammar compiles, and its kind.

    Raises:
        InvalidArgument: the spec is malformed, exceeds a limit, or asks for something that cannot be
            enforced.
    """
    check_size(spec)
    match spec.kind:
        case "json_object":
            return "json", _ANY_OBJECT
        case "json_schema":
            return "json", json.dumps(lower_schema(_parse_json(spec), SchemaBudget()))
        case "regex":
            return "regex", lower_regex(spec.text)
        case "grammar":
            _check_grammar(spec.text)
            return "ebnf", spec.text
        case "choice":
            return "ebnf", _choices(spec)
        case "structural_tag":
            return "tag", json.dumps(_lower_tag(_parse_json(spec)))


def _parse_json(spec: Spec) -> Any:
    """Parses a spec's JSON after a check of its depth: Python's parser is recursive."""
    depth = deepest = 0
    for piece in _JSON_PIECES.finditer(spec.text):
        depth += (piece.group() in "[{") - (piece.group() in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise refusal(f"{spec.kind} is nested {deepest} levels deep; the limit is {MAX_NESTING}")
    try:
        return json.loads(spec.text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise refusal(f"{spec.kind} is not valid JSON: {error}") from error


def _finite(text: str) -> float:
    """Parses a number and rejects infinities and NaN, which Python accepts and JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number that JSON can represent")
    return value


def _check_grammar(text: str) -> None:
    """Checks the syntax and size of a GBNF grammar as far as possible without a parser.

    Raises:
        InvalidArgument: the text is not GBNF or exceeds a limit.
    """
    example = 'root ::= "yes" | "no"'
    if not text.strip():
        raise refusal(f"grammar is empty; send rules such as: {example}")
    if "::=" not in text:
        raise refusal(f"grammar has no rule; write GBNF, such as: {example} (Lark is not supported)")
    depth = deepest = alternatives = 0
    for piece in _GRAMMAR_PIECES.finditer(text):
        char = piece.group()
        alternatives += char == "|"
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise refusal(f"grammar nests {deepest} parentheses; the limit is {MAX_NESTING}")
    if alternatives > MAX_ALTERNATIVES:
        raise refusal(f"grammar has {alternatives} alternatives; the limit is {MAX_ALTERNATIVES}")


def _choices(spec: Spec) -> str:
    """Returns a grammar that matches one of the listed texts."""
    values = _parse_json(spec)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise refusal("choice must be a list of at least one string")
    if "" in values:
        raise refusal("choice must not contain an empty string")
    if len(values) > MAX_ALTERNATIVES:
        raise refusal(f"choice has {len(values)} strings; the limit is {MAX_ALTERNATIVES}")
    return "root ::= " + " | ".join(f'"{_escaped(value)}"' for value in dict.fromkeys(values))


def _escaped(text: str) -> str:
    """Escapes a text for a GBNF literal."""
    return "".join(
        f"\\{char}"
        if char in '"\\'
        else f"\\u{ord(char):04x}"
        if ord(char) < 0x20 or ord(char) == 0x7F
        else char
        for char in text
    )


def _lower_tag(tag: Any) -> Any:
    """Lowers the schemas and expressions inside a structural tag; see `lower_schema`.

    Raises:
        InvalidArgument: the tag is malformed or too large, or a part of it cannot be enforced.
    """
    if not isinstance(tag, dict):
        raise refusal("structural_tag must be a JSON object")
    if _LEGACY_TAG in tag:
        tag = _upgrade_legacy_tag(tag)
    budget = SchemaBudget()
    count = 0

    def lowered(node: Any) -> Any:
        nonlocal count
        if isinstance(node, list):
            return [lowered(item) for item in node]
        if not isinstance(node, dict):
            return node
        count += 1
        if count > MAX_TAGS:
            raise refusal(f"structural_tag has more than {MAX_TAGS} parts")
        changed = {
            name: lower_schema(value, budget) if name == "json_schema" else lowered(value)
            for name, value in node.items()
        }
        if "json_schema" in node:
            # Bounded as in a standalone schema: a model that writes only white space would never end.
            requested = node.get("max_whitespace_cnt")
            changed["max_whitespace_cnt"] = (
                min(requested, MAX_WHITESPACE) if type(requested) is int else MAX_WHITESPACE
            )
        if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
            changed["pattern"] = lower_regex(node["pattern"])
        if node.get("type") == "grammar" and isinstance(node.get("grammar"), str):
            _check_grammar(node["grammar"])
        return changed

    return lowered(tag)


def _upgrade_legacy_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """Converts `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` to the current form."""
    structures, triggers = tag[_LEGACY_TAG], tag.get("triggers")
    if not isinstance(structures, list) or not all(
        isinstance(each, dict) and {"begin", "end", "schema"} <= each.keys() for each in structures
    ):
        raise refusal("structural_tag's structures must each have begin, schema and end")
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
