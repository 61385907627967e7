"""Limits of a key: requests at a time, and requests and tokens per minute."""

import math
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

from gateway.keys.ledger import BUCKET_SIZE, Page
from protos.errors import Overloaded

_ADMISSION: Final = "triptych.admission"

_RETRY_BUSY_MS: Final = 1000


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
        self._size, self._level, self._at = range(BUCKET_SIZE * number, BUCKET_SIZE * (number + 1))
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
