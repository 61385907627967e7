"""A device that computes deterministic tokens and checks every plan, and what may kill or fail it."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from protos.errors import TriptychError
from protos.steps import (
    Admission,
    BlockCopy,
    Decode,
    GroupKind,
    Prefill,
    SlotOutput,
    StepPlan,
    StepResult,
    slots_of,
    without_slots,
)
from protos.triptych.v1 import common_pb2
from scheduler_svc.kv.block_pool import NULL_BLOCK_ID
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig

if TYPE_CHECKING:
    from tests.support.scheduler.simulated_adapters import SimulatedAdapters

Kind: TypeAlias = Literal["admit", "chunk", "decode"]


class DeviceLostError(Exception):
    """A sequence, whose id this is, has killed the device."""


class StepFailedError(Exception):
    """A sequence, whose id this is, has made the device's step fail; the device runs on."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the device is about to do for one sequence."""

    kind: Kind
    request_id: str
    end: int
    """Tokens that are computed afterwards."""


def reaches(kind: Kind, name: str, end: int = 0) -> Callable[[Moment], bool]:
    """Returns what recognizes a moment: its kind, how the request's name begins, and its computed tokens."""
    return lambda moment: moment.kind == kind and moment.request_id.startswith(name) and moment.end >= end


def never(_: object) -> None:
    """Does no harm: nothing dies, fails, is refused or asks for log-probabilities."""


def next_token(context: Sequence[int], sequence: int = 0, weights: str = "", vocab_size: int = 97) -> int:
    """A deterministic "model": the next token depends on the context, the sequence and the adapter."""
    digest = hashlib.blake2b(f"{(sequence, *context)}{weights}".encode(), digest_size=4).digest()
    return 3 + int.from_bytes(digest, "little") % (vocab_size - 3)


def _contexts(tokens: Sequence[int], contexts: list[int], weights: str) -> None:
    """Extends ``contexts`` to the tokens; a context identifies the adapter and all tokens so far."""
    for position in range(len(contexts), len(tokens)):
        contexts.append(hash((contexts[-1] if contexts else weights or None, tokens[position])))


@dataclass
class _Slot:
    admission: Admission
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    weights: str
    """Of its adapter; empty for the base model."""
    contexts: list[int] = field(default_factory=list)


@dataclass
class SimulatedDevice:
    """Executes plans as a worker does; keeps, per block, the contexts from which its KV was computed.

    Before each step it checks that the blocks hold exactly the contexts that the step's queries see. A wrong
    block table, a block that is shared while written, a missing copy and a stale prefix hit all fail at once.
    """

    shapes: ShapeConfig
    groups: Sequence[KvGroup] = (KvGroup(GroupKind.FULL),)
    hit_unit: int = 0
    """Tokens between two possible lengths of a prefix hit; 0 for those of a chunk."""
    slots: dict[int, _Slot] = field(default_factory=dict)
    memory: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    prefilled: int = 0
    copied: int = 0
    ran: set[tuple[str, int]] = field(default_factory=set)
    jump: int = 0
    """Tokens that follow a sampled even one at once, as a grammar's forced tokens do; the same as without."""
    passes: int = 0
    kills: Callable[[Moment], bool | None] = never
    """Whether the device dies instead of doing this."""
    fails: Callable[[Moment], bool | None] = never
    """Whether the step fails instead of doing this."""
    refuses: Callable[[Moment], TriptychError | None] = never
    """Why an admission is refused, if it is; the slot is then skipped until its release."""
    reports: Callable[[str], bool | None] = never
    """Whether a request asks for log-probabilities: results of its steps come as outputs."""
    dead: set[int] = field(default_factory=set)
    """Slots whose admission was refused or whose step failed, until their release."""
    garbage: set[tuple[int, int]] = field(default_factory=set)
    """Blocks, with their groups, that a copy of a failed plan should have filled. The results of requests
    that have them are ignored."""
    broken: int = 0
    """The next plans that fail; they free their slots before."""
    adapters: "SimulatedAdapters | None" = None
    """Its LoRA adapters, if it runs any."""

    def run(self, plan: StepPlan) -> StepResult:
        """Applies a plan and runs the first step of its work."""
        for slot in plan.release:
            self.slots.pop(slot, None)
            self.dead.discard(slot)
            if self.adapters is not None:
                self.adapters.release(slot)
        try:
            return self._run(plan)
        except StepFailedError:
            self.dead.update(admission.slot for admission in plan.admit)
            self.dead.update(growth.slot for growth in plan.grow)
            self.dead.update(slots_of(plan.work))
            self.garbage.update((copy.group_id, copy.target_block) for copy in plan.copies)
            raise

    def _run(self, plan: StepPlan) -> StepResult:
        needed = {growth.slot for growth in plan.grow}.union(slots_of(plan.work))
        if self.broken and needed - self.dead:
            self.broken -= 1
            raise StepFailedError("the device")
        for copy in plan.copies:
            self._copy(copy)
        refusals = []
        for admission in plan.admit:
            self._survive("admit", admission, admission.num_computed_tokens)
            error = self.refuses(Moment("admit", admission.request_id, admission.num_computed_tokens))
            try:
                if error is not None:
                    raise error
                self._admit(admission)
            except TriptychError as refusal:
                self.dead.add(admission.slot)
                refusals.append(SlotOutput(admission.slot, error=refusal))
        for growth in plan.grow:
            if growth.slot not in self.dead:
                self.slots[growth.slot].tables[growth.group_id].extend(growth.block_ids)
                for block in growth.block_ids:
                    self._clear(growth.group_id, block)
        return self._with_refusals(plan, self.run_work(plan), refusals)

    def run_work(self, plan: StepPlan) -> StepResult:
        """Runs one step of the plan's work, without slots that are dead or not ready."""
        work = without_slots(plan.work, self.dead)
        if work is None:
            return StepResult(plan.step, num_steps=0)
        if isinstance(work, Prefill):
            return self._run_chunk(plan.step, work)
        assert isinstance(work, Decode), "this device generates"
        assert len(set(work.slots)) == len(work.slots) <= work.bucket
        assert work.bucket in self.shapes.buckets
        ready = [slot for slot in work.slots if self.slots[slot].computed == len(self.slots[slot].tokens) - 1]
        if not ready:
            return StepResult(plan.step, num_steps=0)
        self.ran.add(("decode", work.bucket))
        for slot in ready:
            state = self.slots[slot]
            end = state.computed + 1
            self._survive("decode", state.admission, end)
            self._compute(state, end)
        self.passes += 1
        result = self._result(plan.step, ready)
        if tuple(ready) == tuple(slots_of(plan.work)):
            return result
        return StepResult(plan.step, outputs=_outputs_of(result, ready))

    def _with_refusals(
        self, plan: StepPlan, result: StepResult, refusals: Sequence[SlotOutput]
    ) -> StepResult:
        """Returns the result as outputs if some admissions were refused."""
        if not refusals:
            return result
        outputs = _outputs_of(result, slots_of(plan.work))
        return StepResult(plan.step, outputs=(*refusals, *outputs), num_steps=result.num_steps)

    def _run_chunk(self, step: int, chunk: Prefill) -> StepResult:
        start, num_tokens, state = chunk.start, chunk.num_tokens, self.slots[chunk.slot]
        assert start == state.computed
        unit = math.gcd(self.hit_unit, self.shapes.chunk)
        assert start % unit == 0 or self.jump, "chunks begin where a prefix hit or another chunk may end"
        assert chunk.bucket in self.shapes.chunk_sizes
        assert 1 <= num_tokens <= chunk.bucket
        self.ran.add(("prefill", chunk.bucket))
        self._survive("chunk", state.admission, start + num_tokens)
        self.prefilled += num_tokens
        self._compute(state, start + num_tokens)
        assert chunk.sample == (state.computed == len(state.tokens))
        self.passes += 1
        return self._result(step, (chunk.slot,) if chunk.sample else ())

    def _survive(self, kind: Kind, admission: Admission, end: int) -> None:
        moment = Moment(kind, admission.request_id, end)
        if self.kills(moment):
            raise DeviceLostError(admission.request_id)
        if self.fails(moment):
            raise StepFailedError(admission.request_id)

    def _copy(self, copy: BlockCopy) -> None:
        self.copied += 1
        self.garbage.discard((copy.group_id, copy.target_block))
        assert copy.source_block != NULL_BLOCK_ID != copy.target_block
        self.memory[copy.group_id, copy.target_block] = list(self.memory[copy.group_id, copy.source_block])

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, f"slot {admission.slot} is taken"
        assert 0 <= admission.slot < self.shapes.max_num_seqs
        assert admission.num_computed_tokens < len(admission.token_ids)
        tables = [list(admission.blocks[group_id]) for group_id in sorted(admission.blocks)]
        weights = ""
        if admission.adapter_id:
            assert self.adapters is not None
            weights = self.adapters.admit(admission.slot, admission.adapter_id)
        state = _Slot(admission, list(admission.token_ids), admission.num_computed_tokens, tables, weights)
        self.slots[admission.slot] = state
        written = -(-admission.num_computed_tokens // self.shapes.block_size)
        for group, table in enumerate(tables):
            for block in table[written:]:
                self._clear(group, block)
            if any((group, block) in self.garbage for block in table):
                self.dead.add(admission.slot)

    def _clear(self, group_id: int, block: int) -> None:
        self.memory.pop((group_id, block), None)
        self.garbage.discard((group_id, block))

    def _compute(self, state: _Slot, end: int) -> None:
        """Runs one graph for one row: reads what is visible, writes positions up to ``end``."""
        _contexts(state.tokens, state.contexts, state.weights)
        start = state.computed
        for group_id, group in enumerate(self.groups):
            if group.kind is GroupKind.IN_PLACE_WINDOW:
                (block,) = state.tables[group_id]
                self._check_alone(group_id, block)
                held = self.memory.get((group_id, block), [])
                first = max(0, start - group.window)
                assert held == state.contexts[first:start], f"window of group {group_id} at {start}"
                self.memory[group_id, block] = [*held, *state.contexts[start:end]][-group.window :]
                continue
            first = max(0, start - group.window + 1) if group.window else 0
            for position in range(first, start):
                cells = self.memory.get(
                    (group_id, state.tables[group_id][position // self.shapes.block_size]), []
                )
                offset = position % self.shapes.block_size
                assert offset < len(cells), f"position {position} of group {group_id} was never written"
                assert cells[offset] == state.contexts[position], f"position {position} of group {group_id}"
            for position in range(start, end):
                index, offset = divmod(position, self.shapes.block_size)
                block = state.tables[group_id][index]
                self._check_alone(group_id, block)
                cells = self.memory.setdefault((group_id, block), [None] * self.shapes.block_size)
                cells[offset] = state.contexts[position]
        state.computed = end

    def _check_alone(self, group_id: int, block: int) -> None:
        assert block != NULL_BLOCK_ID
        sharers = [other for other in self.slots.values() if block in other.tables[group_id]]
        # These tables keep blocks behind a window, which other slots may have by now.
        if self.groups[group_id].window:
            sharers = [other for other in sharers if block in self._live(other, group_id)]
        assert len(sharers) == 1, (
            f"block {block} of group {group_id} is written while {len(sharers)} slots use it"
        )

    def _live(self, state: _Slot, group_id: int) -> list[int]:
        group, table = self.groups[group_id], state.tables[group_id]
        if group.kind is GroupKind.IN_PLACE_WINDOW:
            return table
        return table[max(0, state.computed - group.window + 1) // self.shapes.block_size :]

    def _result(self, step: int, slots: Sequence[int]) -> StepResult:
        tokens = [self._sample(self.slots[slot]) for slot in slots]
        outputs = []
        for slot, token in zip(slots, tokens, strict=True):
            state = self.slots[slot]
            reported = self.reports(state.admission.request_id)
            room = self.shapes.max_model_len - len(state.tokens)
            jumps = self.jump and not reported and token % 2 == 0
            forced = [self._sample(state) for _ in range(min(self.jump, room) if jumps else 0)]
            entries = (common_pb2.TokenLogprobs(logprob=-1.0, rank=1),) if reported else ()
            outputs.append(SlotOutput(slot, (token, *forced), entries))
        if all(len(output.token_ids) == 1 and not output.logprobs for output in outputs):
            return StepResult(step, tuple(tokens))
        return StepResult(step, outputs=tuple(outputs))

    def _sample(self, state: _Slot) -> int:
        token = next_token(state.tokens, state.admission.sequence, state.weights)
        state.tokens.append(token)
        return token


def _outputs_of(result: StepResult, slots: Sequence[int]) -> Sequence[SlotOutput]:
    """Returns a result of these slots as outputs."""
    if not result.token_ids:
        return result.outputs
    return [SlotOutput(slot, (token,)) for slot, token in zip(slots, result.token_ids, strict=True)]
