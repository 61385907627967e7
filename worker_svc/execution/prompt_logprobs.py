"""Log-probabilities of prompt tokens, computed with each chunk so that a long prompt's never accumulate."""

from collections.abc import Callable, Sequence

import torch

from protos.steps import Admission, Prefill
from protos.triptych.v1 import common_pb2
from worker_svc.execution.batch import Batch
from worker_svc.sampling.logprobs import compute_logprobs, unpack_logprobs
from worker_svc.shapes.geometry import Geometry


class PromptLogprobs:
    """Knows which slots asked for prompt log-probabilities and computes a chunk's."""

    def __init__(
        self, batch: Batch, geometry: Geometry, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Starts without slots.

        Args:
            batch: has the slots' tokens.
            geometry: the static shapes.
            logits: computes logits from hidden states [rows, hidden], for at most as many rows as the largest
                bucket.
        """
        self._batch = batch
        self._chunk = geometry.chunk
        self._rows = min(geometry.chunk, geometry.decode_buckets[-1])
        self._logits = logits
        # By slot: the number of most probable tokens to report, and the prompt's length.
        self._wanted: dict[int, tuple[int, int]] = {}

    def admit(self, request: Admission) -> None:
        """Notes a request's `prompt_logprobs`."""
        if request.sampling.HasField("prompt_logprobs"):
            self._wanted[request.slot] = request.sampling.prompt_logprobs, request.prompt_len

    def release(self, slot: int) -> None:
        """Forgets a slot; it may be free."""
        self._wanted.pop(slot, None)

    def compute(self, work: Prefill, hidden: torch.Tensor) -> Sequence[common_pb2.TokenLogprobs]:
        """Returns the log-probabilities of prompt tokens `start + 1` to `start + num_tokens`.

        The chunk is split into pieces of as many rows as the largest bucket, since there is memory for that
        many logits. The last piece starts earlier so that all pieces have the same shape.

        Args:
            work: the chunk.
            hidden: its hidden states [chunk, hidden].
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
        logprobs: list[common_pb2.TokenLogprobs] = []
        for start in range(0, len(found), rows):
            piece = slice(min(start, chunk - rows), min(start, chunk - rows) + rows)
            wanted = min(start + rows, len(found)) - start
            computed = compute_logprobs(self._logits(hidden[piece]), targets[piece])[start - piece.start :]
            logprobs += [each for each in unpack_logprobs(computed, [count] * wanted) if each is not None]
        return logprobs
