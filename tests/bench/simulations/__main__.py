"""Simulates the promises of the scheduling policies, each under the traffic that would break it.

``python -m tests.bench.simulations [--quick]`` runs the production scheduler in virtual time: tenants that
flood the queue or hold all places, weights, a full queue, placement on four replicas, long prompts, small
chunks, and prefixes that urgent requests meet. ``ratios`` are figures by their aims; above 1 is a miss.
"""

import time

from protos.service.logs import configure
from tests.bench.support.report import parser, report
from tests.support.scheduler.scenarios import SCENARIOS


def main() -> None:
    """Prints a table and the line of JSON."""
    quick = parser(__doc__, "shorter traces, and fewer of them").parse_args().quick
    configure("simulations", level="warning")
    figures: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    for scenario in SCENARIOS:
        name, started_s = scenario.__name__, time.process_time()
        found = scenario(quick)
        print(f"{name} ({time.process_time() - started_s:.0f} s of CPU time): {scenario.__doc__}")
        for what, figure in found.items():
            ratio = ratios[f"{name}: {what}"] = figure.ratio_to(figure.aim)
            verdict = "" if ratio <= 1 else "  missed"
            print(f"  {what:<52}{figure.value:>10.4f}, at most {figure.aim:g}{verdict}")
        figures[name] = {what: round(figure.value, 4) for what, figure in found.items()}
    report("simulations", {"quick": quick, "figures": figures}, ratios)


if __name__ == "__main__":
    main()
