"""`--help=WORD`: the part of the help named by a word, as in `vllm serve`."""

import textwrap
from argparse import Action, ArgumentParser, _ArgumentGroup
from collections.abc import Mapping, Sequence
from typing import Final

_LIST: Final = "listgroup"
_FULL: Final = ("all", "page")


class SearchableHelp(ArgumentParser):
    """A parser with help for a heading, or for flags by a word in their name."""

    def found(self, word: str, foreign: Mapping[str, str]) -> str:
        """Returns the part of the help named by a word, or a line about its absence.

        Args:
            word: `listgroup`, `all`, `page`, a heading, or a part of a flag's name, in any case.
            foreign: accepted flags of another program, and the meaning of each here.
        """
        word = _plain(word).strip("-")
        if word in _FULL:
            return self.format_help()
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
