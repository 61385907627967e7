"""Rows of the table of checkpoints: tiny models as GGUF files.

A row changes a complete file in memory: metadata, tensors with their types, and bytes after it is written.
"""

import json
import logging
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.support import tiny_models
from tests.support.checkpoints.cases import Case, Kind

Q: Final[Any] = gguf.GGMLQuantizationType
V: Final[Any] = gguf.GGUFValueType
FILE: Final = "tiny.gguf"
HEADS, KV_HEADS = 4, 2
KEYS, DOWN, NORM = "blk.1.attn_k.weight", "blk.1.ffn_down.weight", "output_norm.weight"
# Hugging Face's names by GGUF's.
_NAMES: Final = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORMS: Final = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
}  # fmt: skip
_PROJECTIONS: Final = tuple(f".{part}.weight" for part in list(_NAMES)[4:])
_HEAD: Final = "output.weight"


@dataclass
class Parts:
    """A file in memory. A change edits it."""

    family: str
    fields: dict[str, tuple[Any, Any]]
    """Metadata and their types."""
    tensors: dict[str, tuple[Any, Any]]
    """Stored tensors and their types."""
    name: str = FILE
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the reference's config.json."""
    split: int = 0
    """Tensors in a part of the model; 0 for a single file."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the writer."""
    damage: Sequence[Callable[[bytes], bytes]] = ()
    files: dict[str, bytes | None] = field(default_factory=dict)
    """Files in addition; `None` removes one."""
    model: str | None = FILE
    """The file that is served; `None` for the folder."""


Change = Callable[[Parts], None]


def vocabulary() -> list[str]:
    """Returns the tokens: special ones, the letters of ASCII, and two that merges make."""
    letters = [chr(code) for code in range(33, 127)]
    first = ["<pad>", "<s>", "</s>", "<think>", "<|im_end|>", *letters, "Ġ", "Ċ", "ab", "abc"]
    return [*first, *(f"[PAD{i}]" for i in range(len(first), tiny_models.VOCAB_SIZE))]


def _fields(family: str, config: Any) -> dict[str, tuple[Any, Any]]:
    numbers = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": 32,
        "attention.value_length": 32,
    }  # fmt: skip
    found = {f"{family}.{name}": (value, V.UINT32) for name, value in numbers.items()}
    tokens = vocabulary()
    found |= {
        f"{family}.attention.layer_norm_rms_epsilon": (config["rms_norm_eps"], V.FLOAT32),
        f"{family}.rope.freq_base": (1e6 if family == "gemma3" else 10_000.0, V.FLOAT32),
        "tokenizer.ggml.tokens": (tokens, V.ARRAY),
        "tokenizer.ggml.token_type": ([3, 3, 3, 4, 3, *[1] * (len(tokens) - 5)], V.ARRAY),
        "tokenizer.ggml.bos_token_id": (1, V.UINT32),
        "tokenizer.ggml.eos_token_id": (2, V.UINT32),
        "tokenizer.ggml.padding_token_id": (0, V.UINT32),
    }
    if family == "llama":
        return found | {
            "tokenizer.ggml.model": ("gpt2", V.STRING),
            "tokenizer.ggml.pre": ("gpt-2", V.STRING),
            "tokenizer.ggml.merges": (["a b", "ab c"], V.ARRAY),
        }
    return found | {
        "gemma3.attention.sliding_window": (64, V.UINT32),
        "gemma3.attention.sliding_window_pattern": (2, V.UINT32),
        "tokenizer.ggml.model": ("llama", V.STRING),
        "tokenizer.ggml.scores": ([-float(i) for i in range(len(tokens))], V.ARRAY),
        "tokenizer.ggml.unknown_token_id": (0, V.UINT32),
    }


@cache
def _source(family: str, inner: int = 128) -> tuple[dict[str, torch.Tensor], str]:
    folder = Path(tempfile.mkdtemp(prefix="gguf-"))
    config = tiny_models.FAMILIES[family]()
    config.intermediate_size = inner
    tiny_models.save_model(config, folder)
    return load_file(folder / "model.safetensors"), (folder / "config.json").read_text()


def _hugging_face_name(name: str, family: str) -> str:
    part = name.removesuffix(".weight").rpartition(".")[2]
    own = (_NAMES | _NORMS[family])[part]
    return f"model.layers.{name.split('.')[1]}.{own}.weight" if name.startswith("blk.") else f"{own}.weight"


def _rotated_heads(name: str, family: str, rows: int) -> int:
    """Returns the number of heads whose rows llama.cpp reorders."""
    return rows // 32 if family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")) else 0


def parts_of(family: str, inner: int = 128) -> Parts:
    """Returns a complete file of float32 weights, each of which bfloat16 represents."""
    weights, config = _source(family, inner)
    fields = _fields(family, json.loads(config))
    names = [*list(_NAMES)[:2], *(["output"] if "lm_head.weight" in weights else [])]
    names += [f"blk.{i}.{part}" for i in range(2) for part in (*list(_NAMES)[3:], *_NORMS[family])]
    tensors = {}
    for name in (f"{name}.weight" for name in names):
        values = weights[_hugging_face_name(name, family)].bfloat16().float().numpy()
        if heads := _rotated_heads(name, family, len(values)):
            # Of each head, llama.cpp alternates rows of the two halves.
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if family == "gemma3" and "norm" in name:
            values = values + 1
        tensors[name] = (np.ascontiguousarray(values), Q.F32)
    return Parts(family, fields, tensors)


def write(family: str, changes: Sequence[Change], folder: Path, inner: int = 128) -> Path:
    """Writes a changed file; returns the value of `--model`."""
    parts = parts_of(family, inner)
    for change in changes:
        change(parts)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / parts.name
    logging.getLogger("gguf").setLevel(logging.ERROR)
    writer = gguf.GGUFWriter(path, parts.family, split_max_tensors=parts.split, **parts.options)
    writer.data_alignment = parts.fields.get("general.alignment", (writer.data_alignment,))[0]
    for name, (value, kind) in parts.fields.items():
        writer.add_key_value(name, value, kind)
    for name, (data, kind) in parts.tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for edit in parts.damage:
        path.write_bytes(edit(path.read_bytes()))
    for name, content in parts.files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    return folder if parts.model is None else folder / parts.model


def write_floats(family: str, changes: Sequence[Change], folder: Path, inner: int = 128) -> Path:
    """Writes the model of a changed file's weights, dequantized.

    What does not keep its codes is rounded to bfloat16, as documented.
    """
    parts = parts_of(family, inner)
    for change in changes:
        change(parts)
    projections = {kind for name, (_, kind) in parts.tensors.items() if name.endswith(_PROJECTIONS)}
    codes = projections if len(projections) == 1 and projections <= {Q.Q4_0, Q.Q8_0} else set()
    weights = {}
    parts.tensors.pop("rope_freqs.weight", None)  # of ones
    for name, (data, kind) in parts.tensors.items():
        values = torch.from_numpy(np.array(dequantize(data, kind), np.float32))
        if heads := _rotated_heads(name, family, len(values)):
            values = values.reshape(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        if family == "gemma3" and "norm" in name:
            values = values - 1
        is_code = kind in codes and (name == _HEAD or name.endswith(_PROJECTIONS))
        own = values if is_code else values.bfloat16().float()
        weights[_hugging_face_name(name, family)] = own.contiguous()
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(_source(family, inner)[1]) | {"tie_word_embeddings": "lm_head.weight" not in weights}
    (folder / "config.json").write_text(json.dumps(config | parts.config))
    return folder


# Changes.


def put(name: str, value: Any, kind: Any = None) -> Change:
    """Sets an entry of the metadata; of the same type as before if none is given."""

    def change(parts: Parts) -> None:
        parts.fields[name] = (value, kind if kind is not None else parts.fields[name][1])

    return change


def without(*names: str) -> Change:
    """Removes entries of the metadata."""

    def change(parts: Parts) -> None:
        for name in names:
            del parts.fields[name]

    return change


def drop(*names: str) -> Change:
    """Removes tensors by the beginnings of their names."""

    def change(parts: Parts) -> None:
        kept = {name: each for name, each in parts.tensors.items() if not name.startswith(names)}
        assert len(kept) < len(parts.tensors)
        parts.tensors = kept

    return change


def tensor(name: str, make: Callable[[Any], Any]) -> Change:
    """Replaces the numbers of a tensor in float32."""

    def change(parts: Parts) -> None:
        data, kind = parts.tensors[name]
        parts.tensors[name] = (np.ascontiguousarray(make(data)), kind)

    return change


def add(name: str, *shape: int, value: float = 1.0) -> Change:
    """Adds a tensor of equal numbers in float32."""

    def change(parts: Parts) -> None:
        assert name not in parts.tensors
        parts.tensors[name] = (np.full(shape, value, np.float32), Q.F32)

    return change


def stored(kind: Any, *names: str) -> Change:
    """Quantizes tensors; all projections of layers if none is given."""

    def change(parts: Parts) -> None:
        for name, (data, _) in parts.tensors.items():
            if name in names or (not names and name.endswith(_PROJECTIONS)):
                parts.tensors[name] = (quantize(data, kind), kind)

    return change


def random_blocks(kind: Any, name: str = "ffn_down.weight") -> Change:
    """Stores made-up blocks of a type that the gguf package cannot write."""

    def change(parts: Parts) -> None:
        generator = np.random.default_rng(0)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        for each, (data, _) in parts.tensors.items():
            if not each.endswith(name):
                continue
            rows = generator.integers(0, 256, (*data.shape[:-1], data.shape[-1] // block, size), np.uint8)
            bad = np.zeros(rows.shape[:-1], bool)
            # The bytes of a scale in float16 are not known apart: retry the blocks that it makes too large.
            for _ in range(200):
                with np.errstate(all="ignore"):
                    values = dequantize(rows.reshape(-1, size), kind)
                bad = ~(np.isfinite(values) & (np.abs(values) < 1)).all(axis=-1).reshape(rows.shape[:-1])
                rows[bad] = generator.integers(0, 256, (int(bad.sum()), size), np.uint8)
            rows[bad] = 0
            parts.tensors[each] = (rows.reshape(*data.shape[:-1], -1), kind)

    return change


def damaged(edit: Callable[[bytes], bytes]) -> Change:
    """Edits the bytes of the file."""

    def change(parts: Parts) -> None:
        parts.damage = (*parts.damage, edit)

    return change


def patch(at: int, form: str, value: Any) -> Change:
    """Overwrites a number at a place of the file."""
    new = struct.pack(form, value)
    return damaged(lambda raw: raw[:at] + new + raw[at + len(new) :])


def after(name: str, form: str, value: Any, skip: int = 0) -> Change:
    """Overwrites a number after the first place where a name stands in the file."""
    new = struct.pack(form, value)

    def edit(raw: bytes) -> bytes:
        at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + skip
        return raw[:at] + new + raw[at + len(new) :]

    return damaged(edit)


def sets(**attributes: Any) -> Change:
    """Sets attributes of the parts."""

    def change(parts: Parts) -> None:
        for name, value in attributes.items():
            setattr(parts, name, value)

    return change


def part(number: int, count: int) -> str:
    """Returns the name of a part."""
    return f"tiny-{number:05}-of-{count:05}.gguf"


def _row(kind: Kind, name: str, *changes: Change, says: Sequence[str], quick: bool = False, family: str = "llama") -> Case:  # fmt: skip
    assert says
    return Case(f"{family} gguf: {name}", kind, partial(write, family, changes), tuple(says), quick=quick)


hurt = partial(_row, "damaged")
contradicts = partial(_row, "contradicting")
unserved = partial(_row, "unsupported")


def right(name: str, *changes: Change, quick: bool = False, family: str = "llama", inner: int = 128) -> Case:
    """Returns a row of a served model, whose reference has the same changes."""
    return Case(
        f"{family} gguf: {name}",
        "right",
        partial(write, family, changes, inner=inner),
        expected=partial(write_floats, family, changes, inner=inner),
        quick=quick,
    )


def llama(name: str) -> str:
    """Returns the name of an entry of the metadata."""
    return f"llama.{name}"


def ggml(name: str) -> str:
    """Returns the name of a tokenizer's entry of the metadata."""
    return f"tokenizer.ggml.{name}"


_AT_VERSION, _AT_TENSORS, _AT_VALUES = 4, 8, 16


def _damaged() -> list[Case]:
    names = [
        *(f"blk.1.{part}.weight" for part in (*list(_NAMES)[3:], "ffn_norm")),
        *("token_embd.weight", NORM),
    ]
    incomplete = ["is not a complete GGUF file"]
    return [
        *(hurt(f"without {name}", drop(name), says=["it lacks", name], quick=name == DOWN) for name in names),
        hurt("without a layer", drop("blk.1."), says=["it lacks blk.1.attn_norm.weight", "fetch it again"]),
        hurt("without the first layer", drop("blk.0."), says=["it lacks blk.0."]),
        hurt("no tensors", drop("blk", "output", "token"), says=["2 layers, but it has 0 tensors"]),
        hurt("empty", damaged(lambda _: b""), says=incomplete),
        hurt("four bytes", damaged(lambda raw: raw[:4]), says=incomplete),
        hurt("cut in the metadata", damaged(lambda raw: raw[:3000]), says=incomplete),
        hurt("cut in the data", damaged(lambda raw: raw[:-40_000]), says=incomplete),
        hurt("cut by one byte", damaged(lambda raw: raw.rstrip(b"\0")[:-1]), says=incomplete),
        hurt("another magic", patch(0, "4s", b"GGML"), says=["is not a GGUF file"]),
        hurt("a text", damaged(lambda _: b"version https://git-lfs"), says=["is not a GGUF file"]),
        hurt("2^60 tensors", patch(_AT_TENSORS, "<Q", 1 << 60), says=incomplete),
        hurt("2^60 entries", patch(_AT_VALUES, "<Q", 1 << 60), says=incomplete),
        hurt("2^60 tokens", after(ggml("tokens"), "<Q", 1 << 60, 8), says=incomplete),
        hurt("2^60 types", after(ggml("token_type"), "<Q", 1 << 60, 8), says=incomplete),
        hurt("a name of 2^60 letters", patch(24, "<Q", 1 << 60), says=incomplete),
        hurt("2^60 rows", after(DOWN, "<Q", 1 << 60, 12), says=incomplete),
        hurt("2^31 dimensions", after(DOWN, "<I", 1 << 31), says=[DOWN, "dimensions"]),
        hurt("no architecture", damaged(lambda raw: raw.replace(b"architecture", b"architectura")), says=["lack general.architecture"]),
        hurt("a type of metadata", after(llama("block_count"), "<I", 77), says=["unknown type 77"]),
        hurt("no UTF-8", after(ggml("tokens"), "<B", 0xFF, 24), says=["a text that is not UTF-8"]),
        hurt("misaligned", after(DOWN, "<Q", 36, 24), says=[DOWN, "at byte 36"]),
        hurt("NaN", tensor(DOWN, lambda t: t * np.nan), says=[DOWN, "not finite"]),
        hurt("infinite scales", stored(Q.Q8_0), _infinite, says=["not finite"]),
        hurt("a tensor twice", damaged(lambda raw: raw.replace(b"blk.1.attn_k.", b"blk.1.attn_v.")),
             says=["the tensor blk.1.attn_v.weight twice"]),
        hurt("an entry twice", damaged(lambda raw: raw.replace(b"key_length", b"head_count")),
             says=["llama.attention.head_count twice"]),
    ]  # fmt: skip


def _infinite(parts: Parts) -> None:
    data, kind = parts.tensors[DOWN]
    data = data.copy()
    data[0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    parts.tensors[DOWN] = (data, kind)


def _contradicting() -> list[Case]:
    described = "but its metadata describe"
    return [
        *(
            contradicts(f"{word} {name}", tensor(name, make), says=[f"tensor {name} is {shape} in the file", described])
            for name, word, make, shape in (
                (DOWN, "longer", lambda t: np.concatenate((t, t[:1])), [65, 128]),
                (DOWN, "wider", lambda t: np.concatenate((t, t), 1), [64, 256]),
                (DOWN, "transposed", lambda t: t.T, [128, 64]),
                (DOWN, "flat", lambda t: t.ravel(), [8192]),
                (KEYS, "longer", lambda t: np.concatenate((t, t)), [128, 64]),
                ("token_embd.weight", "shorter", lambda t: t[:-6], [250, 64]),
                ("output.weight", "padded", lambda t: np.concatenate((t, t)), [512, 64]),
                (NORM, "shorter", lambda t: t[1:], [63]),
            )
        ),
        *(
            contradicts(f"{name} {value}", put(llama(name), value), says=[says])
            for name, value, says in (
                ("feed_forward_length", 64, f"is [128, 64] in the file, {described} [64, 64]"),
                ("embedding_length", 32, f"{described} [256, 32]"),
                ("attention.head_count", 2, "blk.0.attn_q.weight is [128, 64]"),
                ("attention.head_count_kv", 4, "blk.0.attn_k.weight is [64, 64]"),
                ("attention.head_count_kv", 3, "4 heads of 32 numbers do not share 3 keys"),
                ("attention.head_count", 0, "llama.attention.head_count is 0"),
                ("attention.key_length", 16, "llama.attention.value_length is 32, but heads have 16 numbers"),
                ("block_count", 1, "tensors like blk.1.attn_norm.weight are not supported in 1 layers"),
                ("block_count", 3, "it lacks blk.2.attn_norm.weight"),
                ("block_count", 0, "describe 0 layers"),
                ("block_count", 4_000_000_000, "4000000000 layers, but it has"),
            )
        ),
        *(
            contradicts(f"{name} is {value!r}", put(name, value, kind), says=[name])
            for name, value, kind in (
                (llama("block_count"), "two", V.STRING),
                (llama("rope.freq_base"), "10000", V.STRING),
                (llama("attention.layer_norm_rms_epsilon"), [1e-5, 1e-5], V.ARRAY),
                (ggml("tokens"), [1, 2, 3], V.ARRAY),
                (ggml("tokens"), "abc", V.STRING),
                (ggml("token_type"), ["a", "b"], V.ARRAY),
                (ggml("token_type"), [1, 1], V.ARRAY),
                (ggml("merges"), "a b", V.STRING),
                (ggml("merges"), ["ab"], V.ARRAY),
                (ggml("merges"), ["a z"], V.ARRAY),
                (ggml("add_bos_token"), 1, V.UINT32),
                (ggml("eos_token_id"), 256, V.UINT32),
                (ggml("eot_token_id"), 1 << 31, V.UINT32),
                ("general.alignment", 33, V.UINT32),
                ("general.architecture", 3, V.UINT32),
            )
        ),
        contradicts("two equal tokens", put(ggml("tokens"), [*vocabulary()[:-1], "ab"]), says=["two of its tokens are 'ab'"]),
        contradicts("fewer tokens", put(ggml("tokens"), vocabulary()[:200]), says=[f"token_embd.weight is [256, 64] in the file, {described} [200, 64]"], quick=True),
        contradicts("BOS without a name", put(ggml("add_bos_token"), True, V.BOOL), without(ggml("bos_token_id")), says=["token bos"]),
    ]  # fmt: skip


def _unsupported() -> list[Case]:
    absent = [
        *map(llama, ("block_count", "context_length", "embedding_length", "feed_forward_length")),
        *map(llama, ("attention.head_count", "attention.layer_norm_rms_epsilon")),
        *map(ggml, ("model", "tokens", "merges")),
    ]
    instead = "use the model's safetensors instead"
    return [
        *(contradicts(f"without {name}", without(name), says=[name if "model" not in name else "type none"]) for name in absent),
        *(
            unserved(f"type {number}", after(DOWN, "<I", number, 20), says=[DOWN, title])
            for number, title in (
                (4, "Q4_2"), (31, "Q4_0_4_4"), (36, "IQ4_NL_4_4"), (153, "IQ2_KT"), (999, "number 999"),
                (9, "Q8_1"), (26, "I32"), (28, "F64"),
            )
        ),
        *(
            unserved(f"{name} {value}", put(name, value, kind), says=[says])
            for name, value, kind, says in (
                ("general.architecture", "qwen2", V.STRING, "architecture qwen2"),
                ("general.type", "adapter", V.STRING, "of the type adapter, not a model"),
                (llama("rope.scaling.type"), "yarn", V.STRING, "yarn scaling"),
                (llama("rope.scaling.type"), "longrope", V.STRING, "longrope scaling"),
                (llama("rope.scaling.attn_factor"), 0.5, V.FLOAT32, "attn_factor of 0.5"),
                (llama("rope.scaling.factor"), -2.0, V.FLOAT32, "the factor -2.0"),
                (llama("rope.dimension_count"), 16, V.UINT32, "rope.dimension_count is 16"),
                (llama("expert_count"), 8, V.UINT32, "expert_count of 8"),
                (llama("attention.causal"), False, V.BOOL, "attention.causal of False"),
                (llama("attention.head_count_kv"), [2, 1], V.ARRAY, "layers of different sizes"),
                (llama("attention.head_count_kv"), [2, 2, 2], V.ARRAY, "3 numbers for 2 layers"),
                (ggml("model"), "t5", V.STRING, "tokenizers of the type t5"),
                (ggml("model"), "llama", V.STRING, "tokenizers of the type llama"),
                (ggml("pre"), "llama-bpe", V.STRING, "gpt2 (llama-bpe)"),
            )
        ),
        unserved("Llama 3.1's frequencies", add("rope_freqs.weight", 16, value=8.0), says=["rope_freqs.weight"]),
        unserved("a bias", add("blk.0.attn_q.bias", 128), says=["blk.0.attn_q.bias", instead]),
        unserved("an expert", add("blk.0.ffn_gate_exps.weight", 4, 64), says=["ffn_gate_exps", instead]),
        unserved("big-endian", sets(options={"endianess": gguf.GGUFEndian.BIG}), says=["it is big-endian"], quick=True),
        *(unserved(f"version {n}", patch(_AT_VERSION, "<I", n), says=[f"version {n}"]) for n in (1, 4)),
        unserved("prefix of a space", put(ggml("add_space_prefix"), True, V.BOOL), family="gemma3", says=["begin texts with a space"]),
        unserved("without scores", without(ggml("scores")), family="gemma3", says=["lack tokenizer.ggml.scores"]),
        hurt("without a norm", drop("blk.1.post_ffw_norm"), family="gemma3", says=["it lacks blk.1.post_ffw_norm.weight"]),
    ]  # fmt: skip


def _in_parts() -> list[Case]:
    first, second = part(1, 2), part(2, 2)
    in_two = sets(split=12)
    missing = ["it is part 1 of 2, but part 2", second, "missing"]
    return [
        right("parts, by the first", in_two, sets(model=first)),
        right("parts, by the second", in_two, sets(model=second)),
        right("parts, by the folder", in_two, sets(model=None)),
        right("parts, metadata first", sets(split=12, options={"small_first_shard": True}, model=part(1, 3))),
        hurt("part 1", in_two, sets(model=first, files={second: None}), says=missing),
        hurt("a folder of part 1", in_two, sets(model=None, files={second: None}), says=missing),
        hurt("part 2", in_two, sets(model=second, files={first: None}), says=["part 2 of 2, but part 1", first]),
        hurt("a folder of part 2", in_two, sets(model=None, files={first: None}), says=["part 1", first]),
        hurt("a damaged part", in_two, sets(model=first, files={second: b"GGUF"}), says=[second, "is not a complete GGUF file"]),
        hurt("a renamed part", in_two, sets(model="other.gguf"), _renamed_part, says=["part 1 of 2", "its name must end in -00001-of-00002.gguf"]),
        hurt("the same part twice", in_two, sets(model=first), _first_part_twice, says=[second, "another part"]),
        hurt("two models in a folder", sets(model=None, files={"b.gguf": b""}), says=["2 GGUF files"]),
    ]  # fmt: skip


def _renamed_part(parts: Parts) -> None:
    parts.name = part(1, 2)
    _as_part(parts, 0)
    parts.name = "other.gguf"


def _first_part_twice(parts: Parts) -> None:
    parts.split = 0
    _as_part(parts, 0)
    parts.name = part(1, 2)
    copy = replace(parts, files={})
    with tempfile.TemporaryDirectory() as scratch:
        path = write(copy.family, [lambda each: vars(each).update(vars(copy))], Path(scratch))
        parts.files[part(2, 2)] = path.read_bytes()


def _as_part(parts: Parts, number: int) -> None:
    parts.split = 0
    parts.fields |= {"split.no": (number, V.UINT16), "split.count": (2, V.UINT16)}


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "linear", "factor": factor, "rope_theta": 10_000.0}}


def _right() -> list[Case]:
    factor, old = llama("rope.scaling.factor"), llama("rope.scale_linear")
    kind = llama("rope.scaling.type")
    tied = drop("output.weight")
    return [
        right("float32"),
        right("tied", tied),
        right("float16", stored(Q.F16), stored(Q.F16, _HEAD)),
        right("bfloat16", stored(Q.BF16)),
        right("Q4_0", stored(Q.Q4_0)),
        right("Q4_0, with the head", stored(Q.Q4_0), stored(Q.Q4_0, _HEAD)),
        right("Q8_0", stored(Q.Q8_0)),
        right("Q8_0, tied", tied, stored(Q.Q8_0)),
        right("Q8_0 embeddings and head", stored(Q.Q8_0), stored(Q.Q8_0, _HEAD, "token_embd.weight")),
        right("Q4_0 with a float16 head", stored(Q.Q4_0), stored(Q.F16, _HEAD)),
        right("Q4_0 and Q8_0", stored(Q.Q4_0), _one_of(Q.Q8_0)),
        *(right(each.name, stored(each)) for each in (Q.Q4_1, Q.Q5_0, Q.Q5_1)),
        *(
            right(each.name, random_blocks(each), inner=256)
            for each in (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.IQ3_S)
        ),
        right("scale_linear", put(old, 2.0, V.FLOAT32), sets(config=_linear(2.0)), quick=True),
        right("factor without a type", put(factor, 4.0, V.FLOAT32), sets(config=_linear(4.0))),
        right("factor before scale_linear", put(factor, 4.0, V.FLOAT32), put(old, 2.0, V.FLOAT32), sets(config=_linear(4.0))),
        right("linear", put(kind, "linear", V.STRING), put(factor, 2.0, V.FLOAT32), sets(config=_linear(2.0))),
        right("none with a factor", put(kind, "none", V.STRING), put(factor, 2.0, V.FLOAT32)),
        right("no scaling", put(factor, 0.0, V.FLOAT32)),
        right("without freq_base", without(llama("rope.freq_base"))),
        right("without head_count_kv", without(llama("attention.head_count_kv")), _all_heads),
        right("heads of each layer", put(llama("attention.head_count_kv"), [2, 2], V.ARRAY), put(llama("attention.head_count"), [4, 4], V.ARRAY), put(llama("feed_forward_length"), [128, 128], V.ARRAY)),
        right("numbers of 64 bits", *(put(llama(name), value, V.UINT64) for name, value in (("block_count", 2), ("embedding_length", 64)))),
        right("frequencies of 1", add("rope_freqs.weight", 16)),
        right("unknown metadata", put("custom.note", "x", V.STRING), put(llama("vocab_size"), 256, V.UINT32)),
        right("an alignment of 64", put("general.alignment", 64, V.UINT32)),
        right("an alignment of 8", put("general.alignment", 8, V.UINT32)),
        right("version 2", patch(_AT_VERSION, "<I", 2)),
        right("bytes after the tensors", damaged(lambda raw: raw + b"\0" * 100)),
        right("without types of tokens", without(ggml("token_type"))),
        right("the name of a part", sets(name=part(1, 2), model=part(1, 2))),
        right("a folder with config.json", sets(model=None, files={"config.json": b"{}"})),
        right("a folder with an adapter", sets(model=None, files={"config.json": b"{}", "adapter_model.safetensors": b""})),
        right("float32", family="gemma3"),
        right("Q8_0", stored(Q.Q8_0), family="gemma3"),
        right("linear", put("gemma3.rope.scaling.factor", 8.0, V.FLOAT32), sets(config=_gemma_rotary()), family="gemma3"),
        right("without a window", without("gemma3.attention.sliding_window"), sets(config={"layer_types": ["full_attention"] * 2}), family="gemma3"),
    ]  # fmt: skip


def _gemma_rotary() -> dict[str, Any]:
    full = _linear(8.0)["rope_parameters"] | {"rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _one_of(kind: Any) -> Change:
    def change(parts: Parts) -> None:
        values = dequantize(*parts.tensors[DOWN])
        parts.tensors[DOWN] = (quantize(values, kind), kind)

    return change


def _all_heads(parts: Parts) -> None:
    """Repeats the heads of keys and values, so that there are as many as of queries."""
    for layer in range(2):
        for own in ("attn_k", "attn_v"):
            name = f"blk.{layer}.{own}.weight"
            data, kind = parts.tensors[name]
            heads = data.reshape(KV_HEADS, 32, -1)
            parts.tensors[name] = (np.repeat(heads, 2, axis=0).reshape(128, -1), kind)
    parts.config["num_key_value_heads"] = HEADS


CASES: Final = [*_damaged(), *_contradicting(), *_unsupported(), *_in_parts(), *_right()]
"""The rows."""
