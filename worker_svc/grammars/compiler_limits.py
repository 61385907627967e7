"""Resources that grammars may use on a worker."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CompilerLimits:
    """Limits on one grammar, and on all of them together."""

    threads: int = 2
    """Grammars compiled at the same time."""
    cpu_s: float = 5.0
    """CPU seconds of one compilation."""
    compile_bytes: int = 1 << 30
    """Bytes that one compilation may allocate."""
    grammar_bytes: int = 64 << 20
    """Bytes of one compiled grammar, serialized or not.

    Reading one back takes about ten times as much for a moment; only one is read at a time.
    """
    cache_bytes: int = 256 << 20
    """Bytes of all compiled grammars.

    Grammars in use by running requests count, and stay when the limit is exceeded.
    """
