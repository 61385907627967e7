"""The parser of all formats of tool calls: a state machine that reads an entry of the table.

A call that fails before its announcement is content, and other calls may follow. A call that fails later is
revoked, and everything after it is content: a client cannot be corrected.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from gateway.parsers.call_reader import CallContext, CallReader, Marker
from gateway.parsers.elements_call import ElementsCall
from gateway.parsers.events import CallCounter, Event, Text, call_id, short_call_id
from gateway.parsers.formats import (
    CallForm,
    Elements,
    Format,
    JsonObject,
    LooseObject,
    NamedJson,
    Python,
    Tagged,
)
from gateway.parsers.json_call import JsonCall
from gateway.parsers.loose_call import LooseCall
from gateway.parsers.named_call import NamedCall
from gateway.parsers.parser_base import ParserBase, split_at
from gateway.parsers.python_call import PythonCall
from gateway.parsers.tagged_call import TaggedCall
from gateway.parsers.values import Schema

_SEPARATORS: Final = ",;"


# Each takes a form of its own type.
_READERS: Final[Mapping[type[CallForm], Callable[[Any, CallContext], CallReader]]] = {
    JsonObject: JsonCall,
    NamedJson: NamedCall,
    Tagged: TaggedCall,
    Python: PythonCall,
    LooseObject: LooseCall,
    Elements: ElementsCall,
}


class _Markers(NamedTuple):
    """The markers of an entry."""

    triggers: tuple[str, ...]
    """Texts that begin calls in free text."""
    openings: frozenset[str]
    """Those of them that begin a section of calls."""
    begin: Marker
    end: Marker
    closings: tuple[Marker, ...]
    ends: tuple[Marker, ...]
    """All that may follow a call without arguments, or a parameter."""
    stop: Marker
    """The end of a call and of its section."""
    start: Marker
    """The beginning of another section and its call; empty where calls stand in no section."""


@lru_cache(maxsize=64)
def _markers(form: Format) -> _Markers:
    openings = [text.strip() for text in (form.opening, *form.also) if text]
    begin = Marker(form.begin)
    closings = tuple(Marker(text) for text in (form.closing, *form.also_closing) if text)
    triggers = dict.fromkeys((*openings, begin.text) if begin else openings)
    ends = tuple(filter(None, (Marker(form.end), *closings, *map(Marker, triggers))))
    stop = Marker(form.end + form.closing)
    start = Marker(form.opening + form.begin if form.closing else "")
    return _Markers(
        tuple(triggers), frozenset(openings), begin, Marker(form.end), closings, ends, stop, start
    )


class CallParser(ParserBase):
    """Implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, form: Format, tools: Mapping[str, Schema]) -> None:
        """Reads calls.

        Args:
            form: how they are written.
            tools: the schema of the arguments of each of the request's tools, by name.
        """
        super().__init__(self._begin if form.bare else self._text)
        self._form = form
        self._markers = _markers(form)
        self._tools = tools
        self._counter = CallCounter(short_call_id if form.ids == "short" else call_id)
        self._reader: CallReader | None = None
        # A call needs no known name after a marker.
        self._is_marked = False
        self._in_section = False
        self._in_list = False
        self._is_separated = False

    # Text set aside is content unless a call follows.

    def _begin(self, _: list[Event]) -> bool:
        """At the beginning of the answer, where a call needs no marker."""
        if not self._skip() or any(marker.startswith(self._rest) for marker in self._markers.triggers):
            return False
        self._state = self._item
        if self._rest.startswith(self._markers.triggers):
            self._back()
            self._state = self._text
        elif self._rest[0] == "[":
            self._pass(1)
            self._in_list = True
        elif self._rest[0] != "{" if isinstance(self._form.call, JsonObject) else self._form.listed:
            return self._give_up()
        return True

    def _text(self, out: list[Event]) -> bool:
        if not self._markers.triggers:
            return self._content(out)
        before, marker, self._rest = split_at(self._rest, self._markers.triggers)
        if before:
            out.append(Text(before))
        if marker:
            self._aside.append(marker)
            self._is_marked = True
            self._in_section = marker in self._markers.openings
            self._state = self._section if self._in_section else self._call
        return bool(marker)

    def _section(self, _: list[Event]) -> bool:
        """After an opening: a list may begin."""
        if not self._skip():
            return False
        if self._rest[0] == "[" and (self._form.listed or self._form.bare):
            self._pass(1)
            self._in_list = True
        self._state = self._item
        return True

    def _item(self, _: list[Event]) -> bool:
        """Before a call's own marker, if the format has one."""
        if not self._skip():
            return False
        if (begin := self._markers.begin) and not self._in_list:
            end = begin.match(self._rest)
            if end is None:
                return False
            if end < 0:
                return self._give_up()
            self._pass(end)
        self._state = self._call
        return True

    def _call(self, _: list[Event]) -> bool:
        """Before a call's name or object."""
        if not self._skip():
            return False
        call = self._form.call
        if isinstance(call, JsonObject | NamedJson):
            if self._rest[0] == "[" and not self._in_list and self._form.also_call:
                self._pass(1)
                self._in_list = True
                return True
            if self._rest[0] == "{":
                call = call if isinstance(call, JsonObject) else JsonObject()
            else:
                call = self._form.also_call or call
                if isinstance(call, JsonObject):
                    return self._give_up()
        marks = self._markers
        context = CallContext(
            self._counter, self._tools, self._is_marked, self._passed(), marks.ends, marks.stop, marks.start
        )
        self._reader = _READERS[type(call)](call, context)
        self._state = self._in_call
        return True

    def _in_call(self, out: list[Event]) -> bool:
        reader = self._reader
        assert reader is not None
        self._rest = reader.feed(self._rest, out)
        if not reader.failed and not reader.done:
            return False
        self._reader = None
        self._is_separated = False
        if reader.failed:
            reader.give_up(out)
            self._in_section = self._in_list = False
            self._state = self._content if reader.announced else self._text
        else:
            self._state = self._after
        return True

    def _after(self, _: list[Event]) -> bool:
        """After a call: its end marker may follow."""
        if not self._skip():
            return False
        end = self._markers.end.match(self._rest) if self._markers.end and not self._in_list else -1
        if end is None:
            return False
        if end >= 0:
            self._passed()
            self._rest = self._rest[end:]
        self._state = self._between
        return True

    def _between(self, _: list[Event]) -> bool:
        """After a call and its end: another may follow, or the end of the list or section."""
        if not self._skip():
            return False
        separates = self._in_list or self._form.bare or bool(self._form.separator.strip())
        if separates and not self._is_separated and self._rest[0] in _SEPARATORS:
            self._pass(1)
            self._is_separated = True
            return True
        if self._in_list and self._rest[0] == "]":
            self._passed()
            self._rest, self._in_list = self._rest[1:], False
            return True
        if (ended := self._match(self._markers.closings)) is None:
            return False
        if ended >= 0:
            self._passed()
            self._rest, self._in_section, self._state = self._rest[ended:], False, self._text
            return True
        return self._next_call()

    def _next_call(self) -> bool:
        """Finds the beginning of another call, or returns to the text."""
        begin = self._markers.begin
        if self._in_section and begin and not self._in_list:
            if (found := begin.match(self._rest)) is None:
                return False
            if found >= 0:
                self._state = self._item
                return True
        follows = self._in_list and self._is_separated
        if not begin and not self._in_list and (self._form.bare or self._in_section):
            # Calls without markers of their own follow one another.
            is_object = isinstance(self._form.call, JsonObject)
            follows = self._rest[0] == "{" if is_object else self._form.separator.isspace()
        if follows:
            self._state = self._item
            return True
        return self._give_up()

    def _match(self, markers: tuple[Marker, ...]) -> int | None:
        """Returns the position after the first of ``markers``; -1 without one, ``None`` if undecided."""
        ends = [marker.match(self._rest) for marker in markers]
        return next((end for end in ends if end is not None and end >= 0), None if None in ends else -1)

    def _give_up(self) -> bool:
        """Returns to the text: what was set aside is content, and its marker begins no call."""
        self._in_section = self._in_list = self._is_separated = False
        self._state = self._resume
        return True

    def _resume(self, out: list[Event]) -> bool:
        out.append(Text(self._passed()))
        self._state = self._text
        return True

    def _content(self, out: list[Event]) -> bool:
        """The last state: all further text is content."""
        out.append(Text(self._passed() + self._rest))
        self._rest = ""
        return False

    def _end(self, out: list[Event]) -> None:
        if self._reader is not None:
            self._reader.finish(out)
        elif self._state not in (self._after, self._between) or not self._is_tail():
            super()._end(out)

    def _is_tail(self) -> bool:
        """Whether the text after the last call is only white space, or the beginning of a closing marker."""
        return not self._rest or any(marker.text.startswith(self._rest) for marker in self._markers.ends)
