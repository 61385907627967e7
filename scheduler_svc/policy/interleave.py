"""Whether a step runs a prefill chunk or a decode batch."""

from typing import Literal

StepKind = Literal["prefill", "decode"]


class Interleave:
    """Bounded stall: while both kinds of work exist, a fixed number of decode steps follows every chunk.

    vLLM-RBLN runs all prefill first, which stalls running requests as long as prompts keep arriving. Here the
    longest gap between two tokens of a request is one chunk plus one decode step.

    On a pipeline, each decode step is one micro-batch's, and a stage spends only its share of the time on a
    chunk. So a round of all micro-batches with a chunk behind each takes as long as one chunk and one step of
    the whole model. Where only some stages have a micro-batch, several chunks may follow each step.
    """

    def __init__(self, decode_steps_per_chunk: int) -> None:
        """Runs ``decode_steps_per_chunk`` decode steps between two chunks; 0 runs all chunks first."""
        self._ratio = decode_steps_per_chunk
        # Decode steps that no chunk has been sent for. The first chunk may start at once.
        self._decodes = decode_steps_per_chunk

    @property
    def prefill_due(self) -> bool:
        """Whether enough decode steps have run since the last chunk."""
        return self._decodes >= self._ratio

    def choose(self, *, prefill: bool, decode: bool, turns: int = 1) -> StepKind | None:
        """Returns the kind of the next step.

        Args:
            prefill: whether there is a chunk to run.
            decode: whether there is a decode step to run.
            turns: pipeline stages for each micro-batch; a decode step counts as that many.
        """
        if prefill and (not decode or self.prefill_due):
            self._decodes = max(0, min(self._decodes, self._ratio * turns) - self._ratio)
            return "prefill"
        if decode:
            self._decodes += turns
            return "decode"
        return None

    def decoded(self) -> None:
        """Counts a decode step that a lease ran, beyond those chosen here."""
        self._decodes += 1

    def withdraw(self) -> None:
        """Takes back a decode step that was chosen here, but has not run."""
        self._decodes -= 1
