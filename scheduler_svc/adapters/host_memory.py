"""The adapters that one replica has in its host's memory."""

from collections.abc import Iterator


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
