"""A worker loads tiny models in every layout, reports progress, and runs no untrusted code."""

import json
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import ConfigurationRefused
from tests.support import tiny_models
from tests.support.worker.harness import Harness, tokens_of
from worker_svc.devices import open_device
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.execution.runner import Runner
from worker_svc.execution.worker import Worker
from worker_svc.ranks.layout import RankLayout
from worker_svc.settings import LoadFormat, Settings
from worker_svc.shapes import ShapeConfig
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

SHAPES = ShapeConfig(256, 2, 128, 128, (1, 2))
PROMPT = [5, 9, 77, 130]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers in one file."""
    return tiny_models.write("llama", tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several files."""
    return tiny_models.write("llama", tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")


def open_model(folder: Path, *, trust: bool = False, layout: RankLayout | None = None) -> VllmModel:
    device = open_device("cpu")
    torch.set_num_threads(1)
    startup.prepare(device.name)
    return VllmModel(folder, device, dtype="float32", seed=0, trust_remote_code=trust, layout=layout)


def generate(model: VllmModel) -> list[int]:
    harness = Harness(model, max_model_len=256, max_num_seqs=2, decode_buckets=(1, 2))
    return tokens_of(harness.generate([PROMPT], 6)[0])


def configure(folder: Path, **settings: Any) -> list[tuple[str, int, int, str]]:
    """Configures a worker; returns the progress that it reported."""
    events: list[tuple[str, int, int, str]] = []
    worker = Worker(Settings(model=str(folder), device="cpu", cpu_threads=1, kv_memory=0.01, **settings))
    worker.prepare()
    worker.configure(SHAPES, lambda *event: events.append(event))
    return events


def test_shards_are_counted(single: Path, sharded: Path) -> None:
    """Progress names each file before it is read, and both layouts give the same model."""
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 2
    loads = [event for event in configure(sharded) if event[0] == "load"]
    assert loads == [
        *(("load", done, len(files), name) for done, name in enumerate(files)),
        ("load", len(files), len(files), "done"),
    ]
    loads = [event for event in configure(single) if event[0] == "load"]
    assert loads == [("load", 0, 1, "model.safetensors"), ("load", 1, 1, "done")]
    tokens = []
    for folder in (single, sharded):
        model = open_model(folder)
        model.load_weights()
        tokens.append(generate(model))
    assert tokens[0] == tokens[1]


def test_dummy_weights_need_no_file(single: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((single / "config.json").read_bytes())
    events = configure(tmp_path, load_format="dummy")
    assert [event for event in events if event[0] == "load"] == [("load", 0, 0, "made up weights")]
    assert [event for event in events if event[0] == "compile"]
    with pytest.raises(ConfigurationRefused, match=r"has no weights .* use --load-format dummy"):
        configure(tmp_path)


def test_what_does_not_fit_is_refused(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are refused while preparing, graphs and cache while configuring; a retry may succeed."""
    worker = Worker(Settings(model=str(single), device="cpu", cpu_threads=1, kv_memory=10_000))
    worker.prepare()
    monkeypatch.setattr(CpuDevice, "free_memory", lambda _: 8 << 20)
    many = replace(SHAPES, max_num_seqs=4096, decode_buckets=(1, 4096))
    with pytest.raises(ConfigurationRefused, match=r"graphs need [\d.]+ GiB; --max-num-seqs \d+ would fit"):
        worker.configure(many, lambda *_: None)
    with pytest.raises(ConfigurationRefused, match=r"do not fit; --num-blocks \d+ would"):
        worker.configure(replace(SHAPES, num_blocks=(1000,)), lambda *_: None)
    ready = worker.configure(SHAPES, lambda *_: None)
    assert ready.shapes == replace(SHAPES, num_blocks=(5,))  # the most that two slots can use
    monkeypatch.setattr(CpuDevice, "free_memory", lambda _: 100_000)
    with pytest.raises(
        ConfigurationRefused, match=r"the weights need .* device cpu has .* free; use a smaller"
    ):
        Worker(Settings(model=str(single), device="cpu")).prepare()


def test_a_new_configuration_frees_the_old_cache_first(single: Path) -> None:
    worker = Worker(Settings(model=str(single), device="cpu", cpu_threads=1))
    worker.prepare()
    worker.configure(SHAPES, lambda *_: None)
    assert worker._engine is not None
    assert isinstance(worker._engine._runner, Runner)
    old = [weakref.ref(cache) for tensors in worker._engine._runner.cache._tensors for cache in tensors]
    held: list[bool] = []

    def look(phase: str, *_: object) -> None:
        if phase == "allocate":
            held.extend(reference() is not None for reference in old)

    worker.configure(replace(SHAPES, max_model_len=128), look)
    assert held == [False]


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_nothing_is_unpickled(single: Path, tmp_path: Path, load_format: LoadFormat) -> None:
    (tmp_path / "config.json").write_bytes((single / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(tmp_path / "ran")))
    with pytest.raises(ConfigurationRefused, match="convert them to safetensors"):
        configure(tmp_path, load_format=load_format)
    with pytest.raises(ConfigurationRefused, match="convert them to safetensors"):
        open_model(tmp_path).load_weights()
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def foreign(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its own configuration class, which creates a file when it is imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes())
    config = json.loads((single / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "configuration_foreign.ForeignConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_foreign.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class ForeignConfig(LlamaConfig):\n"
        "    model_type = 'foreign'\n"
    )
    return folder


def test_untrusted_model_code_does_not_run(foreign: Path, tmp_path: Path) -> None:
    """The refusal names --trust-remote-code; a model type that vLLM knows loads without the model's code."""
    with pytest.raises(ConfigurationRefused, match="pass --trust-remote-code if you trust it") as caught:
        configure(foreign)
    assert "\n" not in caught.value.message
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"architectures": ["ForeignForCausalLM"]}))
    with pytest.raises(ConfigurationRefused, match="pass --trust-remote-code if you trust it"):
        configure(foreign)
    (foreign / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    configure(foreign)
    assert not (tmp_path / "ran").exists()


def test_trusted_model_code_runs(
    foreign: Path, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model = open_model(foreign, trust=True)
    model.load_weights()
    assert (tmp_path / "ran").exists()
    plain = open_model(single)
    plain.load_weights()
    assert generate(model) == generate(plain)


def test_one_process_group_serves_models_with_and_without_experts(single: Path, tmp_path: Path) -> None:
    """Each group that vLLM asks for would have a thread that wakes 100 times a second."""
    for folder in (single, tiny_models.write("mixtral", tmp_path)):
        model = open_model(folder)
        model.load_weights()
        assert len(generate(model)) == 6
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        assert names.count("gloo_tcp_loop") == 0


def test_a_stage_needs_a_layer(single: Path) -> None:
    with pytest.raises(
        ConfigurationRefused, match="--pipeline-parallel-size 4 is more than the model's 2 layers"
    ):
        open_model(single, layout=RankLayout(3, pipeline=4))


def test_an_error_about_all_stages_is_one_line(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of vLLM suits the two stages, but not the model as one stage, which is built as well."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    with pytest.raises(ConfigurationRefused, match="in 2 stages: ") as caught:
        open_model(single, layout=RankLayout(1, pipeline=2))
    assert "\n" not in caught.value.message
