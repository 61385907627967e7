"""Between protocol messages and the scheduler's own types: the only module that knows both."""

import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from protos.errors import ConfigurationRefused, InvalidArgument, NotFound, from_proto
from protos.triptych.v1 import common_pb2, inference_pb2, worker_pb2
from scheduler_svc.engine import Submission
from scheduler_svc.geometry import DeviceLimits, Geometry, GroupKind, KvGroup
from scheduler_svc.kv_events import Batch, Cleared, KvEvent, Removed, Stored
from scheduler_svc.plan import (
    Admission,
    BlockCopy,
    Decode,
    Growth,
    Pool,
    Prefill,
    SlotOutput,
    StepPlan,
    StepResult,
)
from scheduler_svc.pool_engine import PoolSubmission
from scheduler_svc.pooling import PoolShape
from scheduler_svc.request import Event, FinishReason, Logprobs, Pooling, PoolTask
from scheduler_svc.sampling import Grammar, SamplingParams
from scheduler_svc.sequences import MAX_SEQUENCES, Resumed

MAX_REQUEST_ID_BYTES = 128
MAX_NAME_BYTES = 256

# Far more than is asked for in earnest, few enough that a request neither holds everybody up here nor fills a worker's tables.
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 256
# Twice the largest vocabularies.
MAX_ALLOWED_TOKEN_IDS = 1 << 19
MAX_REPETITION_PENALTY = 10.0
# Workers compile less than that; this is what a request may carry through the queue.
MAX_GRAMMAR_BYTES = 1 << 20

# Below the 4 MiB that gRPC's clients take unless told otherwise, tokens of a chunk or two included.
_KEYS_PER_MESSAGE, _MESSAGE_WEIGHT = 4096, 1 << 20

# Dividing logits by less overflows float32; vLLM draws the same line.
_GREEDY_BELOW = 1e-5

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}

_POOL_TASKS = {
    common_pb2.POOL_TASK_EMBED: PoolTask.EMBED,
    common_pb2.POOL_TASK_CLASSIFY: PoolTask.CLASSIFY,
    common_pb2.POOL_TASK_SCORE: PoolTask.SCORE,
}
_POOL_TASK_NUMBERS = {task: number for number, task in _POOL_TASKS.items()}

# SamplingParams fields that need the worker's help, and the value at which each is off.
_WORKER_FIELDS: dict[str, object] = {
    "temperature": None, "top_p": None, "top_k": 0, "min_p": None, "seed": None, "min_tokens": 0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "logprobs": None, "prompt_logprobs": None,
}  # fmt: skip
_WORKER_COLLECTIONS = ("logit_bias", "allowed_token_ids", "bad_words")


def check_salt(cache_salt: str) -> None:
    """Refuses a salt that no client needs and every key would be made of.

    Raises:
        InvalidArgument: if it is too long.
    """
    if len(cache_salt.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"cache_salt is longer than {MAX_NAME_BYTES} bytes", param="cache_salt")


def submission_from_proto(request: inference_pb2.GenerateRequest) -> Submission:
    """Validates a request as far as that is possible without knowing the model.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
    """
    _check_common(request)
    if request.lora_name:
        raise NotFound(f"no adapter is called {request.lora_name!r}", param="lora_name")
    sampling = request.sampling
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidArgument("max_tokens must be at least 1", param="max_tokens")
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_SEQUENCES:
        raise InvalidArgument(f"n must be between 1 and {MAX_SEQUENCES}, not {n}", param="n")
    return Submission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=_sampling_from_proto(sampling),
        max_tokens=max_tokens,
        n=n,
        resumed=_resumed_from_proto(request.resumed, n),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        sampling_fields=_set_fields(sampling),
    )


def _resumed_from_proto(resumed: Sequence[inference_pb2.ResumedSequence], n: int) -> tuple[Resumed, ...]:
    if not resumed:
        return ()
    numbers = {one.sequence for one in resumed}
    if len(numbers) < len(resumed) or max(numbers) >= n:
        raise InvalidArgument(f"resumed must name each sequence below n={n} at most once", param="resumed")
    if sum(one.finished for one in resumed) == n:
        raise InvalidArgument("all sequences have finished already; nothing is left to run", param="resumed")
    return tuple(Resumed(one.sequence, tuple(one.token_ids), one.finished) for one in resumed)


def pool_submission_from_proto(request: inference_pb2.PoolRequest) -> PoolSubmission:
    """The same for a pooling request.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
    """
    _check_common(request)
    task = _POOL_TASKS.get(request.task or common_pb2.POOL_TASK_EMBED)
    if task is None:
        raise InvalidArgument(f"task {request.task} is not known; send POOL_TASK_EMBED", param="task")
    return PoolSubmission(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_token_ids=tuple(request.prompt_token_ids),
        pooling=Pooling(task, request.normalize if request.HasField("normalize") else None),
        priority=request.priority,
        tenant=request.tenant,
    )


def _check_common(request: inference_pb2.GenerateRequest | inference_pb2.PoolRequest) -> None:
    if not request.prompt_token_ids:
        raise InvalidArgument("the prompt is empty; send at least one token", param="prompt_token_ids")
    if len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidArgument(f"request_id is longer than {MAX_REQUEST_ID_BYTES} bytes", param="request_id")
    if len(request.tenant.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"tenant is longer than {MAX_NAME_BYTES} bytes", param="tenant")
    check_salt(getattr(request, "cache_salt", ""))


def pool_tasks_from_proto(description: worker_pb2.DescribeResponse) -> frozenset[PoolTask]:
    """What a pooling model's results are for; empty for a model that generates."""
    return frozenset(_POOL_TASKS[task] for task in description.pool_tasks if task in _POOL_TASKS)


def pooled_to_proto(event: Event) -> inference_pb2.PoolResponse:
    """A pooling request's result for a client."""
    return inference_pb2.PoolResponse(
        request_id=event.request_id,
        values=event.pooled,
        shape=[len(event.pooled)],
        num_prompt_tokens=event.num_prompt_tokens,
    )


def _sampling_from_proto(sampling: common_pb2.SamplingParams) -> SamplingParams:
    temperature = _bounded(sampling, "temperature", 1.0, 0.0, 100.0)
    if temperature < _GREEDY_BELOW:
        temperature = 0.0
    top_p = _bounded(sampling, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise InvalidArgument("top_p must be above 0 and at most 1, not 0", param="top_p")
    repetition_penalty = _bounded(sampling, "repetition_penalty", 1.0, 0.0, MAX_REPETITION_PENALTY)
    if repetition_penalty == 0:
        raise InvalidArgument("repetition_penalty must be above 0, not 0", param="repetition_penalty")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k,
        min_p=_bounded(sampling, "min_p", 0.0, 0.0, 1.0),
        # Drawn once: a replay after a lost worker must continue with the same random numbers.
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset(_few(sampling, "stop_token_ids", MAX_STOP_TOKEN_IDS)),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        min_tokens=sampling.min_tokens,
        presence_penalty=_in_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        frequency_penalty=_in_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        repetition_penalty=repetition_penalty,
        logit_bias=tuple(
            (token, _in_range("logit_bias", bias, -100.0, 100.0))
            for token, bias in _few(sampling, "logit_bias", MAX_LOGIT_BIASES).items()
        ),
        allowed_token_ids=tuple(sorted(set(_few(sampling, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)))),
        bad_words=_bad_words_from_proto(_few(sampling, "bad_words", MAX_BAD_WORDS)),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        grammar=_grammar_from_proto(sampling.structured_output)
        if sampling.HasField("structured_output")
        else None,
    )


def _few(sampling: common_pb2.SamplingParams, name: str, most: int) -> Any:
    values = getattr(sampling, name)
    if len(values) > most:
        raise InvalidArgument(f"{name} takes at most {most} entries, got {len(values)}", param=name)
    return values


def _bad_words_from_proto(words: Sequence[common_pb2.TokenSequence]) -> tuple[tuple[int, ...], ...]:
    lengths = [len(word.token_ids) for word in words]
    if lengths and not 1 <= min(lengths) <= max(lengths) <= MAX_BAD_WORD_TOKENS:
        raise InvalidArgument(
            f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens", param="bad_words"
        )
    return tuple(tuple(word.token_ids) for word in words)


def _grammar_from_proto(structured: common_pb2.StructuredOutput) -> Grammar:
    kind = structured.WhichOneof("spec")
    if kind is None or not structured.ByteSize():
        raise InvalidArgument(
            "structured_output is empty; set json_schema, json_object, regex, grammar, choice or structural_tag",
            param="structured_output",
        )
    if structured.ByteSize() > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            f"{kind} has {structured.ByteSize()} bytes; at most {MAX_GRAMMAR_BYTES} are taken",
            param="structured_output",
        )
    return Grammar(structured.SerializeToString(deterministic=True))


def grammar_to_proto(grammar: Grammar) -> common_pb2.StructuredOutput:
    """What an output must match, for a worker."""
    return common_pb2.StructuredOutput.FromString(grammar.serialized)


def _bounded(
    sampling: common_pb2.SamplingParams, name: str, default: float, low: float, high: float
) -> float:
    return _in_range(name, float(getattr(sampling, name)) if sampling.HasField(name) else default, low, high)  # type: ignore[arg-type]


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low:g} and {high:g}, not {value:g}", param=name)
    return value


def _set_fields(sampling: common_pb2.SamplingParams) -> frozenset[str]:
    """Names of the parameters that ask something of the worker."""
    fields = {
        name
        for name, off in _WORKER_FIELDS.items()
        if (sampling.HasField(name) if off is None or name == "repetition_penalty" else True)  # type: ignore[arg-type]
        and getattr(sampling, name) != off
    }
    fields.update(name for name in _WORKER_COLLECTIONS if getattr(sampling, name))
    if sampling.HasField("structured_output"):
        fields.add("structured_output")
    return frozenset(fields)


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


def limits_from_proto(description: worker_pb2.DescribeResponse) -> DeviceLimits:
    """What a worker can run."""
    return DeviceLimits(
        max_context=description.model.max_model_len,
        block_size_multiple=max(1, description.block_size_multiple),
        max_batch=description.max_batch,
        max_chunk=description.max_chunk,
    )


_GROUP_KINDS = {
    common_pb2.KV_GROUP_KIND_FULL: GroupKind.FULL,
    common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW: GroupKind.IN_PLACE_WINDOW,
    common_pb2.KV_GROUP_KIND_PAGED_WINDOW: GroupKind.PAGED_WINDOW,
}


def groups_from_proto(description: worker_pb2.DescribeResponse) -> tuple[KvGroup, ...]:
    """How a model's layers use KV memory, by group id.

    Raises:
        ConfigurationRefused: for a kind that this scheduler does not know, or ids that are not 0, 1, 2, ...
    """
    groups = []
    for position, group in enumerate(description.kv_groups):
        kind = _GROUP_KINDS.get(group.kind)
        if kind is None or group.group_id != position:
            raise ConfigurationRefused(
                f"{description.model.source} describes KV group {group.group_id} of kind {group.kind} at place {position}, "
                "which this scheduler does not know; run the same release on both"
            )
        groups.append(KvGroup(kind, group.window))
    return tuple(groups)


def configure_to_proto(
    geometry: Geometry, num_blocks: Sequence[int], windows_kept_per_slot: int
) -> worker_pb2.ConfigureRequest:
    """A geometry for a worker; ``num_blocks`` per group, or empty for as many as its memory allows."""
    return worker_pb2.ConfigureRequest(
        max_model_len=geometry.max_model_len,
        max_num_seqs=geometry.max_num_seqs,
        chunk=geometry.chunk,
        block_size=geometry.block_size,
        decode_buckets=geometry.buckets,
        num_blocks=num_blocks,
        windows_kept_per_slot=windows_kept_per_slot,
    )


def configure_pool_to_proto(shapes: Sequence[PoolShape]) -> worker_pb2.ConfigureRequest:
    """The static shapes for a worker of a pooling model."""
    return worker_pb2.ConfigureRequest(
        max_model_len=max(shape.prompt_len for shape in shapes),
        pool_shapes=[_shape_to_proto(shape) for shape in shapes],
    )


def _shape_to_proto(shape: PoolShape) -> common_pb2.GraphSignature:
    return common_pb2.GraphSignature(
        kind=common_pb2.GRAPH_KIND_POOL, batch=shape.batch, query_len=shape.prompt_len
    )


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """A plan for a worker."""
    message = worker_pb2.StepPlan(
        step=plan.step,
        release=plan.release,
        copies=[_copy_to_proto(copy) for copy in plan.copies],
        admit=[_admission_to_proto(admission) for admission in plan.admit],
        grow=[_growth_to_proto(growth) for growth in plan.grow],
    )
    match plan.work:
        case Prefill(slot, start, num_tokens, sample):
            message.prefill.slot = slot
            message.prefill.start = start
            message.prefill.num_tokens = num_tokens
            message.prefill.sample = sample
        case Decode(slots, positions, bucket, lease):
            message.decode.slots.extend(slots)
            message.decode.positions.extend(positions)
            message.decode.bucket = bucket
            message.decode.lease_steps = lease
        case Pool(slots, shape):
            message.pool.slots.extend(slots)
            message.pool.shape.CopyFrom(_shape_to_proto(shape))
        case None:
            pass
    return message


def _copy_to_proto(copy: BlockCopy) -> worker_pb2.BlockCopy:
    return worker_pb2.BlockCopy(
        group_id=copy.group_id,
        source_block=copy.source_block,
        target_block=copy.target_block,
        num_tokens=copy.num_tokens,
    )


def _growth_to_proto(growth: Growth) -> worker_pb2.SlotBlocks:
    return worker_pb2.SlotBlocks(slot=growth.slot, group_id=growth.group_id, block_ids=growth.block_ids)


def _admission_to_proto(admission: Admission) -> worker_pb2.SlotRequest:
    if admission.pooling is not None:
        return worker_pb2.SlotRequest(
            slot=admission.slot,
            request_id=admission.request_id,
            token_ids=admission.token_ids,
            num_prompt_tokens=admission.num_prompt_tokens,
            pooling=common_pb2.PoolingParams(
                task=_POOL_TASK_NUMBERS[admission.pooling.task], normalize=admission.pooling.normalize
            ),
        )
    return worker_pb2.SlotRequest(
        slot=admission.slot,
        request_id=admission.request_id,
        sequence=admission.sequence,
        token_ids=admission.token_ids,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed,
        sampling=_sampling_to_proto(admission.sampling),
        blocks=[
            worker_pb2.SlotBlocks(slot=admission.slot, group_id=group_id, block_ids=block_ids)
            for group_id, block_ids in enumerate(admission.block_ids)
        ],
    )


def _sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_output=grammar_to_proto(sampling.grammar) if sampling.grammar else None,
    )
    if sampling.repetition_penalty != 1.0:
        message.repetition_penalty = sampling.repetition_penalty
    return message


def result_from_proto(result: worker_pb2.StepResult) -> StepResult:
    """A worker's answer."""
    return StepResult(
        step=result.step,
        token_ids=result.token_ids,
        outputs=tuple(_output_from_proto(output) for output in result.outputs),
        error=from_proto(result.error) if result.HasField("error") else None,
        last=result.last,
    )


def _output_from_proto(output: worker_pb2.SlotOutput) -> SlotOutput:
    return SlotOutput(
        slot=output.slot,
        token_ids=tuple(output.token_ids),
        logprobs=_logprobs_from_proto(output.logprobs),
        error=from_proto(output.error) if output.HasField("error") else None,
        pooled=output.pooled,
        prompt_logprobs=_logprobs_from_proto(output.prompt_logprobs),
    )


def _logprobs_from_proto(entries: Sequence[common_pb2.TokenLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(entry.logprob, entry.rank, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
        for entry in entries
    )


def kv_batch_to_proto(replica_id: str, batch: Batch, granule: int) -> Iterator[inference_pb2.KvEventBatch]:
    """Changes of one replica's prefix cache for a watcher, in messages that any client takes."""
    part = inference_pb2.KvEventBatch(sequence=batch.sequence, replica_id=replica_id, snapshot=batch.snapshot)
    size = 0
    for event in itertools.chain.from_iterable(_pieces(event, granule) for event in batch.events):
        if part.events and size + _weight(event) > _MESSAGE_WEIGHT:
            part.more = True
            yield part
            part, size = inference_pb2.KvEventBatch(sequence=batch.sequence, replica_id=replica_id), 0
        part.events.append(_kv_event_to_proto(event, granule))
        size += _weight(event)
    yield part


def _weight(event: KvEvent) -> int:
    """About the bytes of an event on the wire."""
    if isinstance(event, Cleared):
        return 2
    return 100 + 34 * len(event.keys) + (5 * len(event.token_ids) if isinstance(event, Stored) else 0)


def _pieces(event: KvEvent, granule: int) -> Iterator[KvEvent]:
    """The same event in pieces of a bounded number of keys, each piece the continuation of the one before."""
    match event:
        case Stored(group_id, keys, parent, token_ids) if len(keys) > _KEYS_PER_MESSAGE:
            for start in range(0, len(keys), _KEYS_PER_MESSAGE):
                end = start + _KEYS_PER_MESSAGE
                before = keys[start - 1] if start and parent is not None else parent
                yield Stored(group_id, keys[start:end], before, token_ids[start * granule : end * granule])
        case Removed(group_id, keys) if len(keys) > _KEYS_PER_MESSAGE:
            for start in range(0, len(keys), _KEYS_PER_MESSAGE):
                yield Removed(group_id, keys[start : start + _KEYS_PER_MESSAGE])
        case _:
            yield event


def _kv_event_to_proto(event: KvEvent, granule: int) -> inference_pb2.KvEvent:
    match event:
        case Stored(group_id, keys, parent, token_ids):
            stored = inference_pb2.KvStored(
                group_id=group_id,
                hashes=keys,
                parent_hash=parent or b"",
                token_ids=token_ids,
                tokens_per_hash=granule,
            )
            return inference_pb2.KvEvent(stored=stored)
        case Removed(group_id, keys):
            return inference_pb2.KvEvent(removed=inference_pb2.KvRemoved(group_id=group_id, hashes=keys))
        case _:
            return inference_pb2.KvEvent(cleared=inference_pb2.KvCleared())
