"""Small real objects for scheduler tests, and a simulated device that checks every plan it is given."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.block_pool import NULL_BLOCK_ID, BlockPool
from scheduler_svc.engine import AttachedReplica, Engine, ServedModel, Submission
from scheduler_svc.geometry import Geometry
from scheduler_svc.kv_cache import KvCache
from scheduler_svc.plan import Admission, Decode, Prefill, SlotOutput, StepPlan, StepResult
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.request import Event, Request
from scheduler_svc.sampling import SamplingParams
from scheduler_svc.scheduler import ReplicaScheduler

EOS = 2
_ARRIVALS = itertools.count()


class ListSink:
    """Keeps the events of one or many requests."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def push(self, event: Event) -> None:
        self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        """All tokens received, in order."""
        return [token for event in self.events for token in event.token_ids]


def make_pool(num_blocks: int = 9) -> BlockPool:
    return BlockPool(num_blocks)


def make_geometry(
    *, max_model_len: int = 64, max_num_seqs: int = 4, chunk: int = 4, block_size: int = 4,
    buckets: tuple[int, ...] = (1, 2, 4),
) -> Geometry:  # fmt: skip
    return Geometry(max_model_len, max_num_seqs, chunk, block_size, buckets)


def make_sampling(
    *, max_tokens: int = 8, stop_token_ids: Sequence[int] = (), ignore_eos: bool = False
) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids), ignore_eos=ignore_eos, logprobs=None,
    )  # fmt: skip


def make_request(
    prompt: Sequence[int] = (5, 6, 7), *, request_id: str | None = None, sampling: SamplingParams | None = None,
    priority: int = 0, cache_salt: str = "",
) -> Request:  # fmt: skip
    arrival = next(_ARRIVALS)
    return Request(
        request_id=request_id or f"r{arrival}", token_ids=list(prompt), num_prompt_tokens=len(prompt),
        sampling=sampling or make_sampling(), arrival=arrival, arrival_s=0.0, sink=ListSink(),
        priority=priority, cache_salt=cache_salt,
    )  # fmt: skip


def make_submission(
    prompt: Sequence[int] = (5, 6, 7), *, request_id: str = "r", max_tokens: int | None = 8, priority: int = 0,
    cache_salt: str = "", resumed: Sequence[int] = (), fields: frozenset[str] = frozenset(),
    stop_token_ids: Sequence[int] = (),
) -> Submission:  # fmt: skip
    return Submission(
        request_id=request_id, prompt_token_ids=tuple(prompt), max_tokens=max_tokens, priority=priority,
        sampling=make_sampling(stop_token_ids=stop_token_ids), cache_salt=cache_salt,
        resumed_token_ids=tuple(resumed), sampling_fields=fields,
    )  # fmt: skip


def next_token(context: Sequence[int], vocab_size: int = 97) -> int:
    """A deterministic "model": the next token is a function of the whole context."""
    digest = hashlib.blake2b(repr(tuple(context)).encode(), digest_size=4).digest()
    return 3 + int.from_bytes(digest, "little") % (vocab_size - 3)


def expected_tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the simulated model generates, alone and undisturbed."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass
class _Slot:
    admission: Admission
    tokens: list[int]
    computed: int
    tables: list[list[int]]


@dataclass
class SimulatedDevice:
    """Executes plans as a worker does and keeps, per block, the tokens whose KV it holds.

    A sampled token is computed from what the blocks hold, not from what the request said, so a wrong block table, a block that is
    shared while written, or a stale prefix hit changes the output.
    """

    geometry: Geometry
    num_groups: int = 1
    slots: dict[int, _Slot] = field(default_factory=dict)
    memory: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)
    prefilled: int = 0
    shapes: set[tuple[str, int]] = field(default_factory=set)

    def run(self, plan: StepPlan) -> StepResult:
        for slot in plan.release:
            self.slots.pop(slot, None)
        for admission in plan.admit:
            assert admission.slot not in self.slots, f"slot {admission.slot} is taken"
            assert 0 <= admission.slot < self.geometry.max_num_seqs
            tables = [list(table) for table in admission.block_ids]
            self.slots[admission.slot] = _Slot(
                admission, list(admission.token_ids), admission.num_computed, tables
            )
        for growth in plan.grow:
            self.slots[growth.slot].tables[growth.group_id].extend(growth.block_ids)
        match plan.work:
            case Prefill(slot, start, num_tokens, sample):
                state = self.slots[slot]
                assert start == state.computed
                assert start % self.geometry.chunk == 0, "chunks lie at chunk boundaries"
                assert 1 <= num_tokens <= self.geometry.chunk
                self.shapes.add(("prefill", self.geometry.chunk))
                self.prefilled += num_tokens
                for position in range(start, start + num_tokens):
                    self._write(state, position)
                state.computed += num_tokens
                assert sample == (state.computed == len(state.tokens))
                return StepResult(plan.step, (self._sample(state),) if sample else ())
            case Decode(slots, positions, bucket):
                assert len(set(slots)) == len(slots) <= bucket
                assert bucket in self.geometry.buckets
                self.shapes.add(("decode", bucket))
                for slot, position in zip(slots, positions, strict=True):
                    state = self.slots[slot]
                    assert position == state.computed == len(state.tokens) - 1
                    self._write(state, position)
                    state.computed += 1
                return StepResult(plan.step, tuple(self._sample(self.slots[slot]) for slot in slots))
            case None:
                return StepResult(plan.step)

    def _write(self, state: _Slot, position: int) -> None:
        index, offset = divmod(position, self.geometry.block_size)
        for group in range(self.num_groups):
            block = state.tables[group][index]
            assert block != NULL_BLOCK_ID
            sharers = [other for other in self.slots.values() if block in other.tables[group]]
            assert len(sharers) == 1, (
                f"block {block} of group {group} is written while {len(sharers)} slots use it"
            )
            cells = self.memory.setdefault((group, block), [None] * self.geometry.block_size)
            cells[offset] = state.tokens[position]

    def _sample(self, state: _Slot) -> SlotOutput:
        seen: list[list[int | None]] = []
        for group in range(self.num_groups):
            cells = [cell for block in state.tables[group] for cell in self.memory.get((group, block), [])]
            seen.append(cells[: state.computed])
        assert all(cells == state.tokens for cells in seen), "the blocks do not hold the request's tokens"
        token = next_token(state.tokens)
        state.tokens.append(token)
        return SlotOutput(state.admission.slot, (token,))


@dataclass
class Rig:
    """An engine with one replica on a simulated device, stepped by hand."""

    engine: Engine
    scheduler: ReplicaScheduler
    device: SimulatedDevice
    sinks: dict[str, ListSink] = field(default_factory=dict)

    def submit(self, submission: Submission) -> ListSink:
        sink = self.sinks.setdefault(submission.request_id, ListSink())
        self.engine.submit(submission, sink)
        return sink

    def step(self) -> StepPlan | None:
        plan = self.scheduler.step()
        if plan is not None:
            self.scheduler.update(self.device.run(plan))
        return plan

    def run(self, limit: int = 10_000) -> list[StepPlan]:
        """Steps until there is nothing to do."""
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) < limit, "the scheduler does not come to an end"
        return plans


def make_rig(
    geometry: Geometry | None = None, *, num_blocks: int = 65, num_groups: int = 1, prefix_caching: bool = True,
    decode_steps_per_chunk: int = 1, max_waiting: int = 1000, max_waiting_tokens: int = 100_000,
) -> Rig:  # fmt: skip
    geometry = geometry or make_geometry()
    engine = Engine(max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens, clock=lambda: 0.0)
    rig = Rig(engine, _replica(engine, geometry, num_blocks, num_groups, prefix_caching, decode_steps_per_chunk),
              SimulatedDevice(geometry, num_groups))  # fmt: skip
    engine.model = ServedModel(geometry.max_model_len, 97, frozenset({"temperature"}), 5)
    engine.attach("replica-0", AttachedReplica(rig.scheduler, lambda: None))
    return rig


def _replica(
    engine: Engine, geometry: Geometry, num_blocks: int, num_groups: int, prefix_caching: bool, ratio: int
) -> ReplicaScheduler:
    kv = KvCache(geometry, [num_blocks] * num_groups, model="m", prefix_caching=prefix_caching)
    return ReplicaScheduler(geometry, kv, engine.waiting, Interleave(ratio), eos_token_ids=frozenset({EOS}),
                            clock=lambda: 0.0, on_finish=engine.forget)  # fmt: skip


def replace_replica(rig: Rig, *, num_blocks: int = 65) -> int:
    """Loses the replica with everything in its memory and attaches an empty one; returns how many requests came back."""
    back = rig.engine.detach("replica-0")
    rig.device = SimulatedDevice(rig.device.geometry, rig.device.num_groups)
    rig.scheduler = _replica(rig.engine, rig.device.geometry, num_blocks, rig.device.num_groups, True, 1)
    rig.engine.attach("replica-0", AttachedReplica(rig.scheduler, lambda: None))
    return back
