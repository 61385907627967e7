"""Measures how long a killed worker is away, with a standby and without.

``python -m tests.bench.restart [--quick] [--kills N]`` starts ``triptych up`` with SmolLM2, kills its worker
with SIGKILL, and times until the worker serves again and until the first token of a request that was sent
after the kill. It waits for a standby before each kill. Then it does the same with ``--standby-workers 0``.
The compile cache is warm from the first start. ``--quick`` kills once with a standby.

Ratios: medians with a standby by those without, and the time until serving by five seconds.
"""

import datetime as dt
import json
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.bench.support.contenders import environment, launched
from tests.bench.support.report import parser, report
from worker_svc.model_files.loader import fetch

LIMIT_S = 5.0
"""A worker should serve again after this long."""
QUESTION = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
_POLL_S = 0.05
_SETTLED_S = 61.0
"""A worker that lived for longer than this starts without a delay again."""


@dataclass(frozen=True)
class Restart:
    """Seconds since a kill."""

    serving_s: float
    """Until the worker's registration was SERVING again."""
    first_token_s: float
    """Until the first token of a request that was sent right after the kill."""


def first_token(address: str) -> float:
    """Returns the time of day of a new request's first token."""
    with httpx.stream(
        "POST", f"{address}/v1/completions", json={**QUESTION, "stream": True}, timeout=300
    ) as answer:
        for line in answer.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                return time.time()
    raise RuntimeError("the answer has no token")


def restart(address: str, run_dir: Path) -> Restart:
    """Kills the worker and returns how long it was away."""
    log = run_dir / "worker-0.log"
    seen = log.stat().st_size
    killed = time.time()
    os.kill(int((run_dir / "worker-0.pid").read_text()), signal.SIGKILL)
    token_s = first_token(address) - killed
    lines = [json.loads(line) for line in log.read_bytes()[seen:].splitlines() if line.startswith(b"{")]
    registered = next(line["timestamp"] for line in lines if line.get("state") == "serving")
    return Restart(dt.datetime.fromisoformat(registered).timestamp() - killed, token_s)


def wait_for_standby(run_dir: Path) -> None:
    """Waits until a standby has imported everything."""
    log = run_dir / "standby-0.log"
    while not (log.exists() and "standby_ready" in log.read_text()):
        time.sleep(_POLL_S)


def measure(folder: Path, caches: Path, standbys: int, kills: int) -> list[Restart]:
    """Kills a worker several times, each time after it has served for a while."""
    restarts = []
    flags = (
        "--device", "cpu", "--model", str(fetch("smollm2")), "--served-model-name", "smollm2",
        "--compile-cache-root", str(caches), "--max-model-len", "2048", "--max-num-seqs", "32",
        "--standby-workers", str(standbys), "--run-dir", str(folder),
    )  # fmt: skip
    with launched(*flags, variables=environment(caches)) as address:
        for _ in range(kills):
            first_token(address)
            if standbys:
                wait_for_standby(folder)
            time.sleep(0 if kills == 1 else _SETTLED_S)
            restarts.append(restart(address, folder))
    return restarts


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "kill once, with a standby only")
    options.add_argument("--kills", type=int, default=3, help="kills with a standby, and without")
    arguments = options.parse_args()
    kills = 1 if arguments.quick else arguments.kills
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        caches = Path(temporary) / "caches"
        for name, standbys in (("standby", 1), ("no_standby", 0))[: 1 if arguments.quick else 2]:
            restarts = measure(Path(temporary) / name, caches, standbys, kills)
            figures[f"serving_s_{name}"] = statistics.median(each.serving_s for each in restarts)
            figures[f"first_token_s_{name}"] = statistics.median(each.first_token_s for each in restarts)
    ratios = {"serving_to_limit": figures["serving_s_standby"] / LIMIT_S}
    if not arguments.quick:
        for part in ("serving", "first_token"):
            ratios[f"{part}_to_no_standby"] = figures[f"{part}_s_standby"] / figures[f"{part}_s_no_standby"]
    report("restart", {name: round(value, 2) for name, value in figures.items()}, ratios)


if __name__ == "__main__":
    main()
