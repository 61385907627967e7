"""Converts a GGUF file of the Llama or Gemma 3 family to a Hugging Face folder.

A program with the arguments FILE and FOLDER. It runs in its own process, whose end frees the memory. Absent
metadata have llama.cpp's defaults. Tensors that the metadata do not describe are refused, and so are other
families, rotary embeddings and pre-tokenizers.

transformers' tokenizers are wrong: Gemma's takes merge ranks for the scores of a unigram model, so "capital"
becomes four tokens, and lacks the beginning-of-sequence token; SmolLM2's ends texts with `<|im_start|>`.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from gguf.quants import dequantize
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker_svc.model_files.gguf_file import GgufFile

# By GGUF's name: Hugging Face's, and the shape in words of `_sizes`.
_TOP_LEVEL = {
    "token_embd": ("model.embed_tokens", "tokens hidden"),
    "output_norm": ("model.norm", "hidden"),
    "output": ("lm_head", "tokens hidden"),
}
_IN_LAYER = {
    "attn_norm": ("input_layernorm", "hidden"),
    "attn_q": ("self_attn.q_proj", "queries hidden"),
    "attn_k": ("self_attn.k_proj", "keys hidden"),
    "attn_v": ("self_attn.v_proj", "keys hidden"),
    "attn_output": ("self_attn.o_proj", "hidden queries"),
    "ffn_gate": ("mlp.gate_proj", "inner hidden"),
    "ffn_up": ("mlp.up_proj", "inner hidden"),
    "ffn_down": ("mlp.down_proj", "hidden inner"),
}
_OF_FAMILY = {
    "llama": {"ffn_norm": ("post_attention_layernorm", "hidden")},
    "gemma3": {
        "attn_q_norm": ("self_attn.q_norm", "head"),
        "attn_k_norm": ("self_attn.k_norm", "head"),
        "post_attention_norm": ("post_attention_layernorm", "hidden"),
        "ffn_norm": ("pre_feedforward_layernorm", "hidden"),
        "post_ffw_norm": ("post_feedforward_layernorm", "hidden"),
    },
}
_TIED = "output.weight"
# Llama 3.1's factors of rotary frequencies.
_FREQUENCIES = "rope_freqs.weight"
_LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "mlp_bias": False,
}  # fmt: skip
# Metadata with the only values that are served; others change the computation.
_NEUTRAL: dict[str, tuple[type, Any]] = {
    "expert_count": (int, 0),
    "attention.causal": (bool, True),
    "rope.scaling.attn_factor": (float, 1.0),
    "final_logit_softcapping": (float, 0.0),
}
# Supported pre-tokenizers of byte-level tokenizers: GPT-2's rule; SmolLM splits digits first.
_SPLITS = ("gpt-2", "smollm")
# By Hugging Face's name of a special token, GGUF's.
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# SentencePiece's special tokens where a file names none.
_DEFAULT_SPECIAL = {"bos": 1, "eos": 2, "unk": 0}
# Ends of a turn, which llama.cpp finds by their text.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<EOT>")
# ggml's token types.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_INSTEAD = "use the model's safetensors instead"
_AGAIN = "convert the model to GGUF again"


def convert(source: Path, folder: Path) -> None:
    """Writes weights, configuration and tokenizer to `folder`, which must exist.

    `ValueError` says why a file cannot be converted.
    """
    file = GgufFile(source)
    if (kind := file.field("general.type", str, "model")) != "model":
        raise ValueError(f"it is of the type {kind}, not a model; pass the model's file")
    family = file.field("general.architecture", str)
    if family not in _OF_FAMILY:
        raise ValueError(
            f"GGUF files of the architecture {family} are not supported, only {' and '.join(_OF_FAMILY)};"
            f" {_INSTEAD}"
        )
    vocabulary = _Vocabulary(file, family)
    config = _common_config(file, family, len(vocabulary.tokens))
    config |= _gemma_config(file, config) if family == "gemma3" else _LLAMA_CONFIG
    names = _check_tensors(file, family, config)
    tokenizer = vocabulary.tokenizer()
    # Imported late, so that a file is refused before torch takes seconds to import.
    from worker_svc.model_files.gguf_weights import write_weights

    config |= write_weights(file.tensors, names, config, folder / "model.safetensors")
    special: dict[str, Any] = {f"{short}_token_id": i for short, i in vocabulary.special.items()}
    if stops := vocabulary.stops():
        special["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    _write(folder / "config.json", config | special)
    _write(folder / "generation_config.json", {k: v for k, v in special.items() if k != "unk_token_id"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **{f"{short}_token": vocabulary.tokens[i] for short, i in vocabulary.special.items()},
        },
    )
    if vocabulary.template:
        (folder / "chat_template.jinja").write_text(vocabulary.template, encoding="utf-8")


def _check_tensors(file: GgufFile, family: str, config: dict[str, Any]) -> dict[str, str]:
    """Returns Hugging Face's names by GGUF's; refuses missing, unknown and misshapen tensors."""
    layers, head = config["num_hidden_layers"], config["head_dim"]
    sizes = {
        "tokens": config["vocab_size"], "hidden": config["hidden_size"], "inner": config["intermediate_size"],
        "head": head, "queries": config["num_attention_heads"] * head, "keys": config["num_key_value_heads"] * head,
    }  # fmt: skip
    if not 0 < layers <= len(file.tensors):
        raise ValueError(
            f"its metadata describe {layers} layers, but it has {len(file.tensors)} tensors; {_AGAIN}"
        )
    parts = _TOP_LEVEL | {
        f"blk.{layer}.{name}": (f"model.layers.{layer}.{own}", shape)
        for layer in range(layers)
        for name, (own, shape) in (_IN_LAYER | _OF_FAMILY[family]).items()
    }
    expected = {f"{name}.weight": (f"{own}.weight", shape) for name, (own, shape) in parts.items()}
    missing = [name for name in expected if name not in file.tensors and name != _TIED]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise ValueError(f"it lacks {', '.join(missing[:10])}{more}; fetch it again")
    for name, tensor in file.tensors.items():
        if name == _FREQUENCIES and (dequantize(tensor.data, tensor.kind) == 1).all():
            continue
        if name not in expected:
            raise ValueError(
                f"tensors like {name} are not supported in {layers} layers of {family}; {_INSTEAD}"
            )
        shape = tuple(sizes[word] for word in expected[name][1].split())
        if tensor.shape[-len(shape) :] != shape or tensor.data.shape[0] != math.prod(shape[:-1]):
            raise ValueError(
                f"tensor {name} is {list(tensor.shape)} in the file, but its metadata describe {list(shape)};"
                f" fetch it again, or {_AGAIN}"
            )
    return {name: own for name, (own, _) in expected.items() if name in file.tensors}


def _common_config(file: GgufFile, family: str, tokens: int) -> dict[str, Any]:
    for name, (kind, value) in _NEUTRAL.items():
        found: Any = file.field(f"{family}.{name}", kind, value)
        if found != value:
            raise ValueError(f"{family}.{name} of {found} is not supported; {_INSTEAD}")

    def of(name: str, default: int | None = None) -> int:
        found = file.same_in_layers(f"{family}.{name}", layers, default)
        if found < 1:
            raise ValueError(f"{family}.{name} is {found} in its metadata; {_AGAIN}")
        return found

    layers = file.field(f"{family}.block_count", int)
    hidden, heads = of("embedding_length"), of("attention.head_count")
    kv_heads = of("attention.head_count_kv", heads)
    head = of("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := of(name, head)) != head:
            raise ValueError(f"{family}.{name} is {found}, but heads have {head} numbers; {_INSTEAD}")
    if heads % kv_heads or head % 2:
        raise ValueError(f"{heads} heads of {head} numbers do not share {kv_heads} keys; {_AGAIN}")
    return {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": head,
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "max_position_embeddings": of("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        # Stored as float32; rounding to six digits restores the value that the authors wrote.
        "rms_norm_eps": float(f"{file.field(f'{family}.attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_parameters": _rotary(file, family),
        "tie_word_embeddings": _TIED not in file.tensors,
        "vocab_size": tokens,
    }


def _rotary(file: GgufFile, family: str) -> dict[str, Any]:
    """Returns the rotary embedding with llama.cpp's defaults: a factor without a type scales linearly."""
    prefix = f"{family}.rope"
    base = file.field(f"{prefix}.freq_base", float, 10_000.0)
    kind = file.field(f"{prefix}.scaling.type", str, "linear")
    factor = file.field(f"{prefix}.scaling.factor", float, file.field(f"{prefix}.scale_linear", float, 0.0))
    if kind not in ("linear", "none"):
        raise ValueError(f"rotary embeddings with {kind} scaling are not supported; {_INSTEAD}")
    if not (0 <= factor < math.inf and 0 < base < math.inf):
        raise ValueError(f"{prefix} has the base {base} and the factor {factor}; {_AGAIN}")
    if kind == "none" or factor in (0, 1):
        return {"rope_type": "default", "rope_theta": base}
    return {"rope_type": "linear", "rope_theta": base, "factor": factor}


def _gemma_config(file: GgufFile, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    # llama.cpp has no other sign of the model of 27 billion parameters.
    scale_of = common["hidden_size"] // common["num_attention_heads"] if layers == 62 else common["head_dim"]
    full_every = file.field("gemma3.attention.sliding_window_pattern", int, 6)
    # Without a window all layers are alike. The configuration needs a number.
    window = file.field("gemma3.attention.sliding_window", int, 0)
    local_base = file.field("gemma3.rope.freq_base_swa", float, 10_000.0)

    def local(layer: int) -> bool:
        return window > 0 and (full_every == 0 or (layer + 1) % full_every != 0)

    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [f"{'sliding' if local(layer) else 'full'}_attention" for layer in range(layers)],
        "query_pre_attn_scalar": scale_of,
        "rope_parameters": {
            "full_attention": common["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
        "sliding_window": window or common["max_position_embeddings"],
    }


class _Vocabulary:
    """Tokens, special tokens and tokenizer of a file."""

    def __init__(self, file: GgufFile, family: str) -> None:
        kind, split = (file.field(f"tokenizer.ggml.{name}", str, "none") for name in ("model", "pre"))
        self._is_bytes = kind == "gpt2"
        known = split in _SPLITS if self._is_bytes else kind == "llama" and family == "gemma3"
        if not known:
            raise ValueError(f"tokenizers of the type {kind} ({split}) are not supported; {_INSTEAD}")
        self._file, self._split = file, split
        found = file.field("tokenizer.ggml.tokens", list)
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(found)]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise ValueError(f"two of its tokens are {twice!r}; {_AGAIN}")
        kinds = file.numbers("tokenizer.ggml.token_type", len(self.tokens))
        self._kinds = [_NORMAL] * len(self.tokens) if kinds is None else kinds.tolist()
        self.template = file.field("tokenizer.chat_template", str, "")
        defaults = {} if self._is_bytes else _DEFAULT_SPECIAL
        ids = {short: self._token(name, defaults.get(short)) for short, name in _SPECIAL.items()}
        self.special = {short: token for short, token in ids.items() if token is not None}

    def _token(self, name: str, default: int | None = None) -> int | None:
        found = self._file.field(f"tokenizer.ggml.{name}_token_id", int, -1 if default is None else default)
        if found >= len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id is {found}, but it has {len(self.tokens)} tokens; {_AGAIN}"
            )
        return found if found >= 0 else None

    def stops(self) -> list[int]:
        """Returns the tokens that end an answer: of the text, of a turn, of a message."""
        told = [self.ids[end] for end in _TURN_ENDS if end in self.ids and end in self.template]
        turns = told if (turn := self._token("eot")) is None else [turn]
        ends = (self.special.get("eos"), *turns, self._token("eom"))
        return list(dict.fromkeys(end for end in ends if end is not None))

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer; `ValueError` names what it lacks."""
        try:
            tokenizer = self._byte_level() if self._is_bytes else self._sentencepiece()
            control, defined = self._of_kind(_CONTROL), self._of_kind(_USER_DEFINED)
            tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
            # Normalized tokens are matched after spaces are replaced, so runs of "▁" are found.
            tokenizer.add_tokens([AddedToken(token, normalized="▁" in token) for token in defined])
            self._add_ends(tokenizer)
        except ValueError:
            raise
        except Exception as error:  # the library has no other type
            raise ValueError(f"its tokenizer cannot be built: {error}; {_AGAIN}") from error
        return tokenizer

    def _of_kind(self, wanted: int) -> list[str]:
        tokens = self.tokens if self._is_bytes else self._pieces()
        return [token for token, kind in zip(tokens, self._kinds, strict=False) if kind == wanted]

    def _add_ends(self, tokenizer: Tokenizer) -> None:
        """Lets the tokenizer add the tokens that begin and end a text."""
        ends = []
        for short, default in (("bos", not self._is_bytes), ("eos", False)):
            is_added = self._file.field(f"tokenizer.ggml.add_{short}_token", bool, default)
            if is_added and short not in self.special:
                raise ValueError(f"it adds a token {short} to texts, but names none; {_AGAIN}")
            ends.append(self.tokens[self.special[short]] if is_added else "")
        if any(ends):
            bos, eos = ends
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A {eos}".strip(),
                pair=" ".join(filter(None, (bos, "$A", eos, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1"))),
                special_tokens=[(end, self.ids[end]) for end in ends if end],
            )

    def _byte_level(self) -> Tokenizer:
        """Builds a byte-level tokenizer like GPT-2's; SmolLM's also splits digits."""
        merges = []
        for merge in self._file.field("tokenizer.ggml.merges", list):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= self.ids.keys():
                raise ValueError(f"tokenizer.ggml.merges has {merge!r}, which joins no two tokens; {_AGAIN}")
            merges.append((left, right))
        tokenizer = Tokenizer(models.BPE(vocab=self.ids, merges=merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([digits, byte_level]) if self._split == "smollm" else byte_level
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _pieces(self) -> list[str]:
        # Some files store runs of spaces as spaces, others as SentencePiece's "▁".
        return [token.replace(" ", "▁") for token in self.tokens]

    def _sentencepiece(self) -> Tokenizer:
        """Builds Gemma's SentencePiece BPE tokenizer; a piece's score is the rank of its merge."""
        if self._file.field("tokenizer.ggml.add_space_prefix", bool, False):
            raise ValueError(f"tokenizers that begin texts with a space are not supported; {_INSTEAD}")
        tokens = self._pieces()
        scores = self._file.numbers("tokenizer.ggml.scores", len(tokens))
        if scores is None:
            raise ValueError(f"its metadata lack tokenizer.ggml.scores; {_AGAIN}")
        ids = {token: i for i, token in enumerate(tokens)}
        merges = []
        for token, score, kind in zip(tokens, scores.tolist(), self._kinds, strict=False):
            if kind in (_CONTROL, _USER_DEFINED):
                continue  # such tokens are matched before merging
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
            merges += [(-score, ids[left], ids[right], left, right) for left, right in known]
        merges.sort()
        tokenizer = Tokenizer(
            models.BPE(
                vocab=ids, merges=[merge[3:] for merge in merges], fuse_unk=True, byte_fallback=True,
                unk_token=tokens[self.special["unk"]],
            )
        )  # fmt: skip
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError, SafetensorError) as error:
        sys.exit(" ".join(str(error).split()))
