"""``/v1/chat/completions``: the request."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.quoting import clip, quote
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.sampling import COMMON_UNSERVED, MAX_LOGPROBS, SamplingRequest, or_default
from gateway.schemas.tools import FUNCTIONS_HINT, NamedChoice, ToolCall, ToolChoice, Tools, few_calls

# A conversation's turns: far more than people have, few enough to check without a pause in everybody's streams.
MAX_MESSAGES: Final = 4096


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
    if value == "function":
        raise ValueError(
            "'function' is not supported: it is OpenAI's older form; send 'tool' and a tool_call_id"
        )
    return value


class Message(RequestModel):
    """One turn of a conversation."""

    # The null fields come back when a client appends an answer's message to its next request.
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "function_call": Unserved((), "it is OpenAI's older form; send 'tool_calls'"),
        "refusal": Unserved(),
        "audio": Unserved(),
        "annotations": Unserved(([],)),
    }

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[dict[str, str]])]
    tool_calls: Annotated[
        list[ToolCall], Field(fail_fast=True), BeforeValidator(few_calls), or_default([])
    ] = Field(default_factory=list)
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    name: Annotated[str | None, Field(max_length=256)] = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _an_assistant_may_say_nothing(cls, data: Any) -> Any:
        """Beside calls or thinking, an assistant's turn needs no content."""
        if not isinstance(data, dict) or data.get("role") != "assistant" or data.get("content") is not None:
            return data
        beside = any(data.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
        return {**data, "content": ""} if beside else data

    @model_validator(mode="after")
    def _fields_belong_to_roles(self) -> "Message":
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to messages of the role 'assistant'; leave it out")
        if self.role == "tool":
            if not self.tool_call_id:
                raise ValueError("needs 'tool_call_id', the id of the call that it answers")
        elif self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to messages of the role 'tool'; leave it out")
        elif self.name is not None:
            raise ValueError(
                "name is not supported: chat templates do not use it outside the role 'tool'; write it into the content"
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; a call's arguments are an object, or an empty one where the model's text was none."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        thought = self.reasoning or self.reasoning_content
        if thought:
            turn["reasoning"] = turn["reasoning_content"] = thought
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        if self.name:
            turn["name"] = self.name
        return turn


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
    tools: Tools = Field(default_factory=list)
    add_generation_prompt: Annotated[bool, or_default(True)] = True
    chat_template_kwargs: Annotated[dict[str, Any], or_default({})] = Field(default_factory=dict)


CONVERSATION_UNSERVED: Final[Mapping[str, Unserved]] = {
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
        "functions": Unserved(([],), FUNCTIONS_HINT),
        "function_call": Unserved(("none", "auto"), FUNCTIONS_HINT),
        "modalities": Unserved((["text"],), "only text is served"),
        "audio": Unserved((), "only text is served"),
        "prediction": Unserved(),
        "web_search_options": Unserved(),
        "reasoning_effort": Unserved(),
        "verbosity": Unserved(),
        "store": Unserved((False,), "nothing is stored"),
        "metadata": Unserved(({},), "nothing is stored"),
        "prompt_cache_key": Unserved((), "prefixes are shared automatically; 'cache_salt' keeps them apart"),
        "safety_identifier": Unserved((), "send it as 'user'"),
    }

    tool_choice: Annotated[ToolChoice, Field(description='Left out: "auto" if there are tools.')] = None
    parallel_tool_calls: Annotated[bool, or_default(True)] = True
    include_reasoning: Annotated[bool, or_default(True)] = True
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

    @model_validator(mode="after")
    def _choices_are_among_the_tools(self) -> "ChatCompletionRequest":
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise ValueError("tool_choice needs 'tools': there is nothing to call")
        if isinstance(choice, NamedChoice) and all(tool.function.name != choice.name for tool in self.tools):
            raise ValueError(f"tool_choice names '{clip(choice.name)}', which is not among the tools")
        return self

    @property
    def output_limit(self) -> int | None:
        """New tokens at most; ``None``: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
