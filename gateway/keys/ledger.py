"""What keys have used: in this process' memory, or in files that the gateways of one machine share.

A key's page is a row of numbers. Shared, it is a mapped file, which a process changes under a lock that it
holds for microseconds. Each process counts its running requests in a slot of its own. Its lock on the slot
ends with the process, so the requests of a gateway that has crashed stop counting.
"""

import contextlib
import fcntl
import mmap
import os
import time
import weakref
from array import array
from pathlib import Path
from types import TracebackType
from typing import Final

from protos.errors import ConfigurationRefused

# Two buckets, each with what a minute brings, its level, and the time of that level.
BUCKET_SIZE: Final = 3
_NUM_BUCKET_VALUES: Final = 2 * BUCKET_SIZE
# `triptych up` starts at most 64 gateways; those that drain still have their slots.
_NUM_SLOTS: Final = 128
_BYTES: Final = 8 * (_NUM_BUCKET_VALUES + _NUM_SLOTS)

# A process that is stopped while it holds a lock must not stop the others. They then go on without it.
_LOCK_S: Final = 0.05


class Ledger:
    """The pages of all keys in this process' memory."""

    def page(self, name: str) -> "Page":
        """Returns the page of a key."""
        del name
        return Page(array("d", bytes(8 * (_NUM_BUCKET_VALUES + 1))))


class Page:
    """What one key has used. Its values are read and changed inside ``with page:``."""

    def __init__(self, values: "array[float] | memoryview[float]", slot: int = 0) -> None:
        """Keeps what a key has used in ``values``, and counts this process' requests in ``slot``."""
        self.values = values
        self._own = _NUM_BUCKET_VALUES + slot

    @property
    def num_running(self) -> int:
        """Running requests of all processes."""
        return int(sum(self.values[_NUM_BUCKET_VALUES:]))

    def count_running(self, change: int) -> None:
        """Adds to this process' running requests."""
        self.values[self._own] += change

    def forget_ended(self) -> None:
        """Stops counting the requests of processes that have ended."""

    def __enter__(self) -> None:
        """Keeps other processes out."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets them in."""


class SharedLedger(Ledger):
    """The pages of all keys in a folder that the gateways of one machine share."""

    def __init__(self, folder: Path) -> None:
        """Takes a slot.

        Raises:
            ConfigurationRefused: if the folder cannot be used.
        """
        self._folder = folder
        self._pages: dict[str, Page] = {}
        try:
            for each in (folder.parent, folder):  # the mode of parents is that of the umask
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._slot = _Slot(folder)
        except OSError as error:
            raise _unusable(folder, error) from error

    def page(self, name: str) -> Page:
        """Returns the page of a key, which is the same one for a key that leaves and comes back.

        Raises:
            ConfigurationRefused: if there can be no such file.
        """
        found = self._pages.get(name)
        if found is None:
            try:
                found = _SharedPage(self._folder, name, self._slot)
            except OSError as error:
                raise _unusable(self._folder, error) from error
            self._pages[name] = found
        return found


class _Slot:
    """A number that no other process of the folder has, while this object lives."""

    def __init__(self, folder: Path) -> None:
        for self.number in range(_NUM_SLOTS):
            lock = os.open(_slot_path(folder, self.number), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            weakref.finalize(self, os.close, lock)
            return
        raise ConfigurationRefused(
            f"--metrics-folder: {_NUM_SLOTS} gateways use {folder} already; choose another folder"
        )


class _SharedPage(Page):
    def __init__(self, folder: Path, name: str, slot: _Slot) -> None:
        # A name may be "..", and has no slash.
        self._file = os.open(folder / f"{name}.used", os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._file)
        # A full disk must fail here, and not when a value is written.
        os.posix_fallocate(self._file, 0, _BYTES)
        super().__init__(memoryview(mmap.mmap(self._file, _BYTES)).cast("d"), slot.number)
        self._folder, self._slot = folder, slot
        with self:
            self.values[self._own] = 0.0  # what a process that had the slot before has left

    def forget_ended(self) -> None:
        """Stops counting the requests of processes that have ended."""
        for index in range(_NUM_BUCKET_VALUES, len(self.values)):
            if self.values[index] and index != self._own and self._has_ended(index - _NUM_BUCKET_VALUES):
                self.values[index] = 0.0

    def _has_ended(self, slot: int) -> bool:
        try:
            lock = os.open(_slot_path(self._folder, slot), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    def __enter__(self) -> None:
        deadline = 0.0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + _LOCK_S
                if now > deadline:
                    return
                os.sched_yield()
            else:
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _slot_path(folder: Path, slot: int) -> Path:
    return folder / f"slot-{slot}"


def _unusable(folder: Path, error: OSError) -> ConfigurationRefused:
    return ConfigurationRefused(
        f"--metrics-folder: cannot count in {folder}: {error.strerror}; choose another folder"
    )
