"""`triptych compile` and `triptych catalog` in real processes: killed, cold, warm, and refused."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.ranks import replica as ranks
from tests.support.rbln.vendor_packages import environment
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.graphs.compile_cache import CompileCache

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SHAPES = (
    "--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--block-size", "32", "--max-model-len", "64",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two small layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compile cache."""
    return tmp_path_factory.mktemp("code") / "cpu"


def command(tiny: Path, cache: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "deploy.cli", "compile", "--model", str(tiny), "--device", "cpu", "-O", "2",
        "--compile-cache-dir", str(cache), *SHAPES, *more,
    ]  # fmt: skip


def run_compile(
    tiny: Path, cache: Path, *more: str, variables: Iterable[tuple[str, str]] = ()
) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(variables)}
    return subprocess.run(
        command(tiny, cache, *more), env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def compiled(done: "subprocess.CompletedProcess[str]") -> int:
    """Returns the number of compiled pieces that the command printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(\d+) pieces compiled", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return int(found[1])


@pytest.mark.slow
def test_killed_then_cold_then_warm(tiny: Path, cache: Path) -> None:
    """A killed compile leaves no entry; the next run compiles everything, the one after it nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(tiny, cache), env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("compile 0/") for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert CompileCache(cache).entries() == []
    # Three structures for each of two signatures: prefill, and decode with one bucket.
    assert compiled(run_compile(tiny, cache)) == 6
    (key,) = CompileCache(cache).entries()
    assert CompileCache(cache).verify(key) is not None
    warm = run_compile(tiny, cache, "--require-precompiled", "--served-model-name", "other", "--seed", "3")
    assert compiled(warm) == 0
    assert CompileCache(cache).entries() == [key]


@pytest.mark.slow
def test_another_dtype_is_not_precompiled(tiny: Path, cache: Path) -> None:
    """The command refuses before it reads weights, and names each field that differs."""
    assert CompileCache(cache).entries(), "the previous test fills the cache"
    done = run_compile(tiny, cache, "--dtype", "float32", "--require-precompiled")
    assert done.returncode == 2
    assert "load" not in done.stdout.split("\n", 1)[0]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("triptych compile:")]
    assert "dtype: float32 is needed, bfloat16 is precompiled" in line
    assert "chunk" not in line


@pytest.mark.slow
def test_a_failed_graph_is_named_with_its_signature(tiny: Path, tmp_path: Path) -> None:
    """The message says what to do instead, and the cache stays empty."""
    cache = tmp_path / "cpu"
    done = run_compile(tiny, cache, variables=[("CXX", "/bin/false")])
    assert done.returncode == 2
    assert "the graph for prefill of 32 tokens does not compile" in done.stderr
    assert "-O 1, which needs no compiler" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_the_graphs_of_an_npu_are_kept_and_listed(tiny: Path, tmp_path: Path) -> None:
    """rbln-check writes each graph as text; a second run finds the entry."""
    arguments = (
        "compile", "--model", str(tiny), "--device", "rbln", "--compile-cache-dir", str(tmp_path / "rbln"),
        "--max-num-seqs", "1", "--block-size", "1024", "--max-model-len", "128",
    )  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRIPTYCH_RBLN_BACKEND": "rbln-check",
        "TRIPTYCH_KV_MEMORY": "0.1",
    }
    for expected in ("[PRECOMPILED_WARN] nothing is precompiled", "compiled_code_found"):
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments],
            env=environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout + done.stderr
    (key,) = CompileCache(tmp_path / "rbln").entries()
    manifest = CompileCache(tmp_path / "rbln").verify(key)
    assert manifest is not None
    # A chunk of two sizes, a decode step, and for all one output head and one argmax, as each needs one row.
    assert sum(name.startswith("graph-") for name in manifest.files) == 5
    assert manifest.fields["num_blocks"].isdigit()


# A pipeline's stages agree on the number of blocks, and an NPU's code depends on it.
NPU = ("--device", "rbln", "-O", "1", "--block-size", "1024", "--num-blocks", "9")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("device", ["cpu", pytest.param("rbln", marks=pytest.mark.npu)])
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_ranks_start_from_compiled_code(split: str, device: str, tmp_path: Path) -> None:
    """Every rank is compiled alone; ranks that then meet need no compiler and answer."""
    model = tiny_models.write("llama", tmp_path / "model")
    cache, on_npu = tmp_path / device, device == "rbln"
    variables = environment() if on_npu else {**os.environ, "OMP_NUM_THREADS": "1"}
    sizes = (
        f"--{split}-parallel-size",
        "2",
        "--cpu-threads",
        "1",
        "--kv-memory",
        "0.1",
        *(NPU if on_npu else ()),
    )
    # One rank at a time is enough, too.
    first = run_compile(model, cache, *ranks.SHAPES, *sizes, "--rank", "0", variables=variables.items())
    assert compiled(first) > 0
    done = run_compile(model, cache, *ranks.SHAPES, *sizes, variables=variables.items())
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(rank \d of 2|\d+ pieces compiled)", done.stdout, re.MULTILINE)
    assert found[:3] == ["rank 0 of 2", "0 pieces compiled", "rank 1 of 2"]
    with ranks.replica(
        model, tmp_path, tensor=1 + (split == "tensor"), pipeline=1 + (split == "pipeline"), device=device,
        flags=("-O", "1" if on_npu else "2", "--compile-cache", "--compile-cache-dir", str(cache), "--require-precompiled"),
        scheduler_flags=NPU[4:] if on_npu else (), variables=variables,
    ) as running:  # fmt: skip
        assert len(running.generate([3, 9, 27], 4, {"temperature": 0.0})[0]) == 4
    for rank in range(2):
        assert "compiled_nothing" in (tmp_path / f"rank{rank}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--pipeline-parallel-size", "2", "--rank", "0"), "set --num-blocks,"),
        (("--compile-only",), "set --num-blocks or --kv-memory,"),
    ],
)
def test_an_unknown_number_of_blocks_is_refused(
    flags: Sequence[str], advice: str, tiny: Path, tmp_path: Path
) -> None:
    """It follows from all stages of a pipeline, or from the memory of an NPU that is absent."""
    npu = (*NPU[:6], "--rbln-backend", "rbln-check")
    done = run_compile(tiny, tmp_path, "--max-num-seqs", "2", *npu, *flags)
    assert done.returncode == 2
    assert f"{advice} and use it with `triptych up`, too" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """Sizes and rank must fit, in one line."""
    done = run_compile(tmp_path, tmp_path, "--tensor-parallel-size", "2", "--rank", "2")
    assert (done.returncode, done.stderr) == (
        2, "triptych compile: --rank 2 does not exist in a replica of 2; ranks are 0 to 1\n",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--enable-expert-parallel",), "splits experts over the ranks of a stage, and there is one"),
        (("--pipeline-parallel-size", "2", "--rank", "0"), "smaller than the 2 pipeline stages"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    tiny: Path, tmp_path: Path, flags: Sequence[str], reason: str
) -> None:
    """What `triptych up` would refuse is refused before anything is compiled."""
    done = run_compile(tiny, tmp_path, *flags)
    assert done.returncode == 2
    assert reason in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
def test_generated_code_agrees_with_the_kernels(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the tokens are equal and the log-probabilities differ by rounding only."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = load(tiny, "float32")
    prompts = [[5 + index * 7 % 100 for index in range(40)], [3, 1, 4, 1, 5]]
    answers = []
    for level in (1, 2):
        harness = Harness(
            model, max_model_len=64, max_num_seqs=3, chunk=32, block_size=32, decode_buckets=(3,), level=level
        )
        answers.append(harness.generate(prompts, 8, sampling_params(temperature=0.0, logprobs=1)))
        assert harness.runner.graphs.num_late == 0
    for kernels, code in zip(*answers, strict=True):
        assert tokens_of(kernels) == tokens_of(code)
        for expected, actual in zip(kernels, code, strict=True):
            assert expected.logprobs[0].logprob == pytest.approx(actual.logprobs[0].logprob, abs=1e-4)
