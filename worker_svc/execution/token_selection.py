"""Turns a step's logits into tokens: sampling, grammars, log-probabilities and errors.

`TokenSelector` selects a step's tokens. `DecodeStep` holds the parts of a bucket's step, from rows to tokens,
captured if the device can. `PromptLogprobs` computes a prompt's log-probabilities with each chunk, so those
of a long prompt never accumulate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from protos.steps import Admission, Prefill, SlotOutput
from protos.triptych.v1 import common_pb2
from worker_svc.devices.base import Device, upload
from worker_svc.execution.batch import Batch
from worker_svc.grammars.constraints import Choice, StepConstraints
from worker_svc.pending_step import NOT_FINITE, output_of
from worker_svc.sampling.sampler import (
    argmax_rows,
    compute_logprobs,
    mark_not_finite,
    sample,
    unpack_logprobs,
)
from worker_svc.sampling.state import SamplingBatch, SamplingOps
from worker_svc.sampling.thinking import Endings
from worker_svc.shapes import ShapeConfig

Sample = Callable[[SamplingOps, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Samples from needs, logits [rows, vocab], the rows' slots and the positions of their last tokens, int64
[rows]. Returns tokens without and with marks; see `sampling.sampler.sample`."""

EndThoughts = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Takes the rows' slots and the positions of their next tokens, int64 [rows]; see
`ThinkingBudgets.advance`."""

ComputeLogprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes logits [rows, vocab] and selected tokens, int64 [rows]; see `sampling.sampler.compute_logprobs`."""


@dataclass(frozen=True)
class Selection:
    """The tokens of a step."""

    tokens: torch.Tensor
    """int64 [bucket], a valid token for each row."""
    reported: torch.Tensor
    """The same, with a mark for rows without allowed tokens or with logits that are not finite."""
    batch: SamplingBatch
    """The requirements of the step's rows."""
    logits: torch.Tensor
    """float32 [bucket, vocab], as the model computed them."""
    choice: Choice | None = None
    """The grammars' decisions; `None` without grammars in the step."""

    @property
    def is_plain(self) -> bool:
        """Whether the result is tokens only, unless the model computed NaN or infinity."""
        return self.choice is None and not self.batch.reports and not self.batch.needs.adjusts


class TokenSelector:
    """Selects tokens for the slots of a batch."""

    def __init__(
        self,
        batch: Batch,
        constraints: StepConstraints | None,
        draw: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """Selects for `batch`.

        Args:
            batch: the slots.
            constraints: the grammars of the slots, if the model supports them.
            draw: draws on a device that has found the most probable tokens; see `Device.compile_draw`.
        """
        self._batch = batch
        self._constraints = constraints
        self._draw = draw

    def select(
        self,
        slots: Sequence[int],
        rows: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
        draw: Sample,
        end_thoughts: EndThoughts,
        best: Sequence[torch.Tensor] = (),
    ) -> Selection:
        """Selects a token for each row and counts it for penalties.

        Args:
            slots: the slots of the real rows.
            rows: int64 [bucket], the slots of all rows.
            logits: float32 [bucket, vocab]; the logits of constrained rows may be overwritten. Logits on
                another device travel to the batch only if a row needs them.
            positions: int64 [bucket], the positions of the rows' last tokens.
            draw: samples for steps in which the most probable tokens are not enough.
            end_thoughts: finds the tokens that end thoughts, for steps with budgets.
            best: the most probable tokens, int64 [bucket], if known; then the same with marks, if the device
                has compared them with the logits.
        """
        batch = self._batch.sampling_batch(slots)
        if self._draw is not None and best and (found := self._draw_on_device(slots, rows, logits, best[0])):
            mask, *best = found
            draw = _keeping(mask, best, draw)
            # The rows drawn there need no more than greedy rows.
            rest = (slot for slot, is_drawn in zip(slots, mask.tolist(), strict=False) if not is_drawn)
            random = any(map(self._batch.sampling.is_random, rest))
            batch = replace(batch, needs=replace(batch.needs, random=random, greedy=True))
        needs = batch.needs
        endings = None
        if self._batch.sampling.thinking.limit_any(slots):
            # On every rank, drawing or not: the state must be the same.
            endings = Endings(*end_thoughts(rows, positions + 1))
        constrained = self._constraints is not None and self._constraints.any_constrained(slots)
        if constrained or batch.reports or not best or not needs.none:
            logits = logits.to(rows.device)
        if constrained:
            assert self._constraints is not None
            selection = self._select_constrained(
                self._constraints, slots, rows, logits, positions, draw, batch, best, endings
            )
        else:
            drawn = best if needs.none and best else draw(needs, logits, rows, positions)
            tokens, reported = (drawn[0], drawn[-1]) if endings is None else endings.over(drawn)
            selection = Selection(tokens, reported, batch, logits)
        self._batch.sampling.count(needs, rows, selection.tokens)
        return selection

    def _draw_on_device(
        self, slots: Sequence[int], rows: torch.Tensor, logits: torch.Tensor, best: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Draws on the device for the slots that allow it.

        Args:
            slots: the slots of the real rows.
            rows: int64 [bucket], the slots of all rows.
            logits: float32 [bucket, vocab], on the device.
            best: int64 [bucket], the most probable tokens.

        Returns:
            Whether a row is drawn there, bool [bucket], and the tokens, `best` in other rows, without and
            with marks, int64 [bucket]. Empty if the device draws no row.
        """
        state, constraints = self._batch.sampling, self._constraints
        chosen = [
            index
            for index, slot in enumerate(slots)
            if state.takes_any_numbers(slot)
            and not (constraints is not None and constraints.any_constrained([slot]))
        ]
        if not chosen:
            return ()
        drawn = self._run_draw(rows, logits)
        mask = torch.zeros(len(rows), dtype=torch.bool)
        mask[chosen] = True
        # Without finite probabilities, the operator returns any number.
        valid = (drawn >= 0) & (drawn < state.vocabulary.size)
        reported = torch.where(mask, drawn.where(valid, NOT_FINITE), best)
        return mask, reported.clamp(min=0), reported

    def _run_draw(self, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Draws a token for all rows, int64 [bucket] on the host; greedy rows get the most probable."""
        assert self._draw is not None
        parameters = self._batch.sampling.parameters
        temperature = parameters.temperature[rows]
        greedy = temperature == 0
        drawn: torch.Tensor = self._draw(
            logits,
            temperature.masked_fill(greedy, 1),
            parameters.top_k[rows].masked_fill(greedy, 1).to(torch.int32),
            parameters.top_p[rows].to(torch.float32),
        )
        return drawn.to(rows.device, torch.int64)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Makes the graph that draws on the device, if it does, for logits [rows, vocab] of padding."""
        if self._draw is not None:
            self._run_draw(torch.full((len(logits),), self._batch.padding_row), logits)

    def _select_constrained(
        self, constraints: StepConstraints, slots: Sequence[int], rows: torch.Tensor, logits: torch.Tensor,
        positions: torch.Tensor, draw: Sample, batch: SamplingBatch, best: Sequence[torch.Tensor],
        endings: Endings | None,
    ) -> Selection:  # fmt: skip
        # Grammars mask the logits in place; log-probabilities are of the model's own.
        unmasked = logits.clone() if batch.reports else logits

        def redraw(indices: Sequence[int] | None) -> torch.Tensor:
            """Draws tokens for some rows, or for all, with marks."""
            if indices is None:
                known = best if best and batch.needs.none else draw(batch.needs, logits, rows, positions)
                return known[-1] if endings is None else endings.over(known, logits)[1]
            index = upload(list(indices), logits.device)
            # The second attempt takes new random numbers: the first led to a forbidden token, so they are no
            # longer independent of the mask. The grammar has also refused an end of thinking that was due.
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
        all_allowed = min(choice.values) >= 0
        valid = choice.tokens if all_allowed else choice.tokens.clamp(min=0)
        return Selection(valid, choice.tokens, batch, unmasked, choice)

    def _jump_limit(self, slot: int) -> int:
        """Returns how many tokens a grammar may force after the selected one.

        0 if other parameters may forbid some, since only a step checks these. The caller also forbids
        them with log-probabilities, which need the forward pass skipped by forced tokens.
        """
        return 0 if self._batch.sampling.restricts(slot) else self._batch.free_positions(slot) - 1

    def outputs(
        self, slots: Sequence[int], selection: Selection, compute_logprobs: ComputeLogprobs
    ) -> Iterator[SlotOutput]:
        """Yields each slot's output, and appends forced tokens to the batch.

        Call it after the batch has the selected tokens. `slots` are those of the real rows.
        """
        batch, choice = selection.batch, selection.choice
        rows = compute_logprobs(selection.logits, selection.tokens) if batch.reports else None
        logprobs = [None] * len(slots) if rows is None else unpack_logprobs(rows, batch.logprobs)
        # Reading the device again would wait for all launches after the choice.
        tokens = selection.reported[: len(slots)].tolist() if choice is None else choice.values[: len(slots)]
        for slot, token, entry in zip(slots, tokens, logprobs, strict=True):
            error = choice.errors.get(slot) if choice else None
            if error is not None or token < 0:
                yield SlotOutput(slot, error=error) if error else output_of(slot, token)
                continue
            forced = choice.forced.get(slot, ()) if choice else ()
            if forced:
                self._batch.append(slot, forced)
            yield SlotOutput(slot, (token, *forced), () if entry is None else (entry,))


def _keeping(mask: torch.Tensor, known: Sequence[torch.Tensor], draw: Sample) -> Sample:
    """Returns a sampler that keeps known tokens, without and with marks, in rows of a mask, bool [rows]."""

    def sample_others(
        needs: SamplingOps, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tokens = draw(needs, logits, rows, positions)
        return tuple(torch.where(mask, kept, token) for kept, token in zip(known, tokens, strict=True))

    return sample_others


Forward = Callable[..., tuple[torch.Tensor, ...]]
"""Takes rows, int64 [bucket], and on a later stage of a pipeline its hidden states. Returns logits, float32
[bucket, vocab], the rows' positions, int64 [bucket], and the most probable tokens if the device has found
them, without and with marks. Before the last stage, returns hidden states alone."""


@dataclass(frozen=True)
class DecodeStep:
    """The parts of a bucket's step."""

    forward: Forward
    """Runs the model. If captured, it returns the most probable tokens at no extra launch."""
    advance: Callable[..., tuple[torch.Tensor, ...]]
    """Takes rows and their new tokens, int64 [bucket]; records the tokens in the batch."""
    sample: Sample
    """Samples tokens for steps in which the most probable tokens are not enough."""
    end_thoughts: EndThoughts
    """Finds the tokens that end thoughts, for steps with budgets."""
    compute_logprobs: ComputeLogprobs
    """Computes the rows' log-probabilities."""


def logits_and_best(
    logits: Callable[[torch.Tensor], torch.Tensor], device: Device, *, compiled: bool
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Returns a function from hidden states [rows, hidden] to logits [rows, vocab].

    It also returns the most probable tokens, int64 [rows], if a compiling device finds them before the
    logits travel.
    """
    argmax = device.compile_argmax() if compiled else None

    def run(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        computed = logits(hidden)
        if argmax is None:
            return (computed,)
        return computed, argmax(computed).to(device.torch_device, torch.int64)

    return run


def make_sampler(batch: Batch) -> Sample:
    """Returns a function that samples for the slots of a batch."""

    def sample_rows(
        needs: SamplingOps, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(batch.sampling, needs, logits, rows, positions + 1)

    return sample_rows


def plain_step(batch: Batch, forward: Forward) -> DecodeStep:
    """Returns a step that runs operator by operator."""
    return DecodeStep(
        forward, batch.advance_rows, make_sampler(batch), batch.sampling.thinking.advance, compute_logprobs
    )


def captured_step(
    device: Device, batch: Batch, forward: Forward, padding: Sequence[torch.Tensor]
) -> DecodeStep:
    """Returns a step with parts captured by the device, on the last stage.

    Args:
        device: a device that captures.
        batch: with its tables allocated and its workspace at full size: captured parts hold their addresses.
        forward: runs the model.
        padding: the inputs of `forward` to capture on; all rows are padding.
    """

    def forward_and_argmax(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, positions, *_ = forward(*rows)
        tokens = argmax_rows(logits)
        return logits, positions, tokens, mark_not_finite(tokens, logits.gather(1, tokens[:, None])[:, 0])

    captured = device.capture(forward_and_argmax, padding)
    # The parts captured below read these results in place.
    logits, positions, tokens, _ = captured(*padding)
    captured_logprobs = device.capture(lambda tokens: (compute_logprobs(logits, tokens),), [tokens])

    def compute(given: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # A grammar masks the step's logits in place, so its caller passes an earlier copy.
        return captured_logprobs(tokens)[0] if given is logits else compute_logprobs(given, tokens)

    return DecodeStep(
        captured,
        device.capture(batch.advance_rows, [padding[0], tokens]),
        _captured_sampler(device, batch, logits, padding[0], positions),
        device.capture(batch.sampling.thinking.advance, [padding[0], positions]),
        compute,
    )


def _captured_sampler(
    device: Device, batch: Batch, logits: torch.Tensor, padding: torch.Tensor, positions: torch.Tensor
) -> Sample:
    """Captures a few variants of sampling. Each step runs the cheapest sufficient variant."""
    sample_rows, captured = make_sampler(batch), []
    for needs in batch.sampling.variants():

        def sample_variant(rows: torch.Tensor, needs: SamplingOps = needs) -> tuple[torch.Tensor, ...]:
            return sample_rows(needs, logits, rows, positions)

        captured.append((needs, device.capture(sample_variant, [padding])))

    def sample_captured(
        needs: SamplingOps, _: torch.Tensor, rows: torch.Tensor, __: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return next(variant for covered, variant in captured if covered.covers(needs))(rows)

    return sample_captured


class PromptLogprobs:
    """Computes the prompt log-probabilities of chunks, for slots with such a request."""

    def __init__(
        self, batch: Batch, shapes: ShapeConfig, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Starts without slots. `logits` takes at most as many rows as the largest bucket."""
        self._batch = batch
        self._most_rows = shapes.decode_buckets[-1]
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

        Works in pieces of the largest bucket's rows, the most logits that fit into memory. The last piece
        starts earlier, for equal shapes. `hidden` are the chunk's states [chunk, hidden].
        """
        if work.slot not in self._wanted:
            return ()
        count, prompt_len = self._wanted[work.slot]
        chunk = len(hidden)
        rows = min(chunk, self._most_rows)
        found = self._batch.tokens_of(
            work.slot, work.start + 1, min(work.start + work.num_tokens + 1, prompt_len)
        )
        targets = torch.zeros(chunk, dtype=torch.int64, device=found.device)
        targets[: len(found)] = found
        hidden = hidden.to(found.device)
        logprobs: list[common_pb2.TokenLogprobs] = []
        for start in range(0, len(found), rows):
            piece = slice(min(start, chunk - rows), min(start, chunk - rows) + rows)
            wanted = min(start + rows, len(found)) - start
            logits = self._logits(hidden[piece]).to(targets.device)
            computed = compute_logprobs(logits, targets[piece])[start - piece.start :]
            logprobs += [each for each in unpack_logprobs(computed, [count] * wanted) if each is not None]
        return logprobs
