"""What passes between scheduler and worker: descriptions, configurations, plans, results."""

from collections.abc import Sequence

from protos.errors import ConfigurationRefused, from_proto
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.convert.sampling import sampling_to_proto
from scheduler_svc.replica.step_plan import (
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
from scheduler_svc.requests.request import Logprobs, PoolTask
from scheduler_svc.shapes.geometry import DeviceLimits, Geometry, GroupKind, KvGroup
from scheduler_svc.shapes.pool_shapes import PoolShape

_GROUP_KINDS = {
    common_pb2.KV_GROUP_KIND_FULL: GroupKind.FULL,
    common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW: GroupKind.IN_PLACE_WINDOW,
    common_pb2.KV_GROUP_KIND_PAGED_WINDOW: GroupKind.PAGED_WINDOW,
}

_POOL_TASKS = {
    PoolTask.EMBED: common_pb2.POOL_TASK_EMBED,
    PoolTask.CLASSIFY: common_pb2.POOL_TASK_CLASSIFY,
    PoolTask.SCORE: common_pb2.POOL_TASK_SCORE,
}


def limits_from_proto(description: worker_pb2.DescribeResponse) -> DeviceLimits:
    """What a worker can run."""
    return DeviceLimits(
        max_context=description.model.max_model_len,
        block_size_multiple=max(1, description.block_size_multiple),
        max_batch=description.max_batch,
        max_chunk=description.max_chunk,
    )


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
        admit=_admissions_to_proto(plan.admit),
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


def _admissions_to_proto(admissions: Sequence[Admission]) -> list[worker_pb2.SlotRequest]:
    # The sequences of one request share their parameters, which may be long; each object is translated once.
    samplings: dict[int, common_pb2.SamplingParams] = {}
    messages = []
    for admission in admissions:
        sampling = samplings.get(id(admission.sampling))
        if sampling is None:
            sampling = samplings[id(admission.sampling)] = sampling_to_proto(admission.sampling)
        messages.append(_admission_to_proto(admission, sampling))
    return messages


def _admission_to_proto(admission: Admission, sampling: common_pb2.SamplingParams) -> worker_pb2.SlotRequest:
    if admission.pooling is not None:
        return worker_pb2.SlotRequest(
            slot=admission.slot,
            request_id=admission.request_id,
            token_ids=admission.token_ids,
            num_prompt_tokens=admission.num_prompt_tokens,
            pooling=common_pb2.PoolingParams(
                task=_POOL_TASKS[admission.pooling.task], normalize=admission.pooling.normalize
            ),
        )
    return worker_pb2.SlotRequest(
        slot=admission.slot,
        request_id=admission.request_id,
        sequence=admission.sequence,
        token_ids=admission.token_ids,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed,
        sampling=sampling,
        blocks=[
            worker_pb2.SlotBlocks(slot=admission.slot, group_id=group_id, block_ids=block_ids)
            for group_id, block_ids in enumerate(admission.block_ids)
        ],
    )


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
