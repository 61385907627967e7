"""Calls that are JSON objects: one call, and the parsers of sequences of them."""

import json
from collections.abc import Callable, Collection
from typing import Final

from gateway.parsers.events import CallArguments, CallCounter, CallRevoked, CallStart, Event, Text
from gateway.parsers.json_scan import ValueScanner, is_object, skip_blanks
from gateway.parsers.parser_base import ParserBase, State

# Longest member key or function name; anything longer is not a call and need not be held back.
_MAX_NAME: Final = 512


class JsonCall:
    """Reads a call as it arrives. Its arguments are emitted exactly as written.

    Members may come in any order; arguments before the name are held back until the name is known. Some
    models write the arguments as a string with the object inside, whose contents are then emitted at once.
    """

    done: bool
    """The object is complete, and it is a call."""
    failed: bool
    """The object is not a call; see :meth:`give_up`."""

    def __init__(
        self,
        counter: CallCounter,
        *,
        arguments: Collection[str],
        others: Collection[str] | None = None,
        accept: Callable[[str], bool] = bool,
        before: str = "",
    ) -> None:
        """Waits for the object.

        Args:
            counter: numbers the call.
            arguments: accepted names of the member with the arguments.
            others: names of further members to skip; ``None``: any.
            accept: whether a function name belongs to a tool.
            before: text of the call before the object; returned as content without a call.
        """
        self.done = False
        self.failed = False
        self._counter = counter
        self._arguments = arguments
        self._others = others
        self._accept = accept
        self._source = [before]
        self._step: Callable[[str, int, list[Event]], int] = self._open
        self._scanner = ValueScanner()
        self._key = ""
        # Text of the current key or name.
        self._text = ""
        self._start: CallStart | None = None
        self._name = ""
        self._held: list[str] = []
        # Pieces of arguments that are written as a string.
        self._quoted: list[str] = []
        self._has_arguments = False

    @property
    def announced(self) -> bool:
        """Whether the name and the beginning of the arguments have been emitted."""
        return self._start is not None

    def feed(self, text: str, out: list[Event]) -> str:
        """Reads on; returns the rest of ``text`` if the object has ended or failed, else an empty string."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            at = self._step(text, at, out)
        self._source.append(text[:at])
        return text[at:]

    def give_up(self, out: list[Event]) -> None:
        """Emits the text of a failed call as content, or revokes the call if it was announced."""
        source = "".join(self._source)
        out.append(CallRevoked(self._start.number, source) if self._start else Text(source))

    def finish(self, out: list[Event]) -> None:
        """Handles the end of the text: an announced call stays, anything less becomes content."""
        if self._start is None:
            self.give_up(out)

    def _open(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self.failed = text[at] != "{"
            self._step = self._next_key
            at += not self.failed
        return at

    def _next_key(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self.failed = text[at] != '"'
            self._scanner, self._text, self._step = ValueScanner(), "", self._in_key
        return at

    def _in_key(self, text: str, at: int, _: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        self._text += text[at:end]
        self.failed = self._scanner.failed or len(self._text) > _MAX_NAME
        if self._scanner.done and not self.failed:
            self._key = json.loads(self._text)
            self.failed = not self._expected(self._key)
            self._step = self._colon
        return end

    def _expected(self, key: str) -> bool:
        if key == "name":
            return not self._name
        if key in self._arguments:
            return not self._has_arguments
        return self._others is None or key in self._others

    def _colon(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self.failed = text[at] != ":"
            self._step = self._before_value
            at += not self.failed
        return at

    def _before_value(self, text: str, at: int, out: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        self._scanner, self._text = ValueScanner(), ""
        if self._key == "name":
            self.failed, self._step = text[at] != '"', self._in_name
        elif self._key in self._arguments:
            if text[at] == '"':
                self._quoted, self._step = [], self._in_quoted
                return at
            self.failed, self._step = text[at] != "{", self._in_arguments
            if not self.failed:
                self._has_arguments = True
                self._begin(out)
        else:
            self._step = self._in_other
        return at

    def _in_name(self, text: str, at: int, out: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        self._text += text[at:end]
        self.failed = self._scanner.failed or len(self._text) > _MAX_NAME
        if self._scanner.done and not self.failed:
            self._name = json.loads(self._text)
            # Unprintable includes halves of surrogate pairs, which UTF-8 cannot encode.
            self.failed = not (self._name and self._name.isprintable() and self._accept(self._name))
            if not self.failed and self._has_arguments:
                self._begin(out)
            self._step = self._after
        return end

    def _begin(self, out: list[Event]) -> None:
        """Announces the call once its name and the beginning of its arguments are known."""
        if self._name:
            self._start = self._counter.start(self._name)
            out.append(self._start)
            out.append(CallArguments(self._start.number, "".join(self._held)))

    def _in_arguments(self, text: str, at: int, out: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        if self._start is None:
            self._held.append(text[at:end])
        elif end > at:
            out.append(CallArguments(self._start.number, text[at:end]))
        self._end_value()
        return end

    def _in_quoted(self, text: str, at: int, out: list[Event]) -> int:
        """Reads arguments written as a string that contains JSON.

        They are emitted whole: only the end shows whether they are an object.
        """
        end = self._scanner.feed(text, at)
        self._quoted.append(text[at:end])
        self._end_value()
        if self._scanner.done and not self.failed:
            arguments = json.loads("".join(self._quoted))
            self.failed = not is_object(arguments)
            if not self.failed:
                self._has_arguments = True
                self._held = [arguments]
                self._begin(out)
        return end

    def _in_other(self, text: str, at: int, _: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        self._end_value()
        return end

    def _end_value(self) -> None:
        self.failed = self._scanner.failed
        if self._scanner.done:
            self._step = self._after

    def _after(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._step = self._next_key
        elif text[at] == "}" and self._start is not None:
            self.done = True
        else:
            self.failed = True
            return at
        return at + 1


ARGUMENTS: Final = ("arguments", "parameters")


class JsonCallParser(ParserBase):
    """Reads calls; subclasses find where they begin.

    A call that fails before its announcement is content, and other calls may follow. A call that fails later
    is revoked, and everything after it is content: a client cannot be corrected.
    """

    def __init__(
        self, new_id: Callable[[], str], state: State, *, text: State, after: State, end: str = ""
    ) -> None:
        """Waits for a call.

        Args:
            new_id: makes ids of calls.
            state: the first state.
            text: the state after text that turned out not to be a call.
            after: the state after a call. Text set aside at the end was only a separator.
            end: the marker that may close a call; a part of it at the end of the text is not content.
        """
        super().__init__(state)
        self._counter = CallCounter(new_id)
        self._call: JsonCall | None = None
        self._states = (text, after)
        self._end_marker = end

    def _open(
        self,
        before: str,
        *,
        arguments: Collection[str] = ARGUMENTS,
        others: Collection[str] | None = None,
        accept: Callable[[str], bool] = bool,
    ) -> None:
        """Begins a call after ``before``; see :class:`JsonCall` for the arguments."""
        self._call = JsonCall(self._counter, arguments=arguments, others=others, accept=accept, before=before)
        self._state = self._in_call

    def _in_call(self, out: list[Event]) -> bool:
        call = self._call
        assert call is not None
        self._rest = call.feed(self._rest, out)
        if not call.failed and not call.done:
            return False
        text, after = self._states
        if call.failed:
            call.give_up(out)
            after = self._content if call.announced else text
        self._call, self._state = None, after
        return True

    def _content(self, out: list[Event]) -> bool:
        """The last state: all further text is content."""
        out.append(Text(self._rest))
        self._rest = ""
        return False

    def _end(self, out: list[Event]) -> None:
        if self._call is not None:
            self._call.finish(out)
        elif self._state != self._states[1] or not self._end_marker.startswith(self._rest):
            super()._end(out)


class JsonListParser(JsonCallParser):
    """Reads lists of calls; subclasses find where a list begins."""

    def __init__(self, new_id: Callable[[], str], state: State, *, text: State) -> None:
        """Waits for a list; ``text`` is the state after it."""
        super().__init__(new_id, state, text=text, after=self._behind_item)
        self._behind_list = text

    def _behind_item(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        match self._rest[0]:
            case ",":
                self._pass(1)
                self._open(self._passed())
            case "]":
                self._passed()
                self._rest, self._state = self._rest[1:], self._behind_list
            case _:
                self._back()
                self._state = self._behind_list
        return True


class PlainListParser(JsonListParser):
    """Reads a list that is the whole answer; implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self._begin, text=self._content)

    def _begin(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        if self._rest[0] == "[":
            self._pass(1)
            self._open(self._passed())
        else:
            self._back()
            self._state = self._content
        return True
