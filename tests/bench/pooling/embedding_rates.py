"""Texts per second of an embedding model, with the model's own code and as graphs.

``python -m tests.bench.pooling.embedding_rates [--quick] [--device cpu|cuda] [--level N] [--threads N]
[--dtype TYPE] [--dummy-weights FOLDER]`` runs MiniLM in one process, without a scheduler. Each step admits,
embeds and releases as many texts as its shape has rows; every text fills its row. The two ways take turns
step by step, because the machine's speed drifts. Their embeddings are compared, too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from protos.errors import ConfigurationRefused
from protos.steps import Admission, Pool, PoolShape, SlotOutput, StepPlan
from tests.bench.support.report import report
from tests.support.sampling_params import pooling_params, sampling_params
from worker_svc.devices import open_device
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.model_files.demo_models import FetchError, fetch
from worker_svc.pooling.pool_runner import PoolRunner
from worker_svc.shapes.geometry import PoolGeometry

BATCHES: Final = (1, 8, 32)
LENGTHS: Final = (16, 64)
_FIRST, _LAST, _SOME_WORD = 101, 102, 2000
"""Token ids of BERT: what begins and ends a text, and the first of many words."""


def main() -> int:
    """Prints a table and the line of JSON.

    Returns:
        0, or 2 after a one-line error if the model or the device is not available.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short texts, few steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--level", type=int, help="optimization level of the graphs; the device's default")
    parser.add_argument("--threads", type=int, help="of a CPU; all cores by default")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument(
        "--dummy-weights", type=Path, help="a model's folder without weights, instead of MiniLM"
    )
    try:
        _bench(parser.parse_args())
    except (ConfigurationRefused, FetchError) as error:
        print(f"embedding_rates: {error}", file=sys.stderr)
        return 2
    return 0


def _bench(arguments: argparse.Namespace) -> None:
    from worker_svc.vllm_adapter import startup
    from worker_svc.vllm_adapter.model import VllmModel

    made_up: Path | None = arguments.dummy_weights
    folder = made_up or fetch("minilm")
    device = open_device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    startup.prepare(device.name)
    model = VllmModel(folder, device, dtype=arguments.dtype, seed=0, dummy_weights=made_up is not None)
    model.load_weights()
    pooling = model.description.pooling
    assert pooling is not None
    lengths = LENGTHS[:1] if arguments.quick else LENGTHS
    shapes = tuple(PoolShape(length, batch) for length in lengths for batch in BATCHES)
    level = device.default_level if arguments.level is None else arguments.level
    runners = []
    for each in (0, level):
        options = GraphOptions(level=each, required=True, strict=True)
        runner = PoolRunner(model, device, pooling, PoolGeometry(shapes), options)
        runner.make_graphs(lambda *_: None)
        runner.warm_up(lambda *_: None)
        runners.append(runner)
    figures: dict[str, object] = {"device": device.product_name(), "level": level}
    ratios: dict[str, float] = {}
    print(f"{'shape':>8} {'eager texts/s':>14} {'graph texts/s':>14} {'ratio':>6} {'CPU time':>9}")
    furthest = 0.0
    for shape in shapes:
        # Long steps are repeated less often.
        steps = 9 if arguments.quick else max(21, min(101, 16384 // (shape.batch * shape.prompt_len)))
        eager, graph = _measure(runners, shape, steps)
        faster, cheaper = graph.texts_per_s / eager.texts_per_s, graph.cpu_s / eager.cpu_s
        print(
            f"{shape!s:>8} {eager.texts_per_s:14.1f} {graph.texts_per_s:14.1f} {faster:6.2f} {cheaper:9.2f}"
        )
        for name, way in (("eager", eager), ("graph", graph)):
            figures[f"{name}_{shape}"] = {
                "texts_per_s": round(way.texts_per_s, 1),
                "cpu_ms": round(way.cpu_s * 1000, 3),
            }
        ratios |= {f"texts_per_s_{shape}": faster, f"cpu_time_{shape}": cheaper}
        furthest = max(furthest, float((graph.embeddings - eager.embeddings).abs().max()))
    figures["largest_difference"] = furthest
    report("embedding_rates", figures, ratios)


@dataclass(frozen=True)
class _Measured:
    """One way to run a shape; the times are medians of its steps."""

    texts_per_s: float
    cpu_s: float
    """Processor time of a step, all threads."""
    embeddings: torch.Tensor
    """[texts, size], of length 1."""


def _measure(runners: Sequence[PoolRunner], shape: PoolShape, steps: int) -> list[_Measured]:
    """Runs a full batch with each runner in turn, `steps` times."""
    text = [_FIRST, *range(_SOME_WORD, _SOME_WORD + shape.prompt_len - 2), _LAST]
    slots = range(shape.batch)
    admit = [Admission(slot, text, 0, sampling_params(), {}, pooling=pooling_params()) for slot in slots]
    plan = StepPlan(1, release=slots, admit=admit, work=Pool(slots, shape))
    wall: list[list[float]] = [[] for _ in runners]
    cpu: list[list[float]] = [[] for _ in runners]
    outputs: list[list[SlotOutput]] = []
    for _ in range(steps):
        outputs = []
        for index, runner in enumerate(runners):
            started, worked = time.perf_counter(), time.process_time()
            outputs.append(runner.execute(plan))
            cpu[index].append(time.process_time() - worked)
            wall[index].append(time.perf_counter() - started)
    return [
        _Measured(
            shape.batch / statistics.median(wall[index]),
            statistics.median(cpu[index]),
            torch.tensor([output.pooled for output in found]),
        )
        for index, found in enumerate(outputs)
    ]


if __name__ == "__main__":
    sys.exit(main())
