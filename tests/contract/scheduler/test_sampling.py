"""Sampling parameters and sequences over real gRPC: delivery, results, and refusal of hostile values."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from protos.errors import Context, InvalidArgument, TriptychError
from protos.service.grpc_options import SCHEMA_REVISION
from protos.triptych.v1 import common_pb2, inference_pb2, worker_pb2
from tests.support.connect_reader import ConnectReader
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    collect,
    failure,
    generate_request,
    joined,
    num_live,
    run_scheduler,
)
from tests.support.waiting import until

PROMPT = [5, 6, 7, 8, 9, 10]
SERVED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs",
)  # fmt: skip


class RecordingWorker(FakeWorker):
    """Supports every parameter and records each admitted request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.admitted: list[worker_pb2.SlotRequest] = []
        self.messages: dict[int, worker_pb2.StepPlan] = {}

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        description = await super().Describe(request, context)
        description.sampling_fields[:] = SERVED
        return description

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        async def recorded() -> AsyncIterator[worker_pb2.StepPlan]:
            async for message in request_iterator:
                self.admitted += message.admit
                self.messages[message.step] = message
                yield message

        async for result in super().Execute(recorded(), context):
            yield result


@pytest.fixture
def worker() -> RecordingWorker:
    """A worker that supports every parameter."""
    return RecordingWorker()


class PromptLogprobsWorker(RecordingWorker):
    """Returns prompt log-probabilities with each chunk; the rank of an entry is its position."""

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        async for result in super().Execute(request_iterator, context):
            plan = self.messages[result.step]
            if plan.HasField("prefill"):
                start, slot = plan.prefill.start, plan.prefill.slot
                request = next(one for one in reversed(self.admitted) if one.slot == slot)
                end = min(start + plan.prefill.num_tokens + 1, request.num_prompt_tokens)
                entries = [
                    common_pb2.TokenLogprobs(logprob=-1.0, rank=place) for place in range(start + 1, end)
                ]
                result.outputs.add(slot=slot, token_ids=result.token_ids, prompt_logprobs=entries)
                result.ClearField("token_ids")
            yield result


def request_for(n: int, **more: object) -> inference_pb2.GenerateRequest:
    request = generate_request(PROMPT, **more)  # type: ignore[arg-type]
    request.n = n
    return request


async def test_every_parameter_reaches_the_worker_as_it_was_sent(
    scheduler: RunningScheduler, worker: RecordingWorker
) -> None:
    """Every parameter reaches the worker unchanged, and absent ones stay absent."""
    sampling = common_pb2.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=7, min_p=0.125, seed=11, max_tokens=3, min_tokens=2, stop_token_ids=[3, 4],
        ignore_eos=True, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.25,
        logit_bias={5: -100.0, 6: 1.5}, allowed_token_ids=[5, 6, 96],
        bad_words=[common_pb2.TokenSequence(token_ids=[7]), common_pb2.TokenSequence(token_ids=[8, 9])],
        logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    request = inference_pb2.GenerateRequest(prompt_token_ids=PROMPT, sampling=sampling)
    await collect(scheduler.inference.Generate(request))
    await collect(scheduler.inference.Generate(generate_request(PROMPT, temperature=0)))
    assert worker.admitted[0].sampling == sampling
    plain = worker.admitted[1].sampling
    assert not plain.HasField("repetition_penalty")
    assert (plain.min_tokens, plain.presence_penalty, len(plain.logit_bias)) == (0, 0, 0)


@pytest.mark.parametrize("n", [1, 2])
async def test_prompt_log_probabilities_arrive_once_per_request(n: int) -> None:
    """Every prompt token but the first has one entry, in order, for one and for several sequences."""
    worker, prompt = PromptLogprobsWorker(), list(range(5, 16))
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        request = generate_request(prompt, prompt_logprobs=1, max_tokens=3)
        request.n = n
        events = await collect(scheduler.inference.Generate(request))
    ranks = [entry.rank for event in events for entry in event.prompt_logprobs]
    assert ranks == list(range(1, len(prompt)))
    assert {event.sequence for event in events if event.prompt_logprobs} == {0}
    assert [event.HasField("prompt") for event in events] == [True] + [False] * (len(events) - 1)


async def test_sequences_have_their_numbers_and_share_one_seed(
    scheduler: RunningScheduler, worker: RecordingWorker
) -> None:
    """The prompt is computed once, and each sequence samples with the shared seed and its own number."""
    events = await collect(scheduler.inference.Generate(request_for(3, temperature=1)))
    assert sorted(one.sequence for one in worker.admitted) == [0, 1, 2]
    assert len({one.sampling.seed for one in worker.admitted}) == 1
    assert worker.device is not None
    assert worker.device.prefilled == len(PROMPT) - 1
    for sequence in range(3):
        tokens = [token for event in events if event.sequence == sequence for token in event.token_ids]
        assert tokens == expected_tokens(PROMPT, 8, sequence)
    assert [event.HasField("prompt") for event in events] == [True] + [False] * (len(events) - 1)
    assert events[0].prompt.num_tokens == len(PROMPT)
    assert sum(event.finish_reason != 0 for event in events) == 3


async def connect(scheduler: RunningScheduler, request: inference_pb2.GenerateRequest):  # type: ignore[no-untyped-def] # noqa: ANN201
    call = scheduler.inference.Connect()
    await call.write(inference_pb2.ConnectRequest(schema_revision=SCHEMA_REVISION, generate=request))
    return call


async def test_aborting_one_sequence_lets_the_others_finish(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """After an abort of one sequence, the stream stays open until the other sequences end."""
    call = await connect(scheduler, request_for(3, request_id="a", max_tokens=20))
    reader = ConnectReader()
    events = reader.events(await call.read())
    worker.gate.clear()
    abort = inference_pb2.AbortRequest(request_id="a", sequence=1)
    await call.write(inference_pb2.ConnectRequest(abort=abort))
    await call.done_writing()
    while not any(event.finish_reason for event in events):
        events += reader.events(await call.read())
    worker.gate.set()
    while isinstance(response := await call.read(), inference_pb2.ConnectResponse):
        events += reader.events(response)
    ends = {event.sequence: event.finish_reason for event in events if event.finish_reason}
    length, aborted = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_ABORT
    assert ends == {0: length, 1: aborted, 2: length}
    assert [t for e in events if e.sequence == 2 for t in e.token_ids] == expected_tokens(PROMPT, 20, 2)


def resumed(n: int, *sequences: inference_pb2.ResumedSequence) -> inference_pb2.GenerateRequest:
    request = request_for(n)
    request.resumed.extend(sequences)
    return request


Part = inference_pb2.ResumedSequence
HOSTILE = [
    (request_for(10**9), "n must be between 1 and 128, not 1000000000"),
    (request_for(65), "n must be at most 64 here, not 65"),
    (generate_request(PROMPT, frequency_penalty=float("nan")), "frequency_penalty must be between -2 and 2"),
    (generate_request(PROMPT, repetition_penalty=float("inf")), "repetition_penalty must be above 0 and at most 10"),
    (generate_request(PROMPT, logit_bias={97: 1.0}), "the token id 97; this model's ids end at 96"),
    (generate_request(PROMPT, logit_bias=dict.fromkeys(range(100_000), 1.0)), "logit_bias takes at most 1024"),
    (generate_request(PROMPT, allowed_token_ids=range(3_000_000)), "allowed_token_ids takes at most 524288"),
    (generate_request(PROMPT, stop_token_ids=range(3_000_000)), "stop_token_ids takes at most 256"),
    (generate_request(PROMPT, bad_words=[common_pb2.TokenSequence(token_ids=[5])] * 100_000), "bad_words takes at most 512"),
    (generate_request(PROMPT, min_tokens=9), "min_tokens=9 is more than the 8 tokens"),
    (generate_request(PROMPT, prompt_logprobs=6), "prompt_logprobs must be at most 5"),
    (resumed(128, *[Part()] * 500_000), "resumed takes at most 128 entries, got 500000"),
    (resumed(1, Part(token_ids=[97])), "the token id 97; this model's ids end at 96"),
]  # fmt: skip


async def test_hostile_parameters_are_refused_quickly_and_by_name(scheduler: RunningScheduler) -> None:
    """Each gets one line in bounded time, and a concurrent request gets its tokens."""
    began = time.perf_counter()
    await collect(scheduler.inference.Generate(generate_request(PROMPT, max_tokens=40)))
    honest = time.perf_counter() - began
    for request, text in HOSTILE:
        beside = asyncio.create_task(
            collect(scheduler.inference.Generate(generate_request(PROMPT, max_tokens=8)))
        )
        began = time.perf_counter()
        error: TriptychError = await failure(scheduler.inference.Generate(request))
        took = time.perf_counter() - began
        assert type(error) is InvalidArgument, text
        assert text in error.message
        assert "\n" not in error.message
        assert len(error.message) < 200
        # Most of the time goes into parsing three million numbers.
        assert took < 20 * honest + 1.0, (text, took, honest)
        tokens = [token for event in await beside for token in event.token_ids]
        assert tokens == expected_tokens(PROMPT, 8)


async def test_every_sequence_counts_as_a_request_in_the_load(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """A request for n sequences counts n times in the load."""
    n = 4
    worker.gate.clear()
    calls = [await connect(scheduler, request_for(n, request_id=f"r{i}")) for i in range(6)]
    async with asyncio.timeout(5):
        watch = scheduler.inference.WatchLoad(inference_pb2.WatchLoadRequest())
        async for load in watch:
            if load.num_running + load.num_waiting == 6 * n:
                break
        watch.cancel()
    for call in calls:
        call.cancel()
    worker.gate.set()
    await until(lambda: not num_live(scheduler))
