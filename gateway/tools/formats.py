"""The formats in which models write tool calls: each with its parser and its grammar."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.parsers import hermes, llama, mistral, pythonic
from gateway.parsers.events import ToolParser, call_id, short_call_id
from gateway.parsers.json_call import PlainListParser
from gateway.parsers.parser_base import NamedToolParser
from gateway.tools.tags import ArgumentsAlone, Shape


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tool calls."""

    make: Callable[[Collection[str]], ToolParser]
    """Makes a parser for a sequence, given the names of the request's tools."""
    markers: frozenset[str] | None = frozenset()
    """Special tokens shown to the parser; ``None``: all of them."""
    shape: Shape | ArgumentsAlone | None = None
    """The grammar's shape; ``None``: the format has no grammar."""


def _mistral(shape: Shape) -> Format:
    return Format(
        lambda _: mistral.MistralParser(short_call_id),
        frozenset({mistral.MARKER, mistral.ARGS, mistral.CALL_ID}),
        shape,
    )


_NAME: Final = '{"name": "'
_ARGUMENTS: Final = '", "arguments": '
_PARAMETERS: Final = '", "parameters": '

FORMATS: Final[Mapping[str, Format]] = {
    "hermes": Format(
        lambda _: hermes.HermesParser(call_id),
        frozenset({hermes.START, hermes.END}),
        Shape(
            before=f"{hermes.START}\n{_NAME}",
            between=_ARGUMENTS,
            after=f"}}\n{hermes.END}",
            separator="\n",
            trigger=hermes.START,
        ),
    ),
    "llama3_json": Format(
        lambda names: llama.LlamaParser(call_id, names),
        frozenset({llama.TAG}),
        Shape(before=_NAME, between=_PARAMETERS, after="}", separator="; ", trigger=_NAME),
    ),
    "mistral": _mistral(
        Shape(
            before=_NAME,
            between=_ARGUMENTS,
            after="}",
            separator=", ",
            opening=f"{mistral.MARKER}[",
            closing="]",
            trigger=mistral.MARKER,
        )
    ),
    "mistral_v11": _mistral(Shape(before=mistral.MARKER, between="", after="", trigger=mistral.MARKER)),
    "mistral_v13": _mistral(
        Shape(before=mistral.MARKER, between=mistral.ARGS, after="", trigger=mistral.MARKER)
    ),
    "pythonic": Format(
        lambda names: pythonic.PythonicParser(call_id, names), frozenset({pythonic.START, pythonic.END})
    ),
}

# A JSON list, as in vLLM: for models without a format of their own.
LIST: Final = Format(
    lambda _: PlainListParser(call_id),
    shape=Shape(before=_NAME, between=_PARAMETERS, after="}", separator=", ", opening="[", closing="]"),
)


def named(name: str) -> Format:
    """Returns the format for a call of the tool ``name`` alone: nothing but its arguments."""
    return Format(lambda _: NamedToolParser(call_id, name), shape=ArgumentsAlone())
