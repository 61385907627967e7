"""The long form of the fault campaign: ``python -m tests.e2e.campaign.faults --faults 200``.

Runs the three services as real processes, with two workers and a tiny random model, and applies faults to
them under load. Prints each fault, what failed, and one line of JSON. Exits with 1 if a request failed, a
token was lost or doubled, or something was left behind. Ctrl-C ends it before the next fault.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.support.campaign import campaign
from tests.support.campaign.processes import tiny_chat_model


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.campaign.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="number of faults (200)")
    parser.add_argument(
        "--seed", type=int, help="repeats a campaign; default: a random one, which is printed"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--width", type=int, default=24, help="requests at a time (24)")
    parser.add_argument("--folder", type=Path, help="empty folder for logs; default: a temporary one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    campaign.say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        model = tiny_chat_model.write(Path(temporary) / "model")
        report = asyncio.run(
            campaign.run(
                model, folder, count=options.faults, seed=seed, dtype=options.dtype, width=options.width
            )
        )
    for text in (*report.unsteady, *report.leaks):
        campaign.say(text)
    print(report.line())
    return 1 if report.failures or report.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
