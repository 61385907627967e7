"""Limits of a key, on a clock that the tests move, and limits that several gateways count together."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.auth import rate_limits
from gateway.auth.rate_limits import Admission, KeyLimiter, Limits, Page, SharedLedger
from protos.errors import ConfigurationRefused, Overloaded
from tests.support.foreign import Foreign, foreign_folders


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limiter_of(limits: Limits, clock: Clock | None = None) -> KeyLimiter:
    return KeyLimiter("a", limits, clock or Clock(), Page())


def headers_of(limiter: KeyLimiter) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in limiter.headers()}


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


# Another gateway: it admits as many requests as it can, says how many, and keeps them running until it dies.
OTHER = """
import sys, time
from pathlib import Path
from gateway.auth.rate_limits import SharedLedger
from gateway.auth.rate_limits import KeyLimiter, Limits
from protos.errors import Overloaded
limiter = KeyLimiter("a", Limits(*eval(sys.argv[2])), time.monotonic, SharedLedger(Path(sys.argv[1])).page("a"))
print("ready", flush=True)
sys.stdin.readline()
admitted = []
try:
    while True:
        admitted.append(limiter.admit())
except Overloaded:
    print(len(admitted), flush=True)
sys.stdin.readline()
"""


def shared_limiter(folder: Path, limits: Limits, clock: Clock) -> KeyLimiter:
    return KeyLimiter("a", limits, clock, SharedLedger(folder).page("a"))


def others(folder: Path, limits: Limits, count: int) -> tuple[list[subprocess.Popen[str]], int]:
    """Runs gateways that admit requests at the same moment; returns them, and what they have admitted."""
    command = [sys.executable, "-c", OTHER, str(folder), repr(tuple(limits))]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    return running, sum(int(each.stdout.readline()) for each in running if each.stdout is not None)


def test_gateways_count_together(tmp_path: Path) -> None:
    """A key's requests at a time, requests and tokens per minute are those of all gateways."""
    clock = Clock()
    limits = Limits(2, 4, 100)
    one, two = (shared_limiter(tmp_path, limits, clock) for _ in range(2))
    first, second = one.admit(), two.admit()
    for limiter in (one, two):
        with pytest.raises(Overloaded, match="has 2 requests under way"):
            limiter.admit()
    first.charge(60)
    second.charge(40)
    first.end(60)
    with pytest.raises(Overloaded, match="used its 100 tokens"):
        two.admit()
    second.end(0)
    assert dict(one.headers()) == dict(two.headers())
    assert dict(one.headers())[b"x-ratelimit-remaining-tokens"] == b"40"
    one.admit().end(0)
    two.admit().end(0)
    with pytest.raises(Overloaded, match="used its 4 requests"):
        one.admit()
    clock.now += 15
    two.admit().end(0)


def test_gateways_that_admit_at_the_same_moment_exceed_no_limit(tmp_path: Path) -> None:
    """Processes exclude one another; and what a killed one had under way counts no more."""
    limits = Limits(500, 10_000_000)
    processes, admitted = others(tmp_path, limits, 3)
    try:
        assert admitted == 500
        limiter = KeyLimiter("a", limits, time.monotonic, SharedLedger(tmp_path).page("a"))
        with pytest.raises(Overloaded, match="has 500 requests under way"):
            limiter.admit()
    finally:
        for each in processes:
            each.kill()
            each.communicate()
    limiter.admit()
    with pytest.raises(Overloaded):
        KeyLimiter("a", Limits(1), time.monotonic, SharedLedger(tmp_path).page("a")).admit()


def test_a_change_of_limits_counts_once(tmp_path: Path) -> None:
    """The first gateway that reads the new limit starts the bucket anew, and the others go on with it."""
    clock = Clock()
    one, two = (shared_limiter(tmp_path, Limits(None, 4), clock) for _ in range(2))
    for limiter in (one, two):
        limiter.set_limits(Limits(None, 2))
        limiter.admit().end(0)
    with pytest.raises(Overloaded):
        one.admit()


def test_a_machine_that_starts_anew_charges_no_time(tmp_path: Path) -> None:
    """Its clock begins at zero again; what was used before stays used, and is paid for from then on."""
    clock = Clock()
    shared_limiter(tmp_path, Limits(None, 60), clock).admit().end(0)
    clock.now = 0.0
    after = shared_limiter(tmp_path, Limits(None, 60), clock)
    assert dict(after.headers())[b"x-ratelimit-remaining-requests"] == b"59"
    clock.now = 1.0
    assert dict(after.headers())[b"x-ratelimit-remaining-requests"] == b"60"


def test_a_gateway_that_is_stopped_with_the_lock_holds_up_no_other(tmp_path: Path) -> None:
    one, two = (SharedLedger(tmp_path).page("a") for _ in range(2))
    limiter = KeyLimiter("a", Limits(1), Clock(), two)
    with one, ThreadPoolExecutor(1) as threads:
        threads.submit(limiter.admit).result(timeout=5)


@foreign_folders
def test_a_ledger_that_others_could_change_is_refused(foreign: Foreign, tmp_path: Path) -> None:
    SharedLedger(tmp_path / "keys")
    words = foreign(tmp_path / "keys")
    with pytest.raises(
        ConfigurationRefused, match=f"^--metrics-folder {tmp_path / 'keys'} belongs to {words}"
    ):
        SharedLedger(tmp_path / "keys")


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationRefused, match=r"^--metrics-folder: cannot count in .*choose another"):
        SharedLedger(tmp_path / "file")
    monkeypatch.setattr(rate_limits, "_NUM_SLOTS", 1)
    kept = SharedLedger(tmp_path / "used")
    with pytest.raises(ConfigurationRefused, match=r"^--metrics-folder: 1 gateways use .* already"):
        SharedLedger(tmp_path / "used")
    del kept
    SharedLedger(tmp_path / "used").page("..")
