"""Compares embeddings of Triptych with those of ``vllm serve``: MiniLM on the same CPU, in turn.

``python -m tests.bench.pooling.vs_vllm_embeddings [--quick] [--dtype TYPE]`` starts vLLM with its default
thread binding, vLLM on all cores, and ``triptych up``, all with ``--dtype TYPE`` (float32). With ``auto``,
each serves in its own default for this checkpoint: vLLM in float16, Triptych in float32. A client sends
requests of 1, 8 and 32 texts, one after the other. The contenders take short turns and get the same texts,
because the machine's speed drifts. Those whose turn it is not are stopped, because vLLM's threads spin while
they wait and would take a core from the others. The first request of a turn is not timed: processes that were
stopped have missed their timers. Texts are random words of 3 to 40 tokens and never sent twice to one server.
All embeddings are compared, too.

vLLM runs in a separate environment (``.cache/vllm-peer/``); the first run makes it, which takes minutes.
Otherwise the bench takes about five minutes on two cores, mostly for vLLM's starts. ``--quick`` leaves out
vLLM's default binding and sends a quarter of the texts.

Figures are texts per second, from the median time of a request, and the processor time of a text, which
depends less on other work of the machine. Ratios are ours divided by the better of vLLM's two settings. In
float32 there is also the rate of the model's matrix products alone, in oneDNN with packed weights and on all
cores, for the real tokens of a request of mean size.
"""

import contextlib
import json
import random
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import torch

from tests.bench.support import vllm_env
from tests.bench.support.contenders import ContenderFailed, Server, contenders, running
from tests.bench.support.report import exit_code, parser, report
from worker_svc.model_files.loader import fetch

OURS: Final = "triptych"
MODEL: Final = "minilm"
SIZES: Final = (1, 8, 32)
TURNS: Final = 8
_REQUESTS_A_TURN: Final = 9
_WORDS: Final = [
    "the",
    "a",
    "river",
    "people",
    "city",
    "of",
    "and",
    "in",
    "stone",
    "green",
    "runs",
    "was",
    "old",
    "seven",
    "light",
    "while",
    "book",
    "music",
    "they",
    "by",
]
_SHORTEST, _LONGEST = 1, 38
# How far two embeddings of length 1 may be apart, by dtype.
_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 3e-2, "auto": 3e-2}


def texts(seed: int, count: int) -> list[str]:
    """Returns random texts."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(_SHORTEST, _LONGEST))) for _ in range(count)]


def embed(client: httpx.Client, inputs: list[str]) -> tuple[float, list[list[float]]]:
    """Returns the seconds that a request took, and its embeddings."""
    started = time.perf_counter()
    response = client.post("/v1/embeddings", json={"model": MODEL, "input": inputs})
    seconds = time.perf_counter() - started
    if response.status_code != httpx.codes.OK:
        raise ContenderFailed(f"a request failed: {response.text[:200]}")
    data: list[dict[str, Any]] = response.json()["data"]
    return seconds, [entry["embedding"] for entry in data]


@dataclass(frozen=True)
class Rates:
    """What one contender needs for requests of one size."""

    texts_per_s: float
    """From the median time of a request."""
    cpu_ms: float
    """Processor time of all its processes for one text, milliseconds."""


def measure(servers: Mapping[str, Server], size: int, turns: int) -> tuple[dict[str, Rates], float]:
    """Returns the rates of each contender, and the largest difference between their embeddings."""
    seconds: dict[str, list[float]] = defaultdict(list)
    before: dict[str, float] = {}
    clients = {name: _client(server) for name, server in servers.items()}
    furthest = 0.0
    for turn in range(turns + 1):
        if turn == 1:
            seconds.clear()
            before = {name: _cpu_seconds(server) for name, server in servers.items()}
        answers: dict[str, list[list[float]]] = defaultdict(list)
        for name, client in clients.items():
            with _alone(name, servers):
                for number in range(_REQUESTS_A_TURN):
                    taken, embeddings = embed(client, texts(1000 * size + 10 * turn + number, size))
                    answers[name] += embeddings
                    if number:
                        seconds[name].append(taken)
        furthest = max(furthest, _largest_difference(answers))
    return {
        name: Rates(
            size / statistics.median(seconds[name]),
            1000 * (_cpu_seconds(server) - before[name]) / (size * turns * _REQUESTS_A_TURN),
        )
        for name, server in servers.items()
    }, furthest


def _client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120, trust_env=False)


def _cpu_seconds(server: Server) -> float:
    """Returns the processor time that a server's processes have taken so far."""
    return sum(sum(process.cpu_times()[:2]) for process in _family(server))


def _family(server: Server) -> list[psutil.Process]:
    return [server.process, *server.process.children(recursive=True)]


@contextlib.contextmanager
def _alone(name: str, servers: Mapping[str, Server]) -> Iterator[None]:
    """Stops the processes of all other servers meanwhile."""
    others = [each for other, server in servers.items() if other != name for each in _family(server)]
    try:
        for process in others:
            process.suspend()
        yield
    finally:
        for process in others:
            process.resume()


def bound(folder: Path, size: int) -> float:
    """Returns texts per second of the matrix products alone; see the module."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    # A word is a token, and two tokens frame a text.
    tokens = size * (2 + (_SHORTEST + _LONGEST) // 2)
    products = [
        (
            torch.randn(tokens, inputs),
            torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs), tokens),
        )
        for _ in range(config["num_hidden_layers"])
        for inputs, outputs in ((hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden))
    ]
    seconds = []
    for _ in range(25):
        started = time.perf_counter()
        for states, weights in products:
            torch.ops.mkldnn._linear_pointwise(states, weights, None, "none", [], "")
        seconds.append(time.perf_counter() - started)
    # The fastest run: other work of the machine only makes it slower.
    return size / min(seconds)


def ratios(figures: Mapping[str, Mapping[int, Rates]]) -> dict[str, float]:
    """Returns our figures divided by the best of the others', by name."""
    others = [measured for name, measured in figures.items() if name != OURS]
    found: dict[str, float] = {}
    for size, ours in figures[OURS].items():
        found[f"texts_per_s_{size}"] = ours.texts_per_s / max(other[size].texts_per_s for other in others)
        found[f"cpu_time_{size}"] = ours.cpu_ms / min(other[size].cpu_ms for other in others)
    return found


def main() -> int:
    """Prints a table and the line of JSON; returns the exit code."""
    options = parser(__doc__, "one setting of vLLM, fewer texts")
    options.add_argument(
        "--dtype",
        choices=tuple(_TOLERANCE),
        default="float32",
        help="of all contenders; auto: of each, its own default",
    )
    arguments = options.parse_args()
    return exit_code("vs_vllm_embeddings", lambda: _bench(arguments.dtype, quick=arguments.quick))


def _bench(dtype: str, *, quick: bool) -> None:
    vllm, folder = vllm_env.commands() / "vllm", fetch(MODEL)
    scratch = vllm_env.FOLDER / "embedding-runs"
    shutil.rmtree(scratch, ignore_errors=True)
    figures: dict[str, dict[int, Rates]] = defaultdict(dict)
    bounds = {size: bound(folder, size) for size in SIZES} if dtype == "float32" else {}
    furthest = 0.0
    with contextlib.ExitStack() as stack:
        servers = {}
        served = ("--served-model-name", MODEL, "--dtype", dtype)
        # vLLM asks for nearly all of the machine's memory, or refuses to start if other programs use it.
        default, all_cores, ours = contenders(folder, vllm, served, ("--gpu-memory-utilization", "0.3"))
        # Ours is first: until vLLM serves, its standby process has long imported what it needs.
        for contender in (ours, all_cores, *(() if quick else (default,))):
            print(f"starting {contender.name}", file=sys.stderr, flush=True)
            place = scratch / contender.name.replace(", ", "-").replace(" ", "-")
            servers[contender.name] = stack.enter_context(running(contender, place, place / "caches"))
        for size in SIZES:
            measured, difference = measure(servers, size, TURNS // 4 if quick else TURNS)
            furthest = max(furthest, difference)
            for name, rate in measured.items():
                figures[name][size] = rate
    if furthest > _TOLERANCE[dtype]:
        raise ContenderFailed(f"embeddings differ by {furthest:.4f}, more than {_TOLERANCE[dtype]}")
    print(f"{MODEL}, {dtype}: texts per second, and CPU ms of a text")
    print(f"{'texts a request':<20}" + "".join(f"{size:>18}" for size in SIZES))
    for name, rates in figures.items():
        print(
            f"{name:<20}"
            + "".join(f"{rate.texts_per_s:>10.1f}{rate.cpu_ms:>8.2f}" for rate in rates.values())
        )
    if bounds:
        print(f"{'products alone':<20}" + "".join(f"{rate:>10.1f}{'':>8}" for rate in bounds.values()))
    rounded = {
        name: {
            str(size): {"texts_per_s": round(rate.texts_per_s, 1), "cpu_ms": round(rate.cpu_ms, 2)}
            for size, rate in rates.items()
        }
        for name, rates in figures.items()
    }
    facts: dict[str, object] = {"model": MODEL, "dtype": dtype, "largest_difference": furthest}
    facts |= {"products_texts_per_s": {str(size): round(rate, 1) for size, rate in bounds.items()}}
    report("vs_vllm_embeddings", {**facts, "contenders": rounded}, ratios(figures))


def _largest_difference(embeddings: Mapping[str, list[list[float]]]) -> float:
    """Returns the largest difference of a value between our embeddings and another contender's."""
    ours = embeddings[OURS]
    return max(
        abs(one - other)
        for name, theirs in embeddings.items()
        if name != OURS
        for first, second in zip(ours, theirs, strict=True)
        for one, other in zip(first, second, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
