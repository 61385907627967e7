"""Limits of a key, on a clock that the tests move."""

import pytest

from gateway.auth.rate_limits import Admission, KeyLimiter, Limits, Page
from protos.errors import Overloaded


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limiter_of(limits: Limits, clock: Clock | None = None) -> KeyLimiter:
    return KeyLimiter("a", limits, clock or Clock(), Page())


def headers_of(limiter: KeyLimiter) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in limiter.headers()}


def test_requests_at_a_time() -> None:
    """One more than the limit is refused; one that ends makes room."""
    limiter = limiter_of(Limits(concurrent_requests=2))
    first, _ = limiter.admit(), limiter.admit()
    with pytest.raises(Overloaded, match=r"^the key 'a' has 2 requests under way") as refused:
        limiter.admit()
    assert refused.value.retry_after_ms == 1000
    first.end(0)
    limiter.admit()
    assert limiter.headers() == []


def test_requests_per_minute() -> None:
    """A minute's requests may come at once; then each comes in its turn, and the error says when."""
    clock = Clock()
    limiter = limiter_of(Limits(requests_per_minute=60), clock)
    for _ in range(60):
        limiter.admit().end(0)
    with pytest.raises(Overloaded, match=r"has used its 60 requests per minute; retry in 1\.0 s") as refused:
        limiter.admit()
    assert refused.value.retry_after_ms == 1000
    assert headers_of(limiter) == {
        "limit-requests": "60", "remaining-requests": "0", "reset-requests": "60.000s",
    }  # fmt: skip
    clock.now += 1
    limiter.admit().end(0)
    with pytest.raises(Overloaded):
        limiter.admit()


def test_tokens_per_minute() -> None:
    """The prompt is charged before the request runs, its answer when it ends; debt is paid back by time."""
    clock = Clock()
    limiter = limiter_of(Limits(tokens_per_minute=600), clock)
    first, second = limiter.admit(), limiter.admit()
    first.charge(600)
    with pytest.raises(Overloaded, match="600 tokens per minute"):
        second.charge(1)
    second.end(0)
    first.end(900)
    with pytest.raises(Overloaded) as refused:
        limiter.admit()
    assert refused.value.retry_after_ms == pytest.approx(30_100, abs=1)
    clock.now += 30.25
    limiter.admit()
    assert headers_of(limiter)["remaining-tokens"] == "2"


def test_a_refused_request_gets_its_tokens_back() -> None:
    """It ends with no tokens used."""
    limiter = limiter_of(Limits(tokens_per_minute=600))
    admission: Admission = limiter.admit()
    admission.charge(500)
    admission.end(0)
    assert headers_of(limiter)["remaining-tokens"] == "600"


def test_changed_limits_keep_what_was_used_of_the_others() -> None:
    """Only the limit that changes starts anew; running requests still count."""
    limiter = limiter_of(Limits(1, 60, 600))
    admission = limiter.admit()
    admission.charge(100)
    limiter.set_limits(Limits(1, 30, 600))
    assert headers_of(limiter)["remaining-requests"] == "30"
    assert headers_of(limiter)["remaining-tokens"] == "500"
    with pytest.raises(Overloaded):
        limiter.admit()
