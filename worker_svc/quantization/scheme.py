"""How the weights of a layer are quantized."""

from dataclasses import dataclass
from typing import Final, Literal

Bits = Literal[4, 8]

GROUPS: Final = (32, 64, 128)
"""Inputs that may share a scale; or all inputs of an output channel."""


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers: a weight is its scale times its code, an integer from -2**(bits-1)."""

    bits: Bits
    """Bits of a code."""
    group: int | None
    """Consecutive inputs that share a scale; `None` if all inputs of an output channel do."""

    def __str__(self) -> str:
        """Returns words for people, for example "w4a16 in groups of 64"."""
        return f"w{self.bits}a16 {'per channel' if self.group is None else f'in groups of {self.group}'}"

    def groups(self, inputs: int) -> int:
        """Returns the number of scales of an output channel."""
        return 1 if self.group is None else inputs // self.group
