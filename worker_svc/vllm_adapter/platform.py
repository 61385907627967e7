"""The platforms that vLLM sees: its layers, with our attention, without its engine."""

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum

from protos.errors import ConfigurationRefused

_ATTENTION = "worker_svc.vllm_adapter.attention.TriptychAttentionBackend"


def _configure(config: Any) -> None:
    """Leaves vLLM's layers and loader on and everything else off: graphs, blocks and batches are ours."""
    from vllm.config import CompilationMode, CUDAGraphMode

    config.compilation_config.mode = CompilationMode.NONE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    config.compilation_config.cudagraph_capture_sizes = []
    config.parallel_config.worker_cls = "none"
    config.scheduler_config.async_scheduling = False


def _attention_class(selector: Any) -> str:
    """Where our attention lives, for the kinds that it serves."""
    if selector.use_mla:
        raise ConfigurationRefused(
            "models with latent attention (MLA) are not served yet; choose another model"
        )
    if selector.use_sparse:
        raise ConfigurationRefused("models with sparse attention are not served yet; choose another model")
    return _ATTENTION


class TriptychCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, so that linear layers use its packed kernels, with our attention and none of its process set-up."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Unlike the parent's: changes no environment variables, preloads no libraries."""
        _configure(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Our attention, whatever was asked for."""
        del selected_backend, num_heads
        return _attention_class(attn_selector_config)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is called, not dispatched as an operator, so that a compiler can see into it."""
        return False

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Also registers our forms of the normalization layers."""
        super().import_ir_kernels()
        import worker_svc.vllm_adapter.cpu_layers  # noqa: F401 - registers on import

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:  # noqa: ARG003 - vLLM's interface
        """Compiled normalization layers first."""
        from vllm.config.kernel import IrOpPriorityConfig

        return IrOpPriorityConfig.with_default(
            ["native"],
            rms_norm=["triptych_cpu", "native"],
            fused_add_rms_norm=["triptych_cpu", "native"],
        )

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Variables for other versions of vLLM may stand in the environment; ours is not among those it knows either."""


class _NativePlatform(Platform):
    """vLLM's layers in their plain PyTorch form, for devices whose graphs a compiler makes of it."""

    _enum = PlatformEnum.OOT

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Layers take their native form."""
        _configure(vllm_config)
        vllm_config.compilation_config.custom_ops = ["none"]

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Our attention, whatever was asked for."""
        del selected_backend, num_heads
        return _attention_class(attn_selector_config)

    @classmethod
    def import_kernels(cls) -> None:
        """None: the CPU wheel's kernels have no place in such graphs."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Sliding windows have groups of their own."""
        return True

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """See the CPU's."""
        return False

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """See the CPU's."""


class TriptychCudaPlatform(_NativePlatform):
    """A GPU; vLLM's compiled CUDA kernels are not needed."""

    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "nccl"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The product's name."""
        return torch.cuda.get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        return torch.cuda.get_device_properties(device_id).total_memory

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seeds torch's generators of every GPU."""
        torch.cuda.manual_seed_all(seed)


class TriptychRblnPlatform(_NativePlatform):
    """An NPU: weights on the host until a graph takes them."""

    device_name = "cpu"  # torch's name of where tensors are
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003 - vLLM's interface
        """For people."""
        return "RBLN"

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seeds torch's generator."""
        torch.manual_seed(seed)
