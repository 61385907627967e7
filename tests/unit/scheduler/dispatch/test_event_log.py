"""Logs of requests: what they keep, for how long, and how another client continues."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from protos.errors import Internal, InvalidArgument, NotFound, TriptychError, Unavailable
from protos.triptych.v1 import common_pb2
from scheduler_svc.convert.replay import log_to_protos
from scheduler_svc.dispatch.event_log import EventLogs, RequestLog
from scheduler_svc.requests.admission import EventLogSpec, Resumed
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import FinishReason
from tests.support.scheduler.factories import ListSink, Rig, expected_tokens, make_rig, make_submission

PROMPT = (5, 6, 7)


class Columns(ListSink):
    """Also keeps which requests' tokens come together."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[list[str]] = []

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        self.pushes.append(list(request_ids))
        super().push_tokens(request_ids, token_ids)


class Logged:
    """An engine that is stepped by hand, and its logs."""

    def __init__(self, rig: Rig | None = None, *, ttl_s: float = 60.0, max_tokens: int = 100_000) -> None:
        self.rig = rig or make_rig()
        self.logs = EventLogs(lambda: self.rig.engine, ttl_s=ttl_s, max_tokens=max_tokens)

    def submit(
        self, request_id: str = "r", log_id: str = "log", digest: str = "d", **fields: Any
    ) -> ListSink:
        sink = ListSink()
        spec = EventLogSpec(log_id, digest, 1_700_000_000)
        submission = make_submission(PROMPT, request_id=request_id, log=spec, **fields)
        self.logs.submit(submission, self.logs.sink(sink))
        return sink

    def tokens(self, log_id: str = "log", digest: str = "d") -> list[list[int]]:
        """Takes a log; returns the tokens of each sequence."""
        return [list(one.token_ids) for one in self.logs.take(log_id, digest).sequences]


def resumed(log: RequestLog) -> list[Resumed]:
    """Returns what a client that has read the log sends."""
    return [
        Resumed(number, () if one.finish_reason else tuple(one.token_ids), finished=one.finish_reason is not None)
        for number, one in enumerate(log.sequences)
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 5, 30])
async def test_a_request_goes_on_where_its_client_left_it(steps: int) -> None:
    """Reading the log ends the run; the next one brings the rest, and the log then has all of it."""
    logged = Logged()
    logged.submit(n=2, max_tokens=20)
    for _ in range(steps):
        logged.rig.step()
    log = logged.logs.take("log", "d")
    assert logged.rig.engine.num_running + logged.rig.engine.num_waiting == 0
    before = [list(one.token_ids) for one in log.sequences]
    known = resumed(log)
    rest = logged.submit("r2", n=2, max_tokens=20, resumed_sequences=known)
    logged.rig.run()
    for sequence in range(2):
        assert before[sequence] + rest.tokens_of(sequence) == expected_tokens(PROMPT, 20, sequence)
    assert logged.tokens() == [expected_tokens(PROMPT, 20, sequence) for sequence in range(2)]
    assert {one.finish_reason for one in log.sequences} == {FinishReason.LENGTH}


async def test_a_second_run_that_begins_earlier_rewinds_the_log() -> None:
    """A gateway that lost events with its connection sends fewer tokens than the log has."""
    logged = Logged()
    logged.submit(max_tokens=20)
    for _ in range(10):
        logged.rig.step()
    logged.submit("r2", max_tokens=20, resumed=expected_tokens(PROMPT, 4))
    for _ in range(4):
        logged.rig.step()
    (tokens,) = logged.tokens()
    assert 4 < len(tokens) < 10
    assert tokens == expected_tokens(PROMPT, len(tokens))


async def test_another_scheduler_begins_the_log_with_what_the_gateway_has() -> None:
    """A stream that survived its scheduler can be continued later, too."""
    logged = Logged()
    logged.submit(max_tokens=20, resumed=expected_tokens(PROMPT, 6))
    logged.rig.run()
    assert logged.tokens() == [expected_tokens(PROMPT, 20)]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1, "resumed": [5]},
        {"n": 2, "resumed_sequences": [Resumed(0, finished=True)]},
    ],
)
async def test_an_answer_that_is_known_in_part_has_no_log(fields: dict[str, Any]) -> None:
    """Log-probabilities and finished sequences were only in the lost scheduler's log."""
    logged = Logged()
    logged.submit(**fields)
    assert len(logged.logs) == 0


async def test_a_log_opens_only_to_the_same_request() -> None:
    """The id alone does not suffice, neither to read a log nor to take it over."""
    logged = Logged()
    logged.submit()
    with pytest.raises(InvalidArgument, match="same body"):
        logged.logs.take("log", "other")
    with pytest.raises(InvalidArgument, match="same body"):
        logged.submit("r2", digest="other")
    assert logged.rig.engine.find("r") is not None


async def test_a_log_ends_a_while_after_its_request() -> None:
    """Not while the request runs; and without a time there are no logs."""
    logged = Logged(ttl_s=0.02)
    logged.submit(max_tokens=4)
    await asyncio.sleep(0.04)  # the time under test
    assert len(logged.logs) == 1
    logged.rig.run()
    async with asyncio.timeout(10):
        while len(logged.logs):
            await asyncio.sleep(0.005)
    assert logged.logs.num_tokens == 0
    with pytest.raises(NotFound, match="without Last-Event-ID"):
        logged.logs.take("log", "d")
    without = Logged(ttl_s=0)
    without.submit()
    assert len(without.logs) == 0


async def test_the_oldest_logs_make_room() -> None:
    """All logs together hold no more than their bound, however many there are."""
    logged = Logged(max_tokens=400)
    for number in range(12):
        logged.submit(f"r{number}", f"log{number}", max_tokens=20)
        logged.rig.run()
        assert logged.logs.num_tokens <= 400
    kept = [number for number in range(12) if _kept(logged, f"log{number}")]
    assert kept == [8, 9, 10, 11]


def _kept(logged: Logged, log_id: str) -> bool:
    try:
        logged.logs.take(log_id, "d")
    except NotFound:
        return False
    return True


@pytest.mark.parametrize(("error", "kept"), [(Internal("poison"), False), (Unavailable("no worker"), True)])
async def test_a_request_that_cannot_succeed_leaves_no_log(error: TriptychError, kept: bool) -> None:
    """A client must not continue a request that kills workers."""
    logged = Logged()
    logged.submit(max_tokens=20)
    for _ in range(3):
        logged.rig.step()
    request = logged.rig.engine.find("r")
    assert request is not None
    request.sink.push(Event("r", error=error))
    assert _kept(logged, "log") is kept


async def test_log_probabilities_are_kept_and_rewound() -> None:
    """A continued answer reports every token's, and the prompt's, once."""
    logged = Logged()
    sink = logged.submit(max_tokens=20, logprobs=1)
    request = logged.rig.engine.find("r")
    assert request is not None
    entries = [common_pb2.TokenLogprobs(logprob=-float(n), top_token_ids=[n]) for n in range(6)]
    request.sink.push(
        Event("r", prompt_logprobs=entries[:2], first=True, num_cached_tokens=3, replica_id="r0")
    )
    for entry in entries:
        token = expected_tokens(PROMPT, len(request.token_ids) - 2)[-1]
        request.token_ids.append(token)
        request.sink.push(Event("r", (token,), (entry,)))
    weight = logged.logs.num_tokens
    log = logged.logs.take("log", "d")
    assert len(sink.events) == 8
    assert logged.logs.num_tokens == weight + 6
    assert list(log.sequences[0].logprobs) == entries
    events = [message.event for message in log_to_protos(log)]
    assert _merged(events) == (entries[:2], expected_tokens(PROMPT, 6), entries)
    assert (events[0].prompt.num_cached_tokens, events[0].prompt.HasField("seed")) == (3, True)
    assert events[0].prompt.replica_id == "r0"
    logged.submit("r2", max_tokens=20, logprobs=1, resumed=expected_tokens(PROMPT, 4))
    log = logged.logs.take("log", "d")
    assert list(log.sequences[0].logprobs) == entries[:4]


def _merged(events: Sequence[Any]) -> tuple[list[Any], list[int], list[Any]]:
    return (
        [entry for event in events for entry in event.prompt_logprobs],
        [token for event in events for token in event.token_ids],
        [entry for event in events for entry in event.logprobs],
    )


async def test_logged_and_plain_requests_of_a_client_share_the_columns_of_a_step() -> None:
    """One push for each decode step, with the tokens of both."""
    logged, columns = Logged(), Columns()
    sink = logged.logs.sink(columns)
    for request_id, spec in (("logged", EventLogSpec("log", "d", 1_700_000_000)), ("plain", None)):
        logged.logs.submit(make_submission(PROMPT, request_id=request_id, max_tokens=5, log=spec), sink)
    logged.rig.run()
    assert columns.pushes.count(["logged", "plain"]) >= 2
    assert logged.tokens() == [expected_tokens(PROMPT, 5)]
