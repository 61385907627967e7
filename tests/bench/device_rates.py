"""Measures how many tokens a second a device decodes and prefills, through the services.

``python -m tests.bench.device_rates [--quick] [--batches 1,2,4,8] [FLAGS]`` starts `triptych up` with the
other flags, for example ``--device rbln --model /models/Llama-3.2-1B-Instruct``; without them, SmolLM2 runs.
With ``--url URL`` it measures a running stack instead, whose --max-num-seqs must be at least the largest
batch.

Decoding: each batch is requested at once and streamed; a step is the time in which every stream gets a token
while all of them run. Prefilling: two streams send prompts and read one token each, so that a prompt always
waits. No prompt begins like another one. The ratio says what the largest batch gives over the smallest.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from tests.bench.support.contenders import launched
from tests.bench.support.gpu_model import bucket_flags
from tests.bench.support.http_load import Load, step_seconds, tokens_per_second
from tests.bench.support.report import parser, report

# Prompts are random ids below this, which every real model has.
VOCAB_SIZE = 1000
DECODE_PROMPT, PREFILL_PROMPT = 100, 384
MAX_LEN = 1024
_CLIENTS = 4


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "batches 1 and 4, fewer tokens")
    options.add_argument("--batches", help="decode batches, for example 1,2,4,8 (the default)")
    options.add_argument("--url", help="the gateway of a running stack")
    arguments, flags = options.parse_known_args()
    if arguments.url and flags:
        options.error(f"--url measures a stack as it runs; omit {flags[0]}")
    batches = sorted(map(int, (arguments.batches or ("1,4" if arguments.quick else "1,2,4,8")).split(",")))
    with stack(arguments.url, batches, flags) as url:
        model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
        decoded = {batch: decode_rate(url, model, batch, 32 if arguments.quick else 96) for batch in batches}
        prefilled = prefill_rate(url, model, 8.0 if arguments.quick else 20.0)
    print(f"{'batch':>8}{'tokens/s':>12}{'ms a step':>12}")
    for batch, rate in decoded.items():
        print(f"{batch:8}{rate:12.1f}{1e3 * batch / rate:12.2f}")
    print(f"prefill: {prefilled:.0f} tokens/s")
    figures = {
        "flags": " ".join(flags), "model": model, "decode_tok_s": {str(batch): round(rate, 2) for batch, rate in decoded.items()},
        "prefill_tok_s": round(prefilled, 1),
    }  # fmt: skip
    least, most = batches[0], batches[-1]
    report("device_rates", figures, {f"decode_b{most}_over_b{least}": decoded[most] / decoded[least]})


@contextmanager
def stack(url: str | None, batches: Sequence[int], flags: Sequence[str]) -> Iterator[str]:
    """Yields the URL of the running stack, or of one that runs for the block."""
    if url is not None:
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory() as run_dir:
        own = ["--max-model-len", str(MAX_LEN), "--run-dir", run_dir, *bucket_flags(batches)]
        with launched(*own, *flags) as started:
            yield started


def decode_rate(url: str, model: str, batch: int, together: int) -> float:
    """Returns the tokens per second that a batch decodes."""
    # A step runs between two prompts' chunks, so this leaves `together` steps with all requests.
    load = Load(url, model, VOCAB_SIZE, DECODE_PROMPT, 2 * batch + together)
    clients = min(_CLIENTS, len(os.sched_getaffinity(0)))
    return batch / step_seconds(load, batch, clients)


def prefill_rate(url: str, model: str, seconds: float) -> float:
    """Returns the prompt tokens per second of prompts that are answered by one token."""
    load = Load(url, model, VOCAB_SIZE, PREFILL_PROMPT, 1)
    return PREFILL_PROMPT * tokens_per_second(load, 2, 2.0, seconds, 1)


if __name__ == "__main__":
    main()
