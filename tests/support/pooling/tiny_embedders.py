"""Writes small random embedding models as folders of Sentence Transformers, within seconds."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["mean", "causal"]
VOCAB_SIZE = 256
CONTEXT = 64


def write(kind: Kind, folder: Path) -> Path:
    """Saves a model with heads of 12 elements, which no NPU kernel for paged attention takes.

    "mean" is an encoder with a layer after pooling and normalization; "causal" pools its last token.
    """
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    }  # fmt: skip
    model = (
        BertModel(BertConfig(**sizes))
        if kind == "mean"
        else LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2, head_dim=12))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    stages = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if kind == "mean":
        stages += [("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
        dense = {
            "in_features": 48,
            "out_features": 20,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        _write(folder / "2_Dense" / "config.json", dense)
        weights = {"linear.weight": torch.randn(20, 48), "linear.bias": torch.randn(20)}
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(stages)
    ]
    _write(folder / "modules.json", modules)
    method = "mean_tokens" if kind == "mean" else "lasttoken"
    pooling = {"word_embedding_dimension": 48, f"pooling_mode_{method}": True}
    _write(folder / "1_Pooling" / "config.json", pooling)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": CONTEXT, "do_lower_case": False})
    return folder


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
