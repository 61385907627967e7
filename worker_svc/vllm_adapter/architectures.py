"""Which architectures are refused, and what of multimodal ones is served: their text models.

A multimodal checkpoint is loaded as the text model inside it, so its other parts are neither built nor read.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from protos.errors import ConfigurationRefused

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
    for name in ("dtype", "quantization_config"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    for name in ("tie_word_embeddings", "eos_token_id"):
        # Some configurations state these beside the text's, which then has no such attribute.
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    # Text has one position a token, so that the parts of a rotary embedding for images are one again.
    for parameters in (getattr(text, "rope_parameters", None), getattr(text, "rope_scaling", None)):
        if parameters:
            parameters.pop("mrope_section", None)
    return text


def served_as(config: Mapping[str, Any], *, language_model_only: bool) -> list[str]:
    """Returns the architectures to load for a model.

    Args:
        config: the model's config.json.
        language_model_only: whether the text model of a multimodal model is wanted.

    Raises:
        ConfigurationRefused: for models that are never served, and for multimodal ones, except for the text
            models that are wanted.
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
    """Refuses models whose layers keep a state other than keys and values.

    Raises:
        ConfigurationRefused: for state-space models (Mamba), linear attention and hybrids with either.
    """
    if getattr(model_class, "has_inner_state", False):
        raise ConfigurationRefused(
            f"{architecture} has layers with a state of their own (Mamba or linear attention),"
            " which are not served; choose a model in which all layers are attention"
        )


def unknown(architecture: str) -> ConfigurationRefused:
    """Returns the refusal of an architecture that vLLM does not know, with the last version that did."""
    from vllm.model_executor.models import registry

    last = registry._PREVIOUSLY_SUPPORTED_MODELS.get(architecture)  # noqa: SLF001 - as above
    dropped = f"; vLLM has dropped it after {last}" if last else ""
    return ConfigurationRefused(
        f"vLLM does not know the architecture {architecture}{dropped}; choose another model"
    )
