"""Batches of a pooling deployment: the queue and the choice of the next batch.

A request uses the shapes of the smallest prompt length that it fits into
(:mod:`scheduler_svc.shapes.shape_config`). Whenever a device is free, it runs the next request together with
as many others of the same prompt length as the chosen shape has rows for. A packed shape takes requests of
any length as long as their tokens fit. No request waits for a batch to fill.
"""

from collections.abc import Callable, Sequence

from protos.steps import PoolShape
from scheduler_svc.dispatch.backlog import Backlog
from scheduler_svc.dispatch.queueing import WaitingQueue
from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.requests.request import Request
from scheduler_svc.shapes.shape_config import PACKED_TOKENS

# The largest share of a batch's rows that may be padding: where a step takes about as long with few rows as
# with many, and where each row has its price.
_PADDING, _COSTLY_PADDING = 1 / 2, 1 / 8


def choose_batch(waiting: int, batches: Sequence[int], *, padding_costs: bool = False) -> int:
    """Returns the batch size that `waiting` requests fill best.

    This is the smallest batch that all of them fit into. If too many of its rows would be padding, the
    largest batch that they fill is better. If no batch is small enough or large enough, the nearest one is
    used.

    Args:
        waiting: number of requests, at least 1.
        batches: sizes to choose from, ascending; at least one.
        padding_costs: whether a row of padding takes as long as another one. It still is better than a step
            of less than half as many rows.
    """
    smaller = [batch for batch in batches if batch <= waiting]
    larger = [batch for batch in batches if batch > waiting]
    if not larger or (smaller and smaller[-1] == waiting):
        return smaller[-1]
    if not smaller:
        return larger[0]
    is_costly = padding_costs and 2 * smaller[-1] >= larger[0]
    room = larger[0] * (_COSTLY_PADDING if is_costly else _PADDING)
    return larger[0] if larger[0] - waiting <= room else smaller[-1]


class PoolQueue:
    """Requests that wait for a batch.

    One queue holds all requests and gives the next one. A further queue for each prompt length gives the
    requests that join its batch. Every operation costs O(log waiting).
    """

    def __init__(
        self,
        shapes: Sequence[PoolShape],
        make_order: Callable[[], OrderPolicy],
        *,
        padding_costs: bool = False,
    ) -> None:
        """Starts empty.

        Args:
            shapes: at least one; all are packed or none.
            make_order: makes the order policy of one queue.
            padding_costs: see `choose_batch`.
        """
        self._padding_costs = padding_costs
        self.shapes = tuple(sorted(shapes))
        self._packs = any(shape.packed for shape in self.shapes)
        self._batches: dict[int, list[int]] = {}
        for shape in self.shapes:
            self._batches.setdefault(shape.prompt_len, []).append(shape.batch)
        self._all = WaitingQueue(make_order())
        # Packed shapes need one queue only.
        lengths = () if self._packs else self._batches
        self._by_len = {prompt_len: WaitingQueue(make_order()) for prompt_len in lengths}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def backlog(self) -> Backlog:
        """The counts of the waiting requests by tenant."""
        return self._all.backlog

    def fit(self, num_tokens: int) -> int | None:
        """Returns the smallest prompt length for a prompt of `num_tokens`.

        Returns None if the prompt is too long for every shape.
        """
        return next((length for length in self._batches if num_tokens <= length), None)

    def add(self, request: Request) -> None:
        """Adds a request that is not in the queue and fits a shape."""
        self._all.add(request)
        if not self._packs:
            self._queue_of(request).add(request)

    def remove(self, request: Request) -> bool:
        """Removes a request; returns False if it is not in the queue."""
        removed = self._all.remove(request)
        return removed and (self._packs or self._queue_of(request).remove(request))

    def take(
        self, now: float, avoid: Callable[[Request], bool] = lambda _: False
    ) -> tuple[PoolShape, list[Request]] | None:
        """Removes and returns the next batch and charges its tenants; returns None if there is none.

        A suspect is a batch by itself.

        Args:
            now: seconds on the clock of `Request.arrival_s`.
            avoid: whether a request waits for another device than the one that the batch is for.
        """
        request = _next(self._all, now, avoid)
        if request is not None and self._packs:
            return self._take_packed(request, now, avoid)
        self._all.bring_all_back()
        if request is None:
            return None
        prompt_len = self.fit(len(request.token_ids))
        assert prompt_len is not None
        queue = self._by_len[prompt_len]
        count = 1 if request.suspect else len(queue)
        shape = PoolShape(
            prompt_len, choose_batch(count, self._batches[prompt_len], padding_costs=self._padding_costs)
        )
        size = 1 if request.suspect else shape.batch
        batch: list[Request] = []
        while request is not None:
            self._take_one(request)
            batch.append(request)
            request = _next(queue, now, _is_suspect) if len(batch) < size else None
        queue.bring_all_back()
        return shape, batch

    def _take_packed(
        self, first: Request, now: float, avoid: Callable[[Request], bool]
    ) -> tuple[PoolShape, list[Request]]:
        """Takes requests in turn, from `first` on, until the next one does not fit.

        They fill a shape of at most `PACKED_TOKENS`, unless `first` needs a longer one.
        """
        needed = self.fit(len(first.token_ids))
        assert needed is not None
        most = max(needed, PACKED_TOKENS)
        largest = next(shape for shape in reversed(self.shapes) if shape.prompt_len <= most)
        batch: list[Request] = []
        total = 0
        request: Request | None = first
        while request is not None and total + len(request.token_ids) <= largest.prompt_len:
            self._take_one(request)
            batch.append(request)
            total += len(request.token_ids)
            if first.suspect or len(batch) == largest.batch:
                break
            request = _next(self._all, now, lambda each: avoid(each) or each.suspect)
        self._all.bring_all_back()
        fitting = (s for s in self.shapes if s.prompt_len >= total and s.batch >= len(batch))
        return next(fitting), batch

    def _take_one(self, request: Request) -> None:
        """Removes a request and charges its tenant."""
        self.remove(request)
        for charged in (self._all, *self._by_len.values()):
            charged.charge(request.tenant, len(request.token_ids))

    def drain(self) -> list[Request]:
        """Removes all requests and returns them in order."""
        for queue in self._by_len.values():
            queue.drain()
        return self._all.drain()

    def _queue_of(self, request: Request) -> WaitingQueue:
        prompt_len = self.fit(len(request.token_ids))
        assert prompt_len is not None
        return self._by_len[prompt_len]


def _next(queue: WaitingQueue, now: float, avoid: Callable[[Request], bool]) -> Request | None:
    """Returns the next request, after skipping those to avoid."""
    while (request := queue.peek(now)) is not None and avoid(request):
        queue.skip(request, request.request_id)
    return request


def _is_suspect(request: Request) -> bool:
    return request.suspect
