"""A process that joins a group of two ranks and prints why it could not, or that it has.

Arguments: the rank, the master, the rank's facts as JSON, and how long to wait for the other rank, seconds.
"""

import json
import sys

import torch

from protos.errors import TriptychError
from worker_svc.ranks import group
from worker_svc.ranks.layout import RankLayout


def main() -> None:
    """Joins."""
    rank, master, facts, join_s = sys.argv[1:]
    group._JOIN_S = float(join_s)
    try:
        group.RankGroup(
            RankLayout(int(rank), 2),
            torch.device("cpu"),
            master=master,
            epoch="e",
            facts=json.loads(facts),
        )
    except TriptychError as error:
        print(f"{type(error).__name__}: {error.message}")
    else:
        print("joined")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
