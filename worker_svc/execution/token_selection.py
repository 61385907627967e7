"""From a step's logits to its tokens: sampling, grammars, and what is told of both."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from protos.errors import InvalidArgument
from worker_svc.execution.batch import Batch
from worker_svc.grammars.constraints import Choice, Constraints
from worker_svc.plans.step_plan import Output
from worker_svc.sampling.logprobs import unpack_logprobs
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import Needs, SamplingBatch

Sample = Callable[[Needs, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Of needs, logits [rows, vocab], slots and positions of the rows' last tokens, int64 [rows]: see ``sampling.sampler.sample``."""

Report = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of logits [rows, vocab] and the tokens chosen, int64 [rows]: see ``sampling.logprobs.compute_logprobs``."""


@dataclass(frozen=True)
class Chosen:
    """The tokens of a step."""

    tokens: torch.Tensor
    """int64 [bucket]."""
    told: torch.Tensor
    """The same, but -1 where nothing was allowed."""
    batch: SamplingBatch
    logits: torch.Tensor
    """float32 [bucket, vocab], as the model made them."""
    choice: Choice | None = None
    """What grammars made of it; ``None`` if no row has one."""


class Chooser:
    """Chooses for the slots of a batch."""

    def __init__(self, batch: Batch, constraints: Constraints | None) -> None:
        """Chooses for ``batch``, some of whose slots ``constraints`` may hold."""
        self._batch = batch
        self._constraints = constraints

    def choose(
        self,
        slots: Sequence[int],
        rows: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
        draw: Sample,
        likeliest: torch.Tensor | None = None,
    ) -> Chosen:
        """A token for each row; whoever takes them counts as having done so.

        Args:
            slots: of the real rows.
            rows: int64 [bucket], all rows' slots.
            logits: float32 [bucket, vocab]; those of constrained rows may be changed.
            positions: int64 [bucket], of the rows' last tokens.
            draw: chooses where more is asked for than the most probable token.
            likeliest: the most probable tokens, int64 [bucket], if they are known.
        """
        batch = self._batch.sampling_of(slots)
        needs = batch.needs
        if self._constraints is not None and self._constraints.any_of(slots):
            chosen = self._constrained(
                self._constraints, slots, rows, logits, positions, draw, batch, likeliest
            )
        elif needs.none and likeliest is not None:
            return Chosen(likeliest, likeliest, batch, logits)
        else:
            tokens, told = draw(needs, logits, rows, positions)
            chosen = Chosen(tokens, told, batch, logits)
        self._batch.sampling.count(needs, rows, chosen.tokens)
        return chosen

    def _constrained(
        self, constraints: Constraints, slots: Sequence[int], rows: torch.Tensor, logits: torch.Tensor,
        positions: torch.Tensor, draw: Sample, batch: SamplingBatch, likeliest: torch.Tensor | None,
    ) -> Chosen:  # fmt: skip
        known = logits.clone() if batch.reports else logits

        def drawn(wanted: Sequence[int] | None) -> torch.Tensor:
            """The tokens as they are told; what is taken in the place of none is nobody's choice."""
            if wanted is None:
                if likeliest is not None and batch.needs.none:
                    return likeliest.clone()
                return draw(batch.needs, logits, rows, positions)[1].clone()
            index = torch.tensor(list(wanted), device=logits.device)
            # Other random numbers: what the first ones drew is known not to be allowed, and says something about them.
            return sample(
                self._batch.sampling, batch.needs, logits[index], rows[index], positions[index] + 1, attempt=1
            )[1]

        choice = constraints.choose(
            slots,
            logits,
            drawn,
            masked_first=[self._batch.sampling.filters(slot) for slot in slots],
            room=[
                self._room(slot) if count is None else 0
                for slot, count in zip(slots, batch.logprobs, strict=True)
            ],
        )
        return Chosen(choice.tokens.clamp(min=0), choice.tokens, batch, known, choice)

    def _room(self, slot: int) -> int:
        """Tokens that a grammar may force behind the one that is chosen.

        None where other parameters may forbid them, which each step looks at anew; nor where log-probabilities are wanted, which take the
        forward pass that forced tokens are spared.
        """
        return 0 if self._batch.sampling.restricts(slot) else self._batch.room(slot) - 1

    def outputs(
        self,
        slots: Sequence[int],
        chosen: Chosen,
        report: Report,
    ) -> Iterator[Output]:
        """What is told of each slot. The batch has its tokens by now; those that a grammar forces behind them it gets here.

        Args:
            slots: of the real rows.
            chosen: for them.
            report: log-probabilities of tokens.
        """
        batch, choice = chosen.batch, chosen.choice
        reports = report(chosen.logits, chosen.tokens) if batch.reports else None
        logprobs = [None] * len(slots) if reports is None else unpack_logprobs(reports, batch.logprobs)
        for slot, token, entry in zip(slots, chosen.told[: len(slots)].tolist(), logprobs, strict=True):
            error = choice.errors.get(slot) if choice else None
            if error is None and token < 0:
                error = InvalidArgument(
                    "no token is left to sample: allowed_token_ids, bad_words and logit_bias exclude all of them"
                )
            if error is not None:
                yield Output(slot, (), error=error)
                continue
            forced = choice.forced.get(slot, ()) if choice else ()
            if forced:
                self._batch.append(slot, forced)
            yield Output(slot, (token, *forced), () if entry is None else (entry,))
