"""Requests that may have killed a worker.

A worker that is lost leaves plans without an answer. Every request in their steps, and every request that
they admit, is a suspect. From then on, each plan that admits a suspect or computes for it contains no other
request. One of its steps is answered, and the suspect is cleared; or the next worker is lost, and no other
request can be the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.steps import Prefill
from scheduler_svc.replica.plans import InFlight
from scheduler_svc.requests.request import DECODING_CLEARS, Request, RequestState


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The requests of a lost replica."""

    requests: list[Request]
    """The requests that were there; they can be queued again with the tokens they have."""
    suspects: list[Request]
    """The live requests that are suspects because of this loss. One may have left the replica meanwhile."""
    culprit: Request | None
    """The suspect, if no other request can have been the reason for the loss."""


def accuse(steps: Iterable[InFlight], running: list[Request]) -> tuple[list[Request], Request | None]:
    """Makes suspects of the requests in the unanswered steps of a lost replica.

    Args:
        steps: the unanswered plans.
        running: the requests with a slot on the replica.

    Returns:
        The live suspects, and the only one if the plans contain no other request.
    """
    by_slot = {request.slot: request for request in running}
    # Requests that ended meanwhile are no suspects any more, but may have been the reason.
    names: set[str] = set()
    cleared_at: dict[Request, int] = {}
    for step in steps:
        work = step.plan.work
        reached = work.start + work.num_tokens if isinstance(work, Prefill) else DECODING_CLEARS
        for request in step.requests:
            names.add(request.request_id)
            cleared_at[request] = max(reached, cleared_at.get(request, 0))
        for admission in step.plan.admit:
            names.add(admission.request_id)
            if admission.slot not in step.left and (admitted := by_slot.get(admission.slot)) is not None:
                cleared_at.setdefault(admitted, 0)
    suspects = []
    for request, reached in cleared_at.items():
        # Another replica has it: in a slot, or deferred until a prefix is computed there.
        runs_elsewhere = (
            request.slot is not None and by_slot.get(request.slot) is not request
        ) or request.state is RequestState.DEFERRED
        if request.state is RequestState.FINISHED or runs_elsewhere:
            continue
        request.worker_losses += 1
        request.cleared_at = max(reached, request.cleared_at)
        suspects.append(request)
    return suspects, suspects[0] if len(suspects) == len(names) == 1 else None
