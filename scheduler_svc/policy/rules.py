"""Choice of the next step on a replica, and of the request to preempt."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from scheduler_svc.requests.request import Request

# Sums of shares are exact up to this.
_ROUNDING = 1e-9

# Every so many chunks, the first request in order has its turn, whatever its length.
_CHUNKS_BY_LENGTH = 4


def runs_before(prefilling: Request, request: Request, rest: int) -> bool:
    """Whether a prefilling request's next chunk precedes the first of another with ``rest`` tokens to go."""
    if prefilling.priority != request.priority:
        return prefilling.priority < request.priority
    return prefilling.num_ungranted <= rest


def next_to_prefill(prefilling: Sequence[Request], turn: int) -> Request | None:
    """Returns the request of the next chunk: the most urgent, and among equals the soonest to finish.

    So short prompts overtake long ones. Every fourth turn belongs to the first prompt in order, so neither
    short prompts nor tokens forced by grammars, first among equals otherwise, hold it up indefinitely.

    Args:
        prefilling: requests ready for a chunk, in order.
        turn: the number of chunks before this one.
    """
    if len(prefilling) < 2:
        return prefilling[0] if prefilling else None
    if not turn % _CHUNKS_BY_LENGTH:
        return next((one for one in prefilling if not one.prefills_forced), prefilling[0])
    return min(prefilling, key=lambda one: (one.priority, not one.prefills_forced, one.num_ungranted))


class Turns:
    """Alternates between prefill chunks and decode steps.

    Bounded stall: while both kinds of work exist, a fixed number of decode steps follows every chunk.
    vLLM-RBLN runs all prefill first, which stalls running requests as long as prompts keep arriving. Here
    the longest gap between two tokens of a request is a chunk plus a decode step.

    With targets, measured times decide instead. A gap target lets chunks follow one another while their gap
    stays below it. A prompt about to miss its target of a first token runs at once, if the gap target allows
    it. A prompt past its target takes turns, or a burst would stop all streams.

    On a pipeline, each decode step is of a single batch, and a stage spends only its share of the time on a
    chunk. So a round of all batches with a chunk after each takes as long as a chunk and a step of the whole
    model. With fewer batches than stages, several chunks may follow each step.
    """

    def __init__(
        self, decode_steps_per_chunk: int, *, ttft_target_s: float = 0.0, itl_target_s: float = 0.0
    ) -> None:
        """Starts with a chunk due.

        Args:
            decode_steps_per_chunk: decode steps between two chunks, without targets; 0 runs all chunks first.
            ttft_target_s: seconds from a request's arrival to its first token; 0 for no target.
            itl_target_s: seconds between two tokens of a request; 0 for no target.
        """
        self._ratio = decode_steps_per_chunk
        self._ttft_target_s = ttft_target_s
        self._itl_target_s = itl_target_s
        # Decode steps not yet followed by a chunk. The first chunk may start at once.
        self._decodes = decode_steps_per_chunk
        self.chunks = 0
        """Chunks sent so far."""
        # Seconds of the chunks sent since the last decode step.
        self._gap_s = 0.0

    @property
    def steps_before_chunk(self) -> int:
        """Decode steps to run before the next chunk, at least 1."""
        return max(1, self._ratio - self._decodes)

    def longest_chunk(self, sizes: Sequence[int], seconds: Callable[[int], float], step_s: float) -> int:
        """Returns the largest chunk within the gap target, or the smallest if none is.

        Args:
            sizes: of chunks, ascending.
            seconds: returns the seconds of a chunk of a size.
            step_s: expected seconds of the next decode step.
        """
        if not self._itl_target_s:
            return sizes[-1]
        most_s = self._itl_target_s - self._gap_s - step_s
        return next((size for size in reversed(sizes) if seconds(size) <= most_s), sizes[0])

    def prefill_due(
        self, request: Request, now_s: float, *, chunk_s: float, rest_s: float, step_s: float
    ) -> bool:
        """Whether the next chunk is to run before the next decode step.

        Args:
            request: the request of the chunk.
            now_s: clock reading.
            chunk_s: expected seconds of the chunk; 0 if unknown.
            rest_s: expected seconds of all chunks left of the request, including this.
            step_s: expected seconds of the next decode step; 0 if unknown.
        """
        delivery, target_s = request.delivery, self._ttft_target_s
        waited_s = now_s - delivery.accepted_s
        fits_gap = self._gap_s + chunk_s + step_s <= self._itl_target_s
        # Another plan runs now, about a chunk, and a decode step would come before this chunk.
        is_late = (
            delivery.first_token_s is None and waited_s < target_s <= waited_s + chunk_s + step_s + rest_s
        )
        if is_late and (fits_gap or not self._itl_target_s):
            return True
        if self._itl_target_s and chunk_s:
            # A chunk longer than the whole target still has its turn.
            return fits_gap or (not self._gap_s and self._decodes >= self._ratio)
        return self._decodes >= self._ratio

    def sent_chunk(self, chunk_s: float, turns: int = 1) -> None:
        """Notes a chunk of an expected duration; ``turns``: stages for each decode batch."""
        self._decodes = max(0, min(self._decodes, self._ratio * turns) - self._ratio)
        self._gap_s += chunk_s
        self.chunks += 1

    def sent_steps(self, count: int) -> None:
        """Notes decode steps; on a pipeline each counts as often as there are stages for its batch."""
        self._decodes += count
        self._gap_s = 0.0

    def take_back(self, count: int) -> None:
        """Takes back decode steps granted but not run."""
        self._decodes -= count


def join_prefill(prefilling: list[Request], request: Request) -> None:
    """Inserts a request into a replica's prefill order.

    Requests keep the order of the queue, except for a request that outranks others before it. A decoding
    request with tokens forced by its grammar goes first: its client waits for them.
    """
    index = 0 if request.prefills_forced else len(prefilling)
    while index and outranks(request, prefilling[index - 1]):
        index -= 1
    prefilling.insert(index, request)


def below_share(
    waiting: Request, running: Iterable[tuple[Request, float]], shares: Mapping[str, float]
) -> list[Request]:
    """Returns the running requests to preempt, in order, for a tenant with less than half its share.

    The tenant furthest above its share gives first, starting with its least important request. No tenant
    gives so much as to fall below its own share, so no exchange undoes an earlier exchange.

    Args:
        waiting: the tenant's request; more urgent requests do not give way.
        running: the running requests, each with the share of the deployment it occupies.
        shares: of all tenants, by :meth:`Tenants.shares`.
    """
    surplus = {tenant: -share for tenant, share in shares.items()}
    able: dict[str, list[tuple[Request, float]]] = {}
    for request, footprint in running:
        surplus[request.tenant] += footprint
        if request.tenant != waiting.tenant and request.priority >= waiting.priority:
            able.setdefault(request.tenant, []).append((request, footprint))
    if surplus[waiting.tenant] >= -shares[waiting.tenant] / 2 - _ROUNDING:
        return []
    for requests in able.values():
        requests.sort(key=lambda one: one[0].rank)
    leaving = []
    while able:
        tenant = max(able, key=surplus.__getitem__)
        request, footprint = able[tenant].pop()
        surplus[tenant] -= footprint
        if surplus[tenant] < -_ROUNDING or not able[tenant]:
            del able[tenant]
        if surplus[tenant] >= -_ROUNDING:
            leaving.append(request)
    return leaving


def outranks(waiting: Request, running: Request) -> bool:
    """Whether a waiting request may preempt a running request of lower priority not promoted by ageing.

    A later arrival does not undo a promotion.
    """
    return waiting.priority < running.priority and waiting.rank < running.rank
