"""Limits of a key: requests at a time, and requests and tokens per minute, in this gateway process."""

import math
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

from protos.errors import Overloaded

_ADMISSION: Final = "triptych.admission"

_RETRY_BUSY_MS: Final = 1000


class Limits(NamedTuple):
    """The limits of one key; ``None``: no limit."""

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Bucket:
    """A token bucket: holds at most what one minute brings. It may owe what was not known beforehand."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """Starts full.

        Args:
            per_minute: what a minute brings.
            clock: monotonic seconds.
        """
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What may be taken now; negative if more was taken than there was."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, count: float) -> None:
        """Takes ``count``, whether there is enough or not; gives back if it is negative."""
        self._level = self.level - count

    def seconds_until(self, level: float) -> float:
        """Returns the time until the bucket holds ``level``, seconds."""
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class KeyLimiter:
    """What one key has used of its limits."""

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float]) -> None:
        """Starts with nothing used.

        Args:
            name: the key's.
            limits: the key's.
            clock: monotonic seconds.
        """
        self._name = name
        self._clock = clock
        self._running = 0
        self._limits = Limits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Changes the limits. Running requests still count; what a changed limit has counted is forgotten."""
        if limits.requests_per_minute != self._limits.requests_per_minute:
            self._requests = self._bucket(limits.requests_per_minute)
        if limits.tokens_per_minute != self._limits.tokens_per_minute:
            self._tokens = self._bucket(limits.tokens_per_minute)
        self._limits = limits

    def _bucket(self, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, self._clock)

    def admit(self) -> "Admission":
        """Takes one request in; its ``end`` must be called.

        Raises:
            Overloaded: if the key has used what it may.
        """
        limits = self._limits
        if limits.concurrent_requests is not None and self._running >= limits.concurrent_requests:
            raise Overloaded(
                f"the key '{self._name}' has {self._running} requests under way, as many as it may have at a"
                " time; wait until one ends",
                retry_after_ms=_RETRY_BUSY_MS,
            )
        if self._requests is not None and self._requests.level < 1:
            raise self._used_up("requests", limits.requests_per_minute, self._requests.seconds_until(1))
        self.check_tokens()
        if self._requests is not None:
            self._requests.take(1)
        self._running += 1
        return Admission(self)

    def check_tokens(self) -> None:
        """Refuses further tokens once a minute's tokens are used.

        Raises:
            Overloaded: if they are.
        """
        if self._tokens is not None and self._tokens.level < 1:
            raise self._used_up("tokens", self._limits.tokens_per_minute, self._tokens.seconds_until(1))

    def _used_up(self, what: str, limit: int | None, wait_s: float) -> Overloaded:
        return Overloaded(
            f"the key '{self._name}' has used its {limit} {what} per minute; retry in {wait_s:.1f} s",
            retry_after_ms=max(1, math.ceil(wait_s * 1000)),
        )

    def take_tokens(self, count: int) -> None:
        """Counts tokens; gives them back if ``count`` is negative."""
        if self._tokens is not None:
            self._tokens.take(count)

    def end_request(self) -> None:
        """Counts a request as no longer running."""
        self._running -= 1

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers about both limits per minute."""
        found = []
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
        self._limiter.check_tokens()
        self._limiter.take_tokens(count)
        self._charged += count

    def end(self, used: int) -> None:
        """Ends the request, which has used ``used`` tokens in all."""
        self._limiter.take_tokens(used - self._charged)
        self._limiter.end_request()


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
