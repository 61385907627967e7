"""Random operations on pools and schedulers, checked against naive models after every step."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.errors import InvalidArgument
from protos.steps import GroupKind
from scheduler_svc.kv.block_pool import Block, BlockPool
from scheduler_svc.kv.cache import ChunkStarts
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup
from tests.support.property_settings import machine
from tests.support.scheduler.factories import (
    EOS,
    FULL,
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)
from tests.support.scheduler.simulated_device import Kind, Moment

pytestmark = pytest.mark.property

Harm: TypeAlias = Literal["kills", "fails"]

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """A pool against three lists of free ids and a dict from content to its blocks."""

    def __init__(self) -> None:
        super().__init__()
        # What a listener believes to be findable.
        self.known: set[bytes] = set()
        self.pool = BlockPool(NUM_BLOCKS + 1, on_evict=self.known.remove)
        # In the order of allocation: without content, with cheap content, with other content.
        self.free: tuple[list[int], list[int], list[int]] = (list(range(1, NUM_BLOCKS + 1)), [], [])
        self.content: dict[int, list[bytes]] = {}
        self.cheap: set[int] = set()
        self.tables: list[list[Block]] = []

    @property
    def all_free(self) -> list[int]:
        return [*self.free[0], *self.free[1], *self.free[2]]

    def give(self, ids: list[int]) -> None:
        """Sorts blocks without references into the free lists, as the pool does."""
        for block_id in ids:
            if not self.content.get(block_id):
                self.free[0].insert(0, block_id)
            else:
                self.free[1 if block_id in self.cheap else 2].append(block_id)

    def take(self, ids: list[int]) -> None:
        for queue in self.free:
            queue[:] = [block_id for block_id in queue if block_id not in ids]

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > len(self.all_free):
            assert blocks is None
            return
        assert blocks is not None
        expected = self.all_free[:count]
        assert [block.block_id for block in blocks] == expected, "the block of least worth comes first"
        self.take(expected)
        for block_id in expected:
            self.content.pop(block_id, None)
            self.cheap.discard(block_id)
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(
        data=st.data(),
        keys=st.lists(st.binary(min_size=1, max_size=1), min_size=1, max_size=3, unique=True),
        cheap=st.booleans(),
    )
    def index(self, data: st.DataObject, keys: list[bytes], cheap: bool) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        mine = self.content.setdefault(block.block_id, [])
        keys = [key for key in keys if key not in mine]
        known = {key for content in self.content.values() for key in content}
        new = [key for key in keys if key not in known]
        assert self.pool.index_block(block, keys, cheap=cheap) == new
        self.known.update(new)
        mine += keys
        (self.cheap.add if cheap else self.cheap.discard)(block.block_id)

    @rule(key=st.binary(min_size=1, max_size=1))
    def revive(self, key: bytes) -> None:
        block = self.pool.lookup(key)
        holders = [block_id for block_id, content in self.content.items() if key in content]
        assert (block is not None) == bool(holders), "a key is found exactly while some block has it"
        if block is None:
            return
        assert block.block_id in holders
        self.pool.touch([block])
        self.take([block.block_id])
        self.cheap.discard(block.block_id)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))
        in_use = {block.block_id for other in self.tables for block in other}
        self.give([block.block_id for block in reversed(table) if block.block_id not in in_use])

    @rule()
    def spare(self) -> None:
        """A block for cheap content evicts only cheap content."""
        block = self.pool.allocate_for_cheap()
        assert (block is None) == (not self.free[0] and not self.free[1])
        if block is None:
            return
        assert block.block_id == self.all_free[0]
        self.take([block.block_id])
        self.content.pop(block.block_id, None)
        self.cheap.discard(block.block_id)
        self.tables.append([block])

    @rule()
    def reset(self) -> None:
        self.pool.reset_index()
        # In the order of their ids, each to the front.
        with_content = sorted(block_id for block_id in [*self.free[1], *self.free[2]])
        self.content.clear()
        self.cheap.clear()
        self.take(with_content)
        self.give(with_content)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.all_free)
        assert (
            set(self.pool.keys) == {key for content in self.content.values() for key in content} == self.known
        )


KINDS = (
    FULL,
    KvGroup(GroupKind.PAGED_WINDOW, 3),
    KvGroup(GroupKind.PAGED_WINDOW, 8),
    KvGroup(GroupKind.IN_PLACE_WINDOW, 2),
    KvGroup(GroupKind.IN_PLACE_WINDOW, 4),
)


def root_of(sequence_id: str) -> str:
    """Returns the id of the request that a sequence belongs to."""
    return sequence_id.partition("#")[0]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, are aborted, preempted and lose their replica; steps fail. Each must get its tokens.

    Before every step, the simulated device checks that the blocks hold what its queries see.
    """

    stages: Sequence[int] = (1,)
    """The pipeline stages to choose from."""
    adapter_slots: Sequence[int] = (0,)
    """The numbers of adapter slots to choose from."""

    @initialize(
        chunk=st.sampled_from([2, 4, 8]), block=st.sampled_from([4, 8]), num_blocks=st.integers(12, 30),
        groups=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), caching=st.booleans(), sub_block=st.booleans(),
        generated=st.booleans(), ratio=st.integers(0, 3), lease=st.sampled_from([1, 2, 4, 9]), jump=st.sampled_from([0, 1, 3, 7]),
        streams=st.integers(0, 2), losses=st.integers(1, 3), depth=st.sampled_from([None, None, 1, 2, 5]), plans=st.integers(1, 20), lag=st.integers(0, 3),
        dispatches=st.booleans(), reporting=st.sampled_from([0, 1, 2]), data=st.data(),
        starts=st.sampled_from(["anywhere", "exact"]), finest=st.sampled_from([1, 2, 4]),
    )  # fmt: skip
    def start(
        self, chunk: int, block: int, num_blocks: int, groups: list[KvGroup], caching: bool, sub_block: bool,
        generated: bool, ratio: int, lease: int, jump: int, streams: int,
        losses: int, depth: int | None, plans: int, lag: int, dispatches: bool, reporting: int, data: st.DataObject,
        starts: ChunkStarts, finest: int,
    ) -> None:  # fmt: skip
        stages = data.draw(st.sampled_from(self.stages), label="stages")
        # Few blocks hold less than the longest request: admission must refuse it, never deadlock.
        shapes = make_shapes(max_model_len=40, chunk=chunk, block_size=block, stages=stages)
        shapes.check(DeviceLimits(40, 1, 4, 8), groups)
        self.rig: Rig = make_rig(shapes, num_blocks=num_blocks, groups=groups, prefix_caching=caching,
                                 sub_block=sub_block, cache_generated=generated, decode_steps_per_chunk=ratio, lease_steps=lease,
                                 num_streams=streams, max_worker_losses=losses, depth=depth, most_plans=plans, lag=lag,
                                 dispatches=dispatches, chunk_starts=starts, finest_hit=finest, adapter_slots=data.draw(st.sampled_from(self.adapter_slots)))  # fmt: skip
        self.jump = self.rig.device.jump = jump
        self.rig.sent = self.check_plans_in_flight
        self.losses = losses
        # Requests that kill the device or fail its steps: what it may not do for them, and from how many
        # computed tokens on.
        self.poison: dict[str, tuple[Harm, Kind, int]] = {}
        self.rig.kills = lambda moment: self.harms("kills", moment)
        self.rig.fails = lambda moment: self.harms("fails", moment)
        # Requests whose admission is refused, from how many computed tokens on.
        self.refused: dict[str, int] = {}
        self.rig.refuses = self.refusal
        # No request, each one or every other one asks for log-probabilities.
        self.rig.reports = lambda name: reporting > 0 and int(root_of(name)[1:]) % reporting == 0
        # Expected tokens by request and sequence, up to the stop token if there is one.
        self.stops: dict[str, int | None] = {}
        self.wanted: dict[str, list[list[int]]] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.count = 0

    # Few distinct tokens and lengths: prefixes repeat.
    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", "", "a"]), priority=st.integers(0, 1), n=st.sampled_from([1, 1, 1, 2, 3, 6]),
        stop_at=st.sampled_from([None, None, None, 0, 1, 5]),
    )  # fmt: skip
    def submit(
        self, prompt: list[int], max_tokens: int, salt: str, priority: int, n: int, stop_at: int | None
    ) -> None:
        if len(prompt) + max_tokens > self.rig.scheduler.kv.max_tokens(40):
            return
        self.count += 1
        name = f"r{self.count}"
        salt, lora_name, weights = self.isolated_by(salt)
        wanted = [expected_tokens(prompt, max_tokens, sequence, weights) for sequence in range(n)]
        # A token that the first sequence will generate.
        stop = self.stops[name] = None if stop_at is None else wanted[0][min(stop_at, max_tokens - 1)]
        self.wanted[name] = [each[: each.index(stop) + 1] if stop in each else each for each in wanted]
        self.rig.submit(
            make_submission(
                prompt, request_id=name, max_tokens=max_tokens, priority=priority, n=n,
                stop_token_ids=() if stop is None else (stop,), cache_salt=salt, lora_name=lora_name,
            )
        )  # fmt: skip

    def isolated_by(self, salt: str) -> tuple[str, str, str]:
        """Returns the salt of a request, and the name and the weights of its adapter."""
        return salt, "", ""

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.draw_and_abort(data)

    def check_plans_in_flight(self) -> None:
        """The worker has `depth` plans at most, and one that ends the steps of the last of them."""
        depth = self.rig.depth or self.rig.shapes.stages + 1
        assert len(self.rig.scheduler._plans) <= depth + 1

    def draw_and_abort(self, data: st.DataObject) -> None:
        """Aborts a whole request or one of its sequences."""
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        one = data.draw(st.sampled_from([None, *(sequences := range(len(self.wanted[name])))]))
        ended = self.ended(name)
        if self.rig.engine.abort(name, one):
            now = [one] if one is not None else [each for each in sequences if each not in ended]
            assert not ended.intersection(now)
            self.aborted |= {(name, each) for each in now}

    def ended(self, name: str) -> set[int]:
        return {event.sequence for event in self.rig.sinks[name].events if event.finish_reason}

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort_while_a_step_runs(self, data: st.DataObject) -> None:
        after = data.draw(st.integers(0, 3), label="steps")

        def abort() -> None:
            nonlocal after
            after -= 1
            if after == -1:
                self.draw_and_abort(data)

        self.rig.meanwhile = abort
        self.rig.step()
        self.rig.meanwhile = lambda: None

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 20), after=st.integers(0, 3),
        n=st.sampled_from([1, 1, 3]), stop_at=st.sampled_from([None, 0, 1, 5]),
    )  # fmt: skip
    def submit_while_a_step_runs(
        self, prompt: list[int], max_tokens: int, after: int, n: int, stop_at: int | None
    ) -> None:
        def submit() -> None:
            nonlocal after
            after -= 1
            if after == -1:
                self.submit(prompt, max_tokens, "", 0, n, stop_at)

        self.rig.meanwhile = submit
        self.rig.step()
        self.rig.meanwhile = lambda: None

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 20), n=st.sampled_from([1, 1, 3]),
        kind=st.sampled_from(["admit", "chunk", "decode"]), end=st.integers(0, 24), meanwhile=st.booleans(),
        harm=st.sampled_from(["kills", "fails"]),
    )  # fmt: skip
    def submit_poison(
        self, prompt: list[int], max_tokens: int, n: int, kind: Kind, end: int, meanwhile: bool, harm: Harm
    ) -> None:
        # An admission computes nothing: it would kill again only where the prefix cache has as much again.
        self.poison[f"r{self.count + 1}"] = (harm, kind, 0 if kind == "admit" else end)
        if meanwhile:
            self.submit_while_a_step_runs(prompt, max_tokens, 0, n, None)
        else:
            self.submit(prompt, max_tokens, "", 0, n, None)

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 20), n=st.sampled_from([1, 1, 3]),
        end=st.sampled_from([0, 0, 2, 8]), meanwhile=st.booleans(),
    )  # fmt: skip
    def submit_refused(self, prompt: list[int], max_tokens: int, n: int, end: int, meanwhile: bool) -> None:
        """The worker refuses the request: always, or only with a cached prefix or after a preemption."""
        self.refused[f"r{self.count + 1}"] = end
        if meanwhile:
            self.submit_while_a_step_runs(prompt, max_tokens, 0, n, None)
        else:
            self.submit(prompt, max_tokens, "", 0, n, None)

    def refusal(self, moment: Moment) -> InvalidArgument | None:
        refused = moment.end >= self.refused.get(root_of(moment.request_id), 1000)
        return InvalidArgument("refused") if refused else None

    def harms(self, harm: Harm, moment: Moment) -> bool:
        name = root_of(moment.request_id)
        if name not in self.poison:
            return False
        how, kind, end = self.poison[name]
        return (how, kind) == (harm, moment.kind) and moment.end >= end

    @property
    def suspected(self) -> bool:
        """Whether a request is a suspect. Further faults could make it look as if it were poison."""
        return any(request.suspect for request in self.rig.engine.live())

    @rule(plans=st.integers(1, 2), after=st.integers(0, 3))
    def steps_fail(self, plans: int, after: int) -> None:
        """A step raises, and with two plans also the one that is behind it or comes next."""
        if self.suspected or self.rig.device.broken:
            return

        def break_device() -> None:
            nonlocal after
            after -= 1
            if after == -1:
                self.rig.device.broken = plans

        self.rig.meanwhile = break_device
        self.rig.step()
        self.rig.meanwhile = lambda: None

    @rule(in_flight=st.booleans())
    def crash(self, in_flight: bool) -> None:
        if in_flight and self.losses > 1 and not self.suspected:
            self.rig.scheduler.next_plan()
        self.rig.replace_replica()
        self.rig.device.jump = self.jump

    @rule()
    def reset(self) -> None:
        self.rig.engine.prefixes.reset()

    @invariant()
    def pools_are_sound(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.kv.check_integrity()

    @invariant()
    def a_fault_counts_once(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert all(one.step_failures <= self.rig.faults for one in self.rig.engine.live())
        if not self.suspected:
            self.rig.faults = 0

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        assert not self.rig.engine.live(), "a request is stuck"
        for name, sequences in self.wanted.items():
            events = self.rig.sinks[name].events
            assert {event.request_id for event in events} == {name}
            assert sum(event.first for event in events) <= 1
            failed = any(event.error is not None for event in events)
            assert not failed or name in self.poison or name in self.refused, "no other request fails"
            for sequence, wanted in enumerate(sequences):
                mine = [event for event in events if event.sequence == sequence]
                tokens = [token for event in mine for token in event.token_ids]
                if failed:
                    assert tokens == wanted[: len(tokens)]
                    assert sum(event.error is not None for event in events) == 1
                    continue
                if (name, sequence) in self.aborted:
                    assert tokens == wanted[: len(tokens)]
                    assert mine[-1].finish_reason is FinishReason.ABORT
                else:
                    assert EOS not in wanted
                    assert tokens == wanted, "no token is lost, repeated or changed"
                    stopped = wanted[-1] == self.stops[name]
                    assert mine[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
                    assert mine[-1].stop_token_id == (wanted[-1] if stopped else None)
                assert sum(event.finish_reason is not None for event in mine) == 1
        for group in self.rig.scheduler.kv.groups:
            assert group.pool.num_free == group.pool.num_blocks, "blocks leaked"
        killed = Counter(self.rig.killers)
        assert not killed or max(killed.values()) <= max(2, self.losses), "the second loss is its own already"
        self.check_that_nothing_is_left()

    def check_that_nothing_is_left(self) -> None:
        """Checks that no request is known and that no counter or calendar entry of one remains."""
        scheduler, engine = self.rig.scheduler, self.rig.engine
        assert scheduler.prefill_backlog == scheduler.num_running == scheduler.num_deferred == 0
        assert not scheduler._slots.trials
        assert not scheduler._slots.waiters._computing
        assert not scheduler._decoding
        assert not scheduler._slots.waiters._sources
        assert not scheduler._plans._unsent
        assert not engine.live()
        assert not engine._live._groups


class PipelineMachine(SchedulerMachine):
    """The same on a pipeline: more plans are in flight, of several decode batches."""

    stages = (2, 3, 4)


TestPool = PoolMachine.TestCase
TestPool.settings = machine(max_examples=60, stateful_step_count=60)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = machine(max_examples=120, stateful_step_count=60)
TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = machine(max_examples=120, stateful_step_count=60)
