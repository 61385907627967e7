"""A worker process that notes when each of its steps ran, with a real model or a null model.

``python -m tests.bench.support.measured_worker --steps FILE [--null-step-ms MS] …`` runs the worker's own
command with the remaining flags. When the worker stops, the file receives a line of JSON per step.

A null model answers every plan with constant tokens after a step of a given length. It sleeps meanwhile, as a
host does that waits for a device: a busy wait would hold Python's lock, and would take a core that the
services have beside a real device.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from unittest import mock

import torch

from protos.steps import Decode, GroupKind, Prefill, StepPlan
from worker_svc import service
from worker_svc.__main__ import main as worker_main
from worker_svc.devices import open_device
from worker_svc.devices.base import ChunkStarts
from worker_svc.execution.engine import Engine
from worker_svc.execution.worker import Worker
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phases
from worker_svc.settings import Settings
from worker_svc.shapes import AttentionLayer, ModelDescription, ShapeConfig, Shapes, group_layers

if TYPE_CHECKING:
    from worker_svc.vllm_adapter.model import VllmModel

TOKEN: Final = 7
"""The token that a null model always generates."""
_DESCRIPTION: Final = ModelDescription(
    architecture="Null",
    vocab_size=32_000,
    max_model_len=1 << 17,
    eos_token_ids=(2,),
    dtype=torch.bfloat16,
    quantization=None,
    layers=(AttentionLayer("null", 1, 1, 1, 0, torch.bfloat16),),
    pooling=None,
    default_sampling={},
)
_PR_SET_TIMERSLACK: Final = 29


@dataclass(frozen=True, slots=True)
class RanStep:
    """One step that a worker ran."""

    plan: int
    """Number of the plan that allowed it."""
    rows: int
    """Rows of a decode step; 0 for any other."""
    start: float
    """When it began, by ``time.monotonic``, which all processes of a machine share."""
    end: float
    """When its tokens were on the host."""


class MeasuredWorker(Worker):
    """A worker that notes when its steps ran."""

    def __init__(self, settings: Settings, file: Path | None = None) -> None:
        """Prepares the worker."""
        super().__init__(settings)
        self._file = file
        self._steps: list[tuple[int, int, float, float]] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        """See the base class."""
        start = time.monotonic()
        launched = super().launch(plan)
        rows = len(plan.work.slots) if isinstance(plan.work, Decode) else 0
        read = launched.read_tokens
        if read is None:
            self._steps.append((plan.step, rows, start, time.monotonic()))
            return launched

        def read_and_note() -> Sequence[int]:
            tokens = read()
            self._steps.append((plan.step, rows, start, time.monotonic()))
            return tokens

        return replace(launched, read_tokens=read_and_note)

    def close(self) -> None:
        """Writes the steps, too."""
        super().close()
        if self._file is not None:
            self._file.write_text("".join(f"{json.dumps(step)}\n" for step in self._steps))


class NullWorker(MeasuredWorker):
    """A measured worker with a null model."""

    def __init__(self, settings: Settings, file: Path | None = None, *, step_s: float) -> None:
        """Prepares the worker; its steps take `step_s` seconds."""
        super().__init__(settings, file)
        self._step_s = step_s
        self._no_files = tempfile.TemporaryDirectory()

    def prepare(self) -> None:
        """Opens the null model. It has no tokenizer."""
        self.folder = Path(self._no_files.name)
        self.device = open_device("cpu")
        self._model = cast("VllmModel", _NullModel())
        self.groups = group_layers(self.description.layers, GroupKind.PAGED_WINDOW)
        self._engine: Engine = NullEngine(self._step_s)
        self._digest.set_result("")

    def close(self) -> None:
        """Removes the empty folder, too."""
        super().close()
        self._no_files.cleanup()


class NullEngine(Engine):
    """Generates a constant token for each row after a step of constant time."""

    bytes_per_block: tuple[int, ...] = (1,)
    num_compiled = num_late = 0
    chunk_starts: ChunkStarts = "whole"
    code_folder: Path | None = None

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def check(self, shapes: Shapes) -> ShapeConfig:
        """Accepts all shapes of a generating model."""
        assert isinstance(shapes, ShapeConfig)
        return shapes

    def check_start(self, shapes: Shapes) -> None:
        """Everything fits."""

    def start(self, shapes: Shapes, load: Callable[[], None], phases: Phases) -> ShapeConfig:
        """Returns the shapes with blocks for all slots."""
        del load, phases
        assert isinstance(shapes, ShapeConfig)
        # Linux wakes a sleeper up to 50 µs late by default, a tenth of a step.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        blocks = 1 + shapes.max_num_seqs * shapes.table_width
        return ShapeConfig(
            shapes.max_model_len,
            shapes.max_num_seqs,
            shapes.chunk,
            shapes.block_size,
            shapes.decode_buckets,
            (blocks,),
        )

    def launch(self, plan: StepPlan) -> PendingStep:
        """Waits for the step's time; a plan without work takes none."""
        until = time.monotonic() + self._step_s
        match plan.work:
            case Decode(slots):
                tokens = [TOKEN] * len(slots)
            case Prefill(sample=sample):
                tokens = [TOKEN] if sample else []
            case _:
                return PendingStep()
        time.sleep(max(0.0, until - time.monotonic()))
        return PendingStep(plan.work, read_tokens=(lambda: tokens) if tokens else None)

    def reset(self) -> None:
        """Does nothing: there is no state."""

    def release(self) -> None:
        """Does nothing: there is no memory."""


class _NullModel:
    """The parts of a model that a worker uses outside its engine."""

    description = _DESCRIPTION

    def release_caches(self) -> None:
        """Does nothing: there are no caches."""


def read_steps(file: Path) -> list[RanStep]:
    """Returns the steps that a measured worker wrote, in the order in which they ended."""
    return [RanStep(*json.loads(line)) for line in file.read_text().splitlines()]


def main() -> int:
    """Runs the worker's command with a measured worker; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=Path, required=True, help="the file for the steps")
    parser.add_argument("--null-step-ms", type=float, help="run a null model whose steps take this long")
    own, flags = parser.parse_known_args()

    def open_worker(settings: Settings, _: Callable[[str], None]) -> Worker:
        if own.null_step_ms is None:
            return MeasuredWorker(settings, own.steps)
        return NullWorker(settings, own.steps, step_s=own.null_step_ms / 1e3)

    with mock.patch.object(service, "Worker", open_worker):
        return worker_main(flags)


if __name__ == "__main__":
    sys.exit(main())
