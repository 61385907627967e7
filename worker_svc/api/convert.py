"""Between protocol messages and the worker's own types: the only module that knows both."""

import json
from collections.abc import Mapping, Sequence

from protos.errors import InvalidArgument, TriptychError
from protos.logs import get_logger
from protos.triptych.v1 import common_pb2, worker_pb2
from protos.wire import SCHEMA_REVISION
from worker_svc.execution.worker import Ready, Worker
from worker_svc.grammars.spec import Spec
from worker_svc.model_files.loader import display_name
from worker_svc.plans.geometry import Geometry, GroupKind, PoolGeometry, PoolShape
from worker_svc.plans.phases import Phase
from worker_svc.plans.step_plan import (
    Admission,
    BlockCopy,
    DecodeWork,
    Growth,
    Logprobs,
    Output,
    Plan,
    PoolWork,
    PrefillWork,
    Sampling,
)
from worker_svc.sampling.logprobs import NUM_TOP

# Fields of SamplingParams that change what is sampled here. Those that only say when to stop are the scheduler's.
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
)  # fmt: skip
# Of them, what a model's authors may recommend.
_RECOMMENDED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Rows and tokens beyond which a static graph is a mistake in a setting.
_MAX_BATCH, _MAX_CHUNK = 4096, 65536
# Each leased step is a message that the scheduler may be slow to take.
_MAX_LEASE = 1000

_GROUP_KINDS = {
    GroupKind.FULL: common_pb2.KV_GROUP_KIND_FULL,
    GroupKind.PAGED_WINDOW: common_pb2.KV_GROUP_KIND_PAGED_WINDOW,
    GroupKind.IN_PLACE_WINDOW: common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW,
}
_PHASES: dict[Phase, worker_pb2.ConfigureProgress.Phase.ValueType] = {
    "load": worker_pb2.ConfigureProgress.PHASE_LOAD,
    "allocate": worker_pb2.ConfigureProgress.PHASE_ALLOCATE,
    "compile": worker_pb2.ConfigureProgress.PHASE_COMPILE,
    "warm_up": worker_pb2.ConfigureProgress.PHASE_WARM_UP,
}


def description_to_proto(worker: Worker, *, worker_id: str, model: str) -> worker_pb2.DescribeResponse:
    """What a prepared worker can run. ``model`` is the setting that named the model."""
    description, device = worker.description, worker.device
    pooling = description.pooling
    return worker_pb2.DescribeResponse(
        schema_revision=SCHEMA_REVISION,
        worker_id=worker_id,
        device=device.name,
        device_name=device.product_name(),
        memory_bytes=device.free_memory(),
        model=common_pb2.ModelInfo(
            source=display_name(model),
            architecture=description.architecture,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            eos_token_ids=description.eos_token_ids,
            dtype=str(description.dtype).removeprefix("torch."),
            default_sampling=None if pooling else _served_defaults(description.default_sampling),
            pooled_size=pooling.size if pooling else 0,
        ),
        kv_groups=[
            common_pb2.KvGroup(
                group_id=group.group_id,
                kind=_GROUP_KINDS[group.kind],
                window=group.window,
                num_layers=len(group.layers),
                bytes_per_token=group.bytes_per_token,
            )
            for group in worker.groups
        ],
        block_size_multiple=device.block_size_multiple,
        max_batch=_MAX_BATCH,
        max_chunk=_MAX_CHUNK,
        default_block_size=device.default_block_size,
        default_chunk=device.default_chunk,
        default_max_num_seqs=device.default_max_num_seqs,
        graph_kinds=[common_pb2.GRAPH_KIND_POOL]
        if pooling
        else [common_pb2.GRAPH_KIND_PREFILL, common_pb2.GRAPH_KIND_DECODE],
        sampling_fields=_sampling_fields(worker),
        max_logprobs=NUM_TOP,
        max_lease_steps=1 if pooling else _MAX_LEASE,
        pool_tasks=[common_pb2.POOL_TASK_EMBED] if pooling else [],
    )


def _sampling_fields(worker: Worker) -> tuple[str, ...]:
    if worker.description.pooling:
        return ()
    return (*_SAMPLING_FIELDS, "structured_output") if worker.grammars else _SAMPLING_FIELDS


def spec_from_proto(structured: common_pb2.StructuredOutput) -> Spec:
    """What an output must match; unchecked.

    Raises:
        InvalidArgument: if it says nothing.
    """
    match structured.WhichOneof("spec"):
        case "json_object":
            return Spec("json_object")
        case "choice":
            return Spec("choice", json.dumps(list(structured.choice.values)))
        case "json_schema" | "regex" | "grammar" | "structural_tag" as kind:
            return Spec(kind, getattr(structured, kind))
        case _:
            raise InvalidArgument(
                "structured_output is empty; set json_schema, json_object, regex, grammar, choice or structural_tag",
                param="structured_output",
            )


def _served_defaults(recommended: Mapping[str, float]) -> common_pb2.SamplingParams:
    """What a model's authors recommend, as far as it is served: gateways put it into every request."""
    defaults = common_pb2.SamplingParams()
    for name, value in recommended.items():
        if name not in _RECOMMENDED_FIELDS or value < 0:  # some write top_k -1 for "off"
            get_logger().warning("recommended_sampling_ignored", name=name, value=value)
            continue
        setattr(defaults, name, int(value) if name == "top_k" else float(value))
    return defaults


def geometry_from_proto(request: worker_pb2.ConfigureRequest) -> Geometry | PoolGeometry:
    """The sizes that a scheduler asks for; unchecked."""
    if request.pool_shapes:
        return PoolGeometry(tuple(PoolShape(shape.batch, shape.query_len) for shape in request.pool_shapes))
    return Geometry(
        max_model_len=request.max_model_len,
        max_num_seqs=request.max_num_seqs,
        chunk=request.chunk,
        block_size=request.block_size,
        decode_buckets=tuple(request.decode_buckets),
        num_blocks=tuple(request.num_blocks),
        windows_kept_per_slot=request.windows_kept_per_slot,
    )


def progress_to_proto(phase: Phase, done: int, total: int, message: str) -> worker_pb2.ConfigureEvent:
    """One event of a Configure stream."""
    return worker_pb2.ConfigureEvent(
        progress=worker_pb2.ConfigureProgress(phase=_PHASES[phase], done=done, total=total, message=message)
    )


def ready_to_proto(ready: Ready) -> worker_pb2.ConfigureEvent:
    """The last event of a Configure stream."""
    geometry = ready.geometry
    if isinstance(geometry, PoolGeometry):
        graphs = [
            common_pb2.GraphSignature(
                kind=common_pb2.GRAPH_KIND_POOL, batch=shape.batch, query_len=shape.prompt_len
            )
            for shape in geometry.shapes
        ]
        return worker_pb2.ConfigureEvent(
            ready=worker_pb2.ConfigureReady(graphs=graphs, phase_seconds=dict(ready.phase_seconds.items()))
        )
    prefill = common_pb2.GraphSignature(kind=common_pb2.GRAPH_KIND_PREFILL, batch=1, query_len=geometry.chunk)
    decode = [
        common_pb2.GraphSignature(kind=common_pb2.GRAPH_KIND_DECODE, batch=bucket, query_len=1)
        for bucket in geometry.decode_buckets
    ]
    return worker_pb2.ConfigureEvent(
        ready=worker_pb2.ConfigureReady(
            num_blocks=geometry.num_blocks,
            bytes_per_block=ready.bytes_per_block,
            graphs=[prefill, *decode],
            phase_seconds=dict(ready.phase_seconds.items()),
        )
    )


def plan_from_proto(plan: worker_pb2.StepPlan) -> Plan:
    """One step; unchecked against the worker's state."""
    work: PrefillWork | DecodeWork | PoolWork | None = None
    match plan.WhichOneof("work"):
        case "prefill":
            prefill = plan.prefill
            work = PrefillWork(prefill.slot, prefill.start, prefill.num_tokens, prefill.sample)
        case "decode":
            decode = plan.decode
            work = DecodeWork(
                tuple(decode.slots), tuple(decode.positions), decode.bucket, max(1, decode.lease_steps)
            )
        case "pool":
            shape = plan.pool.shape
            work = PoolWork(tuple(plan.pool.slots), PoolShape(shape.batch, shape.query_len))
        case _:
            pass
    return Plan(
        step=plan.step,
        release=tuple(plan.release),
        copies=tuple(
            BlockCopy(copy.group_id, copy.source_block, copy.target_block, copy.num_tokens)
            for copy in plan.copies
        ),
        admit=tuple(_admission_from_proto(request) for request in plan.admit),
        grow=tuple(Growth(growth.slot, growth.group_id, tuple(growth.block_ids)) for growth in plan.grow),
        work=work,
    )


def result_to_proto(
    plan: Plan, outputs: Sequence[Output], execute_us: int, *, lease_index: int = 0, last: bool = True
) -> worker_pb2.StepResult:
    """A step that went well; in the compact form if one token for each slot of the plan's work is all there is to say."""
    step = plan.step
    if is_compact(plan, outputs):
        tokens = [output.token_ids[0] for output in outputs]
        return worker_pb2.StepResult(
            step=step, lease_index=lease_index, last=last, token_ids=tokens, execute_us=execute_us
        )
    return worker_pb2.StepResult(
        step=step,
        lease_index=lease_index,
        last=last,
        outputs=[
            worker_pb2.SlotOutput(
                slot=output.slot,
                token_ids=output.token_ids,
                logprobs=[_logprobs_to_proto(logprobs) for logprobs in output.logprobs],
                error=output.error.to_proto() if output.error else None,
                pooled=output.pooled,
                prompt_logprobs=[_logprobs_to_proto(logprobs) for logprobs in output.prompt_logprobs],
            )
            for output in outputs
        ],
        execute_us=execute_us,
    )


def failure_to_proto(
    step: int, error: TriptychError, execute_us: int, *, lease_index: int = 0
) -> worker_pb2.StepResult:
    """A step that failed as a whole; nothing more is run of its plan."""
    return worker_pb2.StepResult(
        step=step, lease_index=lease_index, last=True, error=error.to_proto(), execute_us=execute_us
    )


def is_compact(plan: Plan, outputs: Sequence[Output]) -> bool:
    """Whether one token for each slot of the plan's work, in its order, is all that came of it."""
    if plan.work is None or isinstance(plan.work, PoolWork):
        return False
    slots = (plan.work.slot,) if isinstance(plan.work, PrefillWork) else plan.work.slots
    return len(outputs) == len(slots) and all(
        output.slot == slot
        and len(output.token_ids) == 1
        and not (output.logprobs or output.prompt_logprobs)
        and output.error is None
        for slot, output in zip(slots, outputs, strict=True)
    )


def _admission_from_proto(request: worker_pb2.SlotRequest) -> Admission:
    sampling = request.sampling
    return Admission(
        slot=request.slot,
        token_ids=tuple(request.token_ids),
        num_computed_tokens=request.num_computed_tokens,
        sampling=Sampling(
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            logprobs=min(sampling.logprobs, NUM_TOP) if sampling.HasField("logprobs") else None,
            prompt_logprobs=min(sampling.prompt_logprobs, NUM_TOP)
            if sampling.HasField("prompt_logprobs")
            else None,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty
            if sampling.HasField("repetition_penalty")
            else 1.0,
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=tuple(sampling.allowed_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sampling.stop_token_ids),
        ),
        blocks={blocks.group_id: tuple(blocks.block_ids) for blocks in request.blocks},
        request_id=request.request_id,
        sequence=request.sequence,
        num_prompt_tokens=request.num_prompt_tokens or None,
        structured=spec_from_proto(sampling.structured_output)
        if sampling.HasField("structured_output")
        else None,
        normalize=request.pooling.normalize if request.pooling.HasField("normalize") else None,
    )


def _logprobs_to_proto(logprobs: Logprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )
