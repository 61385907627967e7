"""What one chat request means for its answer: which grammar holds the model, and who reads what it writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from gateway.answers.answer_reader import AnswerReader
from gateway.parsers.events import ToolParser
from gateway.parsers.reasoning import (
    MARKERS,
    TAIL_TOKENS,
    Thinking,
    ThinkParser,
    behind_thinking,
    thinking_at,
)
from gateway.scheduler_link.served_model import Served
from gateway.schemas.chat import ChatCompletionRequest
from gateway.schemas.tools import NamedChoice, Tool
from gateway.settings import Settings
from gateway.tools import vllm_parsers
from gateway.tools.answer_constraint import placed
from gateway.tools.formats import FORMATS, LIST, Format, named
from gateway.tools.tags import Callee, Shape, Tag, structural
from protos.errors import InvalidArgument, Unsupported
from protos.triptych.v1 import common_pb2 as pb

_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
_ANY_OBJECT: Final = {"type": "object"}
_TOOLS: Final = "tools"


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is held and read.

    A request without tools, to a model that does not think, has neither parser: its text is its content.
    """

    thinking: Callable[[], ToolParser] | None = None
    calls: Callable[[], ToolParser] | None = None
    constraint: pb.StructuredOutput | None = None
    """What the output must match; ``None``: it may be anything."""
    constraint_param: str = ""
    """The parameter that says so."""
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


class _Thought(NamedTuple):
    """What is known of the thinking in front of an answer."""

    # Makes a parser; None: there is none.
    parser: Callable[[], ToolParser] | None
    # Texts that it must see; None: any.
    markers: frozenset[str] | None
    # Puts what holds an answer behind the thinking; as it is where that is over. The text is the parameter, for errors.
    behind: Callable[[Tag, str], Tag]


class _Held(NamedTuple):
    """Calls, and what holds the model to them."""

    form: Format
    constraint: pb.StructuredOutput | None = None
    param: str = ""


def plan(settings: Settings, served: Served, body: ChatCompletionRequest, prompt: Sequence[int]) -> Reading:
    """How the answer to ``body`` is held and read. Its effort grows with the request's tools and schemas.

    Args:
        settings: name the parsers, or leave them to the chat template.
        served: the model.
        body: the request.
        prompt: its token ids, whose end says whether the model is thinking already.

    Raises:
        Unsupported: if calls are optional and nothing could find them, or strict and nothing could hold the model to that.
        InvalidArgument: if what the answer must match cannot be read, or does not go with the choice of tools.
    """
    thought = _thought(settings, served, prompt)
    asked, param = body.constraint(), body.constraint_param
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none" or not body.tools:
        if asked is not None and thought.parser is not None:
            asked = placed(asked, lambda form: thought.behind(form, param), param)
        return Reading(
            thought.parser,
            constraint=asked,
            constraint_param=param,
            markers=thought.markers,
            show_thinking=body.include_reasoning,
        )
    form = _format(settings, served, body.tools)
    held = (
        _optional(form, served, body, thought, asked)
        if choice == "auto"
        else _required(form, body, thought, asked)
    )
    make, names = held.form.make, frozenset(tool.function.name for tool in body.tools)
    markers = held.form.markers
    return Reading(
        thought.parser,
        lambda: make(names),
        held.constraint,
        held.param,
        None if thought.markers is None or markers is None else thought.markers | markers,
        one_call=not body.parallel_tool_calls or isinstance(choice, NamedChoice),
        named=isinstance(choice, NamedChoice),
        show_thinking=body.include_reasoning,
    )


def _thought(settings: Settings, served: Served, prompt: Sequence[int]) -> _Thought:
    name, text = settings.reasoning_parser, served.text
    if name == "none" or (name == "auto" and not text.thinks):
        return _Thought(None, frozenset(), lambda form, _: form)
    if name.startswith(vllm_parsers.PREFIX):
        parser = partial(vllm_parsers.reasoning_parser, name, text, prompt)
        return _Thought(parser, None, lambda form, param: _behind_vllms(parser(), name, form, param))
    at = thinking_at(text.decode(prompt[-TAIL_TOKENS:]), always=name == "deepseek_r1")
    return _Thought(lambda: ThinkParser(at), MARKERS, lambda form, _: behind_thinking(at, form))


def _behind_vllms(parser: vllm_parsers.ReasoningParser, name: str, form: Tag, param: str) -> Tag:
    """``form`` behind what a parser of vLLM takes for thinking: it is asked, as grammar and parser must agree."""
    if (at := parser.begins()) is Thinking.OVER:
        return form
    if (marks := parser.marks) is None:
        raise Unsupported(
            f"'{param}' is not supported: the gateway's --reasoning-parser {name} does not tell what ends the thinking, so that the"
            " answer cannot be held behind it; leave it out, or start the gateway with another parser",
            param=param,
        )
    return behind_thinking(at, form, marks)


def _format(settings: Settings, served: Served, tools: Sequence[Tool]) -> Format | None:
    name = settings.tool_call_parser
    if name.startswith(vllm_parsers.PREFIX):
        make = vllm_parsers.tool_parsers(name, served.text, [tool.for_template() for tool in tools])
        return Format(lambda _: make(), None)
    if name == "auto":
        return FORMATS[served.text.tool_format] if served.text.tool_format else None
    return FORMATS.get(name)


def _callee(tool: Tool, *, strict: bool) -> Callee:
    # Without parameters there are none; without strictness, any.
    schema = tool.function.parameters or _NO_PARAMETERS
    return Callee(tool.function.name, schema if strict else _ANY_OBJECT)


def _required(
    form: Format | None, body: ChatCompletionRequest, thought: _Thought, asked: pb.StructuredOutput | None
) -> _Held:
    """Calls and nothing else: of any tool, or one of the named tool."""
    if asked is not None:
        raise InvalidArgument(
            f"{body.constraint_param} and a tool_choice that requires a call cannot both hold the answer; send one of them, or"
            ' tool_choice "auto" or "none"',
            param=body.constraint_param,
        )
    name = body.tool_choice.name if isinstance(body.tool_choice, NamedChoice) else None
    if form is None or form.shape is None:
        form = LIST if name is None else named(name)
    assert form.shape is not None
    callees = [
        _callee(tool, strict=tool.function.strict is not False)
        for tool in body.tools
        if name in (None, tool.function.name)
    ]
    calls = form.shape.required(callees, parallel=body.parallel_tool_calls and name is None)
    return _Held(form, structural(thought.behind(calls, _TOOLS)), _TOOLS)


def _optional(
    form: Format | None,
    served: Served,
    body: ChatCompletionRequest,
    thought: _Thought,
    asked: pb.StructuredOutput | None,
) -> _Held:
    """Free text with calls in it; where an answer must match something: that, or calls."""
    if form is None:
        raise Unsupported(
            f"tool_choice=\"auto\" is not supported: the chat template of '{served.model.served_name}' does not show how it"
            ' writes calls; send tool_choice "required" or a function\'s name, or start the gateway with --tool-call-parser',
            param="tool_choice",
        )
    strict = [index for index, tool in enumerate(body.tools) if tool.function.strict]
    if asked is None and not strict:
        return _Held(form)
    if not isinstance(form.shape, Shape):
        raise _without_grammar(body.constraint_param if asked is not None else None, strict)
    callees = [_callee(tool, strict=bool(tool.function.strict)) for tool in body.tools]
    if asked is None:
        calls = form.shape.optional(callees, parallel=body.parallel_tool_calls)
        return _Held(form, structural(thought.behind(calls, _TOOLS)), _TOOLS)
    param = body.constraint_param
    either = form.shape.required(callees, parallel=body.parallel_tool_calls)

    def place(answer: Tag) -> Tag:
        return thought.behind({"type": "or", "elements": [either, answer]}, param)

    return _Held(form, placed(asked, place, param), param)


def _without_grammar(param: str | None, strict: Sequence[int]) -> Unsupported:
    if param is not None:
        return Unsupported(
            f"{param} is not supported beside tools that may be called or not: the parser of this model's calls has no grammar for"
            f' "calls or this"; leave it out, or send tool_choice "none"',
            param=param,
        )
    param = f"tools[{strict[0]}].function.strict"
    return Unsupported(
        f'{param}=true is not supported: the parser of this model\'s calls has no grammar for tool_choice "auto"; leave it out,'
        ' or send tool_choice "required" or a function\'s name',
        param=param,
    )
