"""vLLM's configuration of a model: which architectures are served, and errors in one line.

A multimodal checkpoint is loaded as its text model, so its other parts are neither built nor read.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from worker_svc.devices.base import Device
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantized.checkpoint_config import CheckpointQuantization, read_config, stored_config
from worker_svc.quantized.checkpoint_config import read as read_quantization
from worker_svc.quantized.codes import Scheme
from worker_svc.quantized.stored_tensors import quantized_module
from worker_svc.ranks.layout import RankLayout
from worker_svc.vllm_adapter.startup import deferred

TEXT_MODELS: Final[Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
"""The architecture of the text model in each multimodal architecture that is served."""
# Where checkpoints keep a text model's weights, before and since transformers 5.
_TEXT_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
# What else they have. Their own names follow "model." in newer checkpoints.
_OTHER_PARTS = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|patch_merger)\."
)


def text_weight(name: str) -> str | None:
    """Returns the name of a multimodal checkpoint's tensor in its text model, or `None` for other parts."""
    if _OTHER_PARTS.match(name):
        return None
    return _TEXT_PREFIX.sub("model.", name).removeprefix("language_model.")


def as_text_model(config: Any) -> Any:
    """Returns the configuration of the text model in a multimodal configuration of transformers.

    vLLM passes its own configurations, too, which come back unchanged.
    """
    if config.architectures[0] not in TEXT_MODELS:
        return config
    text = config.get_text_config()
    text.architectures = [TEXT_MODELS[config.architectures[0]]]
    # Some configurations state these beside the text's, which then has no such attribute.
    for name in ("dtype", "quantization_config", "tie_word_embeddings", "eos_token_id"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    # Text has one position a token, so that the parts of a rotary embedding for images are one again.
    for parameters in (getattr(text, "rope_parameters", None), getattr(text, "rope_scaling", None)):
        if parameters:
            parameters.pop("mrope_section", None)
    return text


def served_as(config: Mapping[str, Any], *, language_model_only: bool) -> list[str]:
    """Returns the architectures to load for a model, from its config.json; refuses those not served.

    `language_model_only` serves the text model of a multimodal model.
    """
    names = list(config.get("architectures") or ())
    shown = ", ".join(names) or "this model"
    text = config.get("text_config") or config
    if config.get("is_encoder_decoder") or text.get("cross_attention_layers"):
        raise ConfigurationRefused(
            f"{shown} has cross-attention, which is not served; choose a decoder-only model"
        )
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "mxfp4" and names != ["GptOssForCausalLM"]:
        raise ConfigurationRefused(
            f"{shown} has weights in MXFP4, which is served for GptOssForCausalLM alone;"
            " choose a checkpoint in bfloat16"
        )
    for name in names:
        if name in TEXT_MODELS and not language_model_only:
            raise ConfigurationRefused(
                f"{name} is multimodal, and only its text model is served; pass --language-model-only"
            )
        if name not in TEXT_MODELS and _is_multimodal(name):
            raise ConfigurationRefused(
                f"{name} is multimodal and not served; --language-model-only serves the text models of"
                f" {', '.join(TEXT_MODELS)}"
            )
    return [TEXT_MODELS.get(name, name) for name in names]


def _is_multimodal(architecture: str) -> bool:
    from vllm.model_executor.models import registry

    return architecture in registry._MULTIMODAL_MODELS  # noqa: SLF001 - vLLM's only list of them


def check_class(architecture: str, model_class: Any) -> None:
    """Refuses models with a state other than keys and values: Mamba, linear attention and hybrids."""
    if getattr(model_class, "has_inner_state", False):
        raise ConfigurationRefused(
            f"{architecture} has layers with a state of their own (Mamba or linear attention),"
            " which are not served; choose a model in which all layers are attention"
        )


def unknown(architecture: str) -> ConfigurationRefused:
    """Returns the refusal of an architecture unknown to vLLM, with the last version that knew it."""
    from vllm.model_executor.models import registry

    last = registry._PREVIOUSLY_SUPPORTED_MODELS.get(architecture)  # noqa: SLF001 - as above
    dropped = f"; vLLM has dropped it after {last}" if last else ""
    return ConfigurationRefused(
        f"vLLM does not know the architecture {architecture}{dropped}; choose another model"
    )


# The refusal of a model that brings its own classes.
_NEEDS_CODE = (
    "it needs its own Python code (auto_map in config.json); pass --trust-remote-code if you trust it"
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def configure(
    folder: Path, device: Device, *, dtype: Dtype, dummy_weights: bool, seed: int, trust_remote_code: bool,
    language_model_only: bool, layout: RankLayout,
) -> Any:  # fmt: skip
    """Builds vLLM's configuration of a model; for the arguments see `VllmModel`."""
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
            hf_overrides=_OVERRIDES[is_text_model, stored_config(read_config(folder), folder) is not None],
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
    """Hides the quantization, so that vLLM chooses no kernels for it."""
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
    """Returns the schemes of a checkpoint's modules by their names in the model; `None` for plain ones."""
    found: dict[str, Scheme | None] = {}
    for tensor in (name for shard in Checkpoint.open(folder).shards for name in shard.tensors):
        module = quantized_module(quantization, tensor)
        if new := rename(module or tensor.removesuffix(".weight")):
            found[new] = quantization.scheme_of(module) if module else None
    return found


def register_model_class(
    folder: Path, *, trust_remote_code: bool, language_model_only: bool = False
) -> list[str]:
    """Registers the model's class as loaded, so that vLLM starts no subprocess (seconds) to inspect it.

    Returns:
        The architectures of config.json.

    Raises:
        ConfigurationRefused: The architecture is not served, or needs code of the model that may not run.
    """
    from vllm.model_executor.models import ModelRegistry

    config = read_config(folder)
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

    Without a class for a classifier, it adds the classifier to the class that generates.
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


# Beginnings of the line that explains an error.
_REASONS = ("Value error", "ValueError: ", "TypeError: ")


@contextlib.contextmanager
def refusal_on_error(what: str) -> Iterator[None]:
    """Turns an error of vLLM about a model or a setting into a refusal of one line beginning with `what`."""
    try:
        yield
    except ConfigurationRefused:
        raise
    except Exception as error:
        get_logger().debug("refused", exc_info=error)  # it may be a bug of ours
        if "trust_remote_code" in str(error):
            raise ConfigurationRefused(f"{what}: {_NEEDS_CODE}") from error
        # pydantic puts the reason on the third line, after the location; transformers on the second.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith(_REASONS)), lines[0] if lines else "")
        reason = reason.partition(" [type=")[0]
        if isinstance(error, ArithmeticError | LookupError | TypeError):
            reason = f"config.json has a value that vLLM does not take ({type(error).__name__}: {reason})"
        raise ConfigurationRefused(f"{what}: {reason or type(error).__name__}") from error
