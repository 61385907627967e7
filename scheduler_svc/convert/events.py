"""What clients are told of their requests: events and results to protocol messages."""

from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.request import Event, FinishReason, Logprobs

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}


def event_to_proto(event: Event | tuple[str, int]) -> inference_pb2.GenerateEvent:
    """One event for a client; a pair is a request's id and one token."""
    if isinstance(event, tuple):
        return inference_pb2.GenerateEvent(request_id=event[0], token_ids=(event[1],))
    message = inference_pb2.GenerateEvent(
        request_id=event.request_id,
        sequence=event.sequence,
        token_ids=event.token_ids,
        logprobs=[_logprobs_to_proto(entry) for entry in event.logprobs],
        finish_reason=_FINISH_REASONS[event.finish_reason],
        stop_token_id=event.stop_token_id,
        error=event.error.to_proto() if event.error else None,
        prompt_logprobs=[_logprobs_to_proto(entry) for entry in event.prompt_logprobs],
    )
    if event.first:
        message.prompt.num_tokens = event.num_prompt_tokens
        message.prompt.num_cached_tokens = event.num_cached_tokens
        message.prompt.queue_ms = event.queue_s * 1000
    return message


def _logprobs_to_proto(entry: Logprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=[token for token, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def pooled_to_proto(event: Event) -> inference_pb2.PoolResponse:
    """A pooling request's result for a client."""
    return inference_pb2.PoolResponse(
        request_id=event.request_id,
        values=event.pooled,
        shape=[len(event.pooled)],
        num_prompt_tokens=event.num_prompt_tokens,
    )
