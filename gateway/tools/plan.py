"""What one chat request means for its answer: which grammar holds the model, and who reads what it writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from gateway import vllm_parsers
from gateway.answer_reader import AnswerReader
from gateway.reasoning import (
    MARKERS,
    TAIL_TOKENS,
    Thinking,
    ThinkParser,
    behind_thinking,
    thinking_at,
)
from gateway.schemas.chat import ChatCompletionRequest
from gateway.schemas.tools import NamedChoice, Tool
from gateway.served_model import Served
from gateway.settings import Settings
from gateway.tools.events import ToolParser, call_id
from gateway.tools.formats import FORMATS, LIST, Format
from gateway.tools.named import NamedParser
from gateway.tools.tags import Callee, Tag, json_schema, structural
from protos.errors import InvalidArgument, Unsupported
from protos.triptych.v1 import common_pb2 as pb

_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
_ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is held and read.

    A request without tools, to a model that does not think, has neither parser: its text is its content.
    """

    thinking: Callable[[], ToolParser] | None = None
    calls: Callable[[], ToolParser] | None = None
    constraint: pb.StructuredOutput | None = None
    """What the output must match; ``None``: as the rest of the request says."""
    markers: frozenset[str] | None = frozenset()
    """Texts that the parsers must see although they may be special tokens; ``None``: any may be one."""
    one_call: bool = False
    named: bool = False
    show_thinking: bool = True

    @property
    def plain(self) -> bool:
        """Whether there is nothing to find in the text."""
        return self.thinking is None and self.calls is None

    def reader(self) -> AnswerReader:
        """For one sequence."""
        return AnswerReader(
            self.thinking() if self.thinking else None,
            self.calls() if self.calls else None,
            one_call=self.one_call,
            show_thinking=self.show_thinking,
        )


def plan(settings: Settings, served: Served, body: ChatCompletionRequest, prompt: Sequence[int]) -> Reading:
    """How the answer to ``body`` is held and read.

    Args:
        settings: name the parsers, or leave them to the chat template.
        served: the model.
        body: the request.
        prompt: its token ids, whose end says whether the model is thinking already.

    Raises:
        Unsupported: if calls are optional and nothing could find them, or strict and nothing could hold the model to that.
    """
    at, thinking = _thinking(settings, served, prompt)
    choice = body.tool_choice or ("auto" if body.tools else "none")
    markers: frozenset[str] | None = MARKERS if thinking else frozenset()
    if settings.reasoning_parser.startswith(vllm_parsers.PREFIX):
        markers = None
    if choice == "none" or not body.tools:
        behind = _behind_thinking(body, at) if thinking else None
        return Reading(thinking, constraint=behind, markers=markers, show_thinking=body.include_reasoning)
    form = _format(settings, served, body.tools)
    constraint: pb.StructuredOutput | None
    if choice == "auto":
        if form is None:
            raise Unsupported(
                f"tool_choice=\"auto\" is not supported: the chat template of '{served.model.served_name}' does not show how it"
                ' writes calls; send tool_choice "required" or a function\'s name, or start the gateway with --tool-call-parser',
                param="tool_choice",
            )
        constraint = _optional(form, body, at)
        if constraint is not None and body.constraint() is not None:
            raise InvalidArgument(
                f"{body.constraint_param} and strict tools that may be called or not cannot both hold the answer; send one of them,"
                ' or tool_choice "none" or "required"',
                param=body.constraint_param,
            )
    else:
        tools = [
            tool
            for tool in body.tools
            if not isinstance(choice, NamedChoice) or tool.function.name == choice.name
        ]
        if form is None or form.shape is None:
            named = choice.name if isinstance(choice, NamedChoice) else None
            form = _generic(named)
        constraint = _required(form, tools, at, parallel=body.parallel_tool_calls and choice == "required")
    make, names = form.make, frozenset(tool.function.name for tool in body.tools)
    return Reading(
        thinking,
        lambda: make(names),
        constraint,
        None if markers is None or form.markers is None else markers | form.markers,
        one_call=not body.parallel_tool_calls or isinstance(choice, NamedChoice),
        named=isinstance(choice, NamedChoice),
        show_thinking=body.include_reasoning,
    )


def _behind_thinking(body: ChatCompletionRequest, at: Thinking) -> pb.StructuredOutput | None:
    """What an answer must match, for a model that thinks before it; ``None`` where that is not to be said in another way."""
    asked = body.constraint()
    if asked is None or at is Thinking.OVER:
        return None
    match asked.WhichOneof("spec"):
        case "json_schema":
            form: Tag = {"type": "json_schema", "json_schema": orjson.loads(asked.json_schema)}
        case "json_object":
            form = {"type": "json_schema", "json_schema": _ANY_OBJECT}
        case "regex":
            form = {"type": "regex", "pattern": asked.regex}
        case "grammar":
            form = {"type": "grammar", "grammar": asked.grammar}
        case _:
            return None
    return structural(behind_thinking(at, form))


def _format(settings: Settings, served: Served, tools: Sequence[Tool]) -> Format | None:
    name = settings.tool_call_parser
    if name.startswith(vllm_parsers.PREFIX):
        shown = [tool.for_template() for tool in tools]
        return Format(lambda _: vllm_parsers.tool_parser(name, served.text, shown), None)
    if name == "auto":
        return FORMATS[served.text.tool_format] if served.text.tool_format else None
    return FORMATS.get(name)


def _generic(named: str | None) -> Format:
    return LIST if named is None else Format(lambda _: NamedParser(call_id, named))


def _thinking(
    settings: Settings, served: Served, prompt: Sequence[int]
) -> tuple[Thinking, Callable[[], ToolParser] | None]:
    name, text = settings.reasoning_parser, served.text
    if name == "none" or (name == "auto" and not text.thinks):
        return Thinking.OVER, None
    at = thinking_at(text.decode(prompt[-TAIL_TOKENS:]), always=name == "deepseek_r1")
    if name.startswith(vllm_parsers.PREFIX):
        return at, lambda: vllm_parsers.reasoning_parser(name, text, prompt)
    return at, lambda: ThinkParser(at)


def _callee(tool: Tool, *, strict: bool) -> Callee:
    # Without parameters there are none; without strictness, any.
    schema = tool.function.parameters or _NO_PARAMETERS
    return Callee(tool.function.name, schema if strict else _ANY_OBJECT)


def _required(form: Format, tools: Sequence[Tool], at: Thinking, *, parallel: bool) -> pb.StructuredOutput:
    callees = [_callee(tool, strict=tool.function.strict is not False) for tool in tools]
    if form.shape is None:
        arguments = json_schema(callees[0].schema)
        return structural(behind_thinking(at, arguments))
    return structural(behind_thinking(at, form.shape.required(callees, parallel=parallel)))


def _optional(form: Format, body: ChatCompletionRequest, at: Thinking) -> pb.StructuredOutput | None:
    strict = [index for index, tool in enumerate(body.tools) if tool.function.strict]
    if not strict:
        return None
    if form.shape is None:
        param = f"tools[{strict[0]}].function.strict"
        raise Unsupported(
            f'{param}=true is not supported: the parser of this model\'s calls has no grammar for tool_choice "auto"; leave it out,'
            ' or send tool_choice "required" or a function\'s name',
            param=param,
        )
    callees = [_callee(tool, strict=bool(tool.function.strict)) for tool in body.tools]
    shape = form.shape.optional(callees, parallel=body.parallel_tool_calls)
    return structural(behind_thinking(at, shape))
