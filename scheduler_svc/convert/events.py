"""What clients are told of their requests: events and results to protocol messages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from protos.triptych.v1 import common_pb2, inference_pb2
from protos.wire import FULL_MESSAGE_BYTES
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.stop_rule import FinishReason

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}

# On the wire, at most: an event's id, numbers and bounded texts, one of its tokens, and its log-probabilities without and with one more
# of the likeliest tokens.
_EVENT_BYTES, _TOKEN_BYTES, _LOGPROBS_BYTES, _TOP_BYTES = 256, 5, 20, 9


def events_to_proto(events: Sequence[Event | tuple[str, int]]) -> Iterator[inference_pb2.ConnectResponse]:
    """Events for a client's stream, in messages that any client takes."""
    gathered: list[inference_pb2.GenerateEvent] = []
    size = 0
    for event in events:
        for piece in pieces_of(event):
            weight = _weight(piece)
            if gathered and size + weight > FULL_MESSAGE_BYTES:
                yield inference_pb2.ConnectResponse(events=gathered)
                gathered, size = [], 0
            gathered.append(event_to_proto(piece))
            size += weight
    yield inference_pb2.ConnectResponse(events=gathered)


def pieces_of(event: Event | tuple[str, int]) -> Iterator[Event | tuple[str, int]]:
    """The same as events that each fit into a message: those of a prompt's log-probabilities may have to be several."""
    if isinstance(event, tuple) or not event.prompt_logprobs:
        yield event
        return
    entries = event.prompt_logprobs
    many = max(
        1, FULL_MESSAGE_BYTES // _logprobs_weight(max(entries, key=lambda entry: len(entry.top_token_ids)))
    )
    for start in range(0, len(entries), many):
        yield replace(event, prompt_logprobs=entries[start : start + many], first=event.first and not start)


def _weight(event: Event | tuple[str, int]) -> int:
    """About the bytes of an event on the wire."""
    if isinstance(event, tuple):
        return _EVENT_BYTES
    told = sum(map(_logprobs_weight, event.logprobs)) + sum(map(_logprobs_weight, event.prompt_logprobs))
    return _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids) + told


def _logprobs_weight(entry: common_pb2.TokenLogprobs) -> int:
    return _LOGPROBS_BYTES + _TOP_BYTES * len(entry.top_token_ids)


def event_to_proto(event: Event | tuple[str, int]) -> inference_pb2.GenerateEvent:
    """One event for a client; a pair is a request's id and one token."""
    if isinstance(event, tuple):
        return inference_pb2.GenerateEvent(request_id=event[0], token_ids=(event[1],))
    message = inference_pb2.GenerateEvent(
        request_id=event.request_id,
        sequence=event.sequence,
        token_ids=event.token_ids,
        logprobs=event.logprobs,
        finish_reason=_FINISH_REASONS[event.finish_reason],
        stop_token_id=event.stop_token_id,
        error=event.error.to_proto() if event.error else None,
        prompt_logprobs=event.prompt_logprobs,
    )
    if event.first:
        message.prompt.num_tokens = event.num_prompt_tokens
        message.prompt.num_cached_tokens = event.num_cached_tokens
        message.prompt.queue_ms = event.queue_s * 1000
    return message


def pooled_to_proto(event: Event) -> inference_pb2.PoolResponse:
    """A pooling request's result for a client."""
    return inference_pb2.PoolResponse(
        request_id=event.request_id,
        values=event.pooled,
        shape=[len(event.pooled)],
        num_prompt_tokens=event.num_prompt_tokens,
    )
