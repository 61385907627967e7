"""Decides whether the schemas of a `oneOf` are disjoint, so that `anyOf` means the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from worker_svc.grammars.lowering.references import References

# Longest chain of references to references that is followed.
_MAX_HOPS: Final = 8
_MAX_BRANCHES: Final = 64


@dataclass(frozen=True)
class _Facts:
    """Properties of a schema that can tell it from another."""

    values: frozenset[str] | None
    """The values that it allows, as JSON, if it lists all of them."""
    kinds: frozenset[str]
    """Types that it allows, with integers as numbers; empty if unknown."""
    tags: Mapping[str, frozenset[str]]
    """Allowed values of its required properties, for properties that list them."""


class DisjointnessChecker:
    """Compares schemas of one document. The facts about each schema are gathered once."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._facts: dict[int, _Facts | None] = {}
        """Facts by `id()` of a schema. The document keeps every schema alive, so ids stay unique."""
        self._lists: dict[int, frozenset[str] | None] = {}
        """Listed values by `id()` of a schema."""
        self._known: dict[tuple[int, ...], bool] = {}
        """Answers by the ids of the schemas."""

    def are_disjoint(self, branches: Sequence[Any], budget: int) -> tuple[bool, int]:
        """Whether no value can match two of the schemas; false if this cannot be shown.

        Args:
            branches: the schemas.
            budget: number of values that may be compared.

        Returns:
            The answer and the number of values compared. The answer is invalid if the number exceeds
            `budget`.
        """
        if len(branches) > _MAX_BRANCHES:
            return False, 0
        followed = [self._follow(branch) for branch in branches]
        key = tuple(id(branch) for branch in followed)
        if key not in self._known:
            facts = [self._facts_of(branch) for branch in followed]
            answer, spent = _disjoint(facts, budget)
            if spent > budget:
                return False, spent
            self._known[key] = answer
            return answer, spent
        return self._known[key], len(branches)

    def _follow(self, node: Any) -> Any:
        """Returns the schema behind a chain of references; `None` if it leads nowhere."""
        for _ in range(_MAX_HOPS):
            if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
                return node
            try:
                node = self._references.resolve(node["$ref"])
            except LookupError:
                return None
        return None

    def _facts_of(self, node: Any) -> _Facts | None:
        """Returns the facts about a schema; `None` if `node` is not a schema object."""
        if id(node) not in self._facts:
            self._facts[id(node)] = self._gather(node) if isinstance(node, dict) else None
        return self._facts[id(node)]

    def _gather(self, node: dict[str, Any]) -> _Facts:
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


def _disjoint(facts: Sequence[_Facts | None], budget: int) -> tuple[bool, int]:
    spent = 0
    for one, other in combinations(facts, 2):
        if one is None or other is None:
            return False, spent
        spent += 1
        if one.values is not None and other.values is not None:
            spent += min(len(one.values), len(other.values))
            apart = spent <= budget and one.values.isdisjoint(other.values)
        elif one.kinds and other.kinds and not one.kinds & other.kinds:
            apart = True
        elif one.kinds == other.kinds == {"object"}:
            shared = one.tags.keys() & other.tags.keys()
            spent += sum(min(len(one.tags[name]), len(other.tags[name])) for name in shared)
            apart = spent <= budget and any(one.tags[name].isdisjoint(other.tags[name]) for name in shared)
        else:
            apart = False
        if not apart:
            return False, spent
    return True, spent


def _values(node: dict[str, Any]) -> frozenset[str] | None:
    """Returns the values that a schema lists, as JSON, or `None`."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list):
        return None
    return frozenset(json.dumps(_normalized(value), sort_keys=True) for value in values)


def _normalized(value: Any) -> Any:
    """Returns `value` with integral floats as integers, at any depth.

    JSON Schema treats 1 and 1.0 as equal.
    """
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_normalized(each) for each in value]
    if isinstance(value, dict):
        return {name: _normalized(each) for name, each in value.items()}
    return value


def _kinds(node: dict[str, Any], values: frozenset[str] | None) -> frozenset[str]:
    if values is not None:
        names = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
        return frozenset(names.get(text[0], "number") for text in values)
    types = node.get("type")
    listed = types if isinstance(types, list) else [types] if isinstance(types, str) else []
    return frozenset("number" if name == "integer" else str(name) for name in listed)
