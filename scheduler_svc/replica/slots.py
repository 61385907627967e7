"""The requests that hold a slot on a replica: how they get it, decode, and give it up."""

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from protos.errors import Internal
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.rules import join_prefill
from scheduler_svc.replica.decode_rows import Decoding
from scheduler_svc.replica.plans import Changes, StepsInFlight
from scheduler_svc.replica.shared_prefill import SharedPrefills
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Event, Request, RequestState


class AdmitResult(enum.Enum):
    """Result of an attempt to admit a request."""

    ADMITTED = enum.auto()
    DEFERRED = enum.auto()
    """The request waits on the replica for a prefix that another one computes."""
    NO_ROOM = enum.auto()


class RequestOwner(Protocol):
    """Takes the requests that leave a replica; the engine is one."""

    def requeue(self, request: Request) -> None:
        """Lets the request wait again, with the tokens that it has."""

    def forget(self, request: Request) -> None:
        """Drops a request that has ended."""

    def admitted(self, request: Request) -> None:
        """Notes that a request got a slot: charges its tenant for the tokens to compute."""

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant for generated tokens."""

    def without_grammar(self, request: Request) -> None:
        """Lets the request wait until its grammar, which the replica lacks, is compiled again."""

    def is_hopeless(self, request: Request) -> bool:
        """Whether steps of the request alone have failed often enough, and wherever it can run."""


class Slots:
    """Slots and the requests in them. Each request prefills, is on trial, or is in the decode batch."""

    def __init__(
        self, max_num_seqs: int, kv: KvCache, adapters: AdapterSeats, decoding: Decoding, changes: Changes,
        in_flight: StepsInFlight, shared: SharedPrefills, owner: RequestOwner, stats: SchedulerStats, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """Starts with all slots free.

        Args:
            max_num_seqs: number of slots.
            kv: has the requests' blocks.
            adapters: counts their LoRA adapters.
            decoding: takes the requests that decode.
            changes: learns of requests that get or release a slot.
            in_flight: ignores results for released slots.
            shared: learns which prefixes are computed.
            owner: takes the requests that leave.
            stats: counters.
            clock: monotonic seconds.
        """
        self._kv = kv
        self.adapters = adapters
        """The LoRA adapters that the worker has, and those in use."""
        self._decoding = decoding
        self._changes = changes
        self._in_flight = in_flight
        self._shared = shared
        self._owner = owner
        self._stats = stats
        self._clock = clock
        self.prefilling: list[Request] = []
        """Requests with known tokens that no chunk was sent for, in the order of their next chunks."""
        self.prefill_backlog = 0
        """These tokens."""
        self.trials: list[Request] = []
        """Suspects whose next step is a decode step, which each of them runs alone."""
        self._slots: list[Request | None] = [None] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._slots) - len(self._free_slots)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    @property
    def has_suspects(self) -> bool:
        """Whether a request may have made a step fail."""
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
        """Gives a slot to a request that has its blocks, to prefill its known tokens or else to decode."""
        slot = request.slot = self._free_slots.pop()
        self._slots[slot] = request
        if request.adapter is not None:
            request.adapter_load = self.adapters.acquire(request.adapter.adapter_id)
        request.prefills_forced = False
        self._priorities[request.priority] += 1
        delivery = request.delivery
        if delivery.first_scheduled_s is None:
            delivery.first_scheduled_s = self._clock()
            self._stats.queue_s.observe(delivery.first_scheduled_s - delivery.accepted_s)
        if request.trace is not None:
            request.trace.runs(self._clock())
        self._changes.admit(request)
        self._owner.admitted(request)
        if not request.num_to_prefill:
            self._start_decoding(request)
            return
        self._shared.start(request)
        self._prefill(request)

    def siblings_with_prompt(self, request: Request) -> Iterator[Request]:
        """Yields other sequences of the same request here that have their prompt, or compute all of it."""
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
        """Lets a sequence decode from the end of the prompt that ``origin`` has computed.

        Returns:
            False if there is no slot or too little room, or if ``origin``'s window has moved on.
        """
        if self.full:
            return False
        if self._kv.slides_in_place and self._in_flight.runs(origin):
            return False
        prompt = request.num_prompt_tokens - 1
        if not self._kv.fork(origin.kv, request.kv, prompt):
            return False
        # Without room for its first step, the sequence would be admitted only to be preempted.
        if self._kv.grow(request.kv, prompt + 1) is None:
            self._kv.release(request.kv)
            return False
        self.assign_slot(request)
        self._stats.forks += 1
        return True

    # ---- prefilling ----

    def chunk_sent(self, request: Request, end: int) -> None:
        """Notes that a chunk up to token ``end`` is sent.

        After its last chunk a request decodes. Some wait for the chunk's result: a suspect, one from which
        other sequences of its group continue, one whose window, which slides in place, may have to be kept
        first, and one on a pipeline, where its row would hold up the batch until the chunk has left the
        last stage.
        """
        self.prefill_backlog -= end - request.granted
        request.granted = end
        if request.num_ungranted:
            return
        self.prefilling.remove(request)
        waits = self._kv.slides_in_place or self._decoding.is_pipelined
        if not (request.suspect or request.can_fork or waits):
            self._decoding.add(request)

    def prefilled(self, request: Request) -> bool:
        """Returns whether the chunk that was answered is the request's last, so that it decodes now."""
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
            self._decoding.add(request)

    def _stop_decoding(self, request: Request) -> None:
        if request in self.trials:
            self.trials.remove(request)
        else:
            self._decoding.remove(request)

    def clear_suspect(self, request: Request) -> None:
        """Clears a suspect: a step of its own was answered."""
        request.clear()
        if request in self.trials:
            self.trials.remove(request)
            self._decoding.add(request)

    def prefill_forced(self, request: Request) -> None:
        """Moves a decoding request back to prefill, for tokens that its grammar forced."""
        self._stop_decoding(request)
        assert request.slot is not None
        self._in_flight.skip(request.slot)  # until its forced tokens are computed
        request.prefills_forced = True
        self._prefill(request)

    def _prefill(self, request: Request) -> None:
        request.state, request.granted = RequestState.PREFILLING, request.kv.num_computed
        join_prefill(self.prefilling, request)
        self.prefill_backlog += request.num_ungranted

    # ---- giving up a slot ----

    def finish(self, request: Request, event: Event) -> None:
        """Ends a request that runs or is deferred here, with its last event."""
        if request.slot is not None:
            self.release(request)
        else:
            self._shared.cancel(request)
        request.state = RequestState.FINISHED
        request.note_end(event, self._clock())
        request.sink.push(event)
        self._owner.forget(request)

    def preempt(self, request: Request, reason: str) -> None:
        """Takes a request off its slot and lets it wait again."""
        self._stats.preemptions[reason] += 1
        self._stats.num_preempted += 1
        request.delivery.num_preemptions += 1
        self.release(request)
        self._owner.requeue(request)

    def release(self, request: Request) -> None:
        """Takes slot and blocks from a request. The next plan tells the worker."""
        slot = request.slot
        if slot is None:
            raise Internal(f"request {request.request_id} has no slot to release")
        for waiter in self._shared.stop(request):
            self._owner.requeue(waiter)
        if request.state is RequestState.DECODING:
            self._stop_decoding(request)
        elif request.num_ungranted:
            self.prefilling.remove(request)
            self.prefill_backlog -= request.num_ungranted
        request.state = RequestState.WAITING
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._changes.release(request, slot)
        self._in_flight.leave(slot)
        self._slots[slot] = None
        self._free_slots.append(slot)
        request.slot = None
        if request.adapter is not None:
            self.adapters.release(request.adapter.adapter_id)
            request.adapter_load = 0
        self._kv.release(request.kv)

    def clear(self) -> list[Request]:
        """Takes all requests off a lost replica, those deferred here included; returns them."""
        # Deferred requests first: a released request would requeue them, unseen by the caller.
        deferred = self._shared.clear()
        requests = self.requests
        for request in requests:
            self.release(request)
        self._in_flight.clear()
        return requests + deferred
