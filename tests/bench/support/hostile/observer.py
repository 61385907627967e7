"""A process with a tenant that asks for a few tokens, and with a probe of the gateway's event loop."""

import contextlib
import http.client
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

_PROBE_S: Final = 0.005
_ASK_S: Final = 0.3
_TIMEOUT_S: Final = 60


@dataclass
class Seen:
    """What the tenant and the probe have seen."""

    loop_ms: float = 0
    """Longest delay of the gateway's event loop, without the time in which it or the probe had no core."""
    latency_ms: list[float] = field(default_factory=list)
    """Of each of the tenant's requests."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Of the tenant's requests."""


@dataclass(frozen=True)
class Tenant:
    """Who asks whom."""

    port: int
    """The gateway's."""
    gateway_pid: int
    key: str
    model: str


class _Observer:
    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._seen = Seen()
        self._rounds = Counter[str]()
        self._changed = threading.Condition()
        for name, look, every_s in (("probe", self._probe, _PROBE_S), ("ask", self._ask, _ASK_S)):
            threading.Thread(target=self._repeat, args=(name, look, every_s), daemon=True).start()

    def take(self) -> Seen:
        """Waits for requests on their way, and returns what was seen since the last call."""
        with self._changed:
            # A request that begins now is the second to end from now on.
            wanted = {name: self._rounds[name] + 2 for name in ("probe", "ask")}
            self._changed.wait_for(lambda: all(self._rounds[name] >= wanted[name] for name in wanted))
            seen, self._seen = self._seen, Seen()
            return seen

    def _repeat(self, name: str, look: Callable[[], None], every_s: float) -> None:
        while True:
            began = time.monotonic()
            look()
            with self._changed:
                self._rounds[name] += 1
                self._changed.notify()
            time.sleep(max(0.0, began + every_s - time.monotonic()))

    def _probe(self) -> None:
        waited, began = self._without_core_s(), time.monotonic()
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._send("GET", "/live", None)
        delay_s = time.monotonic() - began - (self._without_core_s() - waited)
        with self._changed:
            self._seen.loop_ms = max(self._seen.loop_ms, 1000 * delay_s)

    def _without_core_s(self) -> float:
        """Returns how long the gateway's main thread and this one have waited for a core, so far."""
        pid = self._tenant.gateway_pid
        paths = (f"/proc/{pid}/task/{pid}/schedstat", "/proc/thread-self/schedstat")
        return sum(int(Path(path).read_text().split()[1]) for path in paths) / 1e9

    def _ask(self) -> None:
        began = time.monotonic()
        question = {"model": self._tenant.model, "prompt": "Hi there", "max_tokens": 4, "temperature": 0}
        try:
            status = str(self._send("POST", "/v1/completions", json.dumps(question)))
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        with self._changed:
            self._seen.latency_ms.append(1000 * (time.monotonic() - began))
            self._seen.statuses[status] += 1

    def _send(self, method: str, path: str, body: str | None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._tenant.port, timeout=_TIMEOUT_S)
        headers = {"authorization": f"Bearer {self._tenant.key}", "content-type": "application/json"}
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status


def _observe(tenant: Tenant, pipe: Connection) -> None:
    observer = _Observer(tenant)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(observer.take())


class Watch:
    """The process that observes."""

    def __init__(self, pipe: Connection) -> None:
        """Talks to it through `pipe`."""
        self._pipe = pipe

    def take(self) -> Seen:
        """Waits for requests on their way, and returns what was seen since the last call."""
        self._pipe.send(None)
        seen: Seen = self._pipe.recv()
        return seen


@contextlib.contextmanager
def watching(tenant: Tenant) -> Iterator[Watch]:
    """Observes from another process, whose threads the attacks do not hold up, until the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_observe, args=(tenant, theirs), daemon=True)
    process.start()
    try:
        yield Watch(ours)
    finally:
        process.terminate()
        process.join()
