"""Bounds on how long requests wait: for the first slot, and from then on for each new token.

The requests are looked at from time to time, so a bound costs nothing per token.
"""

import asyncio
import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from protos.errors import TimedOut
from protos.service.logs import get_logger
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.requests.request import Request, SequenceGroup

# A request fails at most a tenth of its limit late, and at most these many seconds.
_SHARE: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0

_RETRY_AFTER_MS: Final = 5000

_ClientRequest: TypeAlias = Request | SequenceGroup


class Timeout(enum.Enum):
    """The limit that a request exceeded."""

    QUEUE = "queue"
    TOKEN = "token"  # noqa: S105 - no password


@dataclass(slots=True)
class _Progress:
    """The progress of a client's request that has begun."""

    num_tokens: int
    """Tokens of its live sequences, prompts included."""
    since_s: float
    """Clock reading when a check first saw that many."""


class RequestTimeouts:
    """Fails requests that have waited too long.

    A client's request with several sequences is one request here: it has begun when one of them got a slot,
    and it makes progress when one of them does.
    """

    def __init__(self, engine: Engine, *, queue_s: float, token_s: float, clock: Callable[[], float]) -> None:
        """Starts without requests.

        Args:
            engine: has the requests.
            queue_s: seconds that a request may wait for its first slot; 0 for no limit.
            token_s: seconds that it may then go without a new token; 0 for no limit.
            clock: monotonic seconds.
        """
        self._engine = engine
        self._queue_s = queue_s
        self._token_s = token_s
        self._clock = clock
        self._begun: dict[_ClientRequest, _Progress] = {}
        self._log = get_logger()
        self.num_failed: Counter[Timeout] = Counter()
        """Requests that have failed, by the limit that they exceeded."""

    async def run(self) -> None:
        """Checks until it is cancelled; returns at once if there is no limit."""
        limits = [limit for limit in (self._queue_s, self._token_s) if limit]
        if not limits:
            return
        pause_s = min(_LONGEST_PAUSE_S, _SHARE * min(limits))
        while True:
            before_s = self._clock()
            await asyncio.sleep(pause_s)
            # After a freeze of this process, workers' results are processed before anything is judged.
            only_look = self._clock() - before_s > 2 * pause_s + 1
            try:
                self.check(only_look=only_look)
            except Exception:  # noqa: BLE001 - any bug
                # It must not end the bounds of all requests.
                self._log.exception("timeouts_failed")

    def check(self, *, only_look: bool = False) -> None:
        """Notes the progress of all requests and, unless it only looks, fails those that exceed a limit."""
        members: defaultdict[_ClientRequest, list[Request]] = defaultdict(list)
        for request in self._engine.live():
            members[request.group or request].append(request)
        now_s = self._clock()
        self._note_progress(members, now_s)
        if only_look:
            return
        for key, sequences in members.items():
            if (progress := self._begun.get(key)) is None:
                waited_s = now_s - min(one.arrival_s for one in sequences)
                if self._queue_s and waited_s > self._queue_s:
                    self._fail(sequences[0], Timeout.QUEUE, _queued_too_long(self._queue_s))
            elif self._token_s and now_s - progress.since_s > self._token_s:
                self._fail(sequences[0], Timeout.TOKEN, _silent_too_long(self._token_s))

    def _note_progress(self, members: dict[_ClientRequest, list[Request]], now_s: float) -> None:
        begun: dict[_ClientRequest, _Progress] = {}
        for key, sequences in members.items():
            num_tokens = sum(len(one.token_ids) for one in sequences)
            known = self._begun.get(key)
            if known is None:
                if (since_s := _began_s(key, sequences)) is not None:
                    begun[key] = _Progress(num_tokens, since_s)
            else:
                begun[key] = known if known.num_tokens == num_tokens else _Progress(num_tokens, now_s)
        self._begun = begun

    def _fail(self, request: Request, timeout: Timeout, error: TimedOut) -> None:
        self.num_failed[timeout] += 1
        self._log.warning("request_timed_out", request=request.request_id, limit=timeout.value)
        self._engine.fail(request, error)


def _began_s(key: _ClientRequest, sequences: Sequence[Request]) -> float | None:
    """Returns when a request got a slot or its last token, as far as is known; None if it has not begun."""
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


def _queued_too_long(limit_s: float) -> TimedOut:
    return TimedOut(
        f"the request waited more than {limit_s:g} s in the queue (--queue-timeout-s); send it again later",
        retry_after_ms=_RETRY_AFTER_MS,
    )


def _silent_too_long(limit_s: float) -> TimedOut:
    return TimedOut(
        f"the request brought no token for more than {limit_s:g} s (--token-timeout-s); send it again",
        retry_after_ms=_RETRY_AFTER_MS,
    )
