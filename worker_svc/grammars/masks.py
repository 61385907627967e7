"""Token bitmasks: which tokens each row may take, and their application to logits."""

import math
from collections.abc import Sequence

import torch

from worker_svc.devices.host import is_host, takes_page_locked, upload


class Masks:
    """A bit per token and row, set where the token is allowed.

    Lives on the host, where matchers write it.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates `num_rows` masks for logits on `device`."""
        self._vocab_size = vocab_size
        self._device = device
        self._has_kernel = is_host(device)
        shape = num_rows + 1, math.ceil(vocab_size / 32)
        pinned = takes_page_locked(device)
        self.rows = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        """int32 [num_rows + 1, ceil(vocab / 32)]; the last row is spare.

        Pinned if the device copies from it.
        """
        # Masks being copied to the device. A step waits for its drawn tokens, and so for this copy, before
        # the next step overwrites the buffer.
        self._staging = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

    @property
    def spare_row(self) -> int:
        """Index of a row unused by steps."""
        return len(self.rows) - 1

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Sets the logits of forbidden tokens to -inf.

        Args:
            logits: float32 [batch, vocab]; modified.
            rows: ascending indices into both `logits` and the masks; other rows stay unchanged.
        """
        if not rows:
            return
        if self._has_kernel:
            from xgrammar import apply_token_bitmask_inplace

            apply_token_bitmask_inplace(logits, self.rows, vocab_size=self._vocab_size, indices=list(rows))
            return
        staged = torch.index_select(self.rows, 0, torch.tensor(rows), out=self._staging[: len(rows)])
        words = staged.to(self._device, non_blocking=True)
        index = upload(rows, self._device)
        shifts = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed = (words[:, :, None] >> shifts) & 1
        forbidden = allowed.view(len(rows), -1)[:, : logits.shape[1]] == 0
        logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)
