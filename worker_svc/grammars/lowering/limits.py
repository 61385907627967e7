"""What is bounded before a compiler sees a spec, and how it is refused."""

from dataclasses import dataclass
from typing import Final

from protos.errors import InvalidArgument

PARAM: Final = "structured_output"
MAX_NESTING: Final = 64
MAX_ALTERNATIVES: Final = 10_000
MAX_EXPANDED: Final = 100_000
"""Characters of an expression once its counted repetitions are written out."""
MAX_TAGS: Final = 512
MAX_WHITESPACE: Final = 8
"""Characters of white space in a row that JSON may have between its parts."""


@dataclass(frozen=True)
class CompilerLimits:
    """What one grammar, and all of them together, may cost."""

    threads: int = 2
    """Grammars that are compiled at once."""
    cpu_s: float = 5.0
    """CPU time of one compilation."""
    memory: int = 1 << 30
    """Bytes of one compilation."""
    largest: int = 64 << 20
    """Bytes of one compiled grammar, serialized or not. Reading one back takes about ten times as much for a moment, one at a time."""
    cache: int = 256 << 20
    """Bytes of all compiled grammars. Those that running requests need are counted, and stay when it is exceeded."""


def refused(message: str) -> InvalidArgument:
    """The error that names the parameter."""
    return InvalidArgument(message, param=PARAM)
