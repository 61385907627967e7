"""Writes to the device's tensors, collected on the host and copied at once."""

from collections.abc import Sequence

import torch

from worker_svc.devices.base import takes_page_locked


class StagedWrites:
    """Collects what admissions write to some tensors, so that all of a plan's travel in one copy.

    A copy costs the host and the device about the same for one word as for thousands.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        """Starts empty.

        Args:
            targets: contiguous tensors of int32 or int64 on one device.
        """
        self._targets = [target.view(-1) for target in targets]
        self._device = targets[0].device
        # By slot: each write's target, its first place in the flat target, and its words.
        self._staged: dict[int, list[tuple[int, int, Sequence[int]]]] = {}

    def add(self, slot: int, target: int, place: int, words: Sequence[int]) -> None:
        """Stages a write for a slot.

        Args:
            slot: the slot that the write is for.
            target: index of the tensor.
            place: first element of the flat tensor to write.
            words: the elements. No other staged write has the same places.
        """
        self._staged.setdefault(slot, []).append((target, place, words))

    def drop(self, slot: int) -> None:
        """Forgets what is staged for a slot."""
        self._staged.pop(slot, None)

    def copy(self) -> None:
        """Writes everything that is staged, in the order of the device's stream. Does not wait for it."""
        if not self._staged:
            return
        writes = sorted(
            (write for staged in self._staged.values() for write in staged), key=lambda one: one[0]
        )
        self._staged.clear()
        places = [torch.arange(place, place + len(words)) for _, place, words in writes]
        values = [torch.tensor(words, dtype=torch.int64) for _, _, words in writes]
        host = torch.cat([*places, *values])
        if takes_page_locked(self._device):
            # The allocator keeps the memory until the copy is done.
            host = host.pin_memory()
        on_device = host.to(self._device, non_blocking=True).view(2, -1)
        start = 0
        for number, target in enumerate(self._targets):
            end = start + sum(len(words) for index, _, words in writes if index == number)
            if end > start:
                target.index_copy_(0, on_device[0, start:end], on_device[1, start:end].to(target.dtype))
            start = end
