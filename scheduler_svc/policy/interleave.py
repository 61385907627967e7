"""Whether a step runs a prefill chunk or a decode batch."""

from typing import Literal

StepKind = Literal["prefill", "decode"]


class Interleave:
    """Bounded stall: while both kinds of work exist, a fixed number of decode steps follows every chunk.

    vLLM-RBLN runs all prefill first, which stalls running requests as long as prompts keep arriving. Here the
    longest gap between two tokens of a request is one chunk plus one decode step.
    """

    def __init__(self, decode_steps_per_chunk: int) -> None:
        """Runs ``decode_steps_per_chunk`` decode steps between two chunks; 0 runs all chunks first."""
        self._ratio = decode_steps_per_chunk
        # The first chunk may start at once.
        self._decodes_since_chunk = decode_steps_per_chunk

    @property
    def prefill_due(self) -> bool:
        """Whether enough decode steps have run since the last chunk."""
        return self._decodes_since_chunk >= self._ratio

    def choose(self, *, prefill: bool, decode: bool) -> StepKind | None:
        """Returns the kind of the next step, given which kinds of work exist."""
        if prefill and (not decode or self.prefill_due):
            self._decodes_since_chunk = 0
            return "prefill"
        if decode:
            self._decodes_since_chunk += 1
            return "decode"
        return None

    def decoded(self) -> None:
        """Counts a decode step that a lease ran, beyond those chosen here."""
        self._decodes_since_chunk += 1

    def withdraw(self) -> None:
        """Takes back a decode step that was chosen here, but has not run."""
        self._decodes_since_chunk -= 1
