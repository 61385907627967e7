"""The flags of `vllm serve` as a command accepts them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.vllm_flags.flag import VllmFlag
from deploy.vllm_flags.table import BY_NAME
from deploy.vllm_flags.translate import translate


class VllmDialect:
    """Translates flags of vLLM's, and keeps what there is to say about them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """A line for each flag that has no effect or another meaning."""

    @property
    def flags(self) -> Mapping[str, str]:
        """Every flag of `vllm serve`, without the short forms, and what it is here."""
        return {name: _meaning(flag) for name, flag in BY_NAME.items() if name.startswith("--")}

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
                return (
                    [flag, *(json.dumps(each) if isinstance(each, dict) else str(each) for each in value)]
                    if value
                    else []
                )
            case list() | dict():
                return [f"{flag}={json.dumps(value)}"]
            case _:
                return [f"{flag}={value}"]


def _meaning(flag: VllmFlag) -> str:
    """Returns the rest of a sentence that begins with the flag."""
    match flag.kind:
        case "moot":
            return f"has no effect: {flag.reason}"
        case "refused":
            return flag.reason
        case _:
            return f"is {flag.ours} here" + (f": it {flag.reason}" if flag.reason else "")
