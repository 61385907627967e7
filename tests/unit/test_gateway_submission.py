"""The mailbox of requests under way, and what a lost scheduler leaves to be done."""

import asyncio

import pytest

from gateway.submission import Live, Submission, finished_already
from protos.errors import Overloaded
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference


def make(size: int = 1) -> tuple[Submission, list[Live]]:
    aborted: list[Live] = []
    submission = Submission(size, aborted.append)
    for index in range(size):
        submission.live.append(Live(inference.GenerateRequest(request_id=f"r{index}"), submission, index))
    return submission, aborted


def event(
    *tokens: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
) -> inference.GenerateEvent:
    return inference.GenerateEvent(token_ids=tokens, finish_reason=reason)


async def test_events_that_wait_are_taken_together() -> None:
    """A slow reader gets all there is, in order."""
    submission, _ = make()
    submission.put(0, event(1))
    submission.put(0, event(2))
    assert [list(e.token_ids) for _, e in await submission.take()] == [[1], [2]]


async def test_a_reader_waits_for_the_next_event() -> None:
    """take() returns as soon as there is something."""
    submission, _ = make()
    reader = asyncio.create_task(submission.take())
    await asyncio.sleep(0)
    assert not reader.done()
    submission.put(0, event(1))
    assert len(await reader) == 1


async def test_the_end_is_empty() -> None:
    """Once all have finished, take() returns nothing, again and again."""
    submission, _ = make(2)
    submission.put(1, event(reason=pb.FINISH_REASON_STOP))
    submission.put(0, event(reason=pb.FINISH_REASON_LENGTH))
    assert len(await submission.take()) == 2
    assert await submission.take() == []
    assert await submission.take() == []


async def test_a_failure_comes_after_what_arrived_before() -> None:
    """Tokens that were there are delivered; then the error; everything is aborted."""
    submission, aborted = make(2)
    submission.put(0, event(1))
    submission.fail(Overloaded("full"))
    assert len(await submission.take()) == 1
    with pytest.raises(Overloaded, match="full"):
        await submission.take()
    assert len(aborted) == 2


async def test_aborting_drops_all() -> None:
    """Whoever stops reading stops the requests."""
    submission, aborted = make(2)
    submission.abort()
    assert [live.index for live in aborted] == [0, 1]


async def test_finishing_one_leaves_the_others() -> None:
    """A stop string in one prompt's answer does not end the rest, not even with its own end on the way."""
    submission, aborted = make(2)
    submission.put(0, event(1, reason=pb.FINISH_REASON_LENGTH))
    submission.finish(0)
    assert [live.index for live in aborted] == [0]
    assert len(await submission.take()) == 1
    reader = asyncio.create_task(submission.take())
    await asyncio.sleep(0)
    assert not reader.done()
    submission.put(1, event(reason=pb.FINISH_REASON_STOP))
    assert len(await reader) == 1


def test_a_renewed_request_continues() -> None:
    """It has another id and the tokens received so far; the rest is unchanged."""
    submission, _ = make()
    live = submission.live[0]
    live.request.prompt_token_ids.extend([7, 8])
    live.on_event([1, 2])
    live.renew()
    live.on_event([3])
    live.renew()
    assert live.wire_id == "r0.r2"
    assert list(live.request.prompt_token_ids) == [7, 8]
    assert list(live.request.resumed_token_ids) == [1, 2, 3]


@pytest.mark.parametrize(
    ("sampling", "received", "reason"),
    [
        (pb.SamplingParams(max_tokens=3), [1, 5], None),
        (pb.SamplingParams(max_tokens=3), [1, 5, 6], pb.FINISH_REASON_LENGTH),
        (pb.SamplingParams(), [1, 2], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(ignore_eos=True), [1, 2], None),
        (pb.SamplingParams(min_tokens=3), [1, 2], None),
        (pb.SamplingParams(stop_token_ids=[7]), [7], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(max_tokens=1), [2], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(), [], None),
    ],
)
def test_an_unheard_end_is_recognised(
    sampling: pb.SamplingParams, received: list[int], reason: int | None
) -> None:
    """Complete tokens are never continued after a reconnect."""
    ended = finished_already(inference.GenerateRequest(sampling=sampling), received, frozenset({2}))
    assert (ended.finish_reason if ended is not None else None) == reason
