"""The worker's gRPC service on a real server, with a fake worker behind it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio
import pytest

from protos.errors import (
    ConfigurationRefused,
    Internal,
    TriptychError,
    Unavailable,
    Unsupported,
    from_rpc_error,
)
from protos.steps import Decode, SlotOutput, StepPlan
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from protos.wire import open_channel
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.servicer import WorkerServicer
from worker_svc.execution.worker import Ready, Worker
from worker_svc.phases import PhaseProgress
from worker_svc.shapes.geometry import Geometry, PoolGeometry

pytestmark = pytest.mark.contract

SIZES = worker_pb2.ConfigureRequest(
    max_model_len=32, max_num_seqs=1, chunk=8, block_size=8, decode_buckets=[1], num_blocks=[5]
)


class FakeWorker:
    """Accepts every configuration unless `error` is set; decodes a slot's position as its token."""

    grammars = None

    def __init__(self) -> None:
        self.geometry: Geometry | PoolGeometry | None = None
        self.error: Exception | None = None
        self.resets = 0

    def is_configured_as(self, geometry: Geometry | PoolGeometry) -> bool:
        return geometry == self.geometry

    def configure(self, geometry: Geometry | PoolGeometry, progress: PhaseProgress) -> Ready:
        if self.error is not None:
            raise self.error
        progress("load", 1, 2, "a file")
        self.geometry = geometry
        return Ready(geometry, (64,), {"load": 0.5})

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        assert isinstance(plan.work, Decode)
        return [
            SlotOutput(slot, (at,)) for slot, at in zip(plan.work.slots, plan.work.positions, strict=True)
        ]

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
async def stub(worker: FakeWorker) -> AsyncIterator[Any]:
    """A client of the service."""
    thread = ModelThread()

    async def on_ready() -> None: ...

    servicer = WorkerServicer(
        cast("Worker", worker),
        thread,
        prepared=thread.submit(lambda: None),
        worker_id="w",
        model="m",
        on_ready=on_ready,
    )
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)
    await server.stop(0)
    await thread.close(1)


async def configure(
    stub: Any, request: worker_pb2.ConfigureRequest = SIZES
) -> list[worker_pb2.ConfigureEvent]:
    return [event async for event in stub.Configure(request)]


async def refusal(call: Any) -> TriptychError:
    """The typed error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def decode(step: int) -> worker_pb2.StepPlan:
    return worker_pb2.StepPlan(step=step, decode=worker_pb2.Decode(slots=[0], positions=[3], bucket=1))


async def test_a_configuration_streams_progress_and_its_result(stub: Any) -> None:
    """Progress events come first, the result last."""
    progress, ready = await configure(stub)
    assert (progress.progress.phase, progress.progress.done, progress.progress.message) == (
        worker_pb2.ConfigureProgress.PHASE_LOAD, 1, "a file"
    )  # fmt: skip
    assert list(ready.ready.num_blocks) == [5]
    assert dict(ready.ready.phase_seconds) == {"load": 0.5}


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


async def test_another_configuration_waits_for_the_end_of_the_stream(stub: Any, worker: FakeWorker) -> None:
    """While a stream is open, other sizes are refused and the configuration in use continues."""
    await configure(stub)
    steps = stub.Execute()
    await steps.write(decode(1))
    assert list((await steps.read()).token_ids) == [3]
    other = worker_pb2.ConfigureRequest()
    other.CopyFrom(SIZES)
    other.max_model_len = 64
    refused = await refusal(configure(stub, other))
    assert isinstance(refused, Unavailable)
    assert "end its Execute stream first" in refused.message
    assert len(await configure(stub)) == 2  # the same sizes are fine
    await steps.write(decode(2))
    assert list((await steps.read()).token_ids) == [3]
    await steps.done_writing()
    assert await steps.read() is grpc.aio.EOF
    async with asyncio.timeout(5):
        while worker.resets == 0:
            await asyncio.sleep(0.01)
    assert len(await configure(stub, other)) == 2


async def test_grammars_are_refused_by_models_without_them(stub: Any) -> None:
    """The refusal names the parameter."""
    structured = common_pb2.StructuredOutput(regex="a+")
    refused = await refusal(
        stub.CompileGrammar(worker_pb2.CompileGrammarRequest(structured_output=structured))
    )
    assert isinstance(refused, Unsupported)
    assert refused.param == "structured_output"
