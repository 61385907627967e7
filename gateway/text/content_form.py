"""Whether a chat template expects a turn's content as text or as a list of parts.

Templates of models with images often show lists only and nothing of a text.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.quoting import clip
from protos.errors import InvalidArgument

Render = Callable[[Sequence[Mapping[str, Any]]], str]

_MARK: Final = "content probe"

# A part as Python or JSON writes it, with quotes that a text around it may escape.
_DUMPED: Final = re.compile(rf"""["']text\\*["']\s*:\s*\\*["']{_MARK}""")

# Roles of OpenAI's API. Templates may know others, such as Llama's "ipython"; clients may make them up.
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


def joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns content as text: its parts with line breaks between them, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# Findings that are kept, the latest ones: clients may make up any number of roles.
_MAX_KEPT: Final = 64


class ContentForm:
    """The parts of each role's content that a template shows; found out at first need."""

    def __init__(self, render: Render) -> None:
        """Calls ``render`` with short conversations, later."""
        self._render = render
        self._shows = functools.lru_cache(_MAX_KEPT)(self._probe)

    def fit(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns ``turn`` with its content in a form that the template shows.

        Raises:
            InvalidArgument: if the template would drop the turn because it does not know the role.
        """
        role, content = turn["role"], turn["content"]
        if isinstance(content, str):
            if not content or self._shows(role, parts=False):
                return turn
            if self._shows(role, parts=True):
                return {**turn, "content": [{"type": "text", "text": content}]}
            if role not in _ROLES:
                raise InvalidArgument(
                    f"the model's chat template does not show messages with the role '{clip(role)}'; send another role",
                    param="messages",
                )
            return turn
        # As in vLLM, a tool's result is always text.
        if role != "tool" and self._shows(role, parts=True):
            return turn
        return self.fit({**turn, "content": joined(content)})

    def _probe(self, role: str, *, parts: bool) -> bool:
        content = [{"type": "text", "text": _MARK}] if parts else _MARK
        turn = {"role": role, "content": content}
        # Most templates want a user's turn after a system's, and before an assistant's.
        user = {"role": "user", "content": [{"type": "text", "text": "u"}] if parts else "u"}
        before = [] if role in ("user", "system", "developer") else [user]
        after = [user] if role in ("system", "developer") else []
        try:
            text = self._render([*before, turn, *after])
        except (InvalidArgument, AttributeError):
            return False
        # A template for texts may write a list as Python or JSON does.
        return _MARK in text and not (parts and _DUMPED.search(text))
