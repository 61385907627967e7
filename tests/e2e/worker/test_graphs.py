"""A worker's graphs give the model's own results bit for bit, in every bucket, with garbage in padding."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from protos.steps import GroupKind
from tests.support.sampling_params import sampling_params
from tests.support.tiny_models import write
from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.model_files.loader import fetch
from worker_svc.settings import Backend
from worker_svc.vllm_adapter.configuration import Dtype

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM
]

LENGTHS = (5, 100, 200)
BUCKETS = (1, 2, 4, 8, 16, 32)
REPORTED = sampling_params(temperature=0.0, logprobs=5)
CASES = [
    ("smollm2", "bfloat16", "paged"),
    pytest.param("gemma3-270m", "float32", "paged", marks=pytest.mark.slow),
    pytest.param("gemma3-270m", "bfloat16", "in_place", marks=pytest.mark.slow),
]


def run(folder: Path, dtype: Dtype, windows: str, backend: Backend, *, garbage: bool) -> list[str]:
    """Prefills three prompts and decodes once in every bucket; returns all outputs as text."""
    kind = GroupKind.IN_PLACE_WINDOW if windows == "in_place" else GroupKind.PAGED_WINDOW
    harness = Harness(
        load(folder, dtype), max_model_len=512, block_size=512 if windows == "in_place" else 128,
        decode_buckets=BUCKETS, window_kind=kind, backend=backend, prefill_buckets=(64, 128),
    )  # fmt: skip
    if garbage:
        for cache in harness.runner.cache.by_layer().values():
            cache.fill_(torch.nan)
        batch = harness.runner._batch
        batch._tokens[batch.padding_row] = 4321
    generator = torch.Generator().manual_seed(0)
    outputs = [
        harness.prefill(slot, torch.randint(10, 40_000, (length,), generator=generator).tolist(), REPORTED)
        for slot, length in enumerate(LENGTHS)
    ]
    for bucket in BUCKETS:
        outputs += harness.decode(range(min(bucket, len(LENGTHS))), bucket)
    assert harness.runner.graphs.num_late == 0
    return [repr(output) for output in outputs]


@pytest.mark.parametrize(("model", "dtype", "windows"), CASES, ids=lambda value: value)
def test_graphs_give_the_models_own_results(model: str, dtype: Dtype, windows: str) -> None:
    """Tokens and log-probabilities are equal, whatever padding, the null block and old blocks contain."""
    folder = fetch(model)
    own = run(folder, dtype, windows, "eager", garbage=False)
    assert "nan" not in "".join(own)
    assert run(folder, dtype, windows, "compiled", garbage=True) == own


class CapturingDevice(CpuDevice):
    """Captures like a GPU: runs a function a few times first, then replays it on fixed tensors."""

    captures: ClassVar[bool] = True

    def __init__(self) -> None:
        self.replays = 0

    def capture(
        self, function: Callable[..., tuple[torch.Tensor, ...]], examples: Sequence[torch.Tensor]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        static = [tensor.clone() for tensor in examples]
        for _ in range(3):
            function(*static)

        def replay(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.replays += 1
            for fixed, given in zip(static, tensors, strict=True):
                fixed.copy_(given)
            return function(*static)

        return replay


@pytest.mark.parametrize(
    "kind", [GroupKind.PAGED_WINDOW, GroupKind.IN_PLACE_WINDOW], ids=["paged", "in_place"]
)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "late"])
def test_captured_and_late_steps_give_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, kind: GroupKind, warm: bool
) -> None:
    """In-place windows too, in which a repeated step would show. Each late graph counts once."""
    folder = tmp_path_factory.getbasetemp() / "captured-gemma3"
    if not folder.exists():
        write("gemma3", folder)
    prompts = [[5 + index * 7 % 200 for index in range(100)], [3, 1, 4, 1, 5], [9, 2, 6]]
    results = []
    for device in (CpuDevice(), CapturingDevice()):
        harness = Harness(
            load(folder, "float32"), max_model_len=256, max_num_seqs=4, chunk=64, block_size=64, decode_buckets=(2, 4),
            device=device, window_kind=kind, warm=warm,
        )  # fmt: skip
        results.append([tokens_of(outputs) for outputs in harness.generate(prompts, 24)])
        assert harness.runner.graphs.num_late == (0 if warm else 2)  # chunks, and the bucket of four
    assert results[0] == results[1]
    assert isinstance(device, CapturingDevice)
    assert device.replays > 40
    reference = Harness(
        load(folder, "float32"), max_model_len=256, max_num_seqs=4, chunk=64, block_size=64, decode_buckets=(2, 4),
        window_kind=kind, backend="eager",
    )  # fmt: skip
    assert results[0] == [tokens_of(outputs) for outputs in reference.generate(prompts, 24)]
