"""Configurations of small random models of the architectures in docs/models.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.tiny_models import COMMON, CONTEXT, VOCAB_SIZE

# For configurations that have no head_dim: it is 32 because of the larger hidden size.
WITHOUT_HEAD_DIM = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": 128}


def _mistral() -> Any:
    from transformers import MistralConfig

    # As in version 0.1, all layers have a window: no group keeps a whole sequence.
    return MistralConfig(**COMMON, sliding_window=64)


def _phi3() -> Any:
    from transformers import Phi3Config

    # Half of each head rotates, as in Phi-4-mini.
    return Phi3Config(**WITHOUT_HEAD_DIM, partial_rotary_factor=0.5)


def _phi3_long() -> Any:
    from transformers import Phi3Config

    # The sizes of the factors follow from the head size of 32.
    return Phi3Config(
        **WITHOUT_HEAD_DIM,
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.05 * i for i in range(16)],
            "long_factor": [1.0 + 0.5 * i for i in range(16)],
            "original_max_position_embeddings": 512,
        },
    )


def _llama3() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )


def _granite() -> Any:
    from transformers import GraniteConfig

    return GraniteConfig(
        **WITHOUT_HEAD_DIM,
        attention_multiplier=0.1,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    )


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _granite_moe() -> Any:
    from transformers import GraniteMoeConfig

    return GraniteMoeConfig(
        **WITHOUT_HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_multiplier=0.1,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **COMMON, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    # Alternating windows, sinks in all layers, experts with biases and clamped activations.
    return GptOssConfig(
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )


def _llama4() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **COMMON,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=1024,
        no_rope_layers=[1, 0],
    )


def _deepseek(config: Any, **fields: Any) -> Any:
    return config(
        **WITHOUT_HEAD_DIM | {"num_key_value_heads": 4},
        kv_lora_rank=32,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        **fields,
    )


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    # Queries come from a latent vector, too. One softmax scores all experts; groups compete by their best.
    return _deepseek(
        DeepseekV2Config,
        q_lora_rank=48,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    )


def _deepseek_v2_lite() -> Any:
    from transformers import DeepseekV2Config

    return _deepseek(DeepseekV2Config, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1)


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return _deepseek(
        DeepseekV3Config,
        q_lora_rank=48,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


def _bloom() -> Any:
    from transformers import BloomConfig

    return BloomConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _falcon_rw() -> Any:
    from transformers import FalconConfig

    # ALiBi whose slopes are scaled, and biases: the oldest Falcon models.
    return FalconConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        bias=True,
        parallel_attn=False,
        multi_query=False,
        new_decoder_architecture=False,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _opt() -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=256, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=2048, **_TOKENS,
    )  # fmt: skip


_OLD: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2, n_positions=2048, **_TOKENS)


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(**_OLD, **_TOKENS)


def _phi() -> Any:
    from transformers import PhiConfig

    return PhiConfig(**_OLD, **_TOKENS)


def _starcoder2() -> Any:
    from transformers import Starcoder2Config

    return Starcoder2Config(**_OLD, num_key_value_heads=1, sliding_window=None, **_TOKENS)


def _gemma3_vision() -> Any:
    from transformers import Gemma3Config

    text = tiny_models.FAMILIES["gemma3"]().to_dict()
    return Gemma3Config(
        text_config=text,
        vision_config=_VISION | {"intermediate_size": 64, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )


def _llama4_vision() -> Any:
    from transformers import Llama4Config

    vision = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    return Llama4Config(
        text_config=_llama4().to_dict(),
        vision_config=_VISION | vision | {"intermediate_size": 256, "pixel_shuffle_ratio": 0.5},
    )


def _mistral3() -> Any:
    from transformers import Mistral3Config

    text = {**COMMON, "model_type": "mistral", "sliding_window": None}
    return Mistral3Config(
        text_config=text,
        vision_config=_VISION | {"intermediate_size": 64, "model_type": "pixtral", "head_dim": 32},
        tie_word_embeddings=False,
    )


_ROPE_OF_IMAGES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {key: value for key, value in COMMON.items() if key != "head_dim"}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _ROPE_OF_IMAGES}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig

    text = {key: value for key, value in COMMON.items() if key != "head_dim"}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _ROPE_OF_IMAGES}
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2}
    return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    return Qwen3VLConfig(
        text_config={**COMMON, "rope_parameters": {**_ROPE_OF_IMAGES, "mrope_interleaved": True}},
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    )


MULTIMODAL: dict[str, Callable[[], Any]] = {
    "gemma3-vision": _gemma3_vision,
    "llama4-vision": _llama4_vision,
    "mistral3": _mistral3,
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
}
"""The same for multimodal models. Their text models are those of other families."""
FAMILIES: dict[str, Callable[[], Any]] = {
    **tiny_models.FAMILIES,
    "llama3": _llama3,
    "mistral": _mistral,
    "phi3": _phi3,
    "phi3-long": _phi3_long,
    "granite": _granite,
    "granite-moe": _granite_moe,
    "qwen3-moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "deepseek-v2": _deepseek_v2,
    "deepseek-v2-lite": _deepseek_v2_lite,
    "deepseek-v3": _deepseek_v3,
    "bloom": _bloom,
    "falcon-rw": _falcon_rw,
}
"""Functions that make a configuration, by the model's name in tests."""
CPU_ONLY: dict[str, Callable[[], Any]] = {
    "gpt-neox": _gpt_neox,
    "gpt2": _gpt2,
    "opt": _opt,
    "phi": _phi,
    "starcoder2": _starcoder2,
}
"""The same for models that no test runs on another device."""
NOT_ON_NPU = {
    "bloom": "no kernels for ALiBi",
    "falcon-rw": "no kernels for ALiBi",
    "llama4": "only device cpu serves models with the routing of CustomRoutingRouter",
    "llama4-vision": "only device cpu serves models with the routing of CustomRoutingRouter",
}
"""The families that device rbln refuses, and what the refusal names."""
NOT_ON_GPU = {family: reason for family, reason in NOT_ON_NPU.items() if family.startswith("llama4")}
"""The same for device cuda, which has the same expert layers."""

NO_GRAPHS_ON_GPU = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")
"""Families whose graphs did not equal the model's own forward on a GPU, so that they are not used there."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MambaForCausalLM": ({"model_type": "mamba"}, "has layers with a state of their own"),
    "Mamba2ForCausalLM": ({"model_type": "mamba2"}, "has layers with a state of their own"),
    "JambaForCausalLM": ({"model_type": "jamba"}, "has layers with a state of their own"),
    "FalconH1ForCausalLM": ({"model_type": "falcon_h1"}, "has layers with a state of their own"),
    "GraniteMoeHybridForCausalLM": (
        {"model_type": "granitemoehybrid"},
        "has layers with a state of their own",
    ),
    "Qwen3NextForCausalLM": ({"model_type": "qwen3_next"}, "has layers with a state of their own"),
    "BartForConditionalGeneration": (
        {"model_type": "bart", "is_encoder_decoder": True},
        "has cross-attention",
    ),
    "T5ForConditionalGeneration": ({"model_type": "t5", "is_encoder_decoder": True}, "has cross-attention"),
    "WhisperForConditionalGeneration": (
        {"model_type": "whisper", "is_encoder_decoder": True},
        "has cross-attention",
    ),
    "MllamaForConditionalGeneration": (
        {"model_type": "mllama", "text_config": {"cross_attention_layers": [3, 8]}},
        "has cross-attention",
    ),
    "LlavaForConditionalGeneration": ({"model_type": "llava"}, "is multimodal and not served"),
    "LlamaForCausalLM in MXFP4": (
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
        "has weights in MXFP4",
    ),
    "MPTForCausalLM": ({"model_type": "mpt"}, "vLLM has dropped it after 0.28.0"),
}
"""Architectures that every device refuses: what config.json has, and what the line says."""


def write(family: str, folder: Path) -> Path:
    """Saves a random model of a family to a folder, and returns the folder."""
    return tiny_models.save_model((FAMILIES | MULTIMODAL | CPU_ONLY)[family](), folder)
