"""Traces through the services, received by a real OTLP receiver from real processes."""

import asyncio
import contextlib
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from protos.errors import ConfigurationRefused
from protos.service.grpc_options import SCHEMA_REVISION, open_channel
from protos.service.server import Server
from protos.service.tracing import open_tracer
from protos.steps import StepPlan
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc, worker_pb2_grpc
from tests.support.gateway.serving import smollm2_folder
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.service import Service, running_service
from tests.support.tracing.collector import Collector, ReceivedSpan, running_collector, running_http_collector

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "x", "max_tokens": 6, "ignore_eos": True}


def process(service: str, *flags: str) -> AbstractContextManager[Service]:
    """Starts a service on a free port, which exports spans without delay."""
    return running_service(
        "-m", f"{service}.__main__", "--port", "0", *flags, environment={"OTEL_BSP_SCHEDULE_DELAY": "20"}
    )


@dataclass
class Traced:
    """Processes that export to a collector, and the worker that they use."""

    collector: Collector
    worker: FakeWorker
    http: httpx.AsyncClient
    processes: list[subprocess.Popen[str]]


def smollm2_worker() -> FakeWorker:
    folder: Path = smollm2_folder()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("tokenizer")}
    return FakeWorker(files=files, vocab_size=49_152)


@contextlib.asynccontextmanager
async def registered(worker: FakeWorker, scheduler: str) -> AsyncIterator[None]:
    """Serves a worker to a scheduler in another process."""
    server = Server(
        ("triptych.v1.Worker",), lambda it: worker_pb2_grpc.add_WorkerServicer_to_server(worker, it)
    )
    port = await server.start("127.0.0.1", 0)
    async with open_channel(scheduler) as channel:
        stream = registry_pb2_grpc.WorkerRegistryStub(channel).Register(
            registry_pb2.RegisterRequest(
                schema_revision=SCHEMA_REVISION, worker_id="w", host="127.0.0.1", port=port, replica_id="r0"
            )
        )
        try:
            async for event in stream:
                if event.state == registry_pb2.RegisterEvent.STATE_SERVING:
                    break
            yield
        finally:
            stream.cancel()
            await server.stop(grace_s=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced() -> AsyncIterator[Traced]:
    with contextlib.ExitStack() as running:
        collector = running.enter_context(running_collector())
        traces = ("--otlp-traces-endpoint", collector.endpoint)
        scheduler = running.enter_context(process("scheduler_svc", *traces, "--drain-s", "0"))
        address = f"127.0.0.1:{scheduler.line['port']}"
        gateway = running.enter_context(process("gateway", *traces, "--scheduler-address", address))
        worker = smollm2_worker()
        async with (
            registered(worker, address),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.line['port']}", timeout=20) as http,
        ):
            async with asyncio.timeout(20):
                while (await http.get("/health")).status_code != 200:
                    await asyncio.sleep(0.02)
            yield Traced(collector, worker, http, [scheduler.process, gateway.process])


async def complete(traced: Traced, flags: str = "01", **fields: object) -> httpx.Response:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
    return await traced.http.post("/v1/completions", json=BODY | fields, headers=headers)


async def has_server_span(traced: Traced, status: int) -> list[ReceivedSpan]:
    return await asyncio.to_thread(
        traced.collector.wait_for,
        lambda spans: (
            any(each.attributes.get("http.response.status_code") == status for each in spans)
            and any(each.name == "llm_request" for each in spans)
        ),
    )


async def test_a_request_is_one_trace_through_the_services(traced: Traced) -> None:
    """The client's span is above the gateway's, that above the scheduler's; the worker learns the latter."""
    assert (await complete(traced)).status_code == 200
    spans = await has_server_span(traced, 200)
    assert {span.trace_id for span in spans} == {TRACE}
    (server,) = [span for span in spans if span.service == "triptych-gateway"]
    assert (server.name, server.parent_id, server.is_server) == ("POST /v1/completions", PARENT, True)
    assert server.events == ("first_token",)
    assert server.attributes["gen_ai.usage.completion_tokens"] == 6
    assert server.attributes["gen_ai.response.finish_reasons"] == "length"
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert (request.service, request.parent_id) == ("triptych-scheduler", server.span_id)
    assert request.attributes["gen_ai.usage.completion_tokens"] == 6
    assert request.attributes["triptych.replica_id"] == "r0"
    assert (
        0
        < request.attributes["gen_ai.latency.time_to_first_token"]
        < request.attributes["gen_ai.latency.e2e"]
    )
    parts = [span for span in spans if span.parent_id == request.span_id]
    assert {span.name for span in parts} >= {"prefill_chunk", "first_token", "decode"}
    for span in parts:
        assert server.start_ns <= span.start_ns <= span.end_ns <= server.end_ns
    admitted = [each for plan in plans_of(traced.worker) for each in plan.admit]
    assert [each.traceparent.split("-")[1:3] for each in admitted] == [[TRACE, request.span_id]]


def plans_of(worker: FakeWorker) -> list[StepPlan]:
    return [worker.plans.get_nowait() for _ in range(worker.plans.qsize())]


async def test_a_refused_request_has_only_the_gateways_span(traced: Traced) -> None:
    """It has the error's code, and it is no failure of the server."""
    assert (await complete(traced, max_tokens=10_000)).status_code == 400
    spans = await has_server_span(traced, 400)
    (refused,) = [each for each in spans if each.attributes.get("http.response.status_code") == 400]
    assert refused.attributes["error.type"] == "context_length_exceeded"
    assert not refused.error


async def test_requests_that_are_not_sampled_have_no_spans(traced: Traced) -> None:
    """Neither the scheduler nor the worker hears of their trace; polls of health are not traced at all."""
    plans_of(traced.worker)
    before = len(traced.collector.spans)
    assert (await complete(traced, flags="00")).status_code == 200
    assert (await traced.http.get("/health")).status_code == 200
    assert {each.traceparent for plan in plans_of(traced.worker) for each in plan.admit} == {""}
    assert (await complete(traced, max_tokens=20_000)).status_code == 400
    spans = await asyncio.to_thread(traced.collector.wait_for, lambda spans: len(spans) > before)
    assert [each.attributes.get("http.response.status_code") for each in spans[before:]] == [400]


async def test_a_lost_collector_costs_nothing(traced: Traced) -> None:
    """Requests are answered as before, and services end in time. Runs last: the collector is gone."""
    traced.collector.stop()
    answers = await asyncio.gather(*(complete(traced) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    started = time.monotonic()
    for each in traced.processes:
        each.send_signal(signal.SIGTERM)
    for each in traced.processes:
        assert await asyncio.to_thread(each.wait, 10) == 0
    assert time.monotonic() - started < 8


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_travel_over_http(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """OpenTelemetry's variable for traces chooses the protocol, and its path is the default."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with running_http_collector() as collector:
        tracer = open_tracer(f"{collector.endpoint}{path}", "gateway")
        assert tracer is not None
        span = tracer.begin("a request", "", start_ns=1)
        assert span is not None
        span.end(2, {})
        tracer.close()
        (received,) = collector.wait_for(lambda spans: len(spans) == 1)
    assert (received.service, received.name, received.end_ns) == ("triptych-gateway", "a request", 2)


@pytest.mark.parametrize(
    ("protocol", "endpoint", "reason"),
    [
        ("", "http://127.0.0.1:4317/v1/traces", "set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"),
        ("grpc", "127.0.0.1:4317/x", "has a path, and gRPC has none; omit it"),
        ("http/protobuf", "127.0.0.1:4318", "has no http:// or https://"),
        ("http/protobuf", "grpc://127.0.0.1:4318", "has no http:// or https://"),
        ("http/json", "http://127.0.0.1:4318", "'http/json' is not supported"),
    ],
)
async def test_an_endpoint_that_does_not_fit_its_protocol_is_refused(
    monkeypatch: pytest.MonkeyPatch, protocol: str, endpoint: str, reason: str
) -> None:
    """The error says what to change; spans would otherwise be lost one batch after another."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")  # is not read, as in vLLM
    with pytest.raises(ConfigurationRefused, match=re.escape(reason)):
        open_tracer(endpoint, "gateway")
