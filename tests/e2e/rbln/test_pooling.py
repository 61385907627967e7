"""Pooling models on device rbln, with the vendor's packages and with rbln-check."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch

from protos.service.settings import load
from protos.triptych.v1 import common_pb2
from scheduler_svc.settings import Settings
from tests.support.pooling import tiny_classifiers, tiny_embedders
from tests.support.pooling.pool_process import Job, Result, flat, run_jobs, words_of
from tests.support.rbln.vendor_packages import compile_blindly, environment, running_worker
from tests.support.scheduler.fake_pool_worker import pool_request
from tests.support.scheduler.running_scheduler import run_scheduler
from worker_svc.model_files.loader import fetch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.npu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

SHAPES = [(16, 3), (32, 4)]
PROMPTS = [[5, 6, 7], [9] * 14, [3]]
KINDS = get_args(tiny_embedders.Kind)
CLASSIFIERS = get_args(tiny_classifiers.Kind)
Expected = Callable[[Sequence[str]], dict[str, Result]]
CHECK = ("--rbln-backend", "rbln-check")
# By name, what compiles graphs: the flags, and the environment.
COMPILERS = {
    "vendor": ((), {}),
    "vendor-runtime": ((), {"VLLM_RBLN_USE_DEVICE_TENSOR": "0"}),
    "check": (CHECK, {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small random models, and of MiniLM."""
    base = tmp_path_factory.mktemp("models")
    written = {kind: tiny_embedders.write(kind, base / kind) for kind in KINDS}
    for classifier in CLASSIFIERS:
        tiny_classifiers.write(classifier, base / classifier)
        written[classifier] = base / classifier
    return {**written, "minilm": fetch("minilm")}


def start(models: dict[str, Path], *flags: str, **variables: str) -> dict[str, Result]:
    """Starts a worker for each model, one after the other in one process."""
    jobs = [
        Job(["--model", str(folder), "--dtype", "float32", *flags], SHAPES, PROMPTS)
        for folder in models.values()
    ]
    return dict(zip(models, run_jobs(jobs, environment(**variables)), strict=True))


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Expected:
    """Returns what the code of the models of these names gives on a CPU; each runs once."""
    found: dict[str, Result] = {}

    def of(names: Sequence[str]) -> dict[str, Result]:
        if missing := {name: models[name] for name in names if name not in found}:
            found.update(start(missing, "--device", "cpu", "--backend", "eager"))
        return found

    return of


@pytest.mark.parametrize(
    ("compiler", "names"),
    [
        ("vendor", ("mean", "bert-pairs", "modernbert", "minilm")),
        ("vendor-runtime", ("causal", "bert-tokens")),
        ("check", ("mean", "roberta", "qwen3", "bert-pairs", "bert-tokens")),
    ],
)
def test_every_shape_is_compiled_once_and_found_again(
    models: dict[str, Path],
    expected: Expected,
    compiler: str,
    names: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """In strict mode, results are the CPU's; a process that requires the code adds nothing to it."""
    flags, variables = COMPILERS[compiler]
    cached = ("--device", "rbln", *flags, "--compile-strict", "--compile-cache-dir", str(tmp_path))
    chosen, wanted = {name: models[name] for name in names}, expected(names)
    first = start(chosen, *cached, **variables)
    second = start(chosen, *cached, "--require-precompiled", **variables)
    for name in names:
        assert (first[name].graphs, first[name].kernels) == (words_of(SHAPES), ["DeviceGraph"])
        assert (first[name].num_compiled, first[name].num_late) == (len(SHAPES), 0)
        assert second[name].num_compiled == 0
        assert second[name].results == first[name].results
        torch.testing.assert_close(
            flat(first[name].results), flat(wanted[name].results), atol=1e-5, rtol=1e-5
        )


def test_rbln_check_also_runs_the_models_own_code(models: dict[str, Path], expected: Expected) -> None:
    """With --backend eager there is no graph, and attention is the same plain operators."""
    mean = {"mean": models["mean"]}
    found = start(mean, "--device", "rbln", *CHECK, "--backend", "eager")["mean"]
    assert (found.graphs, found.num_compiled) == ([], 0)
    torch.testing.assert_close(
        flat(found.results), flat(expected(["mean"])["mean"].results), atol=1e-5, rtol=1e-5
    )


async def test_a_worker_takes_code_that_was_compiled_without_an_npu(
    models: dict[str, Path], expected: Expected, tmp_path: Path
) -> None:
    """`triptych compile` makes the shapes that the scheduler asks for, and the worker compiles nothing."""
    sizes = ("--pool-batch-sizes", "1,4", "--pool-prompt-lens", "16,32")
    code = tmp_path / "code"
    assert compile_blindly(models["bert-pairs"], code, "--compile-strict", *sizes)[0] == 2
    count, output = compile_blindly(models["bert-pairs"], code, "--compile-strict", *sizes)
    assert (count, "compiled_nothing" in output) == (0, True)
    with (tmp_path / "log").open("w") as log:
        async with run_scheduler(load(Settings, [*sizes])) as scheduler:
            flags = ("--require-precompiled", "--compile-strict", "--compile-cache-dir", str(code))
            with running_worker(models["bert-pairs"], scheduler.port, *flags, log=log):
                assert await scheduler.serving.get()
                request = pool_request([5, 6, 7])
                request.task, request.second_text_at = common_pb2.POOL_TASK_SCORE, 1
                answer = await scheduler.inference.Pool(request)
    assert answer.values[0] == pytest.approx(
        expected(["bert-pairs"])["bert-pairs"].results[0][0][0], abs=1e-4
    )
    printed = (tmp_path / "log").read_text()
    assert "compiled_nothing" in printed
    assert "compiled_despite_entry" not in printed
