"""Prefixes that are kept for a time: computed if nobody has them, then referenced until they expire."""

import asyncio
import itertools
import secrets
from dataclasses import dataclass
from functools import partial

from protos.errors import Aborted, InvalidArgument, TriptychError
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Event, FinishReason, Request
from scheduler_svc.requests.sampling import SamplingParams

# Longer than anybody means; asyncio's timers need a finite bound.
MAX_TTL_S = 30 * 24 * 3600.0

_GREEDY = SamplingParams(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=1,
    stop_token_ids=frozenset(), ignore_eos=True, logprobs=None,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pinned:
    """What became of a wish to pin.

    Attributes:
        num_tokens: leading tokens that are kept: whole chunks.
    """

    pin_id: str
    num_tokens: int
    replica_id: str


class _Discard:
    def push(self, event: Event) -> None:
        """Nobody listens."""

    def push_token(self, request_id: str, token_id: int) -> None:
        """Nobody listens."""


class _PinAtEnd:
    """Pins when its request ends, before anything can be evicted."""

    def __init__(self, pins: "Pins", pin_id: str, probe: Request) -> None:
        self._pins, self._pin_id, self._probe = pins, pin_id, probe
        self.done: asyncio.Future[Pinned] = asyncio.get_running_loop().create_future()

    def push(self, event: Event) -> None:
        if event.error is None and event.finish_reason is None:
            return
        try:
            if event.error is not None:
                raise event.error
            if event.finish_reason is FinishReason.ABORT:
                raise Aborted("the request that was to compute the prefix was aborted")
            request = self._pins.engine.find(event.request_id)
            replica_id = (request.replica_id if request else None) or ""
            pinned = self._pins.hold(self._pin_id, replica_id, self._probe)
        except TriptychError as error:
            if not self.done.done():
                self.done.set_exception(error)
            return
        if self.done.done():
            # Who asked has gone. Later: a sink does not call back into the scheduler that feeds it.
            asyncio.get_running_loop().call_soon(self._pins.unpin, self._pin_id)
        else:
            self.done.set_result(pinned)

    def push_token(self, request_id: str, token_id: int) -> None:
        """Nobody wants the token."""


class Pins:
    """Pins by id, and the timers that end them."""

    def __init__(self, engine: Engine) -> None:
        """Pins on the replicas of ``engine``."""
        self.engine = engine
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._probes = itertools.count()

    async def pin(self, prompt: tuple[int, ...], *, cache_salt: str, ttl_s: float) -> Pinned:
        """Keeps the whole chunks of ``prompt`` for ``ttl_s`` seconds on the replica that has most of them.

        Raises:
            InvalidArgument: if the time or the prompt makes no sense.
            Overloaded: if pins would hold more than their share of memory.
            TriptychError: whatever computing the prefix may raise.
        """
        if not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidArgument(
                f"ttl_s must be above 0 and at most {MAX_TTL_S:g}, not {ttl_s:g}", param="ttl_s"
            )
        if not prompt:
            raise InvalidArgument(
                "the prefix is empty; send at least one chunk of tokens", param="prompt_token_ids"
            )
        pin_id = secrets.token_hex(8)
        # Before anything is hashed.
        self.engine.check(
            Submission(
                request_id=pin_id,
                prompt_token_ids=prompt,
                sampling=_GREEDY,
                max_tokens=None,
                cache_salt=cache_salt,
            )
        )
        probe = self._probe(pin_id, prompt, cache_salt)
        if kept := self._pinnable_tokens(probe):
            # Only what is kept is computed, and it ends where the probe ends: windows at the ends of prompts are worth most.
            probe = self._probe(pin_id, prompt[:kept], cache_salt)
        best = self._find_prefix(probe)
        if best is not None and best[1] >= kept:
            pinned = self.hold(pin_id, best[0], probe)
        else:
            sink = _PinAtEnd(self, pin_id, probe)
            submission = Submission(
                request_id=probe.request_id,
                prompt_token_ids=tuple(probe.token_ids),
                sampling=_GREEDY,
                max_tokens=1,
                cache_salt=cache_salt,
            )
            self.engine.submit(submission, sink)
            try:
                pinned = await sink.done
            except asyncio.CancelledError:
                self.engine.abort(probe.request_id)
                self.unpin(pin_id)  # it may have ended a moment before
                raise
        self._timers[pin_id] = asyncio.get_running_loop().call_later(ttl_s, self.unpin, pin_id)
        return pinned

    def _probe(self, pin_id: str, prefix: tuple[int, ...], cache_salt: str) -> Request:
        # One token more than is to be kept: a hit always leaves at least the last one to compute.
        token_ids = [*prefix, prefix[0]]
        return Request(
            request_id=f"pin-{pin_id}", token_ids=token_ids, num_prompt_tokens=len(token_ids), sampling=_GREEDY,
            arrival=-1 - next(self._probes), arrival_s=0.0, sink=_Discard(), end=len(token_ids) + 1, cache_salt=cache_salt,
        )  # fmt: skip

    def _find_prefix(self, probe: Request) -> tuple[str, int] | None:
        """The replica that has most of a prompt in its cache, and how many tokens; None without replicas."""
        replicas = self.engine.replicas
        found = {name: replica.scheduler.kv.prefixes.peek(probe.kv) for name, replica in replicas.items()}
        name = max(found, key=lambda name: found[name], default=None)
        return None if name is None else (name, found[name])

    def _pinnable_tokens(self, probe: Request) -> int:
        """Tokens of a prompt's whole chunks: the most that any replica could have."""
        replicas = self.engine.replicas.values()
        return max((replica.scheduler.kv.prefixes.hit_limit(probe.kv) for replica in replicas), default=0)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none of that id (any more)."""
        return self.engine.unpin(pin_id)

    def _ended(self, pin_id: str) -> None:
        timer = self._timers.pop(pin_id, None)
        if timer is not None:
            timer.cancel()

    def hold(self, pin_id: str, replica_id: str, probe: Request) -> Pinned:
        """References what a replica has of the probe's prefix.

        Raises:
            InvalidArgument: if that is nothing.
            TriptychError: see ``Engine.pin``.
        """
        num_tokens = self.engine.pin(pin_id, replica_id, probe, partial(self._ended, pin_id))
        if not num_tokens:
            self.engine.unpin(pin_id)
            raise InvalidArgument(
                "nothing of the prefix can be kept: it is shorter than one prefill chunk, or prefix caching is off",
                param="prompt_token_ids",
            )
        return Pinned(pin_id, num_tokens, replica_id)
