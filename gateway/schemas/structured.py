"""``response_format`` (OpenAI's) and ``structured_outputs`` (vLLM's): what an answer must match."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import BeforeValidator, Field, model_validator

from gateway.quoting import quote
from gateway.schemas.base import RequestModel, Unserved
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb

MAX_TEXT: Final = 1 << 20
MAX_CHOICES: Final = 10_000

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise ValueError(f"must be a JSON schema (an object), got {quote(value)}")  # noqa: TRY004 - pydantic's signal
    return value


def _schema_or_text(value: Any) -> Any:
    return value if isinstance(value, str) else _schema(value)


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_schema)]


class JsonSchema(RequestModel):
    """OpenAI's wrapping of a schema. It is always enforced, whatever ``strict`` says."""

    name: Annotated[str | None, Field(max_length=256)] = None
    description: Annotated[str | None, Field(max_length=MAX_TEXT)] = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """How an answer is to look."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

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
        """The wire form; ``None`` for an answer that may be anything.

        Raises:
            InvalidArgument: if it is nested too deep to be written.
        """
        match self.type:
            case "text":
                return None
            case "json_object":
                return pb.StructuredOutput(json_object=True)
            case "json_schema":
                assert self.json_schema is not None
                return pb.StructuredOutput(json_schema=_json(self.json_schema.schema_, "response_format"))
            case "structural_tag":
                tag = self.model_dump(include={"type", "format", "structures", "triggers"}, exclude_none=True)
                return pb.StructuredOutput(structural_tag=_json(tag, "response_format"))


class StructuredOutputs(RequestModel):
    """vLLM's constraint: exactly one of the first six."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "disable_any_whitespace": Unserved(
            (False,), "white space between the parts of JSON is the model's choice"
        ),
        "disable_additional_properties": Unserved(
            (False,),
            "properties that a schema does not list are left out unless it says additionalProperties",
        ),
        "whitespace_pattern": Unserved((), "white space between the parts of JSON is the model's choice"),
    }

    json_: Annotated[
        dict[str, Any] | bool | Text | None, BeforeValidator(_schema_or_text), Field(alias="json")
    ] = None
    regex: Text | None = None
    choice: Annotated[list[Text] | None, Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] = None
    grammar: Text | None = None
    structural_tag: Text | None = None
    json_object: bool | None = None

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
        """The wire form.

        Raises:
            InvalidArgument: if a schema is nested too deep to be written.
        """
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else _json(self.json_, "structured_outputs")
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
        raise InvalidArgument(
            f"'{param}' is nested too deep; at most 64 levels are compiled", param=param
        ) from error
    if len(text) > MAX_TEXT:
        raise InvalidArgument(f"'{param}' has {len(text)} bytes; at most {MAX_TEXT} are taken", param=param)
    return text.decode()
