"""NVIDIA GPUs: gathered attention for now; correct, not yet fast."""

from typing import Any, ClassVar

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices import gathered
from worker_svc.devices.base import AttentionInput, AttentionShape, Device
from worker_svc.geometry import AttentionLayer, KvGroup


class CudaDevice(Device):
    """The first visible GPU."""

    name: ClassVar[str] = "cuda"
    torch_device: ClassVar[torch.device] = torch.device("cuda")
    block_size_multiple: ClassVar[int] = 16
    default_block_size: ClassVar[int] = 128
    default_chunk: ClassVar[int] = 512
    default_max_num_seqs: ClassVar[int] = 64

    def check_available(self) -> None:
        """See the base class."""
        if torch.version.cuda is None:
            raise ConfigurationRefused("device cuda needs a CUDA build of torch; this one is built without")
        if not torch.cuda.is_available():
            raise ConfigurationRefused("device cuda: no GPU is visible to this process")

    def product_name(self) -> str:
        """See the base class."""
        return torch.cuda.get_device_name()

    def free_memory(self) -> int:
        """See the base class."""
        return torch.cuda.mem_get_info()[0]

    def cache_shape(self, layer: AttentionLayer, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """See the base class."""
        return (num_blocks, 2, block_size, layer.num_kv_heads, layer.head_size)

    def plan(self, group: KvGroup, block_size: int, step: AttentionInput) -> Any:  # noqa: ARG002 - the interface's
        """See the base class."""
        return gathered.GatheredPlan.of(step)

    def attend(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        plan: Any,
        output: torch.Tensor,
    ) -> None:
        """See the base class."""
        gathered.attend(shape, query, key, value, cache, plan, output)
