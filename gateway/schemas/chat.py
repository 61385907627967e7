"""``/v1/chat/completions``: the request."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.schemas.base import RequestModel, Unserved, clip, quote
from gateway.schemas.sampling import COMMON_UNSERVED, MAX_LOGPROBS, SamplingRequest, or_default

# A conversation's turns: far more than people have, few enough to check without a pause in everybody's streams.
MAX_MESSAGES: Final = 4096

_NO_TOOLS: Final = "tools are not served yet"


def _text(content: Any) -> str:
    """A message's text; a list of text parts is joined by line breaks, as vLLM does for templates that expect text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"must be a string or a list of text parts, got {quote(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"part {index} is not served: only parts of type 'text' are, got {quote(kind or part)}"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} needs 'text', a string")  # noqa: TRY004 - pydantic's signal
        if unknown := part.keys() - {"type", "text"}:
            raise ValueError(f"part {index} has an unknown field '{clip(min(unknown))}'; leave it out")
        texts.append(part["text"])
    return "\n".join(texts)


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise ValueError(f"'{value}' needs tools, and {_NO_TOOLS}")
    return value


class Message(RequestModel):
    """One turn of a conversation."""

    # The null fields come back when a client appends an answer's message to its next request.
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "name": Unserved((), "chat templates do not use it; write the name into the content"),
        "tool_calls": Unserved(([],), _NO_TOOLS),
        "tool_call_id": Unserved((), _NO_TOOLS),
        "function_call": Unserved((), _NO_TOOLS),
        "refusal": Unserved(),
        "audio": Unserved(),
        "annotations": Unserved(([],)),
        "reasoning": Unserved(),
        "reasoning_content": Unserved(),
    }

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[dict[str, str]])]


def _few(messages: Any) -> Any:
    # Before the messages are looked at one by one.
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"takes at most {MAX_MESSAGES} messages, got {len(messages)}; shorten the conversation"
        )
    return messages


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_few)]


class Conversation(RequestModel):
    """What a chat template turns into a prompt; shared with ``/tokenize``."""

    messages: Messages
    add_generation_prompt: Annotated[bool, or_default(True)] = True
    chat_template_kwargs: Annotated[dict[str, Any], or_default({})] = Field(default_factory=dict)


CONVERSATION_UNSERVED: Final[Mapping[str, Unserved]] = {
    "tools": Unserved(([],), _NO_TOOLS),
    "tool_choice": Unserved(("none", "auto"), _NO_TOOLS),
    "continue_final_message": Unserved((False,)),
    "documents": Unserved(([],)),
    "chat_template": Unserved((), "the model's own template is used"),
    "mm_processor_kwargs": Unserved(({},)),
    "media_io_kwargs": Unserved(({},)),
}


class ChatCompletionRequest(SamplingRequest, Conversation):
    """A chat completion."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMMON_UNSERVED,
        **CONVERSATION_UNSERVED,
        "echo": Unserved((False,), "the answer never repeats the prompt"),
        "functions": Unserved(([],), _NO_TOOLS),
        "function_call": Unserved(("none", "auto"), _NO_TOOLS),
        "parallel_tool_calls": Unserved((True,), _NO_TOOLS),
        "modalities": Unserved((["text"],), "only text is served"),
        "audio": Unserved((), "only text is served"),
        "prediction": Unserved(),
        "web_search_options": Unserved(),
        "reasoning_effort": Unserved(),
        "include_reasoning": Unserved((True,)),
        "verbosity": Unserved(),
        "store": Unserved((False,), "nothing is stored"),
        "metadata": Unserved(({},), "nothing is stored"),
        "prompt_cache_key": Unserved((), "prefixes are shared automatically; 'cache_salt' keeps them apart"),
        "safety_identifier": Unserved((), "send it as 'user'"),
    }

    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**32 - 1)] = None
    logprobs: Annotated[bool, or_default(False)] = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    @model_validator(mode="after")
    def _top_of_what(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are told with each new one; ``None``: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatCompletionRequest":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) mean the same; send one of them"
            )
        return self

    @property
    def output_limit(self) -> int | None:
        """New tokens at most; ``None``: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
