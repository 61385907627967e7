"""The model and the device that a worker describes, and the model as clients see it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from protos.service.grpc_options import file_chunks
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.convert.configuration import groups_from_proto, limits_from_proto
from scheduler_svc.shapes.geometry import DeviceLimits, KvGroup


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
    max_lease_steps: int
    """Decode steps that one lease may span."""
    packs_texts: bool
    """Whether a pooling step may hold texts of any length beside each other."""
    plans_ahead: bool
    """Whether the worker takes a plan before the last result of the one before."""
    max_logprobs: int
    """Most log-probabilities per token."""
    sampling_fields: frozenset[str]
    """Names of the sampling parameters that the worker honours."""
    lora: LoraLimits | None
    """How many LoRA adapters the worker holds; None if it runs none."""
    copies_blocks: bool
    """Whether the worker can copy blocks: first its expectation, and once it is configured its answer."""
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
        max_lease_steps=max(1, message.max_lease_steps),
        packs_texts=message.packs_texts,
        plans_ahead=message.plans_ahead,
        max_logprobs=message.max_logprobs,
        sampling_fields=frozenset(message.sampling_fields),
        lora=_lora_from_proto(message),
        copies_blocks=copies_blocks_from_proto(message.block_copies),
    )


def _lora_from_proto(message: worker_pb2.DescribeResponse) -> LoraLimits | None:
    if not message.HasField("lora"):
        return None
    lora = message.lora
    return LoraLimits(lora.max_loras, lora.max_rank, max(lora.max_loras, lora.max_cpu_loras))


def copies_blocks_from_proto(value: "worker_pb2.BlockCopies.ValueType") -> bool:
    """Returns whether a worker that answers this can copy blocks."""
    return value in (worker_pb2.BLOCK_COPIES_TENSORS, worker_pb2.BLOCK_COPIES_RUNTIME)


def model_to_proto(
    model: ModelDescription, *, served_name: str, aliases: Sequence[str] = (), max_model_len: int,
    created_unix_s: int, tokenizer_sha256: str,
) -> common_pb2.ModelInfo:  # fmt: skip
    """Returns the worker's model description, completed with what the deployment decides."""
    info = common_pb2.ModelInfo()
    info.CopyFrom(model.message)
    info.served_name = served_name
    info.aliases.extend(aliases)
    info.max_model_len = max_model_len
    info.created_unix_s = created_unix_s
    info.tokenizer_sha256 = tokenizer_sha256
    return info


def files_to_proto(files: Mapping[str, bytes]) -> Iterator[common_pb2.FileChunk]:
    """Cuts files, given by name, into messages."""
    for name, data in files.items():
        yield from file_chunks(name, data)
