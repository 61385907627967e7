"""Writes a small random model of each supported family as a Hugging Face folder, within seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 256
CONTEXT = 2048
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Fields of most configurations. Heads have 32 elements."""


Make = Callable[[], Any]


def config(name: str, **fields: Any) -> Make:
    """Returns a function that makes transformers' configuration of this class."""

    def make() -> Any:
        import transformers

        return getattr(transformers, name)(**fields)

    return make


FAMILIES: dict[str, Make] = {
    "llama": config("LlamaConfig", **COMMON),
    # Qwen 2 has no head_dim setting; it follows from the hidden size.
    "qwen2": config("Qwen2Config", **COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": config("Qwen3Config", **COMMON),
    "mixtral": config(
        "MixtralConfig", **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    # A shared expert with its own gate; weights of the chosen experts are not renormalized. Layer 0 is dense.
    "qwen2-moe": config(
        "Qwen2MoeConfig",
        **COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1},
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        norm_topk_prob=False,
        mlp_only_layers=[0],
    ),
    # DeepSeek's routing: sigmoids, a bias that corrects the choice, two of four groups, a factor.
    "glm4-moe": config(
        "Glm4MoeConfig",
        **COMMON,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
    ),
    # A softmax with a bias that corrects the choice.
    "ernie-moe": config(
        "Ernie4_5_MoeConfig",
        **COMMON,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=32,
        moe_layer_start_index=1,
    ),
    "gemma3": config(
        "Gemma3TextConfig",
        **COMMON | {"tie_word_embeddings": True},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        query_pre_attn_scalar=32,
    ),
}
"""Functions that make a family's configuration, by the family's name in tests."""
EXPERT_FAMILIES = ("mixtral", "qwen2-moe", "glm4-moe", "ernie-moe")
"""The families with expert layers. Each routes by another rule."""


def write(family: str, folder: Path, **save: Any) -> Path:
    """Saves a model of a family.

    Args:
        family: one of :data:`FAMILIES`.
        folder: created if it is missing.
        save: options of transformers' ``save_pretrained``.

    Returns:
        ``folder``.
    """
    return save_model(FAMILIES[family](), folder, **save)


def save_model(config: Any, folder: Path, **save: Any) -> Path:
    """Saves a random model with this configuration of transformers; see :func:`write`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The default weights are so small that all logits are nearly equal, and biases are zero.
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                # Gemma scales its embeddings and reuses them as the output layer.
                parameter.normal_(std=0.05 if "embed" in name else 0.15)
        for name, buffer in model.named_buffers():
            # Large enough that it changes the choice of experts.
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder, **save)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Adds a tokenizer: tokens from 2 on for the words w0 to w99, and token 0 at the beginning of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    begin, unknown = "<s>", "<unk>"
    vocabulary = {begin: 0, unknown: 1} | {f"w{n}": n + 2 for n in range(100)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin).save_pretrained(folder)
