"""The platforms that we register with vLLM. They use its layers with our attention and without its engine."""

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum

from protos.errors import ConfigurationRefused
from worker_svc.devices.registry import CUDA, RBLN

_ATTENTION = "worker_svc.vllm_adapter.attention.TriptychAttentionBackend"


class _Layers(Platform):
    """A platform of vLLM's layers alone, with our attention."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Turns off all but the layers and the loader: graphs, blocks and batches are ours."""
        from vllm.config import CompilationMode, CUDAGraphMode

        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.compilation_config.cudagraph_capture_sizes = []
        vllm_config.parallel_config.worker_cls = "none"
        vllm_config.scheduler_config.async_scheduling = False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Returns the import path of our attention; refuses kinds of attention that it does not serve."""
        del selected_backend, num_heads
        if attn_selector_config.use_mla:
            raise ConfigurationRefused(
                "the model has a form of latent attention (MLA) that is not served; choose another model"
            )
        if attn_selector_config.use_sparse:
            raise ConfigurationRefused("models with sparse attention are not served; choose another model")
        return _ATTENTION

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Returns False: attention is a plain call, so that a compiler can trace it."""
        return False

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Checks nothing: our variable, and those of other versions of vLLM, are unknown to it."""


class TriptychCpuPlatform(_Layers, CpuPlatform):
    """vLLM's CPU platform and its packed linear layers, without its process set-up."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Registers vLLM's kernels and our normalization layers."""
        super().import_ir_kernels()
        import worker_svc.vllm_adapter.layers.cpu_layers  # noqa: F401 - registers on import

    @staticmethod
    def check_kernels() -> None:
        """Refuses to start without vLLM's compiled kernels."""
        from worker_svc.devices.cpu.device import check_kernels

        check_kernels()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:  # noqa: ARG003 - vLLM's interface
        """Prefers our normalization layers."""
        from vllm.config.kernel import IrOpPriorityConfig

        return IrOpPriorityConfig.with_default(
            ["native"],
            rms_norm=["triptych_cpu", "native"],
            fused_add_rms_norm=["triptych_cpu", "native"],
        )


class _NativePlatform(_Layers):
    """vLLM's layers in plain PyTorch, for devices that compile graphs from them."""

    _enum = PlatformEnum.OOT

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.compilation_config.custom_ops = ["none"]

    @classmethod
    def import_kernels(cls) -> None:
        """Imports nothing: such graphs cannot use the CPU wheel's kernels."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Returns True: sliding windows have their own KV groups."""
        return True


class TriptychCudaPlatform(_NativePlatform):
    """A GPU, without vLLM's compiled CUDA kernels."""

    device_name = device_type = CUDA.torch_type
    dispatch_key = device_type.upper()
    dist_backend = "nccl"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Returns the product's name."""
        return torch.cuda.get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Returns the GPU's memory in bytes."""
        return torch.cuda.get_device_properties(device_id).total_memory

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seeds torch's generators on every GPU."""
        torch.cuda.manual_seed_all(seed)


class TriptychRblnPlatform(_NativePlatform):
    """An NPU. Weights stay on the host until a graph is compiled."""

    device_name = device_type = RBLN.torch_type
    dispatch_key = device_type.upper()
    dist_backend = "gloo"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003 - vLLM's interface
        """Returns a name for people."""
        return "RBLN"

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seeds torch's generator."""
        torch.manual_seed(seed)
