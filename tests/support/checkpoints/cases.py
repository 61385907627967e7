"""Checkpoints as data: each is written, and either refused by name or served with the right numbers.

Other modules of this folder have the rows. A row's folder or file is opened as the worker opens it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from protos.errors import ConfigurationRefused
from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker.harness import Harness
from worker_svc.devices import open_device
from worker_svc.model_files import loader
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel

Kind = Literal["damaged", "contradicting", "unsupported", "right"]
TOLERANCE = 0.01
"""Largest difference of a log-probability in float32."""
_PROMPT = list(range(3, tiny_models.VOCAB_SIZE, 3))


@dataclass(frozen=True)
class Case:
    """A checkpoint and its fate."""

    name: str
    """Of the test."""
    kind: Kind
    """Checkpoints of the kind "right" are served, all others refused."""
    write: Callable[[Path], Path]
    """Writes it below an empty folder; returns the value of `--model`."""
    says: tuple[str, ...] = ()
    """Parts of the refusal's line."""
    expected: Callable[[Path], Path] | None = None
    """Of a served checkpoint: writes a model of float32 weights, dequantized apart, to a folder."""
    quick: bool = False
    """Whether the quick tier has the case, too."""


def check(case: Case, folder: Path, expected: Path | None) -> None:
    """Asserts the case's fate; `expected` is the folder of the float32 weights."""
    model = case.write(folder)
    if case.says:
        line = refusal(model)
        missing = [part for part in case.says if part not in line]
        assert not missing, f"{missing} not in: {line}"
        return
    assert expected is not None
    difference = float((logprobs(model) - _reference(expected)).abs().max())
    assert difference <= TOLERANCE, f"log-probabilities differ by {difference:.3g}"


def refusal(model: Path) -> str:
    """Returns the line that refuses a model; any other exception is a failure."""
    with pytest.raises(ConfigurationRefused) as caught:
        open_model(model).load_weights()
    assert "\n" not in caught.value.message
    return caught.value.message


def open_model(model: Path) -> VllmModel:
    """Opens a model in float32 as the worker does: its files, and then its layers."""
    folder = loader.resolve(str(model))
    Checkpoint.open(folder)
    device = open_device("cpu")
    torch.set_num_threads(1)
    startup.prepare(device.name)
    return VllmModel(folder, device, dtype="float32", seed=0)


def logprobs(model: Path) -> torch.Tensor:
    """Returns the model's log-probabilities after each token of a prompt, float32 [tokens, vocabulary]."""
    opened = open_model(model)
    opened.load_weights()
    rows: list[torch.Tensor] = []
    whole: Any = opened.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = whole(hidden)
        rows.append(found.float().log_softmax(dim=-1))
        return found

    opened.logits = logits  # type: ignore[method-assign]
    harness = Harness(
        opened, max_model_len=128, max_num_seqs=1, decode_buckets=(1,), backend="eager", warm=False
    )
    harness.prefill(0, _PROMPT)
    return rows[-1]


@cache
def _reference(folder: Path) -> torch.Tensor:
    return Reference(folder, torch.float32).logprobs(_PROMPT, [0])
