"""NPU graphs, run by backend rbln-check, give the tokens of the CPU's compiled kernels."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protos.steps import GroupKind
from tests.support.paths import ROOT
from tests.support.prompts import PROMPTS
from tests.support.rbln.graph_process import Job, Result
from tests.support.worker.harness import FULL, Harness, load, tokens_of
from worker_svc.model_files.loader import fetch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
    pytest.mark.skipif(
        not FULL,
        reason="capturing takes a minute; test_families.py covers small models of every family (TRIPTYCH_GRAPHS_FULL=1 runs both)",
    ),
]

NUM_TOKENS = 4
MODELS = ("smollm2", "gemma3-270m")


def encode(folder: Path, text: str) -> list[int]:
    """Returns token ids, including the special tokens that the model expects at the start."""
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def jobs(smollm2: Path) -> list[Job]:
    """A full-attention model with the compiler's kernels and a hybrid one with Triton kernels."""
    full = [encode(smollm2, PROMPTS[index]) for index in (0, 9)]
    gemma = fetch("gemma3-270m")
    hybrid = encode(gemma, PROMPTS[19])
    assert len(hybrid) > 512
    return [
        Job(str(smollm2), full, NUM_TOKENS, triton=False, block_size=1024, max_model_len=1024 + 512),
        Job(str(gemma), [hybrid, hybrid[:20]], NUM_TOKENS, triton=True, block_size=1024, max_model_len=1024, poisoned=True),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def results(jobs: list[Job]) -> list[Result]:
    """The results of all jobs, from one separate process with one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rbln.graph_process", json.dumps([dataclasses.asdict(job) for job in jobs])],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Result(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("index", range(len(MODELS)), ids=MODELS)
def test_tokens_equal_the_cpus(jobs: list[Job], results: list[Result], index: int) -> None:
    """Two greedy requests in float32 get equal tokens, despite padded rows and NaN in the cache."""
    job = jobs[index]
    harness = Harness(
        load(Path(job.folder), "float32"), max_num_seqs=2, block_size=512, decode_buckets=(2,),
        window_kind=GroupKind.IN_PLACE_WINDOW,
    )  # fmt: skip
    expected = [tokens_of(outputs) for outputs in harness.generate(job.prompts, NUM_TOKENS)]
    assert results[index].tokens == expected


def test_graphs_are_few_and_have_the_operators_of_their_namespace(results: list[Result]) -> None:
    """Prefill and decode each have a graph, an output head and an argmax; none is captured twice."""
    phases = ("decode", "prefill")
    assert [result.graphs for result in results] == [6] * len(MODELS)
    assert results[0].operators == [
        f"rbln_custom_ops.flash_causal_attention_naive_{phase}.default" for phase in phases
    ]
    assert results[0].cache_devices == ["meta"]
    # One block holds the longest sequence.
    assert results[1].operators == [
        f"rbln_triton_ops.{operator}_{phase}.default"
        for operator in ("causal_attention_naive", "sliding_window_attention_naive")
        for phase in phases
    ]
    assert results[1].cache_devices == ["cpu"]
