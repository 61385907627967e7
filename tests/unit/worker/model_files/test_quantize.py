"""`triptych quantize`: folders of quantized weights."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.commands import quantize as command
from protos.errors import ConfigurationRefused
from worker_svc.model_files import quantize
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.model_files.quantize import Calibration, quantize_folder
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import read
from worker_svc.quantized.codes import Scheme

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}.weight"


def _model(folder: Path, more: dict[str, torch.Tensor] | None = None, *, tied: bool = True) -> Path:
    """Writes a model of two layers in two shards, each with an index, a tokenizer and hidden files."""
    folder.mkdir()
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{EMBEDDINGS: torch.randn(48, 64).bfloat16()}, {}]
    for layer, shard in enumerate(shards):
        shard[_layer(layer, "self_attn.q_proj")] = torch.randn(64, 64).bfloat16()
        shard[_layer(layer, "mlp.down_proj")] = torch.randn(64, 128).bfloat16()
        shard[_layer(layer, "input_layernorm")] = torch.ones(64).bfloat16()
    if not tied:
        shards[1][HEAD] = torch.randn(48, 64).bfloat16()
    shards[1] |= more or {}
    names = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("old weights")
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }


def _weights(found: dict[str, torch.Tensor], module: str, bits: int) -> torch.Tensor:
    packed, scales = found[f"{module}.weight_packed"], found[f"{module}.weight_scale"]
    assert found[f"{module}.weight_shape"].tolist() == [packed.shape[0], packed.shape[1] * 32 // bits]
    return codes.dequantize(codes.unpack(packed, bits), scales, bits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(8, None)])
def test_a_model_is_quantized(tmp_path: Path, scheme: Scheme, *, head: bool, tied: bool) -> None:
    """Projections are near the originals, everything else equals them, and our reader finds the schemes."""
    source = _model(tmp_path / "source", tied=tied)
    target = tmp_path / "target"
    made = quantize_folder(source, target, scheme, head=head)
    assert made.matrices == 4 + head
    before, after = _tensors(source), _tensors(target)
    for layer in (0, 1):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            weight = before[_layer(layer, name)].float()
            found = _weights(after, _layer(layer, name).removesuffix(".weight"), scheme.bits)
            assert (found - weight).norm() < (0.15 if scheme.bits == 4 else 0.02) * weight.norm()
        assert torch.equal(after[_layer(layer, "input_layernorm")], torch.ones(64).bfloat16())
    assert torch.equal(after[EMBEDDINGS], before[EMBEDDINGS])
    assert (HEAD in after) == (not tied and not head)
    config = json.loads((target / "config.json").read_text())
    assert config["tie_word_embeddings"] is (tied and not head)
    if head:
        weight = before[EMBEDDINGS if tied else HEAD].float()
        assert (_weights(after, "lm_head", 8) - weight).norm() < 0.02 * weight.norm()
    quantization = read(target)
    assert quantization is not None
    assert quantization.scheme_of("model.layers.1.mlp.down_proj") == scheme
    assert quantization.scheme_of("lm_head") == (Scheme(8, None) if head else None)
    # The reader of checkpoints takes the new index and finds all files complete.
    assert Checkpoint.open(target).num_bytes() == made.bytes_after
    assert {path.name for path in target.iterdir()} - {path.name for path in source.iterdir()} == set()
    assert not (target / "pytorch_model.bin").exists()
    assert (target / "1_Pooling" / "config.json").read_text() == "{}"


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    source = _model(tmp_path / "source")
    target = tmp_path / "target"

    def refusal(folder: Path, scheme: Scheme = Scheme(4, 64)) -> str:  # noqa: B008 - immutable
        with pytest.raises(ConfigurationRefused) as refused:
            quantize_folder(folder, target, scheme, head=True)
        assert {path.name for path in tmp_path.iterdir() if "target" in path.name} == set()
        return refused.value.message

    assert refusal(source, Scheme(4, 128)) == (
        f"{_layer(0, 'self_attn.q_proj')} has 64 inputs, which is not a multiple of 128; use --group-size 64"
    )
    experts = _model(tmp_path / "e", {_layer(0, "mlp.experts.0.up_proj"): torch.ones(2, 64)})
    assert f"has experts ({_layer(0, 'mlp.experts.0.up_proj')})" in refusal(experts)
    fused = _layer(0, "block_sparse_moe.input_linear")
    granite = _model(tmp_path / "g", {fused: torch.ones(2, 8, 64)})
    assert f"has experts ({fused})" in refusal(granite)
    integers = _model(tmp_path / "i", {_layer(2, "mlp.up_proj"): torch.ones(2, 64, dtype=torch.int8)})
    assert f"{_layer(2, 'mlp.up_proj')} has the type I8" in refusal(integers)
    latent = _model(tmp_path / "l", {_layer(1, "self_attn.kv_b_proj"): torch.ones(2, 64)})
    assert f"has latent attention ({_layer(1, 'self_attn.kv_b_proj')})" in refusal(latent)
    other = _model(tmp_path / "o", {_layer(0, "mlp.up_proj"): torch.ones(2, 1000)})
    line = f"{_layer(0, 'mlp.up_proj')} has 1000 inputs, which is not a multiple of 64; "
    assert refusal(other) == f"{line}use --group-size channel"
    odd = _model(tmp_path / "odd", {_layer(0, "mlp.up_proj"): torch.ones(2, 1001)})
    assert refusal(odd) == f"{line.replace('1000', '1001')}choose another model"
    empty = tmp_path / "empty"
    empty.mkdir()
    save_file({EMBEDDINGS: torch.ones(8, 8)}, empty / "model.safetensors")
    (empty / "config.json").write_text("{}")
    assert refusal(empty) == f"{empty} has no projections of decoder layers to quantize; choose another model"
    done = tmp_path / "done"
    quantize_folder(source, done, Scheme(8, None), head=False)
    assert refusal(done) == f"{done} is quantized already; choose a model in bfloat16"
    target = done
    with pytest.raises(ConfigurationRefused) as refused:
        quantize_folder(source, target, Scheme(8, None), head=True)
    assert refused.value.message == f"{done} exists already; choose another folder for the result"


def test_calibration_begins_after_cheap_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that cannot be written and weights that are not finite are refused before calibration."""
    monkeypatch.setattr(quantize, "calibrate", lambda *_: pytest.fail("calibrated"))
    source, target = _model(tmp_path / "source"), tmp_path / "no" / "x"
    weight = torch.ones(64, 64)
    weight[0, 0] = float("nan")
    broken = _model(tmp_path / "broken", {_layer(2, "mlp.up_proj"): weight})
    for folder, out, line in (
        (source, target, f"cannot write {target}: No such file or directory"),
        (broken, tmp_path / "x", f"{_layer(2, 'mlp.up_proj')} is not finite; fetch the model again"),
    ):
        with pytest.raises(ConfigurationRefused) as refused:
            quantize_folder(folder, out, Scheme(4, 64), head=True, calibration=Calibration())
        assert refused.value.message == line


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """If the result cannot be written, the line names the system's reason and no folder is left."""
    source = _model(tmp_path / "source")
    target = tmp_path / "target"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that may not grow fails as on a full disk; Python ignores the signal.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigurationRefused) as refused:
            quantize_folder(source, target, Scheme(8, None), head=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.message == f"cannot write {target}: File too large"
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_head_under_a_prefix_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head with another name stays in bfloat16; the command and the configuration say so."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    tensors = {
        f"language_model.{name}": torch.randn(64, 64).bfloat16()
        for name in ("model.layers.0.mlp.up_proj.weight", EMBEDDINGS, HEAD)
    }
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llava"}')
    assert command.main([str(source), "--out", str(target), "--scheme", "w8a16"]) == 0
    assert "the output head, if the model has one, stays as it is" in capsys.readouterr().err
    assert torch.equal(_tensors(target)[f"language_model.{HEAD}"], tensors[f"language_model.{HEAD}"])
    quantization = read(target)
    assert quantization is not None
    assert quantization.scheme_of("language_model.lm_head") is None
    assert quantization.scheme_of("language_model.model.layers.0.mlp.up_proj") == Scheme(8, None)


def test_layers_with_other_names_stay(tmp_path: Path) -> None:
    names = (
        "model.layers.0.mlp.fc1",
        "model.layers.1.self_attn.dense",
        "connector.linear",
        "vision.layers.0.q_proj",
    )
    more = {f"{name}.weight": torch.randn(64, 64).bfloat16() for name in names}
    target = tmp_path / "target"
    quantize_folder(_model(tmp_path / "source", more), target, Scheme(4, 64), head=False)
    after, quantization = _tensors(target), read(target)
    assert quantization is not None
    for name in names:
        assert torch.equal(after[f"{name}.weight"], more[f"{name}.weight"])
        assert quantization.scheme_of(name) is None
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj") == Scheme(4, 64)
    config = json.loads((target / "config.json").read_text())
    assert sorted(config["quantization_config"]["ignore"]) == sorted([*names, "lm_head"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = _model(tmp_path / "source"), tmp_path / "target"
    arguments = [str(source), "--out", str(target), "--scheme", "w4a16"]
    assert command.main([*arguments, "--group-size", "128"]) == 2
    assert "triptych quantize: model.layers.0.self_attn.q_proj" in capsys.readouterr().err
    assert command.main([*arguments, "--lm-head", "keep"]) == 0
    assert f"{target}: 4 matrices, w4a16 in groups of 64; weights 0 MiB -> 0 MiB" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments, "--group-size", "16"])
    assert ended.value.code == 2
    assert "triptych quantize: argument --group-size: invalid choice: '16'" in capsys.readouterr().err
    for more, line in {
        ("--calibrate-tokens", "64"): "--calibrate-tokens has no effect without --calibrate",
        ("--calibrate", "smollm2"): (
            "argument --calibrate: there is no file smollm2; if it is the model, name it before --calibrate"
        ),
    }.items():
        with pytest.raises(SystemExit):
            command.main([*arguments, *more])
        assert line in capsys.readouterr().err


def test_matrices_that_calibration_did_not_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "calibrate", lambda *_: {})
    source = _model(tmp_path / "source")
    assert command.main([str(source), "--out", str(tmp_path / "x"), "--scheme", "w4a16", "--calibrate"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        "triptych quantize: calibration did not reach 4 matrices, which were rounded:"
        " model.layers.0.mlp.down_proj, model.layers.0.self_attn.q_proj, model.layers.1.mlp.down_proj and 1 more"
    )
