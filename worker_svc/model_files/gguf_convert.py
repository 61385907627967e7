"""Converts a GGUF file of the Llama or Gemma 3 family to a Hugging Face folder.

A file whose projections are all Q4_0 or all Q8_0 keeps their codes and scales: the folder is a checkpoint of
compressed-tensors with groups of 32. Everything else is dequantized to bfloat16.

A program with the arguments FILE and FOLDER. It runs in its own process, whose end frees the memory. Other
families, scaled rotary embeddings and other pre-tokenizers are refused.

The weights equal those of transformers' converter bit for bit. transformers' tokenizers are wrong: Gemma's
takes merge ranks for the scores of a unigram model, so "capital" becomes four tokens, and lacks the
beginning-of-sequence token; SmolLM2's ends texts with `<|im_start|>`.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker_svc.quantized.checkpoint_config import quantization_config, quantization_group
from worker_svc.quantized.codes import Bits, Scheme, pack

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
# The same GGUF name stands for different norms in the two families.
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Supported pre-tokenizers of byte-level tokenizers: GPT-2's rule; SmolLM splits digits first.
_SPLITS = ("gpt-2", "smollm")
# By Hugging Face's name of a special token, GGUF's.
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# Types whose blocks of 32 weights are codes and a scale, with their bits. Other types have zero points or
# codes of other sizes.
_BITS: dict[Any, Bits] = {gguf.GGMLQuantizationType.Q4_0: 4, gguf.GGMLQuantizationType.Q8_0: 8}
_BLOCK = 32
# Rows dequantized at a time: a step takes several times their size in float32.
_ROWS = 4096
# ggml's token types.
_CONTROL, _USER_DEFINED = 3, 4


def convert(source: Path, folder: Path) -> None:
    """Writes weights, configuration and tokenizer to `folder`, which must exist.

    `ValueError` says why a file cannot be converted.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise ValueError("it is not a complete GGUF file; fetch it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family = fields["general.architecture"]
    _check(family, fields)
    bits = _bits_of_projections(reader)
    weights = dict(_weights(reader, family, fields, bits))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it private, but a cache may be shared
    config = _llama_config(fields) if family == "llama" else _gemma_config(fields)
    config |= {
        "dtype": "bfloat16",
        "tie_word_embeddings": not any(name.startswith("lm_head.") for name in weights),
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
    }
    if bits:
        head = ["lm_head"]
        targets, ignored = (
            (["Linear", *head], []) if "lm_head.weight_packed" in weights else (["Linear"], head)
        )
        group = quantization_group(Scheme(bits, _BLOCK), targets)
        config["quantization_config"] = quantization_config({"group_0": group}, ignored)
    del weights  # the tokenizer of a large vocabulary takes as much
    special = {
        f"{short}_token_id": int(fields[f"tokenizer.ggml.{name}_token_id"])
        for short, name in _SPECIAL.items()
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    _write(folder / "config.json", config | special)
    _write(folder / "generation_config.json", {k: v for k, v in special.items() if k != "unk_token_id"})
    tokenizer = _byte_level(fields) if fields["tokenizer.ggml.model"] == "gpt2" else _sentencepiece(fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **{name.removesuffix("_id"): tokens[token_id] for name, token_id in special.items()},
        },
    )
    template = fields.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _check(family: str, fields: dict[str, Any]) -> None:
    instead = "use the model's safetensors instead"
    if family not in _NORMS:
        raise ValueError(
            f"GGUF files of the architecture {family} are not supported, only {' and '.join(_NORMS)};"
            f" {instead}"
        )
    scaling = fields.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"rotary embeddings with {scaling} scaling are not supported; {instead}")
    kind = fields["tokenizer.ggml.model"]
    split = fields.get("tokenizer.ggml.pre", "none")
    known = split in _SPLITS if kind == "gpt2" else kind == "llama" and family == "gemma3"
    if not known:
        raise ValueError(f"tokenizers of the type {kind} ({split}) are not supported; {instead}")


def _bits_of_projections(reader: gguf.GGUFReader) -> Bits | None:
    kinds = {tensor.tensor_type for tensor in reader.tensors if _is_projection(tensor.name)}
    return _BITS.get(kinds.pop()) if len(kinds) == 1 else None


def _is_projection(name: str) -> bool:
    return re.fullmatch(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight", name) is not None


def _weights(
    reader: gguf.GGUFReader, family: str, fields: dict[str, Any], bits: Bits | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors; with `bits`, projections and an output head of their type keep their codes."""
    for tensor in reader.tensors:
        name = _hugging_face_name(tensor.name, family)
        heads = 0
        if family == "llama" and ".q_proj." in name:
            heads = int(fields["llama.attention.head_count"])
        elif family == "llama" and ".k_proj." in name:
            heads = int(fields["llama.attention.head_count_kv"])
        is_head = name == "lm_head.weight" and _BITS.get(tensor.tensor_type) == bits
        if bits and (is_head or _is_projection(tensor.name)):
            codes, scales = (_unpermute(each, heads) for each in _blocks(tensor.data, bits))
            module = name.removesuffix(".weight")
            yield f"{module}.weight_packed", pack(codes, bits)
            yield f"{module}.weight_scale", scales.contiguous()
            yield f"{module}.weight_shape", torch.tensor(codes.shape)
            continue
        # Gemma's layers add 1 to a stored norm; GGUF stores the sum.
        offset = 1 if family == "gemma3" and name.endswith("norm.weight") else 0
        parts = [
            torch.from_numpy(dequantize(tensor.data[first : first + _ROWS], tensor.tensor_type) - offset).to(
                torch.bfloat16
            )
            for first in range(0, len(tensor.data), _ROWS)
        ]
        yield name, _unpermute(torch.cat(parts), heads)


def _blocks(data: Any, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits rows of blocks into codes, uint8 [rows, columns], and scales, float16 [rows, groups].

    Codes have no sign: half of their range stands for 0. A block is its scale and then its codes. In Q4_0,
    byte i holds the codes of weights i and i + 16.
    """
    rows = torch.from_numpy(data.copy())
    blocks = rows.view(rows.shape[0], -1, 2 + _BLOCK * bits // 8)
    stored = blocks[..., 2:]
    codes = stored ^ 0x80 if bits == 8 else torch.cat((stored & 0xF, stored >> 4), dim=-1)
    return codes.flatten(1), blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)


def _hugging_face_name(name: str, family: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    part = ({**_IN_LAYER, **_NORMS[family]}).get(match[2]) if match else None
    if match is None or part is None:
        raise ValueError(f"tensors like {name} are not supported; use the model's safetensors instead")
    return f"model.layers.{match[1]}.{part}.weight"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's interleaving of the two halves of each head, which serves its rotary embedding.

    It only moves rows. With 0 heads nothing moves.
    """
    if not heads:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _common_config(fields: dict[str, Any], family: str) -> dict[str, Any]:
    def of(name: str) -> Any:
        return fields[f"{family}.{name}"]

    return {
        "attention_bias": False,
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "max_position_embeddings": of("context_length"),
        "num_attention_heads": of("attention.head_count"),
        "num_hidden_layers": of("block_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        # Stored as float32; rounding to six digits restores the value that the authors wrote.
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
    }


def _llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    common = _common_config(fields, "llama")
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": fields.get(
            "llama.attention.key_length", common["hidden_size"] // common["num_attention_heads"]
        ),
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
    }


def _gemma_config(fields: dict[str, Any]) -> dict[str, Any]:
    common = _common_config(fields, "gemma3")
    head_dim = fields["gemma3.attention.key_length"]
    full_every = 6  # not in the file; the same in the whole family
    return common | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [
            "sliding_attention" if (layer + 1) % full_every else "full_attention"
            for layer in range(common["num_hidden_layers"])
        ],
        "query_pre_attn_scalar": head_dim,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": fields["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": fields["gemma3.attention.sliding_window"],
    }


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    """Builds a byte-level tokenizer like GPT-2's; SmolLM's also splits digits."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([digits, byte_level])
        if fields.get("tokenizer.ggml.pre") == "smollm"
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_tokens_of_type(fields, _CONTROL))
    return tokenizer


def _sentencepiece(fields: dict[str, Any]) -> Tokenizer:
    """Builds Gemma's SentencePiece BPE tokenizer; a piece's score is the rank of the merge that makes it."""
    # Some files store runs of spaces as spaces, others as SentencePiece's "▁".
    tokens = [token.replace(" ", "▁") for token in fields["tokenizer.ggml.tokens"]]
    scores = fields["tokenizer.ggml.scores"]
    kinds = fields["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            continue  # such tokens are matched before merging
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        merges += [(-score, ids[left], ids[right], left, right) for left, right in known]
    merges.sort()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids, merges=[merge[3:] for merge in merges], fuse_unk=True, byte_fallback=True,
            unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(_tokens_of_type(fields, _CONTROL))
    # Normalized tokens are matched after spaces are replaced, so runs of "▁" are found.
    tokenizer.add_tokens(
        [
            AddedToken(tokens[i], normalized="▁" in tokens[i])
            for i, kind in enumerate(kinds)
            if kind == _USER_DEFINED
        ]
    )
    if fields.get("tokenizer.ggml.add_bos_token"):
        bos = tokens[fields["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids[bos])]
        )
    return tokenizer


def _tokens_of_type(fields: dict[str, Any], wanted: int) -> list[AddedToken]:
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == wanted]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
