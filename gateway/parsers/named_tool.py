"""The one call of a named tool, where the model writes nothing but its arguments."""

from collections.abc import Callable

from gateway.parsers.events import CallArguments, CallStart, Counter, Event


class NamedToolParser:
    """See :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        self._counter = Counter(new_id)
        self._name = name
        self._start: CallStart | None = None

    def feed(self, text: str) -> list[Event]:
        """All text is arguments."""
        if self._start is not None:
            return [CallArguments(self._start.number, text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._start = self._counter.start(self._name)
        return [self._start, CallArguments(self._start.number, text)]

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []

    def whole(self, text: str) -> list[Event]:
        """See :class:`gateway.parsers.events.ToolParser`."""
        return self.feed(text)
