"""Compares Triptych with ``vllm serve`` on the same model, prompts and machine, in turn.

``python -m tests.bench.vs_vllm [--quick] [--mixed] [--rounds N] [--model smollm2|gemma3-270m]`` starts vLLM
with its default thread binding, vLLM on all cores, and ``triptych up``, one after the other. Each starts with
empty caches (cold), and then with the caches of the cold start (warm); the machine's file cache is warm for
all. vLLM's client, ``vllm bench serve``, sends random prompts: 128 tokens in and 128 out at 1, 8 and 32
requests at a time, then 1,024 in and 32 out at 8. Every round repeats all of it. All contenders of a round
get the same prompts. No two runs against one server share a prompt, so prefix caches find nothing.

``--mixed`` measures a single load instead, after cold starts: 96 prompts of 40 to 900 tokens, 16 at a time,
64 tokens out. Most prompts begin with one of six shared prefixes; all keep their default prefix cache.

vLLM runs in a separate environment (``.cache/vllm-peer/``). The first run makes it, which takes minutes and
needs a package index. Two rounds take most of an hour on two cores. ``--quick`` runs one round with cold
starts, vLLM on all cores and 8 requests at a time; it takes a few minutes, mostly for vLLM's start (about
90 s on two idle cores).

Ratios are ours divided by the better of vLLM's two settings, for each figure by itself; medians over rounds.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.support import mixed_prompts, vllm_env
from tests.bench.support.contenders import (
    Contender,
    ContenderFailed,
    Server,
    contenders,
    environment,
    running,
)
from tests.bench.support.report import exit_code, parser, report
from worker_svc.model_files.loader import fetch

OURS: Final = "triptych"


@dataclass(frozen=True)
class Workload:
    """A load: concurrency, number of prompts, and their lengths in tokens."""

    name: str
    concurrency: int
    prompts: int
    input_len: int = 128
    output_len: int = 128
    mixed: bool = False
    """Prompts of many lengths that share prefixes, instead of random ones of ``input_len``."""

    def title(self) -> str:
        """Returns a heading for people."""
        prompts = "40 to 900" if self.mixed else str(self.input_len)
        return f"{prompts} in, {self.output_len} out, {self.concurrency} at a time"


# By default vLLM takes nearly all of the machine's memory, or refuses to start if other programs use it.
# This is more than 32 sequences of 2,048 tokens need with either demo model.
_KV_BYTES: Final = 2 << 30
WARM_UP: Final = Workload("warm_up", 8, 8, output_len=16)
WORKLOADS: Final = (
    Workload("c1", 1, 8),
    Workload("c8", 8, 40),
    Workload("c32", 32, 128),
    Workload("long", 8, 32, input_len=1024, output_len=32),
)
QUICK_WORKLOADS: Final = (Workload("c8", 8, 16),)
MIXED: Final = Workload("mixed", 16, 96, output_len=64, mixed=True)
QUICK_MIXED: Final = Workload("mixed", 16, 32, output_len=64, mixed=True)

# Ratios by figure, with the function that picks the better of several contenders.
_RATIOS: Final = {
    "tok_s_c1": max, "tok_s_c8": max, "tok_s_c32": max, "tok_s_long": max, "tok_s_mixed": max,
    "ttft_c1": min, "ttft_c8": min, "ttft_c32": min, "ttft_long": min, "ttft_mixed": min,
    "start_cold": min, "start_warm": min,
}  # fmt: skip
_HEADINGS: Final = {
    "start_cold": "cold s", "start_warm": "warm s", "memory": "MiB", "memory_beside_worker": "beside worker",
    "tok_s": "tok/s", "ttft": "TTFT ms", "tpot": "TPOT ms",
}  # fmt: skip

Figures = Mapping[str, Mapping[str, float]]
"""Medians over rounds by contender, then by figure."""


class Bench:
    """Runs the contenders and keeps the measurements."""

    def __init__(
        self,
        model: str,
        folder: Path,
        vllm: Path,
        scratch: Path,
        workloads: Sequence[Workload],
        *,
        cold: bool,
    ) -> None:
        """Prepares for one model; ``cold`` measures right after a cold start, without a warm one."""
        self._model, self._folder, self._vllm, self._scratch = model, folder, vllm, scratch
        self._workloads, self._cold = workloads, cold
        self._measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        shutil.rmtree(scratch, ignore_errors=True)

    def run(self, rounds: int, *, quick: bool) -> Figures:
        """Measures all contenders in each round; without vLLM's default thread binding if ``quick``.

        Raises:
            ContenderFailed: A contender does not complete every request.
        """
        flags = (
            "--served-model-name", self._model, "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32",
        )  # fmt: skip
        memory = ("--kv-cache-memory-bytes", str(_KV_BYTES))
        all_contenders = contenders(self._folder, self._vllm, flags, memory)
        for index in range(rounds):
            for contender in all_contenders[1:] if quick else all_contenders:
                print(f"round {index + 1}: {contender.name}", file=sys.stderr, flush=True)
                self._measure(contender, index)
        return {
            name: {figure: statistics.median(values) for figure, values in figures.items()}
            for name, figures in self._measured.items()
        }

    def _measure(self, contender: Contender, index: int) -> None:
        noted = self._measured[contender.name]
        place = self._scratch / f"round-{index + 1}" / contender.name.replace(", ", "-").replace(" ", "-")
        caches = place / "caches"
        caches.mkdir(parents=True)
        with running(contender, place / "cold", caches) as server:
            noted["start_cold"].append(server.start_s)
            if self._cold:
                self._drive(contender, server, place, index)
                return
        with running(contender, place / "warm", caches) as server:
            noted["start_warm"].append(server.start_s)
            self._drive(contender, server, place, index)

    def _drive(self, contender: Contender, server: Server, place: Path, index: int) -> None:
        noted = self._measured[contender.name]
        for number, workload in enumerate((WARM_UP, *self._workloads)):
            # All contenders of a round get the same prompts, and each run against a server its own.
            result = self._ask(server, workload, place, seed=1000 * (index + 1) + number)
            if workload is not WARM_UP:
                noted[f"tok_s_{workload.name}"].append(result["output_throughput"])
                noted[f"ttft_{workload.name}"].append(result["median_ttft_ms"])
                noted[f"tpot_{workload.name}"].append(result["median_tpot_ms"])
        memory = server.memory()
        noted["memory"].append(memory.total)
        noted["memory_beside_worker"].append(memory.beside_worker)

    def _ask(self, server: Server, workload: Workload, place: Path, seed: int) -> Mapping[str, float]:
        """Returns the figures that vLLM's client measured on a server."""
        file, log = f"{workload.name}.json", place / f"client-{workload.name}.log"
        if workload.mixed:
            prompts = place / "prompts.jsonl"
            mixed_prompts.write(prompts, self._folder, workload.prompts, seed)
            dataset = [
                "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template",
                "--custom-output-len", str(workload.output_len),
            ]  # fmt: skip
        else:
            dataset = [
                "--dataset-name", "random", "--random-input-len", str(workload.input_len),
                "--random-output-len", str(workload.output_len),
            ]  # fmt: skip
        command = [
            str(self._vllm), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
            "--host", "127.0.0.1", "--port", str(server.port),
            "--model", self._model, "--tokenizer", str(self._folder),
            *dataset, "--ignore-eos", "--temperature", "0",
            "--max-concurrency", str(workload.concurrency), "--num-prompts", str(workload.prompts),
            "--seed", str(seed), "--disable-tqdm", "--save-result", "--result-dir", str(place),
            "--result-filename", file,
        ]  # fmt: skip
        with log.open("w") as output:
            done = subprocess.run(
                command, cwd=place, env=environment(place / "client-caches"), stdout=output,
                stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        if done.returncode:
            raise ContenderFailed(f"vllm bench serve failed; its log is {log}")
        result: dict[str, float] = json.loads((place / file).read_text())
        tokens = workload.prompts * workload.output_len
        if result["completed"] != workload.prompts or result["total_output_tokens"] != tokens:
            raise ContenderFailed(
                f"{result['completed']} of {workload.prompts} requests completed, with {result['total_output_tokens']} of"
                f" {tokens} tokens; the client's log is {log}"
            )
        return result


def ratios(figures: Figures) -> dict[str, float]:
    """Returns our figures divided by the best of the others', for figures that all contenders have."""
    others = [measured for name, measured in figures.items() if name != OURS]
    return {
        name: figures[OURS][name] / better(measured[name] for measured in others)
        for name, better in _RATIOS.items()
        if all(name in measured for measured in figures.values())
    }


def table(figures: Figures, workloads: Sequence[Workload]) -> str:
    """Returns a table for people: one line per contender for starts and memory, and one for each workload."""
    starts = ("start_cold", "start_warm", "memory", "memory_beside_worker")
    lines = [_heading("", starts)]
    for name, measured in figures.items():
        lines.append(_line(name, [measured.get(figure) for figure in starts]))
    for workload in workloads:
        lines += ["", _heading(workload.title(), ("tok_s", "ttft", "tpot"))]
        for name, measured in figures.items():
            lines.append(
                _line(name, [measured[f"{figure}_{workload.name}"] for figure in ("tok_s", "ttft", "tpot")])
            )
    return "\n".join(lines)


def _heading(what: str, figures: Sequence[str]) -> str:
    return f"{what:<32}" + "".join(f"{_HEADINGS[figure]:>15}" for figure in figures)


def _line(name: str, values: Sequence[float | None]) -> str:
    return f"{name:<32}" + "".join(f"{'-' if value is None else f'{value:.1f}':>15}" for value in values)


def main() -> int:
    """Prints a table and the line of JSON; returns the exit code."""
    options = parser(__doc__, "one round, one concurrency, one setting of vLLM")
    options.add_argument(
        "--mixed", action="store_true", help="only prompts of many lengths that share prefixes"
    )
    options.add_argument("--rounds", type=int, default=2, help="how often to repeat everything")
    options.add_argument("--model", choices=("smollm2", "gemma3-270m"), default="smollm2")
    arguments = options.parse_args()
    rounds = 1 if arguments.quick else max(1, arguments.rounds)
    return exit_code(
        "vs_vllm",
        lambda: _bench(arguments.model, rounds, quick=arguments.quick, mixed=arguments.mixed),
    )


def _bench(model: str, rounds: int, *, quick: bool, mixed: bool) -> None:
    vllm, folder = vllm_env.commands() / "vllm", fetch(model)
    workloads = QUICK_WORKLOADS if quick else WORKLOADS
    if mixed:
        workloads = (QUICK_MIXED if quick else MIXED,)
    bench = Bench(model, folder, vllm, vllm_env.FOLDER / "runs", workloads, cold=quick or mixed)
    figures = bench.run(rounds, quick=quick)
    print(f"{model}, bfloat16; medians of {rounds} rounds")
    print(table(figures, workloads))
    rounded = {
        name: {figure: round(value, 2) for figure, value in measured.items()}
        for name, measured in figures.items()
    }
    report("vs_vllm", {"model": model, "rounds": rounds, "contenders": rounded}, ratios(figures))


if __name__ == "__main__":
    sys.exit(main())
