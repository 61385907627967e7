"""Which layers of a model an adapter's configuration names, by PEFT's rules."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

# PEFT reads these as expressions. Matching some expressions takes for ever, so only names are compared.
_NAME = re.compile(r"\w+")
# PEFT's expression for the number of a layer in its path, if `layers_pattern` does not say where it is.
_NUMBERED = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class Targets:
    """The trained layers of an adapter. PEFT ignores names without a layer."""

    names: Collection[str]
    """`target_modules`: whole paths of layers, or their ends."""
    excluded: Collection[str] = ()
    """`exclude_modules`, in the same form."""
    numbers: Collection[int] = ()
    """`layers_to_transform`; empty for all."""
    lists: Collection[str] = ()
    """`layers_pattern`: the lists of layers with these numbers; empty for any."""

    def include(self, path: str) -> bool:
        """Whether they include the layer with this path."""
        if _matches(path, self.excluded):
            return False
        # PEFT applies the numbers only to names that are ends of paths.
        return path in self.names or (_matches(path, self.names) and self._has_number(path))

    def with_names(self, others: Callable[[str], Iterable[str]]) -> "Targets":
        """Returns targets that include and exclude layers by further names, too.

        Args:
            others: returns further names for the layers of a name.
        """
        return replace(
            self,
            names={*self.names, *(other for name in self.names for other in others(name))},
            excluded={*self.excluded, *(other for name in self.excluded for other in others(name))},
        )

    def _has_number(self, path: str) -> bool:
        if not self.numbers:
            return True
        if not self.lists:
            match = _NUMBERED.match(path)
            return match is not None and int(match["number"]) in self.numbers
        for name in self.lists:
            if match := re.match(rf"(?:^|.*?\.){name}\.(?P<number>\d+)\.", path):
                return int(match["number"]) in self.numbers
        return False


def _matches(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def read_targets(config: Mapping[str, Any]) -> Targets | None:
    """Returns the layers named by an adapter's configuration; `None` for an expression."""
    names: Any = config.get("target_modules")
    excluded = config.get("exclude_modules") or []
    numbers, lists = config.get("layers_to_transform"), config.get("layers_pattern") or []
    numbers = [numbers] if isinstance(numbers, int) else numbers or []
    lists = [lists] if isinstance(lists, str) else lists
    if not all(_is_list(each, str) for each in (names, excluded, lists)) or not _is_list(numbers, int):
        return None
    if not all(map(_NAME.fullmatch, lists)):
        return None
    return Targets(names, excluded, numbers, lists)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)
