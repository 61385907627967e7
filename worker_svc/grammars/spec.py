"""The constraint on a request's output, and its form as a grammar of llguidance."""

import hashlib
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, Literal

from protos.limits import MAX_GRAMMAR_BYTES
from protos.triptych.v1 import common_pb2
from protos.validation import EMPTY_CONSTRAINT
from worker_svc.grammars.expressions import is_empty, parse_whole, terminal
from worker_svc.grammars.gbnf import write_gbnf
from worker_svc.grammars.grammar_writer import GrammarWriter, texts_terminal
from worker_svc.grammars.json_grammar import JsonWriter
from worker_svc.grammars.json_schema import Schemas
from worker_svc.grammars.limits import MAX_ALTERNATIVES, MAX_NESTING, refusal, shown
from worker_svc.grammars.tags import TagWriter, TokenNames

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
"""The kinds of constraint in a request."""

# Matches JSON strings whole, and brackets. An unclosed string extends to the end of the text, so every text
# is scanned in linear time.
_JSON_PIECES: Final = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
# Marks a structural tag in the form that older clients send.
_LEGACY_TAG: Final = "structures"


@dataclass(frozen=True)
class Spec:
    """A constraint, as the client sent it."""

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
    """Reads a constraint; the caller checks it. An empty one is refused."""
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
    """Refuses a spec that is too large."""
    size = len(spec.text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise refusal(
            f"{spec.kind} has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}; describe less of the output"
        )


def lower(spec: Spec, tokens: TokenNames) -> str:
    """Returns a constraint as a grammar of llguidance (Lark).

    Raises:
        InvalidArgument: the spec is malformed, exceeds a limit, or asks for something that cannot be
            enforced.
    """
    check_size(spec)
    writer = GrammarWriter()
    match spec.kind:
        case "json_object":
            start = JsonWriter(Schemas({"type": "object"}), writer).write()
        case "json_schema":
            start = JsonWriter(Schemas(_parse_json(spec)), writer).write()
        case "regex":
            start = writer.add(writer.new_rule("x"), [(writer.terminal(_expression(spec.text)),)])
        case "choice":
            start = writer.add(writer.new_rule("x"), [(writer.terminal(_choices(spec)),)])
        case "structural_tag":
            tag = _parse_json(spec)
            if not isinstance(tag, dict):
                raise refusal("structural_tag must be a JSON object")
            known = {"type", "format", _LEGACY_TAG, "triggers"}
            if tag.get("type", "structural_tag") == "structural_tag" and (unknown := tag.keys() - known):
                raise refusal(f"structural_tag has the field {shown(min(unknown))}, which is not supported")
            if _LEGACY_TAG in tag:
                tag = _upgrade_legacy_tag(tag)
            start = TagWriter(writer, tokens).write(tag)
        case _:
            start = write_gbnf(spec.text, writer)
    if start not in writer.prune():
        raise refusal(f"the {spec.kind} matches no finite value")
    return writer.text(start)


def _expression(pattern: str) -> str:
    if not pattern:
        raise refusal("the pattern '' is empty; omit it, or write what it should match")
    try:
        body = terminal(parse_whole(pattern))
    except ValueError as error:
        raise refusal(f"the pattern {shown(pattern, width=60)} {error}") from None
    if is_empty(body):
        raise refusal(f"the pattern {shown(pattern, width=60)} matches no text")
    return body


def _parse_json(spec: Spec) -> Any:
    """Parses a spec's JSON after a check of its depth: Python's parser is recursive."""
    depth = deepest = 0
    for piece in _JSON_PIECES.finditer(spec.text):
        depth += (piece.group() in "[{") - (piece.group() in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise refusal(f"{spec.kind} is nested {deepest} levels deep; the limit is {MAX_NESTING}")
    try:
        return json.loads(spec.text, parse_float=Decimal, parse_constant=_no_constant)
    except ValueError as error:
        raise refusal(f"{spec.kind} is not valid JSON: {error}") from error


def _no_constant(text: str) -> float:
    """Rejects infinities and NaN, which Python accepts and JSON does not have."""
    raise ValueError(f"{text} is not a number that JSON can represent")


def _choices(spec: Spec) -> str:
    values = _parse_json(spec)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise refusal("choice must be a list of at least one string")
    if "" in values:
        raise refusal("choice must not contain an empty string")
    if len(values) > MAX_ALTERNATIVES:
        raise refusal(f"choice has {len(values)} strings; the limit is {MAX_ALTERNATIVES}")
    return texts_terminal(list(dict.fromkeys(values)))


def _upgrade_legacy_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """Converts `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` to the current form."""
    structures, triggers = tag[_LEGACY_TAG], tag.get("triggers")
    if not isinstance(structures, list) or not all(
        isinstance(each, dict) and {"begin", "end", "schema"} <= each.keys() for each in structures
    ):
        raise refusal("structural_tag's structures must each have begin, schema and end")
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": each["end"],
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
