"""The body of ``/v1/chat/completions``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.quoting import clip, quote
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.sampling import COMMON_UNSERVED, UINT32_MAX, SamplingRequest, or_default
from gateway.schemas.tools import FUNCTIONS_HINT, EarlierCall, NamedChoice, ToolChoice, Tools, limit_calls
from protos import limits

# Turns of a conversation: more than real ones have, few enough to check without delaying other requests'
# streams.
MAX_MESSAGES: Final = 4096


def _text(content: Any) -> str:
    """Returns a message's text.

    Joins text parts with line breaks, as vLLM does for templates that expect text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"must be a string or a list of text parts, got {quote(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(
                f"part {index} is not served; only parts of type 'text' are, got {quote(kind or part)}"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} needs 'text', a string")  # noqa: TRY004 - pydantic's signal
        if unknown := part.keys() - {"type", "text"}:
            raise ValueError(f"part {index} has an unknown field '{clip(min(unknown))}'; omit it")
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

    # Clients that append an answer's message to their next request send its null fields back.
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "function_call": Unserved((), "it is OpenAI's older form; send 'tool_calls'"),
        "refusal": Unserved(),
        "audio": Unserved(),
        "annotations": Unserved(([],)),
    }

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: Annotated[
        str,
        BeforeValidator(_text, json_schema_input_type=str | list[dict[str, str]]),
        Field(description="Text, or a list of parts of type text."),
    ]
    tool_calls: Annotated[
        list[EarlierCall],
        Field(fail_fast=True, description="Calls of an assistant's earlier turn."),
        BeforeValidator(limit_calls),
        or_default([]),
    ] = Field(default_factory=list)
    tool_call_id: Annotated[
        str | None,
        Field(
            max_length=256, description="With the role tool: the id of the call that this message answers."
        ),
    ] = None
    name: Annotated[
        str | None, Field(max_length=256, description="With the role tool: the function's name.")
    ] = None
    reasoning: Annotated[str | None, Field(description="Thinking of an assistant's earlier turn.")] = None
    reasoning_content: Annotated[str | None, Field(description="The same under DeepSeek's name.")] = None

    @model_validator(mode="before")
    @classmethod
    def _content_is_optional_beside_calls(cls, data: Any) -> Any:
        """Allows an assistant's turn without content if it has calls or thinking."""
        if not isinstance(data, dict) or data.get("role") != "assistant" or data.get("content") is not None:
            return data
        beside = any(data.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
        return {**data, "content": ""} if beside else data

    @model_validator(mode="after")
    def _fields_belong_to_roles(self) -> "Message":
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to messages with the role 'assistant'; omit it")
        if self.role == "tool":
            if not self.tool_call_id:
                raise ValueError("needs 'tool_call_id', the id of the call that it answers")
        elif self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to messages with the role 'tool'; omit it")
        elif self.name is not None:
            raise ValueError(
                "name is not supported: chat templates use it only with the role 'tool'; write it into the"
                " content"
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the turn in the form that chat templates expect."""
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


def _limit_messages(messages: Any) -> Any:
    # Checked before the messages themselves.
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"takes at most {MAX_MESSAGES} messages, got {len(messages)}; shorten the conversation"
        )
    return messages


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_limit_messages)]


class Conversation(RequestModel):
    """The input of a chat template; ``/tokenize`` has the same."""

    messages: Messages
    tools: Tools = Field(default_factory=list, description="Functions that the model may call.")
    add_generation_prompt: Annotated[
        bool, or_default(True), Field(description="End the prompt with the header of the assistant's turn.")
    ] = True
    chat_template_kwargs: Annotated[dict[str, Any], or_default({})] = Field(
        default_factory=dict, description="Further variables for the model's chat template."
    )


CONVERSATION_UNSERVED: Final[Mapping[str, Unserved]] = {
    "continue_final_message": Unserved((False,)),
    "documents": Unserved(([],)),
    "chat_template": Unserved((), "the model's own template is used"),
    "mm_processor_kwargs": Unserved(({},)),
    "media_io_kwargs": Unserved(({},)),
}


class ChatCompletionRequest(SamplingRequest, Conversation):
    """A request for a chat completion."""

    prompt_param: ClassVar[str] = "messages"

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMMON_UNSERVED,
        **CONVERSATION_UNSERVED,
        "echo": Unserved((False,), "an answer never repeats the prompt"),
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

    tool_choice: Annotated[ToolChoice, Field(description='Omitted: "auto" if there are tools.')] = None
    parallel_tool_calls: Annotated[
        bool, or_default(True), Field(description="Whether an answer may have more than one call.")
    ] = True
    include_reasoning: Annotated[
        bool, or_default(True), Field(description="Whether the answer includes the model's thinking.")
    ] = True
    max_completion_tokens: Annotated[
        int | None,
        Field(ge=1, le=UINT32_MAX, description="Maximum number of new tokens; the same as max_tokens."),
    ] = None
    logprobs: Annotated[
        bool, or_default(False), Field(description="Report the log-probability of each new token.")
    ] = False
    top_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=limits.MAX_LOGPROBS,
            description="Also report this many of the likeliest tokens in each place.",
        ),
    ] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _limits_agree(self) -> "ChatCompletionRequest":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) mean the same; send one of"
                " them"
            )
        return self

    @model_validator(mode="after")
    def _choice_names_a_tool(self) -> "ChatCompletionRequest":
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise ValueError("tool_choice needs 'tools': there is nothing to call")
        if isinstance(choice, NamedChoice) and all(tool.function.name != choice.name for tool in self.tools):
            raise ValueError(f"tool_choice names '{clip(choice.name)}', which is not among the tools")
        return self

    @property
    def strict_schema(self) -> bool:
        """Whether a JSON schema that cannot be enforced as a whole is refused."""
        tools = () if self.tool_choice == "none" else self.tools
        return super().strict_schema or any(tool.function.strict for tool in tools)

    @property
    def output_limit(self) -> int | None:
        """Maximum number of new tokens; ``None``: as many as fit into the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
