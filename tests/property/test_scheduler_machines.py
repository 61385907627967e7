"""Random lives of pools and schedulers, checked against naive models after every step."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.block_pool import Block, BlockPool
from scheduler_svc.request import FinishReason
from tests.scheduler_factories import (
    EOS,
    Rig,
    expected_tokens,
    make_geometry,
    make_rig,
    make_submission,
    replace_replica,
)

pytestmark = pytest.mark.property

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """A pool against a list of free ids and a dict of cached contents."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.pool = BlockPool(NUM_BLOCKS + 1, on_evict=self.evicted.append)
        self.free = list(range(1, NUM_BLOCKS + 1))
        self.cached: dict[bytes, int] = {}
        self.tables: list[list[Block]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > len(self.free):
            assert blocks is None
            return
        assert blocks is not None
        expected, self.free = self.free[:count], self.free[count:]
        assert [block.block_id for block in blocks] == expected, "least recently freed first"
        self.cached = {key: block for key, block in self.cached.items() if block not in expected}
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def index(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        indexed = self.pool.index_block(block, key)
        known = block.block_id in self.cached.values()
        if known or key in self.cached:
            assert indexed == (self.cached.get(key) == block.block_id)
        else:
            assert indexed
            self.cached[key] = block.block_id

    @rule(key=st.binary(min_size=1, max_size=1))
    def revive(self, key: bytes) -> None:
        block = self.pool.lookup(key)
        assert (block.block_id if block else None) == self.cached.get(key)
        if block is not None:
            self.pool.touch([block])
            if block.block_id in self.free:
                self.free.remove(block.block_id)
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))
        in_use = {block.block_id for other in self.tables for block in other}
        self.free += [block.block_id for block in reversed(table) if block.block_id not in in_use]

    @rule()
    def reset(self) -> None:
        self.pool.reset_index()
        self.cached.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.cached)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted, preempted for want of blocks and lose their replica; every one must get exactly its tokens."""

    @initialize(
        chunk=st.sampled_from([2, 4, 8]), block=st.sampled_from([2, 4, 8]), num_blocks=st.integers(12, 30),
        groups=st.integers(1, 2), caching=st.booleans(), ratio=st.integers(1, 3),
    )  # fmt: skip
    def start(self, chunk: int, block: int, num_blocks: int, groups: int, caching: bool, ratio: int) -> None:
        # Smaller than the longest request on purpose with few blocks of size 2: admission must refuse, never deadlock.
        geometry = make_geometry(max_model_len=40, chunk=chunk, block_size=block, max_num_seqs=4)
        self.num_blocks = num_blocks
        self.rig: Rig = make_rig(geometry, num_blocks=num_blocks, num_groups=groups, prefix_caching=caching,
                                 decode_steps_per_chunk=ratio)  # fmt: skip
        self.wanted: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.count = 0

    # Few distinct tokens and lengths: prefixes repeat.
    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "a"]), priority=st.integers(0, 1),
    )  # fmt: skip
    def submit(self, prompt: list[int], max_tokens: int, salt: str, priority: int) -> None:
        if len(prompt) + max_tokens > self.rig.scheduler.kv.max_tokens:
            return
        self.count += 1
        name = f"r{self.count}"
        self.rig.submit(
            make_submission(
                prompt, request_id=name, max_tokens=max_tokens, cache_salt=salt, priority=priority
            )
        )
        self.wanted[name] = expected_tokens(prompt, max_tokens)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.rig.engine.abort(name):
            self.aborted.add(name)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort_while_a_step_runs(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        plan = self.rig.scheduler.step()
        if self.rig.engine.abort(name):
            self.aborted.add(name)
        if plan is not None:
            self.rig.scheduler.update(self.rig.device.run(plan))

    @rule(in_flight=st.booleans())
    def crash(self, in_flight: bool) -> None:
        if in_flight:
            self.rig.scheduler.step()
        replace_replica(self.rig, num_blocks=self.num_blocks)

    @invariant()
    def pools_are_sound(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.kv.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        for name, wanted in self.wanted.items():
            sink = self.rig.sinks[name]
            if name in self.aborted:
                assert sink.tokens == wanted[: len(sink.tokens)]
                assert sink.events[-1].finish_reason is FinishReason.ABORT
            else:
                assert EOS not in wanted
                assert sink.tokens == wanted, "no token lost, doubled or changed"
                assert sink.events[-1].finish_reason is FinishReason.LENGTH
            assert sum(event.finish_reason is not None for event in sink.events) == 1
        for group in self.rig.scheduler.kv.groups:
            assert group.pool.num_free == group.pool.num_blocks, "blocks leaked"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
