"""Which tokens each row may take, as bits, and how logits of others are taken out."""

import math
from collections.abc import Sequence

import torch


class Masks:
    """One bit a token and row, set where it is allowed; on the host, where matchers write them.

    Attributes:
        rows: int32 [rows, ceil(vocab / 32)]; in pinned memory for a device that copies from it. The last row is scratch.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates it for so many rows."""
        self._vocab_size = vocab_size
        self._device = device
        self._has_kernel = device.type == "cpu"
        shape = num_rows + 1, math.ceil(vocab_size / 32)
        pinned = device.type == "cuda"
        self.rows = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        # What of them is on its way to the device. Every step waits for the tokens it draws, and so for this, before the next one writes.
        self._leaving = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

    @property
    def scratch(self) -> int:
        """A row that no step uses."""
        return len(self.rows) - 1

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Sets what is not allowed to -inf.

        Args:
            logits: float32 [batch, vocab]; changed.
            rows: of ``logits`` and of the masks alike, ascending; the others stay as they are.
        """
        if not rows:
            return
        if self._has_kernel:
            from xgrammar import apply_token_bitmask_inplace

            apply_token_bitmask_inplace(logits, self.rows, vocab_size=self._vocab_size, indices=list(rows))
            return
        index = torch.tensor(rows)
        leaving = torch.index_select(self.rows, 0, index, out=self._leaving[: len(rows)])
        words = leaving.to(self._device, non_blocking=True)
        index = index.to(self._device, non_blocking=True)
        shifts = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed = (words[:, :, None] >> shifts) & 1
        forbidden = allowed.view(len(rows), -1)[:, : logits.shape[1]] == 0
        logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)
