"""Pools prompts with workers in its own process: vLLM has one platform a process.

The argument is a JSON array of `Job`. The output is a JSON array of `Result`.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from protos.service.settings import load
from protos.steps import Admission, Pool, PoolShape, StepPlan
from tests.support.paths import ROOT
from tests.support.rbln.vendor_packages import printed_json
from tests.support.sampling_params import pooling_params, sampling_params
from worker_svc.execution.worker import Worker
from worker_svc.pooling import PoolRunner
from worker_svc.settings import Settings
from worker_svc.shapes import PoolShapeConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """One start of a worker."""

    flags: list[str]
    """The worker's flags."""
    shapes: Sequence[tuple[int, int] | tuple[int, int, bool]]
    """Tokens per row and rows of each shape, and whether it is packed."""
    prompts: list[list[int]]
    """Token ids of each prompt; together they fit into every shape that holds the longest. If the model knows
    types of tokens, each prompt's second half has another one."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one worker did."""

    results: list[list[list[float]]]
    """For each shape that holds the prompts, the values of each prompt, without the model's activation."""
    graphs: list[str]
    """The shapes that have a graph, in words."""
    num_compiled: int
    """How often a compiler ran."""
    num_late: int
    """Graphs that were made for a request."""
    kernels: list[str]
    """The kinds of graphs."""


def run(job: Job) -> Result:
    """Configures a worker and pools the prompts in every shape that holds them."""
    worker = Worker(load(Settings, job.flags))
    worker.prepare()
    shapes = [PoolShape(*shape) for shape in job.shapes]
    worker.configure(PoolShapeConfig(tuple(shapes)), lambda *_: None)
    engine = worker._engine
    assert engine is not None
    assert isinstance(engine._runner, PoolRunner)
    graphs = engine._runner.graphs
    assert worker.description.pooling is not None
    halves = worker.description.pooling.token_types
    admit = [
        Admission(
            slot, prompt, 0, sampling_params(), {},
            pooling=pooling_params(False, second_text_at=len(prompt) // 2 if halves else 0),
        )
        for slot, prompt in enumerate(job.prompts)
    ]  # fmt: skip
    results = []
    for shape in shapes:
        if shape.batch < len(admit) or shape.prompt_len < max(map(len, job.prompts)):
            continue
        worker.reset()
        outputs = worker.execute(StepPlan(1, admit=admit, work=Pool(range(len(admit)), shape)))
        assert not any(output.error for output in outputs)
        results.append([list(output.pooled) for output in outputs])
    result = Result(
        results,
        [str(each) for each in engine._runner.signatures() if graphs.has(each)],
        worker.num_compiled,
        graphs.num_late,
        sorted({type(graph).__name__ for graph in graphs._graphs.values()}),
    )
    worker.close()
    return result


def flat(results: list[list[list[float]]]) -> torch.Tensor:
    """Returns all values of a result, float32 [values]."""
    return torch.tensor([value for shape in results for prompt in shape for value in prompt])


def words_of(shapes: Sequence[tuple[int, int] | tuple[int, int, bool]]) -> list[str]:
    """Returns the signatures of shapes of several rows or texts, in words."""
    made = [PoolShape(*shape) for shape in shapes]
    return [
        f"pooling of {shape.batch} packed texts in {shape.prompt_len} tokens"
        if shape.packed
        else f"pooling of {shape.batch} rows of {shape.prompt_len} tokens"
        for shape in made
    ]


def run_jobs(jobs: Sequence[Job], environment: Mapping[str, str]) -> list[Result]:
    """Runs jobs in one new process with these environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.pooling.pool_process", json.dumps([dataclasses.asdict(job) for job in jobs])],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=140, env=dict(environment),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = printed_json(done.stdout)
    return [Result(**fields) for fields in results]


def main() -> None:
    """Runs the jobs of the first argument and prints their results."""
    results = [run(Job(**job)) for job in json.loads(sys.argv[1])]
    print(json.dumps([dataclasses.asdict(result) for result in results]))


if __name__ == "__main__":
    main()
