"""The running answer to an HTTP request: events become text, usage and measurements."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.sequence_text import Delta, Prompt, SequenceText, ThinkingMeter
from gateway.http.errors import internal
from gateway.metrics import Metrics
from gateway.scheduler_client.in_flight import SequenceEvent, Subscription
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.sampling import SamplingRequest
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenization import TextWorker
from protos.errors import Aborted, TriptychError
from protos.service.logs import get_logger


@dataclass(slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    thinking_tokens: int = 0

    def body(self) -> dict[str, object]:
        """Returns OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.thinking_tokens},
        }


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The clock and the metrics of an answer."""

    metrics: Metrics
    clock: Callable[[], float]
    """Monotonic seconds."""
    arrived: float
    """When the HTTP request arrived, by ``clock``."""


class Sink(Protocol):
    """Takes the deltas of an answer."""

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """Returns the bytes for deltas; may be called from a thread, once at a time."""

    def push(self, part: bytes) -> None:
        """Takes the next bytes, perhaps none."""

    def end(self, error: TriptychError | None) -> None:
        """Takes the end of the answer, or its failure."""


@dataclass(slots=True)
class Generation:
    """The running answer to an HTTP request: n sequences per prompt, numbered prompt by prompt.

    As a context manager, it aborts all running sequences at the end.
    """

    subscription: Subscription
    sequences: list[SequenceText]
    prompts: list[Prompt]
    n: int
    """Sequences per prompt."""
    prompt_only: bool
    """Whether the answer is only the prompt: generated tokens are neither shown nor counted."""
    make_detokenizer: Callable[[], Detokenizer]
    """Makes a detokenizer for a prompt."""
    worker: TextWorker
    timing: RequestTimings
    constraint_param: str = ""
    first_token_s: float | None = None
    """Time from the request's arrival to the first token of any sequence."""
    finish_reasons: list[str] = field(default_factory=list)
    """Why its sequences ended, in that order."""
    _sink: "Sink" = field(init=False)
    _num_running: int = 0
    _is_plain: bool = False
    _ended: bool = False
    _has_failed: bool = False
    _backlog: list[tuple[int, SequenceEvent | int]] = field(default_factory=list)
    """Events that wait for the report of their prompt."""
    _reporting: asyncio.Task[None] | None = None

    @classmethod
    def begin(
        cls,
        subscription: Subscription,
        body: SamplingRequest,
        served: ServedModel,
        worker: TextWorker,
        timing: RequestTimings,
        plan: AnswerPlan,
        *,
        echoes: Sequence[str] | None = None,
    ) -> "Generation":
        """Returns the answer to requests, one per prompt; ``echoes`` are the texts before answers."""
        prompts = [
            Prompt.from_request(pending, echoes[index] if echoes is not None else None)
            for index, pending in enumerate(subscription.requests)
        ]
        sequences = [
            SequenceText.from_request(
                index * body.n + choice, body, served, prompt, plan.markers, first=not choice
            )
            for index, prompt in enumerate(prompts)
            for choice in range(body.n)
        ]
        if plan.thinking is not None:
            for sequence in sequences:
                sequence.thinking = ThinkingMeter(plan.thinking())
        make = partial(served.text.detokenizers.make, skip_special_tokens=body.skip_special_tokens)
        return cls(
            subscription,
            sequences,
            prompts,
            body.n,
            body.prompt_only,
            make,
            worker,
            timing,
            plan.constraint_param,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.subscription.abort()
        if self._reporting is not None:
            self._reporting.cancel()
        self._count_unfinished()

    def _count_unfinished(self) -> None:
        """Counts the sequences cut off here. A refused request ran none."""
        for sequence in self.sequences:
            if not sequence.finished:
                replica_id = self.prompts[sequence.index // self.n].replica_id
                if replica_id or not self._has_failed:
                    reason = "error" if self._has_failed else "abort"
                    self.timing.metrics.engine(replica_id).unfinished(reason)

    @property
    def reports_prompts(self) -> bool:
        """Whether the first delta of each sequence reports all tokens of its prompt."""
        return self.prompts[0].echo is not None and self.sequences[0].num_logprobs is not None

    def start(self, sink: "Sink") -> None:
        """Pushes the deltas of all events, past and future, to ``sink``."""
        self._sink = sink
        self._num_running = len(self.sequences)
        self._is_plain = not self.prompt_only and all(sequence.is_plain for sequence in self.sequences)
        self.subscription.attach(self)

    def push_token(self, index: int, token_id: int) -> None:
        """Turns a token into a delta for the sink. The hot path: a plain token needs a few operations."""
        sequence = self.sequences[index]
        if not self._is_plain or sequence.to_echo or sequence.finished:
            self.push(((index, token_id),))
            return
        self._measure(sequence, self.timing.clock(), 1)
        if text := sequence.push_token(token_id):
            self._sink.push(self._sink.encode((Delta(index, text),)))

    def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
        """Turns events into deltas for the sink."""
        if self.reports_prompts:
            self._backlog += events
            if self._reporting is None:
                self._reporting = asyncio.create_task(self._report(), name="report-prompts")
            return
        if deltas := self._deltas(events):
            self._sink.push(self._sink.encode(deltas))
        self._finish()

    def end(self, error: TriptychError) -> None:
        """Ends the sink with ``error``, unless the answer is complete."""
        if self._ended:
            return
        self._ended = True
        self._has_failed = not isinstance(error, Aborted)
        if error.param == "structured_output":
            error.param = self.constraint_param  # the client's name for it
        self._sink.end(error)

    def _finish(self) -> None:
        if not (self._num_running or self._ended):
            self._ended = True
            self._sink.end(None)

    def _deltas(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> list[Delta]:
        now, deltas = self.timing.clock(), []
        for index, event in events:
            sequence = self.sequences[index]
            if isinstance(event, int):
                if sequence.finished:
                    continue
                if self._is_plain and not sequence.to_echo:
                    self._measure(sequence, now, 1)
                    if text := sequence.push_token(event):
                        deltas.append(Delta(index, text))
                    continue
                deltas.append(self._delta(sequence, SequenceEvent((event,)), now))
                continue
            self._note_prompt(index, event)
            # Other events concern only the prompt.
            if not sequence.finished and (event.token_ids or event.finish_reason):
                deltas.append(self._delta(sequence, event, now))
        return deltas

    def _delta(self, sequence: SequenceText, event: SequenceEvent, now: float) -> Delta:
        before = sequence.num_tokens
        delta = sequence.push(event)
        if sequence.thinking is not None:
            sequence.thinking.feed(delta.text, sequence.num_tokens)
        delta = self._with_prompt(sequence, delta)
        if sequence.num_tokens > before:
            self._measure(sequence, now, sequence.num_tokens - before)
        if delta.finish_reason is not None:
            self._num_running -= 1
            if not event.finish_reason:
                self.subscription.finish(sequence.index)
            self._count_end(sequence, delta.finish_reason, now)
        return delta

    def _note_prompt(self, index: int, event: SequenceEvent) -> None:
        prompt = self.prompts[index // self.n]
        if prompt.num_cached_tokens is None:
            prompt.num_cached_tokens = event.num_cached_tokens
        prompt.replica_id = prompt.replica_id or event.replica_id

    async def _report(self) -> None:
        """Works off events whose deltas report prompts. Long reports are made and encoded in a thread."""
        try:
            while self._backlog:
                events, self._backlog = self._backlog, []
                count = self.sequences[0].num_logprobs or 0
                for prompt in {
                    index // self.n: self.prompts[index // self.n] for index, _ in events
                }.values():
                    if prompt.reports is None:
                        size, make = len(prompt.token_ids) * (count + 1), self.make_detokenizer()
                        await self.worker.finish(size, partial(prompt.report, make, count))
                deltas = self._deltas(events)
                size = sum(1 + len(token.top) for delta in deltas for token in delta.tokens)
                self._sink.push(await self.worker.finish(size, partial(self._sink.encode, deltas)))
            self._finish()
        except Exception as error:  # noqa: BLE001 - the client must not wait in vain, whatever the bug
            get_logger().exception("the prompts could not be reported")
            self.fail(internal(error))
        finally:
            self._reporting = None

    def _count_end(self, sequence: SequenceText, reason: str, now: float) -> None:
        """Counts a sequence after its own end, and its prompt with the last sequence."""
        prompt, count = self.prompts[sequence.index // self.n], sequence.num_tokens
        self.finish_reasons.append(reason)
        engine = sequence.measured or self.timing.metrics.engine(prompt.replica_id)
        engine.finished(
            reason,
            now - self.timing.arrived,
            prompt=len(prompt.token_ids),
            generated=count,
            per_token=(sequence.last_at - sequence.first_at) / (count - 1) if count > 1 else 0.0,
        )
        prompt.num_ended += 1
        prompt.longest = max(prompt.longest, count)
        if prompt.num_ended == self.n:
            engine.answered(self.n, prompt.max_tokens, prompt.longest)

    def _with_prompt(self, sequence: SequenceText, delta: Delta) -> Delta:
        """Returns the delta with the prompt in front of it, if answers repeat the prompt."""
        if self.prompt_only:
            sequence.num_tokens = 0
            delta = delta._replace(text="", tokens=(), token_ids=())
        if not sequence.to_echo:
            return delta
        sequence.to_echo = False
        prompt = self.prompts[sequence.index // self.n]
        return delta._replace(
            text=(prompt.echo or "") + delta.text, tokens=(prompt.reports or ()) + delta.tokens
        )

    def _measure(self, sequence: SequenceText, now: float, count: int) -> None:
        if sequence.measured is not None:
            sequence.measured.tokens(count, now - sequence.last_at)
        else:
            engine = self.timing.metrics.engine(self.prompts[sequence.index // self.n].replica_id)
            sequence.measured, sequence.first_at = engine, now
            seconds = now - self.timing.arrived
            engine.first_token(seconds)
            if self.first_token_s is None:
                self.first_token_s = seconds
        sequence.last_at = now

    def fail(self, error: TriptychError) -> None:
        """Ends the answer from outside."""
        self.subscription.fail(error)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            sum(sequence.num_prompt_tokens for sequence in self.sequences),
            sum(sequence.num_tokens for sequence in self.sequences),
            sum(prompt.num_cached_tokens or 0 for prompt in self.prompts),
            sum(sequence.thinking.num_tokens for sequence in self.sequences if sequence.thinking is not None),
        )
