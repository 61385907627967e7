"""A worker's graphs give the model's own results to the bit, at every bucket, whatever the padding holds."""

import os
from pathlib import Path

import pytest
import torch

from tests.worker_harness import Harness, load
from worker_svc.geometry import GroupKind
from worker_svc.models import fetch
from worker_svc.plan import Sampling
from worker_svc.settings import Backend
from worker_svc.vllm_adapter.engine import Dtype

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM
]

LENGTHS = (5, 100, 200)
BUCKETS = (1, 2, 4, 8, 16, 32)
REPORTED = Sampling(temperature=0.0, logprobs=5)
# Of each model what the two modes are most likely to differ in; all of them with TRIPTYCH_GRAPHS_FULL=1.
QUICK = [
    ("smollm2", "float32", "paged"),
    ("smollm2", "bfloat16", "paged"),
    ("gemma3-270m", "float32", "paged"),
]
FULL = [
    (model, dtype, windows)
    for model in ("smollm2", "gemma3-270m")
    for dtype in ("float32", "bfloat16")
    for windows in ("paged", "in_place")
    if model != "smollm2" or windows == "paged"
]
CASES = FULL if os.environ.get("TRIPTYCH_GRAPHS_FULL") == "1" else QUICK


def run(folder: Path, dtype: Dtype, windows: str, backend: Backend, *, garbage: bool) -> list[str]:
    """What all steps of three prompts report: each prefilled, then a decode step in every bucket."""
    kind = GroupKind.IN_PLACE_WINDOW if windows == "in_place" else GroupKind.PAGED_WINDOW
    harness = Harness(
        load(folder, dtype), max_model_len=512, block_size=512 if windows == "in_place" else 128,
        decode_buckets=BUCKETS, window_kind=kind, backend=backend,
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
    """Tokens and log-probabilities are the same, and no garbage in padding, the null block or former requests' blocks reaches them."""
    folder = fetch(model)
    own = run(folder, dtype, windows, "eager", garbage=False)
    assert "nan" not in "".join(own)
    assert run(folder, dtype, windows, "compiled", garbage=True) == own


def test_graphs_tell_what_they_took(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names each signature with its seconds; a worker that starts again makes them again, as it costs less than to read them."""
    load(smollm2, "float32")
    capsys.readouterr()
    Harness(load(smollm2, "float32"), decode_buckets=(1, 4), max_num_seqs=4)
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "graphs_made" in line]
    for signature in ("prefill of 128 tokens", "decode of 1 rows", "decode of 4 rows"):
        assert signature in line
