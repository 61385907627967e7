"""Help for users of a command line: parts of `--help`, and suggestions for mistyped flags."""

import argparse
import copy
import difflib
import re
import sys
import textwrap
from argparse import Action, _ArgumentGroup
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from protos.service.redaction import words_shown

# What follows says more than a line has room for.
_MORE: Final = re.compile(r"[.;] |: auto|, for example|, each as")
_LIST: Final = "listgroup"
_FULL: Final = ("all", "page")


class ParserWanted(BaseException):
    """Raised instead of reading a command line, for a caller who wants only the parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


wants_parser: ContextVar[bool] = ContextVar("wants_parser", default=False)
"""Whether parsers raise themselves, as `ParserWanted`: `triptych completion` describes their flags."""


class _CapturedParser(argparse.ArgumentParser):
    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        if wants_parser.get():
            raise ParserWanted(self)
        return super().parse_known_args(*args, **options)


class SearchableHelp(_CapturedParser):
    """A parser with help for a heading, or for flags by a word in their name."""

    def full_help(self) -> str:
        """Returns the help of all flags."""
        return super().format_help()

    def short_help(self, fields: Sequence[str]) -> str:
        """Returns a line for each of these fields' flags, with the first sentence of its help."""
        actions = {action.dest: action for action in self._actions}
        formatter = argparse.HelpFormatter(self.prog, max_help_position=32, width=100)
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        formatter.start_section("Settings")
        for name in fields:
            action = copy.copy(actions[name])
            action.help = _MORE.split(action.help or "")[0].rstrip(".")
            action.option_strings = [flag for flag in action.option_strings if flag.startswith("--")][:1]
            action.nargs = 0 if action.nargs == 0 else None
            formatter.add_argument(action)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def found(self, word: str, foreign: Mapping[str, str]) -> str:
        """Returns the part of the help named by a word, or a line about its absence.

        Args:
            word: `listgroup`, `all`, `page`, a heading, or a part of a flag's name, in any case.
            foreign: accepted flags of another program, and the meaning of each here.
        """
        word = _plain(word).strip("-")
        if word in _FULL:
            return self.full_help()
        if word == _LIST:
            titles = (group.title for group in self._action_groups if _actions(group))
            return "".join(f"{title}\n" for title in titles)
        for name in (word, word.removesuffix("config").strip("-")):
            if name and (text := self._heading(name) or self._flags(name, foreign)):
                return text
        return f"no heading and no flag matches {word!r}; --help=listgroup lists the headings\n"

    def _heading(self, word: str) -> str:
        for group in self._action_groups:
            if group.title and _plain(group.title) == word:
                return self._section(group.title, _actions(group))
        return ""

    def _flags(self, word: str, foreign: Mapping[str, str]) -> str:
        groups = [
            (group.title, [action for action in _actions(group) if _has(word, action.option_strings)])
            for group in self._action_groups
        ]
        text = "".join(self._section(title or "", actions) for title, actions in groups if actions)
        lines = [
            textwrap.fill(f"{flag} {what}", initial_indent="  ", subsequent_indent="      ", width=100)
            for flag, what in foreign.items()
            if word in flag and flag not in self._option_string_actions
        ]
        return text + "\n".join(["flags of vllm serve:", *lines, ""] if lines else [])

    def _section(self, title: str, actions: list[Action]) -> str:
        formatter = self._get_formatter()
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help() + "\n"


def _plain(text: str) -> str:
    return text.lower().replace("_", "-").replace(" ", "-")


def _actions(group: _ArgumentGroup) -> list[Action]:
    return group._group_actions  # noqa: SLF001 - argparse shows them in no other way


def _has(word: str, names: Sequence[str]) -> bool:
    return any(word in name for name in names)


_LIKENESS = 0.7


def unknown_arguments(arguments: Sequence[str], known: Collection[str], given: Sequence[str]) -> str:
    """Returns the refusal of the arguments left of the command line `given`, without a flag's value."""
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    flag = next((name for name in flags if name.strip("-")), None)
    if flag is None:
        return f"unrecognized arguments: {words_shown(arguments, given)}"
    meant = similar(flag, known)
    return (
        f"unrecognized arguments: {flag}; {f'did you mean {meant}?' if meant else '--help lists the flags'}"
    )


def similar(name: str, known: Collection[str]) -> str | None:
    """Returns the known name most like `name`, if any."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    return found[0] if found else None


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Returns the flags of a parser and of its subcommands."""
    names = set(parser._option_string_actions)  # noqa: SLF001 - argparse shows them in no other way
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            names.update(*map(_options, action.choices.values()))
    return names


_AMBIGUOUS: Final = re.compile(r"(ambiguous option: [^=\s]+)=.*( could match )", re.DOTALL)


class ArgumentParser(_CapturedParser):
    """Refuses a bad argument in one line, without the usage; so do its subcommands' parsers."""

    # The signature is that of the base class.
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Reads a command line; the refusal of an unknown flag does not repeat its value, maybe a secret."""
        given = sys.argv[1:] if args is None else args
        parsed: argparse.Namespace
        parsed, rest = self.parse_known_args(given, namespace)
        if rest:
            self.error(unknown_arguments(rest, _options(self), given))
        return parsed

    def _check_value(self, action: Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            # Python 3.14 suggests by itself.
            if (meant := similar(str(value), list(action.choices or ()))) is None:
                raise
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}; did you mean {meant}?"
            ) from None

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with 2."""
        shown = _AMBIGUOUS.sub(r"\1\2", message)
        self.exit(2, f"{self.prog}: {shown}\n")
