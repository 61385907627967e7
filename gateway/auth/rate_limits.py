"""Limits of a key: requests at a time, and requests and tokens per minute.

The use of a key is a page of numbers, in memory or in a mapped file shared by the gateways of one machine. A
file's lock is held for microseconds. Each process counts its running requests in a slot of its own, locked
for its lifetime, so the requests of a crashed gateway stop counting.
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
from typing import Any, Final, NamedTuple

from protos.errors import ConfigurationRefused, Overloaded
from protos.service.private_files import make_folder

_ADMISSION: Final = "triptych.admission"

_RETRY_BUSY_MS: Final = 1000

# Of each of two buckets: the tokens of a minute, the level, and the time of that level.
_BUCKET_SIZE: Final = 3
_NUM_BUCKET_VALUES: Final = 2 * _BUCKET_SIZE
# `triptych up` starts at most 64 gateways; draining gateways still hold their slots.
_NUM_SLOTS: Final = 128
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_BYTES: Final = 8 * (_NUM_BUCKET_VALUES + _NUM_SLOTS)

# A process stopped while it holds a lock must not stop the others. They then go on without it.
_LOCK_S: Final = 0.05


class Page:
    """The use of a key, in memory. Read and change its values inside ``with page:``."""

    values: "array[float] | memoryview[float]"

    def __init__(self) -> None:
        """Starts unused."""
        self.values = array("d", bytes(8 * (_NUM_BUCKET_VALUES + 1)))
        self._own = _NUM_BUCKET_VALUES

    @property
    def num_running(self) -> int:
        """Running requests of all processes."""
        return int(sum(self.values[_NUM_BUCKET_VALUES:]))

    def count_running(self, change: int) -> None:
        """Adds to this process' running requests."""
        self.values[self._own] += change

    def forget_ended(self) -> None:
        """Stops counting the requests of dead processes."""

    def __enter__(self) -> None:
        """Keeps other processes out."""

    def __exit__(self, *_: object) -> None:
        """Lets them in."""


class SharedLedger:
    """The pages of all keys, in a folder shared by the gateways of one machine."""

    def __init__(self, folder: Path) -> None:
        """Takes a slot, which is free again once ledger and pages are gone.

        Raises:
            ConfigurationRefused: if the folder cannot be used.
        """
        self._folder = folder
        # Two pages of one key would count this process' requests in the same slot.
        self._pages: weakref.WeakValueDictionary[str, Page] = weakref.WeakValueDictionary()
        try:
            make_folder(folder, "--metrics-folder", "choose another")
            self._slot = self._take_slot()
        except OSError as error:
            raise self._unusable(error) from error

    def _take_slot(self) -> int:
        for slot in range(_NUM_SLOTS):
            lock = os.open(_slot_path(self._folder, slot), _CREATE, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            weakref.finalize(self, os.close, lock)
            return slot
        raise ConfigurationRefused(
            f"--metrics-folder: {_NUM_SLOTS} gateways use {self._folder} already; choose another folder"
        )

    def page(self, name: str) -> Page:
        """Returns the page of a key."""
        found = self._pages.get(name)
        if found is None:
            try:
                found = self._pages[name] = _SharedPage(self, self._folder, name, self._slot)
            except OSError as error:
                raise self._unusable(error) from error
        return found

    def _unusable(self, error: OSError) -> ConfigurationRefused:
        return ConfigurationRefused(
            f"--metrics-folder: cannot count in {self._folder}: {error.strerror}; choose another folder"
        )


class _SharedPage(Page):
    def __init__(self, ledger: SharedLedger, folder: Path, name: str, slot: int) -> None:
        # A name may be "..", and has no slash.
        self._file = os.open(folder / f"{name}.used", _CREATE, 0o600)
        weakref.finalize(self, os.close, self._file)
        # A full disk must fail here, and not when a value is written.
        os.posix_fallocate(self._file, 0, _BYTES)
        self.values = memoryview(mmap.mmap(self._file, _BYTES)).cast("d")
        self._own = _NUM_BUCKET_VALUES + slot
        self._ledger, self._folder = ledger, folder
        with self:
            self.values[self._own] = 0.0  # left by an earlier process with this slot

    def forget_ended(self) -> None:
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
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return
                os.sched_yield()
            else:
                return

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _slot_path(folder: Path, slot: int) -> Path:
    return folder / f"slot-{slot}"


class Limits(NamedTuple):
    """The limits of a key; ``None``: no limit."""

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Bucket:
    """A token bucket of a minute, stored in a page. Its level may fall below zero.

    Use it inside ``with page:``.
    """

    def __init__(self, per_minute: int, page: Page, number: int, clock: Callable[[], float]) -> None:
        """Continues a stored bucket of the same size; otherwise starts full.

        Args:
            per_minute: the size, filled in a minute.
            page: stores the state.
            number: the bucket's place in the page.
            clock: monotonic seconds, the same in all processes.
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
        """The content; negative after an overdraft."""
        now = self._clock()
        # The clock restarts with the machine, and a shared page outlives it.
        passed = max(0.0, now - self._values[self._at])
        level = min(self.per_minute, self._values[self._level] + passed * self.per_minute / 60)
        self._values[self._level], self._values[self._at] = level, now
        return level

    def take(self, count: float) -> None:
        """Takes ``count`` at any level; gives back a negative count."""
        self._values[self._level] = self.level - count

    def seconds_until(self, level: float) -> float:
        """Returns the seconds until the bucket holds ``level``."""
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class KeyLimiter:
    """The use of a key against its limits. For the event loop's thread only."""

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float], page: Page) -> None:
        """Continues from the use in ``page``; ``clock`` returns monotonic seconds."""
        self._name = name
        self._clock = clock
        self._page = page
        self._limits = Limits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Changes the limits. Running requests still count; a changed bucket starts full."""
        with self._page:
            if limits.requests_per_minute != self._limits.requests_per_minute:
                self._requests = self._bucket(0, limits.requests_per_minute)
            if limits.tokens_per_minute != self._limits.tokens_per_minute:
                self._tokens = self._bucket(1, limits.tokens_per_minute)
        self._limits = limits

    def _bucket(self, number: int, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, self._page, number, self._clock)

    def admit(self) -> "Admission":
        """Admits a request; its ``end`` must be called.

        Raises:
            Overloaded: if the key is at a limit.
        """
        with self._page:
            if self._limits.concurrent_requests is not None:
                self._check_running(self._limits.concurrent_requests)
            for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
                self._check_level(bucket, unit)
            if self._requests is not None:
                self._requests.take(1)
            self._page.count_running(1)
        return Admission(self)

    def _check_running(self, limit: int) -> None:
        if self._page.num_running >= limit:
            self._page.forget_ended()
        if (running := self._page.num_running) >= limit:
            raise Overloaded(
                f"the key '{self._name}' has {running} requests under way, as many as it may have at a"
                " time; wait until one ends",
                retry_after_ms=_RETRY_BUSY_MS,
            )

    def _check_level(self, bucket: Bucket | None, unit: str) -> None:
        if bucket is None or bucket.level >= 1:
            return
        wait_s = bucket.seconds_until(1)
        raise Overloaded(
            f"the key '{self._name}' has used its {bucket.per_minute} {unit} per minute; retry in {wait_s:.1f} s",
            retry_after_ms=max(1, math.ceil(wait_s * 1000)),
        )

    def charge(self, count: int) -> None:
        """Takes tokens before their use.

        Raises:
            Overloaded: if none are left.
        """
        if self._tokens is not None:
            with self._page:
                self._check_level(self._tokens, "tokens")
                self._tokens.take(count)

    def end_request(self, tokens: int) -> None:
        """Ends a running request and takes further tokens; gives back a negative number."""
        with self._page:
            if self._tokens is not None:
                self._tokens.take(tokens)
            self._page.count_running(-1)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers about both limits per minute."""
        found = []
        with self._page:
            for unit, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
                if bucket is not None:
                    found += [
                        (b"x-ratelimit-limit-" + unit, b"%d" % bucket.per_minute),
                        (b"x-ratelimit-remaining-" + unit, b"%d" % max(0, math.floor(bucket.level))),
                        (b"x-ratelimit-reset-" + unit, b"%.3fs" % bucket.seconds_until(bucket.per_minute)),
                    ]
        return found


class Admission:
    """An admitted request, with the tokens charged for it."""

    def __init__(self, limiter: KeyLimiter) -> None:
        """Starts without tokens."""
        self._limiter = limiter
        self._charged = 0

    def charge(self, count: int) -> None:
        """Charges tokens before their use.

        Raises:
            Overloaded: if the key is out of tokens.
        """
        self._limiter.charge(count)
        self._charged += count

    def end(self, used: int) -> None:
        """Ends the request, which used ``used`` tokens in all."""
        self._limiter.end_request(used - self._charged)


def set_admission(scope: MutableMapping[str, Any], admission: Admission) -> None:
    """Notes the admission of the request of ``scope``, for :func:`charge`."""
    scope[_ADMISSION] = admission


def charge(scope: MutableMapping[str, Any], num_prompt_tokens: int) -> None:
    """Charges a request's prompt before submission; generated tokens are charged at its end.

    Raises:
        Overloaded: if the key is out of tokens.
    """
    admission: Admission | None = scope.get(_ADMISSION)
    if admission is not None:
        admission.charge(num_prompt_tokens)
