"""NVIDIA GPUs: paged attention in our own Triton kernels, and steps as CUDA graphs."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices import plain_attention
from worker_svc.devices.attention import AttentionCall, PagedInput, StepInput
from worker_svc.devices.base import Device
from worker_svc.devices.cuda.quantized import TritonProducts
from worker_svc.devices.lora_stack import LoraStack, StackShape
from worker_svc.devices.registry import CUDA, DeviceOptions, DeviceSpec
from worker_svc.shapes import KvGroup

# Some kernels compile or tune themselves on their first call, which a capture cannot contain.
_RUNS_BEFORE_CAPTURE = 2


class CudaDevice(Device):
    """A visible GPU."""

    spec: ClassVar[DeviceSpec] = CUDA
    torch_device: ClassVar[torch.device] = torch.device("cuda")
    block_size_multiple: ClassVar[int] = 16
    default_block_size: ClassVar[int] = 128
    default_chunk: ClassVar[int] = 512
    default_max_num_seqs: ClassVar[int] = 64
    default_level: ClassVar[int] = 2
    captures: ClassVar[bool] = True
    runs_ahead: ClassVar[bool] = True
    quantized: ClassVar[TritonProducts] = TritonProducts()

    def __init__(self, options: DeviceOptions | None = None) -> None:
        """Selects the GPU at the local rank, modulo their number."""
        super().__init__(options)
        self._pool: Any = None  # of a type that torch keeps private

    @property
    def collectives(self) -> str:
        return "nccl"

    def identity(self) -> str:
        """NCCL needs a GPU for each rank."""
        return f"{socket.gethostname()} {torch.cuda.get_device_properties().uuid}"

    def check_available(self) -> None:
        if torch.version.cuda is None:
            raise ConfigurationRefused(
                "device cuda needs a CUDA build of torch; the installed torch has no CUDA support"
            )
        if not torch.cuda.is_available():
            raise ConfigurationRefused("device cuda: no GPU is visible to this process")
        torch.cuda.set_device(self._index)

    def product_name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def _index(self) -> int:
        """The GPU, which is current on the model thread alone: elsewhere, calls without it open GPU 0."""
        return self.options.local_rank % torch.cuda.device_count()

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self._index)[0]

    def release_unused(self) -> None:
        torch.cuda.empty_cache()

    def start_reading(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queues the copy after all launched kernels; page-locked memory lets the call return at once."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def capture(
        self, function: Callable[..., tuple[torch.Tensor, ...]], examples: Sequence[torch.Tensor]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Captures a CUDA graph; all graphs share a pool for their intermediate results."""
        arguments = [tensor.clone() for tensor in examples]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(_RUNS_BEFORE_CAPTURE):
                function(*arguments)
        torch.cuda.current_stream().wait_stream(side_stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread may ask the driver about earlier work meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = function(*arguments)

        def replay(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for argument, tensor in zip(arguments, tensors, strict=True):
                if argument is not tensor:
                    argument.copy_(tensor, non_blocking=True)
            graph.replay()
            return results

        return replay

    def code_target(self) -> str:
        major, minor = torch.cuda.get_device_capability()
        return (
            f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
        )

    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """A block holds each head's keys, then each head's values, so a head's tile is contiguous."""
        if (shape := plain_attention.cache_shape(group, num_blocks, block_size)) is not None:
            return shape
        layer = group.layers[0]
        return (num_blocks, 2, layer.num_kv_heads, block_size, layer.head_size)

    def lora_stack(self, shape: StackShape) -> LoraStack:
        from worker_svc.devices.cuda.lora_stack import TritonStack

        return TritonStack(shape, self.torch_device)

    def adapter_bytes(self, shape: StackShape) -> int:
        from worker_svc.devices.cuda.lora_stack import TritonStack

        return TritonStack.num_bytes(shape)

    def select_adapters(self, slots: torch.Tensor, shape: StackShape) -> torch.Tensor:  # noqa: ARG002
        """The kernel takes the slots themselves."""
        return slots

    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> Any:  # noqa: ARG002 - the interface's
        """A plan holds only tensors of fixed shapes, so captured steps can take it as arguments."""
        if not isinstance(step, PagedInput) or group.layers[0].latent:
            return plain_attention.plan_step(group, step)
        if group.layers[0].alibi:
            return plain_attention.GatheredPlan.of(step)
        # Imported here, because Triton is missing or slow to import on machines without a GPU.
        from worker_svc.devices.cuda.triton_attention import TritonPlan

        return TritonPlan.of(step)

    def attend(self, call: AttentionCall, plan: Any) -> None:
        if isinstance(plan, plain_attention.GatheredPlan):
            call = replace(call, cache=call.cache.transpose(2, 3))
        if isinstance(plan, plain_attention.PlainPlan):
            plain_attention.attend(call, plan)
            return
        from worker_svc.devices.cuda import triton_attention

        triton_attention.attend(call, plan)
