"""Reads clients' requests, and writes events, results, load and the model as messages."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from protos.errors import Aborted, InvalidArgument
from protos.limits import SLICE
from protos.service.grpc_options import FULL_MESSAGE_BYTES, file_chunks
from protos.service.tracing import Tracer
from protos.triptych.v1 import common_pb2, inference_pb2
from protos.validation import TOKEN_TASKS, check_generate, check_pool, count_values
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.engine.load import Load, ReplicaLoad
from scheduler_svc.requests.admission import Resumed, Submission
from scheduler_svc.requests.pooled_model import MOST_VALUES
from scheduler_svc.requests.request import Event, TokenColumns
from scheduler_svc.requests.sampling import FinishReason, Sampling
from scheduler_svc.requests.trace import TraceContext


def submission_from_proto(request: inference_pb2.GenerateRequest, tracer: Tracer | None = None) -> Submission:
    """Validates a request without knowing the model; `tracer` writes its spans."""
    check_generate(request)
    params = common_pb2.SamplingParams()
    params.CopyFrom(request.sampling)
    # Nothing bounds the size of fields unknown to this schema; a large field would exceed a plan's message.
    params.DiscardUnknownFields()
    params.seed_is_drawn = not params.HasField("seed")
    if params.seed_is_drawn:
        # Drawn once: a replay after a lost worker must continue with the same random numbers.
        params.seed = secrets.randbits(63)
    return Submission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=_ids_of(request.prompt_token_ids),
        sampling=Sampling(params),
        n=request.n if request.HasField("n") else 1,
        resumed=tuple(
            Resumed(one.sequence, _ids_of(one.token_ids), one.finished, one.worker_losses)
            for one in request.resumed
        ),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        lora_digest=request.lora_digest,
        age_s=request.age_ms / 1000 if request.HasField("age_ms") else None,
        silent_s=request.silent_ms / 1000,
        tracing=_trace_context(request, tracer),
    )


def _ids_of(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the token ids of a message; other threads run after each slice."""
    slices = (token_ids[start : start + SLICE] for start in range(0, len(token_ids), SLICE))
    return tuple(chain.from_iterable(slices))


def _trace_context(
    request: inference_pb2.GenerateRequest | inference_pb2.PoolRequest, tracer: Tracer | None
) -> TraceContext | None:
    return TraceContext(request.traceparent, request.tracestate, tracer) if request.traceparent else None


def pool_submission_from_proto(
    request: inference_pb2.PoolRequest, tracer: Tracer | None = None
) -> Submission:
    """Validates a pooling request without knowing the model."""
    check_pool(request)
    pooling = common_pb2.PoolingParams(
        task=request.task or common_pb2.POOL_TASK_EMBED,
        use_activation=request.use_activation if request.HasField("use_activation") else None,
        dimensions=request.dimensions,
        second_text_at=request.second_text_at,
    )
    return Submission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        pooling=pooling,
        priority=request.priority,
        tenant=request.tenant,
        tracing=_trace_context(request, tracer),
    )


_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}

# Upper bounds of sizes on the wire: a token's log-probabilities, and an entry of their top tokens.
_LOGPROBS_BYTES, _TOP_BYTES = 20, 9


def event_to_protos(event: Event | TokenColumns) -> Iterator[inference_pb2.GenerateEvent]:
    """Yields the messages of an event, or of the tokens in columns.

    The log-probabilities of a long prompt take several messages.
    """
    if isinstance(event, tuple):
        for request_id, token_id in zip(*event, strict=True):
            yield inference_pb2.GenerateEvent(request_id=request_id, token_ids=(token_id,))
        return
    entries = event.prompt_logprobs
    if not entries:
        yield _event_to_proto(event)
        return
    largest = max(len(entry.top_token_ids) for entry in entries)
    per_message = max(1, FULL_MESSAGE_BYTES // (_LOGPROBS_BYTES + _TOP_BYTES * largest))
    for start in range(0, len(entries), per_message):
        part = entries[start : start + per_message]
        yield _event_to_proto(replace(event, prompt_logprobs=part, first=event.first and not start))


def _event_to_proto(event: Event) -> inference_pb2.GenerateEvent:
    message = inference_pb2.GenerateEvent(
        request_id=event.request_id,
        sequence=event.sequence,
        token_ids=event.token_ids,
        logprobs=event.logprobs,
        finish_reason=_FINISH_REASONS[event.finish_reason],
        stop_token_id=event.stop_token_id,
        error=event.error.to_proto() if event.error else None,
        prompt_logprobs=event.prompt_logprobs,
        worker_losses=event.worker_losses,
        accepted=event.accepted,
    )
    if event.first:
        message.prompt.seed = event.seed
        message.prompt.num_tokens = event.num_prompt_tokens
        message.prompt.num_cached_tokens = event.num_cached_tokens
        message.prompt.queue_ms = event.queue_s * 1000
        message.prompt.lora_digest = event.lora_digest
        message.prompt.replica_id = event.replica_id
    return message


def check_results_fit(submissions: Sequence[Submission], pooled_size: int) -> None:
    """Refuses the requests of a call if their results, vectors of `pooled_size` values, exceed a message."""
    values = sum(
        count_values(each.pooling, len(each.prompt_token_ids), pooled_size)
        for each in submissions
        if each.pooling is not None
    )
    if values > MOST_VALUES:
        raise InvalidArgument(
            f"the results would have {values} values, and a message holds {MOST_VALUES}; send fewer requests in"
            " one call",
            param="requests",
        )


def pooled_to_proto(event: Event, submission: Submission) -> inference_pb2.PoolResponse:
    """Returns the answer to a pooling request, given its last event; raises its error if it failed."""
    if event.error is not None:
        raise event.error
    if event.finish_reason is FinishReason.ABORT:
        raise Aborted("the request was aborted")
    assert submission.pooling is not None
    count = len(event.pooled)
    rows = len(submission.prompt_token_ids)
    return inference_pb2.PoolResponse(
        request_id=event.request_id,
        values=event.pooled,
        shape=[rows, count // rows] if submission.pooling.task in TOKEN_TASKS else [count],
        num_prompt_tokens=event.num_prompt_tokens,
        replica_id=event.replica_id,
    )


def lora_to_proto(adapter: Adapter, replica_ids: Sequence[str]) -> inference_pb2.LoraInfo:
    """Returns the message of an adapter, given its replicas."""
    return inference_pb2.LoraInfo(
        name=adapter.name,
        source=adapter.source,
        rank=adapter.rank,
        digest=adapter.digest,
        replica_ids=replica_ids,
        revision=adapter.revision,
    )


def load_to_proto(load: Load) -> inference_pb2.Load:
    """Converts the load of a deployment."""
    return inference_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        kv_usage=load.kv_usage,
        replicas=[_replica_to_proto(replica) for replica in load.replicas],
    )


def _replica_to_proto(replica: ReplicaLoad) -> inference_pb2.ReplicaLoad:
    is_ready = replica.starting is None
    return inference_pb2.ReplicaLoad(
        replica_id=replica.replica_id,
        state=inference_pb2.REPLICA_STATE_READY if is_ready else inference_pb2.REPLICA_STATE_CONFIGURING,
        detail=replica.starting or "",
        num_running=replica.num_running,
        kv_usage=replica.kv_usage,
    )


def files_to_proto(files: Mapping[str, bytes]) -> Iterator[common_pb2.FileChunk]:
    """Cuts files, given by name, into messages."""
    for name, data in files.items():
        yield from file_chunks(name, data)
