"""Checks of a model's files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.diagnosis.findings import Finding, Findings, Missing
from deploy.inspection import model
from tests.support import tiny_models
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import Settings


def checked(name: str, **settings: str) -> dict[str, Finding]:
    """Returns the findings about a model."""
    found: list[Finding] = []
    model.check(Settings(model=name, **settings), Findings(found.append))  # type: ignore[arg-type]
    return {finding.name: finding for finding in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and a file that stands for its tokenizer."""
    written = tiny_models.write("llama", tmp_path_factory.mktemp("whole") / "model")
    (written / "tokenizer.json").write_text("{}")
    return written


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_whole_model_passes(folder: Path) -> None:
    """Its architecture and the size of its weights are named."""
    found = checked(str(folder))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["config"].text == "LlamaForCausalLM"
    assert found["weight files"].text.endswith("GiB in 1 file, complete")


def _cut(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "check", "text"),
    [
        (_cut, "weight files", "100 of"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "weight files", "has no weights"),
        (lambda folder: (folder / "config.json").write_text("{"), "config", "is not JSON; fetch it again"),
        (_drop("config.json"), "model", "has no config.json"),
    ],
    ids=["cut weights", "no weights", "damaged config", "no config"],
)
def test_what_is_damaged_or_missing_fails(
    copy: Path, damage: Callable[[Path], None], check: str, text: str
) -> None:
    """One check fails and says what to do."""
    damage(copy)
    found = checked(str(copy))
    assert {name for name, finding in found.items() if finding.status == "FAILED"} == {check}
    assert text in found[check].text


def test_a_model_without_a_tokenizer_is_a_note(copy: Path) -> None:
    """Clients that send token ids are served without one."""
    (copy / "tokenizer.json").unlink()
    found = checked(str(copy))
    assert found["tokenizer"].status == "note"
    assert "gateways cannot serve text without it" in found["tokenizer"].text


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("/no/such/folder", "FAILED", "there is no folder /no/such/folder; check --model"),
        ("missing.gguf", "FAILED", "there is no file missing.gguf; check --model"),
        (
            "org/some-model-that-nobody-has",
            "note",
            "the first start fetches org/some-model-that-nobody-has from",
        ),
    ],
)
def test_a_model_that_is_not_here(name: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path must exist; an id is fetched, unless that is forbidden."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found = checked(name)
    assert list(found) == ["model"]
    assert found["model"].status == status
    assert found["model"].text.startswith(text)
    if status == "note":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert checked(name)["model"].status == "FAILED"


def test_gguf_files_are_told_from_others(tmp_path: Path) -> None:
    """A file that is named like one and is none fails."""
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    good.write_bytes(b"GGUF" + bytes(100))
    bad.write_text(json.dumps({}))
    assert checked(str(good))["weight files"].status == "ok"
    assert checked(str(bad))["weight files"].text.endswith("is not a GGUF file; fetch it again")


def test_weights_that_do_not_fit_are_a_failure(folder: Path) -> None:
    """Replicas that share the memory count each, and ranks take a share each."""
    size = Checkpoint.open(folder).num_bytes(2)
    settings = Settings(model=str(folder), dtype="bfloat16")
    assert model.room(settings, size, 1).startswith("weights take about ")
    with pytest.raises(Missing, match="use a smaller or quantized model"):
        model.room(settings, size, 2)
    split = settings.model_copy(update={"tensor_parallel_size": 2})
    model.room(split, size, 2)
    with pytest.raises(Missing):
        model.room(split, size // 2 - 1, 1)
