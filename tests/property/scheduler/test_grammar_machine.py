"""Requests with and without grammars on two replicas that compile, refuse, evict and are lost at random."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.errors import ContextExceeded, InvalidArgument, Overloaded, Unavailable
from scheduler_svc.engine import grammar_queue
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.sampling import FinishReason, Grammar
from tests.support.plan_order import SimulatedWorker
from tests.support.property_settings import machine
from tests.support.scheduler.factories import (
    FULL,
    Rig,
    expected_tokens,
    make_grammar,
    make_rig,
    make_shapes,
    make_submission,
    with_grammar,
)
from tests.support.scheduler.simulated_device import SimulatedDevice

pytestmark = pytest.mark.property

GRAMMARS = (make_grammar("a"), make_grammar("b"), None, None)
NAMES = ("one", "two")


class GrammarMachine(RuleBasedStateMachine):
    """Replicas compile, refuse, evict and are lost at random.

    Every request ends once, with its tokens or an error, and no request waits in vain.
    """

    @initialize(
        slots=st.sampled_from([1, 2, 4]),
        # Either all requests fit all replicas, or some requests do not fit the first one.
        blocks=st.one_of(
            st.lists(st.integers(12, 30), min_size=1, max_size=2),
            st.tuples(st.integers(3, 4), st.integers(6, 12)).flatmap(st.permutations),
        ),
        lease=st.sampled_from([1, 4]), depth=st.sampled_from([1, 2, 3]), most_open=st.sampled_from([1, 16]),
    )  # fmt: skip
    def start(self, slots: int, blocks: list[int], lease: int, depth: int, most_open: int) -> None:
        self.patch = patch.object(grammar_queue, "MAX_OPEN", most_open)
        self.patch.start()
        buckets = tuple(bucket for bucket in (1, 2, 4) if bucket <= slots)
        self.shapes = make_shapes(max_model_len=40, max_num_seqs=slots, buckets=buckets)
        self.rig: Rig = make_rig(self.shapes)
        self.engine = self.rig.engine
        self.engine.detach("replica-0", Loss.DIED)
        self.blocks = dict(zip(NAMES, blocks, strict=False))
        self.lease, self.depth = lease, depth
        self.replicas: dict[str, tuple[ReplicaScheduler, SimulatedDevice, SimulatedWorker]] = {}
        # Requests with a grammar.
        self.constrained: set[str] = set()
        # Open compile requests by replica, in order.
        self.asked: list[tuple[str, Grammar]] = []
        # Tokens by request and sequence.
        self.wanted: dict[str, list[list[int]]] = {}
        # Requests that fit only the larger replica: they fail when it is lost.
        self.large: set[str] = set()
        for name in self.blocks:
            self.attach(name)

    def attach(self, name: str) -> None:
        kv = KvCache(self.shapes, (FULL,), [self.blocks[name]], model="m", options=CacheOptions())
        scheduler = ReplicaScheduler(
            self.shapes, kv, self.engine, Turns(1), clock=lambda: 0.0, lease_steps=self.lease,
            depth=self.depth,
        )  # fmt: skip
        device = SimulatedDevice(self.shapes, (FULL,))
        self.replicas[name] = scheduler, device, SimulatedWorker(device.run)

        def ask(grammar: Grammar) -> None:
            assert (name, grammar) not in self.asked, "asked twice"
            self.asked.append((name, grammar))

        def withdraw(grammar: Grammar) -> None:
            self.asked.remove((name, grammar))

        self.engine.attach(name, AttachedReplica(scheduler, lambda: None, ask, withdraw))

    def run_step(self, name: str, evicted: bool = False) -> bool:
        """Runs one step of a replica, as a worker does; `evicted` refuses admissions with a grammar."""
        if name not in self.replicas:
            return False
        self.engine.dispatch()
        scheduler, device, worker = self.replicas[name]
        device.refuses = lambda moment: (
            Unavailable("evicted")
            if evicted and moment.request_id.partition("#")[0] in self.constrained
            else None
        )
        while (plan := scheduler.next_plan()) is not None:
            worker.take(plan)
        if worker.has_work:
            scheduler.update(worker.run())
            return True
        return False

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=12), max_tokens=st.integers(1, 8),
        n=st.sampled_from([1, 1, 2, 3]), priority=st.integers(0, 1), grammar=st.sampled_from(GRAMMARS),
        tenant=st.sampled_from(["", "t"]),
    )  # fmt: skip
    def submit(
        self, prompt: list[int], max_tokens: int, n: int, priority: int, grammar: Grammar | None, tenant: str
    ) -> None:
        sizes = [each.kv.max_tokens(40) for each, *_ in self.replicas.values()]
        if len(prompt) + max_tokens > max(sizes):
            return
        name = f"r{len(self.wanted)}"
        if len(prompt) + max_tokens > min(sizes):
            self.large.add(name)
        plain = make_submission(
            prompt, request_id=name, max_tokens=max_tokens, n=n, priority=priority, tenant=tenant
        )
        self.wanted[name] = [expected_tokens(prompt, max_tokens, sequence) for sequence in range(n)]
        if grammar is not None:
            self.constrained.add(name)
        self.rig.submit(
            plain if grammar is None else replace(plain, sampling=with_grammar(plain.sampling, grammar))
        )

    @rule(name=st.sampled_from(NAMES), steps=st.integers(1, 4), evicted=st.sampled_from([False, False, True]))
    def step(self, name: str, steps: int, evicted: bool) -> None:
        for _ in range(steps):
            self.run_step(name, evicted)

    @precondition(lambda self: self.asked)
    @rule(
        data=st.data(), error=st.sampled_from([None, None, None, Overloaded("busy"), InvalidArgument("bad")])
    )
    def answer(self, data: st.DataObject, error: Overloaded | InvalidArgument | None) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        self.asked.remove(asked)
        if error is None:
            self.engine.grammar_compiled(*asked)
        else:
            self.engine.grammar_refused(*asked, error)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.wanted))))

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        if name not in self.replicas:
            return
        self.asked = [asked for asked in self.asked if asked[0] != name]
        self.engine.detach(name, Loss.DIED)
        self.attach(name)

    @invariant()
    def no_request_waits_in_vain(self) -> None:
        if not hasattr(self, "replicas"):
            return
        queues = self.engine._queues
        waiting = [*queues, *queues._deferred.values()]
        assert queues.waiting.tenants.requests == Counter(one.tenant for one in waiting)
        assert queues.waiting.tenants.num_tokens == sum(len(one.token_ids) for one in waiting)
        queue = self.engine.grammars
        for one in self.engine.waiting:
            assert any(queue.may_run(one, name) for name in self.replicas), (
                "queued although no replica has its grammar"
            )
        for entry in queue._entries.values():
            assert entry.ready or entry.asked or not entry.waiting or not entry.opened, "no replica was asked"
        assert bool(queue._open) or not any(queue._first(tenant) for tenant in list(queue._line))
        self.engine.dispatch()
        for name, (scheduler, *_) in self.replicas.items():
            if not scheduler.is_busy:
                able = [
                    one
                    for one in self.engine.waiting
                    if queue.may_run(one, name) and scheduler.kv.fits(one.end)
                ]
                assert not able, "an idle replica while requests wait"

    def teardown(self) -> None:
        if not hasattr(self, "replicas"):
            return
        try:
            self.finish()
        finally:
            self.patch.stop()

    def finish(self) -> None:
        while sum(self.run_step(name) for name in NAMES) or self.asked:
            if self.asked:
                self.engine.grammar_compiled(*self.asked.pop(0))
        for name, sequences in self.wanted.items():
            events = self.rig.sinks[name].events
            assert self.engine.find(name) is None, "the request never ended"
            if errors := [event.error for event in events if event.error]:
                assert len(errors) == 1
                assert events[-1].error is errors[0]
                assert name in self.large or not isinstance(errors[0], ContextExceeded)
                continue
            for sequence, wanted in enumerate(sequences):
                mine = [event for event in events if event.sequence == sequence]
                tokens = [token for event in mine for token in event.token_ids]
                assert tokens == wanted[: len(tokens)]
                assert sum(event.finish_reason is not None for event in mine) == 1
                assert mine[-1].finish_reason is FinishReason.ABORT or tokens == wanted
        assert not self.engine.live()
        assert not self.engine._live._groups
        assert not self.engine.grammars._entries
        assert not self.engine.num_waiting
        for scheduler, *_ in self.replicas.values():
            for group in scheduler.kv.groups:
                assert group.pool.num_free == group.pool.num_blocks, "blocks leaked"


TestGrammars = GrammarMachine.TestCase
TestGrammars.settings = machine(max_examples=120, stateful_step_count=50)
