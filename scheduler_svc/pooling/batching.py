"""Static pooling batches: which shapes there are, and who goes into the next one.

A pooling model runs in fixed shapes of so many rows of so many tokens. A request belongs to the shapes of the smallest prompt length that
it fits into. Whenever a device is free, the next batch leaves: whoever's turn it is, with as many others of the same prompt length as the
chosen shape has rows for. Nobody waits for a batch to fill.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from protos.errors import ConfigurationRefused
from scheduler_svc.dispatch.waiting_queue import WaitingQueue
from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.requests.request import Request

# Of the default shapes: prompt lengths grow by this factor from the shortest one up to the model's context, and so do batches up to
# as many rows as make up about this many tokens.
_FACTOR = 4
_SHORTEST_PROMPT = 64
_TOKENS_PER_BATCH = 1024


@dataclass(frozen=True, slots=True, order=True)
class PoolShape:
    """One compiled graph of a pooling model.

    Attributes:
        prompt_len: tokens of a row; shorter prompts are padded.
        batch: rows; missing ones are padding.
    """

    prompt_len: int
    batch: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_len}"


def default_shapes(max_context: int, max_batch: int) -> tuple[PoolShape, ...]:
    """Shapes for any prompt that a model can read, when the settings name none: for example 1x64, 4x64, 16x64, 1x256, 4x256."""
    lengths = []
    length = _SHORTEST_PROMPT
    while length < max_context:
        lengths.append(length)
        length *= _FACTOR
    lengths.append(max_context)
    shapes = []
    for prompt_len in lengths:
        batch = 1
        while batch == 1 or (batch <= max_batch and batch * prompt_len <= _TOKENS_PER_BATCH):
            shapes.append(PoolShape(prompt_len, batch))
            batch *= _FACTOR
    return tuple(shapes)


def shapes_of(
    batch_sizes: Sequence[int], prompt_lens: Sequence[int], *, max_context: int, max_batch: int
) -> tuple[PoolShape, ...]:
    """The shapes that the settings name, ascending; the default ones if they name none.

    Args:
        batch_sizes: rows of each shape.
        prompt_lens: tokens per row of each shape, in the same order; as many.
        max_context: tokens that the model reads at most.
        max_batch: rows that the device runs at most.

    Raises:
        ConfigurationRefused: if the model or the device cannot run one of them.
    """
    shapes = tuple(
        sorted({PoolShape(length, batch) for batch, length in zip(batch_sizes, prompt_lens, strict=True)})
    )
    for shape in shapes:
        if shape.prompt_len > max_context:
            raise ConfigurationRefused(
                f"pool_prompt_lens: {shape.prompt_len} exceeds the model's context of {max_context} tokens"
            )
        if shape.batch > max_batch:
            raise ConfigurationRefused(
                f"pool_batch_sizes: {shape.batch} exceeds this device's limit of {max_batch} rows"
            )
    return shapes or default_shapes(max_context, max_batch)


def listed(shapes: Sequence[PoolShape]) -> str:
    """The shapes for people: "1x64, 4x64 (rows x tokens)"."""
    return f"{', '.join(map(str, shapes))} (rows x tokens)"


def choose_batch(waiting: int, batches: Sequence[int]) -> int:
    """The batch size that ``waiting`` requests fill best.

    The smallest one that all of them fit into, unless more than half of its rows would stay empty: then the largest one that they fill.
    Where there is no such one, the next best: the smallest of all, or the largest if they are more than it has rows.

    Args:
        waiting: at least 1.
        batches: sizes to choose from, ascending; at least one.
    """
    smaller = [batch for batch in batches if batch <= waiting]
    larger = [batch for batch in batches if batch > waiting]
    if smaller and smaller[-1] == waiting:
        return waiting
    if larger and (not smaller or 2 * waiting >= larger[0]):
        return larger[0]
    return smaller[-1]


class PoolQueue:
    """Requests that wait for a batch.

    One queue of all of them says whose turn it is, one for each prompt length says who comes along; every operation costs
    O(log waiting).
    """

    def __init__(self, shapes: Sequence[PoolShape], make_order: Callable[[], OrderPolicy]) -> None:
        """Starts empty.

        Args:
            shapes: at least one.
            make_order: makes the policy of one queue.
        """
        self.shapes = tuple(sorted(shapes))
        self._batches: dict[int, list[int]] = {}
        for shape in self.shapes:
            self._batches.setdefault(shape.prompt_len, []).append(shape.batch)
        self._all = WaitingQueue(make_order())
        self._by_len = {prompt_len: WaitingQueue(make_order()) for prompt_len in self._batches}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        """Every member once, in no particular order."""
        return iter(self._all)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._all.num_tokens

    def fit(self, num_tokens: int) -> int | None:
        """The smallest prompt length that so many tokens fit into; None if they fit none."""
        return next((length for length in self._batches if num_tokens <= length), None)

    def add(self, request: Request) -> None:
        """Adds a request that is not in; its prompt fits a shape."""
        self._all.add(request)
        self._queue_of(request).add(request)

    def remove(self, request: Request) -> bool:
        """Takes a request out; False if it is not in."""
        return self._all.remove(request) and self._queue_of(request).remove(request)

    def take(self, now: float) -> tuple[PoolShape, list[Request]] | None:
        """Takes out the next batch; None if nobody waits. Its tenants are charged for their prompts.

        Args:
            now: seconds on the clock of ``Request.arrival_s``.
        """
        request = self._all.peek(now)
        if request is None:
            return None
        prompt_len = self.fit(len(request.token_ids))
        assert prompt_len is not None
        queue = self._by_len[prompt_len]
        shape = PoolShape(prompt_len, choose_batch(len(queue), self._batches[prompt_len]))
        batch: list[Request] = []
        while request is not None:
            self.remove(request)
            batch.append(request)
            for charged in (self._all, *self._by_len.values()):
                charged.charge(request.tenant, len(request.token_ids))
            request = queue.peek(now) if len(batch) < shape.batch else None
        return shape, batch

    def drain(self) -> list[Request]:
        """Takes all requests out, in order."""
        for queue in self._by_len.values():
            queue.drain()
        return self._all.drain()

    def _queue_of(self, request: Request) -> WaitingQueue:
        prompt_len = self.fit(len(request.token_ids))
        assert prompt_len is not None
        return self._by_len[prompt_len]
