"""The next plan, and the plans in flight."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from protos.errors import Internal
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.steps import (
    Admission,
    BlockCopy,
    Decode,
    Growth,
    Prefill,
    StepPlan,
    StepResult,
    slots_of,
)
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.copies import PendingCopy
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Request, Sink

MAX_ADMITTED_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Byte budget for admissions in one plan; the rest of the message is more than enough for everything else."""

_BYTES_PER_ID = 4
"""Bytes of a token id in a message, at most: ids are below 2**28."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The requests of a decode step, in batch order."""

    requests: tuple[Request, ...] = ()
    slots: tuple[int, ...] = ()
    """Their slots."""
    sinks: Sequence[tuple[Sink, list[str], list[int] | None]] = ()
    """Their sinks, each with the ids of its requests and their rows, None for all rows."""
    tenants: Mapping[str, int] = field(default_factory=dict)
    """The number of rows of each tenant."""
    has_first_tokens: bool = False
    """Whether a row may give the first token of its request, which takes the slower path of results."""


def batch_of(requests: tuple[Request, ...]) -> BatchRows:
    """Returns the rows of requests with slots."""
    slots = tuple([request.slot for request in requests if request.slot is not None])
    tenants = Counter(request.tenant for request in requests)
    first_tokens = any(request.can_fork for request in requests)
    sinks: dict[int, tuple[Sink, list[str], list[int]]] = {}
    for row, request in enumerate(requests):
        _, request_ids, rows = sinks.setdefault(id(request.sink), (request.sink, [], []))
        request_ids.append(request.request_id)
        rows.append(row)
    if len(sinks) == 1:
        ((sink, request_ids, _),) = sinks.values()
        return BatchRows(requests, slots, [(sink, request_ids, None)], tenants, first_tokens)
    return BatchRows(requests, slots, list(sinks.values()), tenants, first_tokens)


@dataclass(slots=True)
class InFlight:
    """A plan without its last result."""

    plan: StepPlan
    requests: Sequence[Request]
    """The requests of the plan's work, in its order."""
    begun_s: float
    """Clock reading when the worker could begin: when the plan was sent, or the plan before it answered."""
    copies: Sequence[PendingCopy] = ()
    """The block copies of the plan."""
    batch: BatchRows | None = None
    """The rows of a decode batch; None for other work, such as a suspect's step."""
    paced: bool = False
    """Whether its decode steps come between two chunks, so that no chunk ends them."""
    answered: bool = False
    """Whether its last result is being applied."""
    left: set[int] = field(default_factory=set)
    """Slots released since."""
    skipped: set[int] = field(default_factory=set)
    """Slots skipped because of forced tokens before it. If the plan fails, they are dead all the same."""
    num_steps: int = 0
    """Steps run so far."""

    @property
    def ignored(self) -> set[int]:
        """Slots whose results are ignored."""
        return self.left | self.skipped if self.skipped else self.left

    @property
    def runs(self) -> list[Request]:
        """The requests of rows that run."""
        return self._requests_but(self.ignored)

    @property
    def here(self) -> list[Request]:
        """The requests still in their slots: those that fail if the plan does."""
        return self._requests_but(self.left)

    def _requests_but(self, slots: set[int]) -> list[Request]:
        pairs = zip(slots_of(self.plan.work), self.requests, strict=True)
        return [request for slot, request in pairs if slot not in slots]

    def live_rows(self) -> tuple[BatchRows, list[int]]:
        """Returns the rows not ignored, and their places in the batch."""
        ignored = self.ignored
        places = [place for place, slot in enumerate(slots_of(self.plan.work)) if slot not in ignored]
        return batch_of(tuple([self.requests[place] for place in places])), places

    @property
    def num_left(self) -> int:
        """Decode steps still allowed."""
        work = self.plan.work
        return work.steps - self.num_steps if isinstance(work, Decode) else 0


class StepsInFlight:
    """Plans in the order of sending, which is also the order of their results."""

    def __init__(self) -> None:
        """Starts empty."""
        self._steps: deque[InFlight] = deque()

    def __iter__(self) -> Iterator[InFlight]:
        """Yields the plans in order."""
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def latest(self) -> int:
        """The number of the latest plan; 0 if none is in flight."""
        return self._steps[-1].plan.step if self._steps else 0

    @property
    def decodes_on(self) -> bool:
        """Whether the latest plan allows several decode steps, and a chunk may end them."""
        return bool(self._steps) and self._steps[-1].num_left > 1 and not self._steps[-1].paced

    def granted(self) -> dict[Request, int]:
        """Returns the tokens that the plans may still compute for each request still in them."""
        granted: dict[Request, int] = {}
        for step in self._steps:
            if step.answered:
                continue
            work = step.plan.work
            tokens = work.num_tokens if isinstance(work, Prefill) else step.num_left
            for request in step.runs:
                granted[request] = granted.get(request, 0) + tokens
        return granted

    def runs(self, request: Request) -> bool:
        """Whether the work of a plan includes the request, in its present slot."""
        return any(request is one for step in self._steps if not step.answered for one in step.runs)

    def has_chunk_after(self, step: InFlight) -> bool:
        """Whether a chunk was sent after ``step``, the oldest plan."""
        return any(other is not step and isinstance(other.plan.work, Prefill) for other in self._steps)

    def add(self, step: InFlight) -> None:
        """Adds a plan."""
        self._steps.append(step)

    def leave(self, slot: int) -> None:
        """Notes that a slot was released."""
        for step in self._steps:
            step.left.add(slot)

    def skip(self, slot: int) -> None:
        """Notes that all plans skip a slot."""
        for step in self._steps:
            step.skipped.add(slot)

    def clear(self) -> None:
        """Forgets all plans: no result will come."""
        self._steps.clear()

    def match(self, result: StepResult) -> InFlight:
        """Returns the plan of a result.

        Raises:
            Internal: it is not the oldest outstanding plan, or allowed fewer steps.
        """
        step = self._steps[0] if self._steps else None
        if step is None or step.plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {step.plan.step if step else 'none'}"
            )
        most = step.plan.work.steps if isinstance(step.plan.work, Decode) else 1
        if step.num_steps + result.num_steps > most:
            raise Internal(f"the worker ran more steps than the {most} that plan {result.step} allowed")
        step.num_steps += result.num_steps
        return step

    def close(self, clock: Callable[[], float]) -> None:
        """Removes the oldest plan, after its last result."""
        self._steps.popleft()
        if self._steps:
            self._steps[0].begun_s = clock()


class Plans(StepsInFlight):
    """Collects changes of slots and blocks for the next plan, and tracks the plans in flight.

    The first plan with work for a request admits it, with all its tokens and blocks.
    """

    def __init__(self, kv: KvCache, stats: SchedulerStats, clock: Callable[[], float]) -> None:
        """Starts without changes; ``kv`` allocates blocks."""
        super().__init__()
        self._kv = kv
        self._stats = stats
        self._clock = clock
        # Requests with a slot still unknown to the worker, by id.
        self._unsent: dict[str, Request] = {}
        self._released: list[int] = []
        self._grown: list[Growth] = []
        self._step = 0

    @property
    def releases(self) -> bool:
        """Whether the next plan releases slots."""
        return bool(self._released)

    def admit(self, request: Request) -> None:
        """Notes that a request got a slot."""
        self._unsent[request.request_id] = request

    def release(self, request: Request, slot: int) -> None:
        """Releases a slot, in the next plan if the worker knows of its request; ignores its results."""
        if self._unsent.pop(request.request_id, None) is None:
            self._released.append(slot)
        if self._grown:
            self._grown = [growth for growth in self._grown if growth.slot != slot]
        self.leave(slot)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Grows the tables of a request with a slot; False, with no block allocated, if too few are free."""
        grown = self._kv.grow(request.kv, num_tokens)
        if grown is None:
            return False
        if request.request_id not in self._unsent:
            assert request.slot is not None
            self._grown += [Growth(request.slot, group_id, block_ids) for group_id, block_ids in grown]
        return True

    def first_that_fit(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Returns the leading requests whose admissions fit one plan, at least the first."""
        if not self._unsent:
            return requests
        room = MAX_ADMITTED_BYTES
        for count, request in enumerate(requests):
            if request.request_id in self._unsent:
                room -= _BYTES_PER_ID * len(request.token_ids) + request.sampling.num_bytes
                if room < 0 and count:
                    return requests[:count]
        return requests

    def send(
        self, work: Prefill | Decode | None, requests: Sequence[Request], batch: BatchRows | None = None, *,
        interrupts: bool = False, context_tokens: int = 0, paced: bool = False,
    ) -> StepPlan:  # fmt: skip
        """Returns the plan with this work for these requests, after all changes and copies, now in flight."""
        if work is not None:
            self._stats.plans += 1
            self._stats.plans_ahead += bool(self)
        self._step += 1
        copies = self._kv.copies.take()
        admitted: Sequence[Admission] = ()
        if self._unsent:
            unsent = [one for one in requests if self._unsent.pop(one.request_id, None) is not None]
            admitted = tuple([admission_of(request) for request in unsent])
        plan = StepPlan(
            self._step,
            work,
            release=tuple(self._released),
            copies=tuple(map(_block_copy, copies)) if copies else (),
            admit=admitted,
            grow=tuple(self._grown),
            interrupts=interrupts,
            context_tokens=context_tokens,
        )
        if self._released:
            self._released = []
        if self._grown:
            self._grown = []
        self.add(InFlight(plan, requests, self._clock(), copies, batch, paced))
        return plan


def _block_copy(copy: PendingCopy) -> BlockCopy:
    return BlockCopy(copy.group_id, copy.source.block_id, copy.target.block_id, copy.num_tokens)


def admission_of(request: Request) -> Admission:
    """Returns the admission of a request with a slot; without blocks for a pooling model."""
    assert request.slot is not None
    return Admission(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.kv.num_computed,
        sampling=request.sampling.params,
        blocks={
            group_id: tuple([block.block_id for block in table.blocks])
            for group_id, table in enumerate(request.kv.tables)
        },
        sequence=request.sequence,
        pooling=request.pooling,
        adapter_id=request.adapter_load,
        traceparent=request.traceparent,
    )
