"""Limits on the wait of requests for their first slot, and then for each new token.

Requests are checked periodically, so a limit costs nothing per token.
"""

import asyncio
import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from protos.errors import TimedOut
from protos.service.logs import get_logger
from scheduler_svc.engine.engine import Engine
from scheduler_svc.requests.request import Request, SequenceGroup

# A request fails at most a tenth of its limit late, and at most five seconds.
_SHARE: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0

_ClientRequest: TypeAlias = Request | SequenceGroup


class Timeout(enum.Enum):
    """The exceeded limit of a request."""

    QUEUE = "queue"
    TOKEN = "token"  # noqa: S105 - no password


class RequestTimeouts:
    """Fails requests after too long a wait.

    A client request begins with the first slot of any of its sequences, and progresses with any of them.
    """

    def __init__(self, engine: Engine, *, queue_s: float, token_s: float, clock: Callable[[], float]) -> None:
        """Starts without requests.

        Args:
            engine: holds the requests.
            queue_s: limit on the wait for the first slot, seconds; 0 for none.
            token_s: limit on the wait for each later token, seconds; 0 for none.
            clock: monotonic seconds.
        """
        self._engine = engine
        self._queue_s = queue_s
        self._token_s = token_s
        self._clock = clock
        # Of each begun request: the tokens of its live sequences, prompts included, and the clock reading of
        # the first check with that many.
        self._begun: dict[_ClientRequest, tuple[int, float]] = {}
        self._log = get_logger()
        self.num_failed: Counter[Timeout] = Counter()
        """Failed requests by exceeded limit."""

    async def run(self) -> None:
        """Checks until cancelled; returns at once without a limit."""
        limits = [limit for limit in (self._queue_s, self._token_s) if limit]
        if not limits:
            return
        pause_s = min(_LONGEST_PAUSE_S, _SHARE * min(limits))
        while True:
            before_s = self._clock()
            await asyncio.sleep(pause_s)
            # After a freeze of this process, process workers' results before failing anything.
            only_look = self._clock() - before_s > 2 * pause_s + 1
            try:
                self.check(only_look=only_look)
            except Exception:  # noqa: BLE001 - any bug
                # It must not end the checks of all requests.
                self._log.exception("timeouts_failed")

    def check(self, *, only_look: bool = False) -> None:
        """Records the progress of all requests and, unless `only_look`, fails those over a limit."""
        members: defaultdict[_ClientRequest, list[Request]] = defaultdict(list)
        for request in self._engine.live():
            members[request.group or request].append(request)
        now_s = self._clock()
        self._begun = self._progress(members, now_s)
        if only_look:
            return
        for key, sequences in members.items():
            if (progress := self._begun.get(key)) is None:
                waited_s = now_s - min(one.arrival_s for one in sequences)
                if self._queue_s and waited_s > self._queue_s:
                    message = f"the request waited more than {self._queue_s:g} s in the queue (--queue-timeout-s); send it again later"
                    self._fail(sequences[0], Timeout.QUEUE, message)
            elif self._token_s and now_s - progress[1] > self._token_s:
                message = f"the request brought no token for more than {self._token_s:g} s (--token-timeout-s); send it again"
                self._fail(sequences[0], Timeout.TOKEN, message)

    def _progress(
        self, members: dict[_ClientRequest, list[Request]], now_s: float
    ) -> dict[_ClientRequest, tuple[int, float]]:
        begun = {}
        for key, sequences in members.items():
            num_tokens = sum(len(one.token_ids) for one in sequences)
            known = self._begun.get(key)
            if known is not None:
                begun[key] = known if known[0] == num_tokens else (num_tokens, now_s)
            elif (since_s := _began_s(key, sequences)) is not None:
                begun[key] = num_tokens, since_s
        return begun

    def _fail(self, request: Request, timeout: Timeout, message: str) -> None:
        self.num_failed[timeout] += 1
        self._log.warning("request_timed_out", request=request.request_id, limit=timeout.value)
        self._engine.fail(request, TimedOut(message, retry_after_ms=5000))


def _began_s(key: _ClientRequest, sequences: Sequence[Request]) -> float | None:
    """Returns the best known time of a request's last token or first slot; None before it has begun."""
    times = []
    for one in sequences:
        delivery = one.delivery
        for time_s in (delivery.first_token_s, delivery.silent_since_s, delivery.first_scheduled_s):
            if time_s is not None:
                times.append(time_s)
                break
    if not times and isinstance(key, SequenceGroup) and key.announced:
        times = [one.delivery.accepted_s for one in sequences]
    return max(times, default=None)
