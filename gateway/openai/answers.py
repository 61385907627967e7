"""The answers of chats and completions, whole and in chunks.

Chunks are OpenAI's byte for byte. The constant parts are encoded once per answer: a chunk then costs a
small JSON string.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from gateway.generation.answer_plan import AnswerPlan, DeltaReader
from gateway.generation.generation import Usage
from gateway.generation.sequence_text import ChatLogprobs, CompletionLogprobs, Delta, TokenReport
from gateway.generation.streaming import AnswerHead, ResponseWriter
from gateway.http.errors import error_body
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from protos.errors import TriptychError


class PromptTokensDetails(TypedDict):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[int, Field(description="Prompt tokens served from the prefix cache.")]


class CompletionTokensDetails(TypedDict):
    """Details of the answer's tokens."""

    reasoning_tokens: Annotated[int, Field(description="Tokens of thinking; its markers count, too.")]


class CompletionUsage(TypedDict):
    """Token counts of an answer."""

    prompt_tokens: Annotated[
        int, Field(description="Each prompt counts once, however many choices continue it.")
    ]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


Fingerprint = Annotated[
    str, Field(description="Changes with the model's files, its dtype, its context and Triptych's version.")
]

_ENDS: Final = "stop: an end token or a stop string; length: max_tokens or the end of the context"

FinishReason = Annotated[Literal["stop", "length"], Field(description=f"{_ENDS}.")]
ChatFinishReason = Annotated[
    Literal["stop", "length", "tool_calls"], Field(description=f"{_ENDS}; tool_calls: the message has calls.")
]
StopReason = Annotated[
    str | int | None,
    Field(description="The stop string or token id that ended the text; null for the model's end token."),
]
PromptLogprobs = Annotated[
    list[dict[str, dict[str, Any]] | None] | None,
    Field(
        description="With prompt_logprobs: for each prompt token but the first, its log-probability, rank and"
        " text, and those of the likeliest tokens, by token id."
    ),
]


TokenIdList = Annotated[list[int] | None, Field(description="With return_token_ids.")]
Thinking = Annotated[str | None, Field(description="The thinking of a reasoning model (vLLM's name).")]
ReasoningContent = Annotated[str | None, Field(description="The same under DeepSeek's name.")]
StreamedUsage = Annotated[CompletionUsage | None, Field(description="With stream_options.include_usage.")]


class CalledFunction(TypedDict):
    """The function of a tool call."""

    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCall(TypedDict):
    """A call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[Thinking]
    reasoning_content: NotRequired[ReasoningContent]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """An answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: NotRequired[TokenIdList]


class ChatCompletion(TypedDict):
    """An answered conversation."""

    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: Annotated[Literal["default"], Field(description="There is one tier.")]
    system_fingerprint: Fingerprint
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[TokenIdList]


class CompletionChoice(TypedDict):
    """A continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: NotRequired[TokenIdList]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[TokenIdList]


class Completion(TypedDict):
    """Continued prompts."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    system_fingerprint: Fingerprint


class FunctionDelta(TypedDict):
    """A part of a call: first the name, then pieces of the arguments."""

    name: NotRequired[str | None]
    arguments: str


class ToolCallDelta(TypedDict):
    """An update of a call."""

    index: Annotated[int, Field(description="Number of the call in the message.")]
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    """An update of the assistant's message."""

    role: Annotated[Literal["assistant"] | None, Field(description="In the first chunk of a choice.")]
    content: str | None
    refusal: None
    reasoning: Thinking
    reasoning_content: ReasoningContent
    tool_calls: list[ToolCallDelta] | None


class ChatChunkChoice(TypedDict):
    """An update of a choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[ChatFinishReason | None, Field(description="In the choice's last chunk.")]
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[TokenIdList]


class ChatChunk(TypedDict):
    """A piece of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Field(description="None in the chunk with the usage.")]
    usage: NotRequired[StreamedUsage]
    service_tier: NotRequired[Annotated[Literal["default"] | None, Field(description="In last chunks.")]]
    system_fingerprint: NotRequired[Annotated[str | None, Field(description="In last chunks.")]]
    prompt_token_ids: NotRequired[TokenIdList]


class CompletionChunkChoice(TypedDict):
    """An update of a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[FinishReason | None, Field(description="In the choice's last chunk.")]
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[TokenIdList]
    prompt_token_ids: NotRequired[TokenIdList]


class CompletionChunk(TypedDict):
    """A piece of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChunkChoice], Field(description="None in the chunk with the usage.")]
    usage: NotRequired[StreamedUsage]
    system_fingerprint: NotRequired[Annotated[str | None, Field(description="In last chunks.")]]


DONE: Final = b"data: [DONE]\n\n"


def last_error(error: TriptychError) -> bytes:
    """Returns OpenAI's error object and ``[DONE]``, for an error after the status line has been sent."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n" + DONE


class ChunkWriter(ResponseWriter):
    """Writes a stream of chunks that ends with ``[DONE]``. Subclasses define the form of a choice."""

    object: str
    last_fields: ClassVar[Mapping[str, str]] = {}
    """Further constant fields of chunks that end a choice or the stream."""
    _before_text: bytes
    _after_text: bytes

    def __init__(self, head: AnswerHead) -> None:
        """Encodes the constant parts.

        If a usage chunk will follow, every other chunk says ``"usage":null``, as OpenAI's do.
        """
        self._head = head
        self._fields = {
            "id": head.answer_id,
            "object": self.object,
            "created": head.created,
            "model": head.model,
        }
        self._start = _start(self._fields)
        self._last_start = _start({
            **self._fields, **self.last_fields, "system_fingerprint": head.fingerprint,
        })  # fmt: skip
        self._tail = b'],"usage":null}\n\n' if head.body.include_usage else b"]}\n\n"
        self._text_starts: dict[int, bytes] = {}
        self._opened: set[int] = set()
        self._is_counted = head.body.continuous_usage

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Returns the chunk before a choice's first text."""

    @abstractmethod
    def encode(self, delta: Delta) -> bytes:
        """Returns the chunks for a delta."""

    def write(self, delta: Delta) -> bytes:
        """Returns the chunks for a delta, after the choice's opening if it is the first."""
        if self._is_counted:
            self._tail = b'],"usage":' + orjson.dumps(self._head.generation.usage.body()) + b"}\n\n"
        choice, chunks = delta.sequence, self.encode(delta)
        if choice not in self._opened:
            self._opened.add(choice)
            return self.opening(choice) + chunks
        return chunks

    def end(self, usage: Usage) -> bytes:
        """Returns the chunk with the usage, if it was asked for, and ``[DONE]``."""
        if not self._head.body.include_usage:
            return DONE
        return self._last_start + b'],"usage":' + orjson.dumps(usage.body()) + b"}\n\n" + DONE

    def error(self, error: TriptychError) -> bytes:
        """Returns OpenAI's error object and ``[DONE]``."""
        return last_error(error)

    def _text(self, index: int, text: str) -> bytes:
        """Returns a chunk with nothing but text."""
        start = self._text_starts.get(index)
        if start is None:
            start = self._start + b'{"index":%d,' % index + self._before_text
            self._text_starts[index] = start
        return start + orjson.dumps(text) + self._after_text + self._tail

    def _choice(self, choice: dict[str, Any]) -> bytes:
        start = self._start if choice["finish_reason"] is None else self._last_start
        return start + orjson.dumps(choice) + self._tail


def _start(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['


class ChatChunks(ChunkWriter):
    """Writes a chat completion. Readers find thinking and calls in the text, a reader per choice."""

    object = "chat.completion.chunk"
    last_fields: ClassVar[Mapping[str, str]] = {"service_tier": "default"}
    _before_text = b'"delta":{"content":'
    _after_text = b'},"logprobs":null,"finish_reason":null}'

    def __init__(self, head: AnswerHead, plan: AnswerPlan) -> None:
        """``plan`` decides how the text is read."""
        super().__init__(head)
        self._plan = plan
        self._is_plain = plan.plain
        self._readers: dict[int, DeltaReader] = {}

    def opening(self, index: int) -> bytes:
        """Returns the chunk with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        chunk = self._delta(index, delta, ())
        if not self._head.body.return_token_ids:
            return chunk
        fields = {**self._fields, "prompt_token_ids": self._head.prompt_of(index)}
        return chunk.replace(self._start, _start(fields))

    def encode(self, delta: Delta) -> bytes:
        """Returns the chunks that the text settles, and at the end a separate chunk with the reason."""
        index, text, reason, stop_reason, tokens, token_ids = delta
        if not self._is_plain:
            return self._parsed(delta)
        if token_ids:
            content = self._delta(index, {"content": text}, tokens, token_ids)
        else:
            content = self._content(index, text, tokens) if text or tokens else b""
        return content if reason is None else content + self._end(index, reason, stop_reason)

    def _parsed(self, delta: Delta) -> bytes:
        index, reason = delta.sequence, delta.finish_reason
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = DeltaReader(self._plan.reader())
        out = [self._event(index, event, tokens) for event, tokens in reader.read(delta)]
        if delta.token_ids:
            out.append(self._delta(index, {}, (), delta.token_ids))
        if reason is not None:
            if rest := reader.take_reports():
                out.append(self._content(index, "", rest))
            reason = finish_reason(reason, reader.num_calls, named=self._plan.named)
            out.append(self._end(index, reason, delta.stop_reason))
        return b"".join(out)

    def _content(self, index: int, text: str, tokens: Sequence[TokenReport]) -> bytes:
        """Returns a chunk with more content, and with log-probabilities if there are ``tokens``."""
        return self._delta(index, {"content": text}, tokens) if tokens else self._text(index, text)

    def _event(self, index: int, event: Event, tokens: Sequence[TokenReport]) -> bytes:
        """Returns the chunk for an event; nothing for a revoked call, which a stream cannot take back."""
        delta: dict[str, Any]
        match event:
            case Text(text):
                return self._content(index, text, tokens)
            case Reasoning(text):
                # Under both names that clients know: vLLM's and DeepSeek's.
                delta = {"reasoning": text, "reasoning_content": text}
            case CallStart(call, id_, name):
                function = {"name": name, "arguments": ""}
                delta = {"tool_calls": [{"index": call, "id": id_, "type": "function", "function": function}]}
            case CallArguments(call, fragment):
                delta = {"tool_calls": [{"index": call, "function": {"arguments": fragment}}]}
            case CallRevoked():
                return b""
        return self._delta(index, delta, tokens)

    def _end(self, index: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
        return self._choice({
            "index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason,
        })  # fmt: skip

    def _delta(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenReport], token_ids: Sequence[int] = ()
    ) -> bytes:
        logprobs = self._head.reporter.chat(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._choice({**choice, "token_ids": token_ids} if token_ids else choice)


def finish_reason(reason: str, num_calls: int, *, named: bool) -> str:
    """Returns OpenAI's reason for an answer with calls; for the call of a named tool it stays "stop"."""
    return "tool_calls" if reason == "stop" and num_calls and not named else reason


class CompletionChunks(ChunkWriter):
    """Writes a plain completion."""

    object = "text_completion"
    _before_text = b'"text":'
    _after_text = b',"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        """Returns nothing, or the ids of the prompt: plain completions have no role."""
        if not self._head.body.return_token_ids:
            return b""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        return self._choice({**choice, "prompt_token_ids": self._head.prompt_of(index)})

    def encode(self, delta: Delta) -> bytes:
        """Returns a chunk with more text, the last with the reason."""
        index, text, reason, stop_reason, tokens, token_ids = delta
        if reason is None and not tokens and not token_ids:
            return self._text(index, text) if text else b""
        logprobs = self._head.reporter.completion(tokens) if tokens else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if token_ids:
            choice["token_ids"] = token_ids
        return self._choice(choice if reason is None else {**choice, "stop_reason": stop_reason})
