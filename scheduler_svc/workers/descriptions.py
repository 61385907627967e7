"""A worker's description of its model and device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protos.errors import ConfigurationRefused
from protos.steps import kind_from_proto
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.kv.cache import ChunkStarts
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup

_CHUNK_STARTS: "Final[dict[int, ChunkStarts]]" = {
    worker_pb2.CHUNK_STARTS_ANYWHERE: "anywhere",
    worker_pb2.CHUNK_STARTS_EXACT: "exact",
}


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Most LoRA adapters of a worker."""

    max_loras: int
    """Adapter slots on the device."""
    max_rank: int
    max_cpu_loras: int
    """Adapters in the host's memory, including those on the device."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker's answer to Describe."""

    model: common_pb2.ModelInfo
    """The worker's message, with its pool tasks; the deployment completes it for clients."""
    device: str
    """The name of its kind."""
    limits: DeviceLimits
    groups: tuple[KvGroup, ...]
    """KV groups of the model by id."""
    default_max_num_seqs: int
    """Default slots of the device."""
    default_chunk: int
    """Default tokens of a prefill chunk."""
    default_block_size: int
    """Default tokens of a KV block."""
    prefill_buckets: bool
    """Whether the worker takes prefill chunks of several compiled sizes."""
    max_lease_steps: int
    """Most decode steps of a plan."""
    packs_texts: bool
    """Whether a pooling step may hold several texts, each of any length."""
    max_logprobs: int
    """Most log-probabilities per token."""
    sampling_fields: frozenset[str]
    """Names of the sampling parameters honoured by the worker."""
    lora: LoraLimits | None
    """Most LoRA adapters; None if the worker runs none."""
    copies_blocks: bool
    """Whether the worker can copy blocks: an expectation before it is configured."""
    weights_digest: str = ""
    """Hash of the weights of a configured worker; empty if the worker does not know it."""
    chunk_starts: ChunkStarts = "whole"
    """Possible starts of chunks; known once the worker is configured."""
    pipeline_stages: int = 1
    """Pipeline stages of the replica, which work on different steps at a time; known from its ranks."""


def description_from_proto(message: worker_pb2.DescribeResponse) -> WorkerDescription:
    """Converts a worker's description.

    Raises:
        ConfigurationRefused: the worker describes a KV group unknown to this release.
    """
    model = common_pb2.ModelInfo()
    model.CopyFrom(message.model)
    model.pool_tasks[:] = message.pool_tasks
    return WorkerDescription(
        model=model,
        device=message.device,
        limits=DeviceLimits(
            max_context=model.max_model_len,
            block_size_multiple=max(1, message.block_size_multiple),
            max_batch=message.max_batch,
            max_chunk=message.max_chunk,
        ),
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
    """Returns the description of a replica, given the answers of its configured ranks."""
    starts = min(max(answer.chunk_starts, worker_pb2.CHUNK_STARTS_WHOLE) for answer in answers)
    return replace(
        description,
        weights_digest=answers[0].weights_digest,
        copies_blocks=all(_copies_blocks(answer.block_copies) for answer in answers),
        chunk_starts=_CHUNK_STARTS.get(starts, "whole"),
    )


def _copies_blocks(value: "worker_pb2.BlockCopies.ValueType") -> bool:
    return value in (worker_pb2.BLOCK_COPIES_TENSORS, worker_pb2.BLOCK_COPIES_RUNTIME)


def groups_from_proto(description: worker_pb2.DescribeResponse) -> tuple[KvGroup, ...]:
    """Converts a model's KV groups, by id.

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


def differing_fact(ours: object, theirs: object, names: Iterable[str]) -> tuple[str, object, object] | None:
    """Returns the first differing attribute of two descriptions and both values."""
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in names)
    return next((pair for pair in pairs if pair[1] != pair[2]), None)
