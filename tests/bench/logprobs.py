"""Measures the cost of log-probabilities for 32 requests at once, through all services.

``python -m tests.bench.logprobs [--quick] [FLAGS]`` starts `triptych up` with the other flags, by default
SmolLM2 on all cores. Batches of 32 streamed completions run with no log-probabilities, with one and with five
alternatives in each place, in turn. A figure is the output tokens per second while all 32 requests decode.

The ratios are tokens per second with log-probabilities by those without in the same round; medians. The limit
is 0.75.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import httpx

from tests.bench.device_rates import VOCAB_SIZE, stack
from tests.bench.support.http_load import Load, step_seconds
from tests.bench.support.report import parser, report

BATCH: Final = 32
_PROMPT: Final = 32
_CLIENTS: Final = 2
_NONE: Final = "none"
PARAMETERS: Final[Mapping[str, Mapping[str, int]]] = {_NONE: {}, "1": {"logprobs": 1}, "5": {"logprobs": 5}}


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "fewer tokens and rounds")
    arguments, flags = options.parse_known_args()
    together, rounds = (32, 2) if arguments.quick else (128, 5)
    with stack(None, (BATCH,), flags) as url:
        model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
        measured = [one_round(url, model, together, number) for number in range(rounds)]
    figures = {name: round(statistics.median(one[name] for one in measured), 1) for name in PARAMETERS}
    print(f"{'alternatives':>14}{'tokens/s':>12}")
    for name, rate in figures.items():
        print(f"{name:>14}{rate:12.1f}")
    report("logprobs", {"flags": " ".join(flags), "model": model, "tok_s": figures}, ratios(measured))


def one_round(url: str, model: str, together: int, number: int) -> dict[str, float]:
    """Returns the tokens per second with each setting; every other round runs them in reverse."""
    rates = {}
    for name in list(PARAMETERS)[:: -1 if number % 2 else 1]:
        # A step runs between two prompts' chunks, so this leaves `together` steps with all requests.
        load = Load(url, model, VOCAB_SIZE, _PROMPT, 2 * BATCH + together, PARAMETERS[name])
        clients = min(_CLIENTS, len(os.sched_getaffinity(0)))
        rates[name] = BATCH / step_seconds(load, BATCH, clients)
    return rates


def ratios(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the medians of each setting's rates by the rates without log-probabilities."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in measured:
        for name, rate in one.items():
            if name != _NONE:
                found[f"logprobs_{name}_b{BATCH}"].append(rate / one[_NONE])
    return {name: statistics.median(values) for name, values in sorted(found.items())}


if __name__ == "__main__":
    main()
