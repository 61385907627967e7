"""A rank that opens an NPU, joins its replica as a worker does, and prints the results as JSON.

Arguments: the rank and the address of rank 0. The result: the groups' backends for tensors of NPUs and of
hosts, what a compiled graph sums and gathers over the ranks, and the variables that the vendor's collectives
read.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import distributed

from worker_svc.devices import open_device
from worker_svc.devices.registry import DeviceOptions
from worker_svc.ranks import operators
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout

RANKS = 2
VARIABLES = ("LOCAL_RANK", "WORLD_SIZE", "RBLN_CTX_STANDALONE", "RBLN_ROOT_IP", "RBLN_LOCAL_IP")


def _backends(group: Any) -> list[str]:
    return [type(group._get_backend(torch.device(kind))).__name__ for kind in ("rbln", "cpu")]


def main(rank: int, master: str) -> None:
    """Joins and computes."""
    device = open_device("rbln", DeviceOptions(rank=rank, world_size=RANKS))
    device.prepare_ranks(master)
    ranks = RankGroup(
        RankLayout(rank=rank, tensor=RANKS), device.torch_device, master=master, epoch="first",
        default=device.default_collectives, collectives=device.collectives, compiled=device.has_own_compiler,
    )  # fmt: skip
    (stage,) = (
        group for group in distributed.distributed_c10d._world.pg_map if group.group_name in ranks.stage
    )
    device.use_ranks(ranks.stage)

    def collect(numbers: torch.Tensor) -> torch.Tensor:
        return torch.cat([operators.all_reduce_(numbers * 1), operators.all_gather(numbers, RANKS, 0)])

    collected = device.compile(collect)(torch.full((2,), rank + 1.0, dtype=torch.float16))
    found = {
        "default": _backends(distributed.group.WORLD),
        "stage": _backends(stage),
        "collected": collected.tolist(),
        "exchanged": [each.decode() for each in ranks.exchange(str(rank).encode())],
        "variables": {name: os.environ.get(name, "") for name in VARIABLES},
    }
    print(json.dumps(found), flush=True)
    ranks.exchange(b"read")  # rank 0 keeps the store until all are done
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
