"""Turns a step's logits into tokens: sampling, grammars, log-probabilities and errors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from protos.errors import InvalidArgument
from protos.steps import SlotOutput
from worker_svc.execution.batch import Batch
from worker_svc.grammars.constraints import Choice, Constraints
from worker_svc.sampling.logprobs import unpack_logprobs
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import Needs, SamplingBatch

Sample = Callable[[Needs, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Samples from needs, logits [rows, vocab], the rows' slots and the positions of their last tokens, int64
[rows].

Returns what `sampling.sampler.sample` returns."""

ComputeLogprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes logits [rows, vocab] and the selected tokens, int64 [rows]; see
`sampling.logprobs.compute_logprobs`."""


@dataclass(frozen=True)
class Selection:
    """The tokens of a step."""

    tokens: torch.Tensor
    """int64 [bucket], one valid token for each row."""
    reported: torch.Tensor
    """The same, but -1 where no token was allowed."""
    batch: SamplingBatch
    """The requirements of the step's rows."""
    logits: torch.Tensor
    """float32 [bucket, vocab], as the model computed them."""
    choice: Choice | None = None
    """What the grammars decided; `None` if no row has a grammar."""


class TokenSelector:
    """Selects tokens for the slots of a batch."""

    def __init__(self, batch: Batch, constraints: Constraints | None) -> None:
        """Selects for `batch`; `constraints` has the grammars of its slots, if the model supports them."""
        self._batch = batch
        self._constraints = constraints

    def select(
        self,
        slots: Sequence[int],
        rows: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
        draw: Sample,
        argmax: torch.Tensor | None = None,
    ) -> Selection:
        """Selects a token for each row and counts it for penalties.

        Args:
            slots: the slots of the real rows.
            rows: int64 [bucket], the slots of all rows.
            logits: float32 [bucket, vocab]; the logits of constrained rows may be overwritten.
            positions: int64 [bucket], the positions of the rows' last tokens.
            draw: samples the rows that need more than the most probable token.
            argmax: the most probable tokens, int64 [bucket], if they are known.
        """
        batch = self._batch.sampling_batch(slots)
        needs = batch.needs
        if self._constraints is not None and self._constraints.any_constrained(slots):
            selection = self._select_constrained(
                self._constraints, slots, rows, logits, positions, draw, batch, argmax
            )
        elif needs.none and argmax is not None:
            return Selection(argmax, argmax, batch, logits)
        else:
            tokens, reported = draw(needs, logits, rows, positions)
            selection = Selection(tokens, reported, batch, logits)
        self._batch.sampling.count(needs, rows, selection.tokens)
        return selection

    def _select_constrained(
        self, constraints: Constraints, slots: Sequence[int], rows: torch.Tensor, logits: torch.Tensor,
        positions: torch.Tensor, draw: Sample, batch: SamplingBatch, argmax: torch.Tensor | None,
    ) -> Selection:  # fmt: skip
        # Grammars mask the logits in place; log-probabilities are of the model's own.
        unmasked = logits.clone() if batch.reports else logits

        def redraw(indices: Sequence[int] | None) -> torch.Tensor:
            """Draws tokens for some rows, or for all: -1 where no token is allowed."""
            if indices is None:
                if argmax is not None and batch.needs.none:
                    return argmax.clone()
                return draw(batch.needs, logits, rows, positions)[1].clone()
            index = torch.tensor(list(indices), device=logits.device)
            # The second attempt takes new random numbers: the first ones led to a token that is not allowed,
            # so they are no longer independent of the mask.
            return sample(
                self._batch.sampling, batch.needs, logits[index], rows[index], positions[index] + 1, attempt=1
            )[1]

        choice = constraints.choose(
            slots,
            logits,
            redraw,
            masked_first=[self._batch.sampling.filters(slot) for slot in slots],
            room=[
                self._jump_limit(slot) if count is None else 0
                for slot, count in zip(slots, batch.logprobs, strict=True)
            ],
        )
        return Selection(choice.tokens.clamp(min=0), choice.tokens, batch, unmasked, choice)

    def _jump_limit(self, slot: int) -> int:
        """Returns how many tokens a grammar may force behind the selected one.

        None if other parameters may forbid them, since each step checks these anew. The caller also forbids
        them if log-probabilities are wanted: those need the forward pass that forced tokens skip.
        """
        return 0 if self._batch.sampling.restricts(slot) else self._batch.free_positions(slot) - 1

    def outputs(
        self, slots: Sequence[int], selection: Selection, compute_logprobs: ComputeLogprobs
    ) -> Iterator[SlotOutput]:
        """Yields each slot's output. Call it after the batch has the selected tokens.

        Tokens that a grammar forces behind the selected ones are appended to the batch here.

        Args:
            slots: the slots of the real rows.
            selection: their tokens.
            compute_logprobs: computes log-probabilities of tokens.
        """
        batch, choice = selection.batch, selection.choice
        rows = compute_logprobs(selection.logits, selection.tokens) if batch.reports else None
        logprobs = [None] * len(slots) if rows is None else unpack_logprobs(rows, batch.logprobs)
        for slot, token, entry in zip(
            slots, selection.reported[: len(slots)].tolist(), logprobs, strict=True
        ):
            error = choice.errors.get(slot) if choice else None
            if error is None and token < 0:
                error = InvalidArgument(
                    "no token is left to sample: allowed_token_ids,"
                    " bad_words and logit_bias exclude all of them"
                )
            if error is not None:
                yield SlotOutput(slot, (), error=error)
                continue
            forced = choice.forced.get(slot, ()) if choice else ()
            if forced:
                self._batch.append(slot, forced)
            yield SlotOutput(slot, (token, *forced), () if entry is None else (entry,))
