"""The adapters that one replica could not load, and when it may try again."""

from dataclasses import dataclass

from protos.errors import TriptychError

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
