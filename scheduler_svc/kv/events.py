"""What a replica's prefix cache stores and forgets, as a numbered log that others follow."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import BlockKey


@dataclass(frozen=True, slots=True)
class Stored:
    """Prefixes that can be resumed from now on.

    Attributes:
        group_id: KV group.
        keys: one per granule, shortest prefix first, each the parent of the next.
        parent: key before the first; None in snapshots, where each key stands for itself.
        token_ids: tokens under the keys; empty in snapshots.
    """

    group_id: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Prefixes that cannot be resumed any more."""

    group_id: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything is gone."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes between two steps.

    Attributes:
        sequence: grows by one per batch.
        snapshot: the batch replaces all that came before it.
    """

    sequence: int
    events: tuple[KvEvent, ...]
    snapshot: bool = False

    @property
    def size(self) -> int:
        """Keys and tokens in it, and one for each event."""
        return sum(
            1 if isinstance(event, Cleared) else 1 + len(event.keys) + len(getattr(event, "token_ids", ()))
            for event in self.events
        )


class KvEventLog:
    """Collects changes and hands them out in numbered batches; keeps the last ones for those who come back.

    Until somebody has asked for the first time, nothing is recorded: a deployment that nobody watches pays one comparison a change.
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
            snapshot: the present keys by group.
            first: sequence number before the first batch. Choose it above all that an earlier log of the same replica can have had.
            history: batches that are remembered at the most.
            max_remembered: keys and tokens in them at the most.
        """
        self._snapshot = snapshot
        self._open: list[KvEvent] = []
        # Removals since the last other event, which come one by one and in thousands.
        self._removed: tuple[int, list[BlockKey]] | None = None
        self._history: deque[Batch] = deque()
        self._max_batches, self._max_remembered = history, max_remembered
        self._remembered = 0
        self._listeners: list[Callable[[Batch], None]] = []
        self.active = False
        self.sequence = self._first = first

    def stored(
        self, group_id: int, keys: tuple[BlockKey, ...], parent: BlockKey, token_ids: tuple[int, ...]
    ) -> None:
        """Adds a change. Call it only while the log is :attr:`active`."""
        self._end_removals()
        self._open.append(Stored(group_id, keys, parent, token_ids))

    def removed(self, group_id: int, key: BlockKey) -> None:
        """Adds a change."""
        if not self.active:
            return
        if self._removed is not None and self._removed[0] == group_id:
            self._removed[1].append(key)
        else:
            self._end_removals()
            self._removed = (group_id, [key])

    def cleared(self) -> None:
        """Everything was forgotten at once."""
        if self.active:
            self._removed = None
            self._open = [Cleared()]
            self.flush()

    def close(self) -> None:
        """The replica is gone: says so, and lets go of its listeners and of what it remembers."""
        self.cleared()
        self._listeners.clear()
        self._history.clear()
        self._snapshot = tuple

    def _end_removals(self) -> None:
        if self._removed is not None:
            self._open.append(Removed(self._removed[0], tuple(self._removed[1])))
            self._removed = None

    def flush(self) -> None:
        """Ends a batch, if anything changed."""
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
        """Calls ``listener`` with what was missed since batch ``after`` (or a snapshot), then with every batch.

        Returns:
            What ends it.
        """
        self.flush()
        for batch in self._missed(after):
            listener(batch)
        self.active = True
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:  # unless the replica was gone before
                self._listeners.remove(listener)

        return end

    def _missed(self, after: int) -> Iterator[Batch]:
        known = self.active and self._first <= after <= self.sequence
        if known and (after == self.sequence or (self._history and self._history[0].sequence <= after + 1)):
            yield from (batch for batch in self._history if batch.sequence > after)
            return
        stored = tuple(Stored(group_id, tuple(keys), None, ()) for group_id, keys in self._snapshot())
        yield Batch(self.sequence, stored, snapshot=True)
