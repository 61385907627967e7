"""Describes a model from vLLM's configuration and layers."""

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from protos.errors import ConfigurationRefused
from worker_svc.shapes import AttentionLayer, ModelDescription, ModelSize, PoolingDescription
from worker_svc.vllm_settings import recommended

_MATRIX = 2  # dimensions


def is_experts(layer: Any) -> bool:
    """Whether a layer of vLLM is an expert layer, which caches nothing."""
    # Importing that module takes seconds. A model without expert layers has not imported it.
    module = sys.modules.get("vllm.model_executor.layers.fused_moe.runner.moe_runner_interface")
    return module is not None and isinstance(layer, module.MoERunnerInterface)


def describe(
    config: Any, layers: Mapping[str, Any], pooling: PoolingDescription | None, *, here: Mapping[str, Any]
) -> ModelDescription:
    """Describes a model by vLLM's configuration and layers; refuses layers that are not served.

    `layers` are those of all stages by name, and `here` those of this rank.
    """
    model_config = config.model_config
    attention = []
    for name, layer in layers.items():
        if is_experts(layer):
            continue
        if not hasattr(layer, "kv_cache_torch_dtype"):
            raise ConfigurationRefused(
                f"layers like {name} ({type(layer).__name__}) are not served yet; choose another model"
            )
        attention.append(
            AttentionLayer(
                name=name,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                window=layer.sliding_window or 0,
                dtype=layer.kv_cache_torch_dtype,
                shares_with=layer.kv_sharing_target_layer_name,
                here=name in here,
                latent=layer.impl.params.latent > 0,
                alibi=bool(layer.impl.params.slopes),
            )
        )
    _check_shared_caches(model_config.architecture, attention)
    text = model_config.hf_text_config
    generation = model_config.try_get_generation_config()
    eos: set[int] = set()
    for value in (generation.get("eos_token_id"), getattr(text, "eos_token_id", None)):
        eos.update([value] if isinstance(value, int) else value or ())
    return ModelDescription(
        architecture=model_config.architecture,
        vocab_size=text.vocab_size,
        # Layers that attend within chunks (Llama 4) are full attention in the first chunk.
        max_model_len=min(model_config.max_model_len, *_chunk_lengths(layers)),
        eos_token_ids=tuple(sorted(eos)),
        dtype=model_config.dtype,
        quantization=None if config.quant_config is None else str(config.quant_config.get_name()),
        layers=tuple(attention),
        pooling=pooling,
        default_sampling=recommended(generation),
    )


def _chunk_lengths(layers: Mapping[str, Any]) -> list[int]:
    """Returns the lengths of the layers' attention chunks, and a length above every model's."""
    chunks = [getattr(layer, "attention_chunk_size", 0) for layer in layers.values()]
    return [sys.maxsize, *(chunk for chunk in chunks if chunk)]


def _check_shared_caches(architecture: str, layers: Sequence[AttentionLayer]) -> None:
    """Refuses layers that share the KV cache of a layer in another stage."""
    here = {layer.name: layer.here for layer in layers}
    for layer in layers:
        owner = layer.shares_with
        if owner is not None and here[owner] != layer.here:
            raise ConfigurationRefused(
                f"{architecture} has layers that share a KV cache across stages ({layer.name} uses {owner}'s);"
                " use --tensor-parallel-size instead of --pipeline-parallel-size"
            )


def measure(model_config: Any, model: torch.nn.Module, vocab_size: int) -> ModelSize:
    """Measures the sizes for the model's memory; `vocab_size` is 0 for a model without logits."""
    # Loading brings quantized weights into the device's form, whose size the layer knows.
    quantized: list[Any] = [module for module in model.modules() if hasattr(module, "quantized_bytes")]
    replaced = {id(each) for module in quantized for each in (module.weight_packed, module.weight_scale)}
    tensors = [
        each for each in itertools.chain(model.parameters(), model.buffers()) if id(each) not in replaced
    ]
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    widths: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        if layer is None or parameter.dim() < _MATRIX or name.endswith(".weight_scale"):
            continue
        experts = parameter.shape[:-_MATRIX].numel()
        inputs = parameter.shape[-1] * getattr(parameter, "packed_factor", 1)
        widths[layer[1]] = widths.get(layer[1], 0) + experts * (parameter.shape[-_MATRIX] + inputs)
    return ModelSize(
        weight_bytes=sum(storage.nbytes() for storage in storages.values())
        + sum(module.quantized_bytes for module in quantized),
        width=max(widths.values(), default=0),
        hidden_size=model_config.get_hidden_size(),
        vocab_size=vocab_size,
        itemsize=model_config.dtype.itemsize,
    )
