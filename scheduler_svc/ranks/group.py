"""The registered ranks of one replica: they wait for one another until a driver serves all of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.errors import ConfigurationRefused, InvalidArgument, TriptychError, Unavailable
from protos.triptych.v1.registry_pb2 import RegisterEvent
from scheduler_svc.ranks.configuring import lost
from scheduler_svc.ranks.driver import ReplicaDriver
from scheduler_svc.ranks.rank import RankAddress, ReplicaLost, check_sizes, ranks_text
from scheduler_svc.workers.step_loop import Hung, Left

# A worker whose registration ends with one of these does not register again.
_FINAL = (ConfigurationRefused, InvalidArgument, Left)


@dataclass(eq=False, slots=True)
class Seat:
    """A rank's registration."""

    group: "RankGroup"
    address: RankAddress
    news: asyncio.Queue[RegisterEvent | TriptychError] = field(default_factory=asyncio.Queue)
    """Events for the worker, then the error that ends its registration."""


class RankGroup:
    """The ranks of one replica, from the first registration to the end of the replica.

    A replica that is lost ends its group. Its ranks register again and form another one.
    """

    def __init__(
        self,
        make_driver: Callable[[Sequence[RankAddress], Callable[[], None]], ReplicaDriver],
        on_waiting: Callable[[str], None],
        on_closed: Callable[[], None],
        *,
        wait_s: float,
    ) -> None:
        """Starts without ranks.

        Args:
            make_driver: returns the driver of all ranks, given what to call when the replica is ready.
            on_waiting: called with the text for people, whenever other ranks are waited for.
            on_closed: called once, when no rank is left, or when the driver has ended.
            wait_s: seconds after which ranks are told that the missing ones do not come.
        """
        self._make_driver = make_driver
        self._on_waiting = on_waiting
        self._on_closed = on_closed
        self._wait_s = wait_s
        self._patience: asyncio.TimerHandle | None = None
        self._seats: dict[int, Seat] = {}
        # The ranks that said that they leave.
        self._leaving: set[int] = set()
        self._driver: ReplicaDriver | None = None
        self._task: asyncio.Task[None] | None = None
        self.ending = False
        """Whether the replica is lost and its driver is about to end."""

    def seat_of(self, worker_id: str) -> Seat | None:
        """Returns the registration of a worker."""
        return next((seat for seat in self._seats.values() if seat.address.worker_id == worker_id), None)

    def check(self, address: RankAddress) -> None:
        """Checks that a rank may join.

        Raises:
            ConfigurationRefused: it contradicts the ranks that are there.
            Unavailable: the rank is registered, or the group is about to end.
        """
        if not self.ending:
            check_sizes(address, self._seats[min(self._seats)].address)
        if self.ending:
            raise Unavailable(f"replica {address.replica_id} is still registered; retry", retry_after_ms=200)
        if address.rank in self._seats:
            flags = "--rank or --replica-id" if address.sizes.world_size > 1 else "--replica-id"
            raise Unavailable(
                f"{address.name} is still registered by another process; if that runs, give this one another {flags}",
                retry_after_ms=200,
            )

    def join(self, address: RankAddress) -> Seat:
        """Adds a rank. With the last one, the driver starts."""
        seat = self._seats[address.rank] = Seat(self, address)
        if self._patience is not None:
            self._patience.cancel()
        if len(self._seats) < address.sizes.world_size:
            self._announce_waiting()
            self._patience = asyncio.get_running_loop().call_later(self._wait_s, self._announce_lost)
            return seat
        for each in self._seats.values():
            self._tell(each, RegisterEvent.STATE_ACCEPTED, f"dialling {each.address.target}")
        ranks = [self._seats[rank].address for rank in sorted(self._seats)]
        self._driver = self._make_driver(ranks, self._announce_serving)
        self._task = self._driver.start()
        self._task.add_done_callback(self._driver_ended)
        return seat

    def hang_up(self, seat: Seat) -> bool:
        """Notes that a registration has ended without a reason from here; returns False if there was one."""
        return self._remove(seat, Unavailable("its registration has ended"), returned=False)

    async def make_way(self, seat: Seat) -> None:
        """Ends the registration of a worker that has registered again: its old connection is dead."""
        self._remove(seat, Unavailable("the worker has registered again"), returned=True)
        await self.ended()

    async def close(self) -> None:
        """Ends all registrations and the replica: the scheduler stops."""
        for seat in list(self._seats.values()):
            self._remove(seat, Unavailable("the scheduler stops", retry_after_ms=1000), returned=True)
        await self.ended()

    async def leave(self, seat: Seat) -> None:
        """Lets a rank go, and with it the replica: its running plan ends, and its requests wait."""
        self._leaving.add(seat.address.rank)
        if self._driver is None:
            self._remove(seat, Left("the worker leaves"), returned=False)
            return
        self._driver.leave(seat.address.rank)
        if self._task is not None:
            await asyncio.wait({self._task})

    async def ended(self) -> None:
        """Waits until the driver has ended, if there is one and the replica is lost."""
        if self.ending and self._task is not None:
            await asyncio.wait({self._task})

    # ---- ends ----

    def _remove(self, seat: Seat, cause: TriptychError, *, returned: bool) -> bool:
        rank = seat.address.rank
        if self.ending or self._seats.get(rank) is not seat:
            return False
        if self._driver is not None:
            error = lost(seat.address, cause)
            self._end(error)
            self._driver.lose(error, returned=returned)
            return True
        del self._seats[rank]
        self._leaving.discard(rank)  # the next process of this rank does not leave
        seat.news.put_nowait(cause)
        if self._seats:
            self._announce_waiting()
        else:
            self.ending = True
            if self._patience is not None:
                self._patience.cancel()
            self._on_closed()
        return True

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._end(error if isinstance(error, TriptychError) else Unavailable("the scheduler stops"))
        self._on_closed()

    def _end(self, error: TriptychError) -> None:
        """Tells all ranks once why the replica ends."""
        if self.ending:
            return
        self.ending = True
        for rank, seat in self._seats.items():
            own = _own_reason(rank, error)
            if rank in self._leaving and isinstance(own, ReplicaLost):
                own = Left("the worker leaves")
            if isinstance(error, Hung):
                self._tell(seat, RegisterEvent.STATE_HUNG, error.message)
            elif isinstance(error, ReplicaLost) and len(self._seats) > 1 and not isinstance(own, _FINAL):
                self._tell(seat, RegisterEvent.STATE_RANK_LOST, error.message)
            seat.news.put_nowait(own)

    # ---- news ----

    def _announce_waiting(self) -> None:
        address = next(iter(self._seats.values())).address
        text = f"waiting for {self._missing(address)}"
        self._on_waiting(text)
        for seat in self._seats.values():
            self._tell(seat, RegisterEvent.STATE_ACCEPTED, f"{text} of replica {address.replica_id}")

    def _missing(self, address: RankAddress) -> str:
        return ranks_text(rank for rank in range(address.sizes.world_size) if rank not in self._seats)

    def _announce_lost(self) -> None:
        """Ends the processes of a group that broke: one that was frozen may not have heard of it.

        New processes go on waiting.
        """
        address = next(iter(self._seats.values())).address
        text = f"{self._missing(address)} of replica {address.replica_id} did not register within {self._wait_s:g} s"
        for seat in self._seats.values():
            self._tell(seat, RegisterEvent.STATE_RANK_LOST, text)

    def _announce_serving(self) -> None:
        for seat in self._seats.values():
            self._tell(seat, RegisterEvent.STATE_SERVING, "serving")

    @staticmethod
    def _tell(seat: Seat, state: RegisterEvent.State.ValueType, message: str) -> None:
        seat.news.put_nowait(RegisterEvent(state=state, message=message))


def _own_reason(rank: int, error: TriptychError) -> TriptychError:
    """Returns why the registration of one rank ends, given why the replica does."""
    if isinstance(error, ReplicaLost) and error.cause is not None and error.rank == rank:
        return error.cause
    return error
