"""Our attention as vLLM sees it: a backend that delegates to the device."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType

from protos.errors import ConfigurationRefused
from worker_svc.devices.attention import AttentionCall, AttentionParams
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import Recorder


@dataclass(frozen=True)
class StepAttention:
    """Attention metadata, in vLLM's terms: the device and its plan of this step for a KV group."""

    device: Device
    """Runs the attention."""
    plan: Any
    """The device's plan."""
    cache: torch.Tensor | None = None
    """The layer's cache if it is an input of the layer's graph; `None` if the layer holds it."""


@dataclass(frozen=True)
class RecordedAttention:
    """Attention metadata while a step is recorded."""

    recorder: Recorder
    """Records the call."""
    layer: str
    """The layer's name."""


class TriptychAttentionBackend(AttentionBackend):
    """Names our implementation to vLLM. Block sizes, layouts and metadata are the device's."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Returns vLLM's name for every third-party backend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["TriptychAttention"]:
        """Returns the class that each attention layer instantiates."""
        return TriptychAttention

    @staticmethod
    def get_builder_cls() -> Any:
        """Returns a class that is never instantiated; vLLM's encoder layers derive a class from it."""
        return AttentionMetadataBuilder


class TriptychAttention(AttentionImpl):
    """The attention of a layer."""

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
        unserved = {
            "ALiBi beside windows": alibi_slopes is not None and bool(sliding_window),
            "bidirectional ALiBi": alibi_slopes is not None and attn_type == AttentionType.ENCODER_ONLY,
            f"a {kv_cache_dtype} KV cache": kv_cache_dtype != "auto",
            f"{attn_type} attention": attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY),
        }
        for what, needed in unserved.items():
            if needed:
                raise ConfigurationRefused(f"models with {what} are not served yet; choose another model")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.params = AttentionParams(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_size=head_size,
            scale=float(scale),
            window=sliding_window or 0,
            softcap=float(logits_soft_cap or 0),
            writes=kv_sharing_target_layer_name is None,
            causal=attn_type == AttentionType.DECODER,
            sinks=sinks is not None,
            slopes=tuple(alibi_slopes or ()),
        )
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:  # noqa: ARG002
        """Converts sinks to float32, which kernels take. They stay the model's parameter, to move with it."""
        if self.sinks is not None:
            self.sinks.requires_grad = False
            self.sinks.data = self.sinks.data.float()

    def forward(
        self,
        layer: torch.nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: StepAttention | RecordedAttention,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends within rows, or over the cache after writing to it; for shapes see `AttentionCall`."""
        del output_scale, output_block_scale  # set only by a fusion that we leave off
        call = AttentionCall(self.params, query, key, value, kv_cache, output, self.sinks)
        return attend(call, attn_metadata)


def attend(call: AttentionCall, metadata: StepAttention | RecordedAttention) -> torch.Tensor:
    """Runs or records a layer's attention, and returns its output."""
    if isinstance(metadata, RecordedAttention):
        metadata.recorder.attend(metadata.layer, call)
    else:
        if metadata.cache is not None:
            call = replace(call, cache=metadata.cache)
        metadata.device.attend_step(call, metadata.plan)
    return call.output
