"""vLLM's parallel groups, as its layers see them. Their collectives are the operators of `ranks`."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import parallel_state

from worker_svc.ranks import operators
from worker_svc.ranks.layout import RankLayout


@dataclass(frozen=True)
class _Members:
    """The part of a process group that layers use."""

    _size: int
    _rank: int

    def size(self) -> int:
        """Returns the number of members."""
        return self._size

    def rank(self) -> int:
        """Returns this process' place among them."""
        return self._rank


class Coordinator:
    """The part of vLLM's `GroupCoordinator` that layers use: sizes and places first, collectives later.

    A model is built before its ranks meet, so a group owns no connections.
    """

    device_communicator = None

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, *, reduces: bool = False) -> None:
        """Describes a group.

        Args:
            name: as vLLM calls the group.
            ranks: its members, by their ranks in the replica.
            rank: this process' rank in the replica.
            reduces: whether layers may call its collectives; the operators serve the ranks of a stage.
        """
        self.unique_name = f"{name}:0"
        self.ranks = list(ranks)
        self.rank = rank
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.local_rank = 0
        self.cpu_group = self.device_group = _Members(self.world_size, self.rank_in_group)
        self._reduces = reduces

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the group's first."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank is the group's last."""
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds a tensor up over the group, in place."""
        if self.world_size == 1:
            return tensor
        self._check()
        return operators.all_reduce_(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Joins the tensors of all ranks along a dimension."""
        if self.world_size == 1:
            return tensor
        self._check()
        return operators.all_gather(tensor, self.world_size, dim)

    def _check(self) -> None:
        if not self._reduces:
            raise NotImplementedError(f"vLLM's group {self.unique_name} has no collectives here")

    def destroy(self) -> None:
        """Does nothing: there is nothing to close."""


def set_groups(layout: RankLayout) -> None:
    """Tells vLLM which part of a model this rank has. Later calls replace the groups."""
    rank = layout.rank
    alone = (rank,)
    stages = tuple(range(layout.tensor_rank, layout.world_size, layout.tensor))
    tensor = Coordinator("tp", layout.peers, rank, reduces=True)
    groups: dict[str, Any] = {
        "_WORLD": Coordinator("world", tuple(range(layout.world_size)), rank),
        "_TP": tensor,
        "_ETP": tensor,
        "_PP": Coordinator("pp", stages, rank),
        "_DP": Coordinator("dp", alone, rank),
        "_EP": Coordinator("ep", layout.peers, rank, reduces=True),
        "_PCP": Coordinator("pcp", alone, rank),
        "_DCP": Coordinator("dcp", alone, rank),
    }
    for name, group in groups.items():
        setattr(parallel_state, name, group)
