"""Optimization levels of devices, and the compiled code that a worker finds and keeps."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from tests.support.worker.layerless import GROUPS
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.graphs.compilation import Compilation, graph_options
from worker_svc.graphs.spyre_catalog import NAME
from worker_svc.settings import Settings
from worker_svc.shapes import ModelDescription, ShapeConfig

SIZES = ShapeConfig(32, 2, 8, 16, (1, 2), (5, 5))
DESCRIPTION = ModelDescription("Tiny", 10, 32, (), torch.float32, None, (), None, {})


class OwnCompiler(CpuDevice):
    """A device whose own compiler is its only one."""

    highest_level: ClassVar[int] = 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path


def make_settings(cache: Path, **changed: Any) -> Settings:
    return Settings(model="m", optimization_level=2, compile_cache_dir=cache, **changed)


def make_compilation(folder: Path, settings: Settings) -> Compilation:
    device = CpuDevice()
    options = graph_options(settings, device)
    return Compilation(settings, device, options, folder=folder, description=DESCRIPTION, groups=GROUPS)


def test_a_level_that_the_device_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match="device cpu has its own compiler; use -O 1 or omit it"):
        graph_options(make_settings(tmp_path), OwnCompiler())


def test_code_is_kept_and_found_again(folder: Path, tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "cache")
    first = make_compilation(folder, settings)
    first.find(SIZES)
    first.use()
    assert first.folder is not None
    (first.folder / "kernel").write_text("code")
    first.keep(["decode of 1 rows"], 1.0)
    second = make_compilation(folder, make_settings(tmp_path / "cache", require_precompiled=True))
    second.find(SIZES)
    assert second.folder is not None
    assert (second.folder / "kernel").read_text() == "code"
    second.keep(["decode of 1 rows"], 1.0)
    assert second.folder == first.folder


def test_a_second_configuration_keeps_no_code(folder: Path, tmp_path: Path) -> None:
    compilation = make_compilation(folder, make_settings(tmp_path / "cache"))
    compilation.find(SIZES)
    compilation.keep([], 1.0)
    compilation.release()
    assert compilation.folder is None
    other = ShapeConfig(32, 1, 8, 16, (1,), (5, 5))
    compilation.find(other)
    compilation.keep([], 1.0)
    required = make_compilation(folder, make_settings(tmp_path / "cache", require_precompiled=True))
    required.find(SIZES)
    with pytest.raises(ConfigurationRefused, match="not precompiled"):
        required.find(other)


def test_low_levels_have_no_code(folder: Path, tmp_path: Path) -> None:
    """At -O 1 there is nothing to compile, even if precompiled code is required."""
    settings = Settings(
        model="m", optimization_level=1, compile_cache_dir=tmp_path / "cache", require_precompiled=True
    )
    compilation = make_compilation(folder, settings)
    compilation.find(SIZES)
    assert compilation.folder is None


@pytest.mark.parametrize("level", [1, 2])
def test_kernels_that_come_later_have_a_folder(
    level: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache can be written; a kernel that is compiled while the worker serves goes elsewhere."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inductor"))
    settings = Settings(model="m", optimization_level=level, compile_cache_dir=tmp_path / "file" / "cache")
    compilation = make_compilation(folder, settings)
    compilation.find(SIZES)
    compilation.use()
    compilation.keep([], 1.0)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        Path(os.environ[name]).mkdir()


# An entry as vLLM-Spyre reads it, for the deployment of these tests.
ENTRY = {
    "vllm_spyre_version": "1.10.0",
    "data": {
        "MODEL_NAME": "m",
        "NUM_AIUS": 1,
        "VLLM_DT_MAX_CONTEXT_LEN": SIZES.max_model_len,
        "VLLM_DT_MAX_BATCH_SIZE": SIZES.max_num_seqs,
    },
}


def altered(**changed: Any) -> dict[str, Any]:
    return {**ENTRY, "data": {**ENTRY["data"], **changed}}  # type: ignore[dict-item]


def compile_once(folder: Path, cache: Path) -> None:
    compilation = make_compilation(folder, make_settings(cache))
    compilation.find(SIZES)
    compilation.keep(["decode of 1 rows"], 1.0)


def warnings_of(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Starts with required code; returns the tagged warnings, and the refusal if the code is missing."""
    capsys.readouterr()
    try:
        make_compilation(folder, make_settings(cache, require_precompiled=True)).find(SIZES)
    except ConfigurationRefused as error:
        refusal = [error.message]
    else:
        refusal = []
    printed = capsys.readouterr().out.splitlines()
    return [line for line in printed if "[PRECOMPILED_WARN]" in line] + refusal


def test_compiled_code_gets_an_entry_that_vllm_spyre_can_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documented start, an empty catalog, then warns of nothing; a second compilation adds nothing."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / NAME).write_text("{}")
    compile_once(folder, cache)
    compile_once(folder, cache)
    (entry,) = json.loads((cache / NAME).read_text())
    assert entry["data"] == ENTRY["data"]
    assert {"vllm_spyre_version", "sendnn_inference_version"} <= entry.keys()
    assert warnings_of(folder, cache, capsys) == []


def test_entries_of_others_stay(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / NAME).write_text(json.dumps([ENTRY]))
    compile_once(folder, cache)
    first, second = json.loads((cache / NAME).read_text())
    assert first == ENTRY
    assert second["data"] == ENTRY["data"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], ["no entry of", "NUM_AIUS 1", "VLLM_DT_MAX_CONTEXT_LEN 32", "VLLM_DT_MAX_BATCH_SIZE 2"]),
        ([altered(NUM_AIUS=4)], ["no entry of"]),
        ([altered(VLLM_DT_MAX_BATCH_SIZE=8)], ["no entry of"]),
        ([altered(VLLM_SPYRE_WARMUP_PROMPT_LENS="64")], ["no entry of"]),
        ([altered(SENDNN_INFERENCE_WARMUP_PROMPT_LENS="64")], ["no entry of"]),
        (["text"], ["cannot be read"]),
        ({"data": {}}, ["cannot be read"]),
        ([altered(MODEL_NAME="other")], ["compiled by vllm-spyre 1.10.0", "other"]),
    ],
)
def test_an_entry_only_warns(
    content: Any, expected: Sequence[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Required code that is there is used, whatever the catalog says."""
    cache = tmp_path / "cache"
    compile_once(folder, cache)
    (cache / NAME).write_text(json.dumps(content))
    warned = warnings_of(folder, cache, capsys)
    assert all(any(words in line for line in warned) for words in expected), warned


def test_an_entry_of_another_model_is_passed_over_for_a_better_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    compile_once(folder, cache)
    ours = json.loads((cache / NAME).read_text())
    (cache / NAME).write_text(json.dumps([altered(MODEL_NAME="other"), *ours]))
    assert warnings_of(folder, cache, capsys) == []


def test_an_entry_is_no_code(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that only the catalog has is refused; without a catalog nothing warns."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    assert len(warnings_of(folder, cache, capsys)) == 1
    (cache / NAME).write_text(json.dumps([ENTRY]))
    *warned, refusal = warnings_of(folder, cache, capsys)
    assert "nothing is precompiled" in refusal
    assert len(warned) == 1


def test_a_catalog_that_cannot_be_read_is_kept(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / NAME).write_text("[{")
    compile_once(folder, cache)
    assert (cache / NAME).read_text() == "[{"
