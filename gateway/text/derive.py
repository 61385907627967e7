"""Finds in a chat template how its model writes tool calls.

The template writes short conversations, which differ in one respect each, such as in a call. The differences
are compared with the entries of the tables. If none fits, they give the markers of an entry of their own,
which must write further calls as the template does.

The idea of comparing renderings: llama.cpp's parser derived from templates.
"""

import ast
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from gateway.parsers import harmony
from gateway.parsers.events import CallStart
from gateway.parsers.formats import (
    FORMATS,
    CallForm,
    CallIds,
    Elements,
    Format,
    JsonObject,
    LooseObject,
    NamedJson,
    Python,
    Tagged,
)
from gateway.parsers.machine import CallParser
from gateway.parsers.reasoning import SWITCHES, THINKING_FORMATS, ThinkingFormat
from gateway.parsers.writing import Call, write
from gateway.schemas.base import clip
from gateway.settings import HARMONY
from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument

# CPU time for one template, seconds, and characters of a turn. Well-known ones take a hundredth of both.
_CPU_S: Final = 1.0
_MAX_CHARS: Final = 8_000

_QUESTION: Final = "Probed question"
_ANSWER: Final = "Probed answer"
_TEXT: Final = "Probed text"
_THOUGHT: Final = "Probed thought"

# Keys in alphabetical order, as some templates sort them. Words for true and null differ between templates.
_CALLS: Final = (
    Call("probe_first", {"a_text": _TEXT, "b_number": 7041, "c_nested": {"inner": ["deep", 3]}}),
    Call("probe_second", {"a_text": _TEXT}),
)
_OTHER: Final = Call("probe_second", {"a_text": _TEXT, "c_nested": [[]], "d_text": "a <b>\n& c"})
_IDS: Final[Mapping[CallIds, tuple[str, str]]] = {
    "call": ("call_probe00000000000000001", "call_probe00000000000000002"),
    # Mistral's templates refuse others.
    "short": ("probe0001", "probe0002"),
    # Kimi's templates write nothing but the id.
    "indexed": ("functions.probe_first:0", "functions.probe_second:1"),
}


class _Written(NamedTuple):
    """Calls as a template writes them, without the rest of the turn."""

    text: str
    """Up to the end of the turn."""
    ending: str
    """End of a turn without calls."""
    calls: Sequence[Call]
    ids: CallIds
    as_text: bool
    """Whether the template was given arguments as JSON."""

    @property
    def body(self) -> str:
        """The calls without the end of the turn."""
        return self.text[: len(self.text) - len(_common_end(self.ending, self.text))].rstrip()


@dataclass(frozen=True, slots=True)
class Derived:
    """The formats that a chat template shows."""

    tools: Format | None = None
    """The form of tool calls."""
    tool_format: str | None = None
    """Its name; ``None`` for an entry of the template's own, and without any."""
    reason: str = ""
    """Why there is no form of tool calls."""
    arguments_as_text: bool = False
    """Whether the template takes the arguments of earlier calls as JSON, and refuses an object."""
    thinking: ThinkingFormat | None = None
    """The markers of thinking; ``None``: the model does not think, as far as the template shows."""
    thinking_format: str | None = None
    """Their name; ``None`` for markers of the template's own, and without any."""


class _Refused(Exception):  # noqa: N818 - a finding, not an error
    """The template shows nothing that could be read."""


def derive(template: ChatTemplate, added_tokens: Collection[str] = ()) -> Derived:
    """Returns the formats of tool calls and thinking that ``template`` shows. Takes some 20 ms.

    Args:
        template: writes the conversations.
        added_tokens: the tokenizer's; they count if the template shows tools and no calls.
    """
    probe = _Probe(template)
    name, thinking = _thinking(probe)
    try:
        written = probe.calls(_CALLS, thinking)
        tool_format, form = _format_of(written, thinking, probe)
    except _Refused as refused:
        announced = probe.announced(added_tokens)
        form, reason = (FORMATS[announced], "") if announced else (None, str(refused))
        return Derived(form, announced, reason, thinking=thinking, thinking_format=name)
    if tool_format == HARMONY:
        # Its channels are for thinking, too.
        name, thinking = HARMONY, None
    return Derived(form, tool_format, "", written.as_text, thinking, name)


def _format_of(
    written: "_Written", thinking: ThinkingFormat | None, probe: "_Probe"
) -> tuple[str | None, Format | None]:
    """Returns the name of the calls' format and its entry, of which one may be missing."""
    if f"to={harmony.FUNCTIONS}{written.calls[0].name}" in written.text and harmony.MESSAGE in written.text:
        return HARMONY, None
    if fitting := [n for n, form in FORMATS.items() if _fits(form, written) and _reads(form, written)]:
        texts = {name: write(FORMATS[name], written.calls) for name in fitting}
        # The longest text includes all markers; among equals, white space decides.
        name = max(
            texts, key=lambda name: (len(_plain(texts[name])), written.text.startswith(texts[name].strip()))
        )
        return name, FORMATS[name]
    form = _own_format(written)
    if form is not None and _fits(form, written) and _fits(form, probe.calls((_OTHER,), thinking)):
        return None, form
    raise _Refused(f"it writes calls in a form that no entry can describe: {clip(written.text)}")


class _Probe:
    """Writes conversations with a template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._end_s = time.thread_time() + _CPU_S
        self.source = template.source
        self.switches = tuple(name for name in SWITCHES if name in template.variables)

    def turn(self, **turn: Any) -> str:
        """Returns the text of an assistant's turn after a question, the header included."""
        text = self._render([_USER, {"role": "assistant", **turn}], tools=_TOOLS)
        text = text.rpartition(_QUESTION)[2]
        if len(text) > _MAX_CHARS:
            raise _Refused("it adds too much text to a short turn")
        return text

    def earlier_turn(self, content: str) -> str:
        """Returns the text of an assistant's turn between two questions."""
        turns = [_USER, {"role": "assistant", "content": content}, _USER]
        return self._render(turns, tools=_TOOLS).rpartition(_QUESTION)[0].rpartition(_QUESTION)[2]

    def prompt(self, **switched: bool) -> str:
        """Returns the text after a question before which the model answers."""
        return self._render([_USER], switched, is_prompt=True).rpartition(_QUESTION)[2]

    def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        variables: Mapping[str, bool] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_prompt: bool = False,
    ) -> str:
        if time.thread_time() > self._end_s:
            raise _Refused(f"it takes more than {_CPU_S} s of CPU time for short conversations")
        try:
            return self._template.render(
                turns, add_generation_prompt=is_prompt, variables=variables, tools=tools
            )
        except (InvalidArgument, KeyError) as refused:
            raise _Refused(str(refused)) from refused

    def calls(self, calls: Sequence[Call], thinking: ThinkingFormat | None) -> _Written:
        """Returns calls as the template writes them: all of them, or the first."""
        reason = "it shows no calls" if self._template.knows_tools else "it shows no tools"
        for ids in _IDS:
            for some in (calls, calls[:1]):
                for as_text in (False, True):
                    try:
                        text = self.turn(content="", tool_calls=_tool_calls(some, ids, as_text))
                    except _Refused as refused:
                        reason = str(refused) if self._template.knows_tools else reason
                        continue
                    if all(call.name in text for call in some) and next(iter(some[0].arguments)) in text:
                        return _Written(*self._cut(text, thinking), some, ids, as_text)
        raise _Refused(reason)

    def _cut(self, text: str, thinking: ThinkingFormat | None) -> tuple[str, str]:
        """Returns a turn without the header and the empty answer before the calls, and the end of turns."""
        header, _, ending = self.turn(content=_ANSWER).partition(_ANSWER)
        text = text[len(_common_start(header, text)) :]
        if (closed := _common_start(ending, text)).strip():
            text = text[len(closed) :]
        text = text.lstrip()
        for marker in (*thinking.starts, *thinking.ends) if thinking else ():
            text = text.removeprefix(marker).lstrip()
        return text, ending

    def announced(self, added_tokens: Collection[str]) -> str | None:
        """Returns the format whose marker the template's words about tools quote, or a token is."""
        try:
            words = self._render([_USER], tools=_TOOLS).rpartition(_QUESTION)[0]
        except _Refused:
            return None
        for texts in (words, added_tokens) if self._template.knows_tools else ():
            found = [name for name, form in FORMATS.items() if form.trigger and form.trigger in texts]
            if len(found) == 1:
                return found[0]
        return None


_USER: Final = {"role": "user", "content": _QUESTION}
_TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "probe",
            "parameters": {
                "type": "object",
                "properties": {
                    "a_text": {"type": "string", "description": "probe"},
                    "b_number": {"type": "number", "description": "probe"},
                    "c_nested": {"type": "object", "description": "probe"},
                    "d_text": {"type": "string", "description": "probe"},
                },
                "required": ["a_text"],
            },
        },
    }
    for name in ("probe_first", "probe_second")
]


_SCHEMAS: Final = {tool["function"]["name"]: tool["function"]["parameters"] for tool in _TOOLS}


def _tool_calls(calls: Sequence[Call], ids: CallIds, as_text: bool) -> list[dict[str, Any]]:
    return [
        {
            "id": id_,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments) if as_text else call.arguments,
            },
        }
        for call, id_ in zip(calls, _IDS[ids], strict=False)
    ]


# Markers, and where texts may be cut.

_MARKER: Final = re.compile(r"<[^<>\n]*>|\[/?[A-Z_ ]{2,}\]")


def _around(text: str, at: int) -> tuple[int, int]:
    """Returns the characters before and after ``at`` that belong to a marker cut in two there."""
    for marker in _MARKER.finditer(text):
        if marker.start() < at < marker.end():
            return at - marker.start(), marker.end() - at
    return 0, 0


def _common(one: str, other: str) -> int:
    """Returns the number of characters with which both texts begin."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _common_start(one: str, other: str) -> str:
    """Returns the text with which both begin, up to the last whole marker."""
    size = _common(one, other)
    while cut := max(_around(one, size)[0], _around(other, size)[0]):
        size -= cut
    return one[:size]


def _common_end(one: str, other: str) -> str:
    """Returns the text with which both end, from the first whole marker on."""
    size = _common(one[::-1], other[::-1])
    while cut := max(_around(text, len(text) - size)[1] for text in (one, other)):
        size -= cut
    return one[len(one) - size :]


# Comparison with an entry.

_END_OF_TURN: Final = re.compile(r"(<[^<>/]*>|</s>)*")
_BLANKS: Final = re.compile(r"\s+")


@lru_cache(maxsize=16)
def _plain(text: str) -> str:
    """Returns a text without the differences between templates of the same format."""
    parts: list[str] = []
    at = 0
    for start, end, found in _objects(text, 0):
        if start >= at:
            parts += text[at:start], json.dumps(_without_ids(found), sort_keys=True)
            at = end
    return _BLANKS.sub("", "".join([*parts, text[at:]])).replace("'", '"').casefold()


def _without_ids(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ids = _IDS["call"] + _IDS["short"]
    return {key: _without_ids(item) for key, item in value.items() if item not in ids and item != "function"}


def _fits(form: Format, written: _Written) -> bool:
    text = written.text
    if isinstance(form.call, NamedJson) and (mark := form.call.id_mark) and not form.call.id_is_number:
        for id_ in _IDS[written.ids]:
            text = text.replace(mark + id_, "")
    text, own = _plain(text), _plain(write(form, written.calls))
    rest = text.removeprefix(own)
    return text != rest and bool(_plain(written.ending).endswith(rest) or _END_OF_TURN.fullmatch(rest))


def _reads(form: Format, written: _Written) -> bool:
    """Whether an entry's parser finds the calls: the comparison overlooks letter case and quotation marks."""
    events = CallParser(form, _SCHEMAS).whole(written.text)
    names = [event.name for event in events if isinstance(event, CallStart)]
    return names == [call.name for call in written.calls]


# An entry from a template's calls.


class _Span(NamedTuple):
    """A call within a text."""

    form: CallForm
    start: int
    end: int


def _own_format(written: _Written) -> Format | None:
    text, calls = written.body, written.calls
    ids = _IDS[written.ids]
    if (first := _find(text, 0, calls[0], ids[0])) is None:
        return None
    before, after = text[: first.start], text[first.end :]
    if len(calls) == 1:
        return _format(first.form, written, begin=before, end=after)
    second = _find(text, first.end, calls[1], ids[1], first.form)
    if second is None:
        return None
    between, after = text[first.end : second.start], text[second.end :]
    begin = _common_end(before, between)
    begin = begin.lstrip()
    opening, rest = before[: len(before) - len(begin)], between[: len(between) - len(begin)]
    end = _common_start(rest, after)
    if not end.strip():
        end = ""
    separator, closing = rest[len(end) :], after[len(end) :]
    return _format(first.form, written, opening, begin, end, separator, closing)


def _format(
    call: CallForm,
    written: _Written,
    opening: str = "",
    begin: str = "",
    end: str = "",
    separator: str = "",
    closing: str = "",
) -> Format | None:
    if any(text in marker for marker in (opening, begin, separator) for text in _changing(written)):
        return None
    # Markers beyond those of the opening end the turn.
    pairs = len(_MARKER.findall(opening))
    closers = [*_MARKER.finditer(closing)]
    if len(closers) > pairs:
        closing = closing[: closers[pairs].start()].rstrip()
    form = Format(
        call,
        begin=begin,
        end=end,
        opening=opening,
        closing=closing,
        separator=separator,
        ids="short" if written.ids == "short" else "call",
        bare=not begin and not opening.rstrip().removesuffix("["),
    )
    if isinstance(call, JsonObject | Python):
        if opening.rstrip().endswith("[") and closing.lstrip().startswith("]"):
            return replace(
                form,
                opening=opening.rstrip()[:-1],
                closing=closing.lstrip()[1:],
                listed=True,
            )
    elif form.bare:
        return None
    wrapped = re.fullmatch(r"(<[^<>]*>\s*)(<[^>]*)", begin)
    closed = re.fullmatch(r"(.*>\s*)(</[^<>]*>\s*)", end, re.DOTALL)
    if not opening and not closing and wrapped and closed:
        return replace(
            form, opening=wrapped[1], begin=wrapped[2], end=closed[1], closing=closed[2], wraps_each=True
        )
    return form


def _changing(written: _Written) -> tuple[str, ...]:
    """Returns texts that differ between calls, so that no marker contains them."""
    return (*_IDS[written.ids], *(call.name for call in written.calls))


def _find(text: str, at: int, call: Call, id_: str, form: CallForm | None = None) -> _Span | None:
    """Returns the first call in ``text`` after ``at``; of the same form as another one, if given."""
    finders = (_json_call, _python_call, _loose_call, _element_call, _tagged_call)
    spans = (find(text, at, call, id_, form) for find in finders)
    return next((span for span in spans if span is not None), None)


def _json_call(text: str, at: int, call: Call, id_: str, _: CallForm | None) -> _Span | None:
    for start, end, found in _objects(text, at):
        names = [key for key, value in found.items() if value == call.name]
        values = [key for key, value in found.items() if _is_same(value, call.arguments)]
        if names and values:
            first = text[start + 1 : text.index(json.dumps(names[0]), start)]
            # Other members may differ from call to call.
            first = "" if id_ in first or "{" in first else first.lstrip()
            return _Span(JsonObject(names[0], (values[0],), first), start, end)
        if found == call.arguments:
            name = text.rfind(call.name, at, start)
            if name < 0:
                return None
            between = text[name + len(call.name) : start]
            mark, given, after = between.partition(id_)
            form = NamedJson(after, mark) if given else NamedJson(between)
            return _Span(form, name, end)
    return None


def _objects(text: str, at: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    decoder = json.JSONDecoder()
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            pass
        else:
            yield at, end, found
        at += 1


def _is_same(value: Any, arguments: Mapping[str, Any]) -> bool:
    return bool(value in (arguments, json.dumps(arguments)))


def _python_call(text: str, at: int, call: Call, _: str, __: CallForm | None) -> _Span | None:
    start = end = text.find(call.name + "(", at)
    while start >= 0 and (end := text.find(")", end) + 1):
        try:
            parsed = ast.parse(text[start:end], mode="eval").body
            if isinstance(parsed, ast.Call):
                values = {word.arg: ast.literal_eval(word.value) for word in parsed.keywords}
                return _Span(Python(), start, end) if values == call.arguments else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _loose_call(text: str, at: int, call: Call, _: str, __: CallForm | None) -> _Span | None:
    key = next(iter(call.arguments))
    start = text.find(f"{call.name}{{{key}:", at)
    value = text.find(_TEXT, start)
    if start < 0 or value < 0:
        return None
    quote = text[start + len(call.name) + len(key) + 2 : value]
    return _spelled(LooseObject(quote), text, start, call) if quote else None


def _element_call(text: str, at: int, call: Call, _: str, __: CallForm | None) -> _Span | None:
    key = next(iter(call.arguments))
    opened = text.find(f"<{key}>{_TEXT}", at)
    value_end = opened + len(key) + 2 + len(_TEXT)
    start, closed = text.rfind(call.name, at, max(opened, 0)), text.find(f"</{key}>", value_end)
    if opened < 0 or start < 0 or closed < 0:
        return None
    prefix = text[value_end:closed]
    name_end = text[start + len(call.name) : opened].removesuffix(prefix)
    return _spelled(Elements(name_end, prefix), text, start, call)


def _spelled(form: CallForm, text: str, start: int, call: Call) -> _Span | None:
    own = write(Format(form), [call])
    return _Span(form, start, start + len(own)) if text.startswith(own, start) else None


def _tagged_call(text: str, at: int, call: Call, _: str, known: CallForm | None) -> _Span | None:
    """Finds parameters between tags: the texts around the first two of them give the tags."""
    place = text.find(next(iter(call.arguments)), at)
    start = text.rfind(call.name, at, max(place, 0))
    if start < 0:
        return None
    # Texts before each key, before each value, and after the last value.
    gaps: list[str] = []
    end = start + len(call.name)
    for key, value in call.arguments.items():
        spellings = [value] if isinstance(value, str) else [json.dumps(value), str(value)]
        for words in ([key], spellings):
            found = (
                min((place, -len(word)) for word in words if (place := text.find(word, end)) >= 0)
                if any(word in text[end:] for word in words)
                else None
            )
            if found is None:
                return None
            gaps.append(text[end : found[0]])
            end = found[0] - found[1]
    if isinstance(known, Tagged):
        form = known
    else:
        key = _common_end(gaps[0], gaps[2]).lstrip()
        value_end, name_end = gaps[2].removesuffix(key), gaps[0].removesuffix(key)
        others = tuple(dict.fromkeys(gap for gap in gaps[3::2] if gap != gaps[1]))
        form = Tagged(name_end, key, gaps[1], value_end, json_key_ends=others)
    if not form.key or not form.value_end.strip():
        return None
    for value_end in (form.value_end, form.value_end.rstrip()):
        if text.startswith(value_end, end):
            return _Span(form, start, end + len(value_end))
    return None


# Thinking.


def _thinking(probe: _Probe) -> tuple[str | None, ThinkingFormat | None]:
    """Returns the markers of thinking, and the name of their entry."""
    try:
        found = _shown_thinking(probe) or _hidden_thinking(probe)
    except _Refused:
        found = None
    return found or _mentioned_thinking(probe.source)


def _shown_thinking(probe: _Probe) -> tuple[str | None, ThinkingFormat] | None:
    """Reads the markers from a turn in which the template shows a thought."""
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]
    call = _tool_calls(_CALLS[:1], "short", as_text=False)
    for turn in (
        {"content": _ANSWER, **thought},
        {"content": parts},
        # Some templates show the thought before a call alone.
        {"content": _ANSWER, **thought, "tool_calls": call},
    ):
        try:
            text = probe.turn(**turn)
        except _Refused:
            continue
        before, _, after = text.partition(_THOUGHT)
        between, answer, ending = after.partition(_ANSWER)
        if answer:
            break
    else:
        return None
    fitting = [
        (sum(begin.strip() in between for begin, _ in form.answer), name)
        for name, form in THINKING_FORMATS.items()
        if before.rstrip().endswith(form.starts) and between.lstrip().startswith(form.ends)
    ]
    if fitting:
        # Several share Qwen's markers. The first of them says the least about the model.
        name = max(fitting, key=lambda found: found[0])[1]
        return name, THINKING_FORMATS[name]
    plain = probe.turn(content=_ANSWER).partition(_ANSWER)[0]
    prompt = probe.prompt()
    header = _common_start(_common_start(before, plain), prompt)
    start, begin = before[len(header) :], plain[len(header) :]
    if not start.strip() and (opened := [*_MARKER.finditer(before)]):
        # The template writes empty thoughts, too; or the prompt begins every thought.
        start, begin = before[opened[-1].start() :], ""
        if start.strip().replace("<", "</") != between.strip():
            start = prompt[len(before) :] if prompt.startswith(before) else ""
    closer = _MARKER.match(ending)
    if not start.strip() or not between.strip():
        return None
    pair = ((begin, closer[0]),) if begin.strip() and closer else ()
    return None, ThinkingFormat(start, between.removesuffix(begin) if pair else between, answer=pair)


def _hidden_thinking(probe: _Probe) -> tuple[str, ThinkingFormat] | None:
    """Finds an entry whose markers the prompt writes, or whose thoughts earlier turns omit."""
    switched: list[dict[str, bool]] = [{}]
    switched += [{name: value} for name in probe.switches for value in (True, False)]
    prompts = [probe.prompt(**switches).rstrip() for switches in switched]
    tried = set()
    for name, form in THINKING_FORMATS.items():
        start, end = form.start.strip(), form.end.strip()
        if (start, end) in tried:
            continue
        tried.add((start, end))
        if any(prompt.endswith((start, end)) for prompt in prompts):
            return name, form
        earlier = probe.earlier_turn(f"{form.start}{_THOUGHT}{form.end}{_ANSWER}")
        if _ANSWER in earlier and _THOUGHT not in earlier:
            return name, form
    return None


def _mentioned_thinking(source: str) -> tuple[str | None, ThinkingFormat | None]:
    """Finds an entry whose markers stand anywhere in the template: a model without thoughts writes none."""
    for name, form in sorted(THINKING_FORMATS.items(), key=lambda item: -len(item[1].answer)):
        begins = [begin.strip() for begin, _ in form.answer]
        texts = (form.starts, form.ends, *([begins] if begins else []))
        if form.unmarked == "never" and all(any(text in source for text in each) for each in texts):
            return name, form
    return None, None
