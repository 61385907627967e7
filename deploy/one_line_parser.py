"""The argument parser of the commands that read no service settings."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Refuses a bad argument in one line, without the usage; so do its subcommands' parsers."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with 2."""
        self.exit(2, f"{self.prog}: {message}\n")
