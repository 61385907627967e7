"""Communication between ranks: byte messages over the host, and hidden states between pipeline stages."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from worker_svc.ranks.layout import RankLayout

# Most messages fit into one transfer of this size, length included.
_INLINE = 1024
_LENGTH = 8


class Channel:
    """Carries messages from a rank to the other members of a process group, in order.

    A single thread at a time uses each end. Gloo returns from a send once the message is under way.
    """

    def __init__(self, group: Any, source: int) -> None:
        """Uses `group`, which must belong to this channel only.

        Args:
            group: a gloo process group that contains `source`.
            source: the global rank that sends.
        """
        self._group = group
        self._source = source
        self._frame = torch.zeros(_INLINE, dtype=torch.uint8)

    def send(self, message: bytes) -> None:
        """Sends a message. Only the source may call it.

        Raises:
            RuntimeError: if a member is lost.
        """
        head = len(message).to_bytes(_LENGTH, "little") + message[: _INLINE - _LENGTH]
        self._frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        distributed.broadcast(self._frame, self._source, group=self._group)
        if rest := message[_INLINE - _LENGTH :]:
            distributed.broadcast(
                torch.frombuffer(bytearray(rest), dtype=torch.uint8), self._source, group=self._group
            )

    def receive(self) -> bytes:
        """Waits for the next message and returns it.

        Raises:
            RuntimeError: if the source is lost.
        """
        distributed.broadcast(self._frame, self._source, group=self._group)
        frame = self._frame.numpy().tobytes()
        length = int.from_bytes(frame[:_LENGTH], "little")
        inline = frame[_LENGTH : _LENGTH + length]
        if length <= _INLINE - _LENGTH:
            return inline
        rest = torch.empty(length - len(inline), dtype=torch.uint8)
        distributed.broadcast(rest, self._source, group=self._group)
        return inline + rest.numpy().tobytes()


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
