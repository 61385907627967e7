"""Log-probabilities of prompts: each chunk's own, as soon as it is computed, so that a long prompt's never gather."""

from collections.abc import Callable, Sequence

import torch

from worker_svc.execution.batch import Batch
from worker_svc.plans.geometry import Geometry
from worker_svc.plans.step_plan import Admission, Logprobs, PrefillWork
from worker_svc.sampling.logprobs import compute_logprobs, unpack_logprobs


class PromptLogprobs:
    """Which slots want those of their prompt, and what a chunk says of it."""

    def __init__(
        self, batch: Batch, geometry: Geometry, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """No slot wants any.

        Args:
            batch: has the slots' tokens.
            geometry: the static shapes.
            logits: of hidden states [rows, hidden], for as many rows as the largest bucket.
        """
        self._batch = batch
        self._chunk = geometry.chunk
        self._rows = min(geometry.chunk, geometry.decode_buckets[-1])
        self._logits = logits
        # By slot: how many of the likeliest tokens are wanted beside the prompt's own, and the prompt's length.
        self._wanted: dict[int, tuple[int, int]] = {}

    def admit(self, request: Admission) -> None:
        """A request takes a slot."""
        if request.sampling.prompt_logprobs is not None:
            self._wanted[request.slot] = request.sampling.prompt_logprobs, request.prompt_len

    def release(self, slot: int) -> None:
        """Frees a slot; it may be free."""
        self._wanted.pop(slot, None)

    def of_chunk(self, work: PrefillWork, hidden: torch.Tensor) -> Sequence[Logprobs]:
        """Those of the prompt tokens that the chunk's tokens are followed by: positions ``start + 1`` up to, in the prompt, ``start + num_tokens``.

        In pieces of as many rows as the largest bucket, whose logits there is memory for. The last piece reaches back, so that all of
        them have one shape.

        Args:
            work: a chunk.
            hidden: its states [chunk, hidden].
        """
        if work.slot not in self._wanted:
            return ()
        count, prompt_len = self._wanted[work.slot]
        chunk, rows = self._chunk, self._rows
        found = self._batch.tokens_of(
            work.slot, work.start + 1, min(work.start + work.num_tokens + 1, prompt_len)
        )
        targets = torch.zeros(chunk, dtype=torch.int64, device=found.device)
        targets[: len(found)] = found
        logprobs: list[Logprobs] = []
        for start in range(0, len(found), rows):
            piece = slice(min(start, chunk - rows), min(start, chunk - rows) + rows)
            wanted = min(start + rows, len(found)) - start
            reported = compute_logprobs(self._logits(hidden[piece]), targets[piece])[start - piece.start :]
            logprobs += [each for each in unpack_logprobs(reported, [count] * wanted) if each is not None]
        return logprobs
