"""vLLM's view of our attention: a backend whose implementation hands everything to the device."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import AttentionShape, Device, RowsInput
from worker_svc.graphs.capture import Recorder


@dataclass(frozen=True)
class StepAttention:
    """What vLLM calls attention metadata: the device and its plan of this step for one KV group."""

    device: Device
    plan: Any
    cache: torch.Tensor | None = None
    """The layer's cache where that is an input of its graph; else the layer has it."""


@dataclass(frozen=True)
class RecordedAttention:
    """What stands for it while a step is recorded."""

    recorder: Recorder
    layer: str


class TriptychAttentionBackend(AttentionBackend):
    """Names our implementation to vLLM; block sizes, layouts and metadata are not its business."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name that vLLM has for every backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["TriptychAttention"]:
        """What each attention layer instantiates."""
        return TriptychAttention

    @staticmethod
    def get_builder_cls() -> Any:
        """Never instantiated, as plans are made by the device; encoders' layers derive a class of it."""
        return AttentionMetadataBuilder


class TriptychAttention(AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Signature and names are vLLM's.

        Raises:
            ConfigurationRefused: for a kind of attention that no device serves yet.
        """
        unserved = {
            "ALiBi": alibi_slopes is not None,
            f"a {kv_cache_dtype} KV cache": kv_cache_dtype != "auto",
            f"{attn_type} attention": attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY),
            "windows that look both ways": attn_type == AttentionType.ENCODER_ONLY and bool(sliding_window),
        }
        for what, asked in unserved.items():
            if asked:
                raise ConfigurationRefused(f"models with {what} are not served yet; choose another model")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_size=head_size,
            scale=float(scale),
            window=sliding_window or 0,
            softcap=float(logits_soft_cap or 0),
            writes=kv_sharing_target_layer_name is None,
            causal=attn_type == AttentionType.DECODER,
            sinks=sinks is not None,
        )
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:  # noqa: ARG002 - vLLM's interface
        """Kernels take sinks in float32."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float()

    def forward(
        self,
        layer: torch.nn.Module,  # noqa: ARG002 - vLLM's interface
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: StepAttention | RecordedAttention,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends, in rows or over the cache that it writes to before; shapes are those of ``Device.attend``."""
        del output_scale, output_block_scale  # only set by a fusion that we leave off
        if isinstance(attn_metadata, RecordedAttention):
            attn_metadata.recorder.attend(
                attn_metadata.layer, self.shape, query, key, value, kv_cache, output, self.sinks
            )
            return output
        if isinstance(attn_metadata.plan, RowsInput):
            assert key is not None
            assert value is not None
            attn_metadata.device.attend_rows(self.shape, query, key, value, attn_metadata.plan, output)
            return output
        cache = kv_cache if attn_metadata.cache is None else attn_metadata.cache
        plan = attn_metadata.plan
        attn_metadata.device.attend(self.shape, query, key, value, cache, plan, output, self.sinks)
        return output
