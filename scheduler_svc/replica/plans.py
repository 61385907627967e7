"""The next plan, and the plans that the worker has not answered in full."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from scheduler_svc.kv.copies import PendingCopy
from scheduler_svc.requests.request import Request, Sink

MAX_ADMITTED_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Byte budget for admissions in one plan; the rest of the message is more than enough for everything else."""

_BYTES_PER_ID = 4
"""Bytes of a token id in a message, at most: ids are below 2**28."""


class PlanBuilder:
    """Collects changes until the next plan is sent.

    A request travels in full, once, so its size limits how many others the same plan can admit.
    """

    def __init__(self) -> None:
        """Starts without changes."""
        # With the size of each admission, in bytes.
        self._admitted: dict[str, tuple[Request, int]] = {}
        self._bytes = 0
        self._refused = False
        self._released: list[int] = []
        self._grown: list[Growth] = []
        self._step = 0

    @property
    def next_step(self) -> int:
        """The number of the next plan."""
        return self._step + 1

    @property
    def admits(self) -> bool:
        """Whether the plan admits requests."""
        return bool(self._admitted)

    @property
    def releases(self) -> bool:
        """Whether the plan releases slots."""
        return bool(self._released)

    def has_room(self, request: Request) -> bool:
        """Whether the request fits beside those already admitted. The first of a plan always does."""
        if self._admitted and self._bytes + _num_bytes(request) > MAX_ADMITTED_BYTES:
            self._refused = True
            return False
        return True

    def admit(self, request: Request) -> None:
        """Admits a request that has a slot, with the blocks that it has when the plan is sent."""
        size = _num_bytes(request)
        self._bytes += size
        self._admitted[request.request_id] = (request, size)

    def release(self, request: Request, slot: int) -> None:
        """Releases a slot, unless the request's admission has not been sent yet."""
        admitted = self._admitted.pop(request.request_id, None)
        if admitted is None:
            self._released.append(slot)
        else:
            self._bytes -= admitted[1]
        self._grown = [growth for growth in self._grown if growth.slot != slot]

    def grow(self, request: Request, grown: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Appends blocks, by KV group, to a request's tables. An admission carries its blocks itself."""
        if request.request_id not in self._admitted:
            assert request.slot is not None
            self._grown += [Growth(request.slot, group_id, block_ids) for group_id, block_ids in grown]

    def build(
        self, work: Prefill | Decode | None, copies: Sequence[PendingCopy], suspect: Request | None = None,
        *, continues: bool = False,
    ) -> tuple[StepPlan, bool]:  # fmt: skip
        """Returns the plan and starts the next one.

        Args:
            work: the plan's step.
            copies: the block copies that come before it.
            suspect: the suspect that the work is for. A suspect is admitted together with its first work, and
                no other request in the same plan.
            continues: see :attr:`StepPlan.continues`.

        Returns:
            The plan, and whether a request was refused that may fit into the next plan.
        """
        self._step += 1
        plan = StepPlan(
            self._step,
            work,
            release=tuple(self._released),
            copies=tuple([_block_copy(copy) for copy in copies]) if copies else (),
            admit=self._take_admissions(suspect) if self._admitted else (),
            grow=tuple(self._grown),
            continues=continues,
        )
        refused, self._refused = self._refused, False
        if self._released:
            self._released = []
        self._grown.clear()
        return plan, refused

    def _take_admissions(self, suspect: Request | None) -> tuple[Admission, ...]:
        """Returns the admissions that may be sent now; see :meth:`build`."""
        requests = [request for request, _ in self._admitted.values()]
        if suspect is not None:
            requests = [request for request in requests if request is suspect]
        else:
            requests = [request for request in requests if not request.suspect]
        for request in requests:
            self._bytes -= self._admitted.pop(request.request_id)[1]
        return tuple([_admission(request) for request in requests])


def _num_bytes(request: Request) -> int:
    """Returns an upper estimate of an admission's size on the wire."""
    return _BYTES_PER_ID * len(request.token_ids) + request.sampling.num_bytes


def _block_copy(copy: PendingCopy) -> BlockCopy:
    return BlockCopy(copy.group_id, copy.source.block_id, copy.target.block_id, copy.num_tokens)


def _admission(request: Request) -> Admission:
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
        adapter_id=request.adapter_load,
        traceparent=request.traceparent,
    )


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The requests of a decode step, in batch order."""

    requests: tuple[Request, ...] = ()
    slots: tuple[int, ...] = ()
    """Their slots."""
    sinks: Sequence[tuple[Sink, list[str], list[int] | None]] = ()
    """Their sinks; with each its requests' ids and their rows, None for all rows."""
    tenants: Mapping[str, int] = field(default_factory=dict)
    """The number of rows of each tenant."""
    micro_batch: int = 0
    """Index of their decode batch."""


@dataclass(slots=True)
class InFlight:
    """A plan that awaits its last result."""

    plan: StepPlan
    requests: Sequence[Request]
    """The requests in the plan's work, in its order."""
    copies: Sequence[PendingCopy]
    """The block copies that the plan carries."""
    begun_s: float
    """Clock reading when the worker could begin: when the plan was sent, or the plan before it answered."""
    alone: bool = False
    """Whether the work is a suspect's."""
    batch: BatchRows | None = None
    """The rows of a step of the decode batch."""
    left: set[int] = field(default_factory=set)
    """Slots that were released since; their results are ignored."""
    excused: set[Request] = field(default_factory=set)
    """Requests that a step before it was blamed on. If this one fails, too, it is for the same reason."""
    num_results: int = 0
    """Results received so far."""

    @property
    def lease(self) -> int:
        """Decode steps that the plan allows."""
        work = self.plan.work
        return work.lease if isinstance(work, Decode) else 1


class StepsInFlight:
    """Plans in the order in which they were sent, which is also the order of their results."""

    def __init__(self) -> None:
        """Starts empty."""
        self._steps: deque[InFlight] = deque()

    def __iter__(self) -> Iterator[InFlight]:
        """Yields the plans in order."""
        return iter(self._steps)

    def __bool__(self) -> bool:
        """Whether results are outstanding."""
        return bool(self._steps)

    @property
    def leasing(self) -> bool:
        """Whether the latest plan allows further decode steps, which another plan would cut short."""
        if not self._steps:
            return False
        latest = self._steps[-1]
        return latest.lease > 1 or (latest.plan.continues and isinstance(latest.plan.work, Decode))

    @property
    def last(self) -> InFlight | None:
        """The latest plan."""
        return self._steps[-1] if self._steps else None

    @property
    def latest(self) -> int:
        """The number of the latest plan; 0 if none is in flight."""
        return self._steps[-1].plan.step if self._steps else 0

    @property
    def alone(self) -> InFlight | None:
        """The plan in flight, if there is exactly one."""
        return self._steps[0] if len(self._steps) == 1 else None

    def __len__(self) -> int:
        """Plans without their last result."""
        return len(self._steps)

    def runs(self, request: Request) -> bool:
        """Whether the work of a plan includes the request, in the slot that it has."""
        slot = request.slot
        return any(slot in slots_of(step.plan.work) and slot not in step.left for step in self._steps)

    def chunk_tokens(self, request: Request) -> int:
        """Tokens of the request's chunks that were sent and not answered."""
        slot = request.slot
        return sum(
            work.num_tokens
            for step in self._steps
            if isinstance(work := step.plan.work, Prefill) and work.slot == slot and slot not in step.left
        )

    def has_batch(self, micro_batch: int) -> bool:
        """Whether a step of that decode batch is outstanding."""
        return any(step.batch is not None and step.batch.micro_batch == micro_batch for step in self._steps)

    def has_chunk_behind(self, step: InFlight) -> bool:
        """Whether a chunk was sent behind ``step``, the plan that was answered last."""
        return any(other is not step and isinstance(other.plan.work, Prefill) for other in self._steps)

    def send(self, step: InFlight) -> None:
        """Adds a plan that is sent now."""
        self._steps.append(step)

    def ignore_slot(self, slot: int) -> None:
        """Ignores outstanding results for ``slot``."""
        for step in self._steps:
            step.left.add(slot)

    def excuse(self, requests: Iterable[Request]) -> None:
        """Blames nothing that outstanding plans bring on ``requests``; see :attr:`InFlight.excused`."""
        for step in self._steps:
            step.excused.update(requests)

    def clear(self) -> None:
        """Forgets all plans; no result will come."""
        self._steps.clear()

    def match(self, result: StepResult, clock: Callable[[], float]) -> InFlight:
        """Returns the plan that a result answers, and removes it if this is its last result.

        Args:
            result: the worker's answer.
            clock: monotonic seconds.

        Raises:
            Internal: if no such plan is outstanding, or it allowed fewer steps.
        """
        step = self._steps[0] if self._steps else None
        if step is None or step.plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {step.plan.step if step else 'none'}"
            )
        if step.num_results and step.num_results == step.lease:
            raise Internal(f"the worker ran more steps than the {step.lease} that plan {result.step} allowed")
        step.num_results += 1
        if result.last or result.error is not None or step.lease == 1:
            self._steps.popleft()
            if self._steps:
                self._steps[0].begun_s = clock()
        return step
