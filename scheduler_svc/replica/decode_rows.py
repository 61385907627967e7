"""The decoding requests of a replica: the rows of its decode steps, and the steps they may run."""

from collections.abc import Callable

from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.plans import BatchRows, Plans, batch_of
from scheduler_svc.requests.request import Request, RequestState
from scheduler_svc.shapes.shape_config import ShapeConfig

MakeRoom = Callable[[Request, int], bool]
"""Grows a request's tables to a number of tokens, preempting it or others if needed; returns success."""


class DecodeRows:
    """Requests that decode together.

    Each advances by a token per step, so the tokens *granted* to a request, computed once all plans in flight
    are done, are known without results. While the rows stay the same, a plan costs a few comparisons; only a
    row that runs out of blocks, joins or leaves costs more.
    """

    def __init__(self, kv: KvCache, plans: Plans) -> None:
        """Starts empty."""
        self._kv = kv
        self._plans = plans
        self.members: dict[str, Request] = {}
        """The requests by id, in the order in which they began to decode."""
        self.has_joined = False
        """Whether a request joined after the latest plan."""
        self.batch = BatchRows()
        """The rows of the latest plan."""
        self._changed = False
        # Whether members have no row because their admissions exceed a plan.
        self._leaves_out = False
        # Steps granted to the rows since their last change; by row, the step before which it needs blocks;
        # the first such step, and the first step after which a row is complete.
        self._step = 0
        self._rooms: list[int] = []
        self._first_to_grow = 0
        self._first_to_end = 0
        # Tokens attended to by the first of these steps.
        self._context = 0
        self.context_tokens = 0
        """Tokens attended to by the first step of the latest plan."""

    def add(self, request: Request) -> None:
        """Adds a request with a slot."""
        request.state = RequestState.DECODING
        self.members[request.request_id] = request
        self._changed = self.has_joined = True

    def remove(self, request: Request) -> None:
        """Removes a request, after indexing its decoded tokens."""
        self._kv.prefixes.index_decoded(request.kv)
        del self.members[request.request_id]
        self._changed = True
        self.has_joined = self.has_joined and bool(self.members)

    def refresh(self) -> None:
        """Counts granted steps anew before the next plan, because some did not run."""
        self._changed = True

    def grant(self, most_steps: int, make_room: MakeRoom) -> int:
        """Grants the rows up to ``most_steps`` steps in a row, with blocks for all of them.

        Returns:
            The steps, until a row is complete or blocks run out; 0 if there is no row, or no room for a step
            now. The rows are :attr:`batch`.
        """
        while True:
            if self._changed or self._step >= self._first_to_end:
                self._count_rows_anew()
            if not self.batch.requests:
                return 0
            steps = min(most_steps, self._first_to_end - self._step)
            if self._step + steps > self._first_to_grow:
                steps = self._reserve(steps, make_room)
            if not self._changed:
                break
        self.context_tokens = self._context + self._step * len(self.batch.requests)
        self._step += steps
        if steps:
            self.has_joined = self._changed = self._leaves_out
        return steps

    def _count_rows_anew(self) -> None:
        """Reads the next rows, and how far each can go, from requests and plans in flight."""
        self._changed, self._step = False, 0
        in_flight = self._plans.granted()
        rows = [
            (request, granted)
            for request in self.members.values()
            if (granted := request.kv.num_computed + in_flight.get(request, 0)) + 1 < request.end
        ]
        fitting = self._plans.first_that_fit([request for request, _ in rows])
        self._leaves_out = len(fitting) < len(rows)
        del rows[len(fitting) :]
        self.batch = batch_of(tuple(fitting))
        # The last token of a sequence is never computed.
        self._first_to_end = min((request.end - 1 - granted for request, granted in rows), default=0)
        capacity = self._kv.capacity
        self._rooms = [capacity(request.kv, request.end) - granted for request, granted in rows]
        self._first_to_grow = min(self._rooms, default=0)
        self._context = sum(granted + 1 for _, granted in rows)

    def _reserve(self, steps: int, make_room: MakeRoom) -> int:
        """Gives blocks to the rows in need; returns how many of these steps all rows can run."""
        kv, step = self._kv, self._step
        for row, request in enumerate(self.batch.requests):
            left = self._rooms[row] - step
            if left >= steps:
                continue
            kv.prefixes.index_decoded(request.kv)
            granted = kv.capacity(request.kv, request.end) - left
            if not self._plans.grow(request, granted + steps):
                if left < 1 and (not make_room(request, granted + 1) or self._changed):
                    return 0
                steps = min(steps, max(left, 1))
            self._rooms[row] = kv.capacity(request.kv, request.end) - granted + step
        self._first_to_grow = min(self._rooms)
        return steps


class Decoding:
    """The decoding requests of a replica, in a batch for each stage of its pipeline.

    While a step of a batch passes through a stage, the others keep the other stages busy. A request joins
    the smallest batch. It stays there until it leaves, or until another batch is so much smaller that moving
    it pays.
    """

    def __init__(self, shapes: ShapeConfig, kv: KvCache, plans: Plans) -> None:
        """Starts empty."""
        self._buckets = shapes.buckets
        # The least recently planned first.
        self._batches = [DecodeRows(kv, plans) for _ in range(shapes.stages)]
        # The batch of each request, by request id.
        self._homes: dict[str, DecodeRows] = {}
        self.stalled_since: float | None = None
        """Clock reading since which chunks keep all batches from decoding; None while any decodes."""

    def __len__(self) -> int:
        """The number of decoding requests."""
        return len(self._homes)

    @property
    def is_pipelined(self) -> bool:
        """Whether there are several batches."""
        return len(self._batches) > 1

    @property
    def num_active(self) -> int:
        """Batches with requests."""
        return sum(bool(batch.members) for batch in self._batches)

    @property
    def has_joined(self) -> bool:
        """Whether a request joined after the latest plan."""
        return any(batch.has_joined for batch in self._batches)

    def add(self, request: Request) -> None:
        """Adds a request with a slot."""
        batch = min(self._batches, key=_size)
        self._homes[request.request_id] = batch
        batch.add(request)

    def remove(self, request: Request) -> None:
        """Removes a request, after indexing its decoded tokens."""
        self._homes.pop(request.request_id).remove(request)
        if not self._homes:
            self.stalled_since = None

    def refresh(self) -> None:
        """Counts granted steps anew before the next plan, because some did not run."""
        for batch in self._batches:
            batch.refresh()

    def grant(self, most_steps: int, make_room: MakeRoom) -> tuple[DecodeRows, int]:
        """Grants up to ``most_steps`` steps to the batch waiting longest of those able to decode.

        Returns:
            The batch and its steps; 0 steps if no batch can decode.
        """
        for batch in tuple(self._batches):
            if not batch.members:
                continue
            if self.is_pipelined:
                self._rebalance(batch)
            if steps := batch.grant(most_steps, make_room):
                self._batches.remove(batch)
                self._batches.append(batch)
                return batch, steps
        return self._batches[0], 0

    def _rebalance(self, batch: DecodeRows) -> None:
        """Moves requests from a batch to the smallest, if that is empty or the bucket shrinks."""
        size, smallest = len(batch.members), min(self._batches, key=_size)
        moved = (size - len(smallest.members)) // 2
        if moved <= 0:
            return
        if not smallest.members or any(size - moved <= bucket < size for bucket in self._buckets):
            for request in list(batch.members.values())[-moved:]:
                batch.remove(request)
                self._homes[request.request_id] = smallest
                smallest.add(request)

    def stall(self, since_s: float) -> None:
        """Notes that a chunk begun at ``since_s`` keeps decoding requests, if there are any, waiting."""
        if self._homes and self.stalled_since is None:
            self.stalled_since = since_s


def _size(batch: DecodeRows) -> int:
    return len(batch.members)
