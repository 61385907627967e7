"""Converts worker descriptions and configurations between protocol messages and the scheduler's types."""

from collections.abc import Sequence

from protos.errors import ConfigurationRefused
from protos.step_messages import shape_to_proto
from protos.steps import PoolShape, kind_from_proto
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.shapes.geometry import DeviceLimits, Geometry, KvGroup


def limits_from_proto(description: worker_pb2.DescribeResponse) -> DeviceLimits:
    """Reads the limits that a worker describes."""
    return DeviceLimits(
        max_context=description.model.max_model_len,
        block_size_multiple=max(1, description.block_size_multiple),
        max_batch=description.max_batch,
        max_chunk=description.max_chunk,
    )


def groups_from_proto(description: worker_pb2.DescribeResponse) -> tuple[KvGroup, ...]:
    """Reads a model's KV groups, by id.

    Raises:
        ConfigurationRefused: a kind is unknown, or the ids are not 0, 1, 2, ...
    """
    groups = []
    for position, group in enumerate(description.kv_groups):
        kind = kind_from_proto(group.kind)
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
    """Returns a worker's configuration; an empty ``num_blocks`` asks for as many as its memory allows."""
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
    """Returns the configuration of a worker of a pooling model."""
    return worker_pb2.ConfigureRequest(
        max_model_len=max(shape.prompt_len for shape in shapes),
        pool_shapes=[shape_to_proto(shape) for shape in shapes],
    )


def grammar_to_proto(grammar: Grammar) -> common_pb2.StructuredOutput:
    """Returns a grammar's message, for a worker to compile."""
    return common_pb2.StructuredOutput.FromString(grammar.serialized)
