"""Writes responses: their items, the response object, and the events of a stream."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, cast

import orjson

from gateway.generation.answer_plan import DeltaReader
from gateway.generation.generation import Usage
from gateway.generation.sequence_text import ChatToken, Delta, Reporter, TokenReport
from gateway.generation.streaming import ResponseWriter
from gateway.http.errors import row_of
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text, settled
from gateway.responses_api.schemas import (
    CustomTool,
    IncompleteDetails,
    Namespace,
    OutputItemAnswer,
    OutputMessage,
    OutputPart,
    OutputReasoning,
    OutputText,
    ReasoningContent,
    ResponseAnswer,
    ResponseFailure,
    ResponsesRequest,
    ResponseStatus,
    ResponseTool,
    ResponseUsage,
    ScopedName,
    SkippedTool,
    TextFormat,
    scoped_names,
)
from gateway.schemas.tools import Allowed, NamedChoice
from protos.errors import InvalidArgument, Overloaded, TriptychError

Status = Literal["in_progress", "completed", "incomplete"]

_UNNAMED: Final = ScopedName("")


_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PART_OF_HEAD: Final = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_CHARACTERS: Final = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
# The first half of a surrogate pair at the end of a text, as an escape.
_HALF_PAIR: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class InputReader:
    """Reads the input out of a call's arguments as they arrive.

    Arguments of another form, which a model may write without a grammar, are the input as they stand.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._step: Callable[[], str] = self._head

    def feed(self, arguments: str) -> str:
        """Returns the piece of the input settled by further arguments."""
        self._rest += arguments
        return self._step()

    def _head(self) -> str:
        if (head := _HEAD.match(self._rest)) is not None:
            self._rest, self._step = self._rest[head.end() :], self._text
        elif _PART_OF_HEAD.fullmatch(self._rest) is not None:
            return ""
        else:
            self._step = self._anything
        return self._step()

    def _text(self) -> str:
        match = _CHARACTERS.match(self._rest)
        assert match is not None
        text, end = match.group(), match.end()
        if end < len(self._rest) and self._rest[end] == '"':
            self._step = self._end
        elif half := _HALF_PAIR.search(text):
            text, end = text[: half.start()], half.start()
        self._rest = self._rest[end:]
        found: str = json.loads(f'"{text}"', strict=False)
        # A half of a surrogate pair alone cannot be sent.
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _anything(self) -> str:
        text, self._rest = self._rest, ""
        return text

    def _end(self) -> str:
        return ""


@dataclass(slots=True)
class _OutputItem(ABC):
    """An item of an answer."""

    event_prefix: ClassVar[str]
    """Prefix of the names of its text's events."""
    text_field: ClassVar[str] = "text"
    """Name of its text in the last event."""

    id: str
    index: int
    """Its place in the answer."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, piece: str) -> None:
        self.pieces.append(piece)

    def part(self, text: str) -> OutputPart | None:  # noqa: ARG002 - for items with content
        """Returns the part of its content with ``text``: all of it, or none yet. Calls have no content."""
        return None

    @abstractmethod
    def body(self, status: Status) -> OutputItemAnswer:
        """Returns the item, without text while it is in progress."""


@dataclass(slots=True)
class _MessageItem(_OutputItem):
    event_prefix = "response.output_text"

    logprobs: list[ChatToken] = field(default_factory=list)

    def part(self, text: str) -> OutputText:
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def body(self, status: Status) -> OutputMessage:
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class _ThinkingItem(_OutputItem):
    event_prefix = "response.reasoning_text"

    def part(self, text: str) -> ReasoningContent:
        return {"type": "reasoning_text", "text": text}

    def body(self, status: Status) -> OutputReasoning:
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {
            "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content,
            "encrypted_content": None,
        }  # fmt: skip


@dataclass(slots=True)
class _CallItem(_OutputItem):
    event_prefix = "response.function_call_arguments"
    text_field = "arguments"
    kind: ClassVar[str] = "function_call"

    call_id: str = ""
    name: ScopedName = _UNNAMED
    revoked: bool = False
    """Whether a stream announced it before its arguments turned out not to be JSON."""

    def body(self, status: Status) -> OutputItemAnswer:
        text = "" if status == "in_progress" else self.text
        if self.revoked and status == "completed":
            status = "incomplete"
        body = {
            "id": self.id, "type": self.kind, "status": status, "call_id": self.call_id, "name": self.name.name,
            self.text_field: text,
        }  # fmt: skip
        if self.name.namespace is not None:
            body["namespace"] = self.name.namespace
        return cast("OutputItemAnswer", body)


@dataclass(slots=True)
class _CustomCallItem(_CallItem):
    """A call of a custom tool; its text is the input in the arguments."""

    event_prefix = "response.custom_tool_call_input"
    text_field = "input"
    kind = "custom_tool_call"

    reader: InputReader = field(default_factory=InputReader)

    def add(self, piece: str) -> None:
        self.pieces.append(self.reader.feed(piece))


class Output:
    """The items of an answer, in order."""

    def __init__(self, answer_id: str, names: Mapping[str, ScopedName]) -> None:
        """Starts empty; ids derive from ``answer_id``, and ``names`` maps the model's names of tools."""
        self._names = names
        self._suffix = answer_id.partition("_")[2]
        self.items: list[_OutputItem] = []
        self._calls: dict[int, _CallItem] = {}

    def take(self, event: Event) -> _OutputItem:
        """Adds an event to its item, which may be new; returns the item."""
        last = self.items[-1] if self.items else None
        match event:
            case Text(text):
                item = last if isinstance(last, _MessageItem) else self.add_message()
            case Reasoning(text):
                item = (
                    last if isinstance(last, _ThinkingItem) else self._add(_ThinkingItem(*self._place("rs")))
                )
            case CallStart(number, call_id, name):
                scoped = self._names.get(name) or ScopedName(name)
                kind, prefix = (_CustomCallItem, "ctc") if scoped.custom else (_CallItem, "fc")
                call = kind(*self._place(prefix), call_id=call_id, name=scoped)
                self._calls[number] = call
                return self._add(call)
            case CallArguments(number, text):
                item = self._calls[number]
            case _:
                call = self._calls[event.number]
                call.revoked = True
                return call
        item.add(text)
        return item

    def add_message(self) -> _OutputItem:
        """Returns a new message, after the other items."""
        return self._add(_MessageItem(*self._place("msg")))

    def bodies(self, *, cut: bool) -> list[OutputItemAnswer]:
        """Returns the items; the last item of a ``cut`` answer is incomplete."""
        last = len(self.items) - 1
        return [item.body("incomplete" if cut and item.index == last else "completed") for item in self.items]

    def _place(self, prefix: str) -> tuple[str, int]:
        index = len(self.items)
        return f"{prefix}_{self._suffix}_{index}", index

    def _add(self, item: _OutputItem) -> _OutputItem:
        self.items.append(item)
        return item


def collected(output: Output, events: Sequence[Event], logprobs: list[ChatToken]) -> Output:
    """Fills ``output`` with a whole answer. Its log-probabilities are those of the first message."""
    for event in settled(events):
        output.take(event)
    if not output.items:
        output.add_message()
    for item in output.items:
        if isinstance(item, _MessageItem):
            item.logprobs = logprobs
            break
    return output


# The types of errors that the API knows, by ours; all others are the server's.
_ERROR_CODES: Final = ((Overloaded, "rate_limit_exceeded"), (InvalidArgument, "invalid_prompt"))


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The response object; most fields repeat the request."""

    body: ResponsesRequest
    answer_id: str
    created: int
    """Seconds since the epoch."""
    model: str

    def output(self) -> Output:
        """Returns the answer's items, still none."""
        return Output(self.answer_id, scoped_names(self.body.tools))

    def in_progress(self) -> ResponseAnswer:
        """Returns the object at an answer's start."""
        return self._object("in_progress", [])

    def ended(self, output: list[OutputItemAnswer], usage: Usage, *, cut: bool) -> ResponseAnswer:
        """Returns the object of an answer, complete or ``cut`` at its limit of tokens."""
        if not cut:
            return self._object("completed", output, usage=_usage(usage))
        details: IncompleteDetails = {"reason": "max_output_tokens"}
        return self._object("incomplete", output, usage=_usage(usage), incomplete_details=details)

    def failed(self, output: list[OutputItemAnswer], error: TriptychError) -> ResponseAnswer:
        """Returns the object of an answer failed after ``output``."""
        known = (code for kind, code in _ERROR_CODES if isinstance(error, kind))
        details: ResponseFailure = {"code": next(known, "server_error"), "message": error.message}
        return self._object("failed", output, error=details)

    def _object(
        self,
        status: ResponseStatus,
        output: list[OutputItemAnswer],
        *,
        usage: ResponseUsage | None = None,
        error: ResponseFailure | None = None,
        incomplete_details: IncompleteDetails | None = None,
    ) -> ResponseAnswer:
        body = self.body
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": _text_options(body),
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools if not isinstance(tool, SkippedTool)],
            "top_logprobs": body.num_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }


def _usage(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_options(body: ResponsesRequest) -> dict[str, Any]:
    options: dict[str, Any] = {"format": _text_format(body.text_format)}
    if body.text is not None and body.text.verbosity is not None:
        options["verbosity"] = body.text.verbosity
    return options


def _text_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {
        "type": form.type,
        "name": form.name or "answer",
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict,
    }


def _tool(tool: ResponseTool) -> dict[str, Any]:
    if isinstance(tool, SkippedTool):
        return {"type": tool.type}
    if isinstance(tool, Namespace):
        functions = [_tool(function) for _, function in tool.functions]
        return {
            "type": "namespace", "name": tool.name, "description": tool.description or "", "tools": functions,
        }  # fmt: skip
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _tool_choice(body: ResponsesRequest) -> Any:
    names = scoped_names(body.tools)

    def tool(name: str) -> dict[str, Any]:
        is_custom = name in names and names[name].custom
        return {"type": "custom" if is_custom else "function", "name": name}

    match body.tool_choice:
        case NamedChoice(name):
            return tool(name)
        case Allowed(mode, allowed):
            return {"type": "allowed_tools", "mode": mode, "tools": list(map(tool, allowed))}
        case choice:
            return choice or "auto"


class ResponseStreamWriter(ResponseWriter):
    """Writes typed, numbered events, without a terminator."""

    def __init__(self, response: ResponseObject, reader: DeltaReader | None, reporter: Reporter) -> None:
        """Creates a writer; without a ``reader``, all of the text is the message."""
        self._response = response
        self._reader = reader
        self._reporter = reporter
        self._output = response.output()
        self._open: _OutputItem | None = None
        self._delta_head = b""
        self._cut = False
        self._count = 0

    def begin(self) -> bytes:
        """Returns the events of the empty response object."""
        response = self._response.in_progress()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def write(self, delta: Delta) -> bytes:
        """Returns the events settled by the text; at the end also the end of the last item."""
        item, text = self._open, delta.text
        if self._reader is None and item is not None and not (delta.tokens or delta.finish_reason):
            # Most deltas of most answers.
            item.pieces.append(text)
            return self._text_delta(text) if text else b""
        out: list[bytes] = []
        for event, tokens in self._events(delta):
            item = self._output.take(event)
            if item is self._output.items[-1] and item is not self._open:
                out += (self._close("completed"), self._opening(item))
            # Most of a custom call's arguments before its input show nothing.
            is_shown = bool(item.pieces and item.pieces[-1]) or not isinstance(item, _CustomCallItem)
            if is_shown and not isinstance(event, CallStart | CallRevoked):
                out.append(self._delta(item, item.pieces[-1], tokens))
        if delta.finish_reason is not None:
            self._cut = delta.finish_reason == "length"
            out.append(self._last(self._reader.take_reports() if self._reader is not None else []))
        return b"".join(out)

    def _events(self, delta: Delta) -> Iterable[tuple[Event, Sequence[TokenReport]]]:
        if self._reader is not None:
            return self._reader.read(delta)
        return [(Text(delta.text), delta.tokens)] if delta.text or delta.tokens else []

    def end(self, usage: Usage) -> bytes:
        """Returns the event with the whole response."""
        response = self._response.ended(self._output.bodies(cut=self._cut), usage, cut=self._cut)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: TriptychError) -> bytes:
        """Returns the event for the error, and the failed response."""
        details = {"code": row_of(error).code, "message": error.message, "param": error.param or None}
        event = self._event("error", **details)
        response = self._response.failed(self._output.bodies(cut=True), error)
        return event + self._event("response.failed", response=response)

    def _last(self, tokens: Sequence[TokenReport]) -> bytes:
        opening = b""
        if not self._output.items:
            opening = self._opening(self._output.add_message())
        item = self._output.items[-1]
        if tokens and self._reporter.wanted and isinstance(item, _MessageItem):
            opening += self._delta(item, "", tokens)
        return opening + self._close("incomplete" if self._cut else "completed")

    def _opening(self, item: _OutputItem) -> bytes:
        self._open = item
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.body("in_progress")
        )
        if part := item.part(""):
            added += self._event("response.content_part.added", **_place(item), part=part)
        # Only the number and the text differ from one delta of an item to the next.
        kind = f"{item.event_prefix}.delta"
        fields = {"type": kind, **_place(item)}
        if isinstance(item, _MessageItem):
            fields["logprobs"] = []
        self._delta_head = (
            b"event: "
            + kind.encode()
            + b"\ndata: "
            + orjson.dumps(fields)[:-1]
            + b',"sequence_number":%d,"delta":'
        )
        return added

    def _text_delta(self, text: str) -> bytes:
        """Returns the event for further text of the open item."""
        self._count += 1
        return self._delta_head % (self._count - 1) + orjson.dumps(text) + b"}\n\n"

    def _delta(self, item: _OutputItem, text: str, tokens: Sequence[TokenReport]) -> bytes:
        logprobs = chat_logprobs(self._reporter, tokens) if tokens and isinstance(item, _MessageItem) else []
        if item is self._open and not logprobs:
            return self._text_delta(text)
        fields = {**_place(item), "delta": text}
        if isinstance(item, _MessageItem):
            item.logprobs += logprobs
            fields["logprobs"] = [_without_bytes(entry) for entry in logprobs]
        return self._event(f"{item.event_prefix}.delta", **fields)

    def _close(self, status: Status) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        text = item.text
        fields = {**_place(item), item.text_field: text}
        if isinstance(item, _MessageItem):
            fields["logprobs"] = [_without_bytes(entry) for entry in item.logprobs]
        out = self._event(f"{item.event_prefix}.done", **fields)
        if part := item.part(text):
            out += self._event("response.content_part.done", **_place(item), part=part)
        return out + self._event("response.output_item.done", output_index=item.index, item=item.body(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def chat_logprobs(reporter: Reporter, tokens: Sequence[TokenReport]) -> list[ChatToken]:
    """Returns the log-probabilities of a message's tokens; none if they were not asked for."""
    reported = reporter.chat(tokens)
    return [] if reported is None else reported["content"]


def _without_bytes(entry: ChatToken) -> dict[str, Any]:
    """Returns a token's log-probability as events have it."""
    top = [{"token": likely["token"], "logprob": likely["logprob"]} for likely in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


def _place(item: _OutputItem) -> dict[str, Any]:
    place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
    return {**place, "content_index": 0} if item.part("") else place
