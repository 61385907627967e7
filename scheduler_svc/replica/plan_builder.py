"""What the next plan will tell the worker beside its work: who comes, who has gone, whose tables have grown."""

from collections.abc import Iterable
from typing import Final

from protos.wire import MAX_MESSAGE_BYTES
from scheduler_svc.kv.copies import Copies
from scheduler_svc.replica.step_plan import Admission, Decode, Growth, Prefill, StepPlan
from scheduler_svc.requests.request import Request
from scheduler_svc.requests.sampling import BYTES_PER_ID

MAX_ADMITTED_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Of a plan's message, what the requests that it admits may take together; the rest is more than enough for all else that a plan says."""


class NextPlan:
    """Gathers until the plan is sent. Each request travels in full, once, so how many one plan can admit depends on what they carry."""

    def __init__(self) -> None:
        """Nothing is to be told."""
        # With what each weighs, in bytes.
        self._admitted: dict[str, tuple[Request, int]] = {}
        self._bytes = 0
        self._turned_away = False
        self._released: list[int] = []
        self._grown: list[Growth] = []
        self._step = 0

    @property
    def admits(self) -> bool:
        """Whether somebody gets a slot."""
        return bool(self._admitted)

    @property
    def releases(self) -> bool:
        """Whether somebody has given up a slot."""
        return bool(self._released)

    def takes(self, request: Request) -> bool:
        """Whether the request fits beside those that are admitted already; a plan's first always does."""
        if self._admitted and self._bytes + _weight(request) > MAX_ADMITTED_BYTES:
            self._turned_away = True
            return False
        return True

    def admit(self, request: Request) -> None:
        """The request has got a slot; its blocks are those that it has when the plan is sent."""
        weight = _weight(request)
        self._bytes += weight
        self._admitted[request.request_id] = (request, weight)

    def release(self, request: Request, slot: int) -> None:
        """The request has left ``slot``; a worker that was never told of it need not hear of that."""
        admitted = self._admitted.pop(request.request_id, None)
        if admitted is None:
            self._released.append(slot)
        else:
            self._bytes -= admitted[1]
        self._grown = [growth for growth in self._grown if growth.slot != slot]

    def grow(self, request: Request, grown: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """A running request's tables have got blocks, by KV group; those of one that this very plan admits travel with it."""
        if request.request_id not in self._admitted:
            assert request.slot is not None
            self._grown += [Growth(request.slot, group_id, block_ids) for group_id, block_ids in grown]

    def take(self, work: Prefill | Decode | None, copies: Copies | None) -> tuple[StepPlan, bool]:
        """The plan; what it says is not said again.

        Returns:
            The plan, and whether somebody was turned away who may fit into the one after it.
        """
        self._step += 1
        plan = StepPlan(
            self._step,
            work,
            release=tuple(self._released),
            copies=copies.orders if copies else (),
            admit=tuple([_admission(request) for request, _ in self._admitted.values()])
            if self._admitted
            else (),
            grow=tuple(self._grown),
        )
        turned_away, self._turned_away = self._turned_away, False
        if self._released:
            self._released = []
        if self._admitted:
            self._admitted.clear()
            self._bytes = 0
        self._grown.clear()
        return plan, turned_away


def _weight(request: Request) -> int:
    """About the bytes of an admission on the wire, rather more than less."""
    return BYTES_PER_ID * len(request.token_ids) + request.sampling.weight


def _admission(request: Request) -> Admission:
    assert request.slot is not None
    return Admission(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed=request.num_computed,
        sampling=request.sampling,
        block_ids=tuple(tuple(block.block_id for block in table.blocks) for table in request.tables),
        sequence=request.sequence,
    )
