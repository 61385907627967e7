"""Linear layers with quantized weights, for vLLM's model classes.

vLLM's own methods choose kernels that our devices lack. This configuration takes their place: its
layers load the form of `quantization.stored_tensors`, which vLLM's loaders shard between ranks, and hand it
to the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
)

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.devices.quantized import QuantizedWeights
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import CheckpointQuantization
from worker_svc.quantized.codes import Scheme

# Kernels read the codes of so many inputs at once.
_INPUTS = 8
_WORD_BITS = 32
# The expert layers of vLLM's models.
_EXPERTS = ("RoutedExperts", "FusedMoE")


class QuantizedLayers(QuantizationConfig):
    """Chooses the method of each layer of a model."""

    def __init__(
        self,
        quantization: CheckpointQuantization,
        device: Device,
        modules: Mapping[str, Scheme | None] | None,
    ) -> None:
        """Serves the layers of a checkpoint; refuses schemes that the device does not serve.

        `modules` are the schemes of the checkpoint's modules by name, `None` for plain ones; without a
        checkpoint, the configuration alone decides.
        """
        super().__init__()
        self.quantization = quantization
        self.device = device
        schemes = [scheme for _, scheme in quantization.schemes]
        device.quantized.check({scheme.bits for scheme in schemes}, {scheme.group for scheme in schemes})
        self._scheme_of = modules
        for name, scheme in (modules or {}).items():
            if scheme is not None and name.rpartition(".")[2] in ("embed_tokens", "word_embeddings"):
                raise ConfigurationRefused(
                    f"the checkpoint quantizes the embeddings ({name}), which is not served;"
                    " choose another checkpoint"
                )

    def get_name(self) -> Any:
        """Returns words for people."""
        return str(self.quantization)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Returns all types: devices without a kernel for a type dequantize."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns 0: the kernels need no particular GPU."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns nothing: the configuration is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantizedLayers":
        """Is never called: `configuration.configure` makes the instance."""
        raise NotImplementedError

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames the checkpoint's modules as the model class renames its tensors."""
        if self._scheme_of is not None:
            old = self._scheme_of.items()
            self._scheme_of = {
                new: each for name, each in old for new in hf_to_vllm_mapper.apply_list([name])
            }

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the method of a layer; `None` for layers other than linear."""
        if type(layer).__name__ in _EXPERTS:
            if self._any_below(prefix):
                raise ConfigurationRefused(
                    f"the checkpoint quantizes experts ({prefix}), which is not served; choose another checkpoint"
                )
            return None
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        scheme = self._scheme(prefix)
        if scheme is not None and prefix.endswith(".kv_b_proj"):
            raise ConfigurationRefused(
                f"the checkpoint quantizes latent attention ({prefix}), which is not served;"
                " choose another checkpoint"
            )
        if scheme is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return QuantizedLinearMethod(self.device, scheme, prefix, wide=isinstance(layer, ParallelLMHead))

    def _any_below(self, prefix: str) -> bool:
        if self._scheme_of is None:
            return self.quantization.scheme_of(f"{prefix}.0.down_proj") is not None
        return any(name.startswith(prefix) for name, scheme in self._scheme_of.items() if scheme is not None)

    def _scheme(self, prefix: str) -> Scheme | None:
        """Returns a layer's scheme; the parts of a merged layer must agree, apart from those absent."""
        parent, _, own = prefix.rpartition(".")
        parts = [
            f"{parent}.{part}" if parent else part for part in self.packed_modules_mapping.get(own, [own])
        ]
        known = self._scheme_of
        found = (
            {self.quantization.scheme_of(part) for part in parts}
            if known is None
            else {known[part] for part in (*parts, prefix) if part in known}
        )
        if len(found) > 1:
            raise ConfigurationRefused(
                f"the checkpoint quantizes the parts of {prefix} ({', '.join(parts)}) differently,"
                " which is not served; choose another checkpoint"
            )
        return found.pop() if found else None


@register_weight_loader_v2_supported_method
class QuantizedLinearMethod(LinearMethodBase):
    """Loads a layer's quantized weights and multiplies by them."""

    def __init__(self, device: Device, scheme: Scheme, name: str, *, wide: bool) -> None:
        self._device, self._scheme, self._name, self._wide = device, scheme, name, wide

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,  # noqa: ARG002 - vLLM's interface
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None] | None = None,
        **rest: Any,  # noqa: ARG002
    ) -> None:
        """Makes the parameters that vLLM's loaders fill."""
        inputs, outputs, scheme = input_size_per_partition, sum(output_partition_sizes), self._scheme
        unit = scheme.group or _INPUTS
        if inputs % unit:
            where = f" on each of {input_size // inputs} ranks" if inputs < input_size else ""
            raise ConfigurationRefused(
                f"{self._name} has {inputs} inputs{where}, but {scheme} needs a multiple of {unit};"
                + (" lower --tensor-parallel-size" if where else " choose another checkpoint")
            )
        untyped: Any = layer
        untyped.params_dtype = params_dtype
        untyped.quantized_bytes = self._device.quantized.num_bytes(
            outputs, inputs, scheme.groups(inputs), scheme.bits, params_dtype
        )
        weight = PackedvLLMParameter(
            data=torch.empty(outputs, inputs * scheme.bits // _WORD_BITS, dtype=torch.int32),
            input_dim=1, output_dim=0, packed_dim=1, packed_factor=_WORD_BITS // scheme.bits,
            weight_loader=weight_loader,
        )  # fmt: skip
        # Formats have scales of several types, and float32 holds them all.
        scales = torch.empty(outputs, scheme.groups(inputs), dtype=torch.float32)
        layer.register_parameter("weight_packed", weight)
        layer.register_parameter(
            "weight_scale",
            ChannelQuantScaleParameter(data=scales, output_dim=0, weight_loader=weight_loader)
            if scheme.group is None
            else GroupQuantScaleParameter(
                data=scales, output_dim=0, input_dim=1, weight_loader=weight_loader
            ),
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Hands the loaded weights to the device."""
        parameters: Any = layer
        weights = QuantizedWeights(
            codes.unpack(parameters.weight_packed.data, self._scheme.bits),
            parameters.weight_scale.data,
            self._scheme.bits,
        )
        del parameters.weight_packed, parameters.weight_scale
        layer.quantized = self._device.quantized.layer(weights, parameters.params_dtype, wide=self._wide)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        quantized: Any = layer.quantized
        product: torch.Tensor = quantized(x, bias)
        return product
