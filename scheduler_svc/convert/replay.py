"""Writes the log of a request as messages, for a client that continues its answer."""

from collections.abc import Iterator

from protos.triptych.v1 import inference_pb2
from scheduler_svc.convert.inference import event_to_protos
from scheduler_svc.dispatch.event_log import RequestLog
from scheduler_svc.requests.request import Event

# Tokens of one message, with twenty log-probabilities each at most.
_TOKENS_PER_EVENT = 2_000


def log_to_protos(log: RequestLog) -> Iterator[inference_pb2.ReplayResponse]:
    """Yields a log's events, at least one, in as few messages as fit."""
    for event in _events_of(log):
        for message, _ in event_to_protos(event):
            yield inference_pb2.ReplayResponse(created_unix_s=log.spec.created_unix_s, event=message)


def _events_of(log: RequestLog) -> Iterator[Event]:
    yield Event(
        log.request_id,
        first=True,
        seed=log.seed,
        num_prompt_tokens=log.num_prompt_tokens,
        num_cached_tokens=log.num_cached_tokens,
        lora_digest=log.lora_digest,
        replica_id=log.replica_id,
        prompt_logprobs=log.prompt_logprobs,
    )
    for number, one in enumerate(log.sequences):
        if one.worker_losses:
            yield Event(log.request_id, sequence=number, worker_losses=one.worker_losses)
        ends = range(_TOKENS_PER_EVENT, len(one.token_ids) + _TOKENS_PER_EVENT, _TOKENS_PER_EVENT)
        for end in ends:
            part = slice(end - _TOKENS_PER_EVENT, end)
            last = end == ends[-1]
            yield Event(
                log.request_id,
                tuple(one.token_ids[part]),
                one.logprobs[part],
                one.finish_reason if last else None,
                one.stop_token_id if last else None,
                sequence=number,
            )
