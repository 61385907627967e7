"""To whom requests go when they leave a replica."""

from typing import TYPE_CHECKING, Protocol

from scheduler_svc.requests.request import Request

if TYPE_CHECKING:
    from scheduler_svc.replica.scheduler import ReplicaScheduler


class Owner(Protocol):
    """To whom requests go when they leave a replica; the engine is one."""

    def requeue(self, request: Request) -> None:
        """The request waits again, with the tokens it has."""

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant was served that many tokens."""

    def without_grammar(self, request: Request) -> None:
        """The replica has not got the request's grammar (any more): it waits until somebody has compiled it."""

    def released(self) -> None:
        """Blocks became free, or a plan has room again: who found no room may find some now."""

    def drop_pins(self, scheduler: "ReplicaScheduler") -> bool:
        """Gives up pinned prefixes of a replica that cannot go on otherwise; whether there were any."""
