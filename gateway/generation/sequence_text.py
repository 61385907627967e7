"""Prompts and sequences of an answer: tokens become text and reports of log-probabilities."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from gateway.metrics import EngineMetrics
from gateway.parsers.events import CallStart, Text, ToolParser
from gateway.scheduler_client.in_flight import PendingRequest, SequenceEvent
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.sampling import SamplingRequest
from gateway.text.detokenizer import Detokenizer, StopStrings
from protos.triptych.v1 import common_pb2 as pb


class ChatTokenLogprob(TypedDict):
    """The log-probability of a token."""

    token: str
    logprob: Annotated[float | None, Field(description="null for the first token of an echoed prompt.")]
    bytes: list[int]


class ChatToken(ChatTokenLogprob):
    """A token of the answer, with the likeliest tokens in its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat choice."""

    content: list[ChatToken]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, an entry per token in each list."""

    tokens: list[str]
    token_logprobs: Annotated[
        list[float | None], Field(description="null for the first token of an echoed prompt.")
    ]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[
        list[int], Field(description="Where each token's text begins in the choice's text.")
    ]


# Stands for minus infinity, which JSON lacks; OpenAI and vLLM use the same number.
MIN_LOGPROB: Final = -9999.0


class TokenReport(NamedTuple):
    """The log-probabilities of a token of an answer or of an echoed prompt."""

    token_id: int
    offset: int
    """Where its text, or its character, begins in the answer's text."""
    logprob: float | None
    """Natural logarithm; ``None`` for a prompt's first token, which nothing precedes."""
    top: Sequence[tuple[int, float]] = ()
    """The likeliest tokens in its place with their log-probabilities, best first."""

    @classmethod
    def from_proto(cls, token_id: int, offset: int, entry: pb.TokenLogprobs, count: int) -> "TokenReport":
        """Returns the report of a token from its wire entry, with the ``count`` likeliest tokens."""
        top = zip(entry.top_token_ids[:count], map(_finite, entry.top_logprobs[:count]), strict=True)
        return cls(token_id, offset, _finite(entry.logprob), tuple(top))


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes an answer's log-probabilities."""

    token_bytes: Callable[[int], bytes]
    """Returns the bytes that a token stands for."""
    as_ids: bool = False
    """Write tokens as ``token_id:5`` instead of their text."""
    wanted: bool = True
    """Whether the answer has log-probabilities of its tokens at all."""

    def text(self, token_id: int) -> str:
        """Returns a token's text; bytes that are only a part of a character become U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def chat(self, tokens: Iterable[TokenReport]) -> ChatLogprobs | None:
        """Returns the ``logprobs`` of a chat choice."""
        if not self.wanted:
            return None
        return {
            "content": [
                {
                    **self._chat_token(token.token_id, token.logprob),
                    "top_logprobs": [self._chat_token(*likely) for likely in token.top],
                }
                for token in tokens
            ]
        }

    def _chat_token(self, token_id: int, logprob: float | None) -> ChatTokenLogprob:
        return {
            "token": self.text(token_id),
            "logprob": logprob,
            "bytes": list(self.token_bytes(token_id)),
        }

    def completion(self, tokens: Sequence[TokenReport]) -> CompletionLogprobs | None:
        """Returns the ``logprobs`` of a plain completion.

        The chosen token is added to the likeliest tokens asked for, unless it is among them.
        """
        if not self.wanted:
            return None
        return {
            "tokens": [self.text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _likeliest(self, token: TokenReport) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found = {self.text(token.token_id): token.logprob}
        for token_id, logprob in token.top:
            # Different tokens may have the same text (parts of characters). The chosen token's value wins,
            # then the likelier one's.
            found.setdefault(self.text(token_id), logprob)
        return found

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[pb.TokenLogprobs], count: int
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Returns ``prompt_logprobs`` in vLLM's shape.

        Each prompt token but the first has an entry by token id: its own, and those of the ``count``
        likeliest tokens.
        """
        entries_by_id: list[dict[str, dict[str, Any]] | None] = [None]
        for token_id, entry in zip(prompt[1:], entries, strict=True):
            found = {str(token_id): self._ranked(token_id, entry.logprob, entry.rank)}
            likeliest = zip(entry.top_token_ids[:count], entry.top_logprobs[:count], strict=True)
            for rank, (other, logprob) in enumerate(likeliest, start=1):
                found.setdefault(str(other), self._ranked(other, logprob, rank))
            entries_by_id.append(found)
        return entries_by_id

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class ThinkingMeter:
    """Counts the tokens of a sequence's thinking, markers included."""

    def __init__(self, parser: ToolParser) -> None:
        """Counts the thinking found by ``parser``."""
        self._parser: ToolParser | None = parser
        self.num_tokens = 0

    def feed(self, text: str, num_tokens: int) -> None:
        """Takes the text after the sequence's first ``num_tokens`` tokens."""
        if self._parser is None:
            return
        events = self._parser.feed(text)
        if any(isinstance(event, CallStart) or (isinstance(event, Text) and event.text) for event in events):
            self._parser = None
        elif events:
            self.num_tokens = num_tokens


@dataclass(slots=True)
class Prompt:
    """A prompt, shared by all sequences that continue it."""

    token_ids: Sequence[int]
    logprobs: Sequence[pb.TokenLogprobs] = ()
    """An entry for each token but the first, if asked for. Grows while the prompt is computed, and is
    complete before the first event of an answer."""
    echo: str | None = None
    """The text before each answer; ``None`` if answers do not repeat the prompt."""
    reports: tuple[TokenReport, ...] | None = None
    """The prompt's tokens for answers with an echo, if reported and known."""
    num_cached_tokens: int | None = None
    """Prompt tokens from the prefix cache, once known. Prefixes found by a repeated request do not count."""
    replica_id: str = ""
    """The first replica that ran it, once known."""
    max_tokens: int | None = None
    """Limit of each sequence in tokens, if the request sets it."""
    num_ended: int = 0
    """Its sequences that ended by themselves."""
    longest: int = 0
    """Tokens of the longest of them."""

    @classmethod
    def from_request(cls, pending: PendingRequest, echo: str | None) -> "Prompt":
        """Returns the prompt of a request under way."""
        sampling = pending.request.sampling
        return cls(
            pending.request.prompt_token_ids,
            pending.prompt_logprobs,
            echo,
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        )

    def report(self, detokenizer: Detokenizer, count: int) -> None:
        """Fills ``reports``, each with the ``count`` likeliest tokens.

        Takes time in proportion to the prompt and ``count``.
        """
        found, offset = [], 0
        for token_id, entry in zip(self.token_ids, (None, *self.logprobs), strict=True):
            if entry is None:
                found.append(TokenReport(token_id, offset, None))
            else:
                found.append(TokenReport.from_proto(token_id, offset, entry, count))
            offset += len(detokenizer.push((token_id,)))
        self.reports = tuple(found)


_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Delta(NamedTuple):
    """New text and tokens of a sequence."""

    sequence: int
    text: str
    finish_reason: str | None = None
    """In the last delta: "stop" or "length"."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the sequence; ``None`` for the model's own end tokens."""
    tokens: tuple[TokenReport, ...] = ()
    """The new tokens, if log-probabilities were asked for. Text held back comes later than its tokens."""
    token_ids: tuple[int, ...] = ()
    """The ids of the new tokens, if they were asked for."""


@dataclass(slots=True)
class SequenceText:
    """A sequence: turns its tokens into text and counts them."""

    index: int
    num_prompt_tokens: int
    detokenizer: Detokenizer
    stops: StopStrings | None
    min_tokens: int
    """Stop strings count only after this many tokens."""
    include_stop: bool
    """Whether the text includes the stop string or token that ends it."""
    stop_token_ids: frozenset[int]
    num_logprobs: int | None = None
    """How many of the likeliest tokens to report with each token; ``None``: no log-probabilities."""
    reports_ids: bool = False
    """Whether to report the ids of tokens."""
    num_tokens: int = 0
    num_chars: int = 0
    """Length of the text so far, including text held back."""
    first_at: float = 0.0
    """When the first token arrived."""
    last_at: float = 0.0
    """When the last tokens arrived."""
    measured: EngineMetrics | None = None
    """The metrics of its engine, from its first token on."""
    finished: bool = False
    thinking: ThinkingMeter | None = None
    """Counts the tokens of thinking, if the model thinks."""
    to_echo: bool = False
    """Whether the first text must still repeat the prompt."""

    @classmethod
    def from_request(
        cls,
        index: int,
        body: SamplingRequest,
        served: ServedModel,
        prompt: Prompt,
        markers: frozenset[str] | None,
        *,
        first: bool,
    ) -> "SequenceText":
        """Returns a sequence without tokens.

        The ``first`` of a prompt counts the prompt's tokens. ``markers`` are shown even if special tokens are
        skipped; ``None``: all of them.
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
            reports_ids=body.return_token_ids,
            num_chars=len(prompt.echo or ""),
            to_echo=prompt.echo is not None,
        )

    def push(self, event: SequenceEvent) -> Delta:
        """Takes an event and returns its delta, which may be empty.

        After a stop string, the sequence is finished and takes no more events.
        """
        before = self.num_tokens
        delta = self._push(event)
        if not self.reports_ids:
            return delta
        return delta._replace(token_ids=tuple(event.token_ids[: self.num_tokens - before]))

    def _push(self, event: SequenceEvent) -> Delta:
        reason = _REASONS.get(event.finish_reason)
        token_ids = event.token_ids
        # The token that ended the sequence is text only if the client wants to see it.
        hidden = bool(reason and token_ids and event.stop_token_id is not None and not self.include_stop)
        if self._is_text_alone:
            self.num_tokens += len(token_ids)
            text = self.detokenizer.push(token_ids[:-1] if hidden else token_ids)
            if reason is None:
                return Delta(self.index, text)
            self.finished = True
            return Delta(self.index, text + self.detokenizer.finish(), reason, self._stop_token(event))
        return self._push_one_by_one(event, reason, len(token_ids) - hidden)

    def push_token(self, token_id: int) -> str:
        """Takes a token that ends nothing and returns the text completed by it, for :attr:`is_plain`."""
        self.num_tokens += 1
        text = self.detokenizer.push((token_id,))
        if self.thinking is not None:
            self.thinking.feed(text, self.num_tokens)
        return text

    @property
    def is_plain(self) -> bool:
        """Whether a token needs nothing but its text: no stop strings, no log-probabilities, no id."""
        return self._is_text_alone and not self.reports_ids

    @property
    def _is_text_alone(self) -> bool:
        return self.stops is None and self.num_logprobs is None

    def _push_one_by_one(self, event: SequenceEvent, reason: str | None, visible: int) -> Delta:
        """Handles tokens singly.

        Counting then stops at the token that completes a stop string, and each token's offset is known.
        """
        text, stops, tokens = "", self.stops, []
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if self.num_logprobs is not None:
                entry = event.logprobs[position]
                tokens.append(TokenReport.from_proto(token_id, self.num_chars, entry, self.num_logprobs))
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

    def _stop_token(self, event: SequenceEvent) -> int | None:
        return event.stop_token_id if event.stop_token_id in self.stop_token_ids else None
