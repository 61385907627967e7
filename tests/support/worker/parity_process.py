"""Runs models through every decode bucket with garbage in all padding, and reports their outputs.

`run` works in the calling process. A device with another vLLM platform needs its own process,
since vLLM loads one platform per process: the program takes a JSON list of `Job` and prints a list of
`Answer` lists.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from protos.steps import GroupKind, SlotOutput
from tests.support import tiny_models
from tests.support.paths import ROOT
from tests.support.reference import Reference
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness, load
from worker_svc.devices import open_device
from worker_svc.devices.base import Device
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.registry import DeviceName, DeviceOptions
from worker_svc.lora.checkpoint import LoraLimits
from worker_svc.settings import Backend
from worker_svc.vllm_adapter.configuration import Dtype

BUCKETS = (1, 2, 4, 8)
ROWS = {1: 1, 2: 1, 4: 3, 8: 5}
"""Real rows in each bucket's steps. In every bucket above 2, some rows are padding."""
STEPS = 2
LENGTHS = (3, 63, 64, 130, 200)
"""Of `random_prompts`: below and above the windows of 64 tokens and the chunks of 128 of small models."""
REPORTED = sampling_params(temperature=0.0, logprobs=20)
# Allows for different orders of summation in float32.
TOLERANCE = 1e-3


def random_prompts(vocab_size: int = tiny_models.VOCAB_SIZE) -> list[list[int]]:
    """Returns prompts of `LENGTHS`, as many as the largest bucket has real rows."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


@dataclasses.dataclass(frozen=True)
class Job:
    """One model on one device."""

    folder: str
    prompts: list[list[int]]
    """One per slot: as many as the largest bucket has real rows."""
    device: DeviceName = "cpu"
    backend: Backend = "auto"
    window_kind: str = "paged_window"
    block_size: int = 128
    max_model_len: int = 512
    triton: bool = False
    dtype: Dtype = "float32"
    language_model_only: bool = False
    level: int | None = None
    adapters: list[str | None] = dataclasses.field(default_factory=list)
    """Folder of each prompt's LoRA adapter; `None` for the base model. Empty: none has one."""
    lora_dtype: Dtype = "auto"

    @property
    def lora(self) -> LoraLimits | None:
        """How many adapters the worker holds, if any prompt may have one."""
        return LoraLimits(3, max_rank=16, max_cpu_loras=3, dtype=self.lora_dtype) if self.adapters else None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output of one slot's request."""

    tokens: list[int]
    top: list[dict[str, float]]
    """For each position, the log-probabilities of the most probable tokens, by token id."""


def run(job: Job) -> list[Answer]:
    """Prefills every prompt, then runs a few decode steps in every bucket. All memory starts as NaN."""
    device = _open(job)
    harness = Harness(
        load(
            Path(job.folder), job.dtype, device=device, compiled=job.device == "cpu" or job.backend != "eager",
            language_model_only=job.language_model_only,
            lora=job.lora,
        ),
        max_model_len=job.max_model_len, max_num_seqs=max(BUCKETS), block_size=job.block_size,
        decode_buckets=BUCKETS, device=device, window_kind=GroupKind(job.window_kind), backend=job.backend,
        level=job.level,
    )  # fmt: skip
    for cache in harness.runner.cache.by_layer().values():
        memory = device.memory.resolve(cache) if isinstance(device, RblnDevice) else cache
        memory.fill_(torch.nan)
    # An arbitrary token in the padding row and in free slots.
    harness.runner._batch._tokens.fill_(77)
    adapter_ids = _load_adapters(harness, job.adapters or [None] * len(job.prompts))
    outputs: dict[int, list[SlotOutput]] = {}
    # Scattered slots, so that rows and slots differ.
    slots = [slot % max(BUCKETS) for slot in range(1, 3 * len(job.prompts), 3)]
    for slot, prompt, adapter_id in zip(slots, job.prompts, adapter_ids, strict=True):
        outputs[slot] = [harness.prefill(slot, prompt, REPORTED, adapter_id=adapter_id)]
    for bucket in BUCKETS:
        for _ in range(STEPS):
            active = slots[-ROWS[bucket] :]
            for slot, output in zip(active, harness.decode(active, bucket), strict=True):
                outputs[slot].append(output)
    assert harness.runner.graphs.num_late == 0
    if isinstance(device, RblnDevice):
        assert bool(device.backend.graphs) == (job.backend != "eager")
    return [_answer(outputs[slot]) for slot in slots]


def _load_adapters(harness: Harness, adapters: Sequence[str | None]) -> list[int]:
    """Loads the adapters, and returns the id of each prompt's; 0 for the base model."""
    folders = [None, *sorted({folder for folder in adapters if folder is not None})]
    for adapter_id, folder in enumerate(folders):
        if folder is not None:
            harness.load_adapter(adapter_id, Path(folder))
    return [folders.index(folder) for folder in adapters]


def differences(
    reference: Reference, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]
) -> list[str]:
    """Returns where answers differ from the reference."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if mismatch := reference.greedy_mismatch(prompt, answer.tokens):
            found.append(mismatch)
        expected = reference.logprobs(prompt, answer.tokens)
        assert len(answer.top) == len(answer.tokens)
        for row, top in zip(expected, answer.top, strict=True):
            ours = torch.tensor(list(top.values()))
            worst = float((row[list(map(int, top))] - ours).abs().max())
            if not worst <= TOLERANCE:  # also catches NaN
                found.append(f"log-probabilities after {len(prompt)} differ by {worst:.2g}")
    return found


def run_apart(jobs: Sequence[Job]) -> list[list[Answer]]:
    """Calls `run` for each job in a separate process with one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.worker.parity_process", json.dumps([dataclasses.asdict(job) for job in jobs])],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [[Answer(**answer) for answer in answers] for answers in json.loads(done.stdout.splitlines()[-1])]


def _open(job: Job) -> Device:
    return open_device(job.device, DeviceOptions("rbln-check", rbln_use_custom_kernel=job.triton))


def _answer(outputs: Sequence[SlotOutput]) -> Answer:
    tokens = [token for output in outputs for token in output.token_ids]
    reports = [report for output in outputs for report in output.logprobs]
    top = [dict(zip(map(str, report.top_token_ids), report.top_logprobs, strict=True)) for report in reports]
    return Answer(tokens, top)


def main() -> None:
    """Runs the command."""
    answers = [run(Job(**job)) for job in json.loads(sys.argv[1])]
    print(json.dumps([[dataclasses.asdict(answer) for answer in each] for each in answers]))


if __name__ == "__main__":
    main()
