"""Chooses tokens for slots with a grammar.

A token is drawn first and then looked up in the grammar, which takes microseconds. Only if the grammar
rejects it is the mask built and applied, and the row drawn again with different random numbers. The
distribution is the same as with the mask applied first:

- Greedy: if the most probable token is allowed, it is the most probable of the allowed tokens.
- Sampled: an allowed token is drawn with its own probability, or, after a rejected draw, with its share of
  the allowed tokens. Together that is its share of the allowed tokens.

Filters comparing tokens (`top_p`, `top_k`, `min_p`) need the mask first.

Forced tokens need no draw. They are searched while a device running ahead still computes the step's logits,
so that only the look-up of drawn tokens delays the next step.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, thread_time
from typing import Final, TypeAlias

import numpy as np
import torch

from protos.errors import Internal, InvalidArgument, TriptychError, Unavailable
from protos.step_messages import result_from_proto, result_to_proto
from protos.steps import SlotOutput, StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from worker_svc.devices.base import is_host, takes_page_locked, upload
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.limits import PARAM
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec
from worker_svc.pending_step import NOT_FINITE
from worker_svc.ranks.group import Channel

# A step within this time is free: it is what each token adds to its request's budget.
_FREE_S: Final = 0.001

Draw = Callable[[Sequence[int] | None], torch.Tensor]
"""Draws a token for each given row: int64 [rows], -1 where no token is allowed.

It reads the current logits of the step. `None` draws all rows; by then only rows with filters that need the
mask are masked. The caller does not modify the result.
"""


@dataclass(frozen=True)
class Choice:
    """The tokens chosen in a step."""

    tokens: torch.Tensor
    """int64 [bucket]; -1 where no token is allowed. The row of a slot with an error is meaningless."""
    values: Sequence[int]
    """The same on the host."""
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens forced after the chosen token, by slot."""
    errors: Mapping[int, TriptychError] = field(default_factory=dict)
    """Why a slot got no token, by slot."""


class Masks:
    """A bit per token and row, set where the token is allowed.

    Lives on the host, where matchers write it.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        shape = num_rows + 1, math.ceil(vocab_size / 32)
        pinned = takes_page_locked(device)
        self.rows = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        """int32 [num_rows + 1, ceil(vocab / 32)]; the last row is spare.

        Pinned if the device copies from it.
        """
        # Masks being copied to the device. A step waits for its drawn tokens, and so for this copy, before
        # the next step overwrites the buffer.
        self._staging = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

    @property
    def spare_row(self) -> int:
        """Index of a row unused by steps."""
        return len(self.rows) - 1

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Sets the logits of forbidden tokens to -inf.

        Args:
            logits: float32 [batch, vocab]; modified.
            rows: ascending indices into both `logits` and the masks; other rows stay unchanged.
        """
        if not rows:
            return
        if is_host(self._device):
            for row in rows:
                bits = np.unpackbits(~self.rows[row].numpy().view(np.uint8), bitorder="little")
                forbidden = torch.from_numpy(bits[: self._vocab_size].view(np.bool_))
                logits[row].masked_fill_(forbidden, -torch.inf)
            return
        staged = torch.index_select(self.rows, 0, torch.tensor(rows), out=self._staging[: len(rows)])
        words = staged.to(self._device, non_blocking=True)
        index = upload(rows, self._device)
        shifts = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed = (words[:, :, None] >> shifts) & 1
        forbidden = allowed.view(len(rows), -1)[:, : logits.shape[1]] == 0
        logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


class BatchClock:
    """Measures one pass over the rows of a step.

    Asking for a thread's CPU time is a system call, which takes as long as looking up a token. So the pass is
    measured as a whole, and each row's part by the wall clock, which costs a twentieth of that.
    """

    def __init__(self) -> None:
        self._cpu_s = thread_time()
        self.laps = [perf_counter()]
        """When the pass started and when each part ended; the caller appends the latter."""

    def shares(self) -> Sequence[float]:
        """Returns the CPU time of each part in seconds; nothing if the pass was short enough to be free.

        A part interrupted by another process gets a larger share. All shares together are the pass's CPU
        time.
        """
        spent_s = thread_time() - self._cpu_s
        if spent_s <= _FREE_S:
            return ()
        ends = self.laps
        scale = spent_s / (ends[-1] - ends[0])
        return [(end - start) * scale for start, end in itertools.pairwise(ends)]


class Constraints:
    """The matchers of a runner's slots. Not thread-safe."""

    def __init__(
        self, compiler: GrammarCompiler, *, num_slots: int, max_rows: int, vocab_size: int, end_ids: Sequence[int],
        device: torch.device, min_jump: int,
    ) -> None:  # fmt: skip
        """Starts with all slots unconstrained.

        `max_rows` is the largest number of rows in a step, `min_jump` the shortest chain of forced tokens to
        emit at once; 0 emits only chains ending the sequence.
        """
        self._compiler = compiler
        self._end_ids = tuple(end_ids)
        self._min_jump = min_jump
        self._matchers: list[Matcher | None] = [None] * num_slots
        self._count = 0
        self._masks = Masks(max_rows, vocab_size, device)
        self.num_redrawn = 0
        """Tokens drawn a second time, under a mask."""
        self.num_forced = 0
        """Tokens emitted without a forward pass."""
        self.seconds = 0.0
        """Time for matching and masks, in which other threads may have run, too."""

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        """Constrains a slot, starting after the tokens already generated.

        Raises:
            Unavailable: the compiler has no such grammar, or evicted it; it must be compiled again.
            InvalidArgument: the grammar does not allow `output`.
        """
        grammar = self._compiler.find(spec)
        if grammar is None:
            raise Unavailable("the grammar is not compiled, or was evicted", param=PARAM)
        self._matchers[slot] = Matcher(grammar, self._end_ids, output, partial(self._compiler.refuse, spec))
        self._count += 1

    def release(self, slot: int) -> None:
        """Frees a slot, which may be free or unconstrained."""
        if self._count and self._matchers[slot] is not None:
            self._matchers[slot] = None
            self._count -= 1

    def any_constrained(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots is constrained."""
        return self._count > 0 and any(self._matchers[slot] is not None for slot in slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Chooses a token for each row of a step and advances the constrained slots' matchers.

        Args:
            slots: slots of the rows without padding.
            logits: float32 [bucket, vocab]; rows with a mask are modified.
            draw: draws from `logits`.
            masked_first: whether a row's filters need the mask first.
            room: tokens fitting into each slot's sequence after the chosen token.
        """
        step = _Step(slots, [self._matchers[slot] for slot in slots])
        self._take_chains(step, room)
        self._mask([row for row in step.rows if masked_first[row]], step, logits)
        tokens = draw(None)
        step.read(tokens)
        for row in [row for row in step.rows if step.values[row] == NOT_FINITE]:
            step.leave(row)
        rejected = []
        for row in _rejected(step, step.rows):
            if masked_first[row]:
                self._end_or_refuse(row, step)
            else:
                rejected.append(row)
        if rejected:
            self.num_redrawn += len(rejected)
            self._mask(rejected, step, logits)
            for row, token in zip(rejected, draw(rejected).tolist(), strict=True):
                step.replace(row, token)
            for row in _rejected(step, step.sound(rejected)):
                self._end_or_refuse(row, step)
        self._take_ends(step, room)
        self.num_forced += sum(map(len, step.forced.values()))
        self.seconds += step.seconds
        return Choice(step.written(tokens), step.values, step.forced, step.errors)

    def _take_chains(self, step: "_Step", room: Sequence[int]) -> None:
        if not self._min_jump:
            return
        rows = [row for row in step.rows if room[row] > 0 and not step.matchers[row].ended]
        for row in _without_choice(step, rows):
            with step.failing(row):
                chain = step.matchers[row].take_chain(
                    self._masks.rows, self._masks.spare_row, room[row] + 1, self._min_jump + 1
                )
                if chain:
                    step.settle(row, chain)

    def _take_ends(self, step: "_Step", room: Sequence[int]) -> None:
        """Takes the end after a chosen token where nothing else may follow, which saves a step."""
        rows = [row for row in step.rows if step.matchers[row].may_end and room[row] > 0]
        if not rows:
            return
        for row in _without_choice(step, rows):
            with step.failing(row):
                end = step.matchers[row].accept_forced_end(self._masks.rows, self._masks.spare_row)
                if end is not None:
                    step.forced[step.slots[row]] = (end,)

    def _mask(self, rows: Sequence[int], step: "_Step", logits: torch.Tensor) -> None:
        if not rows:
            return
        started = perf_counter()
        for row in rows:
            with step.failing(row):
                step.matchers[row].fill_mask(self._masks.rows, row)
        self._masks.apply(logits, rows)
        step.seconds += perf_counter() - started

    def _end_or_refuse(self, row: int, step: "_Step") -> None:
        """Replaces a token that was drawn under the mask and rejected by a forced end, or fails the row."""
        matcher = step.matchers[row]
        with step.failing(row):
            end = matcher.accept_forced_end(self._masks.rows, self._masks.spare_row)
            if end is not None:
                # Only an end token may follow, but min_tokens or a bias forbids it. The grammar wins.
                step.replace(row, end)
                return
            if matcher.ended:
                raise Internal("the plan continues a request after the end of its grammar")
            # Other parameters forbid every token that the grammar allows, or the grammar is at a dead end.
            raise InvalidArgument(
                "no token is left that both the grammar and the request's other parameters"
                " (allowed_token_ids, bad_words,"
                " logit_bias) allow",
                param=PARAM,
            )


class _Step:
    """The rows of a step while their tokens are chosen."""

    def __init__(self, slots: Sequence[int], matchers: Sequence[Matcher | None]) -> None:
        self.slots = slots
        self.matchers = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        self.rows = list(self.matchers)
        """Constrained rows, ascending, without failed rows and rows with a settled token."""
        self.values: list[int] = []
        """The tokens of all rows, once `read` was called."""
        self.forced: dict[int, tuple[int, ...]] = {}
        self.errors: dict[int, TriptychError] = {}
        self.seconds = 0.0
        # Tokens that differ from the drawn ones, by row.
        self._replaced: dict[int, int] = {}

    def settle(self, row: int, chain: Sequence[int]) -> None:
        self.leave(row)
        self._replaced[row] = chain[0]
        self.forced[self.slots[row]] = tuple(chain[1:])

    def read(self, tokens: torch.Tensor) -> None:
        self.values = tokens.tolist()
        for row, token in self._replaced.items():
            self.values[row] = token

    def replace(self, row: int, token: int) -> None:
        self.values[row] = self._replaced[row] = token

    def written(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the drawn tokens with replacements written over them."""
        if not self._replaced:
            return tokens
        rows, values = upload([tuple(self._replaced), tuple(self._replaced.values())], tokens.device)
        return tokens.index_put((rows,), values)

    def charge(self, rows: Sequence[int], clock: BatchClock) -> None:
        self.seconds += clock.laps[-1] - clock.laps[0]
        for row, seconds in zip(rows, clock.shares(), strict=False):
            with self.failing(row):
                self.matchers[row].charge(seconds)

    def sound(self, rows: list[int]) -> list[int]:
        return [row for row in rows if self.slots[row] not in self.errors] if self.errors else rows

    @contextlib.contextmanager
    def failing(self, row: int) -> Iterator[None]:
        try:
            yield
        except TriptychError as error:
            self.fail(row, error)

    def fail(self, row: int, error: TriptychError) -> None:
        self.errors[self.slots[row]] = error
        self.leave(row)

    def leave(self, row: int) -> None:
        """Lets a row keep the token or the mark that it has."""
        # A new list: the old one may be iterated.
        self.rows = [other for other in self.rows if other != row]


def _rejected(step: _Step, rows: Sequence[int]) -> list[int]:
    """Offers the rows' tokens to their grammars; returns the rows whose grammar rejects it."""
    rejected, matchers, values, clock = [], step.matchers, step.values, BatchClock()
    laps = clock.laps
    for row in rows:
        try:
            if not matchers[row].accept(values[row]):
                rejected.append(row)
        except TriptychError as error:
            step.fail(row, error)
        laps.append(perf_counter())
    step.charge(rows, clock)
    return step.sound(rejected)


def _without_choice(step: _Step, rows: Sequence[int]) -> list[int]:
    """Returns the rows for which only a mask can tell whether there is a choice."""
    unclear, matchers, clock = [], step.matchers, BatchClock()
    laps = clock.laps
    for row in rows:
        try:
            if not matchers[row].has_choice():
                unclear.append(row)
        except TriptychError as error:
            step.fail(row, error)
        laps.append(perf_counter())
    step.charge(rows, clock)
    return step.sound(unclear)


class LeadingConstraints:
    """The grammars of the rank that chooses. Tells the other ranks of its stage what it chose.

    Matching depends on the host's time limits and on which grammars a cache still has, so ranks might choose
    differently. A step without a constrained row needs no message. A request that cannot be constrained keeps
    its slot, because all ranks must run the same rows, and gets its error in place of its first token.
    """

    def __init__(self, own: Constraints, channel: Channel, *, has_peers: bool) -> None:
        self._own = own
        self._channel = channel if has_peers else None
        self._refused: dict[int, TriptychError] = {}

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        """Constrains a slot, or notes why that is impossible."""
        try:
            self._own.admit(slot, spec, output)
        except TriptychError as error:
            self._refused[slot] = error

    def release(self, slot: int) -> None:
        """Frees a slot, which may be free or unconstrained."""
        self._refused.pop(slot, None)
        self._own.release(slot)

    def any_constrained(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots is constrained, or should have been."""
        return self._own.any_constrained(slots) or not self._refused.keys().isdisjoint(slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Chooses a token for each row of a step; see `Constraints.choose`."""
        choice = self._own.choose(slots, logits, draw, masked_first=masked_first, room=room)
        if self._refused:
            refused = {slot: self._refused[slot] for slot in slots if slot in self._refused}
            choice = Choice(choice.tokens, choice.values, choice.forced, {**choice.errors, **refused})
        if self._channel is not None:
            outputs = tuple(
                SlotOutput(slot, (max(value, 0), *choice.forced.get(slot, ())), error=choice.errors.get(slot))
                for slot, value in zip(slots, choice.values, strict=False)
            )
            message = result_to_proto(StepPlan(0), StepResult(0, outputs=outputs))
            self._channel.send(message.SerializeToString())
        return choice


class FollowingConstraints:
    """The other ranks' view: which slots are constrained, and what the chooser chose for them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slots: set[int] = set()

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:  # noqa: ARG002
        """Notes that a slot is constrained."""
        self._slots.add(slot)

    def release(self, slot: int) -> None:
        """Frees a slot, which may be free or unconstrained."""
        self._slots.discard(slot)

    def any_constrained(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots is constrained."""
        return not self._slots.isdisjoint(slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Receives the token of each row of a step."""
        del draw, masked_first, room
        result = result_from_proto(worker_pb2.StepResult.FromString(self._channel.receive()))
        outputs = dict(zip(slots, result.outputs, strict=True))
        values = [output.token_ids[0] for output in result.outputs]
        values += [0] * (logits.shape[0] - len(values))
        return Choice(
            upload(values, logits.device),
            values,
            {
                slot: tuple(output.token_ids[1:])
                for slot, output in outputs.items()
                if len(output.token_ids) > 1
            },
            {slot: output.error for slot, output in outputs.items() if output.error is not None},
        )


StepConstraints: TypeAlias = Constraints | LeadingConstraints | FollowingConstraints
"""What a step needs of grammars: on one rank, on the rank that chooses, or on its peers."""
