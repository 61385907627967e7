"""The long form of the fault campaign: ``python -m tests.e2e.campaign.faults --faults 200``.

Runs the three services as real processes, with two workers and a tiny random model, and applies faults to
them under load. Prints each fault, what failed, and one line of JSON. Exits with 1 if a request failed, a
token was lost or doubled, or something was left behind. Ctrl-C ends it before the next fault.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tests.support.campaign import campaign


async def run(model: Path, folder: Path, options: Namespace) -> campaign.Report:
    """Runs the campaign."""
    return await campaign.run(
        model, folder, count=options.faults, seed=options.seed, dtype=options.dtype, width=options.width
    )


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m tests.e2e.campaign.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="number of faults (200)")
    sys.exit(campaign.command(parser, run))
