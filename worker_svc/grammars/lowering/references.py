"""References within a schema: what they mean, and which of them mean nothing."""

from typing import Any
from urllib.parse import unquote


class References:
    """Resolves each reference into a schema once."""

    def __init__(self, root: Any) -> None:
        """Nothing is resolved yet."""
        self._root = root
        self._resolved: dict[str, Any] = {}
        self._checked: set[str] = set()
        """References that do not lead to a circle."""

    def resolve(self, reference: str) -> Any:
        """What a reference means (RFC 6901 in a fragment).

        Raises:
            LookupError: if it leads nowhere.
        """
        if reference not in self._resolved:
            self._resolved[reference] = _resolve(self._root, reference)
        return self._resolved[reference]

    def circle(self, reference: str) -> str | None:
        """A reference that is itself before an object or array comes in between, met on the way from ``reference``.

        A depth-first search, in which every reference is followed once in a schema's life.
        """
        if reference in self._checked:
            return None
        path = [(reference, iter(self._next(reference)))]
        open_ = {reference}
        while path:
            here, onward = path[-1]
            to = next(onward, None)
            if to is None:
                path.pop()
                open_.discard(here)
                self._checked.add(here)
            elif to in open_:
                return to
            elif to not in self._checked:
                path.append((to, iter(self._next(to))))
                open_.add(to)
        return None

    def _next(self, reference: str) -> list[str]:
        """The references that a schema is, or may be, without anything in between."""
        try:
            left = [self.resolve(reference)]
        except LookupError:
            return []  # told when that reference's turn comes
        found = []
        while left:
            node = left.pop()
            if not isinstance(node, dict):
                continue
            for name in ("anyOf", "oneOf", "allOf"):
                if isinstance(node.get(name), list):
                    left += node[name]
            if isinstance(node.get("$ref"), str):
                found.append(node["$ref"])
        return found


def _resolve(root: Any, reference: str) -> Any:
    node = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            # No list in a schema has a thousand million items.
            if not name.isascii() or not name.isdecimal() or len(name) > 9:
                raise LookupError(reference)
            node = node[int(name)]
        elif not isinstance(node, dict) or name not in node:
            raise LookupError(reference)
        else:
            node = node[name]
    return node
