"""A call of a named tool; the model writes only the arguments."""

from collections.abc import Callable

from gateway.parsers.events import CallArguments, CallCounter, CallStart, Event


class NamedToolParser:
    """Implements :class:`gateway.parsers.events.ToolParser`: all text is arguments."""

    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        self._counter = CallCounter(new_id)
        self._name = name
        self._start: CallStart | None = None

    def feed(self, text: str) -> list[Event]:
        """Returns ``text`` as arguments."""
        if self._start is not None:
            return [CallArguments(self._start.number, text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._start = self._counter.start(self._name)
        return [self._start, CallArguments(self._start.number, text)]

    def finish(self) -> list[Event]:
        """Returns nothing: no text is held back."""
        return []

    def whole(self, text: str) -> list[Event]:
        """See :meth:`gateway.parsers.events.ToolParser.whole`."""
        return self.feed(text)
