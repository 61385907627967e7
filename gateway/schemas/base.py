"""Parses request bodies and words refusals, with short quotations of a client's own input."""

import codecs
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import orjson
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails

from protos.errors import InvalidArgument, Unsupported

# Longest piece of a client's input that an error quotes.
_MAX_QUOTE: Final = 60


def quote(value: Any) -> str:
    """Returns ``value`` as JSON, cut short. The effort does not grow with the value."""
    text = ""
    for piece in _json_pieces(value):
        text += piece
        if len(text) > _MAX_QUOTE:
            return f"{text[:_MAX_QUOTE]}…"
    return text


def _json_pieces(value: Any) -> Iterator[str]:
    # Every level yields something before it goes deeper: a reader that stops early also bounds the depth.
    if isinstance(value, str):
        yield json.dumps(value[:_MAX_QUOTE], ensure_ascii=False)
    elif isinstance(value, dict):
        yield "{"
        for count, (key, item) in enumerate(value.items()):
            yield ", " if count else ""
            yield from _json_pieces(key)
            yield ": "
            yield from _json_pieces(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for count, item in enumerate(value):
            yield ", " if count else ""
            yield from _json_pieces(item)
        yield "]"
    else:
        yield json.dumps(value, default=str)


def as_json(value: Any) -> str:
    """Returns ``value`` as JSON text.

    Raises:
        ValueError: if it is nested too deep.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("is nested too deep; flatten it") from error


def clip(name: str) -> str:
    """Returns a name that a client made up, cut short."""
    return name if len(name) <= _MAX_QUOTE else f"{name[:_MAX_QUOTE]}…"


def omitted(kind: str, name: Any = None) -> str:
    """Returns the line that stands for a part of a conversation that no model here can read."""
    words = clip(kind).removeprefix("input_").replace("_", " ")
    return f"[{words} {quote(name)} omitted]" if isinstance(name, str) and name else f"[{words} omitted]"


M = TypeVar("M", bound="RequestModel")

# More than any request needs. Beyond this, checking each of them would take seconds.
_MAX_FIELDS: Final = 256

# Values of one body: every list, object and text costs a hundred bytes or more, and none must hold up other
# threads while it is read. Token ids are cheaper.
_MOST: Final = {"lists and objects": 100_000, "texts": 100_000, "values": 500_000}

# Ignored fields that are kept for the log.
_MAX_IGNORED: Final = 32


class Unserved(NamedTuple):
    """A parameter out of habit, accepted only with values without effect."""

    neutral: tuple[Any, ...] = ()
    """The accepted values."""
    hint: str = "it is not served by this deployment; omit it"
    """The advice in the error."""


class IgnoredFields:
    """Collects the fields of a body without effect: the context of its validation."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """Each name once, with the field around it: ``messages.name``."""
        return list(self._names)

    def add(self, name: str, field: str | None = None) -> None:
        """Adds ``name`` of an object in ``field``."""
        if len(self._names) < _MAX_IGNORED:
            self._names[clip(f"{field}.{name}" if field else name)] = None


def ignore(info: ValidationInfo, name: str) -> None:
    """Collects a field without effect."""
    if isinstance(info.context, IgnoredFields):
        info.context.add(name, info.field_name)


class RequestModel(BaseModel):
    """A request body, or an object in one, with strict types. A field that is null is unset."""

    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)

    unserved: ClassVar[Mapping[str, Unserved]] = {}
    """Known parameters that would change the output, by name."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Omits unserved fields of base classes."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name in properties.keys() & cls.unserved.keys():
            del properties[name]
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_or_refuse(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"is an object of {len(data)} fields; send at most {_MAX_FIELDS}")
        # Clients that write every field they know send null for those that they leave unset.
        if any(value is None or type(value) is float for value in data.values()):
            data = {name: _as_number(value) for name, value in data.items() if value is not None}
        if data.keys() <= _served_names(cls):
            return data
        # In the body's order, so that the same body is always refused in the same words.
        return {name: value for name, value in data.items() if cls._takes(name, value, info)}

    @classmethod
    def _takes(cls, name: str, value: Any, info: ValidationInfo) -> bool:
        """Returns whether the class reads a field; raises if dropping it would change the output."""
        if (row := cls.unserved.get(name)) is not None:
            if not any(_same(value, neutral) for neutral in row.neutral):
                raise ValueError(f"{name}={quote(value)} is not supported: {row.hint}")
            return False
        if name in _served_names(cls):
            return True
        ignore(info, name)
        return False


@functools.cache
def _served_names(cls: type[RequestModel]) -> frozenset[str]:
    """Returns the names of the fields of ``cls`` in JSON."""
    names: set[str] = set()
    for name, field in cls.model_fields.items():
        alias = field.validation_alias
        if isinstance(alias, AliasChoices):
            names |= {choice for choice in alias.choices if isinstance(choice, str)}
        else:
            names.add(alias if isinstance(alias, str) else name)
    return frozenset(names - cls.unserved.keys())


def _as_number(value: Any) -> Any:
    # JSON has one kind of number: 5.0 is an integer, and some clients write integers so.
    return int(value) if type(value) is float and value.is_integer() else value


def _same(value: Any, neutral: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def path_of(location: tuple[int | str, ...]) -> str:
    """Writes ``("messages", 0, "role")`` as ``messages[0].role``; cuts long names."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{clip(part)}" if text else clip(part)
    return text


def parse(model: type[M], body: bytes, ignored: IgnoredFields | None = None) -> M:
    """Parses a JSON body; ``ignored`` collects fields without effect.

    Raises:
        InvalidArgument: names the first invalid parameter and the remedy.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body or body.isspace():
        raise InvalidArgument("the request has no body; send a JSON object")
    check_counts(body)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidArgument(f"the body must be a JSON object, got {quote(data)}")
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from error


def check_counts(body: bytes, *, param: str | None = None) -> None:
    """Refuses JSON with more values than any request needs, before there is an object for each.

    The error names ``param``, or the field of an object with the most of them.
    """
    if not _excess(body):
        return
    # Every second piece is outside texts: signs within texts do not count.
    pieces = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', 2 * _MOST["texts"] + 2)
    if kind := _excess(b'""'.join(pieces[::2])):
        field = param or clip(_fullest_field(pieces).decode(errors="replace"))
        raise InvalidArgument(
            f"the body has more than {_MOST[kind]} {kind}, most of them in '{field}'; send fewer at once",
            param=field,
        )


def _fullest_field(pieces: Sequence[bytes]) -> bytes:
    """Returns the field of a body with the most values, from the pieces outside texts and between them."""
    counts, field, depth = Counter[bytes](), b"", 1
    for text, outside in zip(pieces[1::2], pieces[2::2], strict=False):
        if depth == 1 and outside.lstrip()[:1] == b":":
            field = text
        opened = outside.count(b"[") + outside.count(b"{")
        depth += opened - outside.count(b"]") - outside.count(b"}")
        counts[field] += opened + outside.count(b",")
    return max(counts, key=lambda name: counts[name], default=b"")


def _excess(body: bytes) -> str:
    """Returns the kind of value of which a body seems to have too many."""
    counts = {"texts": body.count(b'"') // 2, "lists and objects": body.count(b"[") + body.count(b"{")}
    return next((kind for kind, most in _MOST.items() if counts.get(kind, body.count(b",")) > most), "")


def refusal(detail: ErrorDetails) -> InvalidArgument:
    """Returns the error for a finding of pydantic's."""
    location, value = detail["loc"], detail["input"]
    param = path_of(location)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match detail["type"]:
        case "missing":
            return InvalidArgument(f"'{param}' is required", param=param)
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
