"""A soak: ``python -m tests.e2e.campaign.soak --minutes 30``.

Runs the three services as real processes, with two workers and a tiny random model, under a mixed load with
idle moments, and without faults. Prints one line of JSON. Exits with 1 if a request failed or was stuck,
memory grew, or something was left behind.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tests.support.campaign import campaign, soak


async def run(model: Path, folder: Path, options: Namespace) -> soak.Soak:
    """Runs the soak."""
    return await soak.run(
        model, folder, minutes=options.minutes, seed=options.seed, dtype=options.dtype, width=options.width
    )


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m tests.e2e.campaign.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the load lasts (30)")
    sys.exit(campaign.command(parser, run))
