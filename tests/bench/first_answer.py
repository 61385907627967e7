"""Measures the time from a clean clone to the first answer of ``make serve``, and again in the same clone.

``python -m tests.bench.first_answer [--quick]`` clones the repository and runs ``make serve`` there with an
empty model cache. It asks one question and stops the stack with Ctrl-C, then does both again. ``--quick``
measures only the second run, in this checkout.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.bench.support.report import parser, report
from tests.support.paths import ROOT

QUESTION = {
    "model": "smollm2",
    "temperature": 0,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


def serve_once(folder: Path, environment: dict[str, str], port: int) -> float:
    """Returns the seconds from ``make serve`` to the first answer.

    Raises:
        RuntimeError: ``make serve`` exits before it serves.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve", f"PORT={port}"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        if "curl " in line:
            break
    else:
        raise RuntimeError("make serve exited before it served")
    httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=QUESTION, timeout=60).raise_for_status()
    seconds = time.monotonic() - started
    # In a terminal Ctrl-C reaches the whole process group.
    os.killpg(process.pid, signal.SIGINT)
    sys.stderr.write(process.communicate(timeout=60)[0])
    return seconds


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "use this checkout and its environment")
    options.add_argument("--port", type=int, default=8017)
    arguments = options.parse_args()
    if arguments.quick:
        again = serve_once(ROOT, dict(os.environ), arguments.port)
        report("first_answer", {"second_s": round(again, 1)}, {})
        return
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "triptych"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {**os.environ, "TRIPTYCH_CACHE": str(Path(temporary) / "cache")}
        first = serve_once(clone, environment, arguments.port)
        second = serve_once(clone, environment, arguments.port)
    report(
        "first_answer",
        {"first_s": round(first, 1), "second_s": round(second, 1)},
        {"second_to_first": second / first},
    )


if __name__ == "__main__":
    main()
