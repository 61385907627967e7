"""Who decodes on a replica, and before which step each of them needs room.

A decode step costs a few operations a request: all decoding requests advance by one token a step, so when each of them needs its next
block is known in advance and written into a calendar, and what does not change from step to step is not computed again.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from scheduler_svc.kv.cache import KvCache
from scheduler_svc.requests.request import Request, RequestState


class DecodeBatch:
    """The requests that run one token with every decode step.

    Attributes:
        members: the requests by id, in the order in which they began to decode.
        first_tokens: whether some of them has generated nothing yet: its first token is told in another way than all others.
        stalled_since: since when they stand still because chunks run, seconds; None while they do not.
    """

    def __init__(self, kv: KvCache) -> None:
        """Starts empty; the requests' blocks are in ``kv``."""
        self._kv = kv
        # A dict for O(1) removal.
        self.members: dict[str, Request] = {}
        self._tenants: Counter[str] = Counter()
        self._rows: tuple[Request, ...] | None = ()
        self._slots: tuple[int, ...] | None = ()
        self.first_tokens = False
        self.stalled_since: float | None = None
        # Who will decode from the next plan on, and is not in the calendar yet: (request, its `num_decodes`).
        self._beginners: list[tuple[Request, int]] = []
        # Decode steps planned so far, and who needs room before which of them: (request, its `num_decodes`).
        self._steps = 0
        self._calendar: dict[int, list[tuple[Request, int]]] = {}

    def add(self, request: Request) -> None:
        """The request, which has a slot, runs one token with every decode step from now on."""
        request.state = RequestState.DECODING
        request.num_decodes += 1
        self.members[request.request_id] = request
        self._tenants[request.tenant] += 1
        self._rows = self._slots = None
        self.first_tokens |= request.branches
        # A step that is under way, of a lease perhaps, is not one of its own.
        self._beginners.append((request, request.num_decodes))

    def remove(self, request: Request) -> None:
        """The request decodes no more."""
        del self.members[request.request_id]
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
        self._rows = self._slots = None
        if not self.members:
            self.stalled_since = None

    @property
    def rows(self) -> tuple[Request, ...]:
        """The requests, in their order in the batch."""
        if self._rows is None:
            self._rows = tuple(self.members.values())
        return self._rows

    @property
    def slots(self) -> tuple[int, ...]:
        """Their slots, in the same order."""
        if self._slots is None:
            self._slots = tuple([request.slot for request in self.rows if request.slot is not None])
        return self._slots

    def told(self) -> None:
        """A step's tokens have gone to the clients, first ones among them."""
        self.first_tokens = any(request.branches for request in self.members.values())

    def ran(self) -> Iterable[tuple[str, int]]:
        """One more decode step is planned, or was run by a lease; returns the rows of each tenant."""
        self._steps += 1
        return self._tenants.items()

    def grow(self, make_room: Callable[[Request, int], bool]) -> None:
        """Before a step: has ``make_room`` give each request that needs it room for its token, or take it or others off."""
        if self._beginners:
            beginners, self._beginners = self._beginners, []
            for request, decode in beginners:
                if request.num_decodes == decode and request.state is RequestState.DECODING:
                    self._enter(request)
        for request, decode in self._calendar.pop(self._steps, ()):
            if request.num_decodes != decode or request.state is not RequestState.DECODING:
                continue  # it has left or jumped since, and may be back with another table
            self._kv.generated(request)
            if make_room(request, request.num_computed + 1):
                self._enter(request)

    def undisturbed(self, longest: int) -> int:
        """How many steps, ``longest`` at most, may run in a row: nobody needs room and nobody reaches its end before."""
        for step in range(1, longest):
            if self._steps + step in self._calendar:
                longest = step
                break
        return min(longest, *[request.end - len(request.token_ids) for request in self.rows])

    def _enter(self, request: Request) -> None:
        """Writes into the calendar when a request that has room for its next token needs room again."""
        capacity = self._kv.capacity(request)
        if capacity >= request.end:
            return
        due = self._steps + capacity - request.num_computed
        self._calendar.setdefault(due, []).append((request, request.num_decodes))
