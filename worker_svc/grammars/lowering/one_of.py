"""Whether the schemas of a ``oneOf`` exclude one another, so that any of them may be matched."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from worker_svc.grammars.lowering.references import References

# References that lead to references are followed this far.
_FAR: Final = 8
_MOST: Final = 64


@dataclass(frozen=True)
class _Facts:
    """What is plain to see of a schema."""

    values: frozenset[str] | None
    """All that it allows, if it lists them."""
    kinds: frozenset[str]
    """Types that it allows, integers as numbers; empty if it does not say."""
    tags: Mapping[str, frozenset[str]]
    """Of properties that it requires, those whose values it lists."""


class Exclusion:
    """Compares schemas of one document; of each, the facts are gathered once."""

    def __init__(self, references: References) -> None:
        """Nothing is known yet."""
        self._references = references
        self._facts: dict[int, _Facts | None] = {}
        """By identity: the document keeps every schema alive, and a definition is one wherever it is referred to."""
        self._lists: dict[int, frozenset[str] | None] = {}
        """The values that schemas list, likewise."""
        self._known: dict[tuple[int, ...], bool] = {}

    def are_disjoint(self, branches: Sequence[Any], most: int) -> tuple[bool, int]:
        """Whether no value can match two of the schemas; False also where that is not plain to see.

        Args:
            branches: the schemas.
            most: values to compare at most.

        Returns:
            The answer, and how many values were compared for it; above ``most``, it is no answer.
        """
        if len(branches) > _MOST:
            return False, 0
        followed = [self._follow(branch) for branch in branches]
        key = tuple(id(branch) for branch in followed)
        if key not in self._known:
            facts = [self._of(branch) for branch in followed]
            answer, spent = _disjoint(facts, most)
            if spent > most:
                return False, spent
            self._known[key] = answer
            return answer, spent
        return self._known[key], len(branches)

    def _follow(self, node: Any) -> Any:
        for _ in range(_FAR):
            if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
                return node
            try:
                node = self._references.resolve(node["$ref"])
            except LookupError:
                return None
        return None

    def _of(self, node: Any) -> _Facts | None:
        """What is known of a schema; ``None`` if it is none."""
        if id(node) not in self._facts:
            self._facts[id(node)] = self._gathered(node) if isinstance(node, dict) else None
        return self._facts[id(node)]

    def _gathered(self, node: dict[str, Any]) -> _Facts:
        values = self._listed(node)
        tags = {}
        required, properties = node.get("required"), node.get("properties")
        if isinstance(required, list) and isinstance(properties, dict):
            for name in {name for name in required if isinstance(name, str)}:
                if (listed := self._listed(properties.get(name))) is not None:
                    tags[name] = listed
        return _Facts(values, _kinds(node, values), tags)

    def _listed(self, node: Any) -> frozenset[str] | None:
        followed = self._follow(node)
        if not isinstance(followed, dict):
            return None
        if id(followed) not in self._lists:
            self._lists[id(followed)] = _values(followed)
        return self._lists[id(followed)]


def _disjoint(facts: Sequence[_Facts | None], most: int) -> tuple[bool, int]:
    spent = 0
    for one, other in combinations(facts, 2):
        if one is None or other is None:
            return False, spent
        spent += 1
        if one.values is not None and other.values is not None:
            spent += min(len(one.values), len(other.values))
            apart = spent <= most and one.values.isdisjoint(other.values)
        elif one.kinds and other.kinds and not one.kinds & other.kinds:
            apart = True
        elif one.kinds == other.kinds == {"object"}:
            shared = one.tags.keys() & other.tags.keys()
            spent += sum(min(len(one.tags[name]), len(other.tags[name])) for name in shared)
            apart = spent <= most and any(one.tags[name].isdisjoint(other.tags[name]) for name in shared)
        else:
            apart = False
        if not apart:
            return False, spent
    return True, spent


def _values(node: dict[str, Any]) -> frozenset[str] | None:
    """All values that a schema allows, if it lists them."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list):
        return None
    return frozenset(json.dumps(_unified(value), sort_keys=True) for value in values)


def _unified(value: Any) -> Any:
    """1 and 1.0 are one value, wherever they stand."""
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_unified(each) for each in value]
    if isinstance(value, dict):
        return {name: _unified(each) for name, each in value.items()}
    return value


def _kinds(node: dict[str, Any], values: frozenset[str] | None) -> frozenset[str]:
    if values is not None:
        names = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
        return frozenset(names.get(text[0], "number") for text in values)
    types = node.get("type")
    listed = types if isinstance(types, list) else [types] if isinstance(types, str) else []
    return frozenset("number" if name == "integer" else str(name) for name in listed)
