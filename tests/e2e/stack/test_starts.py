"""Starts of models with extra, wrong or broken files: they serve, or end with the reason."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.e2e.stack.test_up import QUICK, ask, launcher, read_until
from tests.support.checkpoints.safetensors_cases import DOWN, put
from tests.support.checkpoints.safetensors_cases import write as write_checkpoint
from tests.support.tiny_models import write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(120)]

_WEIGHTS = "model.safetensors"


@pytest.fixture
def model(smollm2: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of SmolLM2 whose weights are a link."""
    folder = tmp_path / "model"
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / _WEIGHTS).symlink_to(smollm2 / _WEIGHTS)
    yield folder
    shutil.rmtree(folder)


def _rename_layers(model: Path) -> None:
    """Changes the header of the file: its length, and JSON with the tensors' names."""
    raw = (model / _WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end].replace(b"self_attn", b"multi_head_self_attention_of_the_decoder")
    header = header.replace(b"mlp", b"feed_forward_network_of_the_decoder")
    header += b" " * (-len(header) % 8)
    (model / _WEIGHTS).unlink()
    (model / _WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def _break_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% if %}")


@pytest.mark.slow
def test_extra_weights_are_named_and_ignored(model: Path, tmp_path: Path) -> None:
    """The model answers as without them; one log line of the worker names them."""
    name = "adapter_model.safetensors"
    save_file({"lora.weight": np.ones(1, np.float32)}, model / name)
    flags = (*QUICK, "--model", str(model), "--served-model-name", "smollm2")
    with launcher(tmp_path / "run", *flags) as process:
        line = read_until(process, "Serving smollm2")
        assert "Paris" in ask(next(word for word in line.split() if word.startswith("http")))
    entries = [json.loads(line) for line in (tmp_path / "run" / "worker-0.log").read_text().splitlines()]
    (ignored,) = [entry for entry in entries if entry["event"] == "extra_weights_ignored"]
    assert ignored["files"] + ignored["tensors"] == [name]


@pytest.mark.parametrize(
    ("damage", "service", "reason"),
    [
        (_rename_layers, "worker-0", "the weights lack model.layers.0.self_attn.q_proj.weight"),
        pytest.param(
            _break_template, "gateway", "chat template cannot be compiled: line 1", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_an_unusable_model_ends_the_start(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], service: str, reason: str
) -> None:
    """The launcher exits with 2 and the whole reason in one line, soon after the service's last word."""
    damage(model)
    with launcher(tmp_path / "run", *QUICK, "--model", str(model)) as process:
        _, errors = process.communicate(timeout=60)
        took_s = time.time() - (tmp_path / "run" / f"{service}.log").stat().st_mtime
    assert process.returncode == 2, errors
    assert errors.count("\n") == 1
    assert reason in errors
    assert took_s < 3, "a second, and the end of the services on a busy machine"


def test_a_start_shows_its_first_phase_at_once(smollm2: Path, tmp_path: Path) -> None:
    """The imports of a worker take seconds, and nothing would be printed meanwhile."""
    with launcher(tmp_path / "run", *QUICK, "--model", str(smollm2)) as process:
        read_until(process, "logs in")
        began = time.monotonic()
        assert read_until(process, "import") == "  worker-0: import torch and vLLM\n"
        assert time.monotonic() - began < 1


@pytest.mark.slow
def test_a_worker_refuses_its_weights_itself(tmp_path: Path) -> None:
    """What only the numbers show ends the start while loading, and the line does not blame the scheduler."""
    scales = f"{DOWN}.weight_scale"
    model = write_checkpoint("ct", [put(scales, lambda t: t * float("inf"))], tmp_path / "model")
    write_tokenizer(model)
    with launcher(tmp_path / "run", *QUICK, "--model", str(model)) as process:
        _, errors = process.communicate(timeout=110)
    assert process.returncode == 2, errors
    assert f"{scales} is not finite; fetch the checkpoint again" in errors
    assert "refuses this worker" not in errors
