"""Builds vLLM's configuration of a model and translates its errors into one line."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantized.checkpoint_config import CheckpointQuantization
from worker_svc.quantized.checkpoint_config import read as read_quantization
from worker_svc.quantized.codes import Scheme
from worker_svc.quantized.mxfp4 import is_mxfp4
from worker_svc.quantized.stored_tensors import quantized_module
from worker_svc.ranks.layout import RankLayout
from worker_svc.vllm_adapter.architectures import (
    TEXT_MODELS,
    as_text_model,
    check_class,
    served_as,
    text_weight,
    unknown,
)
from worker_svc.vllm_adapter.deferred_imports import deferred

# The refusal of a model that brings its own classes.
_NEEDS_CODE = (
    "it needs its own Python code (auto_map in config.json); pass --trust-remote-code if you trust it"
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def configure(
    folder: Path, device: Device, *, dtype: Dtype, dummy_weights: bool, seed: int, trust_remote_code: bool,
    language_model_only: bool, layout: RankLayout,
) -> Any:  # fmt: skip
    """Builds vLLM's configuration of a model; for the arguments see `VllmModel`.

    Raises:
        ConfigurationRefused: if vLLM does not know the model's class and may not run the model's own code.
    """
    from vllm.engine.arg_utils import EngineArgs

    architectures = register_model_class(
        folder, trust_remote_code=trust_remote_code, language_model_only=language_model_only
    )
    is_text_model = bool(set(architectures) & set(TEXT_MODELS))
    quantization = read_quantization(folder)

    def configured(dtype: str) -> Any:
        return EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            load_format="dummy" if dummy_weights else "safetensors",
            seed=seed,
            trust_remote_code=trust_remote_code,
            use_tqdm_on_load=False,
            enforce_eager=True,
            block_size=device.default_block_size,
            disable_log_stats=True,
            enable_prefix_caching=False,
            tensor_parallel_size=layout.tensor,
            pipeline_parallel_size=layout.pipeline,
            enable_expert_parallel=layout.experts,
            # Without a name, vLLM would look for as many devices as there are ranks.
            distributed_executor_backend="mp",
            hf_overrides=_OVERRIDES[is_text_model, quantization is not None or is_mxfp4(folder)],
        ).create_engine_config()

    config = configured(dtype)
    if dtype == "auto" and _is_full_precision_pooling(config.model_config):
        config = configured("float32")
    if quantization is not None:
        # Imported here: it imports vLLM's layers.
        from worker_svc.vllm_adapter.layers.quantized_linear import QuantizedLayers

        rename = text_weight if is_text_model else str
        schemes = None if dummy_weights else _quantized_modules(folder, quantization, rename)
        config.quant_config = QuantizedLayers(quantization, device, schemes)
    return config


def _without_quantization(config: Any) -> Any:
    """Hides the quantization that we read ourselves, so that vLLM chooses no kernels for it."""
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    return config


def _text_without_quantization(config: Any) -> Any:
    return _without_quantization(as_text_model(config))


# By whether the model is the text model in a multimodal one, and whether it is quantized: the changes to its
# configuration.
_OVERRIDES: Final[Mapping[tuple[bool, bool], Any]] = {
    (False, False): {},
    (False, True): _without_quantization,
    (True, False): as_text_model,
    (True, True): _text_without_quantization,
}


def is_text_model(model_config: Any) -> bool:
    """Whether vLLM's configuration is that of the text model in a multimodal checkpoint."""
    return model_config.hf_overrides in (as_text_model, _text_without_quantization)


def _quantized_modules(
    folder: Path, quantization: CheckpointQuantization, rename: Callable[[str], str | None]
) -> dict[str, Scheme | None]:
    """Returns the schemes of a checkpoint's quantized modules by their names in the model."""
    tensors = [name for shard in Checkpoint.open(folder).shards for name in shard.tensors]
    modules = {module for name in tensors if (module := quantized_module(quantization, name))}
    return {new: quantization.scheme_of(name) for name in modules if (new := rename(name))}


def register_model_class(
    folder: Path, *, trust_remote_code: bool, language_model_only: bool = False
) -> list[str]:
    """Registers the model's class as loaded, so that vLLM starts no subprocess (seconds) to inspect it.

    Returns:
        The architectures that config.json names.

    Raises:
        ConfigurationRefused: if the architecture is not served, or if vLLM does not know the class and may
            not run the model's own code.
    """
    from vllm.model_executor.models import ModelRegistry

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in served_as(config, language_model_only=language_model_only):
        architecture = _built_as(name, ModelRegistry.models)
        known = ModelRegistry.models.get(architecture)
        if known is None:
            if config.get("auto_map"):
                if trust_remote_code:
                    continue  # vLLM loads the class from the model's own code
                raise ConfigurationRefused(f"cannot serve {folder}: {_NEEDS_CODE}")
            raise unknown(architecture)
        with deferred():
            model_class = known.load_model_cls()
        check_class(architecture, model_class)
        ModelRegistry.register_model(architecture, model_class)
    return list(config.get("architectures") or ())


def _built_as(architecture: str, known: Mapping[str, Any]) -> str:
    """Returns the class that vLLM builds for an architecture.

    It adds a classifier to a class that generates if it has no class of its own with a classifier.
    """
    base = architecture.removesuffix("ForSequenceClassification") + "ForCausalLM"
    is_classifier = architecture.endswith("ForSequenceClassification")
    return base if is_classifier and architecture not in known and base in known else architecture


def _is_full_precision_pooling(model_config: Any) -> bool:
    """Whether it is a pooling model saved in float32; vLLM would run it in half precision."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    if model_config.runner_type != "pooling":
        return False
    saved = ModelArchConfigConvertorBase.get_torch_dtype(
        model_config.hf_config, model_config.model, None, "hf"
    )
    return bool(saved == torch.float32)


@contextlib.contextmanager
def refusal_on_error(what: str) -> Iterator[None]:
    """Turns an error of vLLM about a model or a setting into a refusal of one line.

    Args:
        what: the line's beginning, for example "cannot serve /models/m".
    """
    try:
        yield
    except ConfigurationRefused:
        raise
    except (
        ValueError, RuntimeError, OSError, KeyError, NotImplementedError, AttributeError, AssertionError,
    ) as error:  # fmt: skip
        if "trust_remote_code" in str(error):
            raise ConfigurationRefused(f"{what}: {_NEEDS_CODE}") from error
        # pydantic puts the reason on the third line, after the location.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("Value error")), lines[0] if lines else "")
        raise ConfigurationRefused(f"{what}: {reason or type(error).__name__}") from error
