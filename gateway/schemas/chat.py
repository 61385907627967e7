"""The body of ``/v1/chat/completions``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from gateway.schemas.base import RequestModel, Unserved, clip, ignore, quote
from gateway.schemas.sampling import COMMON_UNSERVED, UINT32_MAX, Effort, SamplingRequest
from gateway.schemas.tools import (
    FUNCTIONS_HINT,
    Allowed,
    EarlierCalls,
    NamedChoice,
    ToolChoice,
    Tools,
    limit_calls,
)
from protos import limits

# Turns of a conversation: more than real ones have, few enough to check without delaying other requests'
# streams.
MAX_MESSAGES: Final = 4096


# The field of each kind of part with its text; vLLM takes parts of other APIs, too.
_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

# Parts of all messages of a request. Each is kept as a dictionary, which takes far more memory than its JSON.
MAX_PARTS: Final = 16_384

# Fields of parts that templates never get: no template shows the first row, and by the others templates tell
# images, sounds and the like from text. vLLM withholds the fields of the parts that it knows, too.
_NOT_SHOWN: Final = frozenset(
    (
        "cache_control", "annotations", "logprobs", "prompt_cache_breakpoint",
        "type", "text", "refusal", "thinking", "closed", "name", "uuid", "data",
        "image", "image_url", "image_pil", "image_embeds", "input_image",
        "video", "video_url", "video_embeds", "input_video",
        "audio", "audio_url", "audio_embeds", "input_audio", "prompt_embeds",
        "file", "file_id", "file_url", "input_file",
    )
)  # fmt: skip


def _content(content: Any, info: ValidationInfo) -> str | list[dict[str, Any]]:
    """Returns a message's text, or its parts if a template could tell the difference."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"must be a string or a list of text parts, got {quote(content)}")
    parts = [_part(part, index, info) for index, part in enumerate(content)]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0].keys() == {"type", "text"} else parts


def _part(part: Any, index: int, info: ValidationInfo) -> dict[str, Any]:
    """Returns a part in the form for templates, with its fields for them."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or (field := _TEXTS.get(kind)) is None:
        raise ValueError(
            f"part {index} is not served; only parts of type 'text' are, got {quote(kind or part)}"
        )
    if not isinstance(part.get(field), str):
        raise ValueError(f"part {index} needs '{field}', a string")  # noqa: TRY004 - pydantic's signal
    found = {"type": "text", "text": part[field]}
    for name in part.keys() - {"type", field}:
        ignore(info, name)
        if name not in _NOT_SHOWN:
            found[name] = part[name]
    return found


def _role(value: Any) -> Any:
    if value == "function":
        raise ValueError(
            "'function' is not supported: it is OpenAI's older form; send 'tool' and a tool_call_id"
        )
    return value


class Message(RequestModel):
    """A turn of a conversation."""

    # Clients that append an answer's message to their next request send its null fields back.
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "function_call": Unserved((), "it is OpenAI's older form; send 'tool_calls'"),
        "audio": Unserved(),
    }
    role: Annotated[str, Field(min_length=1, max_length=64), BeforeValidator(_role)] = Field(
        description="system, developer, user, assistant or tool, or any other that the chat template shows."
    )
    content: Annotated[
        str | list[dict[str, Any]],
        BeforeValidator(_content, json_schema_input_type=str | list[dict[str, str]]),
    ] = Field(
        description="Text, or a list of parts of type text. A template that handles parts gets them one by"
        " one, with their further fields; any other gets them joined with line breaks."
    )
    tool_calls: Annotated[EarlierCalls, BeforeValidator(limit_calls)] = Field(
        default_factory=list, description="Calls of an assistant's earlier turn."
    )
    tool_call_id: str | None = Field(
        None, max_length=256, description="With the role tool: the id of the call that this message answers."
    )
    name: str | None = Field(
        None,
        max_length=256,
        description="With the role tool: the function's name. With others, few chat templates show it.",
    )
    refusal: str | None = Field(None, description="With the role assistant: stands for an empty content.")
    reasoning: str | None = Field(None, description="Thinking of an assistant's earlier turn.")
    reasoning_content: str | None = Field(None, description="The same under DeepSeek's name.")

    @model_validator(mode="before")
    @classmethod
    def _content_is_optional_in_answers(cls, data: Any) -> Any:
        """Allows an assistant's turn and a tool's result without content; a refusal takes its place."""
        empty: tuple[Any, ...] = (None, "", [])
        if not isinstance(data, dict) or data.get("content") not in empty:
            return data
        if data.get("role") not in ("assistant", "tool"):
            return data
        return {**data, "content": data.get("refusal") or ""}

    @model_validator(mode="after")
    def _fields_belong_to_roles(self, info: ValidationInfo) -> "Message":
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content", "refusal"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to messages with the role 'assistant'; omit it")
        if self.role == "tool":
            if not self.tool_call_id:
                raise ValueError("needs 'tool_call_id', the id of the call that it answers")
        elif self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to messages with the role 'tool'; omit it")
        elif self.name is not None:
            ignore(info, "name")  # most chat templates show it only with the role 'tool'
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the turn in the form for chat templates."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        thought = self.reasoning or self.reasoning_content
        if thought:
            turn["reasoning"] = turn["reasoning_content"] = thought
            if not (self.content and self.tool_calls):
                # The template of gpt-oss refuses all three.
                turn["thinking"] = thought
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        if self.name:
            turn["name"] = self.name
        return turn


def _limit_messages(messages: Any) -> Any:
    # Checked before the messages themselves.
    if not isinstance(messages, list):
        return messages
    if len(messages) > MAX_MESSAGES:
        raise ValueError(
            f"takes at most {MAX_MESSAGES} messages, got {len(messages)}; shorten the conversation"
        )
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    if (parts := sum(len(content) for content in contents if isinstance(content, list))) > MAX_PARTS:
        raise ValueError(f"takes at most {MAX_PARTS} parts of messages, got {parts}; send longer parts")
    return messages


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_limit_messages)]


TEMPLATE_UNSERVED: Final[Mapping[str, Unserved]] = {
    "chat_template": Unserved(
        (), "the model's own is used; omit it, or start the gateway with --chat-template"
    ),
}


class TemplateInput(RequestModel):
    """Further input of a chat template."""

    unserved: ClassVar[Mapping[str, Unserved]] = TEMPLATE_UNSERVED

    tools: Tools = Field(
        default_factory=list,
        description="Functions that the model may call; a custom tool becomes a function with one string, `input`.",
    )
    add_generation_prompt: bool = Field(
        True, description="End the prompt with the header of the assistant's turn."
    )
    continue_final_message: bool = Field(
        False, description="End the prompt within the last message, which the answer continues."
    )
    documents: list[dict[str, Any]] | None = Field(
        None,
        max_length=4096,
        description="Texts that the model may refer to, for templates that show them; usually with `title`"
        " and `text`.",
    )
    reasoning_effort: Effort | None = Field(
        None,
        description="How much to think, for templates with a variable `reasoning_effort` or"
        " `enable_thinking` or `thinking` (off with none), and for the budgets of --reasoning-effort-budgets.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables for the chat template."
    )

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> "TemplateInput":
        asked = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and asked:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude one another; send one of them"
            )
        return self


class Conversation(TemplateInput):
    """The input of a chat template."""

    messages: Messages


class ChatCompletionRequest(SamplingRequest, Conversation):
    """A request for a chat completion."""

    prompt_param: ClassVar[str] = "messages"

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMMON_UNSERVED,
        **TEMPLATE_UNSERVED,
        "return_prompt_text": Unserved((False,)),
        "echo": Unserved((False,), "an answer never repeats the prompt"),
        "functions": Unserved(([],), FUNCTIONS_HINT),
        "function_call": Unserved(("none", "auto"), FUNCTIONS_HINT),
        "modalities": Unserved((["text"],), "only text is served"),
        "audio": Unserved((), "only text is served"),
        "web_search_options": Unserved(),
    }
    tool_choice: ToolChoice = Field(None, description='Omitted: "auto" if there are tools.')
    parallel_tool_calls: bool = Field(True, description="Whether an answer may have more than one call.")
    include_reasoning: bool = Field(True, description="Whether the answer includes the model's thinking.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=UINT32_MAX, description="Maximum number of new tokens; wins over max_tokens."
    )
    logprobs: bool = Field(False, description="Report the log-probability of each new token.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_LOGPROBS,
        description="Also report this many of the likeliest tokens in each place.",
    )

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def effort(self) -> Effort | None:
        """How much to think; ``None``: the request does not say."""
        return self.reasoning_effort

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _chat_parameters_agree(self) -> "ChatCompletionRequest":
        choice = self.tool_choice
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs=true")
        if choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise ValueError("tool_choice needs 'tools': there is nothing to call")
        if isinstance(choice, NamedChoice) and all(tool.function.name != choice.name for tool in self.tools):
            raise ValueError(f"tool_choice names '{clip(choice.name)}', which is not among the tools")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _only_allowed_tools(
        cls, value: Any, handler: ModelWrapValidatorHandler["ChatCompletionRequest"]
    ) -> "ChatCompletionRequest":
        """Leaves out tools that ``tool_choice`` does not allow."""
        body = handler(value)
        choice = body.tool_choice
        if not isinstance(choice, Allowed):
            return body
        names = [tool.function.name for tool in body.tools]
        if unknown := [name for name in choice.names if name not in names]:
            raise ValueError(f"tool_choice allows '{clip(unknown[0])}', which is not among the tools")
        if not choice.names and choice.mode == "required":
            raise ValueError("tool_choice requires a call, but allows no function")
        tools = [tool for tool in body.tools if tool.function.name in choice.names]
        return body.model_copy(update={"tools": tools, "tool_choice": choice.mode if tools else None})

    @property
    def output_limit(self) -> int | None:
        """Maximum number of new tokens; ``None``: as many as fit into the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
