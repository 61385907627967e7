"""The --model setting accepts folders, GGUF files and names; everything else is refused in one line."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from protos.errors import ConfigurationRefused
from worker_svc.model_files import gguf_convert, loader
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import LoadFormat

HIDDEN, INNER, HEADS, KV_HEADS = 64, 96, 4, 2
TOKENS = ["<|endoftext|>", "a", "b", "c", "ab", "abc", "Ġ"]


def shapes(*, head: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a Llama of one layer, by GGUF's names."""
    outer = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,), "output": (len(TOKENS), HIDDEN)}
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    if not head:
        del outer["output"]
    return {f"{name}.weight": shape for name, shape in outer.items()} | {
        f"blk.0.{name}.weight": shape for name, shape in layer.items()
    }


def write_gguf(
    path: Path,
    family: str = "llama",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    *,
    kinds: Mapping[str, Any] = MappingProxyType({}),
    head: bool = False,
) -> dict[str, torch.Tensor]:
    """Writes a Llama of one layer with a byte-level tokenizer; returns its tensors, dequantized.

    Args:
        path: the new file.
        family: its architecture.
        change: writes the tokenizer's type, in place of GPT-2's.
        kinds: types of tensors by name; float32 for the others.
        head: whether it has an output head of its own.
    """
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if change is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
    else:
        change(writer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    generator = np.random.default_rng(0)
    values = {}
    for name, shape in shapes(head=head).items():
        kind = kinds.get(name, gguf.GGMLQuantizationType.F32)
        stored = quantize(generator.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        values[name] = torch.from_numpy(dequantize(stored, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(model: Path | str, **options: Any) -> str:
    """The one line that refuses a model."""
    with pytest.raises(ConfigurationRefused) as caught:
        loader.resolve(str(model), **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_gguf_file_is_converted_once(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file passed by path or by folder is converted once, and again after it changes."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = loader.resolve(str(file))
    assert folder.parent == cache / "gguf"
    assert Checkpoint.open(folder).num_bytes() > 0
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abcab").ids == [5, 4]
    assert loader.display_name(str(file)) == "tiny"
    capfd.readouterr()
    assert loader.resolve(str(tmp_path)) == folder
    assert loader.resolve(str(file), load_format="gguf") == folder
    assert capfd.readouterr().err == ""  # nothing was converted
    write_gguf(file)
    assert loader.resolve(str(file)) == folder
    assert "converting tiny.gguf" in capfd.readouterr().err


def test_safetensors_come_before_gguf(tmp_path: Path) -> None:
    """In a folder with both, GGUF is used only if --load-format says so."""
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert loader.resolve(str(tmp_path)) == tmp_path
    assert loader.resolve(str(tmp_path), load_format="gguf") != tmp_path


def test_unsupported_gguf_files_are_refused(tmp_path: Path, cache: Path) -> None:
    """Unsupported families, tokenizers and embeddings and broken files are refused and leave no files."""

    def tokenizer(model: str, pre: str) -> Callable[[gguf.GGUFWriter], None]:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model(model)
            writer.add_tokenizer_pre(pre)

        return change

    def scaled(writer: gguf.GGUFWriter) -> None:
        tokenizer("gpt2", "gpt-2")(writer)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    def refused(file: Path) -> str:
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        with pytest.raises(ValueError) as caught:
            gguf_convert.convert(file, folder)
        assert list(folder.iterdir()) == []
        return str(caught.value)

    file = tmp_path / "tiny.gguf"
    for change, text in (
        (tokenizer("gpt2", "llama-bpe"), "type gpt2 (llama-bpe) are not"),
        (tokenizer("llama", "default"), "type llama (default) are not"),
        (scaled, "with yarn scaling are not"),
    ):
        write_gguf(file, change=change)
        assert text in refused(file)
    for content in (b"", b"GGUF", b"no GGUF file, but a longer one than the magic number"):
        file.write_bytes(content)
        assert refused(file) == "it is not a complete GGUF file; fetch it again"
    # The worker's message is one line, and the cache has only a lock.
    write_gguf(file, "qwen2")
    assert f"cannot convert {file}: GGUF files of the architecture qwen2 are not supported" in refusal(file)
    assert [path.suffix for path in (cache / "gguf").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("make", "load_format", "expected"),
    [
        (["x.txt"], "auto", "has no config.json"),
        (["a.gguf", "b.gguf"], "auto", "has 2 GGUF files; pass one of them as --model"),
        (["config.json", "a.safetensors"], "gguf", "has no GGUF file; check --model"),
        ([], "dummy", "has no config.json"),
    ],
)
def test_unsuitable_folders_are_refused(
    tmp_path: Path, make: list[str], load_format: LoadFormat, expected: str
) -> None:
    """The refusal names the folder and what is wrong with it."""
    for name in make:
        (tmp_path / name).touch()
    assert f"the folder {tmp_path} {expected}" in refusal(tmp_path, load_format=load_format)


def test_unsuitable_files_and_names_are_refused(tmp_path: Path) -> None:
    """Files of another kind, missing files and a --load-format that contradicts the file are refused."""
    (tmp_path / "model.safetensors").touch()
    assert "pass a Hugging Face folder or id, or a .gguf file as --model" in refusal(
        tmp_path / "model.safetensors"
    )
    (tmp_path / "model.gguf").touch()
    assert "is a GGUF file; omit --load-format dummy" in refusal(tmp_path / "model.gguf", load_format="dummy")
    assert refusal("missing.gguf") == "there is no file missing.gguf; check --model"
    assert "needs a local .gguf file" in refusal("some/model", load_format="gguf")


@pytest.mark.parametrize(
    ("load_format", "trust", "weights", "code"),
    [("auto", False, True, False), ("dummy", False, False, False), ("safetensors", True, True, True)],
)
def test_only_needed_files_are_fetched_from_a_hub(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    load_format: LoadFormat,
    trust: bool,
    weights: bool,
    code: bool,
) -> None:
    """Made-up weights and untrusted code are skipped, and pickles are never fetched."""
    (tmp_path / "config.json").write_text("{}")
    patterns: list[str] = []

    def snapshot_download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        del model, revision
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert loader.resolve("some/model", load_format=load_format, trust_remote_code=trust) == tmp_path
    assert ("*.safetensors" in patterns, "*.py" in patterns) == (weights, code)
    assert not {"*.bin", "*.pt", "*"} & set(patterns)


def test_demo_models_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo model's name resolves to that model, whose files count like a folder's."""
    monkeypatch.setattr(loader, "fetch", lambda name: tmp_path / name)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    assert loader.resolve("smollm2") == tmp_path / "smollm2"
    assert "no GGUF file" in refusal("smollm2", load_format="gguf")
