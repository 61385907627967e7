"""Requests that wait for a slot, in the order in which they should get one."""

import heapq
import itertools

from scheduler_svc.request import Request

# Stale heap entries that are not worth a rebuild.
_SLACK = 64


class WaitingQueue:
    """A priority queue shared by all replicas: lowest ``priority`` first, then earliest arrival.

    A request that comes back (preempted, or its worker was lost) keeps its arrival and so its place. Removal is lazy: a removed request
    stays in the heap until it reaches the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        # Breaks ties between two entries of one request, of which one is stale.
        self._entries = itertools.count()
        self._members: dict[str, Request] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting requests have to prefill."""
        return self._num_tokens

    def add(self, request: Request) -> None:
        """Adds a request that is not in the queue."""
        self._members[request.request_id] = request
        self._num_tokens += len(request.token_ids)
        heapq.heappush(self._heap, (request.priority, request.arrival, next(self._entries), request))

    def peek(self) -> Request | None:
        """The request whose turn it is. Does not modify the order."""
        while self._heap:
            request = self._heap[0][3]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> bool:
        """Takes a request out, wherever it is; False if it is not in the queue."""
        if self._members.get(request.request_id) is not request:
            return False
        del self._members[request.request_id]
        self._num_tokens -= len(request.token_ids)
        # Removed requests must not pile up behind a head that does not move.
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [entry for entry in self._heap if self._members.get(entry[3].request_id) is entry[3]]
            heapq.heapify(self._heap)
        return True

    def drain(self) -> list[Request]:
        """Takes all requests out, in order."""
        requests = sorted(self._members.values(), key=lambda request: (request.priority, request.arrival))
        self._heap.clear()
        self._members.clear()
        self._num_tokens = 0
        return requests
