"""Admission of a client's request: checks it against the model and makes a request of each sequence."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from protos.errors import ContextExceeded, InvalidArgument, Unavailable, Unsupported
from protos.triptych.v1 import common_pb2
from protos.validation import check_ids, check_token_ids, requested_features
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.kv.sequence import HashChain
from scheduler_svc.requests.request import (
    DECODING_CLEARS,
    Delivery,
    Event,
    Request,
    SequenceGroup,
    SequenceSink,
    Sink,
)
from scheduler_svc.requests.sampling import NO_SAMPLING, FinishReason, Sampling, StopRule
from scheduler_svc.requests.trace import TraceContext


@dataclass(frozen=True, slots=True)
class Resumed:
    """The part of a sequence already received by the client."""

    sequence: int
    """Index of the sequence."""
    token_ids: tuple[int, ...] = ()
    """Tokens received; generation continues after them."""
    finished: bool = False
    """Whether the sequence is complete and must not run again."""
    worker_losses: int = 0
    """Workers lost in a row while they ran the sequence, as last reported to the client."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A client's request, validated without knowing the model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    """Never empty."""
    sampling: Sampling = NO_SAMPLING
    """The parameters as sent, with a seed. ``max_tokens`` may be unset."""
    pooling: common_pb2.PoolingParams | None = None
    """Set for a request to a pooling model."""
    n: int = 1
    """Number of sequences, 1 .. ``MAX_SEQUENCES``."""
    resumed: tuple[Resumed, ...] = ()
    """The parts already received by the client; each names another sequence below ``n``."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    lora_name: str = ""
    """Name of a LoRA adapter; empty for the base model."""
    lora_digest: str = ""
    """Required digest of the adapter, with which the answer began; empty: any."""
    age_s: float | None = None
    """Seconds since an earlier scheduler accepted the request; None if none did."""
    silent_s: float = 0.0
    """Seconds since a resumed request last brought a token."""
    tracing: TraceContext | None = None
    """Where its spans belong; None: it is not traced."""
    hash_chain: HashChain | None = None
    """The hashes of a long prompt, if they are computed."""
    largest_id: int | None = None
    """Its largest token id, if it is known."""

    @property
    def was_accepted(self) -> bool:
        """Whether an earlier scheduler accepted the request; the limits of the queue then do not apply."""
        return self.age_s is not None or bool(self.resumed)

    @property
    def max_tokens(self) -> int | None:
        """New tokens requested by the client; None for the rest of the context."""
        params = self.sampling.params
        return params.max_tokens if params.HasField("max_tokens") else None

    @property
    def sequences(self) -> dict[int, tuple[int, ...]]:
        """The sequences to run, each with the tokens already received by the client."""
        sequences: dict[int, tuple[int, ...]] = dict.fromkeys(range(self.n), ())
        for part in self.resumed:
            if part.finished:
                del sequences[part.sequence]
            else:
                sequences[part.sequence] = part.token_ids
        return sequences

    def sequence_id(self, sequence: int) -> str:
        """Returns the id of a sequence among the scheduler's requests."""
        return f"{self.request_id}#{sequence}" if self.n > 1 else self.request_id

    def ended(self, stop: StopRule) -> list[Event]:
        """Returns the last events of finished resumed sequences, which their client did not receive."""
        events = []
        for sequence, received in self.sequences.items() if self.resumed else ():
            if (reason := stop.reason_of(received)) is not None:
                stop_token_id = received[-1] if reason is FinishReason.STOP else None
                events.append(
                    Event(
                        self.request_id, sequence=sequence, finish_reason=reason, stop_token_id=stop_token_id
                    )
                )
        return events


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits and end tokens of the served model, if it generates."""

    max_model_len: int
    """Longest sequence (prompt plus output), tokens."""
    vocab_size: int
    """Token ids are below this."""
    sampling_fields: frozenset[str]
    """Names of the sampling parameters honoured by the workers."""
    max_logprobs: int
    """Most log-probabilities per token."""
    eos_token_ids: frozenset[int]
    """The model's end tokens."""

    def check(self, submission: Submission, most_tokens: int) -> StopRule:
        """Checks a submission; returns the rule that ends its sequences.

        Args:
            submission: the client's request.
            most_tokens: longest sequence that fits the KV memory of some replica.

        Raises:
            InvalidArgument, ContextExceeded, Unsupported: the request can never be served.
            Unavailable: the remaining workers' memory is too small for a resumed request.
        """
        if submission.pooling is not None:
            raise Unsupported(
                "this model generates text and pools nothing; call Generate or Connect", param="model"
            )
        sampling, params = submission.sampling, submission.sampling.params
        if unserved := sorted(requested_features(params) - self.sampling_fields):
            raise Unsupported(
                f"{unserved[0]} is not supported by the running workers; omit it", param=unserved[0]
            )
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count > self.max_logprobs:
                raise InvalidArgument(f"{name} must be at most {self.max_logprobs}", param=name)
        known = submission.largest_id
        check_ids(
            "prompt_token_ids", submission.prompt_token_ids if known is None else (known,), self.vocab_size
        )
        for received in submission.sequences.values():
            check_ids("resumed", received, self.vocab_size)
        check_token_ids(params, self.vocab_size)
        asked_or_room = _within_context(submission, self)
        if sampling.min_tokens > asked_or_room:
            raise InvalidArgument(
                f"min_tokens={sampling.min_tokens} is more than the {asked_or_room} tokens that can be generated",
                param="min_tokens",
            )
        stop = StopRule.from_sampling(sampling, self.eos_token_ids, asked_or_room)
        if submission.resumed and len(submission.ended(stop)) == len(submission.sequences):
            # Nothing is left to run, so nothing needs memory.
            return stop
        return replace(stop, max_tokens=_within_memory(submission, asked_or_room, most_tokens))


def _within_context(submission: Submission, model: ModelLimits) -> int:
    """Returns the client's ``max_tokens``, or if it is unset, the rest of the context."""
    num_prompt, asked = len(submission.prompt_token_ids), submission.max_tokens
    if num_prompt >= model.max_model_len:
        raise ContextExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens, but the prompt has {num_prompt}"
            f" and must leave room for one more; shorten it to at most {model.max_model_len - 1} tokens",
            param="prompt",
        )
    room = model.max_model_len - num_prompt
    if asked is not None and asked > room:
        raise ContextExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens, but the request has {num_prompt}"
            f" prompt tokens and max_tokens={asked}; ask for at most {room}",
            param="max_tokens",
        )
    return room if asked is None else asked


def _within_memory(submission: Submission, max_tokens: int, most_tokens: int) -> int:
    """Returns ``max_tokens``, reduced to the available memory if the client set no limit."""
    num_prompt, min_tokens = len(submission.prompt_token_ids), submission.sampling.min_tokens
    if num_prompt + max_tokens <= most_tokens:
        return max_tokens
    cut = most_tokens - num_prompt
    received = [len(one) for one in submission.sequences.values() if len(one) < max_tokens]
    if submission.was_accepted and (
        submission.max_tokens is not None or cut < min_tokens or cut <= max(received, default=0)
    ):
        # The request ran on a larger replica, which may come back.
        raise Unavailable(
            f"the resumed request needs more KV memory than the {most_tokens} tokens that the remaining workers hold; "
            "retry when more workers are back",
            retry_after_ms=2000,
        )
    if submission.max_tokens is None and cut >= max(1, min_tokens):
        return cut
    is_max = submission.max_tokens is not None or cut <= 0
    param, count = ("max_tokens", max_tokens) if is_max else ("min_tokens", min_tokens)
    raise ContextExceeded(
        f"This deployment's maximum context length is {most_tokens} tokens a request (its KV memory), but the"
        f" request has {num_prompt} prompt tokens and {param}={count}; ask for less",
        param=param,
    )


def make_requests(
    submission: Submission, stop: StopRule, sink: Sink, arrivals: Iterator[int], now_s: float,
    adapter: Adapter | None = None,
) -> list[Request]:  # fmt: skip
    """Makes a request of each sequence to run; they form a group if the client asked for several."""
    prompt = submission.prompt_token_ids
    group = SequenceGroup(submission.request_id, sink) if submission.n > 1 else None
    ended = {event.sequence for event in submission.ended(stop)}
    # The prompt is computed once, so only the first sequence reports its log-probabilities.
    first = submission.sampling
    if first.max_tokens != stop.max_tokens:
        first = first.changed(max_tokens=stop.max_tokens)
    others = first.changed(prompt_logprobs=None) if submission.n > 1 else first
    requests: list[Request] = []
    losses = {one.sequence: one.worker_losses for one in submission.resumed}
    arrival_s = now_s - (submission.age_s or 0.0)
    silent_since_s = now_s - submission.silent_s if submission.resumed else None
    for sequence, received in submission.sequences.items():
        if sequence in ended:
            continue
        trace, traceparent = submission.tracing.begin(now_s) if submission.tracing else (None, "")
        requests.append(
            Request(
                request_id=submission.sequence_id(sequence),
                token_ids=[*prompt, *received],
                num_prompt_tokens=len(prompt),
                sampling=others if requests else first,
                arrival=_order_of_arrival(arrival_s, next(arrivals)),
                arrival_s=arrival_s,
                sink=sink if group is None else SequenceSink(group, sequence),
                stop=stop,
                priority=submission.priority,
                tenant=submission.tenant,
                charged=bool(submission.resumed),
                cache_salt=submission.cache_salt,
                adapter=adapter,
                pooling=submission.pooling,
                sequence=sequence,
                group=group,
                worker_losses=losses.get(sequence, 0),
                cleared_at=DECODING_CLEARS if losses.get(sequence) else 0,
                delivery=Delivery(accepted_s=now_s, silent_since_s=silent_since_s),
                trace=trace,
                traceparent=traceparent,
            )
        )
    if (chain := submission.hash_chain) is not None:
        for request in requests:
            request.kv.hash_chain = chain.copy()
    if group is not None:
        group.members.extend(requests)
    return requests


def _order_of_arrival(arrival_s: float, number: int) -> int:
    """Returns a request's place in the order of arrival: by microsecond, then by number."""
    return (math.floor(arrival_s * 1e6) << 40) + number
