"""How a chat answer is constrained, and read as thinking, content and tool calls."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.generation.request_builder import template_variables
from gateway.generation.sequence_text import Delta, TokenReport
from gateway.parsers.events import (
    CallRevoked,
    CallStart,
    Event,
    Reasoning,
    Text,
    ToolParser,
    call_id,
    merged,
)
from gateway.parsers.formats import FORMATS, LIST, Format
from gateway.parsers.harmony import MARKERS as HARMONY_MARKERS
from gateway.parsers.harmony import ROLE, START, THOUGHTS, HarmonyParser
from gateway.parsers.machine import CallParser
from gateway.parsers.parser_base import NamedToolParser
from gateway.parsers.reasoning import (
    TAIL_TOKENS,
    THINKING_FORMATS,
    Thinking,
    ThinkingFormat,
    ThinkParser,
    thinking_at,
)
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.chat import ChatCompletionRequest
from gateway.schemas.sampling import SamplingRequest
from gateway.schemas.tools import NO_PARAMETERS, NamedChoice, Tool
from gateway.settings import HARMONY, Settings
from gateway.text.chat_template import joined
from gateway.text.tokenization import TextCodec
from gateway.tools import harmony
from gateway.tools.grammar import (
    Callee,
    Tag,
    behind_thinking,
    either,
    json_schema,
    optional,
    place_constraint,
    required,
    structural,
)
from protos.errors import InvalidArgument, Unsupported
from protos.triptych.v1 import common_pb2 as pb


class Trim:
    """Removes white space that only separates parts: around thinking, and before or after all calls.

    Text on both sides of a call or thought keeps the white space around it. An answer without thinking and
    calls stays unchanged, to the last line break.
    """

    def __init__(self) -> None:
        self._part: type[Event] | None = None
        # White space since the last text shown. It belongs to the answer only if more text follows.
        self._held: list[str] = []
        self._fresh = False
        self._has_content = False
        # Whether no text has followed the calls yet that the held white space surrounds.
        self._separates = False

    def push(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yields the events without separating white space; some of it may come with later events."""
        for event in events:
            if isinstance(event, Text | Reasoning):
                yield from self._text(event)
            elif isinstance(event, CallRevoked):
                # The text behind it continues its source.
                source = "".join(self._held) + event.source
                self._part, self._has_content = Text, True
                self._fresh = self._separates = False
                self._held.clear()
                yield event._replace(source=source)
            else:
                if isinstance(event, CallStart):
                    if self._part is Reasoning:
                        self._held.clear()
                    self._part = CallStart
                yield event

    def _text(self, event: Text | Reasoning) -> Iterator[Event]:
        kind = type(event)
        if not event.text and kind is Text:
            return
        if kind is not self._part:
            self._enter(kind)
        text = event.text.lstrip() if self._fresh else event.text
        shown = text.rstrip()
        if shown:
            self._fresh = self._separates = False
            self._has_content |= kind is Text
            yield kind("".join(self._held) + shown)
            self._held.clear()
        if len(shown) < len(text):
            self._held.append(text[len(shown) :])

    def _enter(self, kind: type[Event]) -> None:
        """Begins a part; keeps or drops the white space before it."""
        continues = self._part in (CallStart, Reasoning) and kind is Text and self._has_content
        # Thinking starts behind a marker. Content at the beginning of an answer keeps its white space.
        self._fresh = not continues and (self._part is not None or kind is Reasoning)
        self._part, self._separates = kind, continues
        if not continues:
            self._held.clear()

    def finish(self) -> Iterator[Event]:
        """Yields the text held back, at the end of the answer."""
        if self._part is Text and self._held and not self._separates:
            yield Text("".join(self._held))


class AnswerReader:
    """Reads a sequence's text."""

    num_calls: int
    """Calls so far, without revoked calls."""

    def __init__(
        self,
        thinking: ToolParser | None,
        calls: ToolParser | None,
        *,
        one_call: bool = False,
        show_thinking: bool = True,
    ) -> None:
        """Combines two parsers: the second reads the content found by the first."""
        self._thinking = thinking
        self._calls = calls
        self._one_call = one_call
        self._show_thinking = show_thinking
        self._trim = Trim()
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Returns the events settled by further characters."""
        parts = self._thinking.feed(text) if self._thinking else [Text(text)]
        return self._read(self._into_calls(parts))

    def finish(self) -> list[Event]:
        """Returns the events held back, at the end of the text. Call once."""
        parts = list(self._into_calls(self._thinking.finish())) if self._thinking else []
        if self._calls is not None:
            parts += self._around_calls(self._calls.finish())
        if (outside := self._interrupted) is not None:
            parts += outside.finish()
        return self._read(parts, last=True)

    def whole(self, text: str) -> list[Event]:
        """Returns the events of a whole text. Call it instead of :meth:`feed` and :meth:`finish`."""
        parts: list[Event] = self._thinking.whole(text) if self._thinking else [Text(text)]
        if self._calls is not None:
            content = "".join(part.text for part in parts if isinstance(part, Text))
            parts = [part for part in parts if not isinstance(part, Text)]
            parts += self._around_calls(self._calls.whole(content))
            if (outside := self._interrupted) is not None:
                parts += outside.finish()
        return self._read(parts, last=True)

    def _into_calls(self, parts: Iterable[Event]) -> Iterator[Event]:
        for part in parts:
            if self._calls is not None and isinstance(part, Text):
                yield from self._around_calls(self._calls.feed(part.text))
            else:
                yield part

    @property
    def _interrupted(self) -> ThinkParser | None:
        return self._thinking.interrupted if isinstance(self._thinking, ThinkParser) else None

    def _around_calls(self, events: Iterable[Event]) -> Iterator[Event]:
        """Lets thinking that a call's marker has interrupted go on, unless a call follows."""
        outside = self._interrupted
        for event in events:
            if outside is None:
                yield event
            elif isinstance(event, Text):
                yield from outside.feed(event.text)
            else:
                if isinstance(event, CallStart):
                    yield from outside.call()
                yield event

    def _read(self, parts: Iterable[Event], *, last: bool = False) -> list[Event]:
        events = list(self._trim.push(self._wanted(parts)))
        if last:
            events += self._trim.finish()
        if not self._show_thinking:
            events = [event for event in events if not isinstance(event, Reasoning)]
        for event in events:
            self.num_calls += isinstance(event, CallStart) - isinstance(event, CallRevoked)
        return merged(events)

    def _wanted(self, parts: Iterable[Event]) -> Iterator[Event]:
        for part in parts:
            if not self._one_call or isinstance(part, Text | Reasoning) or part.number == 0:
                yield part
            elif isinstance(part, CallRevoked):
                # The call was dropped, so the client has not seen it.
                yield Text(part.source)


class DeltaReader:
    """Finds the events in a sequence's deltas, each with the tokens to report."""

    def __init__(self, reader: AnswerReader) -> None:
        """Wraps the parser of the sequence's text."""
        self._reader = reader
        # Tokens whose text the reader holds back, or that belong to a marker; the next event reports them.
        self._unreported: list[TokenReport] = []

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._reader.num_calls

    def read(self, delta: Delta) -> Iterator[tuple[Event, list[TokenReport]]]:
        """Yields the events settled by the delta, each with the tokens to report.

        At the sequence's end, they include the text held back. A stream cannot take back a call that is
        revoked; it may mark it.
        """
        self._unreported += delta.tokens
        events = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish()
        for event in events:
            revoked = isinstance(event, CallRevoked)
            yield event, [] if revoked else self.take_reports()

    def take_reports(self) -> list[TokenReport]:
        """Returns the tokens not yet reported by an event, and forgets them."""
        tokens, self._unreported = self._unreported, []
        return tokens


_ANY_OBJECT: Final = {"type": "object"}
_TOOLS: Final = "tools"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How an answer is constrained and read.

    Without tools and thinking there are no parsers: the whole text is content.
    """

    thinking: Callable[[], ToolParser] | None = None
    """Makes a parser that separates thinking from the answer."""
    calls: Callable[[], ToolParser] | None = None
    """Makes a parser that finds tool calls."""
    constraint: pb.StructuredOutput | None = None
    """The grammar that the output must match; ``None``: any text is fine."""
    constraint_param: str = ""
    """The request's parameter that set the constraint."""
    markers: frozenset[str] | None = frozenset()
    """Texts shown to the parsers even if they are special tokens; ``None``: all special tokens."""
    one_call: bool = False
    """Whether calls after the first are dropped."""
    named: bool = False
    """Whether the request names the tool to call."""
    show_thinking: bool = True
    """Whether the client wants to see the thinking."""

    @property
    def plain(self) -> bool:
        """Whether the text needs no parsing."""
        return self.thinking is None and self.calls is None

    def reader(self) -> AnswerReader:
        """Returns a new reader for a sequence."""
        return AnswerReader(
            self.thinking() if self.thinking else None,
            self.calls() if self.calls else None,
            one_call=self.one_call,
            show_thinking=self.show_thinking,
        )


class ThinkingPlan(NamedTuple):
    """How the thinking in front of an answer is read and allowed for."""

    form: ThinkingFormat | None
    """Its format; ``None``: the model does not think."""
    at: Thinking = Thinking.POSSIBLE
    """Where the answer begins."""

    def parser(self, calls: Format | None = None) -> Callable[[], ToolParser] | None:
        """Returns a function that makes parsers; ``calls`` may interrupt the thinking."""
        form, at, triggers = self.form, self.at, triggers_of(calls)
        return None if form is None else lambda: ThinkParser(at, form, triggers)

    @property
    def markers(self) -> frozenset[str]:
        """Texts shown to the parser."""
        return frozenset(self.form.texts()) if self.form is not None else frozenset()

    def behind(self, tag: Tag) -> Tag:
        """Puts an answer's constraint after the thinking."""
        return behind_thinking(self.at, tag, self.form) if self.form is not None else tag


def triggers_of(calls: Format | None) -> tuple[str, ...]:
    """Returns the texts that begin calls, and so end a thought."""
    return tuple(filter(None, (calls.trigger, *calls.also))) if calls is not None else ()


class _CallPlan(NamedTuple):
    """How calls are read, and their constraint."""

    form: Format | str
    """Their format, or the name of the only tool, whose arguments alone are the answer."""
    constraint: pb.StructuredOutput | None = None
    param: str = ""
    """The request's parameter that set the constraint."""


def plan_answer(
    settings: Settings, served: ServedModel, body: ChatCompletionRequest, prompt: Sequence[int]
) -> AnswerPlan:
    """Plans the answer to ``body``. The effort grows with the request's tools and schemas.

    Raises:
        Unsupported: if calls are optional and no parser finds them.
        InvalidArgument: if the constraint cannot be read, or contradicts the choice of tools.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if _writes_harmony(settings, served):
        return _plan_harmony(served, body, () if choice == "none" else body.tools, prompt)
    thinking = plan_thinking(settings, served, body, prompt)
    asked, param = body.constraint(), body.constraint_param
    if choice == "none" or not body.tools:
        if asked is not None and thinking.form is not None:
            asked = place_constraint(asked, thinking.behind, param)
        return AnswerPlan(
            thinking.parser(),
            constraint=asked,
            constraint_param=param,
            markers=thinking.markers,
            show_thinking=body.include_reasoning,
        )
    form = call_format(settings, served)
    calls = (
        _plan_optional(form, served, body, thinking, asked)
        if choice == "auto"
        else _plan_required(form, body, thinking)
    )
    called, tools = calls.form, {tool.function.name: tool.function.parameters for tool in body.tools}
    markers: frozenset[str] = frozenset() if isinstance(called, str) else frozenset(called.texts())
    return AnswerPlan(
        thinking.parser(None if isinstance(called, str) else called),
        lambda: NamedToolParser(call_id, called) if isinstance(called, str) else CallParser(called, tools),
        calls.constraint,
        calls.param,
        thinking.markers | markers,
        one_call=not body.parallel_tool_calls or isinstance(choice, NamedChoice),
        named=isinstance(choice, NamedChoice),
        show_thinking=body.include_reasoning,
    )


def _writes_harmony(settings: Settings, served: ServedModel) -> bool:
    name = served.text.shown.tool_format if settings.tool_call_parser == "auto" else settings.tool_call_parser
    return HARMONY in (name, settings.reasoning_parser)


def _plan_harmony(
    served: ServedModel, body: ChatCompletionRequest, tools: Sequence[Tool], prompt: Sequence[int]
) -> AnswerPlan:
    """Plans an answer of gpt-oss, whose messages are thinking, content and calls."""
    begun, names = _begun(served.text, prompt), frozenset(tool.function.name for tool in tools)
    asked, param, choice = body.constraint(), body.constraint_param, body.tool_choice
    if tools and choice not in (None, "auto"):
        calls = harmony.calls(_must_call(body))
        asked, param = structural(harmony.after_thinking(begun, calls)), _TOOLS
    elif asked is not None or any(tool.function.strict for tool in tools):
        callees = [_callee(tool, strict=bool(tool.function.strict)) for tool in tools]

        def place(content: Tag) -> Tag:
            if harmony.is_answer(begun):
                return content
            messages = harmony.answer(content)
            if callees:
                messages = {"type": "or", "elements": [harmony.calls(callees), messages]}
            return harmony.after_thinking(begun, messages)

        if asked is None:
            asked, param = structural(place(harmony.ANY)), _TOOLS
        else:
            asked = place_constraint(asked, place, param)
    return AnswerPlan(
        lambda: HarmonyParser(call_id, names, begun),
        constraint=asked,
        constraint_param=param,
        markers=HARMONY_MARKERS,
        one_call=not body.parallel_tool_calls or isinstance(choice, NamedChoice),
        named=isinstance(choice, NamedChoice),
        show_thinking=body.include_reasoning,
    )


def _begun(text: TextCodec, prompt: Sequence[int]) -> str:
    """Returns the text of the prompt after its last beginning of a message of harmony's."""
    start = text.encode(START, add_special_tokens=False)
    at = next((at for at in range(len(prompt), 0, -1) if [prompt[at - 1]] == start), None)
    return ROLE if at is None else text.decode(prompt[at:])


def plan_thinking(
    settings: Settings, served: ServedModel, body: SamplingRequest, prompt: Sequence[int]
) -> ThinkingPlan:
    """Plans the thinking in front of the answer to ``prompt``."""
    name, text = settings.reasoning_parser, served.text
    if _writes_harmony(settings, served):
        form: ThinkingFormat | None = THOUGHTS
    else:
        form = text.shown.thinking if name == "auto" else THINKING_FORMATS.get(name)
    if form is None:
        return ThinkingPlan(None)
    variables, continued = settings.default_chat_template_kwargs, ""
    if isinstance(body, ChatCompletionRequest):
        variables = template_variables(body, variables)
        continued = joined(body.messages[-1].content) if body.continue_final_message else ""
    tail = text.decode(prompt[-TAIL_TOKENS:])
    return ThinkingPlan(form, thinking_at(form, tail, variables=variables, continued=continued))


def call_format(settings: Settings, served: ServedModel) -> Format | None:
    """Returns the format of the model's calls; ``None`` if it is not known."""
    name = settings.tool_call_parser
    return served.text.shown.tools if name == "auto" else FORMATS.get(name)


def _callee(tool: Tool, *, strict: bool) -> Callee:
    # A tool that is not strict may get any object, unless it takes nothing.
    if tool.function.has_no_parameters:
        return Callee(tool.function.name, NO_PARAMETERS)
    return Callee(tool.function.name, (tool.function.parameters or {}) if strict else _ANY_OBJECT)


def _plan_required(form: Format | None, body: ChatCompletionRequest, thinking: ThinkingPlan) -> _CallPlan:
    """Plans an answer of calls alone: of any tool, or a single call of the named tool."""
    callees = _must_call(body)
    name = body.tool_choice.name if isinstance(body.tool_choice, NamedChoice) else None
    if form is None and name is not None:
        return _CallPlan(name, structural(thinking.behind(json_schema(callees[0].schema))), _TOOLS)
    form = form or LIST
    calls = required(form, callees, parallel=body.parallel_tool_calls and name is None)
    return _CallPlan(form, structural(thinking.behind(calls)), _TOOLS)


def _must_call(body: ChatCompletionRequest) -> list[Callee]:
    """Returns the tools of which the answer must call one.

    A response format is for the answer's content, of which there is none. Agents send both with every turn.
    """
    if body.structured_outputs is not None:
        raise InvalidArgument(
            f"{body.constraint_param} and a tool_choice that requires a call contradict one another; send one"
            ' of them, or tool_choice "auto" or "none"',
            param=body.constraint_param,
        )
    name = body.tool_choice.name if isinstance(body.tool_choice, NamedChoice) else None
    return [
        _callee(tool, strict=tool.function.strict is not False)
        for tool in body.tools
        if name in (None, tool.function.name)
    ]


def _plan_optional(
    form: Format | None,
    served: ServedModel,
    body: ChatCompletionRequest,
    thinking: ThinkingPlan,
    asked: pb.StructuredOutput | None,
) -> _CallPlan:
    """Plans free text with calls in it, or, under a constraint, either calls or an answer that matches it."""
    if form is None:
        raise Unsupported(
            f"tool_choice=\"auto\" is not supported: the chat template of '{served.model.served_name}' does"
            ' not show how it writes calls; send tool_choice "required" or a function\'s name, or start the'
            " gateway with --tool-call-parser",
            param="tool_choice",
        )
    if asked is None and not any(tool.function.strict for tool in body.tools):
        return _CallPlan(form)
    callees = [_callee(tool, strict=bool(tool.function.strict)) for tool in body.tools]
    parallel = body.parallel_tool_calls
    if asked is None:
        # After an optional thought, free text does not begin with its marker.
        mark = thinking.form.start if thinking.form and thinking.at is Thinking.POSSIBLE else ""
        calls = optional(form, callees, parallel=parallel, never_first=mark)
        return _CallPlan(form, structural(thinking.behind(calls)), _TOOLS)
    param = body.constraint_param

    # A choice between texts with calls in them says itself which calls may come.
    has_calls = bool(form.trigger) and any(form.trigger in text for text in asked.choice.values)

    def place(answer: Tag) -> Tag:
        return thinking.behind(answer if has_calls else either(form, callees, answer, parallel=parallel))

    return _CallPlan(form, place_constraint(asked, place, param), param)
