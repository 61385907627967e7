"""Configurations of small random models of the architectures in docs/models.md."""

from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.tiny_models import COMMON, CONTEXT, VOCAB_SIZE, Make, config

# For configurations that have no head_dim: it is 32 because of the larger hidden size.
WITHOUT_HEAD_DIM = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": 128}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GRANITE = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_DEEPSEEK = WITHOUT_HEAD_DIM | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_LLAMA4: dict[str, Any] = COMMON | {
    "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 1024, "no_rope_layers": [1, 0],
}  # fmt: skip

FAMILIES: dict[str, Make] = {
    **tiny_models.FAMILIES,
    "llama3": config(
        "LlamaConfig",
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    # As in version 0.1, all layers have a window: no group keeps a whole sequence.
    "mistral": config("MistralConfig", **COMMON, sliding_window=64),
    # Half of each head rotates, as in Phi-4-mini.
    "phi3": config("Phi3Config", **WITHOUT_HEAD_DIM, partial_rotary_factor=0.5),
    # The sizes of the factors follow from the head size of 32.
    "phi3-long": config(
        "Phi3Config",
        **WITHOUT_HEAD_DIM,
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.05 * i for i in range(16)],
            "long_factor": [1.0 + 0.5 * i for i in range(16)],
            "original_max_position_embeddings": 512,
        },
    ),
    "granite": config("GraniteConfig", **WITHOUT_HEAD_DIM, **_GRANITE),
    "granite-moe": config(
        "GraniteMoeConfig", **WITHOUT_HEAD_DIM, **_GRANITE, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": config(
        "Qwen3MoeConfig",
        **COMMON,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    # Alternating windows, sinks in all layers, experts with biases and clamped activations.
    "gpt-oss": config(
        "GptOssConfig",
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_YARN | {"truncate": False},
    ),
    "llama4": config("Llama4TextConfig", **_LLAMA4),
    # Queries come from a latent vector, too. One softmax scores all experts; groups compete by their best.
    "deepseek-v2": config(
        "DeepseekV2Config",
        **_DEEPSEEK,
        q_lora_rank=48,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v2-lite": config(
        "DeepseekV2Config", **_DEEPSEEK, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1
    ),
    "deepseek-v3": config(
        "DeepseekV3Config",
        **_DEEPSEEK,
        q_lora_rank=48,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "bloom": config("BloomConfig", vocab_size=VOCAB_SIZE, hidden_size=128, n_layer=2, n_head=4, **_TOKENS),
    # ALiBi whose slopes are scaled, and biases: the oldest Falcon models.
    "falcon-rw": config(
        "FalconConfig",
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
        **_TOKENS,
    ),
}
"""Functions that make a configuration, by the model's name in tests."""

_OLD: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 2048,
} | _TOKENS  # fmt: skip
CPU_ONLY: dict[str, Make] = {
    "gpt-neox": config("GPTNeoXConfig", **_OLD),
    "gpt2": config("GPT2Config", vocab_size=256, n_embd=64, n_layer=2, n_head=2, n_positions=2048, **_TOKENS),
    "opt": config(
        "OPTConfig",
        vocab_size=256,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        **_TOKENS,
    ),
    "phi": config("PhiConfig", **_OLD),
    "starcoder2": config("Starcoder2Config", **_OLD, num_key_value_heads=1, sliding_window=None),
}
"""The same for models that no test runs on another device."""

_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_VISION_OF_QWEN = {"depth": 1, "hidden_size": 64, "num_heads": 2}
_ROPE_OF_IMAGES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_TEXT_OF_QWEN2 = {key: value for key, value in COMMON.items() if key != "head_dim"} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": _ROPE_OF_IMAGES,
}


def _around(name: str, text: str, **fields: Any) -> Make:
    """Returns a function that makes a multimodal configuration around a family's text model."""

    def make() -> Any:
        return config(name, text_config=FAMILIES[text]().to_dict(), **fields)()

    return make


MULTIMODAL: dict[str, Make] = {
    "gemma3-vision": _around(
        "Gemma3Config",
        "gemma3",
        vision_config=_VISION | {"intermediate_size": 64, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    ),
    "llama4-vision": _around(
        "Llama4Config",
        "llama4",
        vision_config=_VISION
        | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
        | {"intermediate_size": 256, "pixel_shuffle_ratio": 0.5},
    ),
    "mistral3": config(
        "Mistral3Config",
        text_config={**COMMON, "model_type": "mistral", "sliding_window": None},
        vision_config=_VISION | {"intermediate_size": 64, "model_type": "pixtral", "head_dim": 32},
        tie_word_embeddings=False,
    ),
    "qwen2-vl": config(
        "Qwen2VLConfig",
        text_config=_TEXT_OF_QWEN2,
        vision_config=_VISION_OF_QWEN | {"embed_dim": 64},
        tie_word_embeddings=False,
    ),
    "qwen2.5-vl": config(
        "Qwen2_5_VLConfig",
        text_config=_TEXT_OF_QWEN2,
        vision_config=_VISION_OF_QWEN | {"intermediate_size": 64, "out_hidden_size": 64},
        tie_word_embeddings=False,
    ),
    "qwen3-vl": config(
        "Qwen3VLConfig",
        text_config={**COMMON, "rope_parameters": {**_ROPE_OF_IMAGES, "mrope_interleaved": True}},
        vision_config=_VISION_OF_QWEN
        | {"intermediate_size": 64, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    ),
}
"""The same for multimodal models. Their text models are those of other families."""
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
