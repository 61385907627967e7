"""Transport of hidden states from a pipeline stage to the next."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from worker_svc.ranks.layout import RankLayout

# Hidden states on their way to the next stage, each in its own memory.
_SENDS_IN_FLIGHT = 2


class Links:
    """Connects each rank with its successor, the rank of the same place in the next stage."""

    def __init__(
        self,
        layout: RankLayout,
        devices: Sequence[str],
        backend: str,
        make_group: Callable[[Sequence[int], str], Any],
    ) -> None:
        """Creates the process groups, on all ranks of the replica in the same order.

        Args:
            layout: this rank's place.
            devices: by rank, the identity of its device; empty if ranks may share it.
            backend: the backend for tensors between devices.
            make_group: makes a process group of ranks with a backend.
        """
        self._layout = layout
        self._groups: dict[int, Any] = {}
        self._over_host: set[int] = set()
        for source in range(layout.world_size - layout.tensor):
            target = source + layout.tensor
            # NCCL does not connect a GPU with itself.
            shared = bool(devices[source]) and devices[source] == devices[target]
            self._groups[source] = make_group((source, target), "gloo" if shared else backend)
            if shared:
                self._over_host.add(source)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()

    def connect(self, device: torch.device) -> None:
        """Sends something over each link: NCCL connects GPUs, and takes memory for it, on first use.

        All ranks must call it.
        """
        token = torch.zeros(1, device=device)
        if not self._layout.is_first_stage:
            self.receive(token)
        if not self._layout.is_last_stage:
            self.send(token)

    def send(self, states: torch.Tensor) -> None:
        """Sends hidden states to the next stage, without waiting until it takes them."""
        source = self._layout.rank
        # The memory of a graph's result is overwritten by its next run.
        kept = states.to("cpu", copy=True) if source in self._over_host else states.contiguous().clone()
        sending = distributed.isend(kept, source + self._layout.tensor, group=self._groups[source])
        self._sending.append((sending, kept))
        if len(self._sending) > _SENDS_IN_FLIGHT:
            self._sending.popleft()[0].wait()

    def receive(self, states: torch.Tensor) -> torch.Tensor:
        """Receives hidden states from the stage before into a tensor of their shape. Returns it."""
        source = self._layout.rank - self._layout.tensor
        if source not in self._over_host:
            distributed.recv(states, source, group=self._groups[source])
            return states
        carried = torch.empty_like(states, device="cpu")
        distributed.recv(carried, source, group=self._groups[source])
        return states.copy_(carried)
