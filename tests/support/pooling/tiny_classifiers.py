"""Writes small random models that score, classify or label tokens, within seconds."""

from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["bert-pairs", "bert", "roberta", "modernbert", "qwen3", "bert-tokens"]
VOCAB_SIZE = 256
CONTEXT = 64
LABELS = ("sad", "calm", "glad")


def write(kind: Kind, folder: Path, *, vocab_size: int = VOCAB_SIZE) -> torch.nn.Module:
    """Saves a model and returns it, in float32.

    "bert-pairs" and "qwen3" score with one class; "bert-pairs" tells texts apart by token types, and its
    authors want the bare value. "roberta" and "modernbert" have several classes that exclude each other,
    "bert" several that do not. "bert-tokens" labels each token. "bert", "modernbert" and "qwen3" have heads
    of 32 elements, for which we have kernels; others have 12.
    """
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT, "pad_token_id": 0,
    }  # fmt: skip
    labels = {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: index for index, label in enumerate(LABELS)},
    }
    bare = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    model: Any
    match kind:
        case "bert-pairs":
            config = transformers.BertConfig(**sizes, num_labels=1, **bare)
            model = transformers.BertForSequenceClassification(config)
        case "bert":
            sizes |= {"hidden_size": 64, "num_attention_heads": 2}
            config = transformers.BertConfig(**sizes, **labels, problem_type="multi_label_classification")
            model = transformers.BertForSequenceClassification(config)
        case "bert-tokens":
            model = transformers.BertForTokenClassification(transformers.BertConfig(**sizes, **labels))
        case "roberta":
            sizes |= {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "pad_token_id": 1}
            model = transformers.RobertaForSequenceClassification(
                transformers.RobertaConfig(**sizes, **labels)
            )
        case "modernbert":
            sizes |= {"hidden_size": 64, "num_attention_heads": 2}
            windows = {"local_attention": 8, "global_attn_every_n_layers": 3, "classifier_pooling": "mean"}
            config = transformers.ModernBertConfig(
                **sizes, **labels, **windows, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
            )
            model = transformers.ModernBertForSequenceClassification(config)
        case "qwen3":
            config = transformers.Qwen3Config(**sizes, num_labels=1, num_key_value_heads=2, head_dim=32)
            model = transformers.Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    saved: torch.nn.Module = model
    return saved
