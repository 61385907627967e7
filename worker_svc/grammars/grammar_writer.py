"""Collects the rules and terminals of an llguidance grammar (Lark)."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from worker_svc.grammars.limits import MAX_RULES, MAX_WHITESPACE, refusal

_WS: Final = rf"[ \t\n\r]{{0,{MAX_WHITESPACE}}}"
_PUNCTUATION: Final = {
    "COMMA": f"/,{_WS}/", "COLON": f"/:{_WS}/", "OPEN_OBJECT": rf"/\{{{_WS}/", "CLOSE_OBJECT": rf"/{_WS}\}}/",
    "OPEN_ARRAY": rf"/\[{_WS}/", "CLOSE_ARRAY": rf"/{_WS}\]/",
}  # fmt: skip


@dataclass(frozen=True)
class Repeated:
    """A rule repeated; `most` is `None` without a limit."""

    rule: str
    least: int
    most: int | None


Symbol: TypeAlias = str | Repeated
"""A rule (lower case), a terminal (upper case), or a literal (quoted). A rule's argument follows `::`."""


@dataclass(frozen=True)
class _Option:
    """A way to continue a rule."""

    symbols: tuple[Symbol, ...]
    condition: str = ""


class GrammarWriter:
    """Collects rules and terminals."""

    def __init__(self) -> None:
        self._rules: dict[str, list[_Option]] = {}
        self._headers: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._shared: dict[tuple[tuple[Symbol, ...], ...], str] = {}
        self._count = 0

    def new_rule(self, prefix: str) -> str:
        """Returns an unused name of a rule."""
        self._count += 1
        return f"{prefix}{self._count}"

    def add(self, name: str, options: Iterable[Sequence[Symbol]], *, parameter: str = "") -> str:
        """Adds options to a rule and returns its name."""
        self._headers.setdefault(name, f"{name}{parameter}")
        self._rules.setdefault(name, []).extend(_Option(tuple(each)) for each in options)
        if len(self._rules) > MAX_RULES:
            raise refusal(f"the grammar needs more than {MAX_RULES} rules; describe less of the output")
        return name

    def shared_rule(self, options: Iterable[Sequence[Symbol]]) -> str:
        """Returns the rule with these options."""
        key = tuple(map(tuple, options))
        if key not in self._shared:
            self._shared[key] = self.add(self.new_rule("s"), key)
        return self._shared[key]

    def add_if(self, name: str, symbols: Sequence[Symbol], condition: str) -> None:
        """Adds an option to a rule with a parameter."""
        self._headers.setdefault(name, f"{name}::_")
        self._rules.setdefault(name, []).append(_Option(tuple(symbols), condition))

    def add_body(self, body: str) -> str:
        """Returns the rule with a body written elsewhere, such as `%json`."""
        return self._bodies.setdefault(body, self.new_rule("n"))

    def terminal(self, body: str) -> str:
        """Returns the terminal with a body."""
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self._terminals)}"
        return self._terminals[body]

    def prune(self) -> set[str]:
        """Removes options that need a rule without finite texts; returns the names of the other rules."""
        good = set(self._bodies.values())
        users: dict[str, list[str]] = {}
        for name, options in self._rules.items():
            for option in options:
                for needed in map(_needed, option.symbols):
                    if needed:
                        users.setdefault(needed, []).append(name)
        pending = list(self._rules)
        while pending:
            name = pending.pop()
            if name not in good and any(_is_good(option, good) for option in self._rules[name]):
                good.add(name)
                pending += users.get(name, ())
        for name, options in list(self._rules.items()):
            if name not in good:
                del self._rules[name]
                continue
            self._rules[name] = [
                _Option(
                    tuple(
                        each for each in option.symbols if not isinstance(each, Repeated) or each.rule in good
                    ),
                    option.condition,
                )
                for option in options
                if _is_good(option, good)
            ]
        return good

    def text(self, start: str) -> str:
        """Returns the grammar beginning with a rule."""
        # Masks show forced tokens. llguidance would search for all forced bytes, which may never end.
        lines = ['%llguidance {"no_forcing": true}', f"start: {start}"]
        reached, pending = {start}, [start]
        while pending:
            for option in self._rules.get(pending.pop(), ()):
                for name in map(_name, option.symbols):
                    if name not in reached:
                        reached.add(name)
                        pending.append(name)
        lines += [
            f"{self._headers[name]}: {' | '.join(map(_option_text, options))}"
            for name, options in self._rules.items()
            if name in reached
        ]
        lines += [f"{name}: {body}" for body, name in self._bodies.items() if name in reached]
        lines += [f"{name}: {body}" for body, name in self._terminals.items() if name in reached]
        lines += [f"{name}: {body}" for name, body in _PUNCTUATION.items() if name in reached]
        return "\n".join(lines) + "\n"


def _name(symbol: Symbol) -> str:
    return symbol.rule if isinstance(symbol, Repeated) else symbol.partition("::")[0]


def _needed(symbol: Symbol) -> str | None:
    """Returns the rule that must be satisfied for a symbol."""
    if isinstance(symbol, Repeated):
        return symbol.rule if symbol.least else None
    return _name(symbol) if symbol[0].islower() else None


def _is_good(option: _Option, good: set[str]) -> bool:
    return all(needed is None or needed in good for needed in map(_needed, option.symbols))


def _option_text(option: _Option) -> str:
    texts = []
    for symbol in option.symbols:
        if isinstance(symbol, str):
            texts.append(symbol)
        elif symbol.most != 0:
            most = "" if symbol.most is None else symbol.most
            texts.append(
                f"{symbol.rule}*"
                if (symbol.least, most) == (0, "")
                else f"{symbol.rule}{{{symbol.least},{most}}}"
            )
    condition = f" %if {option.condition}" if option.condition else ""
    return (" ".join(texts) or '""') + condition


def texts_terminal(texts: Sequence[str]) -> str:
    """Returns the body of a terminal for any of some texts."""
    return "(" + " | ".join(json.dumps(text).replace("\x7f", "\\u007f") for text in texts) + ")"
