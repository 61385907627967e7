"""Rows of the table of checkpoints: tiny models in safetensors, plain and in each quantized format.

A row changes a complete folder: tensors, fields of config.json, fields of its `quantization_config`, files.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from tests.support import quantized_models, tiny_models
from tests.support.checkpoints.cases import Case, Kind
from tests.support.zoo import families
from worker_svc.quantized.codes import Scheme

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
LAYER: Final = "model.layers.1"
DOWN: Final = f"{LAYER}.mlp.down_proj"
KEYS: Final = f"{LAYER}.self_attn.k_proj"
_LLM_COMPRESSOR: Final = Path(__file__).parent / "llm-compressor-w4a16" / "config.json"


@dataclass
class Parts:
    """A model's folder in memory. A change edits it."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    files: dict[str, dict[str, torch.Tensor] | bytes | str] = field(default_factory=dict)
    """Files in addition, or instead of `model.safetensors`; `DELETED` for none."""

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config`."""
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    @property
    def weights(self) -> dict[str, Any]:
        """The scheme in the first group of compressed-tensors."""
        found: dict[str, Any] = self.quantization["config_groups"]["group_0"]["weights"]
        return found


Change = Callable[[Parts], None]
DELETED: Final = b"deleted"


@cache
def _source(family: str) -> Path:
    module: Any = tiny_models if family in tiny_models.FAMILIES else families
    return Path(module.write(family, Path(tempfile.mkdtemp(prefix="checkpoints-")) / family))


# By name: family, format and scheme of the complete models.
_BASES: Final[dict[str, tuple[str, quantized_models.Stored | None, Scheme]]] = {
    "plain": ("llama", None, Scheme(4, 32)),
    "tied": ("gemma3", None, Scheme(4, 32)),
    "biased": ("qwen2", None, Scheme(4, 32)),
    "normed": ("qwen3", None, Scheme(4, 32)),
    "experts": ("mixtral", None, Scheme(4, 32)),
    "mxfp4": ("gpt-oss", None, Scheme(4, 32)),
    "ct": ("llama", "compressed-tensors", Scheme(4, 32)),
    "ct8": ("llama", "compressed-tensors", Scheme(8, None)),
    "gptq": ("llama", "gptq", Scheme(4, 32)),
    "gptq8": ("llama", "gptq", Scheme(8, 32)),
    "gptq-channel": ("llama", "gptq", Scheme(4, None)),
    "gptq_v2": ("llama", "gptq_v2", Scheme(4, 32)),
    "awq": ("llama", "awq", Scheme(4, 32)),
    "biased-gptq": ("qwen2", "gptq", Scheme(4, 32)),
    "experts-gptq": ("mixtral", "gptq", Scheme(4, 32)),
    "experts-ct": ("mixtral", "compressed-tensors", Scheme(4, 32)),
    "opt-gptq": ("opt", "gptq", Scheme(4, 32)),
}


@cache
def _load(base: str, *, as_floats: bool = False) -> tuple[dict[str, torch.Tensor], str]:
    family, stored, scheme = _BASES[base]
    folder = _source(family)
    if stored is not None:
        made = folder.with_name(f"{base}-{as_floats}")
        folder = quantized_models.write(folder, made, "float" if as_floats else stored, scheme)
    return load_file(folder / SINGLE), (folder / "config.json").read_text()


def parts_of(base: str, *, as_floats: bool = False) -> Parts:
    """Returns a complete model; with `as_floats`, a quantized model's weights in float32."""
    tensors, config = _load(base, as_floats=as_floats)
    return Parts({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(config))


def write(base: str, changes: Sequence[Change], folder: Path, *, as_floats: bool = False) -> Path:
    """Writes a changed model, and returns the folder."""
    parts = parts_of(base, as_floats=as_floats)
    for change in changes:
        change(parts)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {"config.json": json.dumps(parts.config), SINGLE: parts.tensors} | parts.files
    for name, content in files.items():
        if content == DELETED:
            continue
        if isinstance(content, dict):
            contiguous = {key: tensor.clone().contiguous() for key, tensor in content.items()}
            save_file(contiguous, folder / name, metadata={"format": "pt"})
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@cache
def floats(base: str, *changes: Change) -> Callable[[Path], Path]:
    """Returns a function that writes the reference; the same one for the same model."""
    return partial(_write_floats, base, changes)


def _write_floats(base: str, changes: Sequence[Change], folder: Path) -> Path:
    return write(base, changes, folder, as_floats=True)


# Changes.


def drop(*names: str) -> Change:
    """Removes tensors by the beginnings of their names."""

    def change(parts: Parts) -> None:
        kept = {name: tensor for name, tensor in parts.tensors.items() if not name.startswith(names)}
        assert len(kept) < len(parts.tensors)
        parts.tensors = kept

    return change


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Replaces a tensor by one made from it."""

    def change(parts: Parts) -> None:
        parts.tensors[name] = make(parts.tensors[name])

    return change


def add(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    """Adds a tensor of ones."""

    def change(parts: Parts) -> None:
        assert name not in parts.tensors
        parts.tensors[name] = torch.ones(shape, dtype=dtype)

    return change


def every(kinds: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Replaces all tensors whose names end so."""

    def change(parts: Parts) -> None:
        for name in [name for name in parts.tensors if name.endswith(kinds)]:
            parts.tensors[name] = make(parts.tensors[name])

    return change


def rename(old: str, new: str) -> Change:
    """Replaces a part of the tensors' names."""

    def change(parts: Parts) -> None:
        parts.tensors = {name.replace(old, new): tensor for name, tensor in parts.tensors.items()}

    return change


def config(**fields: Any) -> Change:
    """Sets fields of config.json."""
    return lambda parts: parts.config.update(fields)


def without(*fields: str) -> Change:
    """Removes fields of config.json."""

    def change(parts: Parts) -> None:
        for name in fields:
            del parts.config[name]

    return change


def quantization(**fields: Any) -> Change:
    """Sets fields of `quantization_config`."""
    return lambda parts: parts.quantization.update(fields)


def scheme(**fields: Any) -> Change:
    """Sets fields of the weights' scheme in compressed-tensors."""
    return lambda parts: parts.weights.update(fields)


def file(name: str, content: bytes | str) -> Change:
    """Adds or replaces a file."""

    def change(parts: Parts) -> None:
        parts.files[name] = content

    return change


def shards(count: int, *, index: bool, missing: Sequence[int] = ()) -> Change:
    """Splits the tensors over files, some of which are not written."""

    def change(parts: Parts) -> None:
        names = sorted(parts.tensors)
        weight_map: dict[str, str] = {}
        parts.files[SINGLE] = DELETED
        for number in range(count):
            file_name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            own = names[number::count]
            weight_map |= dict.fromkeys(own, file_name)
            if number not in missing:
                parts.files[file_name] = {name: parts.tensors[name] for name in own}
        if index:
            parts.files[INDEX] = json.dumps({"weight_map": weight_map})

    return change


def damaged(edit: Callable[[bytes], bytes]) -> Change:
    """Edits the bytes of `model.safetensors`."""

    def change(parts: Parts) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / SINGLE
            save_file(parts.tensors, path, metadata={"format": "pt"})
            parts.files[SINGLE] = edit(path.read_bytes())

    return change


def header(edit: Callable[[dict[str, Any]], None]) -> Change:
    """Edits the header of `model.safetensors`; the data stay."""

    def edited(raw: bytes) -> bytes:
        end = 8 + int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8:end])
        edit(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + raw[end:]

    return damaged(edited)


def _row(
    kind: Kind, base: str, name: str, *changes: Change, says: Sequence[str], quick: bool = False
) -> Case:
    assert says
    return Case(f"{base}: {name}", kind, partial(write, base, changes), tuple(says), quick=quick)


hurt = partial(_row, "damaged")
contradicts = partial(_row, "contradicting")
unserved = partial(_row, "unsupported")


def right(
    base: str, name: str, *changes: Change, reference: Sequence[Change] = (), quick: bool = False,
    of: str | None = None,
) -> Case:  # fmt: skip
    """Returns a row of a served model. `reference` changes the float32 weights, those of `of` if given."""
    return Case(
        f"{base}: {name}",
        "right",
        partial(write, base, changes),
        expected=floats(of or base, *reference),
        quick=quick,
    )


def _words(value: object) -> str:
    """Returns the words of a row that sets fields to values."""
    if value in ({}, []):
        return f"an empty {type(value).__name__}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(each)}" for name, each in value.items())
    return " ".join(map(_words, value)) if isinstance(value, list) else str(value)


_PROJECTIONS: Final = (
    *(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)  # fmt: skip


def _plain() -> list[Case]:
    # `tests.e2e.worker.test_comparison` leaves out, lengthens and shortens each tensor.
    weight = f"{DOWN}.weight"
    return [
        hurt("plain", "without a layer", drop(f"{LAYER}."), says=["the weights lack", LAYER]),
        hurt("plain", "without the first layer", drop("model.layers.0."), says=["the weights lack model.layers.0."]),
        hurt("plain", "without norms", drop(f"{LAYER}.input", f"{LAYER}.post"), says=[LAYER]),
        *(
            hurt(
                "plain", f"{word} {name}", put(name, make),
                says=[f"tensor {name} is {list(shape)} in the file"],
            )
            for name, word, make, shape in (
                (weight, "wider", lambda t: torch.cat((t, t), 1), (64, 256)),
                (weight, "transposed", lambda t: t.t(), (128, 64)),
                (weight, "flat", lambda t: t.flatten(), (8192,)),
                (weight, "stacked", lambda t: t[None], (1, 64, 128)),
                (weight, "empty", lambda t: t[:0], (0, 128)),
                (f"{KEYS}.weight", "longer", lambda t: torch.cat((t, t)), (128, 64)),
                (f"{LAYER}.self_attn.q_proj.weight", "shorter", lambda t: t[32:], (96, 64)),
                ("model.norm.weight", "stacked", lambda t: t[:, None], (64, 1)),
                ("model.embed_tokens.weight", "shorter", lambda t: t[:-6], (250, 64)),
                ("model.embed_tokens.weight", "padded", lambda t: torch.cat((t, t[:64])), (320, 64)),
                ("lm_head.weight", "padded", lambda t: torch.cat((t, t[:64])), (320, 64)),
                ("lm_head.weight", "narrower", lambda t: t[:, :32], (256, 32)),
            )
        ),
        *(
            hurt("plain", f"{word} in a weight", put(weight, partial(torch.Tensor.to, dtype=kind)), says=[weight])
            for word, kind in (
                ("int8", torch.int8), ("uint8", torch.uint8), ("int64", torch.int64), ("bool", torch.bool),
                ("float8", torch.float8_e4m3fn), ("complex", torch.complex64),
            )
        ),
        hurt("plain", "int8 everywhere", every("_proj.weight", lambda t: (t * 50).to(torch.int8)), says=["holds int8, but config.json"]),
        hurt("plain", "codes in a norm", put("model.norm.weight", lambda t: t.int()), says=["model.norm.weight"]),
        *_contradicting(),
    ]  # fmt: skip


def _contradicting() -> list[Case]:
    shapes: list[tuple[dict[str, Any], list[str]]] = [
        ({"intermediate_size": 96}, ["mlp.down_proj.weight is [64, 128] in the file", "[64, 96]"]),
        ({"intermediate_size": 160}, ["mlp.down_proj.weight is [64, 128]", "[64, 160]"]),
        ({"vocab_size": 250}, ["lm_head.weight is [256, 64]", "[250, 64]"]),
        ({"vocab_size": 300}, ["lm_head.weight is [256, 64]", "[300, 64]"]),
        ({"num_key_value_heads": 1}, ["self_attn.k_proj.weight is [64, 64]", "[32, 64]"]),
        ({"num_key_value_heads": 4}, ["self_attn.k_proj.weight is [64, 64]", "[128, 64]"]),
        ({"num_attention_heads": 8}, ["self_attn.o_proj.weight is [64, 128]", "[64, 256]"]),
        ({"num_attention_heads": 2}, ["self_attn.o_proj.weight is [64, 128]", "[64, 64]"]),
        ({"hidden_size": 128}, ["lm_head.weight is [256, 64]", "[256, 128]"]),
        ({"hidden_size": 32}, ["lm_head.weight is [256, 64]", "[256, 32]"]),
        ({"head_dim": 16}, ["self_attn.k_proj.weight is [64, 64]", "[32, 64]"]),
        ({"num_hidden_layers": 1}, ["layers that config.json does not describe", "model.layers.1."]),
        ({"num_hidden_layers": 30}, ["the weights lack", "model.layers.2.self_attn.q_proj.weight"]),
        ({"num_hidden_layers": 0}, ["layers that config.json does not describe", "model.layers.0."]),
        ({"attention_bias": True}, ["the weights lack", "q_proj.bias"]),
        ({"mlp_bias": True}, ["the weights lack", "gate_proj.bias"]),
        ({"num_attention_heads": 3}, ["number of attention heads (3)"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads (3)"]),
        ({"num_key_value_heads": 0}, ["config.json has a value that vLLM does not take"]),
        ({"vocab_size": "256"}, ["'vocab_size' expected int"]),
        ({"intermediate_size": None}, ["intermediate_size"]),
        ({"hidden_size": -64}, ["negative dimension -64"]),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ["the weights lack", "q_norm"]),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, ["k_proj.weight is ["]),
        ({"architectures": ["SomeForCausalLM"]}, ["SomeForCausalLM"]),
        ({"model_type": "some"}, ["model type `some`"]),
    ]
    rows = [
        contradicts(
            "plain",
            _words(fields),
            config(**fields),
            says=says,
            quick=any(isinstance(fields.get(name), int) for name in ("intermediate_size", "vocab_size")),
        )
        for fields, says in shapes
    ]
    return [
        *rows,
        contradicts("plain", "config.json is a list", file("config.json", "[]"), says=["is not a JSON object"]),
        contradicts("plain", "config.json is no JSON", file("config.json", "{"), says=["cannot read config.json"]),
        contradicts("plain", "config.json is empty", file("config.json", ""), says=["cannot read config.json"]),
        contradicts("plain", "config.json is absent", file("config.json", DELETED), says=["has no config.json"]),
        *(
            contradicts("plain", f"an unknown {name}", add(f"{LAYER}.{name}", 128), says=[f"{name} has no place"],
                        quick=name.endswith("scale"))
            for name in (
                "self_attn.q_proj.bias", "self_attn.q_norm.weight", "mlp.down_proj.weight_scale",
                "self_attn.o_proj.weight.absmax", "self_attn.q_proj.lora_A.weight",
            )
        ),
        contradicts("plain", "scales of a plain head", add("lm_head.weight_scale", 2), says=["lm_head.weight_scale has no place"]),
        contradicts("plain", "renamed modules", rename("self_attn", "attention"),
                    says=["the weights lack", "but unknown", "attention"]),
        contradicts("tied", "untied without a head", config(tie_word_embeddings=False),
                    says=["the weights lack", "lm_head.weight"]),
        contradicts("biased", "a layer without its bias", drop(f"{KEYS}.bias"), says=["the weights lack", f"{KEYS}.bias"]),
        contradicts("biased", "a short bias", put(f"{KEYS}.bias", lambda t: t[1:]), says=[f"{KEYS}.bias is ["]),
        contradicts("normed", "a layer without its norm", drop(f"{LAYER}.self_attn.k_norm"), says=["the weights lack", "k_norm.weight"]),
        contradicts("normed", "an architecture without its norms",
                    config(model_type="llama", architectures=["LlamaForCausalLM"]), says=["k_norm.weight has no place"]),
        contradicts("experts", "without an expert", drop(f"{LAYER}.block_sparse_moe.experts.2."),
                    says=["the weights lack", "experts.2.w1.weight"]),
    ]  # fmt: skip


def _files() -> list[Case]:
    def offsets(first: int, second: int) -> Callable[[dict[str, Any]], None]:
        return lambda entries: entries[f"{DOWN}.weight"].update(data_offsets=[first, second])

    return [
        hurt("plain", "half of the file", damaged(lambda raw: raw[: len(raw) // 2]), says=["damaged"], quick=True),
        hurt("plain", "a byte less", damaged(lambda raw: raw[:-1]), says=["damaged"]),
        hurt("plain", "a byte more", damaged(lambda raw: raw + b"0"), says=["damaged"]),
        hurt("plain", "an empty file", damaged(lambda _: b""), says=["damaged"]),
        hurt("plain", "seven bytes", damaged(lambda raw: raw[:7]), says=["damaged"]),
        hurt("plain", "zeros", damaged(lambda raw: bytes(len(raw))), says=["damaged"]),
        hurt("plain", "a page of HTML", damaged(lambda _: b"<!DOCTYPE html>" * 20), says=["damaged"]),
        hurt("plain", "a pointer of Git LFS", damaged(
            lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), says=["damaged"]),
        hurt("plain", "a header of exabytes", damaged(lambda raw: b"\xff" * 8 + raw[8:]), says=["damaged"]),
        hurt("plain", "no JSON", damaged(lambda raw: raw[:8] + b"[" + raw[9:]), says=["damaged"]),
        hurt("plain", "an unknown type", header(lambda e: e[f"{DOWN}.weight"].update(dtype="F7")), says=["damaged"]),
        hurt("plain", "another shape in the header",
             header(lambda e: e[f"{DOWN}.weight"].update(shape=[64, 129])), says=["damaged"]),
        hurt("plain", "another type in the header",
             header(lambda e: e[f"{DOWN}.weight"].update(dtype="F16")), says=["damaged"]),
        hurt("plain", "offsets outside", header(offsets(0, 1 << 40)), says=["damaged"]),
        hurt("plain", "offsets of another", header(offsets(0, 32768)), says=["damaged"]),
        hurt("plain", "an absent shard", shards(3, index=True, missing=[2]), says=["00003-of-00003"]),
        hurt("plain", "an absent shard without an index", shards(3, index=False, missing=[2]), says=["00003-of-00003"]),
        hurt("plain", "an absent first shard", shards(3, index=False, missing=[0]), says=["00001-of-00003"]),
        hurt("plain", "an index alone", shards(2, index=True, missing=[0, 1]), says=["00001-of-00002"]),
        hurt("plain", "an index without JSON", shards(2, index=True), file(INDEX, "{"), says=[INDEX]),
        hurt("plain", "an index of a list", shards(2, index=True), file(INDEX, '{"weight_map": []}'), says=[INDEX]),
        hurt("plain", "an index without files", shards(2, index=True), file(INDEX, '{"weight_map": {}}'), says=[INDEX]),
        hurt("plain", "an index that leaves the folder", shards(2, index=True),
             file(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'), says=["outside its folder"]),
        hurt("plain", "an index of an absent tensor", shards(2, index=True), file(INDEX, json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors"}})), says=["has no tensor a"]),
        hurt("plain", "a tensor in two files", shards(2, index=False), _twice, says=["lm_head.weight is in both"]),
        hurt("plain", "pickles alone", file(SINGLE, DELETED), file("pytorch_model.bin", "x"), says=["pickled"]),
        hurt("plain", "no weights", file(SINGLE, DELETED), says=["has no weights"]),
        hurt("plain", "an adapter alone", _only_adapter, says=["the weights lack"]),
    ]  # fmt: skip


def _twice(parts: Parts) -> None:
    for name, content in parts.files.items():
        if isinstance(content, dict):
            parts.files[name] = {**content, "lm_head.weight": parts.tensors["lm_head.weight"]}


def _only_adapter(parts: Parts) -> None:
    parts.files |= {SINGLE: DELETED, "model-adapter.safetensors": {"lora_A.weight": torch.ones(2, 2)}}


def _right() -> list[Case]:
    def halves(kind: torch.dtype) -> Change:
        return every("weight", lambda t: t.to(kind))

    def rounded(kind: torch.dtype) -> Change:
        return every("weight", lambda t: t.to(kind).float())

    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    return [
        right("plain", "a left-over quantize_config.json", file("quantize_config.json", '{"bits": 4}')),
        right("plain", "a left-over quantize_config.json beside an unreadable copy",
              file("quantize_config.json", '{"bits": 4}'), file("consolidated.safetensors", "x")),
        right("plain", "as it is", quick=True),
        right("plain", "bfloat16", halves(torch.bfloat16), reference=[rounded(torch.bfloat16)]),
        right("plain", "float16", halves(torch.float16), reference=[rounded(torch.float16)]),
        right("plain", "float64", halves(torch.float64)),
        right("plain", "one layer in float16", put(f"{DOWN}.weight", torch.Tensor.half),
              reference=[put(f"{DOWN}.weight", lambda t: t.half().float())]),
        right("plain", "shards with an index", shards(3, index=True)),
        right("plain", "shards without an index", shards(3, index=False)),
        right("plain", "a single file beside an old index", file(INDEX, '{"weight_map": {"a": "b"}}')),
        right("plain", "a file of another name", _renamed_file),
        right("plain", "a second copy of its author", file("consolidated.safetensors", "x")),
        right("plain", "an adapter beside it", file("adapter_model.safetensors", "x")),
        right("plain", "pickles beside it", file("pytorch_model.bin", "x")),
        right("plain", "extra modules", add("value_head.weight", 2, 2), add("value_head.bias", 2)),
        right("plain", "an empty extra tensor", add("nothing", 0)),
        right("plain", "rotary buffers", add(inverse, 16)),
        right("plain", "no metadata", _without_metadata),
        right("plain", "no architectures", without("architectures")),
        right("plain", "the old name of its type", config(torch_dtype="float32"), without("dtype")),
        right("plain", "no type", without("dtype")),
        right("plain", "a bias of zeros", _zero_bias),
        right("plain", "an empty state of a layer", add(f"{DOWN}._extra_state", 0, dtype=torch.uint8)),
        right("plain", "scales of caches and activations", add(f"{KEYS}.k_scale"),
              add(f"{LAYER}.self_attn.v_proj.v_scale"), add(f"{DOWN}.input_scale", 1)),
        right("plain", "no head_dim", config(num_attention_heads=2), without("head_dim"), *_SQUARE,
              reference=[config(num_attention_heads=2), *_SQUARE]),
        right("tied", "as it is"),
        right("tied", "with a head of its own that is ignored", _copied_head),
        right("biased", "as it is"),
        right("normed", "as it is"),
        right("experts", "as it is"),
        *(right(base, "as it is", quick=base in ("ct", "gptq", "awq")) for base in _BASES if _BASES[base][1]),
    ]  # fmt: skip


# Two heads instead of four, so that heads fill the hidden size.
_SQUARE: Final = (
    every("q_proj.weight", lambda t: t[:64]), every("o_proj.weight", lambda t: t[:, :64])
)  # fmt: skip


def _renamed_file(parts: Parts) -> None:
    parts.files |= {SINGLE: DELETED, "weights.safetensors": parts.tensors}


def _without_metadata(parts: Parts) -> None:
    header(lambda entries: entries.pop("__metadata__"))(parts)


def _zero_bias(parts: Parts) -> None:
    parts.tensors[f"{LAYER}.self_attn.q_proj.bias"] = torch.zeros(128)


def _copied_head(parts: Parts) -> None:
    parts.tensors["lm_head.weight"] = parts.tensors["model.embed_tokens.weight"].clone()


def _names(base: str) -> tuple[str, str]:
    """Returns the names of a layer's codes and scales."""
    return ("weight_packed", "weight_scale") if base.startswith("ct") else ("qweight", "scales")


def _quantized(base: str) -> list[Case]:
    """Rows that all formats have: absent parts, and shapes and types unlike the configuration's."""
    codes, scales = _names(base)
    packed, scale = f"{DOWN}.{codes}", f"{DOWN}.{scales}"
    across = 1 if base.startswith("ct") else 0  # dimension of inputs
    along = 1 - across

    def half(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.narrow(dim, 0, tensor.shape[dim] // 2)

    return [
        hurt(base, "without a layer", drop(f"{DOWN}."), says=["the weights lack", DOWN], quick=True),
        hurt(base, "without codes", drop(packed), says=[DOWN]),
        hurt(base, "without scales", drop(scale), says=[DOWN]),
        hurt(base, "codes of half the inputs", put(packed, lambda t: half(t, across)), says=[f"{packed} is ["]),
        hurt(base, "codes of half the outputs", put(packed, lambda t: half(t, along)), says=[f"{packed} is ["]),
        hurt(base, "scales of half the groups", put(scale, lambda t: half(t, across)), says=[f"{scale} is ["]),
        hurt(base, "scales of half the outputs", put(scale, lambda t: half(t, along)), says=[f"{scale} is ["]),
        hurt(base, "scales that are not finite", put(scale, lambda t: t * torch.inf), says=[scale]),
        hurt(base, "scales of integers", put(scale, lambda t: t.int()), says=[scale]),
        hurt(base, "codes of floats", put(packed, lambda t: t.float()), says=[packed]),
        contradicts(base, "fewer inner numbers", config(intermediate_size=96), says=["mlp.down_proj", " is ["]),
        contradicts(base, "no quantization_config", without("quantization_config"), says=["has no place in the model"]),
        contradicts(base, "plain weights", _plain_weights, says=["is not quantized, but quantization_config"]),
        contradicts(base, "one plain layer", _plain_layer, says=[f"{LAYER}.self_attn.o_proj"]),
    ]  # fmt: skip


def _of_any_format() -> list[Case]:
    """Rows whose refusal depends on no format."""
    codes, scales = "weight_packed", "weight_scale"
    packed, scale = f"{DOWN}.{codes}", f"{DOWN}.{scales}"

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor, tensor))

    return [
        hurt("ct", "without a part of a fused layer", drop(f"{KEYS}."), says=["the weights lack", KEYS]),
        hurt("ct", "without all of the last", drop(f"{LAYER}."), says=["the weights lack", LAYER]),
        hurt("ct", "codes of twice the outputs", put(packed, twice), says=[f"{packed} is ["]),
        hurt("ct8", "twice the scales", put(scale, lambda t: torch.cat((t, t), 1)), says=[f"{scale} is ["]),
        hurt("ct", "flat codes", put(packed, torch.Tensor.flatten), says=[f"{packed} is ["]),
        hurt("ct", "stacked codes", put(packed, lambda t: t[None]), says=[f"{packed} is ["]),
        hurt("ct", "stacked scales", put(scale, lambda t: t[None]), says=[f"{scale} is ["]),
        hurt("ct", "codes of 64 bits", put(packed, lambda t: t.long()), says=[packed]),
        hurt("ct", "more heads than described", put(f"{KEYS}.{codes}", twice), put(f"{KEYS}.{scales}", twice),
             says=[f"{KEYS}.{codes} is ["]),
        contradicts("ct", "more layers", config(num_hidden_layers=3), says=["the weights lack model.layers.2"]),
    ]  # fmt: skip


def _plain_weights(parts: Parts) -> None:
    parts.tensors = parts_of("plain").tensors


def _plain_layer(parts: Parts) -> None:
    name = f"{LAYER}.self_attn.o_proj"
    drop(f"{name}.")(parts)
    parts.tensors[f"{name}.weight"] = parts_of("plain").tensors[f"{name}.weight"]


def _compressed() -> list[Case]:
    shape = f"{DOWN}.weight_shape"
    return [
        contradicts("ct", "8 bits in the configuration", scheme(num_bits=8), says=["weight_packed is ["], quick=True),
        contradicts("ct8", "4 bits in the configuration", scheme(num_bits=4), says=["weight_packed is ["]),
        contradicts("ct", "groups of 64", scheme(group_size=64), says=["weight_scale is ["]),
        contradicts("ct", "a scale a channel", scheme(strategy="channel", group_size=None), says=["weight_scale is ["]),
        contradicts("ct8", "groups", scheme(strategy="group", group_size=32), says=["weight_scale is ["]),
        contradicts("ct", "another weight_shape", put(shape, lambda t: t * 2), says=[shape, "[64, 128]"]),
        contradicts("ct", "a weight_shape of one number", put(shape, lambda t: t[:1]), says=[shape]),
        right("ct", "without weight_shape", drop(shape)),
        right("ct", "zero points of 0", _zero_points),
        right("ct8", "flat scales", put(f"{DOWN}.weight_scale", torch.Tensor.flatten)),
        right("ct", "llm-compressor's configuration", quantization(**json.loads(_LLM_COMPRESSOR.read_text())["quantization_config"])),
        right("ct", "scales in float32", every("weight_scale", torch.Tensor.float)),
        right("ct", "no config_groups, dense", _dense, of="plain"),
        right("ct", "one plain layer that is ignored", _ignored_layer, reference=[_float_layer]),
        right("ct", "an expression that ignores a plain layer", _ignored_by_expression, reference=[_float_layer]),
        right("ct", "a scheme a layer", _two_schemes, reference=[_second_layer_of("ct8")]),
        right("ct", "a quantized head", _quantized_head, reference=[_floats_of_head]),
        right("ct", "more targets than layers", quantization(ignore=["lm_head", "model.vision.a"])),
        hurt("ct", "a quantized head without scales", _quantized_head, drop("lm_head.weight_scale"),
             says=["the weights lack lm_head.weight_scale"]),
        right("ct", "actorder without g_idx", scheme(actorder="weight")),
        right("ct", "an order of groups that is none", _ordered(shuffled=False)),
        unserved("ct", "an order of groups", _ordered(shuffled=True), says=[f"{DOWN}.weight_g_idx", "not served"]),
        unserved("ct", "zero points", add(f"{DOWN}.weight_zero_point", 8, 4, dtype=torch.int32),
                 says=[f"{DOWN}.weight_zero_point", "zero points"], quick=True),
        *(
            unserved("ct", _words(fields), scheme(**fields), says=says)
            for fields, says in (
                ({"num_bits": 2}, ["2 bits"]), ({"group_size": 16}, ["groups of 16"]),
                ({"strategy": "tensor"}, ["scale per tensor"]), ({"num_bits": "four"}, ["four bits"]),
                ({"num_bits": None}, ["None bits"]),
            )
        ),
        *(
            unserved("ct", _words(fields), quantization(**fields), says=says)
            for fields, says in (
                ({"format": "marlin-24"}, ["marlin-24"]), ({"format": "float-quantized"}, ["float-quantized"]),
                ({"format": None}, ["format None"]), ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparse"]),
                ({"config_groups": {"a": {"targets": ["Linear"]}}}, ["cannot be read"]),
                ({"config_groups": []}, ["cannot be read"]), ({"ignore": ["re:("]}, ["re:("]),
                ({"quant_method": "mxfp4"}, ["MXFP4"]), ({"quant_method": None}, ["does not name"]),
            )
        ),
        contradicts("ct", "a quantized head that is ignored", rename("lm_head.weight", "lm_head.weight_packed"),
                    says=["lm_head.weight_packed"]),
        unserved("plain", "int8 codes with scales", _int8, says=[f"{DOWN}.weight"]),
    ]  # fmt: skip


def _dense(parts: Parts) -> None:
    _plain_weights(parts)
    del parts.quantization["config_groups"]
    parts.quantization["format"] = "dense"


def _zero_points(parts: Parts) -> None:
    scales = parts.tensors[f"{DOWN}.weight_scale"]
    parts.tensors[f"{DOWN}.weight_zero_point"] = torch.zeros(scales.shape, dtype=torch.int8)


def _float_layer(parts: Parts) -> None:
    name = f"{LAYER}.self_attn.o_proj.weight"
    parts.tensors[name] = parts_of("plain").tensors[name]


def _ignored_layer(parts: Parts) -> None:
    _plain_layer(parts)
    parts.quantization["ignore"] = ["lm_head", f"{LAYER}.self_attn.o_proj"]


def _ignored_by_expression(parts: Parts) -> None:
    _plain_layer(parts)
    parts.quantization["ignore"] = ["lm_head", "re:.*1.self_attn.o_proj$"]


def _ordered(*, shuffled: bool) -> Change:
    def change(parts: Parts) -> None:
        order = torch.arange(128, dtype=torch.int32) // 32
        parts.tensors[f"{DOWN}.weight_g_idx"] = order.flip(0) if shuffled else order

    return change


def _second_layer_of(base: str) -> Change:
    def change(parts: Parts) -> None:
        own = {name: tensor for name, tensor in parts.tensors.items() if not name.startswith(f"{LAYER}.")}
        other = parts_of(base, as_floats=f"{DOWN}.weight" in parts.tensors).tensors
        parts.tensors = own | {name: tensor for name, tensor in other.items() if name.startswith(f"{LAYER}.")}

    return change


def _two_schemes(parts: Parts) -> None:
    _second_layer_of("ct8")(parts)
    group = parts_of("ct8").quantization["config_groups"]["group_0"]
    parts.quantization["config_groups"]["group_1"] = {**group, "targets": [f"re:{LAYER}.*"]}


def _head_of() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes around 0, one a weight, and a scale a channel."""
    weight = parts_of("plain").tensors["lm_head.weight"]
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scales).round(), scales


def _quantized_head(parts: Parts) -> None:
    codes, scales = _head_of()
    del parts.tensors["lm_head.weight"]
    parts.tensors |= {
        "lm_head.weight_packed": quantized_models.words(codes + 128, 8), "lm_head.weight_scale": scales,
    }  # fmt: skip
    group = parts_of("ct8").quantization["config_groups"]["group_0"]
    parts.quantization["config_groups"]["head"] = {**group, "targets": ["lm_head"]}
    parts.quantization["ignore"] = []


def _floats_of_head(parts: Parts) -> None:
    codes, scales = _head_of()
    parts.tensors["lm_head.weight"] = codes * scales


def _int8(parts: Parts) -> None:
    every("_proj.weight", lambda t: (t * 50).to(torch.int8))(parts)
    add(f"{DOWN}.weight_scale", 64, 1)(parts)


def _gptq() -> list[Case]:
    zeros, order = f"{DOWN}.qzeros", f"{DOWN}.g_idx"
    return [
        contradicts("gptq", "8 bits in the configuration", quantization(bits=8), says=["qweight is ["]),
        contradicts("gptq8", "4 bits in the configuration", quantization(bits=4), says=["qweight is ["]),
        contradicts("gptq", "groups of 64", quantization(group_size=64), says=["scales is ["]),
        contradicts("gptq", "a scale a channel", quantization(group_size=-1), says=["scales is ["]),
        contradicts("gptq-channel", "groups", quantization(group_size=32), says=["scales is ["]),
        hurt("gptq", "zeros of half the groups", put(zeros, lambda t: t[:2]), says=[zeros]),
        hurt("gptq", "zeros of floats", put(zeros, torch.Tensor.float), says=[zeros]),
        hurt("gptq", "an order of half the inputs", put(order, lambda t: t[:64]), says=[order]),
        right("gptq", "without an order", drop(order)),
        right("gptq", "without zeros", drop(zeros)),
        right("gptq", "an order in 64 bits", put(order, torch.Tensor.long)),
        right("gptq", "scales in bfloat16", every("scales", torch.Tensor.bfloat16)),
        right("gptq", "the first label and zeros of the second", _second_zeros, quick=True),
        right("gptq", "format instead of checkpoint_format", _second_zeros, _old_field),
        right("gptq", "no format", lambda parts: parts.quantization.pop("checkpoint_format")),
        right("gptq", "words in upper case", quantization(quant_method="GPTQ")),
        right("gptq", "numbers as text", quantization(bits="4", group_size="32")),
        right("gptq", "AutoGPTQ's configuration", quantization(
            damp_percent=0.01, static_groups=False, true_sequential=True, model_name_or_path=None,
            model_file_base_name="model", is_marlin_format=False), _own_file("quantize_config.json")),
        right("gptq", "GPTQModel's configuration", quantization(dynamic=None, lm_head=False, pack_dtype="int32", meta={
            "quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.05, "static_groups": False, "mse": 0.0})),
        right("gptq", "only quantize_config.json", _own_file("quantize_config.json"), quick=True),
        right("gptq", "quantize_config.json, too", file("quantize_config.json", '{"bits": 4, "group_size": 32}')),
        contradicts("gptq", "another quantize_config.json", without("quantization_config"),
                    file("quantize_config.json", '{"bits": 8, "group_size": 32, "sym": true, "desc_act": false}'),
                    says=["qweight is ["]),
        right("gptq", "one plain layer that is not listed", _plain_layer, _listed, reference=[_float_layer]),
        right("biased-gptq", "biases in float16", every(".bias", torch.Tensor.half),
              reference=[every(".bias", lambda t: t.half().float())]),
        right("gptq", "biases of zeros", _zero_bias),
        contradicts("gptq", "a bias of a layer without", add(f"{DOWN}.bias", 64), says=[f"{DOWN}.bias"]),
        unserved("gptq", "zeros elsewhere", put(zeros, lambda t: t ^ 0x3), says=[zeros, "zero points"], quick=True),
        unserved("gptq", "an order of activations", put(order, lambda t: t.flip(0)), says=[order, "not served"], quick=True),
        hurt("gptq", "an order outside", put(order, lambda t: t + 9), says=[order]),
        unserved("gptq", "Marlin's tensors", rename(".qweight", ".B"), rename(".scales", ".s"),
                 says=["Marlin's own layout"]),
        unserved("gptq", "Marlin's flag", quantization(is_marlin_format=True), says=["Marlin's own layout"]),
        *(
            unserved("gptq", _words(fields), quantization(**fields), says=says)
            for fields, says in (
                ({"bits": 3}, ["3 bits"]), ({"group_size": 16}, ["groups of 16"]), ({"group_size": 0}, ["groups of 0"]),
                ({"checkpoint_format": "marlin"}, ["Marlin's own layout"]), ({"bits": None}, ["cannot be read"]),
                ({"group_size": "many"}, ["cannot be read"]), ({"quant_method": "marlin"}, ["quantized by marlin"]),
                ({"quant_method": "awq"}, ["qweight is ["]),
            )
        ),
        right("opt-gptq", "plain projections of embeddings", _projected, reference=[_projected]),
        contradicts("gptq", "compressed-tensors in the configuration", _of("ct"), says=["has no place in the model"]),
        contradicts("ct", "GPTQ in the configuration", _of("gptq"), says=["has no place in the model"]),
    ]  # fmt: skip


def _projected(parts: Parts) -> None:
    """Gives OPT embeddings of half the hidden size."""
    decoder, half = "model.decoder", parts.config["hidden_size"] // 2
    parts.config["word_embed_proj_dim"] = half
    generator = torch.Generator().manual_seed(1)
    for name, shape in (("project_in", (2 * half, half)), ("project_out", (half, 2 * half))):
        parts.tensors[f"{decoder}.{name}.weight"] = torch.randn(shape, generator=generator) / 8
    every("embed_tokens.weight", lambda t: t[:, :half])(parts)
    every("lm_head.weight", lambda t: t[:, :half])(parts)


def _second_zeros(parts: Parts) -> None:
    other = parts_of("gptq_v2").tensors
    parts.tensors = {name: other[name] for name in parts.tensors}


def _old_field(parts: Parts) -> None:
    del parts.quantization["checkpoint_format"]
    parts.quantization["format"] = "gptq_v2"


def _own_file(name: str) -> Change:
    def change(parts: Parts) -> None:
        found = parts.config.pop("quantization_config")
        parts.files[name] = json.dumps({key: value for key, value in found.items() if key != "quant_method"})

    return change


def _listed(parts: Parts) -> None:
    others = [part for part in _PROJECTIONS if part != "self_attn.o_proj"]
    parts.quantization["modules_in_block_to_quantize"] = [others]
    name = "model.layers.0.self_attn.o_proj"
    parts.tensors = {key: tensor for key, tensor in parts.tensors.items() if not key.startswith(name)}
    parts.tensors[f"{name}.weight"] = parts_of("gptq", as_floats=True).tensors[f"{name}.weight"]


def _of(base: str) -> Change:
    def change(parts: Parts) -> None:
        parts.config["quantization_config"] = parts_of(base).quantization

    return change


def _awq() -> list[Case]:
    zeros = f"{DOWN}.qzeros"
    return [
        contradicts("awq", "groups of 64", quantization(group_size=64), says=["scales is ["]),
        contradicts("awq", "GPTQ in the configuration", _of("gptq"), says=["qweight"]),
        contradicts("awq", "the method of GPTQ alone", quantization(quant_method="gptq"), says=["qweight"]),
        hurt("awq", "zeros of half the groups", put(zeros, lambda t: t[:2]), says=[zeros]),
        right("awq", "zero points in the middle", quantization(zero_point=True)),
        right("awq", "AutoAWQ's configuration", quantization(modules_to_not_convert=None, zero_point=True)),
        right("awq", "without zeros", drop(zeros)),
        right("awq", "the old names of its fields", _old_names),
        right("awq", "only quant_config.json", _own_file("quant_config.json"), quick=True),
        right("awq", "one plain layer that is listed", _plain_layer, quantization(
            modules_to_not_convert=[f"{LAYER}.self_attn.o_proj"]), reference=[_float_layer]),
        right("awq", "words in upper case", quantization(version="GEMM")),
        unserved("awq", "zeros elsewhere", put(zeros, lambda t: t ^ 0x3), says=[zeros, "zero points"], quick=True),
        *(
            unserved("awq", _words(fields), quantization(**fields), says=says)
            for fields, says in (
                ({"version": "marlin"}, ["marlin"]), ({"group_size": 16}, ["groups of 16"]), ({"bits": None}, ["None bits"]),
            )
        ),
    ]  # fmt: skip


def _old_names(parts: Parts) -> None:
    found = parts.quantization
    found |= {"w_bit": found.pop("bits"), "q_group_size": found.pop("group_size")}


def _mxfp4() -> list[Case]:
    blocks, scales = (f"{LAYER}.mlp.experts.down_proj_{kind}" for kind in ("blocks", "scales"))
    return [
        right("mxfp4", "as it is", _to_mxfp4, reference=[_from_mxfp4], quick=True),
        hurt("mxfp4", "without scales", _to_mxfp4, drop(scales), says=[scales]),
        hurt("mxfp4", "without blocks", _to_mxfp4, drop(blocks), says=[blocks]),
        hurt("mxfp4", "without both", _to_mxfp4, drop(scales, blocks), says=["the weights lack", f"{LAYER}.mlp.experts"]),
        hurt("mxfp4", "scales of half the groups", _to_mxfp4, put(scales, lambda t: t[..., :1]), says=[scales]),
        hurt("mxfp4", "scales of half the experts", _to_mxfp4, put(scales, lambda t: t[:1]), says=[scales]),
        hurt("mxfp4", "blocks of half the outputs", _to_mxfp4, put(blocks, lambda t: t[:, :1]), says=[blocks]),
        hurt("mxfp4", "flat blocks", _to_mxfp4, put(blocks, lambda t: t.flatten(2)), says=[blocks]),
        hurt("mxfp4", "blocks of floats", _to_mxfp4, put(blocks, lambda t: t.float()), says=[blocks]),
        hurt("mxfp4", "scales of floats", _to_mxfp4, put(scales, lambda t: t.float()), says=[scales]),
        contradicts("mxfp4", "fewer experts", _to_mxfp4, config(num_local_experts=2), says=["down_proj_bias is [4, 64]"]),
        right("mxfp4", "no quantization_config", _to_mxfp4, without("quantization_config"), reference=[_from_mxfp4]),
    ]  # fmt: skip


def _to_mxfp4(parts: Parts) -> None:
    """Replaces the experts of gpt-oss by made-up codes."""
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in parts.tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = parts.tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        parts.tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        parts.tensors[f"{name}_scales"] = torch.randint(
            122, 126, shape, dtype=torch.uint8, generator=generator
        )
    parts.config["quantization_config"] = {"quant_method": "mxfp4"}


def _from_mxfp4(parts: Parts) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _to_mxfp4(parts)
    for name in [name for name in parts.tensors if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks, scales = parts.tensors.pop(name), parts.tensors.pop(f"{base}_scales")
        parts.tensors[base] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    del parts.config["quantization_config"]


FILES: Final = _files()
"""Damaged and missing files."""
CASES: Final = [
    *_mxfp4(), *_plain(), *FILES, *_right(),
    *(case for base in ("ct", "gptq", "awq") for case in _quantized(base)), *_of_any_format(),
    *_compressed(), *_gptq(), *_awq(),
]  # fmt: skip
