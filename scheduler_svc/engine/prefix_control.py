"""Operations of clients on the cached prefixes of all replicas: reset and follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.events import Batch
from scheduler_svc.kv.sequence import HashChain


@dataclass(frozen=True, slots=True)
class KvChange:
    """A batch of changes to the prefix cache of a replica."""

    replica_id: str
    batch: Batch
    tokens_per_hash: int
    """Tokens per prefix hash."""


class PrefixControl:
    """Client operations on prefix caches."""

    def __init__(self, replicas: dict[str, AttachedReplica], dispatch: Callable[[], None]) -> None:
        """Starts without subscriptions.

        Args:
            replicas: ready replicas by id; the engine adds and removes them.
            dispatch: lets waiting requests use freed blocks.
        """
        self._replicas = replicas
        self._dispatch = dispatch
        # Each subscribes a listener to the events of a replica.
        self._subscribers: list[Callable[[str], None]] = []

    def hasher(self) -> Callable[[Sequence[int], Adapter | None, str], HashChain | None] | None:
        """Returns a thread-safe function that hashes prompts, see :meth:`PrefixIndex.hash_chain`.

        None without a prefix cache.
        """
        caches = (each.scheduler.kv for each in self._replicas.values())
        return next((kv.prefixes.hash_chain for kv in caches if kv is not None), None)

    def reset(self) -> int:
        """Forgets every cached prefix; returns the number of affected replicas."""
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
            replica_id: a replica to resume after batch `after` instead of starting with a snapshot.
            after: sequence number of the caller's last batch from this replica.

        Returns:
            A function that ends the subscription.
        """
        stops: list[Callable[[], None]] = []

        def subscribe(name: str) -> None:
            if (kv := self._replicas[name].scheduler.kv) is None:
                return
            tokens_per_hash = kv.prefixes.hash_block_size

            def forward(batch: Batch) -> None:
                listener(KvChange(name, batch, tokens_per_hash))

            stops.append(kv.events.follow(forward, after if name == replica_id else 0))

        for name in self._replicas:
            subscribe(name)
        self._subscribers.append(subscribe)

        def stop() -> None:
            self._subscribers.remove(subscribe)
            for unsubscribe in stops:
                unsubscribe()

        return stop

    def attached(self, replica_id: str) -> None:
        """Subscribes every listener to a new replica."""
        for subscribe in self._subscribers:
            subscribe(replica_id)
