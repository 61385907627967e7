"""The requests that hold a slot on a replica: how they get it, decode, and give it up."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from protos.errors import Internal
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.rules import join_prefill
from scheduler_svc.replica.decode_rows import Decoding
from scheduler_svc.replica.plans import Plans
from scheduler_svc.replica.prefix_waiters import PrefixWaiters
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.shapes.shape_config import ShapeConfig


class ReplicaOwner(Protocol):
    """Takes the requests that leave a replica, and learns of free room: the engine."""

    def requeue(self, request: Request) -> None:
        """Requeues the request with its tokens."""

    def forget(self, request: Request) -> None:
        """Drops an ended request."""

    def admitted(self, request: Request) -> None:
        """Notes that a request got a slot: charges its tenant for the tokens to compute."""

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant for generated tokens."""

    def without_grammar(self, request: Request) -> None:
        """Requeues the request until its evicted grammar is recompiled."""

    def is_hopeless(self, request: Request) -> bool:
        """Whether steps of the request alone failed often enough, on every replica able to run it."""

    def released(self) -> None:
        """Notes that blocks or room in a plan became free: a waiting request may fit now."""


class Slots:
    """Slots and the requests in them, with the parts of a replica's state that these share.

    Each request prefills, is on trial, or is in the decode batch.
    """

    def __init__(
        self, shapes: ShapeConfig, kv: KvCache, adapters: AdapterSeats, owner: ReplicaOwner, clock: Callable[[], float]
    ) -> None:  # fmt: skip
        """Starts with all slots free."""
        self.kv, self.adapters, self.owner, self.clock = kv, adapters, owner, clock
        self.stats = SchedulerStats()
        self.plans = Plans(kv, self.stats, clock)
        self.waiters = PrefixWaiters(kv.prefixes, kv.copies, self.stats)
        self.decoding = Decoding(shapes, kv, self.plans)
        self.prefilling: list[Request] = []
        """Requests with known tokens not yet sent in a chunk, in the order of their next chunks."""
        self.prefill_backlog = 0
        """These tokens."""
        self.trials: list[Request] = []
        """Suspects whose next step is a decode step, run alone."""
        num_slots = shapes.stage_batch * shapes.stages
        self._slots: list[Request | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._slots) - len(self._free_slots)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    @property
    def has_suspects(self) -> bool:
        """Whether a running request is a suspect."""
        return bool(self.trials) or any(request.suspect for request in self.prefilling)

    @property
    def requests(self) -> list[Request]:
        """All requests with a slot, by slot."""
        return [request for request in self._slots if request is not None]

    @property
    def least_urgent(self) -> int | None:
        """The priority of the least urgent request."""
        return max(self._priorities, default=None)

    def at(self, slot: int) -> Request | None:
        """Returns the request in a slot."""
        return self._slots[slot]

    def fewest_users(self, candidates: Collection[Request]) -> Sequence[Request] | None:
        """Returns the users of the adapter with the fewest, all of them `candidates`; None without."""
        users: dict[int, list[Request]] = {}
        for one in self.requests:
            if one.adapter is not None:
                users.setdefault(one.adapter.adapter_id, []).append(one)
        able = (each for each in users.values() if all(one in candidates for one in each))
        return min(able, key=len, default=None)

    # ---- getting a slot ----

    def assign_slot(self, request: Request) -> None:
        """Gives a slot to a request with blocks, to prefill its known tokens or else to decode."""
        slot = request.slot = self._free_slots.pop()
        self._slots[slot] = request
        if request.adapter is not None:
            request.adapter_load = self.adapters.acquire(request.adapter.adapter_id)
        request.prefills_forced = False
        self._priorities[request.priority] += 1
        self.stats.count_start(request, self.clock())
        self.plans.admit(request)
        self.owner.admitted(request)
        if not request.num_to_prefill:
            self._start_decoding(request)
            return
        self.waiters.start(request)
        self._prefill(request)

    def siblings_with_prompt(self, request: Request) -> Iterator[Request]:
        """Yields other sequences of the request here with their whole prompt computed or in progress."""
        if request.group is None:
            return
        prompt = request.num_prompt_tokens - 1
        if not prompt:
            return  # a single token: nothing to share
        for one in request.group.members:
            slot = one.slot
            # A member on another replica may have a slot beyond the number of slots here.
            if slot is None or slot >= len(self._slots) or self._slots[slot] is not one:
                continue
            prefilling = one.state is RequestState.PREFILLING
            if one.can_fork if prefilling else one.kv.num_computed >= prompt:
                yield one

    def fork(self, origin: Request, request: Request) -> bool:
        """Starts a sequence at the end of the prompt computed by ``origin``.

        Returns:
            False without a slot or enough room, or if ``origin``'s window moved on.
        """
        if self.full:
            return False
        if self.kv.slides_in_place and self.plans.runs(origin):
            return False
        prompt = request.num_prompt_tokens - 1
        if not self.kv.fork(origin.kv, request.kv, prompt):
            return False
        # Without room for its first step, the sequence would be admitted only to be preempted.
        if self.kv.grow(request.kv, prompt + 1) is None:
            self.kv.release(request.kv)
            return False
        self.assign_slot(request)
        self.stats.forks += 1
        return True

    # ---- prefilling ----

    def chunk_sent(self, request: Request, end: int) -> None:
        """Notes that a chunk up to token ``end`` was sent.

        After its last chunk a request decodes. Some wait for the chunk's result: a suspect; a sequence to be
        forked; a request whose window slides in place, and may be kept first; and any request on a pipeline,
        where its row would hold up the batch until the chunk leaves the last stage.
        """
        self.prefill_backlog -= end - request.granted
        request.granted = end
        if request.num_ungranted:
            return
        self.prefilling.remove(request)
        waits = self.kv.slides_in_place or self.decoding.is_pipelined
        if not (request.suspect or request.can_fork or waits):
            self.decoding.add(request)

    def prefilled(self, request: Request) -> bool:
        """Returns whether the answered chunk is the request's last, so that it decodes now."""
        if request.num_to_prefill:
            return False
        if request.state is RequestState.PREFILLING:
            self._start_decoding(request)
        return True

    def _start_decoding(self, request: Request) -> None:
        if request.suspect:
            request.state = RequestState.DECODING
            self.trials.append(request)
        else:
            self.decoding.add(request)

    def _stop_decoding(self, request: Request) -> None:
        if request in self.trials:
            self.trials.remove(request)
        else:
            self.decoding.remove(request)

    def clear_suspect(self, request: Request) -> None:
        """Clears a suspect after the answer to a step of its own."""
        request.clear()
        if request in self.trials:
            self.trials.remove(request)
            self.decoding.add(request)

    def prefill_forced(self, request: Request) -> None:
        """Moves a decoding request back to prefill, for tokens forced by its grammar."""
        self._stop_decoding(request)
        assert request.slot is not None
        self.plans.skip(request.slot)  # until its forced tokens are computed
        request.prefills_forced = True
        self._prefill(request)

    def _prefill(self, request: Request) -> None:
        request.state, request.granted = RequestState.PREFILLING, request.kv.num_computed
        join_prefill(self.prefilling, request)
        self.prefill_backlog += request.num_ungranted

    # ---- giving up a slot ----

    def finish(self, request: Request, event: Event) -> None:
        """Ends a request running or deferred here with its last event."""
        if request.slot is not None:
            self.release(request)
        else:
            self.waiters.cancel(request)
        request.finish(event, self.clock())
        self.owner.forget(request)

    def preempt(self, request: Request, reason: str) -> None:
        """Takes a request off its slot and requeues it."""
        self.stats.preemptions[reason] += 1
        self.stats.num_preempted += 1
        request.delivery.num_preemptions += 1
        self.release(request)
        self.owner.requeue(request)

    def release(self, request: Request) -> None:
        """Takes slot and blocks from a request. The next plan tells the worker."""
        slot = request.slot
        if slot is None:
            raise Internal(f"request {request.request_id} has no slot to release")
        for waiter in self.waiters.stop(request):
            self.owner.requeue(waiter)
        if request.state is RequestState.DECODING:
            self._stop_decoding(request)
        elif request.num_ungranted:
            self.prefilling.remove(request)
            self.prefill_backlog -= request.num_ungranted
        request.state = RequestState.WAITING
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self.plans.release(request, slot)
        self._slots[slot] = None
        self._free_slots.append(slot)
        request.slot = None
        if request.adapter is not None:
            self.adapters.release(request.adapter.adapter_id)
            request.adapter_load = 0
        self.kv.release(request.kv)

    def clear(self) -> list[Request]:
        """Takes all requests off a lost replica, those deferred here included; returns them."""
        # Deferred requests first: a released request would requeue them, unseen by the caller.
        deferred = self.waiters.clear()
        requests = self.requests
        for request in requests:
            self.release(request)
        self.plans.clear()
        return requests + deferred
