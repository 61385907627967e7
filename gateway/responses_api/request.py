"""The body of ``/v1/responses``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from gateway.quoting import clip
from gateway.responses_api.input_items import InputItems
from gateway.responses_api.tools import (
    Allowed,
    FunctionTool,
    ResponseToolChoice,
    ResponseTools,
    functions_of,
    skipped_types,
)
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.chat import TEMPLATE_UNSERVED
from gateway.schemas.sampling import COMMON_UNSERVED, UINT32_MAX, SamplingRequest, StreamOptions, or_default
from gateway.schemas.structured import MAX_TEXT, JsonSchema, ResponseFormat
from gateway.schemas.tools import NamedChoice
from protos import limits

_LOGPROBS: Final = "message.output_text.logprobs"
_STATELESS: Final = "nothing is stored"
_ONE_ANSWER: Final = "a request has one response; send it several times"

# OpenAI's bounds.
_MAX_METADATA: Final = 16
_MAX_KEY: Final = 64
_MAX_VALUE: Final = 512

Label = Annotated[str | None, Field(max_length=512)]


def _bounded_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > _MAX_METADATA:
        raise ValueError(f"has {len(metadata)} keys; send at most {_MAX_METADATA}")
    if any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in metadata.items()):
        raise ValueError(f"takes keys of at most {_MAX_KEY} and values of at most {_MAX_VALUE} characters")
    return metadata


class TextFormat(RequestModel):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, Field(max_length=256, description="Ignored.")] = None
    description: Annotated[str | None, Field(max_length=MAX_TEXT, description="Ignored.")] = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="With type json_schema: a JSON schema.")
    ] = None
    strict: Annotated[bool | None, Field(description="As in response_format of chats.")] = None

    @model_validator(mode="after")
    def _complete(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema must be given with type 'json_schema', and only then")
        return self

    def for_chat(self) -> ResponseFormat:
        """Returns the same constraint in the form of a chat request."""
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_construct(name=self.name, schema_=self.schema_, strict=self.strict)
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextOptions(RequestModel):
    """Options of the answer's text."""

    format: Annotated[TextFormat | None, Field(description="Constrains the answer.")] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Field(description="Ignored.")] = None


class ReasoningOptions(RequestModel):
    """Options of the model's thinking."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="For the model's chat template, which may not read it."),
    ] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None,
        Field(description="Ignored: the answer has the thinking itself."),
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, Field(description="The same under its older name.")
    ] = None


class ResponsesRequest(SamplingRequest):
    """A request for a response. Parameters that OpenAI's API lacks are vLLM's."""

    prompt_param: ClassVar[str] = "input"

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **TEMPLATE_UNSERVED,
        **{name: row for name, row in COMMON_UNSERVED.items() if name != "service_tier"},
        "background": Unserved((False,), f"{_STATELESS}, so no response runs in the background; omit it"),
        "previous_response_id": Unserved((), f"{_STATELESS}; send the earlier items in 'input'"),
        "conversation": Unserved((), f"{_STATELESS}; send the earlier items in 'input'"),
        "prompt": Unserved((), f"{_STATELESS}, templates neither; send 'instructions' and 'input'"),
        "context_management": Unserved(([],)),
        "moderation": Unserved(),
        "max_tokens": Unserved((), "send 'max_output_tokens'"),
        "max_completion_tokens": Unserved((), "send 'max_output_tokens'"),
        "response_format": Unserved((), "send 'text.format'"),
        "messages": Unserved((), "send 'input'"),
        "n": Unserved((1,), _ONE_ANSWER),
        "best_of": Unserved((1,), _ONE_ANSWER),
        "return_token_ids": Unserved(
            (False,), "a response has no token ids; omit it, or use /v1/chat/completions"
        ),
        "prompt_logprobs": Unserved((), "a response has no log-probabilities of its input"),
        "truncate_prompt_tokens": Unserved((), 'send truncation="auto"'),
        "truncation_side": Unserved((), "truncation drops the oldest tokens"),
        "previous_input_messages": Unserved((), "send them in 'input'"),
        "enable_response_messages": Unserved((False,)),
    }
    input: Annotated[InputItems, Field(description="A text, or items of a conversation.")]
    instructions: Annotated[str | None, Field(description="A system message before the input.")] = None
    max_output_tokens: Annotated[
        int | None, Field(ge=1, le=UINT32_MAX, description="Maximum number of new tokens.")
    ] = None
    tools: Annotated[
        ResponseTools, Field(description="Functions that the model may call; other tools are skipped.")
    ] = Field(default_factory=list)
    tool_choice: Annotated[ResponseToolChoice, Field(description='Omitted: "auto".')] = None
    parallel_tool_calls: Annotated[
        bool, or_default(True), Field(description="Whether an answer may have more than one call.")
    ] = True
    max_tool_calls: Annotated[
        int | None, Field(ge=0, description="Ignored: it bounds calls that OpenAI's servers make.")
    ] = None
    text: Annotated[TextOptions | None, Field(description="The form of the answer's text.")] = None
    reasoning: Annotated[ReasoningOptions | None, Field(description="Options of the thinking.")] = None
    include: Annotated[
        list[Annotated[str, Field(max_length=64)]] | None,
        Field(
            max_length=32,
            fail_fast=True,
            description=f"{_LOGPROBS} adds log-probabilities; other values add nothing.",
        ),
    ] = None
    top_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=limits.MAX_LOGPROBS,
            description=f"With {_LOGPROBS}: also this many of the likeliest tokens in each place.",
        ),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Field(description="auto: an input that is too long loses its oldest tokens."),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any], or_default({})] = Field(
        default_factory=dict, description="Further variables for the model's chat template."
    )
    include_reasoning: Annotated[
        bool, or_default(True), Field(description="Whether the answer includes the model's thinking.")
    ] = True
    stream_options: Annotated[StreamOptions | None, Field(description="Only with stream=true.")] = None
    store: Annotated[bool | None, Field(description="Ignored: nothing is stored.")] = None
    metadata: Annotated[
        dict[str, str] | None,
        AfterValidator(lambda value: value and _bounded_metadata(value)),
        Field(description="The answer repeats it."),
    ] = None
    prompt_cache_key: Annotated[Label, Field(description="Ignored: equal prefixes are always shared.")] = None
    safety_identifier: Annotated[Label, Field(description="Ignored.")] = None
    service_tier: Annotated[Label, Field(description="Ignored: there is one tier.")] = None

    @model_validator(mode="after")
    def _choice_names_functions(self) -> "ResponsesRequest":
        choice, names = self.tool_choice, {tool.name for tool in self.functions}
        match choice:
            case NamedChoice(name) if name not in names:
                raise ValueError(
                    f"tool_choice names '{clip(name)}', which is not among the functions in 'tools'"
                )
            case Allowed(_, allowed) if unknown := [name for name in allowed if name not in names]:
                raise ValueError(
                    f"tool_choice allows '{clip(unknown[0])}', which is not among the functions in 'tools'"
                )
            case Allowed("required", allowed) if not allowed:
                raise ValueError("tool_choice requires a call, but allows no function")
            case "required" if not names:
                raise ValueError("tool_choice requires a call, but there is no function in 'tools'")
        return self

    @model_validator(mode="after")
    def _one_constraint_of_the_text(self) -> "ResponsesRequest":
        if self.text_format.type != "text" and self.structured_outputs is not None:
            raise ValueError("structured_outputs and text.format both constrain the answer; send one")
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model may call."""
        return functions_of(self.tools)

    @property
    def skipped_tools(self) -> list[str]:
        """The types of the other tools."""
        return skipped_types(self.tools)

    @property
    def text_format(self) -> TextFormat:
        """The form of the answer's text."""
        given = self.text.format if self.text is not None else None
        return given or TextFormat(type="text")

    @property
    def output_limit(self) -> int | None:
        """Maximum number of new tokens; ``None``: as many as fit into the context."""
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None
