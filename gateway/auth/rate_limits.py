"""Limits of a key: requests at a time, and requests and tokens per minute.

A key's use is a page of numbers, in this process' memory or in a file that the gateways of one machine share.
Shared, a page is a mapped file, which a process changes under a lock that it holds for microseconds. Each
process counts its running requests in a slot of its own. Its lock on the slot ends with the process, so the
requests of a crashed gateway stop counting.
"""

import contextlib
import fcntl
import math
import mmap
import os
import time
import weakref
from array import array
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from protos.errors import ConfigurationRefused, Overloaded

_ADMISSION: Final = "triptych.admission"

_RETRY_BUSY_MS: Final = 1000

# Two buckets, each with what a minute brings, its level, and the time of that level.
_BUCKET_SIZE: Final = 3
_NUM_BUCKET_VALUES: Final = 2 * _BUCKET_SIZE
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


class Limits(NamedTuple):
    """The limits of one key; ``None``: no limit."""

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Bucket:
    """A token bucket: holds at most what one minute brings. It may owe what was not known beforehand.

    Its state is in a page, so it is used inside ``with page:``.
    """

    def __init__(self, per_minute: int, page: Page, number: int, clock: Callable[[], float]) -> None:
        """Goes on from the state that the page has of a bucket of the same size; else it starts full.

        Args:
            per_minute: what a minute brings.
            page: has the bucket's state.
            number: which of the page's buckets it is.
            clock: monotonic seconds, the same in all processes that share the page.
        """
        self.per_minute = per_minute
        self._clock = clock
        self._values = page.values
        self._size, self._level, self._at = range(_BUCKET_SIZE * number, _BUCKET_SIZE * (number + 1))
        if self._values[self._size] != per_minute:
            self._values[self._size] = self._values[self._level] = float(per_minute)
            self._values[self._at] = clock()

    @property
    def level(self) -> float:
        """What may be taken now; negative if more was taken than there was."""
        now = self._clock()
        # The clock starts anew with the machine, and a shared page outlives it.
        passed = max(0.0, now - self._values[self._at])
        level = min(self.per_minute, self._values[self._level] + passed * self.per_minute / 60)
        self._values[self._level], self._values[self._at] = level, now
        return level

    def take(self, count: float) -> None:
        """Takes ``count``, whether there is enough or not; gives back if it is negative."""
        self._values[self._level] = self.level - count

    def seconds_until(self, level: float) -> float:
        """Returns the time until the bucket holds ``level``, seconds."""
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class KeyLimiter:
    """What one key has used of its limits. Only the event loop's thread may call it."""

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float], page: Page) -> None:
        """Goes on from what the key has used.

        Args:
            name: the key's.
            limits: the key's.
            clock: monotonic seconds.
            page: what the key has used.
        """
        self._name = name
        self._clock = clock
        self._page = page
        self._limits = Limits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Changes the limits. Running requests still count; what a changed limit has counted is forgotten."""
        with self._page:
            if limits.requests_per_minute != self._limits.requests_per_minute:
                self._requests = self._bucket(0, limits.requests_per_minute)
            if limits.tokens_per_minute != self._limits.tokens_per_minute:
                self._tokens = self._bucket(1, limits.tokens_per_minute)
        self._limits = limits

    def _bucket(self, number: int, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, self._page, number, self._clock)

    def admit(self) -> "Admission":
        """Takes one request in; its ``end`` must be called.

        Raises:
            Overloaded: if the key has used what it may.
        """
        limits = self._limits
        with self._page:
            if limits.concurrent_requests is not None:
                self._check_running(limits.concurrent_requests)
            if self._requests is not None and self._requests.level < 1:
                raise self._used_up("requests", limits.requests_per_minute, self._requests.seconds_until(1))
            self._check_tokens()
            if self._requests is not None:
                self._requests.take(1)
            self._page.count_running(1)
        return Admission(self)

    def _check_running(self, limit: int) -> None:
        running = self._page.num_running
        if running >= limit:
            self._page.forget_ended()
            running = self._page.num_running
        if running >= limit:
            raise Overloaded(
                f"the key '{self._name}' has {running} requests under way, as many as it may have at a"
                " time; wait until one ends",
                retry_after_ms=_RETRY_BUSY_MS,
            )

    def _check_tokens(self) -> None:
        if self._tokens is not None and self._tokens.level < 1:
            raise self._used_up("tokens", self._limits.tokens_per_minute, self._tokens.seconds_until(1))

    def _used_up(self, what: str, limit: int | None, wait_s: float) -> Overloaded:
        return Overloaded(
            f"the key '{self._name}' has used its {limit} {what} per minute; retry in {wait_s:.1f} s",
            retry_after_ms=max(1, math.ceil(wait_s * 1000)),
        )

    def charge(self, count: int) -> None:
        """Takes tokens that a request is about to use.

        Raises:
            Overloaded: if the key has none left.
        """
        if self._tokens is not None:
            with self._page:
                self._check_tokens()
                self._tokens.take(count)

    def end_request(self, tokens: int) -> None:
        """Counts a request as no longer running, and takes further tokens; gives back a negative number."""
        with self._page:
            if self._tokens is not None:
                self._tokens.take(tokens)
            self._page.count_running(-1)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers about both limits per minute."""
        found = []
        with self._page:
            for what, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
                if bucket is not None:
                    found += [
                        (b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute),
                        (b"x-ratelimit-remaining-" + what, b"%d" % max(0, math.floor(bucket.level))),
                        (b"x-ratelimit-reset-" + what, b"%.3fs" % bucket.seconds_until(bucket.per_minute)),
                    ]
        return found


class Admission:
    """One admitted request: the tokens that its key has been charged for it."""

    def __init__(self, limiter: KeyLimiter) -> None:
        """Starts without tokens."""
        self._limiter = limiter
        self._charged = 0

    def charge(self, count: int) -> None:
        """Charges tokens that the request is about to use.

        Raises:
            Overloaded: if the key has no tokens left.
        """
        self._limiter.charge(count)
        self._charged += count

    def end(self, used: int) -> None:
        """Ends the request, which has used ``used`` tokens in all."""
        self._limiter.end_request(used - self._charged)


def set_admission(scope: MutableMapping[str, Any], admission: Admission) -> None:
    """Notes the admission of the request of ``scope``, for :func:`charge`."""
    scope[_ADMISSION] = admission


def charge(scope: MutableMapping[str, Any], num_prompt_tokens: int) -> None:
    """Charges a request's prompt before it is submitted; what is generated is charged when it ends.

    Raises:
        Overloaded: if the key has no tokens left.
    """
    admission: Admission | None = scope.get(_ADMISSION)
    if admission is not None:
        admission.charge(num_prompt_tokens)
