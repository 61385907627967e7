"""The Inference service over real gRPC, with a simulated worker."""

import asyncio
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from protos.errors import (
    Aborted,
    ContextExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    Unsupported,
    from_proto,
)
from protos.service.grpc_options import ACCEPTED_HEADER, SCHEMA_REVISION
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.settings import Settings
from tests.support.connect_reader import ConnectReader
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_pool_worker import FakePoolWorker, pool_request
from tests.support.scheduler.fake_worker import FILES, FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    joined,
    num_live,
    run_scheduler,
    tokens_of,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract


async def test_generate_streams_each_token_and_ends_with_a_reason(scheduler: RunningScheduler) -> None:
    """The first event has the prompt statistics, the last one the finish reason."""
    events = [event async for event in scheduler.inference.Generate(generate_request(request_id="mine"))]
    assert [token for event in events for token in event.token_ids] == expected_tokens([5, 6, 7], 8)
    assert {event.request_id for event in events} == {"mine"}
    assert events[0].prompt.num_tokens == 3
    assert not events[1].HasField("prompt")
    assert [event.finish_reason for event in events[:-1]] == [common_pb2.FINISH_REASON_UNSPECIFIED] * (
        len(events) - 1
    )
    assert events[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH


def hello(**fields: Any) -> inference_pb2.ConnectRequest:
    """Returns the first message of a stream, with a request."""
    return inference_pb2.ConnectRequest(schema_revision=SCHEMA_REVISION, generate=generate_request(**fields))


async def test_connect_multiplexes_and_keeps_faults_inline(scheduler: RunningScheduler) -> None:
    """On Connect, a refused request gets an error event, and the other requests and the stream continue."""
    messages = [
        hello(request_id="a"),
        inference_pb2.ConnectRequest(generate=generate_request([500], request_id="bad")),
        inference_pb2.ConnectRequest(generate=generate_request([9], request_id="b")),
    ]
    received: dict[str, list[int]] = {}
    errors = {}
    reader = ConnectReader()
    async for response in scheduler.inference.Connect(iter(messages)):
        for event in reader.events(response):
            received.setdefault(event.request_id, []).extend(event.token_ids)
            if event.HasField("error"):
                errors[event.request_id] = from_proto(event.error)
    assert received["a"] == expected_tokens([5, 6, 7], 8)
    assert received["b"] == expected_tokens([9], 8)
    assert list(errors) == ["bad"]
    assert isinstance(errors["bad"], InvalidArgument)


async def first_events(
    call: "grpc.aio.StreamStreamCall[inference_pb2.ConnectRequest, inference_pb2.ConnectResponse]", count: int
) -> list[inference_pb2.GenerateEvent]:
    """Returns the first events of a stream."""
    events: list[inference_pb2.GenerateEvent] = []
    while len(events) < count:
        response = await call.read()
        assert isinstance(response, inference_pb2.ConnectResponse)
        events += response.events
    return events


async def test_connect_aborts_by_id(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """An abort message on the stream ends its request with ABORT."""
    worker.gate.clear()
    call = scheduler.inference.Connect()
    await call.write(hello(request_id="a"))
    await call.write(inference_pb2.ConnectRequest(abort=inference_pb2.AbortRequest(request_id="a")))
    taken, aborted = await first_events(call, 2)
    assert taken == inference_pb2.GenerateEvent(request_id="a", accepted=True)
    assert aborted.finish_reason == common_pb2.FINISH_REASON_ABORT
    call.cancel()


async def test_an_accepted_stream_has_its_header_before_any_answer(scheduler: RunningScheduler) -> None:
    """A gateway must not send requests to a scheduler that is about to refuse it."""
    call = scheduler.inference.Connect()
    await call.write(inference_pb2.ConnectRequest(schema_revision=SCHEMA_REVISION))
    assert ACCEPTED_HEADER in tuple(await call.initial_metadata())
    call.cancel()


async def test_another_schema_revision_is_refused_at_connect(scheduler: RunningScheduler) -> None:
    """Connect ends with a schema mismatch before any request runs."""
    message = inference_pb2.ConnectRequest(schema_revision=99, generate=generate_request())
    error = await failure(scheduler.inference.Connect(iter([message])))
    assert isinstance(error, SchemaMismatch)
    assert "99" in error.message


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_the_end_of_a_call_and_an_abort_both_free_the_request(
    scheduler: RunningScheduler, worker: FakeWorker, how: str
) -> None:
    """A cancelled call and an Abort both free slot and blocks; a second Abort finds nothing."""
    call = scheduler.inference.Generate(generate_request(request_id="x", max_tokens=60))
    await call.read()
    if how == "cancel":
        call.cancel()
    else:
        answer = await scheduler.inference.Abort(inference_pb2.AbortRequest(request_id="x"))
        assert answer.found
        last = None
        while isinstance(event := await call.read(), inference_pb2.GenerateEvent):
            last = event
        assert last is not None
        assert last.finish_reason == common_pb2.FINISH_REASON_ABORT
    await until(lambda: not num_live(scheduler))
    assert not (await scheduler.inference.Abort(inference_pb2.AbortRequest(request_id="x"))).found
    load = await scheduler.inference.GetLoad(inference_pb2.GetLoadRequest())
    assert (load.num_running, load.kv_usage) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (inference_pb2.GenerateRequest(), InvalidArgument, "prompt_token_ids is empty"),
        (generate_request(temperature=-1), InvalidArgument, "temperature must be between 0 and 100, not -1"),
        (generate_request(top_k=5), Unsupported, "top_k is not supported"),
        (generate_request(logprobs=1), Unsupported, "logprobs is not supported"),
        (generate_request([96] * 64), ContextExceeded, "64 tokens"),
        (inference_pb2.GenerateRequest(prompt_token_ids=[5], lora_name="l"), NotFound, "is not served here"),
        (
            inference_pb2.GenerateRequest(prompt_token_ids=[5], model="other"),
            NotFound,
            "'other' is not served here",
        ),
    ],
)
async def test_a_bad_request_gets_a_typed_error_that_names_what_to_change(
    scheduler: RunningScheduler,
    request_: inference_pb2.GenerateRequest,
    error: type[TriptychError],
    text: str,
) -> None:
    """A bad request ends with a typed error that names the parameter."""
    caught = await failure(scheduler.inference.Generate(request_))
    assert type(caught) is error
    assert text in caught.message


async def test_neutral_parameters_need_no_support_by_the_worker(
    scheduler: RunningScheduler,
) -> None:
    """Parameters at their neutral values are accepted by a worker that does not support them."""
    request = generate_request(repetition_penalty=1.0, top_k=0, presence_penalty=0.0)
    assert await tokens_of(scheduler, request) == expected_tokens([5, 6, 7], 8)


async def test_the_model_and_its_files_arrive_as_the_worker_sent_them() -> None:
    """GetModel returns the deployment's name and context and the worker's other facts.

    Files arrive byte for byte.
    """
    settings = Settings(served_model_name=("demo", "other"), max_model_len=32)
    async with run_scheduler(settings) as scheduler, joined(scheduler, FakeWorker()):
        info = await scheduler.inference.GetModel(inference_pb2.GetModelRequest())
        files: dict[str, bytes] = {}
        async for chunk in scheduler.inference.GetTokenizer(inference_pb2.GetTokenizerRequest()):
            files[chunk.name] = files.get(chunk.name, b"") + chunk.data
        by_alias = inference_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7], model="other")
        by_alias.sampling.max_tokens = 8
        assert await tokens_of(scheduler, by_alias) == expected_tokens([5, 6, 7], 8)
    assert list(info.aliases) == ["other"]
    assert (info.served_name, info.max_model_len, info.source, info.vocab_size) == (
        "demo",
        32,
        "simulated",
        97,
    )
    assert len(info.tokenizer_sha256) == 64
    assert files == FILES


async def test_before_a_worker_is_ready_calls_are_unavailable_and_health_says_so() -> None:
    """Calls are UNAVAILABLE until a worker is ready, and health follows the worker."""
    async with run_scheduler() as scheduler:
        assert isinstance(
            await failure(scheduler.inference.GetModel(inference_pb2.GetModelRequest())), Unavailable
        )
        error = await failure(scheduler.inference.Generate(generate_request()))
        assert isinstance(error, Unavailable)
        assert error.retry_after_ms > 0
        async with joined(scheduler, FakeWorker()):
            assert await scheduler.serving.get() is True
        assert await scheduler.serving.get() is False


async def test_health_and_reflection_are_served() -> None:
    """The server offers the standard health and reflection services."""
    async with run_scheduler() as scheduler:
        health: Any = health_pb2_grpc.HealthStub(scheduler.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="triptych.v1.Inference"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(cast("grpc.Channel", scheduler.channel))
        messages: Any = reflection_pb2
        request = messages.ServerReflectionRequest(list_services="")
        names = [
            service.name
            async for response in reflection.ServerReflectionInfo(iter([request]))
            for service in response.list_services_response.service
        ]
    assert {"triptych.v1.Inference", "triptych.v1.WorkerRegistry", "grpc.health.v1.Health"} <= set(names)


async def test_a_full_queue_is_overloaded_with_a_time_to_retry() -> None:
    """A full queue refuses requests with a retryable error and a delay."""
    worker = FakeWorker()
    async with (
        run_scheduler(Settings(max_num_seqs=1, max_waiting_requests=1)) as scheduler,
        joined(scheduler, worker),
    ):
        worker.gate.clear()
        calls = [scheduler.inference.Generate(generate_request([3 + i])) for i in range(4)]
        await until(lambda: scheduler.engine.waiting and scheduler.engine.num_running)
        error = await failure(scheduler.inference.Generate(generate_request([50])))
        for call in calls:
            call.cancel()
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms > 0


def draining(scheduler: RunningScheduler, timeout_s: float = 20.0) -> "asyncio.Task[None]":
    """Starts a drain."""
    return asyncio.create_task(scheduler.servicer.drain(timeout_s))


async def test_while_draining_direct_clients_are_refused_and_their_running_requests_finish(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """The drain ends with the last of them."""
    worker.gate.clear()
    running = asyncio.create_task(tokens_of(scheduler, generate_request()))
    await until(lambda: scheduler.engine.num_running)
    drain = draining(scheduler)
    assert isinstance(await failure(scheduler.inference.Generate(generate_request())), Unavailable)
    assert not drain.done()
    worker.gate.set()
    await drain
    assert await running == expected_tokens([5, 6, 7], 8)


async def test_a_draining_scheduler_ends_the_streams_of_gateways_at_once(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """The stream's error says that its requests can go on elsewhere; a new stream ends at once, too."""
    worker.gate.clear()
    call = scheduler.inference.Connect()
    await call.write(hello())
    await until(lambda: scheduler.engine.num_running)
    await draining(scheduler)
    for stream in (call, scheduler.inference.Connect()):
        error = await failure(stream)
        assert isinstance(error, Unavailable)
        assert "shutting down" in error.message
    await until(lambda: not num_live(scheduler))


async def test_streams_of_gateways_serve_while_a_direct_call_is_drained(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """They would find no worker elsewhere. When the direct call has ended, they are handed over."""
    worker.gate.clear()
    direct = asyncio.create_task(tokens_of(scheduler, generate_request(max_tokens=40)))
    call = scheduler.inference.Connect()
    await call.write(hello(request_id="before", max_tokens=4))
    await until(lambda: scheduler.engine.num_running == 2)
    worker.hold_at_step = 30
    drain = draining(scheduler)
    await call.write(hello(request_id="during", max_tokens=4))
    await until(lambda: num_live(scheduler) == 3)
    worker.gate.set()
    reader, received = ConnectReader(), dict[str, list[int]]()
    while sum(map(len, received.values())) < 8:
        response = await call.read()
        assert isinstance(response, inference_pb2.ConnectResponse)
        for event in reader.events(response):
            received.setdefault(event.request_id, []).extend(event.token_ids)
    assert set(received) == {"before", "during"}
    await worker.holds.wait()  # the worker holds
    assert not drain.done()
    worker.gate.set()
    await drain
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await call.read()
    assert await direct == expected_tokens([5, 6, 7], 40)


@pytest.mark.parametrize("how", ["time", "hurry"])
async def test_a_drain_ends_direct_calls_with_a_typed_error(
    scheduler: RunningScheduler, worker: FakeWorker, how: str
) -> None:
    """After the time given for it, or as soon as somebody is in a hurry."""
    worker.gate.clear()
    running = asyncio.create_task(failure(scheduler.inference.Generate(generate_request())))
    await until(lambda: scheduler.engine.num_running)
    drain = draining(scheduler, 0.01 if how == "time" else 60.0)
    if how == "hurry":
        scheduler.servicer.hurry()
    await drain
    error = await running
    assert isinstance(error, Unavailable)
    assert "shutting down" in error.message


async def test_watch_load_reports_changes(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """WatchLoad sends the idle load first, then the load with the running request."""
    watch = scheduler.inference.WatchLoad(inference_pb2.WatchLoadRequest())
    first = await watch.read()
    assert isinstance(first, inference_pb2.Load)
    assert first.replicas[0].state == inference_pb2.REPLICA_STATE_READY
    worker.gate.clear()
    call = scheduler.inference.Generate(generate_request())
    second = await watch.read()
    assert isinstance(second, inference_pb2.Load)
    assert second.num_running + second.num_waiting == 1
    call.cancel()
    watch.cancel()


async def test_a_deadline_ends_the_request(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """The client's deadline frees the slot as an abort does."""
    worker.gate.clear()
    error = await failure(scheduler.inference.Generate(generate_request(), timeout=0.1))
    worker.gate.set()
    assert isinstance(error, Unavailable | Aborted)
    await until(lambda: not num_live(scheduler))


async def test_a_refused_duplicate_does_not_orphan_the_live_request(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """The end of the stream aborts a live request even after its duplicate was refused."""
    worker.gate.clear()
    call = scheduler.inference.Connect()
    for _ in range(2):
        await call.write(hello(request_id="twin"))
    taken, refused = await first_events(call, 2)
    assert taken.accepted
    assert "in use" in refused.error.message
    assert scheduler.engine.find("twin") is not None
    call.cancel()
    worker.gate.set()
    await until(lambda: not num_live(scheduler))


async def test_services_are_tested_on_uvloop() -> None:
    """The event loop of these tests is the one that the services run on."""
    assert type(asyncio.get_running_loop()).__module__ == "uvloop"


Labels = frozenset[tuple[str, str]]


async def scrape(scheduler: RunningScheduler) -> dict[tuple[str, Labels], float]:
    """Returns all samples; asserts that family names are unique, as Prometheus requires."""
    answer = await scheduler.inference.GetMetrics(inference_pb2.GetMetricsRequest())
    assert answer.content_type == CONTENT_TYPE_LATEST
    families = list(text_string_to_metric_families(answer.text.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_requests_without_an_answer_are_counted_by_their_end() -> None:
    """Refused and aborted requests of direct clients count, and those that are served do not."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker()):
        await failure(scheduler.inference.Generate(generate_request([96, 97])))
        call = scheduler.inference.Generate(generate_request(max_tokens=50))
        await anext(aiter(call))
        call.cancel()
        await tokens_of(scheduler, generate_request())
        await until(lambda: not scheduler.engine.live())
        samples = await scrape(scheduler)
    found = {tuple(sorted(labels)): value for (name, labels), value in samples.items() if "unserved" in name}
    assert found == {
        (("code", "invalid_argument"), ("outcome", "refused")): 1,
        (("code", "aborted"), ("outcome", "aborted")): 1,
    }


async def test_batches_of_a_pooling_model_are_counted_by_shape() -> None:
    """Rows, tokens and padding of pooling batches are counted by shape and outlive the replica."""
    settings = Settings(pool_batch_sizes=(2,), pool_prompt_lens=(8,))
    async with run_scheduler(settings) as scheduler:
        async with joined(scheduler, FakePoolWorker(), "r0"):
            await scheduler.inference.Pool(pool_request([5, 6, 7]))
            here = await scrape(scheduler)
        await until(lambda: not scheduler.deployment.load().replicas)
        away = await scrape(scheduler)
    shape = ("shape", "2x8")
    for samples in (here, away):
        counts = {name: value for (name, labels), value in samples.items() if shape in labels}
        assert counts == {
            "triptych:pool_batches_total": 1,
            "triptych:pool_rows_total": 1,
            "triptych:pool_padding_rows_total": 1,
            "triptych:pool_tokens_total": 3,
            "triptych:pool_padding_tokens_total": 13,
        }
    ready = ("triptych:replicas", frozenset({("state", "ready")}))
    assert (here[ready], away[ready]) == (1, 0)
