"""Compares a simulation with a real run of the same requests: medians of what clients see.

``python -m tests.bench.simulations.accuracy [--quick]`` serves SmolLM2 with `triptych up`, sends requests at
their times through the gateway, learns the step times from its metrics and simulates the same requests.
``ratios`` are the simulated medians divided by the measured ones. The aim is 10 % either way, on a machine
without other work. ``--device cuda`` serves made-up weights of Llama 3.2 1B's shape, at a higher rate.
``--save FILE`` keeps the learned step times.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import httpx

from protos.service.logs import configure
from scheduler_svc.settings import Settings
from scheduler_svc.simulation.generator import KINDS, generate
from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.run import simulate
from scheduler_svc.simulation.step_times import ObservedSteps, learn
from tests.bench.support import gpu_model
from tests.bench.support.contenders import launched
from tests.bench.support.report import parser, report

_MIXED: Final = replace(KINDS["random"], prompt_tokens=(30, 400), output_tokens=(20, 100), shared_tokens=256)
_TRAFFIC: Final = {
    "cpu": replace(_MIXED, requests=120, rate=2.0),
    "cuda": replace(_MIXED, requests=1200, rate=30.0),
}
_MAX_MODEL_LEN: Final = 2048
_VOCAB: Final = range(1000, 40_000)


@dataclass
class _Answers:
    """Times of all answers, seconds."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)


def _prompt(request: SimulatedRequest, own: str) -> list[int]:
    """Returns real token ids with the same shared pieces."""
    shared = sum(count for _, count in request.prefix)
    pieces = [*request.prefix, (own, request.prompt_tokens - shared)]
    return [token for name, count in pieces for token in random.Random(name).choices(_VOCAB, k=count)]


async def _ask(
    client: httpx.AsyncClient,
    model: str,
    request: SimulatedRequest,
    prompt: list[int],
    start_s: float,
    answers: _Answers,
) -> None:
    body = {
        "model": model, "prompt": prompt, "max_tokens": request.output_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
    arrived_s = time.monotonic()
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                tokens = sum(len(one.get("token_ids") or ()) for one in json.loads(line[6:])["choices"])
                times += [time.monotonic()] * tokens
    if len(times) != request.output_tokens:
        raise RuntimeError(f"an answer has {len(times)} tokens instead of {request.output_tokens}")
    answers.ttft_s.append(times[0] - arrived_s)
    answers.gap_s += [later - earlier for earlier, later in itertools.pairwise(times)]
    answers.latency_s.append(times[-1] - arrived_s)


async def _send(url: str, model: str, requests: Sequence[SimulatedRequest], seed: str) -> _Answers:
    """Sends the requests at their times; prompts of another seed share nothing with these."""
    answers = _Answers()
    prompts = [_prompt(request, f"{seed}-{index}") for index, request in enumerate(requests)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        start_s = time.monotonic() + 0.5
        async with asyncio.TaskGroup() as group:
            for request, prompt in zip(requests, prompts, strict=True):
                group.create_task(_ask(client, model, request, prompt, start_s, answers))
    return answers


@contextmanager
def _stack(device: str) -> Iterator[tuple[str, str]]:
    """Serves a model for the block; yields the gateway's URL and the model's name."""
    with tempfile.TemporaryDirectory() as temporary:
        if device == "cuda":
            folder = gpu_model.model_folder(Path(temporary))
            with gpu_model.serving(folder, (1, 2, 4, 8, 16, 32, 64), _MAX_MODEL_LEN) as url:
                yield url, gpu_model.SERVED_NAME
            return
        flags = ("--model", "smollm2", "--max-model-len", str(_MAX_MODEL_LEN), "--run-dir", temporary)
        with launched(*flags) as url:
            yield url, "smollm2"


def main() -> None:
    """Runs both and prints the line."""
    options = parser(__doc__, "a quarter of the requests")
    options.add_argument("--save", type=Path, metavar="FILE", help="keep the learned step times")
    options.add_argument("--device", choices=_TRAFFIC, default="cpu")
    options.add_argument("--rate", type=float, help="requests a second")
    arguments = options.parse_args()
    traffic = _TRAFFIC[arguments.device]
    traffic = replace(
        traffic,
        requests=traffic.requests // (4 if arguments.quick else 1),
        rate=arguments.rate or traffic.rate,
    )
    requests = generate(traffic)
    with _stack(arguments.device) as (url, model):
        # The first requests of a graph are slower, and fill the prefix cache.
        warm_up = generate(replace(traffic, requests=traffic.requests // 6, seed=1))
        asyncio.run(_send(url, model, warm_up, "warm"))
        before = ObservedSteps.read(url)
        real = asyncio.run(_send(url, model, requests, "measured"))
        times = learn(url, since=before)
    if arguments.save:
        times.write(arguments.save)
    configure("accuracy", level="warning")
    figures = simulate(requests, Settings(), times)
    names = ("ttft_s", "gap_s", "latency_s")
    measured = {name: getattr(real, name) for name in names}
    medians = {name: statistics.median(values) for name, values in measured.items()}
    for name, values in measured.items():
        print(
            f"{name:<10} median: measured {medians[name]:.4f}, simulated {figures[name]['p50']:.4f};"
            f" mean: measured {statistics.fmean(values):.4f}, simulated {figures[name]['mean']:.4f}"
        )
    report(
        "accuracy",
        {
            "device": arguments.device,
            "requests": traffic.requests,
            "rate": traffic.rate,
            "measured": {name: round(value, 4) for name, value in medians.items()},
            "simulated": {name: round(figures[name]["p50"], 4) for name in names},
            "utilization": round(figures["utilization"], 3),
        },
        {name.removesuffix("_s"): figures[name]["p50"] / medians[name] for name in names},
    )


if __name__ == "__main__":
    main()
