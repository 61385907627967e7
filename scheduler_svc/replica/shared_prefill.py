"""What requests on one replica have in common: prefixes that one of them computes, and the prompt of the sequences of one request."""

from collections.abc import Callable, Iterator

from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.prefixes_in_progress import Awaited, PrefixesInProgress
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Request, RequestState


class Sharing:
    """Finds who computes what another one needs, has that one wait for it, and says when it is there."""

    def __init__(
        self, kv: KvCache, granule: int, stats: SchedulerStats, runs_here: Callable[[Request], bool]
    ) -> None:
        """Nothing is being computed.

        Args:
            kv: the replica's memory.
            granule: tokens of a granule.
            stats: counts those that wait.
            runs_here: whether a request has one of the replica's slots.
        """
        self._kv = kv
        self._granule = granule
        self._stats = stats
        self._runs_here = runs_here
        self._in_progress = PrefixesInProgress()
        # Requests whose prefix is computed, but whose window's copy goes with the next plan.
        self._soon: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for something that another one computes."""
        return self._in_progress.num_waiting + len(self._soon)

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a request that are in the cache or being computed."""
        if self.shares_prompt(request):
            return request.num_prompt_tokens - 1
        keys, limit = self._kv.keys_of(request)
        computing = self._in_progress.longest(keys, limit, self._kv.unit)
        return max(self._kv.longest_hit(keys, limit), computing) * self._granule

    # ---- a request's sequences -----------------------------------------------------------------------------------------------------

    def shares_prompt(self, request: Request) -> bool:
        """Whether another sequence of the same request is here that has the request's prompt or computes it."""
        return request.branches and next(self.sharers(request), None) is not None

    def sharers(self, request: Request) -> Iterator[Request]:
        """Sequences of the same request that have its prompt here, or compute it and will have all of it."""
        if request.family is None:
            return
        prompt = request.num_prompt_tokens - 1
        if not prompt:
            return  # a single token: nothing to share
        for one in request.family.members:
            if not self._runs_here(one):
                continue  # it waits, or runs elsewhere
            if one.branches if one.state is RequestState.PREFILLING else one.num_computed >= prompt:
                yield one

    def wait_for_prompt(self, request: Request, origin: Request) -> None:
        """A sequence waits for another one of its request, which computes their prompt."""
        assert request.family is not None
        self._wait(request, request.family, origin)

    def fork(self, origin: Request, request: Request) -> bool:
        """Gives a sequence the blocks of the prompt that ``origin`` has computed, with room for the token behind; False if there are not enough."""
        prompt = request.num_prompt_tokens - 1
        if not self._kv.fork(origin, request, prompt):
            return False
        # Room for the token that it runs first, or it would only be admitted to be preempted.
        if self._kv.grow(request, prompt + 1) is None:
            self._kv.release(request)
            return False
        return True

    # ---- prefixes ------------------------------------------------------------------------------------------------------------------

    def wait_for_prefix(self, request: Request) -> bool:
        """Has the request wait, if somebody before it computes more of its prompt than the cache has."""
        keys, limit = self._kv.keys_of(request)
        shared = self._in_progress.longest(keys, limit, self._kv.unit)
        computing = self._in_progress.owner(keys[shared - 1]) if shared else None
        # It does not wait behind what is less urgent than itself: that may be a long time in coming.
        if not computing or computing.rank >= request.rank or shared <= self._kv.longest_hit(keys, limit):
            return False
        computing.junction = max(computing.junction, shared)
        self._wait(request, keys[shared - 1], computing)
        return True

    def start(self, request: Request) -> None:
        """The request is going to compute the rest of its prompt."""
        keys, limit = self._kv.keys_of(request)
        self._in_progress.start(request, keys, request.num_computed // self._granule, limit, self._kv.unit)

    def computed(self, request: Request, end: int) -> list[Request]:
        """The request has computed its prompt up to token ``end``; returns who may go on from there at once."""
        keys, limit = self._kv.keys_of(request)
        boundary, rest = divmod(end, self._granule)
        if rest or boundary > limit:
            return []
        waiters = self._in_progress.computed(keys[boundary - 1])
        if not self._kv.copies:
            return waiters
        self._soon += waiters
        return []

    def computed_prompt(self, origin: Request) -> list[Request]:
        """The prompt that the sequences of a request share is computed; returns those that waited for it."""
        return [] if origin.family is None else self._in_progress.computed(origin.family)

    def copied(self) -> list[Request]:
        """A plan was run: who waited for a window that it may have copied."""
        if not self._soon:
            return []
        soon, self._soon = self._soon, []
        return soon

    # ---- ends ----------------------------------------------------------------------------------------------------------------------

    def given_up(self, request: Request) -> list[Request]:
        """The request computes no more of its prompt; returns who waited for the rest."""
        keys, limit = self._kv.keys_of(request)
        return self._in_progress.given_up(request, keys[:limit])

    def cancel(self, request: Request) -> None:
        """A request that waits here does so no more."""
        if not self._in_progress.cancel(request):
            self._soon.remove(request)

    def clear(self) -> list[Request]:
        """Nobody waits any more; returns who did."""
        waiting = [*self._in_progress.waiting, *self._soon]
        for request in waiting:
            self.cancel(request)
        return waiting

    def _wait(self, request: Request, awaited: Awaited, computing: Request) -> None:
        self._in_progress.wait(request, awaited, computing)
        request.state, request.replica_id = RequestState.DEFERRED, computing.replica_id
        self._stats.deferred += 1
