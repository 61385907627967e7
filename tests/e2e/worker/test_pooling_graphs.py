"""Every shape of an embedding model is a graph on a CPU, and embeddings are those of the model's own code."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.support import tiny_embedders
from tests.support.rbln.fake_environment import environment
from tests.support.worker.pool_process import Job, Result, run_jobs, words_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

SHAPES = [(16, 3), (32, 4)]
PROMPTS = [[5, 6, 7], [9] * 14, [3]]
KINDS = get_args(tiny_embedders.Kind)
EAGER = ("--backend", "eager")
STRICT = ("--backend", "compiled", "--compile-strict")
GENERATED = (*STRICT, "-O", "2")
Starts = dict[tuple[str, tuple[str, ...]], Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a model of each kind."""
    base = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny_embedders.write(kind, base / kind)
    return base


def job(folder: Path, kind: str, form: tuple[str, ...]) -> Job:
    flags = [
        "--model", str(folder / kind), "--device", "cpu", "--dtype", "float32",
        "--compile-cache-dir", str(folder / "code"), *form,
    ]  # fmt: skip
    return Job(flags, SHAPES, PROMPTS)


@pytest.fixture(scope="module")
def first(folder: Path) -> Starts:
    """The first starts, by kind and flags, in one process."""
    keys = [(kind, form) for kind in KINDS for form in (EAGER, STRICT, GENERATED)]
    return dict(zip(keys, run_jobs([job(folder, *key) for key in keys], environment()), strict=True))


@pytest.fixture(scope="module")
def second(folder: Path, first: Starts) -> dict[str, Result]:
    """Starts that require the code of the first ones, by kind, in another process."""
    assert first
    jobs = [job(folder, kind, (*GENERATED, "--require-precompiled")) for kind in KINDS]
    return dict(zip(KINDS, run_jobs(jobs, environment()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_kernels_give_the_models_bits(first: Starts, kind: str) -> None:
    """Each shape is a kernel graph, none is late, and --backend eager makes none."""
    eager, strict = first[kind, EAGER], first[kind, STRICT]
    assert (eager.graphs, strict.graphs) == ([], words_of(SHAPES))
    assert (strict.kernels, strict.num_late, strict.num_compiled) == (["KernelGraph"], 0, 0)
    assert strict.embeddings == eager.embeddings
    assert torch.tensor(eager.embeddings).abs().mean() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_generated_kernels_are_found_again(first: Starts, second: dict[str, Result], kind: str) -> None:
    """At -O 2 embeddings are equal up to rounding, and a process that requires the code compiles nothing."""
    compiled = first[kind, GENERATED]
    assert (compiled.graphs, compiled.kernels) == (words_of(SHAPES), ["InductorGraph"])
    assert compiled.num_compiled > 0
    torch.testing.assert_close(
        torch.tensor(compiled.embeddings), torch.tensor(first[kind, EAGER].embeddings), atol=1e-5, rtol=1e-5
    )
    again = second[kind]
    assert (again.num_compiled, again.num_late) == (0, 0)
    assert again.embeddings == compiled.embeddings
