"""Requests that may have killed a worker, or made its step fail.

A worker that dies or hangs leaves plans without an answer. Every request in their steps, and every request
that they admit, is a suspect. So is every request of a step that failed. From then on, each plan that admits
a suspect or computes for it contains no other request. One of its steps is answered, and the suspect is
cleared; or the next one goes wrong, too, and no other request can be the reason.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protos.errors import Internal
from protos.steps import Prefill
from scheduler_svc.replica.plans import InFlight
from scheduler_svc.requests.request import DECODING_CLEARS, Request, RequestState


class Loss(enum.Enum):
    """Why a replica is gone; the value is its name in logs and metrics."""

    LEFT = "left"
    """The worker said that it leaves."""
    CUT_OFF = "cut_off"
    """The connection broke, and the worker's process still runs."""
    FAILED_STEPS = "failed_steps"
    """Too many steps failed in a row. They were answered, so each has been judged by itself."""
    DIED = "died"
    """The connection broke, and the worker's process does not answer any more."""
    HUNG = "hung"
    """A step was not answered in time."""
    STALLED = "stalled"
    """Its steps computed nothing while requests ran."""
    FAULT = "fault"
    """The worker's messages, or the scheduler's own code, were at fault."""

    @property
    def blames(self) -> bool:
        """Whether a request can have been the reason, so that those in unanswered steps are suspects."""
        return self in (Loss.DIED, Loss.HUNG, Loss.STALLED, Loss.FAULT)


@dataclass(frozen=True, slots=True)
class Accused:
    """The live requests that may be the reason why steps were not answered."""

    cleared_at: Mapping[Request, int]
    """The requests, each with the computed tokens that clear it."""
    alone: bool
    """Whether there is one, and no request that has ended meanwhile can have been the reason."""

    def of_loss(self) -> list[Request]:
        """Counts a lost worker against the requests; returns them."""
        for request, reached in self.cleared_at.items():
            request.worker_losses += 1
            request.cleared_at = max(reached, request.cleared_at)
        return list(self.cleared_at)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The requests of a lost replica."""

    requests: list[Request]
    """The requests that were there; they can be queued again with the tokens they have."""
    suspects: list[Request]
    """The live requests that are suspects because of this loss. One may have left the replica meanwhile."""
    culprit: Request | None
    """The suspect, if no other request can have been the reason for the loss."""


@dataclass(frozen=True, slots=True)
class Detached:
    """What the loss of a replica meant for its requests."""

    num_requeued: int = 0
    """Requests that wait again."""
    suspects: tuple[str, ...] = ()
    """Ids of the requests that are suspects because of it."""
    failed: tuple[str, ...] = ()
    """Ids of the requests that failed: too many workers were lost with them."""


def killed_too_many(losses: int) -> Internal:
    """Returns the error of a request that has killed ``losses`` workers."""
    return Internal(
        f"{losses} workers were lost while they ran this request, the last one while it ran nothing else; "
        "do not send it again unchanged"
    )


def blame(step: InFlight) -> list[Request]:
    """Counts a failed step against the requests that are still in it; returns them."""
    requests = step.here
    for request in requests:
        request.step_failures += 1
        request.cleared_at = max(_reached(step), request.cleared_at)
    return requests


def accuse(steps: Iterable[InFlight], running: list[Request]) -> Accused:
    """Finds the requests that may be the reason why some steps were not answered.

    Args:
        steps: plans that were not answered.
        running: the requests with a slot on the replica.
    """
    by_slot = {request.slot: request for request in running}
    # Requests that ended meanwhile are no suspects any more, but may have been the reason.
    names: set[str] = set()
    cleared_at: dict[Request, int] = {}
    for step in steps:
        for request in step.requests:
            names.add(request.request_id)
            cleared_at[request] = max(_reached(step), cleared_at.get(request, 0))
    live = {
        request: reached
        for request, reached in cleared_at.items()
        if request.state is not RequestState.FINISHED and not _runs_elsewhere(request, by_slot)
    }
    return Accused(live, alone=len(live) == len(names) == 1)


def _reached(step: InFlight) -> int:
    """Returns the computed tokens that clear a suspect of this step."""
    work = step.plan.work
    return work.start + work.num_tokens if isinstance(work, Prefill) else DECODING_CLEARS


def _runs_elsewhere(request: Request, by_slot: Mapping[int | None, Request]) -> bool:
    """Whether another replica has the request: in a slot, or deferred until a prefix is computed there."""
    in_a_slot = request.slot is not None and by_slot.get(request.slot) is not request
    return in_a_slot or request.state is RequestState.DEFERRED
