"""A soak: ``python -m tests.e2e.campaign.soak --minutes 30``.

Runs the three services as real processes, with two workers and a tiny random model, under a mixed load with
idle moments, and without faults. Prints one line of JSON. Exits with 1 if a request failed or was stuck,
memory grew, or something was left behind.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.support.campaign import soak
from tests.support.campaign.campaign import say
from tests.support.campaign.processes import tiny_chat_model


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.campaign.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the load lasts (30)")
    parser.add_argument("--seed", type=int, help="repeats a load; default: a random one, which is printed")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--width", type=int, default=24, help="requests at a time (24)")
    parser.add_argument("--folder", type=Path, help="empty folder for logs; default: a temporary one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        model = tiny_chat_model.write(Path(temporary) / "model")
        found = asyncio.run(
            soak.run(
                model, folder, minutes=options.minutes, seed=seed, dtype=options.dtype, width=options.width
            )
        )
    for text in (*found.failures, *found.leaks):
        say(text)
    print(found.line())
    return 1 if found.failures or found.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
