"""The worker's gRPC service on a real server, with a fake worker behind it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from structlog.testing import capture_logs

from protos.errors import (
    ConfigurationRefused,
    Internal,
    TriptychError,
    Unavailable,
    Unsupported,
    from_rpc_error,
)
from protos.service.grpc_options import open_channel
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.waiting import until
from tests.support.worker.fake_worker import FakeWorker
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.servicer import WorkerServicer
from worker_svc.api.watchdog import FailedSteps, WorkerFailed
from worker_svc.execution.worker import Worker
from worker_svc.lora.store import HostAdapter

pytestmark = pytest.mark.contract

SIZES = worker_pb2.ConfigureRequest(
    max_model_len=32, max_num_seqs=1, chunk=8, block_size=8, decode_buckets=[1], num_blocks=[5]
)


@dataclass
class Reports:
    """What the service said about the worker."""

    configured: list[bool] = field(default_factory=list)
    failures: list[WorkerFailed] = field(default_factory=list)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
async def servicer(worker: FakeWorker, reports: Reports) -> AsyncIterator[WorkerServicer]:
    """The service."""
    thread = ModelThread()

    async def on_configured(configured: bool) -> None:
        reports.configured.append(configured)

    servicer = WorkerServicer(
        cast("Worker", worker),
        thread,
        prepared=thread.submit(lambda: None),
        worker_id="w",
        model="m",
        on_configured=on_configured,
        failed_steps=FailedSteps(3, reports.failures.append),
    )
    yield servicer
    await thread.close(1)
    servicer.close()


@pytest.fixture
async def stub(servicer: WorkerServicer) -> AsyncIterator[Any]:
    """A client of the service."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)
    await server.stop(0)


async def configure(
    stub: Any, request: worker_pb2.ConfigureRequest = SIZES
) -> list[worker_pb2.ConfigureEvent]:
    return [event async for event in stub.Configure(request)]


def other_sizes() -> worker_pb2.ConfigureRequest:
    """A request for another configuration than `SIZES`."""
    other = worker_pb2.ConfigureRequest()
    other.CopyFrom(SIZES)
    other.max_model_len = 64
    return other


async def refusal(call: Any) -> TriptychError:
    """The typed error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def decode(step: int) -> worker_pb2.StepPlan:
    return worker_pb2.StepPlan(step=step, release=[0], decode=worker_pb2.Decode(slots=[0], bucket=1))


class Hanging:
    """Adapters on a disk that does not answer, and one on another disk."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.answers = threading.Event()

    def load(self, adapter_id: int, name: str, source: str, revision: str) -> HostAdapter:
        if source == "/fast":
            return HostAdapter(name, source, 8, "d", {}, 0)
        self.begun.release()
        self.answers.wait()
        raise Internal("the disk is gone")

    async def wait_for_reads(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.begun.acquire, timeout=20)


@pytest.fixture
def adapters(worker: FakeWorker, tmp_path: Path) -> Iterator[Hanging]:
    """Adapters of the worker. No thread outlives the test, however it ends."""
    (tmp_path / "tokenizer.json").write_text("{}")
    hanging = Hanging()
    vars(worker).update(adapters=hanging, folder=tmp_path)
    yield hanging
    hanging.answers.set()


def load_request(adapter_id: int, source: str) -> worker_pb2.LoadAdapterRequest:
    return worker_pb2.LoadAdapterRequest(adapter_id=adapter_id, name="sql", source=source)


async def test_adapters_that_hang_hold_no_other_call_up(stub: Any, adapters: Hanging) -> None:
    """Calls that need threads of the event loop still get one."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    loads = [
        asyncio.ensure_future(stub.LoadAdapter(load_request(number, f"/slow/{number}")))
        for number in range(4)
    ]
    async with asyncio.timeout(20):
        await adapters.wait_for_reads(4)
        names = [chunk.name async for chunk in stub.GetModelFiles(worker_pb2.GetModelFilesRequest())]
    assert names == ["tokenizer.json"]
    adapters.answers.set()
    assert [str(await refusal(load)) for load in loads] == ["the disk is gone"] * 4


class Loading:
    """Adapters that are trained on the base models that their names say; each takes the place of another."""

    def load(self, adapter_id: int, name: str, source: str, revision: str) -> HostAdapter:
        return HostAdapter(name, source, 8, "d", {}, 0, base_model=name)


async def test_an_adapter_of_another_base_is_served_with_one_warning(stub: Any, worker: FakeWorker) -> None:
    vars(worker).update(adapters=Loading())
    with capture_logs() as logs:
        for name in ("org/m", "/models/M", "org/other", "org/other"):
            request = worker_pb2.LoadAdapterRequest(adapter_id=1, name=name, source=f"/adapters/{name}")
            answer = await stub.LoadAdapter(request)
            assert (answer.rank, list(answer.displaced_ids)) == (8, [7])
    (warning,) = (line for line in logs if line["log_level"] == "warning")
    assert warning["event"] == "adapter_of_another_base"
    assert (warning["base_model"], warning["model"]) == ("org/other", "m")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigurationRefused("lower --kv-memory"), ConfigurationRefused, "lower --kv-memory"),
        (
            RuntimeError("first line\nsecond line"),
            Internal,
            "the worker failed to start: RuntimeError: first line",
        ),
    ],
)
async def test_a_failed_configuration_can_be_repeated(
    stub: Any, worker: FakeWorker, error: Exception, kind: type[TriptychError], message: str
) -> None:
    """The error is typed and one line; the worker executes nothing until a configuration succeeds."""
    worker.error = error
    refused = await refusal(configure(stub))
    assert (type(refused), refused.message) == (kind, message)
    unconfigured = await refusal(stub.Execute().read())
    assert (type(unconfigured), unconfigured.message) == (Unavailable, "the worker is not configured yet")
    worker.error = None
    assert len(await configure(stub)) == 2


async def test_the_empty_plan_0_is_answered(stub: Any) -> None:
    """The scheduler's greeting shows that the stream was accepted, and the plans after it begin at 1."""
    await configure(stub)
    steps = stub.Execute()
    await steps.write(worker_pb2.StepPlan())
    result = await steps.read()
    assert (result.step, result.last, result.HasField("error")) == (0, True, False)
    await steps.write(decode(1))
    assert list((await steps.read()).token_ids) == [3]


async def test_another_configuration_waits_for_the_end_of_the_stream(stub: Any, worker: FakeWorker) -> None:
    await configure(stub)
    steps = stub.Execute()
    await steps.write(decode(1))
    assert list((await steps.read()).token_ids) == [3]
    other = other_sizes()
    refused = await refusal(configure(stub, other))
    assert isinstance(refused, Unavailable)
    assert "end its Execute stream first" in refused.message
    assert len(await configure(stub)) == 2  # the same sizes are fine
    await steps.write(decode(2))
    assert list((await steps.read()).token_ids) == [3]
    await steps.done_writing()
    assert await steps.read() is grpc.aio.EOF
    await until(lambda: worker.resets)
    assert len(await configure(stub, other)) == 2


async def test_grammars_are_refused_by_models_without_them(stub: Any) -> None:
    structured = common_pb2.StructuredOutput(regex="a+")
    refused = await refusal(
        stub.CompileGrammar(worker_pb2.CompileGrammarRequest(structured_output=structured))
    )
    assert isinstance(refused, Unsupported)
    assert refused.param == "structured_output"


async def test_a_failed_reconfiguration_is_reported(stub: Any, worker: FakeWorker, reports: Reports) -> None:
    """A worker whose reconfiguration starts or fails is not configured; a repeated one changes nothing."""
    await configure(stub)
    await configure(stub)
    assert reports.configured == [False, True, True]
    reports.configured.clear()
    worker.error = ConfigurationRefused("lower --kv-memory")
    await refusal(configure(stub, other_sizes()))
    assert reports.configured[-1] is False
    assert True not in reports.configured


async def test_an_abandoned_reconfiguration_is_reported(
    stub: Any, worker: FakeWorker, reports: Reports
) -> None:
    await configure(stub)
    reports.configured.clear()
    worker.gate = threading.Event()
    call = stub.Configure(other_sizes())
    assert (await call.read()).progress.message == "a file"
    call.cancel()
    # On the same connection, the refusal comes after the worker has seen the end of the call.
    refused = await refusal(stub.Execute().read())
    worker.gate.set()
    assert reports.configured == [False]
    assert (type(refused), refused.message) == (Unavailable, "the worker is not configured yet")


async def test_failed_steps_in_a_row_end_the_worker(stub: Any, worker: FakeWorker, reports: Reports) -> None:
    """A step that works starts the count anew, one that only frees a slot does not."""
    await configure(stub)
    steps = stub.Execute()

    async def run(plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        await steps.write(plan)
        return cast("worker_pb2.StepResult", await steps.read())

    worker.step_error = RuntimeError("the device is gone\nand more")
    for step in (1, 2):
        assert (await run(decode(step))).HasField("error")
    worker.step_error = None
    await run(decode(3))
    worker.step_error = RuntimeError("the device is gone\nand more")
    for step in (4, 5):
        await run(decode(step))
    worker.step_error = None
    await run(worker_pb2.StepPlan(step=6, release=[0]))
    assert not reports.failures
    worker.step_error = RuntimeError("the device is gone\nand more")
    result = await run(decode(7))
    assert result.error.message == "the step failed: RuntimeError: the device is gone"
    assert len(reports.failures) == 1
    await steps.done_writing()
