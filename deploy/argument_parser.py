"""The argument parser of commands without settings of a service."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from protos.service.help import unknown_arguments

_AMBIGUOUS: Final = re.compile(r"(ambiguous option: [^=\s]+)=.*( could match )", re.DOTALL)


class ArgumentParser(argparse.ArgumentParser):
    """Refuses a bad argument in one line, without the usage; so do its subcommands' parsers."""

    # The signature is that of the base class.
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Reads a command line; the refusal of an unknown flag does not repeat its value, maybe a secret."""
        given = sys.argv[1:] if args is None else args
        parsed, rest = self.parse_known_args(given, namespace)
        if rest:
            self.error(unknown_arguments(rest, self._option_string_actions, given))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with 2."""
        shown = _AMBIGUOUS.sub(r"\1\2", message)
        self.exit(2, f"{self.prog}: {shown}\n")
