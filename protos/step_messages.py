"""Translates step plans and results between :mod:`protos.steps` and the messages of ``worker.proto``."""

from collections.abc import Mapping, Sequence

from protos.errors import TriptychError, from_proto
from protos.limits import SLICE
from protos.steps import (
    Admission,
    BlockCopy,
    Decode,
    Growth,
    Pool,
    PoolShape,
    Prefill,
    SlotOutput,
    StepPlan,
    StepResult,
    Work,
    slots_of,
)
from protos.triptych.v1 import common_pb2, worker_pb2


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """Returns a plan's message."""
    message = worker_pb2.StepPlan(
        step=plan.step,
        release=plan.release,
        copies=[
            worker_pb2.BlockCopy(
                group_id=copy.group_id,
                source_block=copy.source_block,
                target_block=copy.target_block,
                num_tokens=copy.num_tokens,
            )
            for copy in plan.copies
        ],
        admit=[_admission_to_proto(admission) for admission in plan.admit],
        grow=[_blocks_to_proto(grown.slot, grown.group_id, grown.block_ids) for grown in plan.grow],
        interrupts=plan.interrupts,
    )
    match plan.work:
        case Prefill(slot, start, num_tokens, sample, bucket):
            message.prefill.slot = slot
            message.prefill.start = start
            message.prefill.num_tokens = num_tokens
            message.prefill.sample = sample
            message.prefill.bucket = bucket
        case Decode(slots, bucket, steps, steps_per_result):
            message.decode.slots.extend(slots)
            message.decode.bucket = bucket
            message.decode.steps = steps
            message.decode.steps_per_result = steps_per_result
        case Pool(slots, shape):
            message.pool.slots.extend(slots)
            message.pool.shape.CopyFrom(shape_to_proto(shape))
        case None:
            pass
    return message


def plan_from_proto(message: worker_pb2.StepPlan) -> StepPlan:
    """Reads a plan; the caller checks it against its state."""
    return StepPlan(
        step=message.step,
        work=_work_from_proto(message),
        release=tuple(message.release),
        copies=tuple(
            BlockCopy(copy.group_id, copy.source_block, copy.target_block, copy.num_tokens)
            for copy in message.copies
        ),
        admit=tuple(_admission_from_proto(request) for request in message.admit),
        grow=tuple(
            Growth(grown.slot, grown.group_id, tuple(grown.block_ids)) for grown in message.grow
        ),
        interrupts=message.interrupts,
    )  # fmt: skip


def shape_to_proto(shape: PoolShape) -> common_pb2.GraphSignature:
    """Returns the graph signature of a pooling shape."""
    return common_pb2.GraphSignature(
        kind=common_pb2.GRAPH_KIND_POOL,
        batch=shape.batch,
        query_len=shape.prompt_len,
        packed=shape.packed,
    )


def shape_from_proto(signature: common_pb2.GraphSignature) -> PoolShape:
    """Reads a pooling shape."""
    return PoolShape(prompt_len=signature.query_len, batch=signature.batch, packed=signature.packed)


def result_to_proto(plan: StepPlan, result: StepResult) -> worker_pb2.StepResult:
    """Returns a result's message; compact if a token per slot is the whole result."""
    message = worker_pb2.StepResult(
        step=result.step, last=result.last, num_steps=result.num_steps, execute_us=result.execute_us,
    )  # fmt: skip
    if result.report is not None:
        message.report.CopyFrom(result.report)
    if result.error is not None:
        message.error.CopyFrom(result.error.to_proto())
    elif token_ids := result.token_ids or one_token_each(plan.work, result.outputs):
        message.token_ids.extend(token_ids)
    else:
        message.outputs.extend(_output_to_proto(output) for output in result.outputs)
    return message


def result_from_proto(message: worker_pb2.StepResult) -> StepResult:
    """Reads a result."""
    return StepResult(
        step=message.step,
        token_ids=message.token_ids,
        outputs=tuple(_output_from_proto(output) for output in message.outputs) if message.outputs else (),
        error=_error_from_proto(message),
        last=message.last,
        num_steps=message.num_steps,
        execute_us=message.execute_us,
        report=message.report if message.HasField("report") else None,
    )


def one_token_each(work: Work | None, outputs: Sequence[SlotOutput]) -> Sequence[int]:
    """Returns the tokens if the outputs are only a token for each slot of the work, in its order."""
    if work is None or isinstance(work, Pool):
        return ()
    slots = slots_of(work)
    compact = len(outputs) == len(slots) and all(
        output.slot == slot
        and len(output.token_ids) == 1
        and not (output.logprobs or output.prompt_logprobs)
        and output.error is None
        for slot, output in zip(slots, outputs, strict=True)
    )
    return [output.token_ids[0] for output in outputs] if compact else ()


def _work_from_proto(message: worker_pb2.StepPlan) -> Work | None:
    match message.WhichOneof("work"):
        case "prefill":
            prefill = message.prefill
            return Prefill(prefill.slot, prefill.start, prefill.num_tokens, prefill.sample, prefill.bucket)
        case "decode":
            decode = message.decode
            steps, per_result = max(1, decode.steps), max(1, decode.steps_per_result)
            return Decode(tuple(decode.slots), decode.bucket, steps, per_result)
        case "pool":
            return Pool(tuple(message.pool.slots), shape_from_proto(message.pool.shape))
        case _:
            return None


def _blocks_to_proto(slot: int, group_id: int, block_ids: Sequence[int]) -> worker_pb2.SlotBlocks:
    return worker_pb2.SlotBlocks(slot=slot, group_id=group_id, block_ids=block_ids)


def _admission_to_proto(admission: Admission) -> worker_pb2.SlotRequest:
    pooling = admission.pooling
    message = worker_pb2.SlotRequest(
        slot=admission.slot,
        request_id=admission.request_id,
        sequence=admission.sequence,
        num_prompt_tokens=admission.prompt_len,
        num_computed_tokens=admission.num_computed_tokens,
        sampling=admission.sampling if pooling is None else None,
        blocks=[
            _blocks_to_proto(admission.slot, group_id, block_ids)
            for group_id, block_ids in admission.blocks.items()
        ],
        pooling=pooling,
        adapter_id=admission.adapter_id,
        traceparent=admission.traceparent,
    )
    for start in range(0, len(admission.token_ids), SLICE):  # other threads run after each slice
        message.token_ids.extend(admission.token_ids[start : start + SLICE])
    return message


def _admission_from_proto(request: worker_pb2.SlotRequest) -> Admission:
    blocks: Mapping[int, Sequence[int]] = {
        blocks.group_id: tuple(blocks.block_ids) for blocks in request.blocks
    }
    return Admission(
        slot=request.slot,
        token_ids=tuple(request.token_ids),
        num_computed_tokens=request.num_computed_tokens,
        sampling=request.sampling,
        blocks=blocks,
        request_id=request.request_id,
        sequence=request.sequence,
        num_prompt_tokens=request.num_prompt_tokens or None,
        pooling=request.pooling if request.HasField("pooling") else None,
        adapter_id=request.adapter_id,
        traceparent=request.traceparent,
    )


def _output_to_proto(output: SlotOutput) -> worker_pb2.SlotOutput:
    return worker_pb2.SlotOutput(
        slot=output.slot,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        error=output.error.to_proto() if output.error else None,
        pooled=output.pooled,
        prompt_logprobs=output.prompt_logprobs,
    )


def _output_from_proto(output: worker_pb2.SlotOutput) -> SlotOutput:
    return SlotOutput(
        slot=output.slot,
        token_ids=tuple(output.token_ids),
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        error=_error_from_proto(output),
        pooled=output.pooled,
    )


def _error_from_proto(message: worker_pb2.StepResult | worker_pb2.SlotOutput) -> TriptychError | None:
    return from_proto(message.error) if message.HasField("error") else None
