"""A rank of a group of the vendor's backend "rbln-ccl", which compares collectives with plain sums.

Arguments: a scenario of this module, the rank, the number of ranks, the port of rank 0's store.
"""

import itertools
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

# A tile, less than one, odd, and more than fits into one all-reduce of two ranks (1 MiB each).
SIZES = (256, 3, 1000, 1_300_007)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICE = "rbln"


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers of a rank, whose sums are exact in each type: [size] on the host."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, (size,), generator=generator).to(dtype)


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises AssertionError unless the tensors are equal."""
    assert torch.equal(found.cpu(), expected), f"{name}: {found.cpu()} is not {expected}"


def collectives(rank: int, ranks: int) -> None:
    """All collectives that a worker may use, in all sizes and types."""
    for dtype, size in itertools.product(DTYPES, SIZES):
        each = torch.stack([values(peer, size, dtype) for peer in range(ranks)])
        name = f"{size} of {dtype}"
        own = each[rank].to(DEVICE)
        distributed.all_reduce(own)
        check(f"sum of {name}", own, each.float().sum(dim=0).to(dtype))
        gathered = torch.empty(ranks * size, dtype=dtype, device=DEVICE)
        distributed.all_gather_into_tensor(gathered, each[rank].to(DEVICE))
        check(f"gathered {name}", gathered, each.flatten())
        root = ranks - 1
        sent = each[rank].to(DEVICE)
        distributed.broadcast(sent, root)
        check(f"broadcast {name}", sent, each[root])
    for op in ("max", "min", "avg"):
        each = torch.stack([values(peer, 256, torch.float16) for peer in range(ranks)])
        own = each[rank].to(DEVICE)
        distributed.all_reduce(own, getattr(distributed.ReduceOp, op.upper()))
        reduced = each.float().mean(dim=0).half() if op == "avg" else getattr(each, f"a{op}")(dim=0)
        check(op, own, reduced)
    each = torch.stack([values(peer, ranks * 256, torch.float16) for peer in range(ranks)])
    part = torch.empty(256, dtype=torch.float16, device=DEVICE)
    distributed.reduce_scatter_tensor(part, each[rank].to(DEVICE))
    check("a rank's part of a sum", part, each.float().sum(dim=0).half().view(ranks, 256)[rank])


def messages(rank: int, ranks: int) -> None:
    """Each rank sends to its successor, in a ring."""
    for dtype, size in itertools.product(DTYPES, SIZES):
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        received = torch.empty(size, dtype=dtype, device=DEVICE)
        own = values(rank, size, dtype).to(DEVICE)
        if rank:
            distributed.send(own, after)
        distributed.recv(received, before)
        if not rank:
            distributed.send(own, after)
        check(f"{size} of {dtype} from {before}", received, values(before, size, dtype))


def subgroups(rank: int, ranks: int) -> None:
    """The even and the odd ranks, at the same time, and then everyone again."""
    halves = [list(range(first, ranks, 2)) for first in range(2)]
    groups = [distributed.new_group(half, backend="rbln-ccl") for half in halves]
    each = torch.stack([values(peer, 512, torch.float16) for peer in range(ranks)])
    own = each[rank].to(DEVICE)
    distributed.all_reduce(own, group=groups[rank % 2])
    check("sum of half of the ranks", own, each[halves[rank % 2]].sum(dim=0))
    own = each[rank].to(DEVICE)
    distributed.all_reduce(own)
    check("sum of all", own, each.sum(dim=0))


def rounding(rank: int, ranks: int) -> None:
    """Sums of all finite float16 numbers with those of 64 places away, which must round to nearest."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = numbers[numbers.isfinite()][: 63_488 // 256 * 256]
    each = torch.stack([numbers.roll(64 * peer) for peer in range(ranks)])
    own = each[rank].to(DEVICE)
    distributed.all_reduce(own)
    total = each[0].float()
    for other in each[1:]:
        total += other.float()
    check("rounded sum", own, total.half())


def absent(rank: int, _: int) -> None:
    """Rank 1 announces itself and does nothing more until its input ends."""
    own = values(rank, 256, torch.float16).to(DEVICE)
    distributed.all_reduce(own)
    print("joined", flush=True)
    if rank == 1:
        sys.stdin.read()
    else:
        distributed.all_reduce(own)


def different(rank: int, _: int) -> None:
    """Rank 1 reduces more numbers than the others."""
    distributed.all_reduce(values(rank, 512 if rank == 1 else 256, torch.float16).to(DEVICE))


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    each.__name__: each for each in (collectives, messages, subgroups, rounding, absent, different)
}


def main() -> None:
    """Runs a scenario."""
    import torch_rbln  # noqa: F401 - registers the backend

    scenario, rank, ranks, port = sys.argv[1], *map(int, sys.argv[2:])
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    distributed.init_process_group(
        "rbln-ccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    SCENARIOS[scenario](rank, ranks)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
