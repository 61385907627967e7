"""The adapters that one replica has in its host's memory, or could not load."""

from collections.abc import Iterator
from dataclasses import dataclass

from protos.errors import TriptychError


class HostMemory:
    """Adapters by id: loaded, or being loaded. The caller asks the worker and reports its answers.

    A loaded adapter is *reserved* if requests waited for it and none of them has used it yet. It is not
    evicted until then: every load serves at least one request.
    """

    def __init__(self, max_adapters: int) -> None:
        """Starts empty, with room for ``max_adapters``."""
        self._max_adapters = max_adapters
        # Least recently used first; whether each is reserved.
        self._loaded: dict[int, bool] = {}
        self._loading: set[int] = set()

    def __contains__(self, adapter_id: int) -> bool:
        """Whether the adapter is loaded."""
        return adapter_id in self._loaded

    @property
    def has_room(self) -> bool:
        """Whether one more adapter may be loaded."""
        return len(self._loaded) + len(self._loading) < self._max_adapters

    def is_loading(self, adapter_id: int) -> bool:
        """Whether the worker has not answered yet."""
        return adapter_id in self._loading

    def evictable(self) -> Iterator[int]:
        """Yields the loaded adapters that are not reserved, the one that was used least recently first."""
        return (adapter_id for adapter_id, reserved in self._loaded.items() if not reserved)

    def begin(self, adapter_id: int) -> None:
        """Notes that the worker is asked to load an adapter; there must be room."""
        assert self.has_room
        assert adapter_id not in self._loaded
        self._loading.add(adapter_id)

    def loaded(self, adapter_id: int, *, reserve: bool) -> None:
        """Notes that an adapter is loaded, and whether requests wait for it."""
        self._loading.discard(adapter_id)
        self._loaded[adapter_id] = reserve

    def failed(self, adapter_id: int) -> None:
        """Notes that an adapter was not loaded."""
        self._loading.discard(adapter_id)

    def used(self, adapter_id: int) -> None:
        """Notes that a request of the adapter was admitted."""
        del self._loaded[adapter_id]
        self._loaded[adapter_id] = False

    def unreserve(self, adapter_id: int) -> None:
        """Lets the adapter be evicted: no request waits for it any more."""
        if adapter_id in self._loaded:
            self._loaded[adapter_id] = False

    def remove(self, adapter_id: int) -> None:
        """Removes a loaded adapter, which the worker is told to free."""
        del self._loaded[adapter_id]


FIRST_PAUSE_S = 5.0
"""How long a replica is left alone with an adapter after a failure that may pass; doubled each time."""
LONGEST_PAUSE_S = 300.0

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class _Failure:
    error: TriptychError
    until_s: float
    """When the replica may try again, on the caller's clock; infinity after a refusal."""
    next_pause_s: float
    """The pause after the next failure."""


class LoadFailures:
    """Failed loads by adapter id.

    An adapter that is bad or that a worker cannot find is refused for good. Any other failure may pass: a
    deadline, a lost connection, memory that is short. The replica tries again after a pause that grows.
    """

    def __init__(self) -> None:
        """Starts without failures, as a worker that registers does."""
        self._failures: dict[int, _Failure] = {}

    def __contains__(self, adapter_id: int) -> bool:
        """Whether a load of the adapter has failed."""
        return adapter_id in self._failures

    def add(self, adapter_id: int, error: TriptychError, now_s: float) -> None:
        """Notes that a load has failed."""
        if not error.retryable:
            self._failures[adapter_id] = _Failure(error, _NEVER, FIRST_PAUSE_S)
            return
        earlier = self._failures.get(adapter_id)
        pause_s = FIRST_PAUSE_S if earlier is None else earlier.next_pause_s
        self._failures[adapter_id] = _Failure(error, now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S))

    def error(self, adapter_id: int) -> TriptychError:
        """Returns why the last load of an adapter failed; there must be one."""
        return self._failures[adapter_id].error

    def excludes(self, adapter_id: int, now_s: float) -> bool:
        """Whether the replica must not be asked for the adapter now, as long as another one may be."""
        failure = self._failures.get(adapter_id)
        return failure is not None and now_s < failure.until_s

    def is_refused(self, adapter_id: int) -> bool:
        """Whether the replica must never be asked for the adapter again."""
        failure = self._failures.get(adapter_id)
        return failure is not None and failure.until_s == _NEVER

    def forget(self, adapter_id: int) -> None:
        """Forgets the failures of an adapter: it is loaded, or unloaded."""
        self._failures.pop(adapter_id, None)
