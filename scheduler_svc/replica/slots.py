"""The requests that have a slot on a replica: how they get it, what they do with it, and how they leave it."""

from bisect import insort
from collections import Counter
from collections.abc import Callable

from protos.errors import Internal, TriptychError
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.decode_batch import DecodeBatch
from scheduler_svc.replica.in_flight import InFlight
from scheduler_svc.replica.outputs import Announcer
from scheduler_svc.replica.owner import Owner
from scheduler_svc.replica.plan_builder import NextPlan
from scheduler_svc.replica.shared_prefill import Sharing
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.shapes.geometry import Geometry


class Running:
    """Slots and the requests in them. Each is in exactly one of ``prefilling`` and ``decoding``.

    Attributes:
        kv: the replica's KV memory.
        owner: gets back what does not stay.
        stats: counters.
        next: what the next plan will say of those who come, grow and go.
        in_flight: plans that are not answered.
        sharing: what they compute for one another, and who waits for that.
        prefilling: those with known tokens to be run, by rank.
        prefill_backlog: how many tokens that are.
        decoding: the others.
    """

    def __init__(
        self, geometry: Geometry, kv: KvCache, owner: Owner, stats: SchedulerStats, clock: Callable[[], float]
    ) -> None:
        """Starts with all slots free; ``clock`` gives monotonic seconds."""
        self.kv = kv
        self.owner = owner
        self.stats = stats
        self.next = NextPlan()
        self.in_flight = InFlight()
        self.sharing = Sharing(kv, geometry.granule, stats, self.holds)
        self.prefilling: list[Request] = []
        self.prefill_backlog = 0
        self.decoding = DecodeBatch(kv)
        self._announcer = Announcer(stats, clock)
        self._slots: list[Request | None] = [None] * geometry.max_num_seqs
        self._free_slots = list(range(geometry.max_num_seqs - 1, -1, -1))
        self._priorities: Counter[int] = Counter()

    # ---- who there is --------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots) - len(self._free_slots)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    @property
    def requests(self) -> list[Request]:
        """All of them, by slot."""
        return [request for request in self._slots if request is not None]

    @property
    def least_urgent(self) -> int | None:
        """The priority of the least urgent one."""
        return max(self._priorities, default=None)

    def at(self, slot: int) -> Request | None:
        """Who has a slot."""
        return self._slots[slot]

    def holds(self, request: Request) -> bool:
        """Whether the request has a slot, and has it here."""
        slot = request.slot
        # It may be one of a replica that has more of them.
        return slot is not None and slot < len(self._slots) and self._slots[slot] is request

    # ---- coming --------------------------------------------------------------------------------------------------------------------

    def seat(self, request: Request) -> None:
        """Gives the request, which has its blocks, a slot with the next plan; it prefills what is known of it, if that is left to do."""
        slot = request.slot = self._free_slots.pop()
        self._slots[slot] = request
        request.jumped = False
        request.num_admissions += 1
        self._announcer.scheduled(request)
        self._priorities[request.priority] += 1
        self.next.admit(request)
        self.owner.charge(request.tenant, len(request.token_ids) - request.num_computed)
        if not request.num_to_prefill:
            self.decoding.add(request)
            return
        self.sharing.start(request)
        self._prefill(request)

    def fork(self, origin: Request, request: Request) -> bool:
        """Lets a sequence decode from the end of the prompt that ``origin`` has computed; False without a slot, without room or if it is too late."""
        if self.full or (self.in_flight and self.kv.slides_in_place) or not self.next.takes(request):
            return False
        if not self.sharing.fork(origin, request):
            return False
        self.seat(request)
        self.stats.forks += 1
        return True

    # ---- going on ------------------------------------------------------------------------------------------------------------------

    def prefilled(self, request: Request, num_tokens: int) -> bool:
        """A chunk of the request's was run; whether it was the last one, so that it decodes now."""
        self.prefill_backlog -= num_tokens
        if request.num_to_prefill:
            return False
        self.prefilling.remove(request)
        self.decoding.add(request)
        return True

    def jump(self, request: Request) -> None:
        """A decoding request got tokens that are not computed yet: it prefills them, from where it is, before it decodes again."""
        self._stop_decoding(request)
        request.jumped = True
        self._prefill(request)

    def tell(self, request: Request, event: Event) -> None:
        """Tells the client; after its last event the request leaves."""
        event = self._announcer.complete(event, request)
        if event.finish_reason is None:
            request.sink.push(event)
        else:
            self.finish(request, event)

    # ---- leaving -------------------------------------------------------------------------------------------------------------------

    def finish(self, request: Request, event: Event) -> None:
        """Ends a request that runs or waits here, with its last event."""
        if request.slot is not None:
            self.leave(request)
        else:
            self.sharing.cancel(request)
        request.state = RequestState.FINISHED
        request.sink.push(event)
        self.owner.forget(request)

    def fail(self, request: Request, error: TriptychError) -> None:
        """Ends a request that cannot be run."""
        self.finish(request, Event(request.request_id, error=error))

    def preempt(self, request: Request, reason: str) -> None:
        """Has a request wait again."""
        self.stats.preemptions[reason] += 1
        self.leave(request)
        self.owner.requeue(request)

    def leave(self, request: Request) -> None:
        """Takes slot and blocks from a request. The worker hears of it with the next plan."""
        slot = request.slot
        if slot is None:
            raise Internal(f"request {request.request_id} has no slot to give up")
        if request.state is RequestState.PREFILLING:
            self.prefilling.remove(request)
            self.prefill_backlog -= request.num_to_prefill
            for waiter in self.sharing.given_up(request):
                self.owner.requeue(waiter)
        elif request.state is RequestState.DECODING:
            self._stop_decoding(request)
        request.state = RequestState.WAITING
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self.next.release(request, slot)
        self.in_flight.leave(slot)
        self._slots[slot] = None
        self._free_slots.append(slot)
        request.slot = None
        self.kv.release(request)

    def clear(self) -> list[Request]:
        """Takes all requests off, also those that wait here; nothing of the plans under way will come."""
        # Those first: who leaves would otherwise put them back itself, unseen by the caller.
        waiting = self.sharing.clear()
        requests = self.requests
        for request in requests:
            self.leave(request)
        self.in_flight.clear()
        return requests + waiting

    def _prefill(self, request: Request) -> None:
        request.state = RequestState.PREFILLING
        insort(self.prefilling, request, key=lambda one: one.rank)
        self.prefill_backlog += request.num_to_prefill

    def _stop_decoding(self, request: Request) -> None:
        self.kv.generated(request)
        self.decoding.remove(request)
