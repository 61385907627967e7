"""Cached prefixes of all replicas, as clients see them: find, pin, reset and follow."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protos.errors import Unavailable
from scheduler_svc.dispatch.pinned_prefixes import PinnedPrefixes
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.events import Batch
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request


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
    """Client operations on prefix caches.

    The engine dispatches again after an operation that frees blocks.
    """

    def __init__(
        self,
        replicas: dict[str, AttachedReplica],
        pinned: PinnedPrefixes,
        *,
        check: Callable[[Submission], object],
        dispatch: Callable[[], None],
    ) -> None:
        """Starts without pins and followers.

        Args:
            replicas: ready replicas by id; the engine adds and removes them.
            pinned: the pins of all replicas.
            check: raises if the deployment cannot serve a submission.
            dispatch: lets waiting requests use blocks that became free.
        """
        self._replicas = replicas
        self._pinned = pinned
        self._check = check
        self._dispatch = dispatch
        self._followers: list[_Follower] = []

    # ---- pins ----

    def check(self, submission: Submission) -> None:
        """Raises what submitting would raise, except that a full queue is no error."""
        self._check(submission)

    def find(self, probe: Request) -> tuple[str, int] | None:
        """Returns the replica with the longest cached prefix of `probe`, and its length in tokens.

        Returns None without replicas.
        """
        found = {
            name: replica.scheduler.kv.prefixes.peek(probe.kv) for name, replica in self._replicas.items()
        }
        name = max(found, key=lambda name: found[name], default=None)
        return None if name is None else (name, found[name])

    def pinnable_tokens(self, probe: Request) -> int:
        """Returns the tokens of the whole chunks of `probe`: the longest prefix that any replica can hold."""
        return max(
            (replica.scheduler.kv.prefixes.hit_limit(probe.kv) for replica in self._replicas.values()),
            default=0,
        )

    def pin(
        self, pin_id: str, replica_id: str, probe: Request, on_end: Callable[[], None] = lambda: None
    ) -> int:
        """Pins the cached prefix of `probe` on a replica; see :meth:`PinnedPrefixes.pin`.

        The pin ends with :meth:`unpin`, with its replica, or when a running request needs the memory.

        Raises:
            Unavailable: the replica is gone.
            Overloaded: the pins of the replica would be too many or too large.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise Unavailable("the replica that computed the prefix is gone; retry", retry_after_ms=1000)
        return self._pinned.pin(pin_id, replica_id, replica.scheduler, probe, on_end)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; returns False if the id is unknown or the pin has ended."""
        found = self._pinned.unpin(pin_id)
        if found:
            self._dispatch()
        return found

    def reset(self) -> int:
        """Forgets every cached prefix and pin; returns the number of replicas that were reset."""
        self._pinned.drop_all()
        for replica in self._replicas.values():
            replica.scheduler.kv.prefixes.reset()
        self._dispatch()
        return len(self._replicas)

    # ---- KV events ----

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
        forward = partial(_forward, follower.listener, replica_id, scheduler.geometry.hash_block_size)
        after = follower.after if replica_id == follower.replica_id else 0
        follower.stops.append(scheduler.kv.events.follow(forward, after))


def _forward(
    listener: Callable[[KvChange], None], replica_id: str, tokens_per_hash: int, batch: Batch
) -> None:
    listener(KvChange(replica_id, batch, tokens_per_hash))
