"""One HTTP request's answer while it grows: events become text, usage and measurements."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self

from gateway.answers.logprobs import TokenReport
from gateway.metrics import Metrics
from gateway.scheduler_link.pending_request import PendingRequest, RequestGroup
from gateway.scheduler_link.served_model import Served
from gateway.schemas.sampling import SamplingRequest
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenization import TextWorker
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
    # Of its tokens, if log-probabilities were asked for; text that is held back comes later than its tokens do.
    tokens: tuple[TokenReport, ...] = ()


@dataclass(slots=True)
class Prompt:
    """What is known of one prompt, for all sequences that continue it.

    Attributes:
        token_ids: the prompt.
        logprobs: one entry for each token but the first, if they were asked for; it fills while the prompt is computed, and is
            complete when the group gives the first of its events.
        echo: the text that each answer begins with; ``None`` if answers do not repeat the prompt.
        reports: its tokens as part of an answer that begins with it, once they are known and if they are to be told.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[pb.TokenLogprobs] = ()
    echo: str | None = None
    reports: tuple[TokenReport, ...] | None = None

    @classmethod
    def of(cls, pending: PendingRequest, echo: str | None) -> "Prompt":
        """The prompt of a request under way."""
        return cls(pending.request.prompt_token_ids, pending.prompt_logprobs, echo)

    def report(self, detokenizer: Detokenizer, count: int) -> None:
        """Makes ``reports``, each with the ``count`` likeliest tokens. Takes time that grows with the prompt and ``count``."""
        found, offset = [], 0
        for token_id, entry in zip(self.token_ids, (None, *self.logprobs), strict=True):
            if entry is None:
                found.append(TokenReport(token_id, offset, None))
            else:
                found.append(TokenReport.of(token_id, offset, entry, count))
            offset += len(detokenizer.push((token_id,)))
        self.reports = tuple(found)


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
    # How many likeliest tokens are told with each one; None: no log-probabilities at all.
    num_logprobs: int | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    # Of the text so far, held back or not.
    num_chars: int = 0
    last_at: float = 0.0
    finished: bool = False
    # Whether the prompt is still to be repeated before the first text.
    to_echo: bool = False

    @classmethod
    def of(
        cls,
        index: int,
        body: SamplingRequest,
        served: Served,
        prompt: Prompt,
        markers: frozenset[str] | None,
        *,
        first: bool,
    ) -> "SequenceText":
        """One that has no tokens yet.

        Args:
            index: its number in the answer.
            body: the HTTP request.
            served: the model.
            prompt: what it continues.
            markers: special tokens that are text although special tokens are skipped; ``None``: all are.
            first: it is the first one of its prompt, which is computed once, and counted once.
        """
        stops = (
            StopStrings(body.stop, include_in_output=body.include_stop_str_in_output) if body.stop else None
        )
        return cls(
            index=index,
            num_prompt_tokens=len(prompt.token_ids) if first else 0,
            detokenizer=served.text.detokenizers.make(
                skip_special_tokens=body.skip_special_tokens and markers is not None,
                shown=markers or frozenset(),
                spaces_between_special_tokens=body.spaces_between_special_tokens,
                prompt=prompt.token_ids[-8:],
            ),
            stops=stops,
            min_tokens=body.min_tokens,
            include_stop=body.include_stop_str_in_output,
            stop_token_ids=frozenset(body.stop_token_ids),
            num_logprobs=body.num_logprobs,
            num_chars=len(prompt.echo or ""),
            to_echo=prompt.echo is not None,
        )

    def push(self, event: inference.GenerateEvent) -> Delta:
        """Takes an event; the delta may be empty. If a stop string was found, it is finished and takes no more events."""
        reason = _REASONS.get(event.finish_reason)
        token_ids = event.token_ids
        # The token that ended the sequence has text of its own only if the client wants to see it.
        hidden = bool(reason and token_ids and event.HasField("stop_token_id") and not self.include_stop)
        if self.stops is None and self.num_logprobs is None:
            self.num_tokens += len(token_ids)
            text = self.detokenizer.push(token_ids[:-1] if hidden else token_ids)
            if reason is None:
                return Delta(self.index, text)
            self.finished = True
            return Delta(self.index, text + self.detokenizer.finish(), reason, self._stop_token(event))
        return self._push_one_by_one(event, reason, len(token_ids) - hidden)

    def _push_one_by_one(self, event: inference.GenerateEvent, reason: str | None, visible: int) -> Delta:
        """Goes token by token, so that a stop string ends the count at the token that completed it, and each one's place is known."""
        text, stops, tokens = "", self.stops, []
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if self.num_logprobs is not None:
                entry = event.logprobs[position]
                tokens.append(TokenReport.of(token_id, self.num_chars, entry, self.num_logprobs))
            piece = self.detokenizer.push((token_id,)) if position < visible else ""
            self.num_chars += len(piece)
            if stops is None or self.num_tokens <= self.min_tokens:
                text += piece
                continue
            text += stops.feed(piece)
            if stops.matched is not None:
                self.finished = True
                return Delta(self.index, text, "stop", stops.matched, tuple(tokens))
        if reason is None:
            return Delta(self.index, text, tokens=tuple(tokens))
        self.finished = True
        last, stop_reason = self.detokenizer.finish(), self._stop_token(event)
        if stops is not None:
            last = stops.feed(last)
            if stops.matched is not None:
                return Delta(self.index, text + last, "stop", stops.matched, tuple(tokens))
            last += stops.flush()
        return Delta(self.index, text + last, reason, stop_reason, tuple(tokens))

    def _stop_token(self, event: inference.GenerateEvent) -> int | None:
        # An unset field reads as token 0.
        if not event.HasField("stop_token_id") or event.stop_token_id not in self.stop_token_ids:
            return None
        return event.stop_token_id


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


@dataclass(frozen=True, slots=True)
class Timing:
    """What an answer is measured with.

    Attributes:
        metrics: takes the measurements.
        clock: monotonic seconds.
        arrived: when the HTTP request came, by that clock.
    """

    metrics: Metrics
    clock: Callable[[], float]
    arrived: float


@dataclass(slots=True)
class Generation:
    """The running answer to one HTTP request: n sequences per prompt, all of a prompt's before the next one's.

    A context manager: leaving it aborts whatever still runs.
    """

    group: RequestGroup
    sequences: list[SequenceText]
    prompts: list[Prompt]
    n: int
    # Nothing but the prompt is wanted: what is generated is neither shown nor counted.
    prompt_only: bool
    # Makes one that sees a prompt's text.
    make_detokenizer: Callable[[], Detokenizer]
    worker: TextWorker
    timing: Timing
    constraint_param: str = ""

    @classmethod
    def begin(
        cls,
        group: RequestGroup,
        body: SamplingRequest,
        served: Served,
        worker: TextWorker,
        timing: Timing,
        *,
        echoes: Sequence[str] | None = None,
        markers: frozenset[str] | None = frozenset(),
        constraint_param: str = "",
    ) -> "Generation":
        """Waits for the answer to what was submitted.

        Args:
            group: the requests, one per prompt.
            body: the HTTP request that they come from.
            served: the model.
            worker: runs long work.
            timing: measures.
            echoes: for each prompt the text that its answers begin with, if they do.
            markers: special tokens that are text although special tokens are skipped; ``None``: all are.
            constraint_param: the parameter that says what the output must match.
        """
        prompts = [
            Prompt.of(pending, echoes[index] if echoes is not None else None)
            for index, pending in enumerate(group.requests)
        ]
        sequences = [
            SequenceText.of(index * body.n + sequence, body, served, prompt, markers, first=not sequence)
            for index, prompt in enumerate(prompts)
            for sequence in range(body.n)
        ]
        make = partial(served.text.detokenizers.make, skip_special_tokens=body.skip_special_tokens)
        return cls(
            group,
            sequences,
            prompts,
            body.n,
            body.prompt_only,
            make,
            worker,
            timing,
            constraint_param,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.group.abort()

    @property
    def reports_prompts(self) -> bool:
        """Whether the first delta of each sequence tells of all of the prompt's tokens."""
        return self.prompts[0].echo is not None and self.sequences[0].num_logprobs is not None

    async def deltas(self) -> list[Delta]:
        """Waits for news of any sequence; empty once all have finished.

        Raises:
            TriptychError: if the request failed.
        """
        try:
            while events := await self.group.take():
                answers = self._answers(events)
                if self.reports_prompts:
                    await self._report_prompts({index // self.n for index, _ in answers})
                if news := list(self._news(answers)):
                    return news
        except TriptychError as error:
            if error.param == "structured_output":
                error.param = self.constraint_param  # as the client called it
            raise
        return []

    def _answers(
        self, events: Sequence[tuple[int, inference.GenerateEvent]]
    ) -> list[tuple[int, inference.GenerateEvent]]:
        """Those events that tell of the answer, and not only of the prompt (whose log-probabilities the group has collected)."""
        for index, event in events:
            if event.HasField("prompt"):
                self.sequences[index].num_cached_tokens = event.prompt.num_cached_tokens
        return [(index, event) for index, event in events if event.token_ids or event.finish_reason]

    async def _report_prompts(self, numbers: set[int]) -> None:
        """Makes the reports of prompts whose answers begin: once a prompt, and beside the event loop where it takes long."""
        count = self.sequences[0].num_logprobs or 0
        for prompt in (self.prompts[number] for number in numbers):
            if prompt.reports is None:
                size, make = len(prompt.token_ids) * (count + 1), self.make_detokenizer()
                await self.worker.run(size, partial(prompt.report, make, count))

    def _news(self, events: Sequence[tuple[int, inference.GenerateEvent]]) -> Iterator[Delta]:
        now = self.timing.clock()
        for index, event in events:
            sequence = self.sequences[index]
            if sequence.finished:
                continue
            before = sequence.num_tokens
            delta = self._with_prompt(sequence, sequence.push(event))
            if sequence.num_tokens > before:
                self._measure(sequence, now, sequence.num_tokens - before)
            if delta.finish_reason is not None:
                if not event.finish_reason:
                    self.group.finish(index)
                self.timing.metrics.finished(
                    delta.finish_reason, sequence.num_prompt_tokens, now - self.timing.arrived
                )
            yield delta

    def _with_prompt(self, sequence: SequenceText, delta: Delta) -> Delta:
        """The delta as the client sees it where answers repeat the prompt."""
        if self.prompt_only:
            sequence.num_tokens = 0
            delta = delta._replace(text="", tokens=())
        if not sequence.to_echo:
            return delta
        sequence.to_echo = False
        prompt = self.prompts[sequence.index // self.n]
        return delta._replace(
            text=(prompt.echo or "") + delta.text, tokens=(prompt.reports or ()) + delta.tokens
        )

    def _measure(self, sequence: SequenceText, now: float, count: int) -> None:
        if sequence.last_at:
            self.timing.metrics.tokens(count, (now - sequence.last_at) / count)
        else:
            self.timing.metrics.first_token(count, now - self.timing.arrived)
        sequence.last_at = now

    def fail(self, error: TriptychError) -> None:
        """Ends it from outside; the reader of :meth:`deltas` gets ``error``."""
        self.group.fail(error)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            sum(sequence.num_prompt_tokens for sequence in self.sequences),
            sum(sequence.num_tokens for sequence in self.sequences),
            sum(sequence.num_cached_tokens for sequence in self.sequences),
        )
