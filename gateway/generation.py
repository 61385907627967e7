"""One HTTP request's answer while it grows: events become text, usage and measurements."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

from gateway.client import InferenceClient
from gateway.detokenizer import Detokenizer
from gateway.metrics import Metrics
from gateway.schemas.sampling import SamplingRequest
from gateway.served_model import Served
from gateway.stop_strings import StopStrings
from gateway.submission import Submission
from protos.errors import TriptychError
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Delta(NamedTuple):
    """What is new about one sequence."""

    sequence: int
    text: str
    # "stop" or "length" in the last one.
    finish_reason: str | None = None
    # The stop string or the stop token that ended it; None for the model's own end tokens.
    stop_reason: str | int | None = None


@dataclass(slots=True)
class SequenceText:
    """One sequence's tokens on their way to text."""

    index: int
    num_prompt_tokens: int
    detokenizer: Detokenizer
    stops: StopStrings | None
    # Stop strings are looked for in the text behind this many tokens.
    min_tokens: int
    include_stop: bool
    stop_token_ids: frozenset[int]
    num_cached_tokens: int = 0
    num_tokens: int = 0
    last_at: float = 0.0
    finished: bool = False

    def push(self, event: inference.GenerateEvent) -> Delta:
        """Takes an event; the delta may be empty. If a stop string was found, it is finished and takes no more events."""
        reason = _REASONS.get(event.finish_reason)
        token_ids = event.token_ids
        # The token that ended the sequence has text of its own only if the client wants to see it.
        hidden = bool(reason and token_ids and event.HasField("stop_token_id") and not self.include_stop)
        if self.stops is None:
            self.num_tokens += len(token_ids)
            text = self.detokenizer.push(token_ids[:-1] if hidden else token_ids)
            if reason is None:
                return Delta(self.index, text)
            self.finished = True
            return Delta(self.index, text + self.detokenizer.finish(), reason, self._stop_token(event))
        return self._push_watching(event, reason, len(token_ids) - hidden, self.stops)

    def _push_watching(
        self, event: inference.GenerateEvent, reason: str | None, visible: int, stops: StopStrings
    ) -> Delta:
        """Goes token by token, so that a stop string ends the count at the token that completed it."""
        text = ""
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            piece = self.detokenizer.push((token_id,)) if position < visible else ""
            if self.num_tokens <= self.min_tokens:
                text += piece
                continue
            text += stops.feed(piece)
            if stops.matched is not None:
                self.finished = True
                return Delta(self.index, text, "stop", stops.matched)
        if reason is None:
            return Delta(self.index, text)
        self.finished = True
        text += stops.feed(self.detokenizer.finish())
        if stops.matched is not None:
            return Delta(self.index, text, "stop", stops.matched)
        return Delta(self.index, text + stops.flush(), reason, self._stop_token(event))

    def _stop_token(self, event: inference.GenerateEvent) -> int | None:
        return event.stop_token_id if event.stop_token_id in self.stop_token_ids else None


@dataclass(slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Generation:
    """The running answer to one HTTP request: a sequence per prompt.

    A context manager: leaving it aborts whatever still runs.
    """

    submission: Submission
    sequences: list[SequenceText]
    metrics: Metrics
    clock: Callable[[], float]
    arrived: float
    constraint_param: str = ""

    @classmethod
    def begin(
        cls,
        client: InferenceClient,
        served: Served,
        body: SamplingRequest,
        requests: Sequence[inference.GenerateRequest],
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        arrived: float,
    ) -> "Generation":
        """Submits ``requests``.

        Args:
            client: the line to the scheduler.
            served: the model.
            body: the HTTP request.
            requests: one per prompt.
            metrics: what is measured.
            clock: monotonic seconds.
            arrived: when the HTTP request came, by that clock.

        Raises:
            Unavailable: if there is no scheduler.
        """
        sequences = [
            SequenceText(
                index=index,
                num_prompt_tokens=len(request.prompt_token_ids),
                detokenizer=served.text.detokenizers.make(
                    skip_special_tokens=body.skip_special_tokens, prompt=request.prompt_token_ids[-8:]
                ),
                stops=StopStrings(body.stop, include_in_output=body.include_stop_str_in_output)
                if body.stop
                else None,
                min_tokens=body.min_tokens,
                include_stop=body.include_stop_str_in_output,
                stop_token_ids=frozenset(body.stop_token_ids),
            )
            for index, request in enumerate(requests)
        ]
        submission = client.submit(requests)
        return cls(submission, sequences, metrics, clock, arrived, body.constraint_param)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.submission.abort()

    async def deltas(self) -> list[Delta]:
        """Waits for news of any sequence; empty once all have finished.

        Raises:
            TriptychError: if the request failed.
        """
        try:
            while events := await self.submission.take():
                if news := list(self._news(events)):
                    return news
        except TriptychError as error:
            if error.param == "structured_output":
                error.param = self.constraint_param  # as the client called it
            raise
        return []

    def _news(self, events: Sequence[tuple[int, inference.GenerateEvent]]) -> Iterator[Delta]:
        now = self.clock()
        for index, event in events:
            sequence = self.sequences[index]
            if sequence.finished:
                continue
            if event.HasField("prompt"):
                sequence.num_cached_tokens = event.prompt.num_cached_tokens
            before = sequence.num_tokens
            delta = sequence.push(event)
            if sequence.num_tokens > before:
                self._measure(sequence, now, sequence.num_tokens - before)
            if delta.finish_reason is not None:
                if not event.finish_reason:
                    self.submission.finish(index)
                self.metrics.finished(delta.finish_reason, sequence.num_prompt_tokens, now - self.arrived)
            yield delta

    def _measure(self, sequence: SequenceText, now: float, count: int) -> None:
        if sequence.last_at:
            self.metrics.tokens(count, (now - sequence.last_at) / count)
        else:
            self.metrics.first_token(count, now - self.arrived)
        sequence.last_at = now

    def fail(self, error: TriptychError) -> None:
        """Ends it from outside; the reader of :meth:`deltas` gets ``error``."""
        self.submission.fail(error)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            sum(sequence.num_prompt_tokens for sequence in self.sequences),
            sum(sequence.num_tokens for sequence in self.sequences),
            sum(sequence.num_cached_tokens for sequence in self.sequences),
        )
