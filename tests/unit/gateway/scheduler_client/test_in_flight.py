"""Requests under way: delivery, aborts, failures, and how a lost request is resumed."""

from collections.abc import Sequence

import pytest

from gateway.scheduler_client import in_flight
from gateway.scheduler_client.in_flight import (
    InFlightRequests,
    Outbox,
    PendingRequest,
    SequenceEvent,
    StartupQueue,
    Subscription,
)
from protos.errors import Internal, InvalidArgument, Overloaded, TimedOut, TriptychError, Unavailable
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from tests.support.gateway.clients import EventReader


async def test_a_request_that_no_message_holds_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer has grown so long that it cannot be sent again; the other requests of the stream can."""
    monkeypatch.setattr(in_flight, "_MAX_REQUEST_BYTES", 300)
    outbox = Outbox()
    table = InFlightRequests(outbox, StartupQueue(4, 30.0), 60.0)
    long, short = (
        EventReader(table.submit([inference.GenerateRequest(request_id=name, prompt_token_ids=[5])]))
        for name in "ab"
    )
    event = inference.GenerateEvent(request_id="a", token_ids=[70_000] * 200)
    table.deliver(inference.ConnectResponse(events=[event]))
    outbox.open()
    table.resubmit_all()
    await long.take()
    with pytest.raises(InvalidArgument, match="exceeds what one message holds"):
        await long.take()
    assert (await outbox.pop()).HasField("abort")
    assert (await outbox.pop()).generate.request_id.startswith("b")
    short.abort()


async def test_columns_reach_their_sequences() -> None:
    """A handle stands for one sequence until that ends or is aborted; other handles are skipped."""
    table = InFlightRequests(Outbox(), StartupQueue(4, 30.0), 60.0)
    group = EventReader(table.submit([inference.GenerateRequest(prompt_token_ids=[5], n=2)]))
    (pending,) = group.requests
    first = [
        inference.GenerateEvent(
            request_id=pending.wire_id, sequence=sequence, token_ids=[1], handle=7 + sequence
        )
        for sequence in (0, 1)
    ]
    table.deliver(inference.ConnectResponse(events=first))
    table.deliver(inference.ConnectResponse(handles=[8, 7, 7, 9], token_ids=[20, 10, 11, 99]))
    assert pending.received == [[1, 10, 11], [1, 20]]
    news = await group.take()
    assert [(index, list(event.token_ids)) for index, event in news] == [
        (0, [1]), (1, [1]), (1, [20]), (0, [10]), (0, [11]),
    ]  # fmt: skip
    group.finish(1)
    table.deliver(inference.ConnectResponse(handles=[8, 7], token_ids=[21, 12]))
    assert pending.received == [[1, 10, 11, 12], [1, 20]]
    table.mark_all_lost()
    table.deliver(inference.ConnectResponse(handles=[7], token_ids=[13]))
    assert pending.received[0] == [1, 10, 11, 12]
    group.abort()


async def test_columns_of_different_lengths_are_refused() -> None:
    """They cannot be told apart, so the stream must break."""
    table = InFlightRequests(Outbox(), StartupQueue(4, 30.0), 60.0)
    with pytest.raises(ValueError, match="zip"):
        table.deliver(inference.ConnectResponse(handles=[1, 2], token_ids=[3]))


async def test_a_request_that_waited_too_long_is_not_sent_again() -> None:
    """The scheduler has accepted it, but its error is for the client."""
    outbox = Outbox()
    table = InFlightRequests(outbox, StartupQueue(4, 30.0), 60.0)
    outbox.open()
    group = EventReader(table.submit([inference.GenerateRequest(request_id="a", prompt_token_ids=[5])]))
    taken = inference.GenerateEvent(request_id="a", accepted=True)
    failed = inference.GenerateEvent(request_id="a", error=TimedOut("too long").to_proto())
    table.deliver(inference.ConnectResponse(events=[taken, failed]))
    with pytest.raises(TimedOut):
        await group.take()
    assert len(table) == 0


async def test_a_resubmitted_request_says_how_long_it_has_been_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time counts from the first resubmission after its last token, and each token starts it anew."""
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    outbox = Outbox()
    table = InFlightRequests(outbox, StartupQueue(4, 30.0), 60.0)
    outbox.open()
    group = EventReader(table.submit([inference.GenerateRequest(prompt_token_ids=[5])]))
    (pending,) = group.requests
    silent_ms = []
    for waited_s, token_ids in ((5.0, []), (7.0, [9]), (11.0, []), (13.0, []), (17.0, [8]), (19.0, [])):
        now_s += waited_s
        event = inference.GenerateEvent(
            request_id=pending.wire_id, token_ids=token_ids, accepted=not token_ids
        )
        table.deliver(inference.ConnectResponse(events=[event]))
        table.resubmit_all()
        silent_ms.append(pending.request.silent_ms)
    assert silent_ms == [0, 0, 11_000, 24_000, 0, 19_000]
    group.abort()


async def test_a_gateway_that_is_behind_hands_tokens_out_together() -> None:
    """While messages wait, a receiver gets several tokens at once; afterwards each on its own again."""
    received: list[list[tuple[int, SequenceEvent | int]]] = []

    class Recorder(EventReader):
        def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
            received.append(list(events))
            super().push(events)

    table = InFlightRequests(Outbox(), StartupQueue(4, 30.0), 60.0)
    reader = Recorder(table.submit([inference.GenerateRequest(prompt_token_ids=[5])]))
    (pending,) = reader.requests
    first = inference.GenerateEvent(request_id=pending.wire_id, token_ids=[6], handle=1)
    table.deliver(inference.ConnectResponse(events=[first]))
    for token_id, behind in ((7, False), (8, True), (9, False)):
        table.deliver(inference.ConnectResponse(handles=[1], token_ids=[token_id]), more_waits=behind)
    assert received[1:] == [[(0, 7)]]
    await reader.take()
    assert [event.token_ids for _, event in await reader.take()] == [(8,), (9,)]
    table.deliver(inference.ConnectResponse(handles=[1], token_ids=[10]))
    assert received[1:] == [[(0, 7)], [(0, 8), (0, 9)], [(0, 10)]]
    reader.abort()


class FailingScheduler:
    """Takes a request each time it is sent, and fails it soon, for example because its adapter is away."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.outbox.open()
        self.table = InFlightRequests(self.outbox, StartupQueue(4, 30.0), 60.0)
        self.group = EventReader(
            self.table.submit([inference.GenerateRequest(request_id="a", prompt_token_ids=[5])])
        )
        (self.pending,) = self.group.requests

    def fail(self, *, token_id: int | None = None, taken: bool = True) -> None:
        """Fails the request, after a token or none, or refuses it; it is sent again if it may be."""
        name = self.pending.wire_id
        events = [inference.GenerateEvent(request_id=name, error=Unavailable("the disk is away").to_proto())]
        if token_id is not None:
            events.insert(0, inference.GenerateEvent(request_id=name, token_ids=[token_id]))
        if taken:
            events.insert(0, inference.GenerateEvent(request_id=name, accepted=True))
        self.table.deliver(inference.ConnectResponse(events=events))
        self.table.resubmit_all()


async def test_a_request_that_fails_again_and_again_gets_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scheduler takes it, so no wait for one ends it: its failures without a token between them do."""
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    scheduler = FailingScheduler()
    scheduler.fail()
    now_s += 60
    scheduler.fail()
    assert len(scheduler.table) == 1
    now_s += 1
    scheduler.fail()
    with pytest.raises(Unavailable, match="the disk is away"):
        await scheduler.group.take()
    assert len(scheduler.table) == 0


async def test_tokens_and_refusals_count_as_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token starts the time anew; a scheduler that has not taken the request has not failed it."""
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    scheduler = FailingScheduler()
    for token_id in range(3):
        scheduler.fail(token_id=token_id)
        now_s += 61
    scheduler.fail(taken=False)
    assert len(scheduler.table) == 1
    scheduler.group.abort()


def event(
    *tokens: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
) -> inference.GenerateEvent:
    return inference.GenerateEvent(token_ids=tokens, finish_reason=reason)


def put(group: EventReader, index: int, arrived: inference.GenerateEvent) -> None:
    group.subscription.push(index, SequenceEvent.from_proto(arrived))


async def test_a_failure_comes_after_earlier_events() -> None:
    """Earlier events are delivered, then the error; all requests are aborted."""
    aborted: list[PendingRequest] = []
    requests = [inference.GenerateRequest(request_id=name) for name in "ab"]
    group = EventReader(Subscription(requests, lambda pending, _: aborted.append(pending)))
    put(group, 0, event(1))
    group.fail(Overloaded("full"))
    assert len(await group.take()) == 1
    with pytest.raises(Overloaded, match="full"):
        await group.take()
    assert len(aborted) == 2


def test_partial_prompt_logprobs_are_requested_again() -> None:
    """They arrive in parts while the prompt is computed, and a new scheduler sends all of them again."""
    pending = EventReader(
        Subscription([inference.GenerateRequest(request_id="r")], lambda *_: None)
    ).requests[0]
    pending.request.prompt_token_ids.extend([1, 2, 3, 4])
    pending.request.sampling.prompt_logprobs = 1
    parts = [inference.GenerateEvent(prompt_logprobs=[pb.TokenLogprobs(rank=rank)]) for rank in (1, 2, 3)]
    pending.on_event(parts[0])
    pending.on_event(parts[1])
    collected = pending.prompt_logprobs
    pending.prepare_resume()
    assert (list(collected), pending.request.sampling.prompt_logprobs) == ([], 1)
    assert pending.request.sampling.HasField("prompt_logprobs")
    for part in parts:
        pending.on_event(part)
    assert [entry.rank for entry in collected] == [1, 2, 3]
    pending.prepare_resume()
    assert len(collected) == 3
    assert not pending.request.sampling.HasField("prompt_logprobs")


def make_with_prompt_logprobs(size: int = 1) -> EventReader:
    """Returns requests of two sequences that ask for the log-probabilities of three tokens."""
    sampling = pb.SamplingParams(prompt_logprobs=1)
    requests = [
        inference.GenerateRequest(request_id=f"r{index}", n=2, prompt_token_ids=[1, 2, 3], sampling=sampling)
        for index in range(size)
    ]
    return EventReader(Subscription(requests, lambda *_: None))


def deliver(
    group: EventReader, index: int, arrived: inference.GenerateEvent, prompt_logprobs: int = 0
) -> None:
    """Delivers an event as the client does, with further log-probabilities of the prompt."""
    arrived.prompt_logprobs.extend(pb.TokenLogprobs() for _ in range(prompt_logprobs))
    pending = group.requests[index // 2]
    arrived.sequence = index % 2
    pending.on_event(arrived)
    put(group, index, arrived)


async def test_a_failure_ends_the_wait_for_a_prompt() -> None:
    """Events without their prompt are dropped; complete events of another prompt are still delivered."""
    group = make_with_prompt_logprobs(2)
    deliver(group, 1, event(5))
    deliver(group, 2, event(7), prompt_logprobs=2)
    group.fail(Overloaded("full"))
    assert [index for index, _ in await group.take()] == [2]
    with pytest.raises(Overloaded, match="full"):
        await group.take()


async def test_missing_prompt_logprobs_are_a_failure() -> None:
    group = make_with_prompt_logprobs()
    deliver(group, 0, event(5, reason=pb.FINISH_REASON_STOP), prompt_logprobs=1)
    deliver(group, 1, event(6, reason=pb.FINISH_REASON_STOP))
    with pytest.raises(Internal, match="log-probabilities"):
        await group.take()


def test_a_late_receiver_gets_everything() -> None:
    subscription = Subscription([inference.GenerateRequest(request_id="r")], lambda *_: None)
    subscription.push(0, 5)
    subscription.fail(Overloaded("full"))
    seen: list[object] = []

    class Recorder:
        def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
            seen.extend(events)

        def push_token(self, index: int, token_id: int) -> None:
            seen.append((index, token_id))

        def end(self, error: TriptychError) -> None:
            seen.append(error.message)

    subscription.attach(Recorder())
    assert seen == [(0, 5), "full"]


@pytest.mark.parametrize("is_plain", [False, True])
async def test_a_receiver_that_fails_ends_its_own_requests(is_plain: bool) -> None:
    """The other requests of the step go on, and the requests that fail are aborted."""

    class Broken(EventReader):
        def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
            raise ZeroDivisionError

    aborted: list[int | None] = []
    requests = [inference.GenerateRequest(request_id="r")]
    reader = Broken(Subscription(requests, lambda _, sequence: aborted.append(sequence)))
    if is_plain:
        reader.subscription.push_token(0, 1)
    else:
        put(reader, 0, event(1))
    with pytest.raises(Internal, match="ZeroDivisionError"):
        await reader.take()
    assert aborted == [None]
