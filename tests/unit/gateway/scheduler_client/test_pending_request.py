"""Groups of pending requests, and how a lost request is resumed."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.scheduler_client.in_flight import PendingRequest, SequenceEvent, Subscription
from protos.errors import Internal, Overloaded, TriptychError
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from tests.support.gateway.clients import EventReader


def make(size: int = 1, n: int | None = None) -> tuple[EventReader, list[tuple[int, int | None]]]:
    """Returns a group and its aborts.

    Each abort is the first sequence of its request in the group, and the aborted sequence (None: all).
    """
    aborted: list[tuple[int, int | None]] = []
    requests = [inference.GenerateRequest(request_id=f"r{index}", n=n) for index in range(size)]

    def abort(pending: PendingRequest, sequence: int | None) -> None:
        aborted.append((pending.first_index, sequence))

    return EventReader(Subscription(requests, abort)), aborted


def event(
    *tokens: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED, sequence: int = 0
) -> inference.GenerateEvent:
    return inference.GenerateEvent(token_ids=tokens, finish_reason=reason, sequence=sequence)


def put(group: EventReader, index: int, arrived: inference.GenerateEvent) -> None:
    group.subscription.push(index, SequenceEvent.from_proto(arrived))


async def test_a_failure_comes_after_earlier_events() -> None:
    """Earlier events are delivered, then the error; all requests are aborted."""
    group, aborted = make(2)
    put(group, 0, event(1))
    group.fail(Overloaded("full"))
    assert len(await group.take()) == 1
    with pytest.raises(Overloaded, match="full"):
        await group.take()
    assert len(aborted) == 2


async def test_finishing_one_leaves_the_others() -> None:
    """A stop string in one answer does not end the others, even if its own end is still on the way."""
    group, aborted = make(2)
    put(group, 0, event(1, reason=pb.FINISH_REASON_LENGTH))
    group.finish(0)
    assert aborted == [(0, 0)]
    assert len(await group.take()) == 1
    reader = asyncio.create_task(group.take())
    await asyncio.sleep(0)
    assert not reader.done()
    put(group, 1, event(reason=pb.FINISH_REASON_STOP))
    assert len(await reader) == 1


def test_a_resumed_request_continues() -> None:
    """It has another id and the tokens received so far; the rest is unchanged."""
    group, _ = make()
    pending = group.requests[0]
    pending.request.prompt_token_ids.extend([7, 8])
    pending.on_event(event(1, 2))
    pending.prepare_resume()
    pending.on_event(event(3))
    pending.prepare_resume()
    assert pending.wire_id == "r0.r2"
    assert list(pending.request.prompt_token_ids) == [7, 8]
    assert list(pending.request.resumed) == [inference.ResumedSequence(token_ids=[1, 2, 3])]


def test_a_resumed_request_repeats_what_the_scheduler_said() -> None:
    """The seed that the scheduler drew, and the workers that each sequence may have killed."""
    pending = make(n=2)[0].requests[0]
    pending.on_event(inference.GenerateEvent(prompt=inference.PromptStats(seed=2**64 - 1), token_ids=[5]))
    for sequence, losses in ((0, 1), (1, 1), (1, 2), (0, 0)):
        pending.on_event(inference.GenerateEvent(sequence=sequence, worker_losses=losses))
    for _ in range(2):
        pending.prepare_resume()
        assert pending.request.sampling.seed == 2**64 - 1
        assert list(pending.request.resumed) == [
            inference.ResumedSequence(token_ids=[5]),
            inference.ResumedSequence(sequence=1, worker_losses=2),
        ]


def test_a_resumed_request_has_an_age_once_a_scheduler_has_accepted_it() -> None:
    """A request that no scheduler has seen is a new one."""
    pending = make()[0].requests[0]
    pending.prepare_resume()
    assert not pending.request.HasField("age_ms")
    pending.accepted = True
    pending.prepare_resume()
    assert pending.request.HasField("age_ms")
    assert not pending.request.sampling.HasField("seed")


def test_a_resumed_request_describes_each_sequence() -> None:
    """One sequence has finished, one continues, one has not begun.

    The prompt's log-probabilities are not requested twice.
    """
    group, _ = make(n=3)
    pending = group.requests[0]
    pending.request.prompt_token_ids.extend([7, 8])
    pending.request.sampling.prompt_logprobs = 1
    pending.prepare_resume()
    assert pending.request.sampling.HasField("prompt_logprobs")
    prompt_logprobs = event(5, sequence=2)
    prompt_logprobs.prompt_logprobs.add(logprob=-1.0, rank=1)
    pending.on_event(prompt_logprobs)
    pending.on_event(event(6, reason=pb.FINISH_REASON_STOP))
    pending.prepare_resume()
    assert pending.request.n == 3
    assert list(pending.request.resumed) == [
        inference.ResumedSequence(sequence=0, finished=True),
        inference.ResumedSequence(sequence=2, token_ids=[5]),
    ]
    assert not pending.request.sampling.HasField("prompt_logprobs")
    assert not pending.finished
    pending.on_event(event(reason=pb.FINISH_REASON_STOP, sequence=1))
    pending.on_event(event(reason=pb.FINISH_REASON_STOP, sequence=2))
    assert pending.finished


def test_partial_prompt_logprobs_are_requested_again() -> None:
    """They arrive in parts while the prompt is computed, and a new scheduler sends all of them again."""
    pending = make()[0].requests[0]
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


async def test_tokens_wait_for_their_prompts_logprobs() -> None:
    """Another sequence may begin, and end, before the prompt's log-probabilities are complete.

    Other prompts' answers do not wait.
    """
    group = make_with_prompt_logprobs(2)
    deliver(group, 1, event(5))
    deliver(group, 0, event(), prompt_logprobs=1)
    deliver(group, 1, event(6, reason=pb.FINISH_REASON_STOP))
    deliver(group, 2, event(7), prompt_logprobs=2)
    assert [index for index, _ in await group.take()] == [2]
    reader = asyncio.create_task(group.take())
    group.requests[0].prepare_resume()
    deliver(group, 0, event(), prompt_logprobs=1)
    await asyncio.sleep(0)
    assert not reader.done()
    deliver(group, 0, event(), prompt_logprobs=1)
    taken = [(index, list(one.token_ids)) for index, one in await reader]
    assert [(index, tokens) for index, tokens in taken if tokens] == [(1, [5]), (1, [6])]
    deliver(group, 0, event(8, reason=pb.FINISH_REASON_STOP))
    assert [list(one.token_ids) for _, one in await group.take()] == [[8]]


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
    """All sequences have ended, so no more log-probabilities will come."""
    group = make_with_prompt_logprobs()
    deliver(group, 0, event(5, reason=pb.FINISH_REASON_STOP), prompt_logprobs=1)
    deliver(group, 1, event(6, reason=pb.FINISH_REASON_STOP))
    with pytest.raises(Internal, match="log-probabilities"):
        await group.take()


async def test_sequences_are_numbered_across_requests() -> None:
    """Sequences are numbered prompt by prompt; each is finished alone."""
    group, aborted = make(2, n=3)
    assert [pending.first_index for pending in group.requests] == [0, 3]
    group.finish(4)
    assert aborted == [(3, 1)]
    for index in (0, 1, 2, 3, 5):
        put(group, index, event(reason=pb.FINISH_REASON_STOP, sequence=index % 3))
    assert len(await group.take()) == 5
    assert await group.take() == []


async def test_a_receiver_that_fails_ends_its_own_requests() -> None:
    """The other requests of the step go on, and the requests that fail are aborted."""

    class Broken(EventReader):
        def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
            raise ZeroDivisionError

    aborted: list[int | None] = []
    requests = [inference.GenerateRequest(request_id="r")]
    reader = Broken(Subscription(requests, lambda _, sequence: aborted.append(sequence)))
    put(reader, 0, event(1))
    with pytest.raises(Internal, match="ZeroDivisionError"):
        await reader.take()
    assert aborted == [None]


def test_a_late_receiver_gets_everything() -> None:
    """Events and failure that came before it."""
    subscription = Subscription([inference.GenerateRequest(request_id="r")], lambda *_: None)
    subscription.push(0, 5)
    subscription.fail(Overloaded("full"))
    seen: list[object] = []

    class Recorder:
        def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
            seen.extend(events)

        def end(self, error: TriptychError) -> None:
            seen.append(error.message)

    subscription.attach(Recorder())
    assert seen == [(0, 5), "full"]
