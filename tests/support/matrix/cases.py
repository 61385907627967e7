"""The parameters of an answer as data: one case for each of them and each protocol that serves it.

Token ids are below 256, so that every model of the tests has them.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

Protocol: TypeAlias = Literal["completions", "chat", "responses", "messages", "generate", "connect"]
Fields: TypeAlias = Mapping[str, Any]

MAX_TOKENS: Final = 6
_COMMAS_AND_DOTS: Final = (28, 30, 198, 253)
_SOME_TOKENS: Final = tuple(range(100, 200))
_SCHEMA: Final[Fields] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
_SCHEMA_TEXT: Final = json.dumps(_SCHEMA)
_WORDS: Final = "[a-z]{3,8}( [a-z]{2,6}){0,3}"
_CHOICES: Final = ("yes", "no", "maybe later")
_GRAMMAR: Final = 'root ::= "a" root | "b" root | "c"'
_TAG: Final[Fields] = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": _SCHEMA}}
_USAGE: Final[Fields] = {"stream": True, "stream_options": {"include_usage": True}}
_RUNNING_USAGE: Final[Fields] = {
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}  # fmt: skip
_FUNCTION: Final[Fields] = {"name": "forecast", "description": "The weather.", "parameters": _SCHEMA}
_TOOLS: Final = ({"type": "function", "function": _FUNCTION},)
_FLAT_TOOLS: Final = ({"type": "function", **_FUNCTION},)
_ANTHROPIC_TOOLS: Final = ({"name": "forecast", "description": "The weather.", "input_schema": _SCHEMA},)
_NAMED: Final[Fields] = {"type": "function", "function": {"name": "forecast"}}
_INCLUDED: Final = ("message.output_text.logprobs",)


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    kind: str
    """The family of its parameter."""
    protocol: Protocol
    prompt: str
    fields: Fields = field(default_factory=dict)
    """Fields of the HTTP body or of `GenerateRequest` and its `SamplingParams`, without the prompt."""
    compared: bool = True
    """Whether the same request always has the same answer."""

    def salted(self, salt: str) -> "Case":
        """Returns the same request with a cache of its own, if its protocol allows that."""
        return (
            self if self.protocol == "messages" else replace(self, fields={**self.fields, "cache_salt": salt})
        )


@dataclass(frozen=True)
class Row:
    """A parameter with its spelling in each protocol; None where a protocol lacks it."""

    kind: str
    name: str
    completions: Fields | None = None
    chat: Fields | None = None
    responses: Fields | None = None
    messages: Fields | None = None
    wire: Fields | None = None
    compared: bool = True


def _same(kind: str, name: str, messages: Fields | None = None, **fields: Any) -> Row:
    """Returns a parameter with one spelling in all protocols except that of Anthropic."""
    return Row(kind, name, fields, fields, fields, messages, fields)


def _http(kind: str, name: str, **fields: Any) -> Row:
    return Row(kind, name, completions=fields, chat=fields)


def _structured(name: str, value: object, wire: object) -> Row:
    fields = {"structured_outputs": {name: value}}
    return Row("grammars", name, fields, fields, fields, wire={"structured_output": {name: wire}})


def _response_format(name: str, form: Fields, wire: Fields) -> Row:
    return Row(
        "grammars", f"response format {name}", {"response_format": form}, {"response_format": form},
        wire={"structured_output": wire},
    )  # fmt: skip


LOGPROBS: Final = (
    Row("logprobs", "alone", {"logprobs": 0}, {"logprobs": True}, {"include": _INCLUDED}, wire={"logprobs": 0}),
    Row("logprobs", "top 1", {"logprobs": 1}, {"logprobs": True, "top_logprobs": 1}, wire={"logprobs": 1}),
    Row(
        "logprobs", "top 5", {"logprobs": 5}, {"logprobs": True, "top_logprobs": 5},
        {"include": _INCLUDED, "top_logprobs": 5}, wire={"logprobs": 5},
    ),
    Row(
        "logprobs", "streamed", {"logprobs": 2, **_USAGE}, {"logprobs": True, "top_logprobs": 2, **_USAGE},
        {"include": _INCLUDED, "top_logprobs": 2, "stream": True},
    ),
    Row("logprobs", "seeded", wire={"logprobs": 3, "temperature": 0.9, "seed": 5}),
    Row("logprobs", "one token", {"logprobs": 1, "max_tokens": 1}, wire={"logprobs": 1, "max_tokens": 1}),
    Row("logprobs", "as token ids", {"logprobs": 1, "return_tokens_as_token_ids": True}),
    Row("logprobs", "under a grammar", {"logprobs": 2, "structured_outputs": {"regex": _WORDS}}),
    Row("logprobs", "up to a stop string", {"logprobs": 1, "stop": [" ", "e"], "max_tokens": 16}),
    Row("logprobs", "of the prompt", {"prompt_logprobs": 0}, {"prompt_logprobs": 0}, wire={"prompt_logprobs": 0}),
    Row("logprobs", "top 3 of the prompt", {"prompt_logprobs": 3}, {"prompt_logprobs": 3}, wire={"prompt_logprobs": 3}),
    Row("logprobs", "of prompt and answer", {"prompt_logprobs": 1, "logprobs": 1}, wire={"prompt_logprobs": 1, "logprobs": 1}),
    Row("logprobs", "echo", {"echo": True}),
    Row("logprobs", "echo with logprobs", {"echo": True, "logprobs": 2}),
    Row("logprobs", "echo alone", {"echo": True, "logprobs": 1, "max_tokens": 0}),
)  # fmt: skip
CHOICES: Final = (
    Row("choices", "greedy", {"n": 2}, {"n": 3}, wire={"n": 2}),
    Row("choices", "best of", {"n": 2, "best_of": 2}),
    Row(
        "choices", "seeded", {"n": 3, "temperature": 0.8, "seed": 3}, {"n": 2, "temperature": 0.8, "seed": 4},
        wire={"n": 3, "temperature": 0.8, "seed": 3},
    ),
    Row("choices", "with logprobs", {"n": 2, "logprobs": 1, "temperature": 0.8, "seed": 9}),
    Row("choices", "streamed", {"n": 2, "seed": 1, "temperature": 0.7, **_USAGE}, {"n": 2, **_USAGE}),
    Row("choices", "under a grammar", {"n": 2, "structured_outputs": {"choice": _CHOICES}}),
    Row("choices", "several prompts", {"prompt": ["Once upon a time", "Water boils at", "The"]}),
)  # fmt: skip
STOPS: Final = (
    Row("forms", "stop string", {"stop": "e"}, {"stop": ["e", "zz"]}, {"stop": ["e"]}, {"stop_sequences": ["e"]}),
    _http("forms", "included stop string", stop=["a", "o"], include_stop_str_in_output=True),
    Row("forms", "stop streamed", {"stop": ["e t", "a"], **_USAGE}, messages={"stop_sequences": ["a"], "stream": True}),
    _same("forms", "stop token ids", stop_token_ids=_COMMAS_AND_DOTS),
    _same("forms", "stop late", stop_token_ids=_COMMAS_AND_DOTS, min_tokens=4),
)  # fmt: skip
GRAMMARS: Final = (
    _response_format(
        "json schema",
        {"type": "json_schema", "json_schema": {"name": "trip", "schema": _SCHEMA, "strict": True}},
        {"json_schema": _SCHEMA_TEXT},
    ),
    _response_format("json object", {"type": "json_object"}, {"json_object": True}),
    _response_format("structural tag", _TAG, {"structural_tag": json.dumps(_TAG)}),
    Row("grammars", "json", {"structured_outputs": {"json": _SCHEMA}}),
    _structured("regex", _WORDS, _WORDS),
    _structured("choice", _CHOICES, {"values": _CHOICES}),
    _structured("grammar", _GRAMMAR, _GRAMMAR),
    Row(
        "grammars", "text format",
        responses={"text": {"format": {"type": "json_schema", "name": "trip", "schema": _SCHEMA}}},
        messages={"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ),
    Row("grammars", "seeded", {"structured_outputs": {"regex": _WORDS}, "temperature": 1, "seed": 8}),
    Row("grammars", "streamed", chat={"structured_outputs": {"json": _SCHEMA}, **_USAGE}),
)  # fmt: skip
SAMPLING: Final = (
    _same("sampling", "seed", temperature=1.0, seed=7),
    _same("sampling", "top p", temperature=0.9, seed=7, top_p=0.8),
    _same("sampling", "top k", temperature=0.9, seed=7, top_k=20),
    _same("sampling", "min p", temperature=0.9, seed=7, min_p=0.1),
    Row(
        "sampling", "without a seed", {"temperature": 1}, {"temperature": 1, "top_p": 0.9}, {"temperature": 1},
        {"temperature": 1, "top_k": 9, "top_p": 0.9}, {"temperature": 1}, compared=False,
    ),
    _http("sampling", "repetition penalty", repetition_penalty=1.3),
    _same("sampling", "presence penalty", presence_penalty=0.8),
    _same("sampling", "frequency penalty", frequency_penalty=0.8),
    Row("sampling", "all penalties", wire={"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    _http("sampling", "bias", logit_bias={"28": 4, "30": -100}),
    Row("sampling", "bias", wire={"logit_bias": {28: 4.0, 30: -100.0}}),
    _http("sampling", "bad words", bad_words=["the", "of", "e"]),
    Row("sampling", "bad words", wire={"bad_words": [{"token_ids": [28]}, {"token_ids": [30, 198]}]}),
    _same("sampling", "allowed tokens", allowed_token_ids=_SOME_TOKENS),
)  # fmt: skip
FORMS: Final = (
    Row("forms", "one token", {"max_tokens": 1}, {"max_completion_tokens": 1}, wire={"max_tokens": 1}),
    Row("forms", "long", {"max_tokens": 32}, {"max_tokens": 32}, {"max_output_tokens": 32}, {"max_tokens": 32}),
    _same("forms", "least tokens", min_tokens=5),
    _same("forms", "beyond the end", ignore_eos=True),
    Row("forms", "streamed", {"stream": True}, {"stream": True}, {"stream": True}, {"stream": True}, {}),
    _http("forms", "usage", **_USAGE),
    _http("forms", "running usage", **_RUNNING_USAGE),
    _http("forms", "token ids", return_token_ids=True),
    _http("forms", "streamed token ids", return_token_ids=True, **_USAGE),
    Row("forms", "prompt of token ids", {"prompt": [100, 101, 102, 103, 104]}),
    _http("forms", "priority", priority=-1),
    _http("forms", "low priority", priority=5),
    Row("forms", "priority", wire={"priority": -2, "tenant": "someone"}),
    _same("forms", "cache salt", cache_salt="salt"),
    _http("forms", "cut prompt", truncate_prompt_tokens=40),
)  # fmt: skip
TOOLS: Final = (
    Row(
        "grammars", "tool choice auto", chat={"tools": _TOOLS, "tool_choice": "auto"}, responses={"tools": _FLAT_TOOLS},
        messages={"tools": _ANTHROPIC_TOOLS, "tool_choice": {"type": "auto"}},
    ),
    Row(
        "grammars", "tool choice required", chat={"tools": _TOOLS, "tool_choice": "required"},
        responses={"tools": _FLAT_TOOLS, "tool_choice": "required"},
        messages={"tools": _ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}},
    ),
    Row(
        "grammars", "tool choice named", chat={"tools": _TOOLS, "tool_choice": _NAMED},
        messages={"tools": _ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "forecast"}},
    ),
    Row("grammars", "streamed tool call", chat={"tools": _TOOLS, "tool_choice": "required", **_USAGE}),
)  # fmt: skip
ROWS: Final = (*LOGPROBS, *CHOICES, *STOPS, *GRAMMARS, *SAMPLING, *FORMS, *TOOLS)


def make_cases(prompts: Sequence[str]) -> tuple[Case, ...]:
    """Returns all cases; neighbours have prompts of different lengths if `prompts` have."""
    cases = [case for index, row in enumerate(ROWS) for case in _cases_of(row, index)]
    return tuple(replace(case, prompt=prompts[index % len(prompts)]) for index, case in enumerate(cases))


def some_cases(prompts: Sequence[str]) -> tuple[Case, ...]:
    """Returns one of the cases of each parameter; all protocols have a share."""
    by_name = {case.name: case for case in make_cases(prompts)}
    chosen: list[Case] = []
    used: Counter[Protocol] = Counter()
    for index, row in enumerate(ROWS):
        case = min(_cases_of(row, index), key=lambda case: used[case.protocol])
        used[case.protocol] += 1
        chosen.append(by_name[case.name])
    return tuple(chosen)


def kinds_of(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Returns the cases by kind, in order."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    return kinds


def _cases_of(row: Row, index: int) -> Iterator[Case]:
    """Yields a parameter's cases; rows take turns with the two calls of gRPC."""
    spelled: dict[Protocol, Fields | None] = {
        "completions": row.completions, "chat": row.chat, "responses": row.responses,
        "messages": row.messages, ("connect" if index % 2 else "generate"): row.wire,
    }  # fmt: skip
    for protocol, fields in spelled.items():
        if fields is not None:
            limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
            limited = {} if "max_completion_tokens" in fields else {limit: MAX_TOKENS}
            name = f"{row.kind}: {row.name} by {protocol}"
            yield Case(name, row.kind, protocol, "", {"temperature": 0, **limited, **fields}, row.compared)
