"""A numbered log of the contents stored and evicted by a replica's prefix cache, for subscribers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import BlockKey


@dataclass(frozen=True, slots=True)
class Stored:
    """Prefixes to resume from."""

    group_id: int
    """KV group."""
    keys: tuple[BlockKey, ...]
    """A key per hash block, shortest prefix first, each the parent of the next."""
    parent: BlockKey | None
    """Key before the first; None in snapshots, where keys are unrelated."""
    token_ids: tuple[int, ...]
    """Tokens under the keys; empty in snapshots."""
    lora_name: str = ""
    """Name of the LoRA adapter that computed them; empty for the base model, in snapshots, and for kept
    windows."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Prefixes evicted from the cache."""

    group_id: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All prefixes are gone."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes between two steps."""

    sequence: int
    """Grows by 1 per batch."""
    events: tuple[KvEvent, ...]
    snapshot: bool = False
    """Whether the batch replaces everything before it."""

    @property
    def size(self) -> int:
        """Number of keys, tokens and events in the batch."""
        return sum(
            1 if isinstance(event, Cleared) else 1 + len(event.keys) + len(getattr(event, "token_ids", ()))
            for event in self.events
        )


class KvEventLog:
    """Publishes changes in numbered batches; keeps recent batches for reconnecting subscribers.

    Nothing is recorded before the first subscription: without subscribers, a change costs one comparison.
    """

    def __init__(
        self,
        snapshot: Callable[[], Iterable[tuple[int, Iterable[BlockKey]]]],
        *,
        first: int = 1,
        history: int = 4096,
        max_remembered: int = 1_000_000,
    ) -> None:
        """Starts empty.

        Args:
            snapshot: returns the present keys by group.
            first: sequence number before the first batch; above all numbers of earlier logs of the replica.
            history: most batches to keep.
            max_remembered: most keys, tokens and events in them.
        """
        self._snapshot = snapshot
        self._open: list[KvEvent] = []
        # Consecutive removals of one group; they arrive one by one, in thousands.
        self._removed: tuple[int, list[BlockKey]] | None = None
        self._history: deque[Batch] = deque()
        self._max_batches, self._max_remembered = history, max_remembered
        self._remembered = 0
        self._listeners: list[Callable[[Batch], None]] = []
        self.active = False
        """Whether changes are recorded."""
        self.sequence = self._first = first
        """Number of the last batch."""

    def stored(
        self, group_id: int, keys: tuple[BlockKey, ...], parent: BlockKey, token_ids: tuple[int, ...],
        lora_name: str = "",
    ) -> None:  # fmt: skip
        """Records stored prefixes. Call it only while the log is :attr:`active`."""
        self._end_removals()
        self._open.append(Stored(group_id, keys, parent, token_ids, lora_name))

    def removed(self, group_id: int, key: BlockKey) -> None:
        """Records an evicted prefix."""
        if not self.active:
            return
        if self._removed is not None and self._removed[0] == group_id:
            self._removed[1].append(key)
        else:
            self._end_removals()
            self._removed = (group_id, [key])

    def cleared(self) -> None:
        """Records the loss of all prefixes."""
        if self.active:
            self._removed = None
            self._open = [Cleared()]
            self.flush()

    def close(self) -> None:
        """Publishes the loss of all prefixes of a lost replica, and drops listeners and history."""
        self.cleared()
        self._listeners.clear()
        self._history.clear()
        self._snapshot = tuple

    def _end_removals(self) -> None:
        if self._removed is not None:
            self._open.append(Removed(self._removed[0], tuple(self._removed[1])))
            self._removed = None

    def flush(self) -> None:
        """Publishes the changes since the last batch, if there are any."""
        self._end_removals()
        if not self._open:
            return
        self.sequence += 1
        batch = Batch(self.sequence, tuple(self._open))
        self._open = []
        self._history.append(batch)
        self._remembered += batch.size
        while self._remembered > self._max_remembered or len(self._history) > self._max_batches:
            self._remembered -= self._history.popleft().size
        for listener in self._listeners:
            listener(batch)

    def follow(self, listener: Callable[[Batch], None], after: int = 0) -> Callable[[], None]:
        """Calls ``listener`` with all batches since ``after`` (or a snapshot), then with every new batch.

        Returns:
            A function that ends the subscription.
        """
        self.flush()
        for batch in self._missed(after):
            listener(batch)
        self.active = True
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:  # absent if the replica was lost before
                self._listeners.remove(listener)

        return end

    def _missed(self, after: int) -> Iterator[Batch]:
        known = self.active and self._first <= after <= self.sequence
        if known and (after == self.sequence or (self._history and self._history[0].sequence <= after + 1)):
            yield from (batch for batch in self._history if batch.sequence > after)
            return
        stored = tuple(Stored(group_id, tuple(keys), None, ()) for group_id, keys in self._snapshot())
        yield Batch(self.sequence, stored, snapshot=True)
