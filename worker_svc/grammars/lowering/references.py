"""Resolves references within a schema and finds cycles that nothing satisfies."""

from typing import Any
from urllib.parse import unquote


class References:
    """The references of one schema. Each is resolved once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resolved: dict[str, Any] = {}
        self._acyclic: set[str] = set()
        """References known to lead to no cycle."""

    def resolve(self, reference: str) -> Any:
        """Returns the schema that a JSON pointer in a URI fragment (RFC 6901) names.

        Raises:
            LookupError: the schema has no such part.
        """
        if reference not in self._resolved:
            self._resolved[reference] = _resolve(self._root, reference)
        return self._resolved[reference]

    def find_cycle(self, reference: str) -> str | None:
        """Returns a reference that leads back to itself with no object or array in between, or `None`.

        Searches depth-first from `reference` and follows each reference of the schema at most once in total.
        """
        if reference in self._acyclic:
            return None
        path = [(reference, iter(self._direct(reference)))]
        on_path = {reference}
        while path:
            here, successors = path[-1]
            target = next(successors, None)
            if target is None:
                path.pop()
                on_path.discard(here)
                self._acyclic.add(here)
            elif target in on_path:
                return target
            elif target not in self._acyclic:
                path.append((target, iter(self._direct(target))))
                on_path.add(target)
        return None

    def _direct(self, reference: str) -> list[str]:
        """Returns the references that `reference` stands for directly or through a composition."""
        try:
            pending = [self.resolve(reference)]
        except LookupError:
            return []  # reported when the reference itself is lowered
        found = []
        while pending:
            node = pending.pop()
            if not isinstance(node, dict):
                continue
            for name in ("anyOf", "oneOf", "allOf"):
                if isinstance(node.get(name), list):
                    pending += node[name]
            if isinstance(node.get("$ref"), str):
                found.append(node["$ref"])
        return found


def _resolve(root: Any, reference: str) -> Any:
    node = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            # At most nine digits: int() is slow for very long ones, and no list has 10**9 items.
            if not name.isascii() or not name.isdecimal() or len(name) > 9:
                raise LookupError(reference)
            node = node[int(name)]
        elif not isinstance(node, dict) or name not in node:
            raise LookupError(reference)
        else:
            node = node[name]
    return node
