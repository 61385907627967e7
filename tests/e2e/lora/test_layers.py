"""Which adapters fit a model, and what kernels, types and devices make of them."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigurationRefused, InvalidArgument
from tests.support import quantized_models, tiny_models
from tests.support.pooling import tiny_embedders
from tests.support.worker import parity_process
from tests.support.worker.harness import Harness, load
from tests.support.worker.parity_process import Job, differences
from tests.support.worker.peft_adapters import AdapterSpec, PeftReference, write_adapter
from tests.support.zoo import families
from tests.unit.worker.lora.test_checkpoint import CASES, PATHS
from worker_svc.devices import open_device
from worker_svc.execution.memory_budget import working_bytes
from worker_svc.execution.worker import Worker
from worker_svc.lora.checkpoint import (
    CONFIG,
    WEIGHTS,
    AdapterCheckpoint,
    LoraLimits,
    Targets,
    read_adapter,
)
from worker_svc.quantized.codes import Scheme
from worker_svc.settings import Backend, Settings
from worker_svc.vllm_adapter.configuration import Dtype
from worker_svc.vllm_adapter.model import VllmModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM, transformers and PEFT
]

LIMITS = LoraLimits(max_loras=2, max_rank=8, max_cpu_loras=2)
HIDDEN = 64
W4 = Scheme(4, 64)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("qwen2-moe", tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write("deepseek-v2", tmp_path_factory.mktemp("latent") / "model")


def _checkpoint(path: str, rows: int = HIDDEN, columns: int = HIDDEN) -> AdapterCheckpoint:
    return AdapterCheckpoint("tuned", 2, {path: (torch.ones(2, columns), torch.ones(rows, 2))}, "")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("model.embed_tokens", "adapts model.embed_tokens, but embeddings and output heads take no adapters"),
        ("lm_head", "adapts lm_head, but embeddings and output heads"),
        ("model.layers.1.mlp.experts.3.up_proj", "but expert layers take no adapters"),
        ("model.layers.7.self_attn.q_proj", "Qwen2MoeForCausalLM has no such layer; is it for another base model?"),
        ("model.layers.0.self_attn.k_proj", "for another base model: its .*k_proj maps 64 values to 64, the model's 64 to 32"),
    ],
)  # fmt: skip
def test_adapters_for_other_layers(moe: Path, path: str, text: str) -> None:
    adapted = load(moe, "float32", lora=LIMITS).adapted
    assert adapted is not None
    with pytest.raises(InvalidArgument, match=text):
        adapted.fit(_checkpoint(path))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("q_a_proj", "but model.layers.0.self_attn.fused_qkv_a_proj, of which it is a part, takes no adapters"),
        ("fused_qkv_a_proj", "but this layer takes no adapters"),
        ("kv_b_proj", "but latent attention takes no adapter there"),
        ("q_c_proj", "but DeepseekV2ForCausalLM has no such layer"),
    ],
)  # fmt: skip
def test_layers_that_take_no_adapters(latent: Path, path: str, text: str) -> None:
    adapted = load(latent, "float32", lora=LIMITS).adapted
    assert adapted is not None
    with pytest.raises(InvalidArgument, match=f"adapts model.layers.0.self_attn.{path}, {text}"):
        adapted.fit(_checkpoint(f"model.layers.0.self_attn.{path}"))


def test_parts_and_whole_layers_fit(moe: Path) -> None:
    adapted = load(moe, "float32", lora=LIMITS).adapted
    assert adapted is not None
    (matrices,) = adapted.fit(_checkpoint("model.layers.0.self_attn.k_proj", 32)).values()
    assert [pair is not None for pair in matrices] == [False, True, False]
    (matrices,) = adapted.fit(_checkpoint("model.layers.0.self_attn.qkv_proj", 64 + 32 + 32)).values()
    assert [pair[1].shape for pair in matrices if pair] == [(64, 2), (32, 2), (32, 2)]
    (path,) = adapted.fit(_checkpoint("model.layers.1.mlp.shared_expert.gate_proj", 96))
    assert path.endswith("shared_expert.gate_up_proj")


@pytest.mark.parametrize(("config", "named"), CASES)
def test_targets_are_read_as_peft_reads_them(config: dict[str, Any], named: tuple[str, ...]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    lora = LoraConfig(**config)
    assert tuple(path for path in PATHS if check_target_module_exists(lora, path) is True) == named


def _adapter(base: Path, folder: Path, **options: Any) -> Path:
    return write_adapter(base, folder, AdapterSpec(5, targets=("q_proj", "up_proj"), options=options))


def _without(folder: Path, path: str) -> None:
    """Removes a layer's matrices from an adapter."""
    tensors = load_file(folder / WEIGHTS)
    kept = {key: tensor for key, tensor in tensors.items() if path not in key}
    assert len(kept) == len(tensors) - 2
    save_file(kept, folder / WEIGHTS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("path", ["layers.1.self_attn.q_proj", "layers.0.mlp.up_proj"])
def test_a_missing_layer_is_refused(llama: Path, tmp_path: Path, path: str) -> None:
    """Every layer of the model that a target names needs its matrices, however many others have theirs."""
    folder = _adapter(llama, tmp_path / "all")
    adapted = load(llama, "float32", lora=LIMITS).adapted
    assert adapted is not None
    adapted.fit(read_adapter(folder, name="tuned", max_rank=8))
    _without(folder, path)
    with pytest.raises(
        InvalidArgument, match=f"tuned is incomplete: it targets model.{path}, but its file has"
    ):
        adapted.fit(read_adapter(folder, name="tuned", max_rank=8))


def test_targets_without_layers_are_fine(llama: Path, tmp_path: Path) -> None:
    """PEFT ignores names that the model does not have, and trains some layers only if it is told so."""
    adapted = load(llama, "float32", lora=LIMITS).adapted
    assert adapted is not None
    folder = _adapter(llama, tmp_path / "some", layers_to_transform=[1], exclude_modules=["mlp.up_proj"])
    config = json.loads((folder / CONFIG).read_text())
    names = ["qkv_proj", "query_key_value", *config["target_modules"]]
    (folder / CONFIG).write_text(json.dumps({**config, "target_modules": names}))
    (fitted,) = adapted.fit(read_adapter(folder, name="tuned", max_rank=8))
    assert fitted == "model.layers.1.self_attn.qkv_proj"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "model")


def _check_targets(adapted: Any, path: str, removed: str) -> None:
    """Checks an adapter that has matrices of layer 1 alone, with names of targets that lack a beginning."""
    first, second = path.format(0), path.format(1)
    layer = adapted._layers[adapted._place(second, "tuned")[0]]
    checkpoint = _checkpoint(second, layer.parts[0].whole, layer.whole_inputs)
    last = second.rpartition(".")[2]
    names = [first.removeprefix(removed), second.removeprefix(removed)]
    for targets in (Targets([f"self_attn.{last}"], names[:1]), Targets(names[1:]), Targets(names, names[:1])):
        adapted.fit(replace(checkpoint, targets=targets))
    for targets in (
        Targets([f"self_attn.{last}"]),
        Targets(names),
        Targets([f"self_attn.{last}"], names[1:]),
    ):
        with pytest.raises(InvalidArgument, match=rf"is incomplete: it targets model\.layers\.0\..*{last},"):
            adapted.fit(replace(checkpoint, targets=targets))


@pytest.mark.parametrize("removed", ["", "model."], ids=["whole path", "end"])
def test_targets_where_vllm_renames_a_component(gpt_oss: Path, removed: str) -> None:
    """Targets and exclusions are the checkpoint's names, also where vLLM has a layer at another path."""
    adapted = load(gpt_oss, "float32", lora=LIMITS).adapted
    assert adapted is not None
    assert any(".attn.o_proj" in path for path in adapted._layers)
    _check_targets(adapted, "model.layers.{}.self_attn.o_proj", removed)


@pytest.mark.parametrize("removed", ["", "model."], ids=["whole path", "end"])
@pytest.mark.parametrize("last", ["o_proj", "q_proj"])
def test_targets_where_vllm_renames_a_prefix(
    llama: Path, last: str, removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of a path may begin inside the prefix, as PEFT's shortest names do; parts stay parts."""
    model = load(llama, "float32", lora=LIMITS)
    assert model.adapted is not None
    mapper = replace(model._model.hf_to_vllm_mapper, orig_to_new_prefix={"model.language_model.": "model."})
    assert ".q_proj" in mapper.orig_to_new_stacked
    monkeypatch.setattr(type(model._model), "hf_to_vllm_mapper", mapper)
    adapted = type(model.adapted)(
        model._model, LIMITS, open_device("cpu"), architecture="llama", dtype=torch.float32
    )
    _check_targets(adapted, f"model.language_model.layers.{{}}.self_attn.{last}", removed)


@pytest.mark.parametrize("target", ["q_a_proj", "lm_head"])
def test_a_target_that_takes_no_adapters_is_not_forgotten(latent: Path, target: str) -> None:
    adapted = load(latent, "float32", lora=LIMITS).adapted
    assert adapted is not None
    checkpoint = _checkpoint("model.layers.0.self_attn.o_proj", 128, 96)
    adapted.fit(replace(checkpoint, targets=Targets(["layers.0.self_attn.o_proj"])))
    with pytest.raises(InvalidArgument, match=f"is incomplete: it targets .*{target}"):
        adapted.fit(replace(checkpoint, targets=Targets(["layers.0.self_attn.o_proj", target])))


def test_embedding_models_take_none(tmp_path: Path) -> None:
    """--enable-lora is refused where no request could name an adapter."""
    folder = tiny_embedders.write("causal", tmp_path / "embedder")
    with pytest.raises(ConfigurationRefused, match="--enable-lora needs a model that generates tokens"):
        VllmModel(folder, open_device("cpu"), dtype="float32", seed=0, lora=LIMITS)


@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_our_kernels_run_bfloat16(tmp_path: Path, backend: Backend) -> None:
    """In bfloat16, log-probabilities are near those of PEFT in float32, far nearer than the base model's."""
    folder = tiny_models.write("llama", tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "all", AdapterSpec(5))
    reference = PeftReference(folder, {"all": adapter})
    job = _mixed(folder, adapter, backend=backend, dtype="bfloat16")
    assert all(near < 0.2 < far for near, far in _distances(reference, job))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.001), ("bfloat16", 0.2)])
def test_quantized_models_take_adapters(tmp_path: Path, dtype: Dtype, tolerance: float) -> None:
    base = tiny_models.write("llama", tmp_path / "model")
    folder = quantized_models.write(base, tmp_path / "w4", "compressed-tensors", W4)
    plain = quantized_models.write(base, tmp_path / "float", "float", W4)
    adapter = write_adapter(plain, tmp_path / "all", AdapterSpec(5))
    reference = PeftReference(plain, {"all": adapter})
    job = _mixed(folder, adapter, dtype=dtype)
    assert all(near < tolerance for near, _ in _distances(reference, job))


@pytest.mark.parametrize(
    ("dtype", "lora_dtype", "tolerance"),
    [("float32", "bfloat16", 0.02), ("float32", "float16", 0.01), ("bfloat16", "float32", 0.2)],
)
def test_adapters_have_a_type_of_their_own(
    llama: Path, tmp_path: Path, dtype: Dtype, lora_dtype: Dtype, tolerance: float
) -> None:
    """With --lora-dtype, the adapters' memory has that type, and the answers stay near PEFT's in float32."""
    adapter = write_adapter(llama, tmp_path / "all", AdapterSpec(5))
    reference = PeftReference(llama, {"all": adapter})
    job = _mixed(llama, adapter, dtype=dtype, lora_dtype=lora_dtype)
    assert all(near < tolerance and far > 0.2 for near, far in _distances(reference, job))
    adapted = load(llama, dtype, lora=job.lora).adapted
    assert adapted is not None
    matrices = [matrix for stack in adapted._stacks.values() for matrix in (stack._a, stack._b)]
    assert {matrix.dtype for matrix in matrices} == {getattr(torch, lora_dtype)}
    assert sum(matrix.nbytes for matrix in matrices) == adapted.num_bytes


def test_the_setting_gives_the_type(llama: Path) -> None:
    """A worker plans its adapters' memory in the type of --lora-dtype, whatever the model's is."""
    worker = Worker(
        Settings(
            model=str(llama), device="cpu", dtype="float32", cpu_threads=1, kv_memory=0.01, enable_lora=True,
            lora_dtype="bfloat16",
        )
    )  # fmt: skip
    worker.prepare()
    assert worker._model is not None
    assert worker._model.adapted is not None
    assert {shape.dtype for _, shape in worker._model.adapted.shapes()} == {torch.bfloat16}
    worker.close()


@pytest.mark.parametrize(("lora_dtype", "fits"), [("float16", False), ("bfloat16", True), ("auto", True)])
def test_matrices_that_exceed_their_type(llama: Path, lora_dtype: Dtype, fits: bool) -> None:
    adapted = load(llama, "float32", lora=replace(LIMITS, dtype=lora_dtype)).adapted
    assert adapted is not None
    path = "model.layers.0.self_attn.q_proj"
    matrices = {path: (torch.ones(2, HIDDEN), torch.full((2 * HIDDEN, 2), 1e5))}
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(
            InvalidArgument, match=f"the matrices of {path} exceed torch.float16; see --lora-dtype"
        )
    ):
        adapted.fit(AdapterCheckpoint("tuned", 2, matrices, ""))


def _mixed(folder: Path, adapter: Path, **fields: Any) -> Job:
    """Returns a batch in which some prompts have the adapter."""
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 21], [8, 9], [100, 3]]
    return Job(
        str(folder), prompts, adapters=[str(adapter), None, str(adapter), str(adapter), None], **fields
    )


def _distances(reference: PeftReference, job: Job) -> Iterator[tuple[float, float]]:
    """Yields each answer's distance from the reference with the right weights, and with others."""
    for prompt, path, answer in zip(job.prompts, job.adapters, parity_process.run(job), strict=True):
        distances = []
        for name in (None, "all") if path is None else ("all", None):
            with reference.using(name):
                distances.append(_distance(reference.logprobs(prompt, answer.tokens), answer.top))
        near, far = distances
        yield near, far


def _distance(expected: torch.Tensor, top: list[dict[str, float]]) -> float:
    """Mean distance of the reported log-probabilities."""
    distances = [
        (row[list(map(int, each))] - torch.tensor(list(each.values()))).abs().mean()
        for row, each in zip(expected, top, strict=True)
    ]
    return float(torch.stack(distances).mean())


def test_memory_is_estimated(tmp_path: Path) -> None:
    folder = tiny_models.write("llama", tmp_path / "model")
    model = load(folder, "float32", lora=LIMITS)
    harness = Harness(model, max_num_seqs=8, decode_buckets=parity_process.BUCKETS)
    steps = (harness.shapes.chunk, *parity_process.BUCKETS)
    alone = Harness(load(folder, "float32"), max_num_seqs=8, decode_buckets=parity_process.BUCKETS)
    taken = harness.runner.graphs.num_bytes - alone.runner.graphs.num_bytes
    size = model.size
    wider = type(size)(**{**vars(size), "width": size.width + size.adapter_width})
    assert taken <= working_bytes(wider, steps, 0, recorded=True) <= 3 * taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_adapters_is_counted_as_it_is_allocated(tmp_path: Path, dtype: Dtype) -> None:
    """Our kernels keep the matrices in another form than plain operators do."""
    folder = tiny_models.write("llama", tmp_path / "model")
    model = load(folder, dtype, lora=LIMITS)
    Harness(model, max_num_seqs=2, decode_buckets=(1, 2))
    assert model.adapted is not None
    counted = model.size.weight_bytes - load(folder, dtype).size.weight_bytes
    stacks = model.adapted._stacks.values()
    assert counted == sum(stack._a.nbytes + stack._b.nbytes for stack in stacks)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_an_npu_equals_peft(tmp_path: Path, backend: Backend) -> None:
    """In an NPU's graphs the selection and the matrices are inputs, so one graph serves any adapter."""
    folder = tiny_models.write("qwen3", tmp_path / "model")
    paths = {
        name: write_adapter(folder, tmp_path / name, AdapterSpec(seed, rank))
        for seed, (name, rank) in enumerate({"one": 8, "two": 5}.items())
    }
    prompts = [[5, 6, 7], list(range(3, 140)), [9, 8], [50, 60, 70, 80], list(range(20, 90))]
    names = ["one", None, "two", "two", "one"]
    job = Job(
        str(folder), prompts, device="rbln", backend=backend, window_kind="in_place_window", block_size=1024,
        max_model_len=1536, adapters=[None if name is None else str(paths[name]) for name in names],
    )  # fmt: skip
    (answers,) = parity_process.run_apart([job])
    reference = PeftReference(folder, paths)
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        with reference.using(name) as chosen:
            assert differences(chosen, [prompt], [answer]) == []
