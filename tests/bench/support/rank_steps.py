"""One rank of `tests.bench.ranks`: a process with a worker, without gRPC.

Rank 0 runs the steps and prints a line of JSON; the other ranks follow it until it is gone.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from protos.steps import Admission, Decode, Prefill, StepPlan
from tests.support.sampling_params import sampling_params
from worker_svc.execution.worker import Worker
from worker_svc.pending_step import PendingStep
from worker_svc.ranks import operators
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig

_PARTS = 5


class Steps:
    """Plans of rank 0, without a scheduler."""

    def __init__(self, worker: Worker, shapes: ShapeConfig, context: int) -> None:
        """Runs requests with `context` tokens, most of which are never computed."""
        self._worker = worker
        self._context = context
        self._width = shapes.table_width
        self._groups = range(len(worker.groups))
        self._number = 0

    def _launch(self, **fields: Any) -> PendingStep:
        self._number += 1
        return self._worker.launch(StepPlan(self._number, **fields))

    def admit(self, slot: int) -> list[int]:
        """Gives a slot a request and samples its first token."""
        ids = tuple(range(1 + slot * self._width, 1 + (slot + 1) * self._width))
        known = tuple(100 + (slot * 31 + place) % 100 for place in range(self._context))
        admission = Admission(
            slot, known, self._context - 1, sampling_params(temperature=0.0), dict.fromkeys(self._groups, ids)
        )
        work = Prefill(slot, self._context - 1, 1, True)
        launched = self._launch(admit=[admission], work=work)
        return [token for output in launched.wait() for token in output.token_ids]

    def release(self, slots: Sequence[int]) -> None:
        """Frees slots."""
        self._launch(release=slots).wait()

    def decode(self, batches: Sequence[Sequence[int]], bucket: int, steps: int) -> list[list[int]]:
        """Runs decode steps of each batch in turn, one step ahead of reading; returns the tokens by step."""
        # Rows of a pipeline wait for their step before, which must have been read.
        ahead = len(batches) + (self._worker.layout.pipeline == 1)
        works = [Decode(batch, bucket) for batch in batches]
        waiting: list[PendingStep] = []
        tokens: list[list[int]] = []

        def read() -> None:
            tokens.append([token for output in waiting.pop(0).wait() for token in output.token_ids])

        for _ in range(steps):
            for work in works:
                if len(waiting) >= ahead:
                    read()
                waiting.append(self._launch(work=work))
                if not waiting[-1].runs_ahead:
                    while waiting:
                        read()
        while waiting:
            read()
        return tokens


def measure(worker: Worker, shapes: ShapeConfig, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens per second and the tokens of the first request, by batch."""
    steps = Steps(worker, shapes, spec["context"])
    stages, figures, texts = worker.layout.pipeline, {}, {}
    for batch in spec["batches"]:
        slots = list(range(batch))
        each = max(batch // stages, 1)
        batches = [slots[start : start + each] for start in range(0, batch, each)]
        rates: list[float] = []
        first: list[int] = []
        for _ in range(_PARTS):
            for slot in slots:
                first = steps.admit(slot) if slot == 0 else first * bool(steps.admit(slot))
            started = time.perf_counter()
            tokens = steps.decode(batches, each, spec["steps"])
            rates.append(batch * spec["steps"] / (time.perf_counter() - started))
            steps.release(slots)
            texts[str(batch)] = first + [row[0] for row in tokens[:: len(batches)]]
        figures[str(batch)] = statistics.median(rates[1:])
    return {"tokens_per_s": figures, "tokens": texts}


def time_collectives(worker: Worker, spec: dict[str, Any]) -> dict[str, float]:
    """Returns what an all-reduce of a decode step's hidden states takes in a captured graph, microseconds.

    All ranks must call it at the same time.
    """
    times: dict[str, float] = {}
    if worker.layout.tensor == 1 or worker.device.name != "cuda":
        return times
    for batch in spec["batches"]:
        tensor = torch.ones((batch, spec["hidden"]), dtype=torch.bfloat16, device="cuda")

        def several(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for _ in range(64):
                operators.all_reduce_(tensor)
                tensor.mul_(0.5)
            return (tensor,)

        run = worker.device.capture(several, [tensor])
        run(tensor)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            run(tensor)
        torch.cuda.synchronize()
        times[str(batch)] = (time.perf_counter() - started) / 640 * 1e6
    return times


def main() -> None:
    """Runs one rank; `sys.argv[1]` is the specification as JSON."""
    spec = json.loads(sys.argv[1])
    worker = Worker(Settings(**spec["settings"]), lambda reason: os._exit(reason != ""))
    worker.prepare()
    stages = worker.layout.pipeline
    buckets = tuple(sorted({max(batch // stages, 1) for batch in spec["batches"]}))
    most = max(spec["batches"])
    shapes = ShapeConfig(spec["max_model_len"], most, spec["chunk"], spec["block"], buckets)
    width = shapes.table_width
    shapes = ShapeConfig(
        spec["max_model_len"], most, spec["chunk"], spec["block"], buckets, (1 + most * width,)
    )
    epoch = "bench" if worker.layout.world_size > 1 else ""
    worker.join(epoch)
    if (follower := worker.follower) is not None:
        follower.run(follower.wait())  # rank 0 begins
    worker.configure(shapes, lambda *_: None, epoch=epoch)
    all_reduce_us = time_collectives(worker, spec)
    if follower is not None:
        # Rank 0 may announce a step before it reads the result of the one before.
        reports = ThreadPoolExecutor(1)
        while True:
            report = follower.run(follower.wait())
            if report is not None:
                reports.submit(report)
    result = measure(worker, shapes, spec)
    result["all_reduce_us"] = all_reduce_us
    result["device"] = worker.device.product_name()
    assert worker._model is not None
    result["weight_bytes"] = worker._model.size.weight_bytes
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
