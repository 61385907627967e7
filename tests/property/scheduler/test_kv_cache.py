"""Random operations on a KV cache, checked after every step against a naive memory, ``KvModel``.

The machine stands for the scheduler and the device. It plans a step (grow, take the copies, work), lets
anything else happen while the step runs, and applies its result. The model does what the plans say.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.steps import GroupKind
from scheduler_svc.kv.cache import CacheOptions, ChunkStarts, KvCache
from scheduler_svc.kv.copies import PendingCopy
from scheduler_svc.kv.prefix_index import KeepEnds, KeepJunctions
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup, ShapeConfig
from tests.support.property_settings import machine
from tests.support.scheduler.factories import FULL, make_sequence, make_shapes
from tests.support.scheduler.kv_cache_model import KvModel, contexts_of

pytestmark = pytest.mark.property

MAX_LEN = 40

# Windows below, at and above a block of 4 or 8, both multiples of it and not.
GROUPS = (
    FULL,
    *(KvGroup(GroupKind.PAGED_WINDOW, window) for window in (1, 2, 3, 4, 5, 8, 9, 14)),
    *(KvGroup(GroupKind.IN_PLACE_WINDOW, window) for window in (1, 2, 4)),
)
MIXES = st.one_of(
    st.sampled_from(GROUPS).map(lambda group: (group,)),
    st.lists(st.sampled_from(GROUPS), min_size=1, max_size=2).map(lambda groups: (FULL, *groups)),
    st.lists(st.sampled_from(GROUPS), min_size=2, max_size=3).map(tuple),
)
# A trunk with branches: prefixes repeat and diverge at any position.
TOKENS = st.builds(lambda trunk, branch: [3] * trunk + [4] * branch, st.integers(1, 24), st.integers(0, 6))


@dataclass
class Flight:
    """A step in flight: its sequence, what it computes, and the copies that its plan carries."""

    sequence: SequenceKv | None
    start: int
    end: int
    chunk: bool
    copies: Sequence[PendingCopy]
    windows: list[tuple[int, int, bytes, int]]


class KvCacheMachine(RuleBasedStateMachine):
    """Waiting and running requests, forks, crashes and failed steps on one cache."""

    @initialize(
        chunk=st.sampled_from([2, 4, 8]), block=st.sampled_from([4, 8]), groups=MIXES, room=st.integers(0, 14),
        sub_block=st.booleans(), generated=st.booleans(), ends=st.booleans(),
        copies=st.sampled_from([True, True, False]), starts=st.sampled_from(["whole", "anywhere", "exact"]),
        finest=st.sampled_from([1, 2, 4]),
    )  # fmt: skip
    def start(
        self, chunk: int, block: int, groups: tuple[KvGroup, ...], room: int, sub_block: bool, generated: bool, ends: bool,
        copies: bool, starts: ChunkStarts, finest: int,
    ) -> None:  # fmt: skip
        self.shapes: ShapeConfig = make_shapes(max_model_len=MAX_LEN, chunk=chunk, block_size=block)
        self.shapes.check(DeviceLimits(MAX_LEN, 1, 4, 8), groups)
        self.groups = groups
        self.options = CacheOptions(True, sub_block, generated, copies, starts, finest)
        self.keep = KeepEnds if ends else KeepJunctions
        # Room for the longest sequence and a little more: memory is short.
        self.num_blocks = [MAX_LEN // block + 1 + room] * len(groups)
        self.room = room
        self.waiting: list[SequenceKv] = []
        self.boot()

    def boot(self) -> None:
        self.kv = KvCache(
            self.shapes, self.groups, self.num_blocks, model="m", options=self.options, keep=self.keep()
        )
        slides = any(group.kind is GroupKind.IN_PLACE_WINDOW for group in self.groups)
        units = {
            "whole": self.shapes.chunk,
            "anywhere": min(self.shapes.chunk_sizes),
            "exact": min(self.options.finest_hit, self.shapes.block_size),
        }
        self.unit = units["whole" if slides else self.options.chunk_starts]
        if not (self.options.sub_block and self.options.copies_blocks):
            self.unit = max(self.unit, self.shapes.block_size)
        hash_block_size = min(self.unit, self.shapes.block_size)
        self.model = KvModel(self.shapes, self.groups, hash_block_size, self.unit // hash_block_size)
        self.running: list[SequenceKv] = []
        self.decoding: set[SequenceKv] = set()
        self.fresh: list[SequenceKv] = []
        self.grown: list[tuple[int, tuple[int, ...]]] = []
        self.unsent: dict[int, tuple[bytes, int]] = {}
        self.flight: Flight | None = None
        self.resets = 0
        # Resets before each sequence was admitted; after a reset, older sequences are not indexed.
        self.born: dict[SequenceKv, int] = {}

    def indexes(self, sequence: SequenceKv) -> bool:
        """Whether what the sequence computes becomes findable.

        Every hit on a window in place is a copy, so without copies models with such windows reuse nothing.
        """
        slides = any(group.kind is GroupKind.IN_PLACE_WINDOW for group in self.groups)
        return self.born[sequence] == self.resets and (self.options.copies_blocks or not slides)

    # ---- admitting and releasing ----

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(prompt=TOKENS, salt=st.sampled_from(["", "", "", "a"]))
    def arrive(self, prompt: list[int], salt: str) -> None:
        self.waiting.append(make_sequence(prompt, cache_salt=salt))
        self.admit(self.waiting[-1])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit_waiting(self, data: st.DataObject) -> None:
        self.admit(self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))])

    def admit(self, sequence: SequenceKv) -> None:
        hit = self.model.longest_hit(sequence)
        hash_block_size, per_block = (
            self.model.hash_block_size,
            self.shapes.block_size // self.model.hash_block_size,
        )
        assert self.kv.prefixes.peek(sequence) == hit * hash_block_size, "the longest hit of all groups"
        free = [group.pool.num_free for group in self.kv.groups]
        if not self.kv.admit(sequence):
            assert not sequence.tables
            busy = self.running or self.flight or self.kv.copies
            assert busy, "an idle cache must take any sequence that fits it"
            return
        if sequence.num_cached != hit * hash_block_size:
            # Without room for the block to copy from, a hit ends at a whole block.
            tight = [
                count <= group.most_blocks(len(sequence.token_ids) + 1)
                for group, count in zip(self.kv.groups, free, strict=True)
            ]
            assert any(tight)
            while hit % per_block and hit * hash_block_size > sequence.num_cached:
                hit = self.model.longest_hit(
                    sequence, (hit - hit % per_block) // self.model.hit_stride * self.model.hit_stride
                )
        assert sequence.num_cached == sequence.num_computed == hit * hash_block_size
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.born[sequence] = self.resets
        self.fresh.append(sequence)
        for group_id, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            shared = 0 if group.kind is GroupKind.IN_PLACE_WINDOW else hit // per_block
            self.model.allocated(group_id, [block.block_id for block in table.blocks[shared:]])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), comes_back=st.booleans())
    def leave(self, data: st.DataObject, comes_back: bool) -> None:
        """A sequence finishes, is aborted or is preempted, at any time."""
        self.release(self.running[data.draw(st.integers(0, len(self.running) - 1))], comes_back=comes_back)

    def release(self, sequence: SequenceKv, *, comes_back: bool) -> None:
        if sequence in self.decoding:
            self.generated(sequence)
            self.decoding.remove(sequence)
        self.kv.release(sequence)
        assert not sequence.tables
        self.running.remove(sequence)
        if sequence in self.fresh:
            self.fresh.remove(sequence)
        if self.flight is not None and self.flight.sequence is sequence:
            self.flight.sequence = None
        if comes_back:
            self.waiting.append(sequence)

    def generated(self, sequence: SequenceKv) -> None:
        """Indexes decoded tokens as the scheduler does: at the end of blocks, and when a sequence leaves."""
        self.kv.prefixes.index_decoded(sequence)
        copied = not self.kv.copies.waits_for(sequence)
        if self.options.cache_generated and copied and self.indexes(sequence):
            self.model.publish(
                sequence,
                max(0, sequence.num_computed - max(self.unit, self.shapes.block_size)),
                sequence.num_computed,
            )

    @precondition(lambda self: self.running and len(self.running) < 6)
    @rule(data=st.data(), token=st.integers(3, 4))
    def fork(self, data: st.DataObject, token: int) -> None:
        parent = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        flight = self.flight
        if flight is not None and (
            flight.sequence is parent or parent in [copy.sequence for copy in flight.copies]
        ):
            return  # forks are made between a sequence's steps
        child = make_sequence(parent.token_ids, cache_salt=parent.cache_salt)
        if parent in self.decoding and len(child.token_ids) == parent.num_computed + 1:
            child.token_ids[-1] = token
        if not self.kv.fork(parent, child, parent.num_computed):
            assert not child.tables
            return
        assert child.num_computed == parent.num_computed
        whole = child.num_computed // self.shapes.block_size
        for group_id, (group, table) in enumerate(zip(self.groups, child.tables, strict=True)):
            shared = 0 if group.kind is GroupKind.IN_PLACE_WINDOW else whole
            self.model.allocated(group_id, [block.block_id for block in table.blocks[shared:]])
        # The parent may have decoded what the child shares, so none of it counts as a hit.
        child.num_cached = 0
        self.running.append(child)
        self.born[child] = self.born[parent]
        self.fresh.append(child)
        if parent in self.decoding:
            self.decoding.add(child)

    @rule(really=st.sampled_from([False] * 5 + [True]))
    def crash(self, really: bool) -> None:
        """The replica is lost with everything in its memory."""
        if not really:
            return
        for sequence in self.running:
            sequence.tables, sequence.num_computed = [], 0
        self.waiting = [*self.waiting, *self.running][:6]
        self.boot()

    # ---- resets ----

    @rule(really=st.sampled_from([False] * 3 + [True]))
    def reset(self, really: bool) -> None:
        if not really:
            return
        self.kv.prefixes.reset()
        self.model.findable.clear()
        self.resets += 1

    # ---- steps ----

    @precondition(lambda self: self.flight is None and self.running)
    @rule(data=st.data(), fails=st.sampled_from([False] * 9 + [True]), at_once=st.booleans())
    def step(self, data: st.DataObject, fails: bool, at_once: bool) -> None:
        """Runs a chunk or a token of some sequence; its result comes at once or later."""
        self.plan(self.running[data.draw(st.integers(0, len(self.running) - 1))], fails=fails)
        if at_once:
            self.update()

    @precondition(lambda self: self.flight is None and self.running)
    @rule(data=st.data(), count=st.integers(2, 12))
    def steps(self, data: st.DataObject, count: int) -> None:
        """Runs several steps of one sequence."""
        sequence = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        for _ in range(count):
            if sequence not in self.running:
                return
            self.plan(sequence, fails=False)
            self.update()

    @precondition(lambda self: self.flight is not None)
    @rule()
    def update(self) -> None:
        flight, self.flight = self.flight, None
        if flight is None:
            return
        self.kv.settle_copies(flight.copies)
        for group_id, block_id, context, resets in flight.windows:
            if resets == self.resets:
                self.model.publish_window(group_id, block_id, context)
        sequence = flight.sequence
        if sequence is None:
            return
        start, end = flight.start, flight.end
        if flight.chunk:
            self.kv.prefixes.index_chunk(sequence, start, end)
            aligned = start % min(self.unit, self.shapes.chunk) == 0
            if (aligned or self.options.cache_generated) and self.indexes(sequence):
                self.model.publish(sequence, start - start % self.unit, end)
            self.note_windows(sequence, end)
        sequence.num_computed = end
        if end == len(sequence.token_ids):
            self.decoding.add(sequence)
            # The sampled token is constant, so that generated prefixes repeat.
            sequence.token_ids.append(3)
            sequence.num_uncomputed += 1
            if len(sequence.token_ids) >= MAX_LEN:
                self.release(sequence, comes_back=False)

    def note_windows(self, sequence: SequenceKv, end: int) -> None:
        """Checks new copies that keep windows, and gives their target blocks to the model."""
        context = contexts_of(sequence)[end - 1]
        for entry in self.kv.copies.entries:
            if entry.key is not None and id(entry) not in self.unsent:
                assert entry.source is sequence.tables[entry.group_id].blocks[0]
                assert end % (self.model.hit_stride * self.model.hash_block_size) == 0, (
                    "windows are kept where hits may end"
                )
                self.unsent[id(entry)] = context, self.resets
                self.model.allocated(entry.group_id, [entry.target.block_id])

    def plan(self, sequence: SequenceKv, *, fails: bool) -> None:
        decode = sequence in self.decoding
        start = sequence.num_computed
        end = start + 1 if decode else min(start + self.shapes.chunk, len(sequence.token_ids))
        if decode and self.kv.capacity(sequence, MAX_LEN) <= start:
            self.generated(sequence)
        while (grown := self.kv.grow(sequence, end)) is None:
            if len(self.running) > 1:
                victim = next(other for other in reversed(self.running) if other is not sequence)
                self.release(victim, comes_back=len(self.waiting) < 6)
            else:
                assert self.kv.copies.drop_windows(), "an admitted sequence fits up to its full length"
        for group_id, block_ids in grown:
            self.model.allocated(group_id, block_ids)
        self.grown += grown
        copies = self.kv.copies.take()
        assert not self.kv.copies
        windows = [
            (entry.group_id, entry.target.block_id, *self.unsent[id(entry)])
            for entry in copies
            if entry.key is not None
        ]
        self.unsent.clear()
        if fails:
            self.fail(sequence, start, end, copies)
            return
        for copy in copies:
            self.model.copy(copy)
        self.grant()
        for other in self.running:
            # With exact chunks, all content is.
            aligned = self.unit % self.shapes.chunk == 0
            self.model.check_sequence(other, exact=aligned and not self.options.cache_generated)
        self.check_alone(sequence, start, end)
        self.model.write(sequence, start, end, chunk=not decode)
        self.flight = Flight(sequence, start, end, not decode, copies, windows)

    def grant(self) -> None:
        """Clears the blocks granted since the last plan, as the worker does, except hits and copies."""
        for sequence in self.fresh:
            written = -(-sequence.num_computed // self.shapes.block_size)
            for group_id, table in enumerate(sequence.tables):
                self.model.clear(group_id, [block.block_id for block in table.blocks[written:]])
        for group_id, block_ids in self.grown:
            self.model.clear(group_id, block_ids)
        self.fresh.clear()
        self.grown.clear()

    def fail(self, sequence: SequenceKv, start: int, end: int, copies: Sequence[PendingCopy]) -> None:
        """Fails a step: its sequence ends, its content is unknown, and sequences with copies wait again."""
        for copy in copies:
            self.model.spoil(copy)
        self.grant()
        self.model.write(sequence, start, end, chunk=False, spoil=True)
        owners = [copy.sequence for copy in copies if copy.sequence is not None]
        self.kv.settle_copies(copies, done=False)
        # Their decoded tokens must not be indexed in blocks that were not copied.
        self.decoding.difference_update(owner for owner in owners)
        self.release(sequence, comes_back=False)
        for owner in owners:
            if owner in self.running:
                self.release(owner, comes_back=True)

    def check_alone(self, sequence: SequenceKv, start: int, end: int) -> None:
        """Checks that blocks about to be written are in one table."""
        for group_id, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            size = self.shapes.block_size
            paged = group.kind is not GroupKind.IN_PLACE_WINDOW
            written = table.blocks[start // size : (end - 1) // size + 1] if paged else table.blocks
            for block in written:
                assert block is not self.kv.groups[group_id].pool.null
                tables = [other for other in self.running if block in other.tables[group_id].blocks]
                assert tables == [sequence], f"block {block.block_id} is written while others use it"

    # ---- invariants ----

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        self.model.check_findable()
        copies = [*self.kv.copies.entries]
        if self.flight is not None:
            copies += self.flight.copies
        assert self.options.copies_blocks or not copies
        for group_id, group in enumerate(self.kv.groups):
            users: Counter[int] = Counter()
            for sequence in self.running:
                users.update(block.block_id for block in sequence.tables[group_id].live)
            users.update(entry.held.block_id for entry in copies if entry.group_id == group_id)
            for block in group.pool._blocks[1:]:
                assert block.ref_count == users[block.block_id], f"references of block {block.block_id}"
            found = {
                context
                for (other, _), all_ in self.model.findable.items()
                if other == group_id
                for context in all_
            }
            assert group.pool.num_cached == len(found), f"what can be found in group {group_id}"

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.update()
        for sequence in [*self.running]:
            self.release(sequence, comes_back=False)
        self.kv.settle_copies(self.kv.copies.take(), done=False)
        self.kv.check_integrity()
        for group in self.kv.groups:
            assert group.pool.num_free == group.pool.num_blocks, "blocks leaked"


TestKvCache = KvCacheMachine.TestCase
# With test_machines.py: (250 + 60 + 120) x 60 = 25,800 steps; a step of the machine is often several of the
# cache.
TestKvCache.settings = machine(max_examples=250, stateful_step_count=60)
