"""Pinning of prompt prefixes: computes a prefix if no replica has it, and pins it until its time is over."""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from protos.errors import Aborted, InvalidArgument, TriptychError
from protos.triptych.v1 import common_pb2
from scheduler_svc.adapters.adapter import Adapter
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Event, Request
from scheduler_svc.requests.sampling import FinishReason, Sampling, StopRule
from scheduler_svc.workers.engine_protocol import EngineProtocol, Prefixes

_GREEDY = Sampling(common_pb2.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
_ONE_TOKEN = StopRule.of(_GREEDY, frozenset(), max_tokens=1)


@dataclass(frozen=True, slots=True)
class Pinned:
    """Result of a pin request."""

    pin_id: str
    num_tokens: int
    """Leading tokens that are pinned; a whole number of chunks."""
    replica_id: str


class HasEngine(Protocol):
    """A deployment, or anything else with an engine."""

    @property
    def engine(self) -> EngineProtocol:
        """The engine; another one may take its place when the first worker attaches."""


class _Discard:
    def push(self, event: Event) -> None:
        """Drops the event."""

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Drops the tokens."""


class _PinAtEnd:
    """Sink of a request that computes a prefix; pins the prefix when the request ends."""

    def __init__(self, pins: "PinService", pin_id: str, probe: Request) -> None:
        self._pins, self._pin_id, self._probe = pins, pin_id, probe
        self.done: asyncio.Future[Pinned] = asyncio.get_running_loop().create_future()

    def push(self, event: Event) -> None:
        """Pins at the last event and ignores all others."""
        if event.error is None and event.finish_reason is None:
            return
        try:
            if event.error is not None:
                raise event.error
            if event.finish_reason is FinishReason.ABORT:
                raise Aborted("the request that computed the prefix was aborted")
            request = self._pins.find(event.request_id)
            replica_id = (request.replica_id if request else None) or ""
            pinned = self._pins.hold(self._pin_id, replica_id, self._probe)
        except TriptychError as error:
            if not self.done.done():
                self.done.set_exception(error)
            return
        if self.done.done():
            # The caller is gone. Unpin later: a sink must not call back into the scheduler that feeds it.
            asyncio.get_running_loop().call_soon(self._pins.unpin, self._pin_id)
        else:
            self.done.set_result(pinned)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Drops the tokens."""


class PinService:
    """Pins prefixes and ends the pins when their time is over."""

    def __init__(self, deployment: HasEngine) -> None:
        """Pins on the replicas of `deployment`."""
        self._deployment = deployment
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._probes = itertools.count()

    async def pin(
        self, prompt: tuple[int, ...], *, cache_salt: str, lora_name: str = "", ttl_s: float
    ) -> Pinned:
        """Pins the whole chunks of `prompt` for `ttl_s` seconds on the replica that has cached most of them.

        Raises:
            Overloaded: the pins of the replica would be too many or hold more than their share of memory.
            NotFound: there is no adapter of that name.
            TriptychError: computing the prefix failed.
        """
        adapter = self._deployment.engine.adapters.resolve(lora_name)
        pin_id = secrets.token_hex(8)
        # Check before hashing the prompt.
        self._prefixes.check(
            Submission(
                request_id=pin_id,
                prompt_token_ids=prompt,
                sampling=_GREEDY,
                cache_salt=cache_salt,
            )
        )
        probe = self._probe(pin_id, prompt, cache_salt, adapter)
        if pinnable := self._prefixes.pinnable_tokens(probe):
            # Compute only what will be pinned, and end there: the cache keeps windows at the ends of prompts
            # longest.
            probe = self._probe(pin_id, prompt[:pinnable], cache_salt, adapter)
        best = self._prefixes.find(probe)
        if best is not None and best[1] >= pinnable:
            pinned = self.hold(pin_id, best[0], probe)
        else:
            sink = _PinAtEnd(self, pin_id, probe)
            submission = Submission(
                request_id=probe.request_id,
                prompt_token_ids=tuple(probe.token_ids),
                sampling=_GREEDY,
                cache_salt=cache_salt,
                lora_name=lora_name,
            )
            self._deployment.engine.submit(submission, sink)
            try:
                pinned = await sink.done
            except asyncio.CancelledError:
                self._deployment.engine.abort(probe.request_id)
                self.unpin(pin_id)  # the request may have ended and pinned just before
                raise
        self._timers[pin_id] = asyncio.get_running_loop().call_later(ttl_s, self.unpin, pin_id)
        return pinned

    def _probe(
        self, pin_id: str, prefix: tuple[int, ...], cache_salt: str, adapter: Adapter | None
    ) -> Request:
        # One token more than the prefix: a hit always leaves at least the last token to compute.
        token_ids = [*prefix, prefix[0]]
        return Request(
            request_id=f"pin-{pin_id}", token_ids=token_ids, num_prompt_tokens=len(token_ids), sampling=_GREEDY,
            arrival=-1 - next(self._probes), arrival_s=0.0, sink=_Discard(), stop=_ONE_TOKEN, cache_salt=cache_salt,
            adapter=adapter,
        )  # fmt: skip

    @property
    def _prefixes(self) -> Prefixes:
        return self._deployment.engine.prefixes

    def find(self, request_id: str) -> Request | None:
        """Returns the live request with that id."""
        return self._deployment.engine.find(request_id)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; returns False if the id is unknown or the pin has ended."""
        return self._prefixes.unpin(pin_id)

    def _ended(self, pin_id: str) -> None:
        timer = self._timers.pop(pin_id, None)
        if timer is not None:
            timer.cancel()

    def hold(self, pin_id: str, replica_id: str, probe: Request) -> Pinned:
        """Pins what a replica has cached of the probe's prefix.

        Raises:
            InvalidArgument: the replica has cached nothing of it.
            Unavailable: the replica is gone.
            Overloaded: the pins of the replica would be too many or hold more than their share of memory.
        """
        num_tokens = self._prefixes.pin(pin_id, replica_id, probe, partial(self._ended, pin_id))
        if not num_tokens:
            self.unpin(pin_id)
            raise InvalidArgument(
                "the prefix cannot be pinned: it is shorter than one prefill chunk, or prefix caching is off",
                param="prompt_token_ids",
            )
        return Pinned(pin_id, num_tokens, replica_id)
