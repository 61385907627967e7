"""Custom tools: functions with a single argument, the text ``input``, sent and received as plain text."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Final

from protos.service.logs import get_logger

_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PART_OF_HEAD: Final = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_CHARACTERS: Final = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
# The first half of a surrogate pair at the end of a text, as an escape.
_HALF_PAIR: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class InputReader:
    """Reads the input out of a call's arguments as they arrive.

    Arguments of another form, which a model may write without a grammar, are the input as they stand.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._step: Callable[[], str] = self._head

    def feed(self, arguments: str) -> str:
        """Returns the piece of the input settled by further arguments."""
        self._rest += arguments
        return self._step()

    def _head(self) -> str:
        if (head := _HEAD.match(self._rest)) is not None:
            self._rest, self._step = self._rest[head.end() :], self._text
        elif _PART_OF_HEAD.fullmatch(self._rest) is not None:
            return ""
        else:
            self._step = self._anything
        return self._step()

    def _text(self) -> str:
        match = _CHARACTERS.match(self._rest)
        assert match is not None
        text, end = match.group(), match.end()
        if end < len(self._rest) and self._rest[end] == '"':
            self._step = self._end
        elif half := _HALF_PAIR.search(text):
            text, end = text[: half.start()], half.start()
        self._rest = self._rest[end:]
        found: str = json.loads(f'"{text}"', strict=False)
        # A half of a surrogate pair alone cannot be sent.
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _anything(self) -> str:
        text, self._rest = self._rest, ""
        return text

    def _end(self) -> str:
        return ""


SKIPPED_TOOLS: Final = "x-skipped-tools"

# Types that are named. Proxies refuse answers with long headers.
_MAX_NAMED: Final = 16


def skipped_tools_header(types: Iterable[str]) -> dict[str, str]:
    """Returns the header that names the types of skipped tools, each once; logs them, too."""
    if not (skipped := list(dict.fromkeys(types))):
        return {}
    if (more := len(skipped) - _MAX_NAMED) > 0:
        skipped[_MAX_NAMED:] = [f"and {more} more"]
    get_logger().info("the request has tools that are not served", skipped=skipped)
    return {SKIPPED_TOOLS: ", ".join(skipped)}
