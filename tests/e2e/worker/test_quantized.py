"""Models with quantized weights, in every format and on every kind of kernel."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from deploy.commands import quantize as command
from protos.errors import ConfigurationRefused
from tests.bench.quantized import TEXT, perplexity
from tests.support import quantized_models, tiny_models
from tests.support.paths import ROOT
from tests.support.quantized_models import Stored
from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.harness import Harness, load
from tests.support.worker.parity_process import Answer, Job, differences
from tests.support.zoo import families
from worker_svc.devices.cpu.kernels import build
from worker_svc.devices.cpu.kernels.ops import kernels
from worker_svc.execution.memory_budget import check_weights
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.model_files.quantize import Calibration, quantize_folder
from worker_svc.quantized.codes import Scheme

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

LLM_COMPRESSOR = ROOT / "tests/support/checkpoints/llm-compressor-w4a16"
SCHEMES = {"w4": Scheme(4, 64), "w4_32": Scheme(4, 32), "w8": Scheme(8, None)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def source(base: Path) -> Path:
    """A random Llama in float32."""
    return tiny_models.write("llama", base / "llama")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return parity_process.random_prompts()


def _stored(base: Path, source: Path, stored: Stored, scheme: str) -> Path:
    folder = base / f"{stored}-{scheme}"
    return folder if folder.exists() else quantized_models.write(source, folder, stored, SCHEMES[scheme])


@pytest.fixture(scope="module")
def references(base: Path, source: Path) -> dict[str, Reference]:
    """By scheme, transformers with the dequantized weights."""
    return {name: Reference(_stored(base, source, "float", name), torch.float32) for name in SCHEMES}


@pytest.mark.parametrize(("stored", "scheme"), [("compressed-tensors", "w4"), ("gptq", "w8")])
def test_formats_equal_dequantized_weights(
    base: Path, source: Path, references: dict[str, Reference], prompts: list[list[int]], stored: Stored, scheme: str
) -> None:  # fmt: skip
    folder = _stored(base, source, stored, scheme)
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled"))
    assert differences(references[scheme], prompts, answers) == []


def test_llm_compressors_checkpoints_are_served(prompts: list[list[int]]) -> None:
    answers = parity_process.run(Job(str(LLM_COMPRESSOR), prompts, backend="compiled"))
    assert differences(Reference(LLM_COMPRESSOR, torch.float32), prompts, answers) == []


@pytest.mark.parametrize(
    "scheme",
    ["w4", pytest.param("w4_32", marks=pytest.mark.slow), pytest.param("w8", marks=pytest.mark.slow)],
)
def test_our_kernels_are_near(
    base: Path, source: Path, references: dict[str, Reference], prompts: list[list[int]], scheme: str
) -> None:
    """In bfloat16, our kernels' log-probabilities differ from the reference by rounding alone."""
    folder = _stored(base, source, "compressed-tensors", scheme)
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled", dtype="bfloat16"))
    _check_near(references[scheme], prompts, answers)


def _check_near(reference: Reference, prompts: list[list[int]], answers: list[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.logprobs(prompt, answer.tokens)
        for row, top in zip(expected, answer.top, strict=True):
            ours = torch.tensor(list(top.values()))
            assert float((row[list(map(int, top))] - ours).abs().mean()) < 0.15


def test_processors_with_matrix_units(
    base: Path, source: Path, references: dict[str, Reference], prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On processors with AMX, quantized products are ours; attention and the head are the wheel's."""
    if kernels() is None:
        pytest.skip("our kernels are unavailable")
    monkeypatch.setattr(build, "_processor_flags", lambda: frozenset(build._NEEDED) | {"amx_bf16"})
    folder = quantized_models.write(source, base / "amx", "compressed-tensors", SCHEMES["w4"])
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled", dtype="bfloat16"))
    layers = list(load(folder, "bfloat16")._model.modules())
    assert any(type(layer).__name__ == "_PackedQuantizedLinear" for layer in layers)
    multiply = [type(layer.cpu_linear).__name__ for layer in layers if hasattr(layer, "cpu_linear")]
    assert multiply
    assert "_PackedLinear" not in multiply
    _check_near(references["w4"], prompts, answers)


def test_memory_is_that_of_packed_weights(base: Path, source: Path) -> None:
    """The size that is measured before loading is that of the loaded weights, and the file's is checked."""
    folder = _stored(base, source, "compressed-tensors", "w4")
    model = load(folder, "bfloat16")
    loaded = sum(tensor.nbytes for tensor in [*model._model.parameters(), *model._model.buffers()])
    packed = sum(
        layer.cpu_linear._packed.nbytes for layer in model._model.modules() if hasattr(layer, "cpu_linear")
        and not layer.weight.numel()
    )  # fmt: skip
    assert model.size.weight_bytes == loaded + packed
    assert model.description.quantization == "compressed-tensors: w4a16 in groups of 64"
    assert model.size.width == load(source, "bfloat16").size.width
    if kernels() is not None:
        assert model.size.weight_bytes < 0.75 * load(source, "bfloat16").size.weight_bytes
    check_weights(Checkpoint.open(folder), "bfloat16", model._device)


def test_quantize_makes_what_is_served(base: Path, source: Path, prompts: list[list[int]]) -> None:
    tied = tiny_models.write("gemma3", base / "gemma3")
    folder = base / "gemma3-w8"
    quantize_folder(tied, folder, Scheme(8, None), head=True)
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled"))
    reference = Reference(tied, torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.logprobs(prompt, answer.tokens)
        for row, top in zip(expected, answer.top, strict=True):
            ours = torch.tensor(list(top.values()))
            assert float((row[list(map(int, top))] - ours).abs().mean()) < 0.3


@pytest.mark.slow
def test_a_calibrated_folder_is_served(base: Path, source: Path, prompts: list[list[int]]) -> None:
    """What `triptych quantize --calibrate` writes is served, with less error than what it writes without."""
    means = {}
    reference = Reference(source, torch.float32)
    for name, flags in {
        "rounded": [],
        "calibrated": ["--calibrate", "--calibrate-tokens", "2048"],
    }.items():
        folder = base / name
        arguments = [str(source), "--scheme", "w4a16", "--lm-head", "keep", "--out", str(folder), *flags]
        assert command.main(arguments) == 0
        answers = parity_process.run(Job(str(folder), prompts, backend="compiled"))
        errors = [
            (row[list(map(int, top))] - torch.tensor(list(top.values()))).abs().mean()
            for prompt, answer in zip(prompts, answers, strict=True)
            for row, top in zip(reference.logprobs(prompt, answer.tokens), answer.top, strict=True)
        ]
        means[name] = float(torch.stack(errors).mean())
    assert means["calibrated"] < 0.9 * means["rounded"]


def test_the_command_calibrates_with_a_file(
    base: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--calibrate FILE` reads that text, and gives other codes than the model's own text."""
    model = base / "with-tokenizer"
    shutil.copytree(source, model)
    tiny_models.write_tokenizer(model)
    text = base / "text.txt"
    text.write_text(" ".join(f"w{n * n % 100}" for n in range(600)))
    made = []
    for name, file in {"from-file": [str(text)], "from-model": []}.items():
        arguments = [str(model), "--scheme", "w4a16", "--out", str(base / name), "--calibrate", *file]
        assert command.main([*arguments, "--calibrate-tokens", "512"]) == 0
        made.append(load_file(base / name / "model.safetensors"))
        steps = capsys.readouterr().err
        assert ("writing the calibration text" in steps) == (not file)
        assert "reading the calibration text" in steps
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    assert not torch.equal(made[0][name], made[1][name])


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        (
            "MambaForCausalLM",
            "MambaForCausalLM has layers with a state of their own (Mamba or linear attention)",
        ),
        ("LlavaForConditionalGeneration", "LlavaForConditionalGeneration is multimodal and not served"),
        ("SomeForCausalLM", "vLLM does not know the architecture SomeForCausalLM"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--calibrate"]])
def test_what_is_not_served_is_not_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, reason: str, flags: list[str]
) -> None:
    """`triptych quantize` refuses an architecture in the worker's line, before it reads weights."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert command.main([str(source), "--scheme", "w4a16", "--out", str(target), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"triptych quantize: {reason}")
    assert not target.exists()


@pytest.mark.slow
def test_what_quantizing_costs(base: Path, smollm2: Path) -> None:
    """On the bench's text, SmolLM2's perplexity rises by less than 1 % with 8 bits and by 35 % with 4.

    With calibration on 2,048 tokens of its own text, 4 bits cost less than 20 %.
    """
    token_ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT.read_text()).ids
    perplexities = []
    for folder, scheme, calibration in (
        (smollm2, None, None),
        (base / "smollm2-w8", SCHEMES["w8"], None),
        (base / "smollm2-w4", SCHEMES["w4"], None),
        (base / "smollm2-w4-calibrated", SCHEMES["w4"], Calibration(tokens=2048)),
    ):
        if scheme is not None:
            quantize_folder(smollm2, folder, scheme, head=True, calibration=calibration)
        harness = Harness(
            load(folder, "bfloat16"), max_model_len=1024, max_num_seqs=1, decode_buckets=(1,), backend="eager"
        )
        perplexities.append(perplexity(harness, token_ids))
    plain, w8, w4, calibrated = perplexities
    assert 15 < plain < 25
    assert w8 < 1.01 * plain
    assert w4 < 1.35 * plain
    assert calibrated < 1.2 * plain


@pytest.mark.slow
def test_an_npu_equals_dequantized_weights(
    base: Path, source: Path, references: dict[str, Reference], prompts: list[list[int]]
) -> None:
    names = ("w4", "w8")
    jobs = [
        Job(
            str(_stored(base, source, "compressed-tensors", name)), prompts, device="rbln", backend="compiled",
            window_kind="in_place_window", block_size=1024, max_model_len=1536,
        )
        for name in names
    ]  # fmt: skip
    for name, answers in zip(names, parity_process.run_apart(jobs), strict=True):
        assert differences(references[name], prompts, answers) == []


def test_what_is_not_served_is_refused(base: Path, source: Path) -> None:
    """Quantized experts, latent attention, embeddings and half of a merged layer are refused by name."""
    experts = tiny_models.write("qwen2-moe", base / "experts")
    refused = quantized_models.write(experts, base / "experts-w4", "gptq", Scheme(4, 32))
    with pytest.raises(
        ConfigurationRefused, match=r"quantizes experts \(model.layers.1.*\), which is not served"
    ):
        load(refused, "bfloat16")

    latent = families.write("deepseek-v2-lite", base / "latent")
    refused = quantized_models.write(latent, base / "latent-w4", "compressed-tensors", Scheme(4, 32))
    line = r"quantizes latent attention \(model.layers.0.self_attn.kv_b_proj\), which is not served"
    with pytest.raises(ConfigurationRefused, match=line):
        load(refused, "bfloat16")

    folder = _stored(base, source, "gptq", "w4")
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    refusals = {
        "embed_tokens": r"quantizes the embeddings \(model.embed_tokens\), which is not served",
        "layers.0.self_attn.q_proj": (
            r"quantizes the parts of model.layers.0.self_attn.qkv_proj \(.*\) differently, which is not served"
        ),
    }
    for name, reason in refusals.items():
        changed = base / f"changed-{name}"
        changed.mkdir()
        old, new = ("qweight", "weight") if "q_proj" in name else ("weight", "qweight")
        renamed = {each.replace(f"{name}.{old}", f"{name}.{new}"): tensor for each, tensor in stored.items()}
        save_file(renamed, changed / "model.safetensors")
        (changed / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigurationRefused, match=reason):
            load(changed, "bfloat16")
    config["quantization_config"]["group_size"] = 128
    wide = base / "wide"
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps(config))
    save_file(stored, wide / "model.safetensors")
    with pytest.raises(
        ConfigurationRefused,
        match="qkv_proj has 64 inputs, but w4a16 in groups of 128 needs a multiple of 128; choose",
    ):
        load(wide, "float32")


def test_groups_that_ranks_would_split_are_refused() -> None:
    from worker_svc.devices import open_device
    from worker_svc.vllm_adapter.layers.quantized_linear import QuantizedLinearMethod

    method = QuantizedLinearMethod(open_device("cpu"), Scheme(4, 64), "model.layers.0.o_proj", wide=False)
    with pytest.raises(ConfigurationRefused) as refused:
        method.create_weights(torch.nn.Module(), 288, [576], 576, 576, torch.bfloat16)
    assert refused.value.message == (
        "model.layers.0.o_proj has 288 inputs on each of 2 ranks, but w4a16 in groups of 64 needs a multiple of"
        " 64; lower --tensor-parallel-size"
    )
