"""How a command accepts the flags of another program."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class ForeignFlags(Protocol):
    """The flags of another program."""

    @property
    def flags(self) -> Mapping[str, str]:
        """Its flags with their dashes, and the meaning of each as the rest of a sentence."""

    def translate(self, argv: Sequence[str]) -> list[str]:
        """Returns our flags for a command line; arguments that the other program does not know stay.

        Raises:
            ConfigurationRefused: A flag cannot be served.
        """

    def written(self, flag: str, value: Any) -> list[str]:
        """Returns the arguments that give a flag a value of a configuration file."""
