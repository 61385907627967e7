"""The registered ranks of a replica: they wait for one another until a driver serves all of them."""

import asyncio
from collections.abc import Callable

from protos.errors import ConfigurationRefused, InvalidArgument, TriptychError, Unavailable
from protos.service.channels import LinkSecurity
from protos.triptych.v1.registry_pb2 import RegisterEvent
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.driver import ReplicaDriver
from scheduler_svc.workers.rank import Rank, ReplicaLost, check_sizes, ranks_text
from scheduler_svc.workers.step_loop import Hung, Left

# After these errors, a worker does not register again.
_FINAL = (ConfigurationRefused, InvalidArgument, Left)


class RankGroup:
    """The ranks of a replica, from the first registration to the end of the replica.

    The loss of the replica ends its group. Its ranks register again and form another.
    """

    def __init__(
        self,
        replica_id: str,
        deployment: Deployment,
        security: LinkSecurity,
        on_closed: Callable[[str], None],
    ) -> None:
        """Starts without ranks; calls `on_closed` once, when no rank is left or the driver ended."""
        self._replica_id = replica_id
        self._deployment = deployment
        self._security = security
        self._on_closed = on_closed
        # Seconds of waiting for missing ranks before the present ranks start again.
        self._wait_s = deployment.settings.step_timeout_s
        self._patience: asyncio.TimerHandle | None = None
        self._ranks: dict[int, Rank] = {}
        # Ranks that announced their departure.
        self._leaving: set[int] = set()
        self._driver: ReplicaDriver | None = None
        self._task: asyncio.Task[None] | None = None
        self.ending = False
        """Whether the replica is lost and its driver is about to end."""

    def rank_of(self, worker_id: str) -> Rank | None:
        """Returns the registration of a worker."""
        return next((rank for rank in self._ranks.values() if rank.worker_id == worker_id), None)

    def check(self, rank: Rank) -> None:
        """Checks that a rank may join.

        Raises:
            ConfigurationRefused: it contradicts the other ranks.
            Unavailable: the rank is registered, or the group is about to end.
        """
        if self.ending:
            raise Unavailable(f"replica {rank.replica_id} is still registered; retry", retry_after_ms=200)
        check_sizes(rank, self._ranks[min(self._ranks)])
        if rank.number in self._ranks:
            flags = "--rank or --replica-id" if rank.sizes.world_size > 1 else "--replica-id"
            raise Unavailable(
                f"{rank.name} is still registered by another process; if that runs, give this one another {flags}",
                retry_after_ms=200,
            )

    def join(self, rank: Rank) -> None:
        """Adds a rank. With the last, the driver starts."""
        self._ranks[rank.number] = rank
        if self._patience is not None:
            self._patience.cancel()
        if len(self._ranks) < rank.sizes.world_size:
            self._announce_waiting()
            self._patience = asyncio.get_running_loop().call_later(self._wait_s, self._announce_lost)
            return
        for each in self._ranks.values():
            each.tell(RegisterEvent.STATE_ACCEPTED, f"dialling {each.target}")
        ranks = [self._ranks[number] for number in sorted(self._ranks)]
        self._driver = ReplicaDriver(ranks, self._deployment, self._announce_serving, self._security)
        self._task = self._driver.start()
        self._task.add_done_callback(self._driver_ended)

    def remove(self, rank: Rank, cause: TriptychError, *, returned: bool = False) -> bool:
        """Ends a registration, and with it the replica once the driver runs.

        Args:
            rank: a rank.
            cause: the reason.
            returned: whether the worker itself is well and only its connection is dead or to be closed.

        Returns:
            False if the registration ended before.
        """
        if self.ending or self._ranks.get(rank.number) is not rank:
            return False
        if self._driver is not None:
            error = rank.lost(cause)
            self._end(error)
            self._driver.lose(error, returned=returned)
            return True
        del self._ranks[rank.number]
        self._leaving.discard(rank.number)  # the next process of this rank does not leave
        rank.news.put_nowait(cause)
        if self._ranks:
            self._announce_waiting()
        else:
            self.ending = True
            if self._patience is not None:
                self._patience.cancel()
            self._on_closed(self._replica_id)
        return True

    async def close(self) -> None:
        """Ends all registrations and the replica: the scheduler stops."""
        for rank in list(self._ranks.values()):
            self.remove(rank, Unavailable("the scheduler stops", retry_after_ms=1000), returned=True)
        await self.ended()

    async def leave(self, rank: Rank) -> None:
        """Releases a rank, and with it the replica: its running plan ends, and its requests wait."""
        self._leaving.add(rank.number)
        if self._driver is None:
            self.remove(rank, Left("the worker leaves"))
            return
        self._driver.leave(rank.number)
        if self._task is not None:
            await asyncio.wait({self._task})

    async def ended(self) -> None:
        """Waits for the end of the driver, if the replica is lost."""
        if self.ending and self._task is not None:
            await asyncio.wait({self._task})

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._end(error if isinstance(error, TriptychError) else Unavailable("the scheduler stops"))
        self._on_closed(self._replica_id)

    def _end(self, error: TriptychError) -> None:
        """Tells all ranks once why the replica ends."""
        if self.ending:
            return
        self.ending = True
        for number, rank in self._ranks.items():
            own = error.reason_for(number) if isinstance(error, ReplicaLost) else error
            if number in self._leaving and isinstance(own, ReplicaLost):
                own = Left("the worker leaves")
            if isinstance(error, Hung):
                rank.tell(RegisterEvent.STATE_HUNG, error.message)
            elif isinstance(error, ReplicaLost) and len(self._ranks) > 1 and not isinstance(own, _FINAL):
                rank.tell(RegisterEvent.STATE_RANK_LOST, error.message)
            rank.news.put_nowait(own)

    def _tell_all(self, state: RegisterEvent.State.ValueType, message: str) -> None:
        for rank in self._ranks.values():
            rank.tell(state, message)

    def _announce_waiting(self) -> None:
        text = self._deployment.starting[self._replica_id] = f"waiting for {self._missing()}"
        self._tell_all(RegisterEvent.STATE_ACCEPTED, f"{text} of replica {self._replica_id}")

    def _missing(self) -> str:
        world_size = next(iter(self._ranks.values())).sizes.world_size
        return ranks_text(set(range(world_size)) - self._ranks.keys())

    def _announce_lost(self) -> None:
        """Restarts the processes of a broken group: a frozen process may have missed its end.

        New processes continue to wait.
        """
        text = f"{self._missing()} of replica {self._replica_id} did not register within {self._wait_s:g} s"
        self._tell_all(RegisterEvent.STATE_RANK_LOST, text)

    def _announce_serving(self) -> None:
        self._tell_all(RegisterEvent.STATE_SERVING, "serving")
