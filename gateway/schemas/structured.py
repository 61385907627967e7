"""Constraints of answers: response formats and structured outputs, with plain schemas closed.

vLLM's engine closes schemas as well: a small model would add properties without end. JSON Schema allows
unlisted properties unless ``additionalProperties`` says otherwise, so closing an object only narrows the
answers.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urldefrag, urljoin

import orjson
from pydantic import BeforeValidator, Field, model_validator

from gateway.schemas.base import RequestModel, Unserved, quote
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb

_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
BY_NAME: Final = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
"""Keywords whose values are schemas by name."""
SCHEMAS: Final = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf", "prefixItems",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords with a schema or a list of schemas. Values of other keywords (``enum``, ``const``) are data."""
# Keywords that join several schemas on one value: a closed one would exclude the properties of the others.
_JOINING: Final = frozenset({
    "$dynamicRef", "allOf", "dependentRequired", "dependentSchemas", "dependencies", "if", "not", "oneOf", "unevaluatedProperties",
})  # fmt: skip
# Keywords beside which an object's own list of properties is not the whole of them.
_OPEN: Final = frozenset({
    "$ref", "additionalProperties", "anyOf", "maxProperties", "minProperties", "patternProperties", "propertyNames",
})  # fmt: skip


def closed(schema: Any) -> Any:
    """Returns a schema whose plain objects allow their listed properties only.

    Nothing changes where schemas are joined or negated anywhere in the document.
    """
    return schema if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, Mapping):
        return False
    return not _JOINING.isdisjoint(schema) or any(_joins(each) for each in _subschemas(schema))


def _subschemas(schema: Mapping[str, Any]) -> list[Any]:
    named = [item for key in BY_NAME if isinstance(schema.get(key), Mapping) for item in schema[key].values()]
    return [*named, *(schema[key] for key in SCHEMAS if key in schema)]


def refuse_foreign_references(schema: Any) -> None:
    """Refuses a schema that refers to one outside it: nothing is ever fetched."""
    waiting, known, found = [(schema, "")], {""}, list[tuple[str, str]]()
    while waiting:
        node, base = waiting.pop()
        if isinstance(node, list):
            waiting += ((item, base) for item in node)
        elif isinstance(node, Mapping):
            if isinstance(name := node.get("$id"), str):
                base = urldefrag(urljoin(base, name)).url
                known.add(base)
            found += ((base, str(node[word])) for word in _REFERENCES if node.get(word))
            waiting += ((item, base) for item in _subschemas(node))
    for base, reference in found:
        if not reference.startswith("#") and urldefrag(urljoin(base, reference)).url not in known:
            raise ValueError(
                f"has the $ref {quote(reference)}, which is not part of the schema; references are never fetched,"
                " so put the definition under $defs"
            )


def map_schemas(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a schema with the result of ``change`` for each schema directly in it."""
    if isinstance(schema, list):
        return [change(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMAS:
            result[keyword] = change(value)
        elif keyword in BY_NAME and isinstance(value, Mapping):
            result[keyword] = {name: change(item) for name, item in value.items()}
        else:
            result[keyword] = value
    return result


def _closed(schema: Any) -> Any:
    result = map_schemas(schema, _closed)
    if not isinstance(schema, Mapping):
        return result
    listed, required = schema.get("properties"), schema.get("required", ())
    if (
        isinstance(listed, Mapping)
        and listed
        and _OPEN.isdisjoint(schema)
        and isinstance(required, list | tuple)
        and all(name in listed for name in required if isinstance(name, str))
    ):
        result["additionalProperties"] = False
    return result


# Above the wire's own limit (``MAX_GRAMMAR_BYTES``): a schema may shrink before it is sent, because tags omit
# its annotations.
MAX_TEXT: Final = 1 << 20
MAX_CHOICES: Final = 10_000

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise ValueError(f"must be a JSON schema (an object), got {quote(value)}")  # noqa: TRY004
    return value


def _schema_or_text(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else _schema(value)


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_schema)]


class JsonSchema(RequestModel):
    """OpenAI's wrapping of a schema."""

    name: str | None = Field(None, max_length=256, description="Ignored.")
    description: str | None = Field(None, max_length=MAX_TEXT, description="Ignored.")
    schema_: Schema = Field(alias="schema", description="A JSON schema.")
    strict: bool | None = Field(
        None, description="Ignored: a schema that cannot be enforced as a whole is always refused."
    )


class ResponseFormat(RequestModel):
    """OpenAI's constraint on the form of an answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = Field(None, description="With type json_schema.")
    format: dict[str, Any] | None = Field(
        None, description="With type structural_tag: the format, as xgrammar defines it."
    )
    structures: list[dict[str, Any]] | None = Field(
        None, description="With type structural_tag, in its older form: objects with begin, schema and end."
    )
    triggers: list[str] | None = Field(
        None, description="With structures: texts that begin a structure in free text."
    )

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type 'json_schema', and only then")
        if self.type != "structural_tag" and (self.format or self.structures or self.triggers):
            raise ValueError("format, structures and triggers belong to type 'structural_tag'")
        if self.type == "structural_tag" and (self.format is None) == (self.structures is None):
            raise ValueError("type 'structural_tag' needs either format, or structures and triggers")
        return self

    def to_proto(self) -> pb.StructuredOutput | None:
        """Returns the constraint for the wire; ``None`` if the answer may be any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return pb.StructuredOutput(json_object=True)
            case "json_schema":
                assert self.json_schema is not None
                return pb.StructuredOutput(
                    json_schema=_json(closed(self.json_schema.schema_), "response_format")
                )
            case "structural_tag":
                tag = self.model_dump(include={"type", "format", "structures", "triggers"}, exclude_none=True)
                return pb.StructuredOutput(structural_tag=_json(tag, "response_format"))


class StructuredOutputs(RequestModel):
    """vLLM's constraint: exactly one of the first six fields."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "disable_any_whitespace": Unserved(
            (False,), "the model chooses the white space between the parts of JSON"
        ),
        "disable_additional_properties": Unserved(
            (False,),
            "plain objects allow their listed properties only, others what their schema says",
        ),
        "whitespace_pattern": Unserved((), "the model chooses the white space between the parts of JSON"),
    }

    json_: Annotated[dict[str, Any] | bool | Text | None, BeforeValidator(_schema_or_text)] = Field(
        None, alias="json", description="A JSON schema, as an object or as text."
    )
    regex: Text | None = Field(None, description="A regular expression for the whole answer.")
    choice: list[Text] | None = Field(
        None,
        min_length=1,
        max_length=MAX_CHOICES,
        fail_fast=True,
        description="The answer is one of these texts.",
    )
    grammar: Text | None = Field(None, description="A grammar in EBNF.")
    structural_tag: Text | None = Field(None, description="A structural tag, as JSON text.")
    json_object: bool | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        kinds = {
            "json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
            "structural_tag": self.structural_tag, "json_object": self.json_object or None,
        }  # fmt: skip
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(kinds)}, got {', '.join(given) or 'none'}")
        return self

    def to_proto(self) -> pb.StructuredOutput:
        """Returns the constraint for the wire."""
        if self.json_ is not None:
            text = (
                self.json_ if isinstance(self.json_, str) else _json(closed(self.json_), "structured_outputs")
            )
            return pb.StructuredOutput(json_schema=text)
        if self.choice is not None:
            return pb.StructuredOutput(choice=pb.Choices(values=self.choice))
        if self.json_object:
            return pb.StructuredOutput(json_object=True)
        if self.regex is not None:
            return pb.StructuredOutput(regex=self.regex)
        if self.grammar is not None:
            return pb.StructuredOutput(grammar=self.grammar)
        return pb.StructuredOutput(structural_tag=self.structural_tag or "")


def _json(value: Any, param: str) -> str:
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise InvalidArgument(f"'{param}' is nested too deep; use at most 64 levels", param=param) from error
    if len(text) > MAX_TEXT:
        raise InvalidArgument(f"'{param}' has {len(text)} bytes; send at most {MAX_TEXT}", param=param)
    return text.decode()
