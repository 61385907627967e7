"""Every shape of a pooling model is a graph on a CPU, and results are those of the model's own code."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.support.pooling import tiny_classifiers, tiny_embedders
from tests.support.pooling.pool_process import Job, Result, flat, run, run_jobs, words_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

ROWS: list[tuple[int, int] | tuple[int, int, bool]] = [(16, 3), (32, 4)]
PACKED = (24, 4, True)
SHAPES = [*ROWS, PACKED]
PROMPTS = [[5, 6, 7], [9] * 14, [3]]
CLASSIFIERS = get_args(tiny_classifiers.Kind)
KINDS = (*get_args(tiny_embedders.Kind), *CLASSIFIERS)
# Generating code takes seconds for each kind.
GENERATED_KINDS = ("mean", "causal", "bert-pairs", "modernbert", "bert-tokens")
EAGER = ("--backend", "eager")
STRICT = ("--backend", "compiled", "--compile-strict")
GENERATED = (*STRICT, "-O", "2")
Starts = dict[tuple[str, tuple[str, ...]], Result]
First = Callable[[str], dict[tuple[str, ...], Result]]
QUICK = ("mean", "bert-pairs")
RECORDED = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a model of each kind."""
    base = tmp_path_factory.mktemp("models")
    for kind in CLASSIFIERS:
        tiny_classifiers.write(kind, base / kind)
    for embedder in get_args(tiny_embedders.Kind):
        tiny_embedders.write(embedder, base / embedder)
    return base


def job(folder: Path, kind: str, form: tuple[str, ...]) -> Job:
    flags = [
        "--model", str(folder / kind), "--device", "cpu", "--dtype", "float32",
        "--compile-cache-dir", str(folder / "code"), *form,
    ]  # fmt: skip
    # Texts are packed where graphs are recorded kernels.
    return Job(flags, ROWS if "-O" in form else SHAPES, PROMPTS)


@pytest.fixture(scope="module")
def first(folder: Path) -> First:
    """Returns the starts of a kind without generated code, by flags."""
    found: Starts = {}

    def of(kind: str) -> dict[tuple[str, ...], Result]:
        for form in (EAGER, STRICT):
            if (kind, form) not in found:
                found[kind, form] = run(job(folder, kind, form))
        return {form: found[kind, form] for form in (EAGER, STRICT)}

    return of


@pytest.fixture(scope="module")
def generated(folder: Path) -> dict[str, Result]:
    """Starts that generate code, by kind, in one process."""
    jobs = [job(folder, kind, GENERATED) for kind in GENERATED_KINDS]
    return dict(zip(GENERATED_KINDS, run_jobs(jobs, {**os.environ, "OMP_NUM_THREADS": "1"}), strict=True))


@pytest.fixture(scope="module")
def second(folder: Path, generated: dict[str, Result]) -> dict[str, Result]:
    """Starts that require the code of the first ones, by kind, in another process."""
    assert generated
    jobs = [job(folder, kind, (*GENERATED, "--require-precompiled")) for kind in GENERATED_KINDS]
    return dict(zip(GENERATED_KINDS, run_jobs(jobs, {**os.environ, "OMP_NUM_THREADS": "1"}), strict=True))


@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_kernels_give_the_models_bits(first: First, kind: str) -> None:
    """Each shape is a kernel graph, none is late, and --backend eager makes none."""
    starts = first(kind)
    eager, strict = starts[EAGER], starts[STRICT]
    assert (eager.graphs, strict.graphs) == ([], words_of(SHAPES))
    assert (strict.kernels, strict.num_late, strict.num_compiled) == (["KernelGraph"], 0, 0)
    assert strict.results == eager.results
    assert flat(eager.results).abs().mean() > 0.05


@pytest.mark.parametrize("kind", RECORDED)
def test_packed_texts_give_what_rows_give(first: First, kind: str) -> None:
    """Pooling, positions, types of tokens and attention are each text's own."""
    *_, rows, packed = first(kind)[STRICT].results
    torch.testing.assert_close(flat([packed]), flat([rows]), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERATED_KINDS)
def test_generated_kernels_are_found_again(
    first: First, generated: dict[str, Result], second: dict[str, Result], kind: str
) -> None:
    """At -O 2 results are equal up to rounding, and a process that requires the code compiles nothing."""
    compiled = generated[kind]
    assert (compiled.graphs, compiled.kernels) == (words_of(ROWS), ["InductorGraph"])
    assert compiled.num_compiled > 0
    expected = flat(first(kind)[EAGER].results[: len(ROWS)])
    torch.testing.assert_close(flat(compiled.results), expected, atol=1e-5, rtol=1e-5)
    again = second[kind]
    assert (again.num_compiled, again.num_late) == (0, 0)
    assert again.results == compiled.results
