"""All requests and all replicas: what the outside submits to, and who gives waiting requests to replicas.

Runs on one event loop's thread; nothing but :meth:`Engine.drained` waits. A request belongs to nobody while it waits: whoever has a free slot,
the memory and, best of all, its prefix gets it, and a lost replica's requests simply wait again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from protos.errors import (
    ContextExceeded,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from scheduler_svc.grammars import Ask, GrammarDesk
from scheduler_svc.kv_cache import PinnedPrefix
from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.policy.placement import PlacementPolicy, PrefixAndLoad
from scheduler_svc.request import Event, FinishReason, Request, RequestState, Sink
from scheduler_svc.sampling import Grammar, SamplingParams
from scheduler_svc.scheduler import Admitted, ReplicaScheduler
from scheduler_svc.sequences import (
    MAX_SEQUENCES,
    SEQUENCES_PER_SLOT,
    Family,
    Resumed,
    SequenceSink,
    sequence_id,
    unfinished,
)
from scheduler_svc.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way in.

    Attributes:
        prompt_token_ids: at least one.
        n: sequences, 1 .. ``MAX_SEQUENCES``.
        resumed: what the client has of them already; each names another sequence below ``n``.
        sampling: complete but for ``max_tokens``, which is cut to the context when the client named none.
        max_tokens: what the client asked for, if anything.
        sampling_fields: names of the parameters that the client set to something else than "off".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    n: int = 1
    resumed: tuple[Resumed, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    sampling_fields: frozenset[str] = frozenset()

    @property
    def sequences(self) -> dict[int, tuple[int, ...]]:
        """The sequences to run, each with the tokens that the client has of it."""
        return unfinished(self.n, self.resumed)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What admission must know about the model.

    Attributes:
        max_model_len: longest sequence, tokens.
        vocab_size: token ids are below this.
        sampling_fields: parameters that the workers honour.
        max_logprobs: most log-probabilities per token.
        eos_token_ids: end tokens of sequences.
    """

    max_model_len: int
    vocab_size: int
    sampling_fields: frozenset[str]
    max_logprobs: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class AttachedReplica:
    """A ready replica: its scheduler, and how to tell its driver that there is work."""

    scheduler: ReplicaScheduler
    wake: Callable[[], None]
    ask: Ask = lambda _: None
    """Has its worker compile a grammar; the answer comes to :meth:`Engine.grammar_compiled` or :meth:`Engine.grammar_refused`."""


# Pinned prefixes of one replica: what is pinned is walked when one more is to be.
MAX_PINS = 1000


@dataclass(slots=True)
class _Pin:
    replica_id: str
    prefix: PinnedPrefix
    on_end: Callable[[], None]


class Engine:
    """Admits, queues, places, aborts; knows every live request by id.

    Attributes:
        waiting: requests without a slot that nobody computes anything for.
        grammars: requests that wait for their grammar to be compiled.
        replicas: ready replicas by id.
        attach_listeners: told the id of every replica that is added.
        model: set when the first replica is ready.
    """

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float], order: OrderPolicy,
        placement: PlacementPolicy | None = None, max_pinned_share: float = 0.5,
    ) -> None:  # fmt: skip
        """Starts without replicas.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
            clock: monotonic seconds.
            order: whose turn it is.
            placement: who gets it.
            max_pinned_share: of each KV group's blocks, how much all pinned prefixes of a replica together may hold.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._placement = placement or PrefixAndLoad()
        self._max_pinned_share = max_pinned_share
        self._arrivals = itertools.count()
        # By their own ids; those that belong to a family are also known by what the client calls its request.
        self._live: dict[str, Request] = {}
        self._families: dict[str, Family] = {}
        # One of their sequences failed; the others end before anything else is decided.
        self._failed: list[Family] = []
        self._empty: asyncio.Event | None = None
        # Slots of all replicas; those of the last ones while there is none.
        self._num_slots = 0
        # Longest sequence that fits some replica's KV memory; that of the last ones while there is none.
        self._max_request_tokens = 0
        # Whose turn it was when there was no room, as long as nothing has been released since.
        self._blocked: Request | None = None
        self._pins: dict[str, _Pin] = {}
        self.waiting = WaitingQueue(order)
        self.grammars = GrammarDesk()
        self.replicas: dict[str, AttachedReplica] = {}
        self.attach_listeners: list[Callable[[str], None]] = []
        self.model: ServedModel | None = None

    @property
    def num_running(self) -> int:
        """Requests that have a slot, over all replicas."""
        return sum(replica.scheduler.num_running for replica in self.replicas.values())

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        deferred = sum(replica.scheduler.num_deferred for replica in self.replicas.values())
        return len(self.waiting) + len(self.grammars) + deferred

    # ---- requests ------------------------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Queues a request; its events go to ``sink``.

        Raises:
            Unavailable: no replica has been ready yet.
            InvalidArgument: the id is in use, or a token id, parameter or length cannot be served.
            Overloaded: the queue is full.
        """
        model = self.model
        if model is None:
            raise Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
        self._end_failed()
        sequences = submission.sequences
        names = [
            sequence_id(submission.request_id, sequence) if submission.n > 1 else submission.request_id
            for sequence in sequences
        ]
        if submission.request_id in self._families or not self._live.keys().isdisjoint(names):
            raise InvalidArgument(
                f"request id {submission.request_id!r} is in use; ids must be unique", param="request_id"
            )
        max_tokens = self._check(submission, model)
        self._check_room(sequences, len(submission.prompt_token_ids))
        family = Family(submission.request_id, sink) if submission.n > 1 else None
        if family is not None:
            self._families[family.request_id] = family
        for name, (sequence, received) in zip(names, sequences.items(), strict=True):
            sampling = replace(submission.sampling, max_tokens=max_tokens)
            if family is not None and sequence != next(iter(sequences)):
                # The prompt is computed once, and told of once.
                sampling = replace(sampling, prompt_logprobs=None)
            request = Request(
                request_id=name,
                token_ids=[*submission.prompt_token_ids, *received],
                num_prompt_tokens=len(submission.prompt_token_ids),
                sampling=sampling,
                arrival=next(self._arrivals),
                arrival_s=self._clock(),
                sink=sink if family is None else SequenceSink(family, sequence),
                end=min(len(submission.prompt_token_ids) + max_tokens, model.max_model_len),
                stop_ids=_stop_ids(submission.sampling, model),
                priority=submission.priority,
                tenant=submission.tenant,
                cache_salt=submission.cache_salt,
                sequence=sequence,
                family=family,
            )
            if family is not None:
                family.members.append(request)
            request.rank = self.waiting.rank(request)
            self._live[name] = request
            self.grammars.arrive(request)
            self._queue(request)
        self.dispatch()

    def _check_room(self, sequences: Mapping[int, Sequence[int]], num_prompt: int) -> None:
        """Refuses what the queue does not hold, now or ever."""
        num_waiting, count = self.num_waiting, len(sequences)
        num_tokens = count * num_prompt + sum(map(len, sequences.values()))
        limit = min(MAX_SEQUENCES, SEQUENCES_PER_SLOT * self._num_slots, self._max_waiting)
        if count > limit:
            raise InvalidArgument(
                f"n must be at most {limit} here, not {count}; send several requests", param="n"
            )
        if count > 1 and num_tokens > self._max_waiting_tokens:
            raise InvalidArgument(
                f"{count} sequences of {num_prompt} prompt tokens are more than the {self._max_waiting_tokens} tokens that may wait; "
                "send several requests with a smaller n",
                param="n",
            )
        tokens_waiting = self.waiting.num_tokens + self.grammars.num_tokens
        if num_waiting + count > self._max_waiting or (
            tokens_waiting and tokens_waiting + num_tokens > self._max_waiting_tokens
        ):
            raise Overloaded(
                f"{num_waiting} requests with {tokens_waiting} tokens are waiting; retry later",
                retry_after_ms=1000,
            )

    def abort(self, request_id: str, sequence: int | None = None) -> bool:
        """Ends a request, wherever it is, or one of its sequences alone. Unknown and finished ids are no error.

        Returns:
            Whether anything live was found.
        """
        found = [one for one in self._requests_of(request_id) if sequence in (None, one.sequence)]
        for request in found:
            self._abort(request)
        if found:
            self.dispatch()
        return bool(found)

    def _requests_of(self, request_id: str) -> list[Request]:
        """All live sequences of what a client calls ``request_id``."""
        if request_id in self._families:
            return list(self._families[request_id].members)
        request = self._live.get(request_id)
        return [] if request is None or request.family is not None else [request]

    def _abort(self, request: Request) -> None:
        if self.waiting.remove(request) or self.grammars.remove(request):
            self._end(request, Event(request.request_id, finish_reason=FinishReason.ABORT))
            return
        replica = self.replicas.get(request.replica_id or "")
        if replica is not None:
            replica.scheduler.abort(request)
            replica.wake()

    def _end_failed(self) -> None:
        """Ends what is left of requests of which a sequence failed. Not at once: a replica was in the middle of its step then."""
        while self._failed:
            for request in list(self._failed.pop().members):
                self._abort(request)

    def find(self, request_id: str) -> Request | None:
        """The request with that id, if it waits or runs; the first of its sequences if it has several."""
        return next(iter(self._requests_of(request_id)), None)

    def dispatch(self) -> None:
        """Gives waiting requests to replicas, in order, as long as there is room for the next one.

        Call it whenever there may be: it costs next to nothing if there is not.
        """
        self._end_failed()
        while self.waiting and (request := self.waiting.peek(self._clock())) is not None:
            if self._blocked is request:
                return
            if not self._settle(request):
                self._blocked = request
                return

    def requeue(self, request: Request) -> None:
        """The request waits again, in the place that its arrival gives it; see ``Owner``."""
        self._queue(request)

    def without_grammar(self, request: Request) -> None:
        """See ``Owner``."""
        self.grammars.lost(request)
        self._queue(request)

    def charge(self, tenant: str, tokens: int) -> None:
        """See ``Owner``."""
        self.waiting.charge(tenant, tokens)

    def released(self) -> None:
        """See ``Owner``."""
        self._blocked = None

    def _queue(self, request: Request) -> None:
        """A live request waits: first for its grammar, if it has one that nobody has compiled, then for its turn."""
        if not self.grammars.hold(request):
            request.state = RequestState.WAITING
            self.waiting.add(request)

    def _settle(self, request: Request) -> bool:
        """Finds a place for the request, at the cost of what is less urgent if need be."""
        # One request until it has a place: who gave way may be the queue's head by its age, and would get its place back for ever.
        while not self._place(request):
            if not self._make_way(request) and not self._drop_idle_pins(request):
                return False
        return True

    def _place(self, request: Request) -> bool:
        """Takes the request, which is the queue's head, to the best replica that has room for it."""
        free = [
            (name, replica)
            for name, replica in self.replicas.items()
            if replica.scheduler.has_free_slot
            and replica.scheduler.kv.fits(request.end)
            and self.grammars.may_run(request, name)
        ]
        if len(free) > 1:
            # The sequences of one request stay together as long as there are slots: what they share lies in one memory.
            free.sort(
                key=lambda one: (
                    not one[1].scheduler.shares_prompt(request),
                    self._placement.cost(request, one[1].scheduler),
                )
            )
        for name, replica in free:
            request.replica_id = name
            if replica.scheduler.admit(request) is Admitted.NO_ROOM:
                continue
            self.waiting.remove(request)
            replica.wake()
            return True
        return False

    def _make_way(self, request: Request) -> bool:
        """Lets the least urgent running request give way, if the waiting one is more urgent."""
        candidates = [
            (least, replica)
            for name, replica in self.replicas.items()
            if (least := replica.scheduler.least_urgent) is not None
            and least > request.priority
            and self.grammars.may_run(request, name)
        ]
        candidates.sort(key=lambda one: one[0], reverse=True)
        for _, replica in candidates:
            if replica.scheduler.make_way(request):
                replica.wake()
                return True
        return False

    def _drop_idle_pins(self, request: Request) -> bool:
        """Gives up the pins of a replica where nothing runs and the request would fit: nothing else would ever make room there."""
        return any(
            replica.scheduler.idle
            and replica.scheduler.kv.fits(request.end)
            and self.grammars.may_run(request, name)
            and self.drop_pins(replica.scheduler)
            for name, replica in list(self.replicas.items())
        )

    # ---- replicas ------------------------------------------------------------------------------------------------------------------

    def attach(self, replica_id: str, replica: AttachedReplica) -> None:
        """Adds a ready replica; it may get requests at once."""
        self.replicas[replica_id] = replica
        for listener in self.attach_listeners:
            listener(replica_id)
        self._blocked = None
        self._measure_memory()
        self.grammars.attach(replica_id, replica.ask)
        self.dispatch()
        replica.wake()

    def detach(self, replica_id: str) -> int:
        """Removes a replica that is lost or going; its requests wait again with the tokens they have.

        Returns:
            How many requests were put back.
        """
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return 0
        self._blocked = None
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.replica_id == replica_id]:
            self._pins.pop(pin_id).on_end()
        for grammar in self.grammars.detach(replica_id):
            for request in [one for one in self.waiting if one.sampling.grammar == grammar]:
                self.waiting.remove(request)
                self._queue(request)
        requests = replica.scheduler.abandon()
        for request in requests:
            self.requeue(request)
        replica.scheduler.kv.events.close()
        self._measure_memory()
        self.dispatch()
        return len(requests)

    # ---- grammars ------------------------------------------------------------------------------------------------------------------

    def grammar_compiled(self, replica_id: str, grammar: Grammar) -> None:
        """A replica has a grammar: who waited for it may run there."""
        for request in self.grammars.compiled(replica_id, grammar):
            self._queue(request)
        self._blocked = None
        self.dispatch()

    def grammar_refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> None:
        """A replica will not have a grammar: the end of who waited for it, unless another one may."""
        for request in self.grammars.refused(replica_id, grammar, error):
            self._end(request, Event(request.request_id, error=error))

    # ---- pinned prefixes -----------------------------------------------------------------------------------------------------------

    def find_prefix(self, probe: Request) -> tuple[str, int] | None:
        """The replica that has most of a prompt in its cache, and how many tokens; None without replicas."""
        found = {name: replica.scheduler.kv.peek(probe) for name, replica in self.replicas.items()}
        name = max(found, key=lambda name: found[name], default=None)
        return None if name is None else (name, found[name])

    def check(self, submission: Submission) -> None:
        """Refuses what :meth:`submit` would refuse for what it is.

        Raises:
            InvalidArgument, ContextExceeded, Unsupported: as there.
            Unavailable: no replica has been ready yet.
        """
        if self.model is None:
            raise Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
        self._check(submission, self.model)

    def pinnable_tokens(self, probe: Request) -> int:
        """Tokens of a prompt's whole chunks: the most that any replica could have."""
        return max((replica.scheduler.kv.hit_limit(probe) for replica in self.replicas.values()), default=0)

    def pin(
        self, pin_id: str, replica_id: str, probe: Request, on_end: Callable[[], None] = lambda: None
    ) -> int:
        """Keeps what a replica has of a prompt's prefix from being evicted until :meth:`unpin`; then, or if it has to end before, calls ``on_end``.

        Returns:
            Tokens that are kept.

        Raises:
            Overloaded: if pins would hold more than their share of memory, or are too many.
            Unavailable: if the replica is gone.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            raise Unavailable("the replica that computed the prefix is gone; retry", retry_after_ms=1000)
        held = [pin.prefix for pin in self._pins.values() if pin.replica_id == replica_id]
        if len(held) >= MAX_PINS:
            raise Overloaded(
                f"{MAX_PINS} prefixes are pinned on that replica; unpin some", retry_after_ms=10_000
            )
        prefix = replica.scheduler.kv.pin(probe, held, self._max_pinned_share)
        if prefix is None:
            raise Overloaded(
                f"pinned prefixes may hold {self._max_pinned_share:.0%} of the KV memory and this one does not fit; "
                "unpin others or raise max_pinned_share",
                retry_after_ms=10_000,
            )
        self._pins[pin_id] = _Pin(replica_id, prefix, on_end)
        return prefix.num_tokens

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none of that id (any more)."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self.replicas[pin.replica_id].scheduler.kv.unpin(pin.prefix)
        pin.on_end()
        self.dispatch()
        return True

    def drop_pins(self, scheduler: ReplicaScheduler) -> bool:
        """See ``Owner``: a running request comes before what is kept for later ones."""
        mine = [
            pin_id
            for pin_id, pin in self._pins.items()
            if self.replicas[pin.replica_id].scheduler is scheduler
        ]
        for pin_id in mine:
            pin = self._pins.pop(pin_id)
            scheduler.kv.unpin(pin.prefix)
            pin.on_end()
        return bool(mine)

    def num_pins(self, replica_id: str) -> int:
        """Pinned prefixes that a replica keeps."""
        return sum(pin.replica_id == replica_id for pin in self._pins.values())

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix and pin; returns on how many replicas."""
        for pin_id in list(self._pins):
            self.unpin(pin_id)
        for replica in self.replicas.values():
            replica.scheduler.kv.reset_prefixes()
        return len(self.replicas)

    # ---- parts ---------------------------------------------------------------------------------------------------------------------

    def _measure_memory(self) -> None:
        """After replicas changed: what fits the largest one, and the end of waiting requests that fit none any more."""
        if not self.replicas:
            return
        self._num_slots = sum(replica.scheduler.geometry.max_num_seqs for replica in self.replicas.values())
        self._max_request_tokens = max(
            replica.scheduler.kv.max_tokens(self.model.max_model_len) if self.model else 0
            for replica in self.replicas.values()
        )
        for request in [*self.waiting, *self.grammars]:
            needed = request.num_prompt_tokens + request.sampling.max_tokens
            if needed <= self._max_request_tokens:
                continue
            _ = self.waiting.remove(request) or self.grammars.remove(request)
            error = ContextExceeded(
                f"the request needs {needed} tokens of KV memory and the workers that are left hold {self._max_request_tokens}"
            )
            self._end(request, Event(request.request_id, error=error))

    def fail_waiting(self, error: TriptychError) -> int:
        """Ends every waiting request with ``error``; returns how many."""
        requests = [*self.waiting.drain(), *self.grammars.drain()]
        for request in requests:
            self._end(request, Event(request.request_id, error=error))
        return len(requests)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is live; False if some still are after ``timeout_s`` seconds."""
        if not self._live:
            return True
        self._empty = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return not self._live

    def forget(self, request: Request) -> None:
        """Called by replicas when a request has ended."""
        self.grammars.leave(request)
        self._live.pop(request.request_id, None)
        family = request.family
        if family is not None:
            family.members.remove(request)
            if (family.failed or not family.members) and self._families.get(family.request_id) is family:
                del self._families[family.request_id]
                self._failed.append(family)
        if not self._live and self._empty is not None:
            self._empty.set()

    def _end(self, request: Request, event: Event) -> None:
        request.state = RequestState.FINISHED
        request.sink.push(event)
        self.forget(request)

    def _check(self, submission: Submission, model: ServedModel) -> int:
        """Checks a submission against the model; returns the effective max_tokens."""
        num_prompt, sequences = len(submission.prompt_token_ids), submission.sequences
        if unserved := sorted(submission.sampling_fields - model.sampling_fields):
            raise Unsupported(
                f"{unserved[0]} is not supported by the running workers; leave it out", param=unserved[0]
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(submission.sampling, name) or 0) > model.max_logprobs:
                raise InvalidArgument(f"{name} must be at most {model.max_logprobs}", param=name)
        self._check_token("prompt_token_ids", submission.prompt_token_ids, model)
        for received in sequences.values():
            self._check_token("resumed", received, model)
        sampling = submission.sampling
        self._check_token("stop_token_ids", sampling.stop_token_ids, model)
        self._check_token("logit_bias", [token for token, _ in sampling.logit_bias], model)
        self._check_token("allowed_token_ids", sampling.allowed_token_ids, model)
        self._check_token("bad_words", itertools.chain.from_iterable(sampling.bad_words), model)
        if num_prompt >= model.max_model_len:
            raise ContextExceeded(
                f"the prompt has {num_prompt} tokens and the context holds {model.max_model_len}, of which at least one is "
                f"generated; shorten the prompt to at most {model.max_model_len - 1} tokens",
                param="prompt",
            )
        room = model.max_model_len - num_prompt
        asked = submission.max_tokens
        if asked is not None and asked > room:
            raise ContextExceeded(
                f"{num_prompt} prompt tokens and max_tokens={asked} exceed the context of {model.max_model_len} tokens; "
                f"ask for at most {room}",
                param="max_tokens",
            )
        max_tokens = room if asked is None else asked
        if sampling.min_tokens > max_tokens:
            raise InvalidArgument(
                f"min_tokens={sampling.min_tokens} is more than the {max_tokens} tokens that can be generated",
                param="min_tokens",
            )
        if max(map(len, sequences.values())) >= max_tokens:
            raise InvalidArgument(f"all of max_tokens={max_tokens} were received already", param="resumed")
        if num_prompt + max_tokens > self._max_request_tokens:
            if asked is not None or num_prompt >= self._max_request_tokens:
                raise ContextExceeded(
                    f"{num_prompt} prompt tokens and max_tokens={max_tokens} never fit this deployment's KV memory of "
                    f"{self._max_request_tokens} tokens a request",
                    param="max_tokens",
                )
            max_tokens = self._max_request_tokens - num_prompt
        return max_tokens

    @staticmethod
    def _check_token(param: str, token_ids: Iterable[int], model: ServedModel) -> None:
        largest = max(token_ids, default=0)
        if largest >= model.vocab_size:
            raise InvalidArgument(
                f"token id {largest} is not in the vocabulary of {model.vocab_size} tokens", param=param
            )


def _stop_ids(sampling: SamplingParams, model: ServedModel) -> frozenset[int]:
    """Tokens that end a sequence. Where a grammar is through nothing else can follow, so it overrules ``ignore_eos``."""
    if sampling.ignore_eos and sampling.grammar is None:
        return sampling.stop_token_ids
    return sampling.stop_token_ids | model.eos_token_ids
