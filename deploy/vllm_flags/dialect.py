"""The flags of `vllm serve` as a command accepts them."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from deploy.vllm_flags.table import BY_NAME
from deploy.vllm_flags.translate import translate


class VllmDialect:
    """Translates flags of vLLM's, and keeps what there is to say about them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """A line for each flag that has no effect or another meaning."""

    @property
    def flags(self) -> Collection[str]:
        """Every flag of `vllm serve`, without the short forms."""
        return [name for name in BY_NAME if name.startswith("--")]

    def translate(self, argv: Sequence[str]) -> list[str]:
        """Returns our flags for a command line; arguments that vLLM does not know stay.

        Raises:
            ConfigurationRefused: A flag cannot be served.
        """
        translation = translate(argv)
        self.notes += translation.notes
        return translation.argv

    def written(self, flag: str, value: Any) -> list[str]:
        """Returns the arguments that give a flag a value of a configuration file."""
        match value:
            case bool():
                return [flag if value else f"--no-{flag[2:]}"]
            case list() if BY_NAME[flag].form == "values":
                return [flag, *map(str, value)] if value else []
            case list() | dict():
                return [f"{flag}={json.dumps(value)}"]
            case _:
                return [f"{flag}={value}"]
