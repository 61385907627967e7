"""Whether the schemas of a ``oneOf`` exclude one another, so that any of them may be matched."""

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

# References that lead to references are followed this far.
_FAR = 8


def resolve(root: Any, reference: str) -> Any:
    """What a reference into ``root`` means (RFC 6901 in a fragment).

    Raises:
        LookupError: if it leads nowhere.
    """
    node = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            if not name.isdecimal():
                raise LookupError(reference)
            node = node[int(name)]
        elif not isinstance(node, dict) or name not in node:
            raise LookupError(reference)
        else:
            node = node[name]
    return node


def are_disjoint(root: Any, branches: Sequence[Any]) -> bool:
    """Whether no value can match two of the schemas; False also where that is not plain to see."""
    if len(branches) > 64:
        return False
    followed = [_follow(root, branch) for branch in branches]
    return all(_exclude(root, one, other) for one, other in combinations(followed, 2))


def _follow(root: Any, node: Any) -> Any:
    for _ in range(_FAR):
        if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
            return node
        try:
            node = resolve(root, node["$ref"])
        except LookupError:
            return None
    return None


def _exclude(root: Any, one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    kinds, other_kinds = _kinds(one), _kinds(other)
    if kinds and other_kinds and not kinds & other_kinds:
        return True
    return kinds == other_kinds == {"object"} and _tagged_apart(root, one, other)


def _tagged_apart(root: Any, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a property that both require has different values in each."""
    for name in _names(one) & _names(other):
        values = [_values(_follow(root, each["properties"].get(name))) for each in (one, other)]
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
    return False


def _names(node: dict[str, Any]) -> set[str]:
    required = node.get("required")
    if not isinstance(required, list) or not isinstance(node.get("properties"), dict):
        return set()
    return {name for name in required if isinstance(name, str)}


def _values(node: Any) -> set[str] | None:
    """All values that a schema allows, if it lists them."""
    if not isinstance(node, dict):
        return None
    values = [node["const"]] if "const" in node else node.get("enum")
    # 1 and 1.0 are one value.
    return {_canonical(value) for value in values} if isinstance(values, list) else None


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _kinds(node: dict[str, Any]) -> set[str]:
    """The types that a schema allows, integers as numbers; empty if it does not say."""
    values = _values(node)
    if values is not None:
        first = {text[0] for text in values}
        names = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
        return {names.get(char, "number") for char in first}
    types = node.get("type")
    listed = types if isinstance(types, list) else [types] if isinstance(types, str) else []
    return {"number" if name == "integer" else str(name) for name in listed}
