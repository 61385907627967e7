"""Small real objects for scheduler tests, and an engine with one replica that is stepped by hand."""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protos.errors import Internal, TriptychError
from protos.limits import SAMPLING
from protos.steps import GroupKind, PoolShape, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.adapters.registry import Adapter, LoadAnswer
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, ChunkStarts, KvCache, hit_unit
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits, Resumed, Submission
from scheduler_svc.requests.pooled_model import PooledModel
from scheduler_svc.requests.request import Event, Request, Sink
from scheduler_svc.requests.sampling import Grammar, Sampling, StopRule
from scheduler_svc.shapes.buckets import prefill_buckets
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig
from tests.support.plan_order import SimulatedWorker
from tests.support.sampling_params import sampling_params
from tests.support.scheduler.simulated_device import (
    DeviceLostError,
    Moment,
    SimulatedDevice,
    StepFailedError,
    never,
    next_token,
)

if TYPE_CHECKING:
    from tests.support.scheduler.simulated_adapters import SimulatedAdapters

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


class StreamSink:
    """One client stream: passes its requests' events on to a list for each request."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = sinks

    def push(self, event: Event) -> None:
        self._sinks[event.request_id].push(event)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        assert request_ids
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self._sinks[request_id].push(Event(request_id, (token_id,)))


def make_shapes(
    *, max_model_len: int = 64, max_num_seqs: int = 4, chunk: int = 4, block_size: int = 4,
    buckets: tuple[int, ...] = (1, 2, 4), stages: int = 1,
) -> ShapeConfig:  # fmt: skip
    chunks = prefill_buckets("exp", chunk=chunk, block_size=block_size, minimum=1)
    return ShapeConfig(max_model_len, max_num_seqs, chunk, block_size, buckets, stages, chunks)


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
        sampling=sampling, arrival=arrival, arrival_s=arrival_s, sink=ListSink(), stop=StopRule.from_sampling(sampling, frozenset({EOS}), sampling.max_tokens),
        priority=priority, tenant=tenant, cache_salt=cache_salt,
    )  # fmt: skip


def make_sequence(prompt: Sequence[int], *, cache_salt: str = "") -> SequenceKv:
    """Returns a sequence without blocks."""
    return SequenceKv(list(prompt), cache_salt)


def make_submission(
    prompt: Sequence[int] = (5, 6, 7), *, request_id: str = "r", max_tokens: int | None = 8, priority: int = 0,
    cache_salt: str = "", resumed: Sequence[int] = (), tenant: str = "", n: int = 1, sampling: Sampling | None = None,
    resumed_sequences: Sequence[Resumed] = (), age_s: float | None = None, silent_s: float = 0.0,
    lora_name: str = "", **fields: Any,
) -> Submission:  # fmt: skip
    """Returns a valid request; ``fields`` are those of its sampling parameters."""
    if resumed:
        resumed_sequences = (Resumed(0, tuple(resumed)),)
    sampling = (sampling or make_sampling(**fields)).changed(max_tokens=max_tokens)
    return Submission(
        request_id=request_id, prompt_token_ids=tuple(prompt), priority=priority, tenant=tenant, sampling=sampling,
        cache_salt=cache_salt, n=n, resumed=tuple(resumed_sequences), age_s=age_s,
        silent_s=silent_s, lora_name=lora_name,
    )  # fmt: skip


def make_pool_submission(
    prompt: Sequence[int] = (5, 6), *, request_id: str = "r", **fields: Any
) -> Submission:
    """Returns a valid request for an embedding."""
    pooling = common_pb2.PoolingParams(task=common_pb2.POOL_TASK_EMBED)
    return Submission(request_id, tuple(prompt), pooling=pooling, **fields)


def make_pooled_model(*shapes: PoolShape) -> PooledModel:
    """Returns an embedding model of two values with these shapes, ascending."""
    return PooledModel(1000, frozenset({common_pb2.POOL_TASK_EMBED}), 2, common_pb2.PoolingInfo(), shapes)


def expected_tokens(
    prompt: Sequence[int], max_tokens: int, sequence: int = 0, weights: str = ""
) -> list[int]:
    """Returns what the simulated model generates with an adapter's weights, alone and undisturbed."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, sequence, weights))
    return context[len(prompt) :]


def simulated_adapters(
    max_loras: int, max_cpu_loras: int, sources: Mapping[str, str | TriptychError]
) -> "SimulatedAdapters":
    """Returns an empty store; see :class:`SimulatedAdapters`."""
    # PyTorch's import takes a second, which tests without adapters save.
    from tests.support.scheduler.simulated_adapters import SimulatedAdapters

    return SimulatedAdapters(max_loras, max_cpu_loras, sources)


class RigAdapters:
    """The adapters of a replica in a rig: its worker's store, and the calls that wait for an answer."""

    def __init__(
        self, clock: Callable[[], float], max_loras: int, max_cpu_loras: int,
        sources: Mapping[str, str | TriptychError],
    ) -> None:  # fmt: skip
        self.store = simulated_adapters(max_loras, max_cpu_loras, sources)
        self.seats = AdapterSeats(max_loras, max_cpu_loras, clock)
        self.loads: deque[tuple[Adapter, int, list[int] | TriptychError, LoadAnswer]] = deque()
        """Unanswered loads: the adapter, the load's id, and the loads displaced by it."""

    def load(
        self, adapter: Adapter, load_id: int, needed: Callable[[], Sequence[int]], answered: LoadAnswer
    ) -> None:
        try:
            displaced: list[int] | TriptychError = self.store.begin(load_id, needed())
        except TriptychError as error:
            displaced = error
        self.loads.append((adapter, load_id, displaced, answered))

    def attach_to(self, replica: AttachedReplica) -> AttachedReplica:
        """Gives a replica its calls; returns it."""
        replica.load_adapter, replica.unload_adapter = self.load, self.store.unload
        return replica

    def answer(self, error: TriptychError | None = None) -> None:
        """Answers all calls; with an error, no adapter can be loaded."""
        while self.loads:
            adapter, load_id, displaced, answered = self.loads.popleft()
            try:
                if error is not None:
                    raise error
                if isinstance(displaced, TriptychError):
                    raise displaced
                result = self.store.end(load_id, adapter.source, displaced)
            except TriptychError as refusal:
                self.store.unload(load_id)
                answered(refusal)
            else:
                answered(result)


@dataclass
class Rig:
    """An engine with one replica on a simulated device, stepped by hand."""

    groups: Sequence[KvGroup]
    num_blocks: int | Sequence[int]
    options: CacheOptions
    shapes: ShapeConfig
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
    lease_steps: int = 1
    """Decode steps that a plan may allow."""
    itl_target_s: float = 0.0
    """Target for the time between two tokens of a request."""
    event_interval_s: float | None = None
    """Time for which the worker may collect the tokens of these steps."""
    depth: int | None = None
    """Plans that the worker may have at once."""
    lag: int = 0
    """Results that the worker has sent and the scheduler has not read."""
    dispatches: bool = True
    """Whether waiting requests may get a slot while results are outstanding."""
    sent: Callable[[], None] = lambda: None
    """Called when a plan was sent."""
    kills: Callable[[Moment], bool | None] = never
    """Whether the device dies instead of doing this; the next one starts at once."""
    fails: Callable[[Moment], bool | None] = never
    """Whether a step fails instead of doing this."""
    refuses: Callable[[Moment], TriptychError | None] = never
    """Why the device refuses this admission, if it does."""
    reports: Callable[[str], bool | None] = never
    """Whether a sequence asks for log-probabilities."""
    failers: list[str] = field(default_factory=list)
    """The sequences that made a step fail, in order."""
    faults: int = 0
    """Failed steps."""
    killers: list[str] = field(default_factory=list)
    """The sequences that killed a device, in order."""
    meanwhile: Callable[[], None] = lambda: None
    """Called while each step runs."""
    most_plans: int = 1
    """Plans of one :meth:`step`."""
    plans: list[StepPlan] = field(default_factory=list)
    """The plans of the last :meth:`step`."""
    adapter_slots: int = 0
    max_cpu_loras: int = 0
    sources: dict[str, str | TriptychError] = field(default_factory=dict)
    """Adapters by source: their weights, or why they cannot be loaded. A source that is absent is its own
    weights."""
    adapters: "RigAdapters | None" = None
    """The adapters of the replica, if it runs any."""
    loads_at_once: bool = True
    """Whether the replica answers these before every step."""

    def __post_init__(self) -> None:
        self.streams = [StreamSink(self.sinks) for _ in range(self.num_streams)]

    def start(self) -> None:
        """Attaches an empty replica."""
        blocks = [self.num_blocks] * len(self.groups) if isinstance(self.num_blocks, int) else self.num_blocks
        kv = KvCache(self.shapes, self.groups, blocks, model="m", options=self.options)
        # These may be set later.
        kills, fails = (lambda one: self.kills(one)), (lambda one: self.fails(one))  # noqa: PLW0108
        refuses, reports = (lambda one: self.refuses(one)), (lambda one: self.reports(one))  # noqa: PLW0108
        if self.adapter_slots:
            self.adapters = RigAdapters(
                lambda: self.now, self.adapter_slots, self.max_cpu_loras, self.sources
            )
        self.device = SimulatedDevice(
            self.shapes, self.groups, hit_unit(self.shapes, self.groups, self.options), kills=kills, fails=fails,
            refuses=refuses, reports=reports,
            adapters=self.adapters.store if self.adapters else None,
        )  # fmt: skip
        self.scheduler = ReplicaScheduler(
            self.shapes, kv, self.engine, Turns(self.ratio, itl_target_s=self.itl_target_s), clock=lambda: self.now,
            lease_steps=self.lease_steps, event_interval_s=self.event_interval_s, adapters=self.adapters.seats if self.adapters else None, depth=self.depth,
        )  # fmt: skip
        replica = AttachedReplica(self.scheduler, lambda: None)
        self.engine.attach("replica-0", self.adapters.attach_to(replica) if self.adapters else replica)

    @property
    def hosted(self) -> dict[int, str]:
        """The adapters on the replica's host by id, with their weights."""
        assert self.adapters is not None
        return self.adapters.store.hosted

    def answer_loads(self) -> None:
        """Loads the adapters that the replica was asked for."""
        if self.adapters is not None:
            self.adapters.answer()

    def load_adapter(
        self, name: str, source: str | None = None, *, in_place: bool = False
    ) -> Adapter | TriptychError:
        """Loads a new adapter; its source is its name by default."""
        outcomes: list[Adapter | TriptychError] = []
        self.engine.adapters.load(name, source or name, in_place=in_place, done=outcomes.append)
        self.answer_loads()
        return outcomes[0]

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

    def step(self) -> list[StepPlan]:
        """Runs until nothing is in flight; returns the plans that were sent."""
        if self.loads_at_once:
            self.answer_loads()
        self.plans: list[StepPlan] = []
        jump = self.device.jump
        try:
            self._step()
        except DeviceLostError as killer:
            self.killers.append(str(killer))
            self.replace_replica()
            self.device.jump = jump
        return self.plans

    def _step(self) -> None:
        worker, results = SimulatedWorker(self._run), deque[StepResult]()
        while True:
            is_busy = worker.has_work or bool(results)
            if is_busy:
                self.meanwhile()
            if self.dispatches or not is_busy:
                self.engine.dispatch()
            while len(self.plans) < self.most_plans and (plan := self.scheduler.next_plan()) is not None:
                self.plans.append(plan)
                self.sent()
                worker.take(plan)
            if not (worker.has_work or results):
                return
            try:
                while worker.has_work and len(results) <= self.lag:
                    results.append(worker.run())
            except DeviceLostError:
                for result in results:
                    self.scheduler.update(result)
                raise
            assert results, list(self.scheduler._plans)
            self.scheduler.update(results.popleft())

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            return self.device.run(plan)
        except StepFailedError as failer:
            self.failers.append(str(failer))
            self.faults += 1
            return StepResult(plan.step, error=Internal(f"the device failed at {failer}"))

    def run(self, limit: int = 10_000) -> list[StepPlan]:
        """Steps until no work is left; returns the plans."""
        plans: list[StepPlan] = []
        while sent := self.step():
            plans += sent
            assert len(plans) < limit, "the scheduler does not finish"
        return plans


def make_rig(
    shapes: ShapeConfig | None = None, *, num_blocks: int | Sequence[int] = 65, groups: Sequence[KvGroup] = (FULL,),
    prefix_caching: bool = True, sub_block: bool = True, cache_generated: bool = False, decode_steps_per_chunk: int = 1,
    max_waiting: int = 1000, max_waiting_tokens: int = 100_000, order: PriorityFairOrder | None = None, lease_steps: int = 1,
    num_streams: int = 0, max_worker_losses: int = 2, max_step_failures: int = 4, depth: int | None = None, lag: int = 0, most_plans: int = 1,
    dispatches: bool = True, event_interval_s: float | None = None, itl_target_s: float = 0.0, adapter_slots: int = 0, max_cpu_loras: int | None = None,
    chunk_starts: ChunkStarts = "whole", finest_hit: int = 4,
) -> Rig:  # fmt: skip
    options = CacheOptions(
        prefix_caching, sub_block, cache_generated, chunk_starts=chunk_starts, finest_hit=finest_hit
    )
    rig = Rig(
        groups, num_blocks, options, shapes or make_shapes(), decode_steps_per_chunk, lease_steps=lease_steps,
        num_streams=num_streams, depth=depth, lag=lag, most_plans=most_plans, dispatches=dispatches,
        adapter_slots=adapter_slots, max_cpu_loras=max_cpu_loras or adapter_slots, event_interval_s=event_interval_s,
        itl_target_s=itl_target_s,
    )  # fmt: skip
    rig.engine = Engine(
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        clock=lambda: rig.now,
        order=order or PriorityFairOrder(),
        max_worker_losses=max_worker_losses,
        max_step_failures=max_step_failures,
    )
    rig.engine.model = ModelLimits(rig.shapes.max_model_len, 97, frozenset(SAMPLING), 5, frozenset({EOS}))
    rig.start()
    return rig
