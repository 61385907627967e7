"""The replica that runs a request, the kind of its next step, and the request that yields its slot."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from protos.steps import Prefill, StepResult, Work
from scheduler_svc.adapters.device_slots import AdapterSlots
from scheduler_svc.requests.request import Request


class PlacementTarget(Protocol):
    """The facts about a replica that decide its cost."""

    @property
    def num_running(self) -> int:
        """Requests with a slot."""

    @property
    def prefill_backlog(self) -> int:
        """Tokens that running requests still have to prefill."""

    @property
    def adapters(self) -> AdapterSlots:
        """The LoRA adapters on the device."""

    def cached_tokens(self, request: Request) -> int:
        """Returns how many leading tokens of the request are cached or being computed."""


# Costs in tokens of prefill: of a running request, which makes every later step slightly longer, and of an
# adapter to copy to a device, where it displaces another one.
_TOKENS_PER_RUNNING = 16.0
_TOKENS_PER_ADAPTER = 512.0


def placement_cost(request: Request, replica: PlacementTarget) -> float:
    """Returns the cost of a request on a replica with a free slot, in tokens; the lowest wins.

    It counts the tokens to prefill before the request's first token: backlog and own uncached tokens.
    """
    load = replica.prefill_backlog + _TOKENS_PER_RUNNING * replica.num_running
    if not replica.adapters.holds(request.adapter):
        load += _TOKENS_PER_ADAPTER
    return load + len(request.token_ids) - replica.cached_tokens(request)


# Every so many chunks, the request that is first in order has its turn, however long it is.
_CHUNKS_BY_LENGTH = 4


def runs_before(prefilling: Request, request: Request) -> bool:
    """Whether the next chunk of a prefilling request comes before the first one of another request."""
    if prefilling.priority != request.priority:
        return prefilling.priority < request.priority
    return prefilling.num_ungranted <= len(request.token_ids)


def next_to_prefill(prefilling: Sequence[Request], turn: int) -> Request | None:
    """Returns the request with the next chunk: the most urgent, and among these the one that is done soonest.

    So a long prompt does not hold up short ones. It has every fourth turn, so short ones do not hold it up for ever.

    Args:
        prefilling: the requests with a chunk that can be sent, in order.
        turn: the number of the turn.
    """
    if len(prefilling) < 2:
        return prefilling[0] if prefilling else None
    if not turn % _CHUNKS_BY_LENGTH:
        return prefilling[0]
    return min(prefilling, key=lambda one: (one.priority, one.num_ungranted, one.rank))


class Turns:
    """When a chunk runs, and when the decoding requests do.

    Bounded stall: while both kinds of work exist, a fixed number of decode steps follows every chunk. vLLM-RBLN
    runs all prefill first, which stalls running requests as long as prompts keep arriving. Here the longest gap
    between two tokens of a request is one chunk plus one decode step.

    With targets, measured times decide instead. A gap target lets chunks follow one another as long as the gap
    that they make stays below it. A prompt that would miss its target of a first token runs at once, if the gap
    target allows it.

    On a pipeline, each decode step is one batch's, and a stage spends only its share of the time on a chunk. So
    a round of all batches with a chunk after each takes as long as one chunk and one step of the whole model.
    Where only some stages have a batch, several chunks may follow each step.
    """

    def __init__(
        self, decode_steps_per_chunk: int, *, ttft_target_s: float = 0.0, itl_target_s: float = 0.0
    ) -> None:
        """Runs some decode steps between two chunks; none of them runs all chunks first.

        Args:
            decode_steps_per_chunk: decode steps between two chunks, without targets.
            ttft_target_s: seconds from a request's arrival to its first token; 0 for no target.
            itl_target_s: seconds between two tokens of a request; 0 for no target.
        """
        self._ratio = decode_steps_per_chunk
        self._ttft_target_s = ttft_target_s
        self._itl_target_s = itl_target_s
        # Decode steps that no chunk has been sent for. The first chunk may start at once.
        self._decodes = decode_steps_per_chunk
        # Seconds of the chunks that were sent since the last decode step.
        self._gap_s = 0.0
        # Measured: of a decode step, and of a chunk with all its padding.
        self._step_s = 0.0
        self._chunk_s = 0.0

    @property
    def steps_before_chunk(self) -> int:
        """Decode steps to run before the next chunk, at least one."""
        return max(1, self._ratio - self._decodes)

    def steps_within(self, seconds: float) -> int:
        """Returns how many decode steps fit into some time; 0 before one was measured."""
        return int(seconds / self._step_s) if self._step_s else 0

    def prefill_due(self, request: Request, now_s: float) -> bool:
        """Whether the next chunk is to run before the next decode step.

        Args:
            request: the request of the chunk.
            now_s: clock reading.
        """
        fits_gap = self._gap_s + self._chunk_s + self._step_s <= self._itl_target_s
        if self._ttft_target_s and self._is_late(request, now_s) and (fits_gap or not self._itl_target_s):
            return True
        if self._itl_target_s and self._chunk_s:
            # A chunk that exceeds the target by itself has its turn all the same.
            return fits_gap or (not self._gap_s and self._decodes >= self._ratio)
        return self._decodes >= self._ratio

    def _is_late(self, request: Request, now_s: float) -> bool:
        """Whether a request that has no token yet needs every chunk from now on to meet its target."""
        waited_s = now_s - request.delivery.accepted_s
        return request.delivery.first_token_s is None and waited_s + self._chunk_s >= self._ttft_target_s

    def sent_chunk(self, turns: int = 1) -> None:
        """Notes that a chunk is sent; ``turns``: pipeline stages for each decode batch."""
        self._decodes = max(0, min(self._decodes, self._ratio * turns) - self._ratio)
        self._gap_s += self._chunk_s

    def sent_steps(self, count: int) -> None:
        """Notes that decode steps are sent; on a pipeline each counts as often as there are stages for it."""
        self._decodes += count
        self._gap_s = 0.0

    def take_back(self, count: int) -> None:
        """Takes back decode steps that were sent, but have not run."""
        self._decodes -= count

    def observe(self, work: Work | None, result: StepResult) -> None:
        """Learns how long steps take, with old ones counting less and less."""
        if result.error is not None or not result.num_steps:
            return
        seconds = result.execute_us * 1e-6 / result.num_steps
        if isinstance(work, Prefill):
            self._chunk_s += _NEW_SHARE * (seconds - self._chunk_s) if self._chunk_s else seconds
        else:
            self._step_s += _NEW_SHARE * (seconds - self._step_s) if self._step_s else seconds


# Share of the latest time in the time that counts.
_NEW_SHARE = 0.1


def preemption_victim(running: Iterable[Request]) -> Request | None:
    """Returns the running request with the largest rank, so that the first in order always makes progress."""
    return max(running, key=lambda request: request.rank, default=None)


def outranks(waiting: Request, running: Request) -> bool:
    """Whether a waiting request may preempt a running one: of lower priority, and not promoted by ageing.

    A later arrival does not undo a promotion.
    """
    return waiting.priority < running.priority and waiting.rank < running.rank
