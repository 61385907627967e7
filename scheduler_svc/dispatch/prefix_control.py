"""Operations of clients on the cached prefixes of all replicas: reset and follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.events import Batch
from scheduler_svc.kv.sequence import HashChain
from scheduler_svc.replica.pooling import PoolScheduler


@dataclass(frozen=True, slots=True)
class KvChange:
    """One batch of changes to the prefix cache of a replica."""

    replica_id: str
    batch: Batch
    tokens_per_hash: int
    """Tokens that one prefix hash stands for."""


@dataclass(slots=True)
class _Follower:
    """Receives the KV events of all replicas, including replicas that attach later."""

    listener: Callable[[KvChange], None]
    replica_id: str
    """The replica that the follower resumes from."""
    after: int
    """The last batch of that replica that the follower has."""
    stops: list[Callable[[], None]]


class PrefixControl:
    """Client operations on prefix caches."""

    def __init__(self, replicas: dict[str, AttachedReplica], dispatch: Callable[[], None]) -> None:
        """Starts without followers.

        Args:
            replicas: ready replicas by id; the engine adds and removes them.
            dispatch: lets waiting requests use blocks that became free.
        """
        self._replicas = replicas
        self._dispatch = dispatch
        self._followers: list[_Follower] = []

    def hasher(self) -> Callable[[Sequence[int], Adapter | None, str], HashChain | None] | None:
        """Returns a function that hashes prompts on any thread, see :meth:`PrefixIndex.hash_chain`.

        None without a prefix cache.
        """
        caches = (each.scheduler.kv for each in self._replicas.values())
        return next((kv.prefixes.hash_chain for kv in caches if kv is not None), None)

    def reset(self) -> int:
        """Forgets every cached prefix; returns the number of replicas that were reset."""
        caches = [kv for each in self._replicas.values() if (kv := each.scheduler.kv) is not None]
        for kv in caches:
            kv.prefixes.reset()
        self._dispatch()
        return len(caches)

    def follow(
        self, listener: Callable[[KvChange], None], *, replica_id: str = "", after: int = 0
    ) -> Callable[[], None]:
        """Calls `listener` with every change on every replica, starting with a snapshot of each.

        Args:
            listener: must not block.
            replica_id: a replica that resumes after batch `after` instead of starting with a snapshot.
            after: sequence number of the last batch that the caller has from that replica.

        Returns:
            A function that ends the subscription.
        """
        follower = _Follower(listener, replica_id, after, [])
        for name in self._replicas:
            self._subscribe(follower, name)
        self._followers.append(follower)

        def stop() -> None:
            self._followers.remove(follower)
            for unsubscribe in follower.stops:
                unsubscribe()

        return stop

    def attached(self, replica_id: str) -> None:
        """Subscribes every follower to a new replica."""
        for follower in self._followers:
            self._subscribe(follower, replica_id)

    def _subscribe(self, follower: _Follower, replica_id: str) -> None:
        scheduler = self._replicas[replica_id].scheduler
        if isinstance(scheduler, PoolScheduler):
            return
        forward = partial(_forward, follower.listener, replica_id, scheduler.kv.prefixes.hash_block_size)
        after = follower.after if replica_id == follower.replica_id else 0
        follower.stops.append(scheduler.kv.events.follow(forward, after))


def _forward(
    listener: Callable[[KvChange], None], replica_id: str, tokens_per_hash: int, batch: Batch
) -> None:
    listener(KvChange(replica_id, batch, tokens_per_hash))
