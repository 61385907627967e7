"""Small real objects for scheduler tests, and a simulated device that checks every plan."""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.errors import Internal
from protos.kv_groups import GroupKind
from protos.limits import SAMPLING
from protos.steps import Admission, Decode, Pool, Prefill, SlotOutput, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.block_pool import NULL_BLOCK_ID, BlockPool
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.order import OrderPolicy, PriorityFairOrder
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.requests.admission import EventLogSpec, ModelLimits, Resumed, Submission
from scheduler_svc.requests.request import Event, Request
from scheduler_svc.requests.sampling import Grammar, Sampling, StopRule
from scheduler_svc.shapes.geometry import Geometry, KvGroup
from tests.support.plan_order import SimulatedWorker
from tests.support.sampling_params import sampling_params
from tests.support.scheduler import poison
from tests.support.scheduler.poison import Kind, Moment
from tests.support.scheduler.stream_sink import StreamSink

EOS = 2
FULL = KvGroup(GroupKind.FULL)
_ARRIVALS = itertools.count()


class ListSink:
    """Keeps the events of one or many requests."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def push(self, event: Event) -> None:
        self.events.append(event)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self.events.append(Event(request_id, (token_id,)))

    @property
    def tokens(self) -> list[int]:
        """All tokens received, in order."""
        return [token for event in self.events for token in event.token_ids]

    def tokens_of(self, sequence: int) -> list[int]:
        """Returns the tokens of one of a request's sequences."""
        return [token for event in self.events if event.sequence == sequence for token in event.token_ids]


def make_pool(num_blocks: int = 9) -> BlockPool:
    return BlockPool(num_blocks)


def make_geometry(
    *, max_model_len: int = 64, max_num_seqs: int = 4, chunk: int = 4, block_size: int = 4,
    buckets: tuple[int, ...] = (1, 2, 4),
) -> Geometry:  # fmt: skip
    return Geometry(max_model_len, max_num_seqs, chunk, block_size, buckets)


def make_sampling(*, max_tokens: int = 8, **fields: Any) -> Sampling:
    """Returns sampling parameters, greedy by default; ``fields`` are the message's."""
    return Sampling(sampling_params(max_tokens=max_tokens, **fields))


def make_grammar(text: str) -> Grammar:
    """Returns a grammar; each text makes another one."""
    return Grammar(common_pb2.StructuredOutput(regex=text).SerializeToString(deterministic=True))


def with_grammar(sampling: Sampling, grammar: Grammar) -> Sampling:
    """Returns a copy whose output must match ``grammar``."""
    params = common_pb2.SamplingParams()
    params.CopyFrom(sampling.params)
    params.structured_output.ParseFromString(grammar.serialized)
    return Sampling(params)


def make_request(
    prompt: Sequence[int] = (5, 6, 7), *, request_id: str | None = None, sampling: Sampling | None = None,
    priority: int = 0, tenant: str = "", arrival_s: float = 0.0, cache_salt: str = "",
) -> Request:  # fmt: skip
    arrival = next(_ARRIVALS)
    sampling = sampling or make_sampling()
    return Request(
        request_id=request_id or f"r{arrival}", token_ids=list(prompt), num_prompt_tokens=len(prompt),
        sampling=sampling, arrival=arrival, arrival_s=arrival_s, sink=ListSink(), stop=StopRule.of(sampling, frozenset({EOS}), sampling.max_tokens),
        priority=priority, tenant=tenant, cache_salt=cache_salt,
    )  # fmt: skip


def make_sequence(prompt: Sequence[int], *, cache_salt: str = "") -> SequenceKv:
    """Returns a sequence without blocks."""
    return SequenceKv(list(prompt), cache_salt)


def make_submission(
    prompt: Sequence[int] = (5, 6, 7), *, request_id: str = "r", max_tokens: int | None = 8, priority: int = 0,
    cache_salt: str = "", resumed: Sequence[int] = (), tenant: str = "", n: int = 1, sampling: Sampling | None = None,
    resumed_sequences: Sequence[Resumed] = (), age_s: float | None = None, silent_s: float = 0.0,
    log: EventLogSpec | None = None, **fields: Any,
) -> Submission:  # fmt: skip
    """Returns a valid request; ``fields`` are those of its sampling parameters."""
    if resumed:
        resumed_sequences = (Resumed(0, tuple(resumed)),)
    sampling = (sampling or make_sampling(**fields)).changed(max_tokens=max_tokens)
    return Submission(
        request_id=request_id, prompt_token_ids=tuple(prompt), priority=priority, tenant=tenant, sampling=sampling,
        cache_salt=cache_salt, n=n, resumed=tuple(resumed_sequences), age_s=age_s,
        silent_s=silent_s, log=log,
    )  # fmt: skip


def next_token(context: Sequence[int], sequence: int = 0, vocab_size: int = 97) -> int:
    """A deterministic "model": the next token is a function of the context and the sequence index."""
    digest = hashlib.blake2b(repr((sequence, *context)).encode(), digest_size=4).digest()
    return 3 + int.from_bytes(digest, "little") % (vocab_size - 3)


def expected_tokens(prompt: Sequence[int], max_tokens: int, sequence: int = 0) -> list[int]:
    """Returns what the simulated model generates, alone and undisturbed."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, sequence))
    return context[len(prompt) :]


def _contexts(tokens: Sequence[int], contexts: list[int]) -> None:
    """Extends ``contexts`` to the tokens; a context identifies all tokens up to a position."""
    for position in range(len(contexts), len(tokens)):
        contexts.append(hash((contexts[-1] if contexts else None, tokens[position])))


@dataclass
class _Slot:
    admission: Admission
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    contexts: list[int] = field(default_factory=list)


@dataclass
class SimulatedDevice:
    """Executes plans as a worker does; keeps, per block, the contexts from which its KV was computed.

    Before each step it checks that the blocks hold exactly the contexts that the step's queries see. A wrong
    block table, a block that is shared while written, a missing copy and a stale prefix hit all fail at once.
    """

    geometry: Geometry
    groups: Sequence[KvGroup] = (FULL,)
    slots: dict[int, _Slot] = field(default_factory=dict)
    memory: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    prefilled: int = 0
    copied: int = 0
    shapes: set[tuple[str, int]] = field(default_factory=set)
    jump: int = 0
    """Tokens that follow a sampled even one at once, as a grammar's forced tokens do; the same as without."""
    passes: int = 0
    kills: Callable[[Moment], bool] = poison.nothing_kills
    """Whether the device dies instead of doing this."""
    fails: Callable[[Moment], bool] = poison.nothing_fails
    """Whether the step fails instead of doing this."""

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.release:
            self.slots.pop(slot, None)
        for copy in plan.copies:
            self.copied += 1
            assert copy.source_block != NULL_BLOCK_ID != copy.target_block
            self.memory[copy.group_id, copy.target_block] = list(
                self.memory[copy.group_id, copy.source_block]
            )
        for admission in plan.admit:
            self._survive("admit", admission, admission.num_computed_tokens)
            self._admit(admission)
        for growth in plan.grow:
            self.slots[growth.slot].tables[growth.group_id].extend(growth.block_ids)
            for block in growth.block_ids:
                self.memory.pop((growth.group_id, block), None)
        match plan.work:
            case Prefill(slot, start, num_tokens, sample):
                state = self.slots[slot]
                assert start == state.computed
                assert start % self.geometry.chunk == 0 or self.jump, "chunks lie at chunk boundaries"
                assert 1 <= num_tokens <= self.geometry.chunk
                self.shapes.add(("prefill", self.geometry.chunk))
                self._survive("chunk", state.admission, start + num_tokens)
                self.prefilled += num_tokens
                self._compute(state, start + num_tokens)
                assert sample == (state.computed == len(state.tokens))
                self.passes += 1
                return self._result(plan.step, (slot,) if sample else ())
            case Decode(slots, positions, bucket):
                assert len(set(slots)) == len(slots) <= bucket
                assert bucket in self.geometry.buckets
                self.shapes.add(("decode", bucket))
                for slot, position in zip(slots, positions, strict=True):
                    state = self.slots[slot]
                    assert position == state.computed == len(state.tokens) - 1, (slot, position, plan)
                    self._survive("decode", state.admission, position + 1)
                    self._compute(state, position + 1)
                self.passes += 1
                return self._result(plan.step, slots)
            case None:
                return StepResult(plan.step)
            case Pool():
                raise AssertionError("this device generates")

    def _survive(self, kind: Kind, admission: Admission, end: int) -> None:
        moment = Moment(kind, admission.request_id, end)
        if self.kills(moment):
            raise poison.DeviceLostError(admission.request_id)
        if self.fails(moment):
            raise poison.StepFailedError(admission.request_id)

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, f"slot {admission.slot} is taken"
        assert 0 <= admission.slot < self.geometry.max_num_seqs
        assert admission.num_computed_tokens < len(admission.token_ids)
        tables = [list(admission.blocks[group_id]) for group_id in sorted(admission.blocks)]
        state = _Slot(admission, list(admission.token_ids), admission.num_computed_tokens, tables)
        self.slots[admission.slot] = state
        written = -(-admission.num_computed_tokens // self.geometry.block_size)
        for group, table in enumerate(tables):
            for block in table[written:]:
                self.memory.pop((group, block), None)

    def _compute(self, state: _Slot, end: int) -> None:
        """Runs one graph for one row: reads what is visible, writes positions up to ``end``."""
        _contexts(state.tokens, state.contexts)
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
                    (group_id, state.tables[group_id][position // self.geometry.block_size]), []
                )
                offset = position % self.geometry.block_size
                assert offset < len(cells), f"position {position} of group {group_id} was never written"
                assert cells[offset] == state.contexts[position], f"position {position} of group {group_id}"
            for position in range(start, end):
                index, offset = divmod(position, self.geometry.block_size)
                block = state.tables[group_id][index]
                self._check_alone(group_id, block)
                cells = self.memory.setdefault((group_id, block), [None] * self.geometry.block_size)
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
        return table[max(0, state.computed - group.window + 1) // self.geometry.block_size :]

    def _result(self, step: int, slots: Sequence[int]) -> StepResult:
        tokens = [self._sample(self.slots[slot]) for slot in slots]
        if not self.jump:
            return StepResult(step, tuple(tokens))
        outputs = []
        for slot, token in zip(slots, tokens, strict=True):
            state = self.slots[slot]
            room = self.geometry.max_model_len - len(state.tokens)
            forced = [self._sample(state) for _ in range(min(self.jump, room) if token % 2 == 0 else 0)]
            outputs.append(SlotOutput(slot, (token, *forced)))
        if all(len(output.token_ids) == 1 for output in outputs):
            return StepResult(step, tuple(tokens))
        return StepResult(step, outputs=tuple(outputs))

    def _sample(self, state: _Slot) -> int:
        token = next_token(state.tokens, state.admission.sequence)
        state.tokens.append(token)
        return token


@dataclass
class Rig:
    """An engine with one replica on a simulated device, stepped by hand."""

    groups: Sequence[KvGroup]
    num_blocks: int | Sequence[int]
    options: CacheOptions
    geometry: Geometry
    ratio: int
    engine: Engine = field(init=False)
    scheduler: ReplicaScheduler = field(init=False)
    device: SimulatedDevice = field(init=False)
    sinks: dict[str, ListSink] = field(default_factory=dict)
    num_streams: int = 0
    """Streams that share the requests in turn; 0 gives each request a stream of its own."""
    streams: list[StreamSink] = field(init=False)
    now: float = 0.0
    """Reading of the clock."""
    max_lease: int = 1
    """Decode steps that a plan may allow."""
    plans_ahead: bool = False
    """Whether leases are renewed before they end."""
    lag: int = 0
    """Results that the worker has sent and the scheduler has not read."""
    interrupts: list[StepPlan] = field(default_factory=list)
    """Plans that ended a lease."""
    renewals: list[StepPlan] = field(default_factory=list)
    """Plans that continue a lease."""
    kills: Callable[[Moment], bool] = poison.nothing_kills
    """Whether the device dies instead of doing this; the next one starts at once."""
    fails: Callable[[Moment], bool] = poison.nothing_fails
    """Whether a step fails instead of doing this."""
    failers: list[str] = field(default_factory=list)
    """The sequences that made a step fail, in order."""
    killers: list[str] = field(default_factory=list)
    """The sequences that killed a device, in order."""
    meanwhile: Callable[[], None] = lambda: None
    """Called while each step runs."""

    def __post_init__(self) -> None:
        self.streams = [StreamSink(self.sinks) for _ in range(self.num_streams)]

    def start(self) -> None:
        """Attaches an empty replica."""
        blocks = [self.num_blocks] * len(self.groups) if isinstance(self.num_blocks, int) else self.num_blocks
        kv = KvCache(self.geometry, self.groups, blocks, model="m", options=self.options)
        # `kills` and `fails` may be set later.
        kills, fails = (lambda one: self.kills(one)), (lambda one: self.fails(one))  # noqa: PLW0108
        self.device = SimulatedDevice(self.geometry, self.groups, kills=kills, fails=fails)
        self.scheduler = ReplicaScheduler(
            self.geometry, kv, self.engine, Interleave(self.ratio), clock=lambda: self.now,
            max_lease=self.max_lease, plans_ahead=self.plans_ahead,
        )  # fmt: skip
        self.engine.attach("replica-0", AttachedReplica(self.scheduler, lambda: None))

    def replace_replica(self, num_blocks: int | None = None, loss: Loss = Loss.DIED) -> int:
        """Replaces the replica by an empty one; returns how many requests were requeued."""
        self.num_blocks = num_blocks or self.num_blocks
        back = self.engine.detach("replica-0", loss).num_requeued
        self.start()
        return back

    def submit(self, submission: Submission) -> ListSink:
        stream = self.streams[len(self.sinks) % self.num_streams] if self.streams else None
        sink = self.sinks.setdefault(submission.request_id, ListSink())
        self.engine.submit(submission, stream or sink)
        return sink

    def step(self) -> StepPlan | None:
        self.engine.dispatch()
        plan = self.scheduler.step()
        if plan is None:
            return None
        jump = self.device.jump
        try:
            self.answer(plan)
        except poison.DeviceLostError as killer:
            self.killers.append(str(killer))
            self.replace_replica()
            self.device.jump = jump
        return plan

    def answer(self, plan: StepPlan) -> int:
        """Runs plans until all are answered, as a worker and its driver do; returns this plan's steps."""
        worker, results, count = SimulatedWorker(self._run), deque[StepResult](), 0
        worker.take(plan)
        while self.scheduler.has_pending:
            self.meanwhile()
            self.engine.dispatch()
            if (newer := self.scheduler.interrupt()) is not None:
                self.interrupts.append(newer)
                worker.take(newer)
            if (newer := self.scheduler.plan_ahead()) is not None:
                self.renewals.append(newer)
                worker.take(newer)
            try:
                while worker.has_work and len(results) <= self.lag:
                    results.append(worker.run())
            except poison.DeviceLostError:
                for result in results:
                    self.scheduler.update(result)
                raise
            count += results[0].step == plan.step
            self.scheduler.update(results.popleft())
        return count

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self.device.run(plan)
        except poison.StepFailedError as failer:
            self.failers.append(str(failer))
            return StepResult(plan.step, error=Internal(f"the device failed at {failer}"))

    def run(self, limit: int = 10_000) -> list[StepPlan]:
        """Steps until no work is left; returns the plans."""
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) < limit, "the scheduler does not finish"
        return plans


def make_rig(
    geometry: Geometry | None = None, *, num_blocks: int | Sequence[int] = 65, groups: Sequence[KvGroup] = (FULL,),
    prefix_caching: bool = True, sub_block: bool = True, cache_generated: bool = False, decode_steps_per_chunk: int = 1,
    max_waiting: int = 1000, max_waiting_tokens: int = 100_000, order: OrderPolicy | None = None, max_lease: int = 1,
    num_streams: int = 0, max_worker_losses: int = 2, max_step_failures: int = 4, plans_ahead: bool = False, lag: int = 0,
) -> Rig:  # fmt: skip
    options = CacheOptions(prefix_caching, sub_block, cache_generated)
    rig = Rig(
        groups, num_blocks, options, geometry or make_geometry(), decode_steps_per_chunk, max_lease=max_lease,
        num_streams=num_streams, plans_ahead=plans_ahead, lag=lag,
    )  # fmt: skip
    rig.engine = Engine(
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        clock=lambda: rig.now,
        order=order or PriorityFairOrder(),
        max_worker_losses=max_worker_losses,
        max_step_failures=max_step_failures,
    )
    rig.engine.model = ModelLimits(rig.geometry.max_model_len, 97, frozenset(SAMPLING), 5, frozenset({EOS}))
    rig.start()
    return rig
