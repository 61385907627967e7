"""Finds stop strings in streamed text, even across token boundaries."""

from collections.abc import Sequence


class StopStrings:
    """Watches a sequence's text for the first of several strings.

    The match that ends first wins; of two that end together, the longer. So the cuts of the text do not
    matter. Only text that may become a stop string is held back.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    matched: str | None
    """The stop string that was found. Feed no more text afterwards."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        """Watches for ``stops``.

        Args:
            stops: at least one string, none of them empty.
            include_in_output: whether the matched string itself is emitted.
        """
        # Longest first: of matches that end together, the loop then keeps the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0])
        self._include = include_in_output
        self._held = ""
        self.matched = None

    def feed(self, text: str) -> str:
        """Takes the next piece and returns the text that is ready to emit. Check ``matched`` afterwards."""
        if not text:
            return ""
        buffer = self._held + text
        end = len(buffer) + 1
        for stop in self._stops:
            at = buffer.find(stop)
            if at >= 0 and at + len(stop) < end:
                end = at + len(stop)
                self.matched = stop
        if self.matched is not None:
            self._held = ""
            return buffer[: end if self._include else end - len(self.matched)]
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, buffer: str) -> int:
        """Returns the length of the longest tail of ``buffer`` that begins a stop string."""
        for length in range(min(len(buffer), self._longest - 1), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
