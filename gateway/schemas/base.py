"""Parses request bodies and words refusals."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gateway.quoting import clip, quote
from protos.errors import InvalidArgument, Unsupported

M = TypeVar("M", bound="RequestModel")

# Longest unknown name that is compared with the known ones: the effort grows with the name, and the longest
# known name has 27 letters.
_MAX_COMPARED_NAME: Final = 40

# No request object has as many fields. Beyond this, checking each of them would take seconds.
_MAX_FIELDS: Final = 256


class Unserved(NamedTuple):
    """A parameter that clients send out of habit, accepted only with values that change nothing.

    ``null`` is always accepted.
    """

    neutral: tuple[Any, ...] = ()
    """The accepted values."""
    hint: str = "it is not served by this deployment; omit it"
    """The advice in the error."""


class RequestModel(BaseModel):
    """A request body, or an object in one: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    """Known parameters that are not served, by name."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"is an object of {len(data)} fields; send at most {_MAX_FIELDS}")
        if not cls.unserved.keys() & data.keys():
            return data
        # In the body's order, so that the same body is always refused in the same words.
        for name, value in data.items():
            if (row := cls.unserved.get(name)) is None:
                continue
            if value is not None and not any(_same(value, neutral) for neutral in row.neutral):
                raise ValueError(f"{name}={quote(value)} is not supported: {row.hint}")
        return {name: value for name, value in data.items() if name not in cls.unserved}


def _same(value: Any, neutral: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def path_of(location: tuple[int | str, ...]) -> str:
    """Writes ``("messages", 0, "role")`` as ``messages[0].role``; cuts long names."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{clip(part)}" if text else clip(part)
    return text


def parse(model: type[M], body: bytes) -> M:
    """Parses a JSON body.

    Raises:
        InvalidArgument: one line that names the first invalid parameter and what to change.
    """
    if not body.strip():
        raise InvalidArgument("the request has no body; send a JSON object")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidArgument(f"the body must be a JSON object, got {quote(data)}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise refusal(model, error.errors(include_url=False)[0]) from error


def refusal(model: type[RequestModel], detail: ErrorDetails) -> InvalidArgument:
    """Returns the error for one of pydantic's findings."""
    location, value = detail["loc"], detail["input"]
    param = path_of(location)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match detail["type"]:
        case "missing":
            return InvalidArgument(f"'{param}' is required", param=param)
        case "extra_forbidden":
            return InvalidArgument(_unknown(model, location), param=param)
        case "value_error":
            # A finding about a whole object starts with the parameter's name.
            name = message.partition("=")[0].partition(" ")[0]
            if isinstance(value, dict) and name in value:
                param = path_of((*location, name))
            elif param:
                message = f"'{param}' {message}"
            elif message.startswith("is "):
                message = f"the body {message}"
            cls = Unsupported if " is not supported: " in message else InvalidArgument
            return cls(message, param=param)
        case "too_short" | "too_long":
            return InvalidArgument(
                f"'{param}' {message.partition(' ')[2].replace(' after validation', '')}", param=param
            )
        case "model_type" | "dict_type":
            return InvalidArgument(f"'{param}' must be a JSON object, got {quote(value)}", param=param)
        case _:
            return InvalidArgument(f"'{param}' {message}, got {quote(value)}", param=param)


def _unknown(model: type[RequestModel], location: tuple[int | str, ...]) -> str:
    name = str(location[-1])
    # Suggestions need the known names, which are only at hand for the top level. That is where people
    # mistype.
    comparable = len(location) == 1 and len(name) <= _MAX_COMPARED_NAME
    near = difflib.get_close_matches(name, model.model_fields, n=1) if comparable else []
    hint = f"did you mean '{near[0]}'?" if near else "omit it"
    return f"unknown parameter '{path_of(location)}'; {hint}"
