"""Suspects: requests that may be the reason why a worker died or a step failed.

The suspects of a worker's death or hang are all requests in the steps of unanswered plans, or admitted by
them; those of a failed step are the requests in it. From then on, a plan that admits a suspect or computes
for it contains no other request. The suspect is cleared when such a step is answered. If it goes wrong
again, no other request can be the reason.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protos.errors import Internal, InvalidArgument, TriptychError
from protos.steps import Prefill
from scheduler_svc.replica.plans import InFlight
from scheduler_svc.requests.request import DECODING_CLEARS, Request, RequestState


class Loss(enum.Enum):
    """Why a replica is gone; the value is its name in logs and metrics."""

    LEFT = "left"
    """The worker announced its departure."""
    CUT_OFF = "cut_off"
    """The connection broke, and the worker's process still runs."""
    FAILED_STEPS = "failed_steps"
    """Too many steps failed in a row. Each was answered, and judged by itself."""
    DIED = "died"
    """The connection broke, and the worker's process no longer answers."""
    HUNG = "hung"
    """A step was not answered in time."""
    STALLED = "stalled"
    """Its steps computed nothing while requests ran."""
    FAULT = "fault"
    """The worker's messages, or the scheduler's own code, were at fault."""

    @property
    def blames(self) -> bool:
        """Whether requests in unanswered steps can be the reason, and become suspects."""
        return self in (Loss.DIED, Loss.HUNG, Loss.STALLED, Loss.FAULT)


@dataclass(frozen=True, slots=True)
class EvictedRequests:
    """The requests of a lost replica."""

    requests: list[Request]
    """All requests there, to be queued again with their tokens."""
    suspects: list[Request]
    """The live suspects of this loss, including any that left the replica before it."""
    culprit: Request | None
    """The suspect, if no other request can be the reason."""


@dataclass(frozen=True, slots=True)
class DetachReport:
    """Effects of the loss of a replica on its requests."""

    num_requeued: int = 0
    suspects: tuple[str, ...] = ()
    """Ids of the requests under suspicion because of the loss."""
    failed: tuple[str, ...] = ()
    """Ids of the failed requests: too many workers were lost with them."""


def killed_too_many(losses: int) -> Internal:
    """Returns the error of a request for which ``losses`` workers died."""
    return Internal(
        f"{losses} workers were lost while they ran this request, the last one while it ran nothing else; "
        "do not send it again unchanged"
    )


def blame(
    step: InFlight, error: TriptychError, is_hopeless: Callable[[Request], bool]
) -> list[tuple[Request, bool]]:
    """Counts a failed step against the requests still in it.

    Returns:
        Each request, and whether it fails now: it was alone in the step, and either the error is its own or
        further attempts are hopeless. Others run again, each alone.
    """
    is_its_own, alone = isinstance(error, InvalidArgument), len(step.requests) == 1
    blamed = []
    for request in step.here:
        request.step_failures += 1
        request.cleared_at = max(_reached(step), request.cleared_at)
        if not is_its_own:
            assert request.replica_id is not None
            request.failed_on.add(request.replica_id)
        blamed.append((request, alone and (is_its_own or is_hopeless(request))))
    return blamed


def accuse(
    steps: Iterable[InFlight], loss: Loss, running: Sequence[Request]
) -> tuple[list[Request], Request | None]:
    """Counts a lost worker against the requests that may be the reason.

    Args:
        steps: the unanswered plans.
        loss: why the worker is gone.
        running: the requests with a slot on the replica.

    Returns:
        The live suspects, and the culprit, if no other request, ended or live, can be the reason.
    """
    by_slot = {request.slot: request for request in running}
    # Requests ended since are no suspects, but may be the reason.
    names: set[str] = set()
    suspects: dict[Request, int] = {}
    for step in steps if loss.blames else ():
        for request in step.requests:
            names.add(request.request_id)
            # On another replica, it is in a slot, or deferred until a prefix is computed there.
            is_here = request.slot is None or by_slot.get(request.slot) is request
            if is_here and request.state not in (RequestState.FINISHED, RequestState.DEFERRED):
                suspects[request] = max(_reached(step), suspects.get(request, 0))
    for request, reached in suspects.items():
        request.worker_losses += 1
        request.cleared_at = max(reached, request.cleared_at)
    alone = len(suspects) == len(names) == 1
    return list(suspects), next(iter(suspects)) if alone else None


def _reached(step: InFlight) -> int:
    """Returns the computed tokens that clear a suspect of this step."""
    work = step.plan.work
    return work.start + work.num_tokens if isinstance(work, Prefill) else DECODING_CLEARS
