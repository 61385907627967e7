"""A worker's description of its model and device, and its configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from protos.errors import ConfigurationRefused
from protos.step_messages import shape_to_proto
from protos.steps import PoolShape, kind_from_proto
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.kv.cache import ChunkStarts
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup, ShapeConfig

_CHUNK_STARTS: "Final[dict[int, ChunkStarts]]" = {
    worker_pb2.CHUNK_STARTS_ANYWHERE: "anywhere",
    worker_pb2.CHUNK_STARTS_EXACT: "exact",
}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The facts about a model that the scheduler uses."""

    source: str
    """Where the worker found the model: a hub id or the name of a folder."""
    architecture: str
    vocab_size: int
    max_model_len: int
    """The longest context that the model was made for, tokens."""
    dtype: str
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence."""
    pool_tasks: frozenset[int]
    """The tasks that a pooling model's results serve; empty for a generating model."""
    pooled_size: int
    """Values of one pooling result; 0 for a generating model."""
    message: common_pb2.ModelInfo
    """The worker's message; its other fields pass unopened to clients."""
    weights_digest: str = ""
    """Hash of the weights, once the worker is configured; empty if the worker does not know it."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """How many LoRA adapters a worker holds."""

    max_loras: int
    """Adapter slots on the device."""
    max_rank: int
    max_cpu_loras: int
    """Adapters in the host's memory, those on the device included."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker's answer to Describe."""

    model: ModelDescription
    device: str
    """The name of its kind."""
    limits: DeviceLimits
    groups: tuple[KvGroup, ...]
    """KV groups of the model by id."""
    default_max_num_seqs: int
    """Slots that the device usually runs with."""
    default_chunk: int
    """Tokens of a prefill chunk that the device usually runs with."""
    default_block_size: int
    """Tokens of a KV block that the device usually runs with."""
    prefill_buckets: bool
    """Whether the worker takes prefill chunks of several compiled sizes."""
    max_lease_steps: int
    """Decode steps that one plan may allow."""
    packs_texts: bool
    """Whether a pooling step may hold several texts, each of any length."""
    max_logprobs: int
    """Most log-probabilities per token."""
    sampling_fields: frozenset[str]
    """Names of the sampling parameters that the worker honours."""
    lora: LoraLimits | None
    """How many LoRA adapters the worker holds; None if it runs none."""
    copies_blocks: bool
    """Whether the worker can copy blocks: first its expectation, and once it is configured its answer."""
    chunk_starts: ChunkStarts = "whole"
    """Where chunks may begin; known once the worker is configured."""
    pipeline_stages: int = 1
    """Ranges of layers that work on different steps at the same time. The registration of the replica's ranks
    says how many; the worker that describes the model is the first."""
    tensor_parallel: int = 1
    """Ranks that share each stage."""


def description_from_proto(message: worker_pb2.DescribeResponse) -> WorkerDescription:
    """Converts a worker's description.

    Raises:
        ConfigurationRefused: the worker describes a KV group that this release does not know.
    """
    model = common_pb2.ModelInfo()
    model.CopyFrom(message.model)
    model.pool_tasks[:] = message.pool_tasks
    return WorkerDescription(
        model=ModelDescription(
            source=model.source,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            eos_token_ids=frozenset(model.eos_token_ids),
            pool_tasks=frozenset(message.pool_tasks),
            pooled_size=model.pooled_size,
            message=model,
        ),
        device=message.device,
        limits=limits_from_proto(message),
        groups=groups_from_proto(message),
        default_max_num_seqs=message.default_max_num_seqs,
        default_chunk=message.default_chunk,
        default_block_size=message.default_block_size,
        prefill_buckets=message.prefill_buckets,
        max_lease_steps=max(1, message.max_lease_steps),
        packs_texts=message.packs_texts,
        max_logprobs=message.max_logprobs,
        sampling_fields=frozenset(message.sampling_fields),
        lora=_lora_from_proto(message),
        copies_blocks=_copies_blocks(message.block_copies),
    )


def _lora_from_proto(message: worker_pb2.DescribeResponse) -> LoraLimits | None:
    if not message.HasField("lora"):
        return None
    lora = message.lora
    return LoraLimits(lora.max_loras, lora.max_rank, max(lora.max_loras, lora.max_cpu_loras))


def configured_description(
    description: WorkerDescription, answers: Sequence[worker_pb2.ConfigureReady]
) -> WorkerDescription:
    """Returns the description of a replica whose ranks, all configured now, answered this."""
    starts = min(max(answer.chunk_starts, worker_pb2.CHUNK_STARTS_WHOLE) for answer in answers)
    return replace(
        description,
        model=replace(description.model, weights_digest=answers[0].weights_digest),
        copies_blocks=all(_copies_blocks(answer.block_copies) for answer in answers),
        chunk_starts=_CHUNK_STARTS.get(starts, "whole"),
    )


def _copies_blocks(value: "worker_pb2.BlockCopies.ValueType") -> bool:
    return value in (worker_pb2.BLOCK_COPIES_TENSORS, worker_pb2.BLOCK_COPIES_RUNTIME)


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
    shapes: ShapeConfig, num_blocks: Sequence[int], windows_kept_per_slot: int
) -> worker_pb2.ConfigureRequest:
    """Returns a worker's configuration; an empty ``num_blocks`` asks for as many as its memory allows."""
    return worker_pb2.ConfigureRequest(
        max_model_len=shapes.max_model_len,
        max_num_seqs=shapes.max_num_seqs,
        chunk=shapes.chunk,
        prefill_buckets=shapes.chunk_sizes,
        block_size=shapes.block_size,
        decode_buckets=shapes.buckets,
        num_blocks=num_blocks,
        windows_kept_per_slot=windows_kept_per_slot,
    )


def configure_pool_to_proto(shapes: Sequence[PoolShape]) -> worker_pb2.ConfigureRequest:
    """Returns the configuration of a worker of a pooling model."""
    return worker_pb2.ConfigureRequest(
        max_model_len=max(shape.prompt_len for shape in shapes),
        pool_shapes=[shape_to_proto(shape) for shape in shapes],
    )
