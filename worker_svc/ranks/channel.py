"""Messages of bytes from a rank to others, over a process group of the host."""

from typing import Any

import torch
from torch import distributed

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
