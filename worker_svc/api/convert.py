"""Converts between protocol messages and the worker's own types."""

from collections.abc import Mapping

from protos.limits import MAX_LOGPROBS, SAMPLING
from protos.service.grpc_options import SCHEMA_REVISION
from protos.service.logs import get_logger
from protos.step_messages import shape_from_proto, shape_to_proto
from protos.steps import kind_to_proto
from protos.triptych.v1 import common_pb2, worker_pb2
from worker_svc.devices.base import BlockCopies
from worker_svc.execution.worker import Ready, Worker
from worker_svc.model_files.loader import display_name
from worker_svc.phases import Phase
from worker_svc.shapes import PoolingDescription, PoolShapeConfig, ShapeConfig, Shapes

# Larger static graphs are a mistake in a setting.
_MAX_BATCH, _MAX_CHUNK = 4096, 65536
# A lost scheduler leaves work behind, and a slow one unread results.
_MAX_LEASE = 1000
# Chunks known to suit a model on this many tensor-parallel ranks. The first is vLLM-Spyre's.
_CHUNKS = {("granite-3.3-8b-instruct", 4): 1024}


def description_to_proto(worker: Worker, *, worker_id: str, model: str) -> worker_pb2.DescribeResponse:
    """Describes the abilities of a prepared worker; `model` is the `--model` setting."""
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
            default_sampling=None if pooling else _default_sampling(worker.default_sampling),
            pooled_size=pooling.size if pooling else 0,
            pooling=_pooling_info(pooling) if pooling else None,
        ),
        kv_groups=[
            common_pb2.KvGroup(
                group_id=group.group_id,
                kind=kind_to_proto(group.kind),
                window=group.window,
                num_layers=len(group.layers),
                bytes_per_token=sum(layer.bytes_per_token for layer in group.layers),
            )
            for group in worker.groups
        ],
        block_size_multiple=device.block_size_multiple,
        max_batch=_MAX_BATCH,
        max_chunk=_MAX_CHUNK,
        default_block_size=device.default_block_size,
        default_chunk=_default_chunk(worker, model),
        default_max_num_seqs=device.default_max_num_seqs,
        graph_kinds=[common_pb2.GRAPH_KIND_POOL]
        if pooling
        else [common_pb2.GRAPH_KIND_PREFILL, common_pb2.GRAPH_KIND_DECODE],
        sampling_fields=_sampling_fields(worker),
        max_logprobs=MAX_LOGPROBS,
        max_lease_steps=1 if pooling else _MAX_LEASE,
        packs_texts=worker.packs_texts,
        prefill_buckets=not pooling,
        group_epoch=worker.epoch,
        pool_tasks=_pool_tasks(pooling) if pooling else [],
        block_copies=_block_copies(device.block_copies(worker.groups)),
        lora=_lora_limits(worker),
    )


def _default_chunk(worker: Worker, model: str) -> int:
    _, _, name = display_name(model).rpartition("/")
    return _CHUNKS.get((name, worker.layout.tensor), worker.device.default_chunk)


def _block_copies(copies: BlockCopies) -> worker_pb2.BlockCopies.ValueType:
    return worker_pb2.BlockCopies.Value(f"BLOCK_COPIES_{copies.upper()}")


def _lora_limits(worker: Worker) -> worker_pb2.LoraLimits | None:
    if worker.adapters is None:
        return None
    limits = worker.adapters.limits
    return worker_pb2.LoraLimits(
        max_loras=limits.max_loras, max_rank=limits.max_rank, max_cpu_loras=limits.max_cpu_loras
    )


def _pool_tasks(pooling: PoolingDescription) -> "list[common_pb2.PoolTask.ValueType]":
    """Returns the uses of a model's results; a score is the value of an only class."""
    tasks = [common_pb2.PoolTask.Value(f"POOL_TASK_{pooling.task.upper()}")]
    return [*tasks, common_pb2.POOL_TASK_SCORE] if pooling.task == "classify" and pooling.size == 1 else tasks


def _pooling_info(pooling: PoolingDescription) -> common_pb2.PoolingInfo:
    return common_pb2.PoolingInfo(
        labels=pooling.labels,
        token_types=pooling.token_types,
        matryoshka=pooling.dimensions is not None,
        matryoshka_dimensions=pooling.dimensions or (),
    )


def _sampling_fields(worker: Worker) -> tuple[str, ...]:
    if worker.description.pooling:
        return ()
    supported = sorted(name for name, bounds in SAMPLING.items() if bounds.sampled)
    return tuple(name for name in supported if name != "structured_output" or worker.grammars)


def _default_sampling(recommended: Mapping[str, float]) -> common_pb2.SamplingParams:
    """Returns the parameters recommended by a model's authors. Gateways add them to every request."""
    defaults = common_pb2.SamplingParams()
    for name, value in recommended.items():
        if value < 0:  # some write top_k -1 for "off"
            get_logger().warning("recommended_sampling_ignored", name=name, value=value)
            continue
        setattr(defaults, name, int(value) if name in {"top_k", "max_tokens"} else float(value))
    return defaults


def shapes_from_proto(request: worker_pb2.ConfigureRequest) -> Shapes:
    """Returns the scheduler's sizes, unchecked."""
    if request.pool_shapes:
        return PoolShapeConfig(tuple(map(shape_from_proto, request.pool_shapes)))
    return ShapeConfig(
        max_model_len=request.max_model_len,
        max_num_seqs=request.max_num_seqs,
        chunk=request.chunk,
        block_size=request.block_size,
        decode_buckets=tuple(request.decode_buckets),
        num_blocks=tuple(request.num_blocks),
        windows_kept_per_slot=request.windows_kept_per_slot,
        prefill_buckets=tuple(request.prefill_buckets),
    )


def progress_to_proto(phase: Phase, done: int, total: int, message: str) -> worker_pb2.ConfigureEvent:
    """Makes a progress event of a Configure stream."""
    value = worker_pb2.ConfigureProgress.Phase.Value(f"PHASE_{phase.upper()}")
    return worker_pb2.ConfigureEvent(
        progress=worker_pb2.ConfigureProgress(phase=value, done=done, total=total, message=message)
    )


def ready_to_proto(ready: Ready, first_step_timeout_s: float) -> worker_pb2.ConfigureEvent:
    """Makes the last event of a Configure stream."""
    shapes = ready.shapes
    message = worker_pb2.ConfigureReady(
        phase_seconds=dict(ready.phase_seconds.items()),
        first_step_timeout_s=first_step_timeout_s,
        weights_digest=ready.weights_digest,
    )
    if isinstance(shapes, PoolShapeConfig):
        message.graphs.extend(map(shape_to_proto, shapes.pool_shapes))
    else:
        prefill, decode = common_pb2.GRAPH_KIND_PREFILL, common_pb2.GRAPH_KIND_DECODE
        for size in shapes.chunk_sizes:
            message.graphs.add(kind=prefill, batch=1, query_len=size)
        for size in shapes.decode_buckets:
            message.graphs.add(kind=decode, batch=size, query_len=1)
        message.num_blocks.extend(shapes.num_blocks)
        message.bytes_per_block.extend(ready.bytes_per_block)
        message.block_copies = _block_copies(ready.block_copies)
        message.chunk_starts = worker_pb2.ChunkStarts.Value(f"CHUNK_STARTS_{ready.chunk_starts.upper()}")
    return worker_pb2.ConfigureEvent(ready=message)
