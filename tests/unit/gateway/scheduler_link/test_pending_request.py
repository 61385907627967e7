"""The mailbox of requests under way, and what a lost scheduler leaves to be done."""

import asyncio

import pytest

from gateway.scheduler_link.pending_request import Live, Submission, finished_already
from protos.errors import Internal, Overloaded
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

GRAMMAR = pb.StructuredOutput(json_object=True)


def make(size: int = 1, n: int | None = None) -> tuple[Submission, list[tuple[int, int | None]]]:
    """With what was aborted: the request's first sequence in the submission, and which of its sequences if not all."""
    aborted: list[tuple[int, int | None]] = []
    requests = [inference.GenerateRequest(request_id=f"r{index}", n=n) for index in range(size)]

    def abort(live: Live, sequence: int | None) -> None:
        aborted.append((live.index, sequence))

    return Submission(requests, abort), aborted


def event(
    *tokens: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED, sequence: int = 0
) -> inference.GenerateEvent:
    return inference.GenerateEvent(token_ids=tokens, finish_reason=reason, sequence=sequence)


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
    assert aborted == [(0, None), (1, None)]


async def test_finishing_one_leaves_the_others() -> None:
    """A stop string in one prompt's answer does not end the rest, not even with its own end on the way."""
    submission, aborted = make(2)
    submission.put(0, event(1, reason=pb.FINISH_REASON_LENGTH))
    submission.finish(0)
    assert aborted == [(0, 0)]
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
    live.on_event(event(1, 2))
    live.renew()
    live.on_event(event(3))
    live.renew()
    assert live.wire_id == "r0.r2"
    assert list(live.request.prompt_token_ids) == [7, 8]
    assert list(live.request.resumed) == [inference.ResumedSequence(token_ids=[1, 2, 3])]


def test_a_renewed_request_says_what_is_there_of_each_sequence() -> None:
    """One has finished, one goes on, one has not begun; the prompt is not asked about twice."""
    submission, _ = make(n=3)
    live = submission.live[0]
    live.request.prompt_token_ids.extend([7, 8])
    live.request.sampling.prompt_logprobs = 1
    live.renew()
    assert live.request.sampling.HasField("prompt_logprobs")
    told = event(5, sequence=2)
    told.prompt_logprobs.add(logprob=-1.0, rank=1)
    live.on_event(told)
    live.on_event(event(6, reason=pb.FINISH_REASON_STOP))
    live.renew()
    assert live.request.n == 3
    assert list(live.request.resumed) == [
        inference.ResumedSequence(sequence=0, finished=True),
        inference.ResumedSequence(sequence=2, token_ids=[5]),
    ]
    assert not live.request.sampling.HasField("prompt_logprobs")
    assert not live.over
    live.on_event(event(reason=pb.FINISH_REASON_STOP, sequence=1))
    live.on_event(event(reason=pb.FINISH_REASON_STOP, sequence=2))
    assert live.over


def test_a_part_of_the_prompts_log_probabilities_is_asked_for_again() -> None:
    """They come in parts while the prompt is computed; whoever begins again tells all of them."""
    live = make()[0].live[0]
    live.request.prompt_token_ids.extend([1, 2, 3, 4])
    live.request.sampling.prompt_logprobs = 1
    parts = [inference.GenerateEvent(prompt_logprobs=[pb.TokenLogprobs(rank=rank)]) for rank in (1, 2, 3)]
    live.on_event(parts[0])
    live.on_event(parts[1])
    collected = live.prompt_logprobs
    live.renew()
    assert (list(collected), live.request.sampling.prompt_logprobs) == ([], 1)
    assert live.request.sampling.HasField("prompt_logprobs")
    for part in parts:
        live.on_event(part)
    assert [entry.rank for entry in collected] == [1, 2, 3]
    live.renew()
    assert len(collected) == 3
    assert not live.request.sampling.HasField("prompt_logprobs")


def make_told(size: int = 1) -> Submission:
    """Requests of two sequences that ask for the log-probabilities of three tokens."""
    sampling = pb.SamplingParams(prompt_logprobs=1)
    requests = [
        inference.GenerateRequest(request_id=f"r{index}", n=2, prompt_token_ids=[1, 2, 3], sampling=sampling)
        for index in range(size)
    ]
    return Submission(requests, lambda *_: None)


def deliver(submission: Submission, index: int, arrived: inference.GenerateEvent, told: int = 0) -> None:
    """As the client does, with ``told`` further log-probabilities of the prompt."""
    arrived.prompt_logprobs.extend(pb.TokenLogprobs() for _ in range(told))
    live = submission.live[index // 2]
    arrived.sequence = index % 2
    live.on_event(arrived)
    submission.put(index, arrived)


async def test_tokens_wait_for_what_is_told_of_their_prompt() -> None:
    """Another sequence than the one that tells may begin, and end, earlier. Other prompts' answers do not wait."""
    submission = make_told(2)
    deliver(submission, 1, event(5))
    deliver(submission, 0, event(), told=1)
    deliver(submission, 1, event(6, reason=pb.FINISH_REASON_STOP))
    deliver(submission, 2, event(7), told=2)
    assert [index for index, _ in await submission.take()] == [2]
    reader = asyncio.create_task(submission.take())
    submission.live[0].renew()
    deliver(submission, 0, event(), told=1)
    await asyncio.sleep(0)
    assert not reader.done()
    deliver(submission, 0, event(), told=1)
    taken = [(index, list(one.token_ids)) for index, one in await reader]
    assert [(index, tokens) for index, tokens in taken if tokens] == [(1, [5]), (1, [6])]
    deliver(submission, 0, event(8, reason=pb.FINISH_REASON_STOP))
    assert [list(one.token_ids) for _, one in await submission.take()] == [[8]]


async def test_who_waits_for_a_prompt_hears_of_a_failure() -> None:
    """Nothing can be told without the prompt, but nobody waits for ever; what is there of another prompt is still delivered."""
    submission = make_told(2)
    deliver(submission, 1, event(5))
    deliver(submission, 2, event(7), told=2)
    submission.fail(Overloaded("full"))
    assert [index for index, _ in await submission.take()] == [2]
    with pytest.raises(Overloaded, match="full"):
        await submission.take()


async def test_a_prompt_that_is_never_told_is_a_failure() -> None:
    """All of its sequences have ended: nothing more will come."""
    submission = make_told()
    deliver(submission, 0, event(5, reason=pb.FINISH_REASON_STOP), told=1)
    deliver(submission, 1, event(6, reason=pb.FINISH_REASON_STOP))
    with pytest.raises(Internal, match="log-probabilities"):
        await submission.take()


async def test_sequences_are_numbered_through() -> None:
    """All of one prompt's before the next one's; each is finished alone."""
    submission, aborted = make(2, n=3)
    assert [live.index for live in submission.live] == [0, 3]
    submission.finish(4)
    assert aborted == [(3, 1)]
    for index in (0, 1, 2, 3, 5):
        submission.put(index, event(reason=pb.FINISH_REASON_STOP, sequence=index % 3))
    assert len(await submission.take()) == 5
    assert await submission.take() == []


@pytest.mark.parametrize(
    ("sampling", "received", "reason"),
    [
        (pb.SamplingParams(max_tokens=3), [1, 5], None),
        (pb.SamplingParams(max_tokens=3), [1, 5, 6], pb.FINISH_REASON_LENGTH),
        (pb.SamplingParams(), [1, 2], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(ignore_eos=True), [1, 2], None),
        (pb.SamplingParams(min_tokens=3), [1, 2], None),
        (pb.SamplingParams(stop_token_ids=[7]), [7], pb.FINISH_REASON_STOP),
        # A grammar that is through ends a sequence before min_tokens, too; a client's stop token does not.
        (pb.SamplingParams(min_tokens=3, structured_output=GRAMMAR), [1, 2], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(ignore_eos=True, structured_output=GRAMMAR), [1, 2], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(min_tokens=3, structured_output=GRAMMAR, stop_token_ids=[7]), [1, 7], None),
        (pb.SamplingParams(min_tokens=2, stop_token_ids=[7]), [1, 7], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(max_tokens=1), [2], pb.FINISH_REASON_STOP),
        (pb.SamplingParams(), [], None),
    ],
)
def test_an_unheard_end_is_recognised(
    sampling: pb.SamplingParams, received: list[int], reason: int | None
) -> None:
    """Complete tokens are never continued after a reconnect."""
    ended = finished_already(inference.GenerateRequest(sampling=sampling), 3, received, frozenset({2}))
    assert ended is None or ended.sequence == 3
    assert (ended.finish_reason if ended is not None else None) == reason
