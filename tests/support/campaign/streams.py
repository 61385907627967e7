"""Clients of a campaign: one question each, over HTTP or gRPC, until its answer is complete.

A client does what a user's client does: when its connection breaks, it asks again. Over gRPC it says what it
has received. Over HTTP it asks for the whole answer, which must begin with the tokens that it has.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
import grpc.aio
import httpx

from protos.errors import Unavailable, from_rpc_error
from protos.triptych.v1 import inference_pb2
from tests.support.campaign.questions import Question

if TYPE_CHECKING:
    # Exists for type checkers only.
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

Token: TypeAlias = int | str
"""A token id, or the character that stands for a token."""

_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, eq=False)
class Scored:
    """A token with its log-probabilities, which a resumed request may round otherwise."""

    token: Token
    logprobs: tuple[float, ...]
    """The token's own, and those of the likeliest tokens, best first."""

    def __eq__(self, other: object) -> bool:
        """Whether the tokens are equal and the log-probabilities close."""
        if not isinstance(other, Scored):
            return NotImplemented
        return (
            self.token == other.token
            and len(self.logprobs) == len(other.logprobs)
            and all(
                isclose(*pair, abs_tol=_TOLERANCE) for pair in zip(self.logprobs, other.logprobs, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment] # close values are equal


Unit: TypeAlias = Token | Scored
"""A token of an answer."""
Answer: TypeAlias = tuple[tuple[tuple[Unit, ...], str], ...]
"""The tokens and the finish reason of each sequence."""

STUCK_S: Final = 300.0
"""A client that receives nothing for so long fails."""
_RETRY_S: Final = 0.2
_REASONS: Final = {1: "stop", 2: "length", 3: "abort"}


class StreamError(Exception):
    """A client did not get its answer; the message says what it got."""


class Stream:
    """What one client has received so far."""

    def __init__(self, question: Question, number: int, on_tokens: Callable[[int], None]) -> None:
        """Starts without a token."""
        self.question = question
        self.number = number
        self._on_tokens = on_tokens
        self.received: list[list[Unit]] = [[] for _ in range(question.n)]
        self.reasons: list[str] = [""] * question.n
        self.losses = [0] * question.n
        self.seed: int | None = None
        self.tokens = 0
        self.attempts = 0
        self.pauses: list[Pause] = []
        """Measurements that wait for this stream's next tokens."""
        self.reads = asyncio.Event()
        """The client reads while this is set."""
        self.reads.set()
        self._place = [0] * question.n
        self._timeout: asyncio.Timeout | None = None
        self.began = self._latest = time.monotonic()

    @property
    def answer(self) -> Answer:
        """What has arrived."""
        return tuple(
            (tuple(units), reason) for units, reason in zip(self.received, self.reasons, strict=True)
        )

    @property
    def complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(self.reasons)

    async def run(self, ask: Callable[["Stream"], Any]) -> None:
        """Lets `ask` receive the answer.

        Raises:
            StreamError: an error, or nothing for `STUCK_S`.
        """
        try:
            async with asyncio.timeout(STUCK_S) as self._timeout:
                await ask(self)
        except TimeoutError:
            raise StreamError(f"nothing arrived for {STUCK_S:g} s") from None
        finally:
            for pause in self.pauses:
                pause.ended(self)

    def begin_again(self) -> None:
        """The next answer comes from the start."""
        self._place = [0] * self.question.n

    def add(self, sequence: int, units: Sequence[Unit]) -> None:
        """Takes the next tokens of a sequence.

        Raises:
            StreamError: another attempt had other tokens.
        """
        mine = self.received[sequence]
        known = min(len(units), len(mine) - self._place[sequence])
        place = self._place[sequence]
        if mine[place : place + known] != list(units[:known]):
            raise StreamError(f"sequence {sequence} differs from an earlier attempt after {place} tokens")
        mine.extend(units[known:])
        self._place[sequence] += len(units)
        if new := len(units) - known:
            self.tokens += new
            now = time.monotonic()
            for pause in tuple(self.pauses):
                pause.note(self, new, now)
            assert self._timeout is not None
            self._timeout.reschedule(asyncio.get_running_loop().time() + STUCK_S)
            self._on_tokens(new)

    def end(self, sequence: int, reason: str) -> None:
        """Takes the end of a sequence."""
        if self.reasons[sequence] not in {"", reason}:
            raise StreamError(f"sequence {sequence} ended as {self.reasons[sequence]}, then as {reason}")
        self.reasons[sequence] = reason


class Pause:
    """The longest time that a stream waits for tokens because of a fault.

    Tokens that were under way when the fault happened do not end a pause: a stream has recovered when it has
    `ENOUGH` more tokens after the fault has passed, or has ended.
    """

    ENOUGH: Final = 24

    def __init__(self) -> None:
        """Begins before the fault, without streams."""
        self._last: dict[Stream, float] = {}
        self._left: dict[Stream, int] | None = None
        self.longest_s = 0.0
        self._over = asyncio.Event()

    def watch(self, stream: Stream) -> None:
        """Measures a stream from now on, unless the fault has passed already."""
        if self._left is None:
            self._last[stream] = time.monotonic()
            stream.pauses.append(self)

    async def recovered(self) -> None:
        """Waits until all streams have recovered; call it when the fault has passed."""
        self._left = dict.fromkeys(self._last, self.ENOUGH)
        self._set_if_over()
        await self._over.wait()

    def note(self, stream: Stream, count: int, now: float) -> None:
        """Takes new tokens of a stream."""
        self.longest_s = max(self.longest_s, now - self._last[stream])
        self._last[stream] = now
        if self._left is not None:
            self._left[stream] -= count
            if self._left[stream] <= 0:
                stream.pauses.remove(self)
                del self._left[stream]
                self._set_if_over()

    def ended(self, stream: Stream) -> None:
        """Takes the end of a stream."""
        self.longest_s = max(self.longest_s, time.monotonic() - self._last.pop(stream))
        if self._left is not None:
            self._left.pop(stream, None)
            self._set_if_over()

    def _set_if_over(self) -> None:
        if not self._left:
            self._over.set()


async def ask_grpc(stub: "InferenceAsyncStub", stream: Stream) -> None:
    """Asks over `Inference.Generate`; after a lost connection, for the rest."""
    while not stream.complete:
        try:
            async for event in stub.Generate(_message(stream), wait_for_ready=True):
                if event.HasField("prompt"):
                    stream.seed = event.prompt.seed
                if event.HasField("worker_losses"):
                    stream.losses[event.sequence] = event.worker_losses
                stream.add(event.sequence, _units(event))
                if event.finish_reason:
                    stream.end(event.sequence, _REASONS[event.finish_reason])
                await stream.reads.wait()
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            # A server that stops cancels calls that it has not looked at.
            if not isinstance(failure, Unavailable) and error.code() is not grpc.StatusCode.CANCELLED:
                raise StreamError(f"{type(failure).__name__}: {failure.message}") from error
            await asyncio.sleep(_RETRY_S)


def _units(event: inference_pb2.GenerateEvent) -> Sequence[Unit]:
    if not event.logprobs:
        return event.token_ids
    return [
        Scored(token, (entry.logprob, *entry.top_logprobs))
        for token, entry in zip(event.token_ids, event.logprobs, strict=True)
    ]


def _message(stream: Stream) -> inference_pb2.GenerateRequest:
    stream.attempts += 1
    request = stream.question.message(f"{stream.question.name}.{stream.number}.{stream.attempts}")
    if stream.seed is not None:
        request.sampling.seed = stream.seed
        request.age_ms = int(1000 * (time.monotonic() - stream.began))
    for sequence, (units, reason) in enumerate(stream.answer):
        if units or reason or stream.losses[sequence]:
            request.resumed.add(
                sequence=sequence, finished=bool(reason), worker_losses=stream.losses[sequence],
                token_ids=[] if reason else _token_ids(units),
            )  # fmt: skip
    return request


def _token_ids(units: Sequence[Unit]) -> list[int]:
    tokens = (unit.token if isinstance(unit, Scored) else unit for unit in units)
    return [token for token in tokens if isinstance(token, int)]


async def ask_http(client: httpx.AsyncClient, model: str, stream: Stream) -> None:
    """Asks for a stream from /v1/completions; after a lost connection, from the start."""
    body = stream.question.http_body(model)
    while not stream.complete:
        stream.attempts += 1
        stream.begin_again()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode()
                    raise StreamError(f"HTTP {response.status_code}: {text}")
                await _read(response, stream)
        except httpx.TransportError:
            await asyncio.sleep(_RETRY_S)


def _characters(choice: Mapping[str, Any]) -> Sequence[Unit]:
    text, scores = choice["text"], choice["logprobs"]
    if scores is None:
        return str(text)
    return [
        Scored(token, (own, *sorted(top.values(), reverse=True)))
        for token, own, top in zip(text, scores["token_logprobs"], scores["top_logprobs"], strict=True)
    ]


async def _read(response: httpx.Response, stream: Stream) -> None:
    count = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise StreamError(f"the stream says {chunk['error']}")
        for choice in chunk["choices"]:
            stream.add(choice["index"], _characters(choice))
            if choice["finish_reason"]:
                stream.end(choice["index"], choice["finish_reason"])
        if chunk.get("usage"):
            count = chunk["usage"]["completion_tokens"]
        await stream.reads.wait()
    if not stream.complete:
        raise httpx.RemoteProtocolError("the stream ended early")
    if count != stream.tokens + sum(reason == "stop" for reason in stream.reasons):
        raise StreamError(f"the usage says {count} tokens, and {stream.tokens} arrived")
