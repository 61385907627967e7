"""The scheduler as a process: how it stops."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from protos.errors import Unavailable
from protos.service.grpc_options import open_channel
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import failure, generate_request, registration, run_worker
from tests.support.service import Service, running_service

pytestmark = pytest.mark.contract


@contextlib.asynccontextmanager
async def direct_call(
    worker: FakeWorker, drain_s: float
) -> AsyncIterator[
    tuple[
        Service,
        "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateEvent]",
        "asyncio.Task[Exception]",
    ]
]:
    """Yields a scheduler with a worker, a call that has begun, and the end of the worker's registration."""
    with running_service("-m", "scheduler_svc", "--port", "0", "--drain-s", str(drain_s)) as scheduler:
        async with run_worker(worker) as port, open_channel(f"127.0.0.1:{scheduler.line['port']}") as channel:
            registered = registry_pb2_grpc.WorkerRegistryStub(channel).Register(registration(port))
            async for event in registered:
                if event.state == registry_pb2.RegisterEvent.STATE_SERVING:
                    break
            call = inference_pb2_grpc.InferenceStub(channel).Generate(generate_request(max_tokens=40))
            ended = asyncio.create_task(failure(registered))
            yield scheduler, call, ended


@pytest.mark.parametrize("hurried", [False, True], ids=["drained", "hurried"])
async def test_sigterm_during_a_direct_call_leaves_no_traceback(hurried: bool) -> None:
    """The call ends well, or with a reason after SIGINT; another SIGTERM changes nothing."""
    worker = FakeWorker(hold_at_step=5)
    async with direct_call(worker, 60.0) as (scheduler, call, registration_ended):
        tokens: list[int] = []
        async for event in call:
            tokens += event.token_ids
            if tokens:
                break
        scheduler.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(scheduler.read_until, "draining")
        scheduler.process.send_signal(signal.SIGTERM)
        if hurried:
            scheduler.process.send_signal(signal.SIGINT)
            assert "shutting down" in str(await failure(call))
        else:
            worker.hold_at_step = None  # it may not be there yet
            worker.gate.set()
            tokens += [token async for event in call for token in event.token_ids]
            assert tokens == expected_tokens([5, 6, 7], 40)
        error = await registration_ended
        assert isinstance(error, Unavailable)
        assert error.message == "the scheduler stops"
        log = (await asyncio.to_thread(scheduler.process.communicate, None, 20))[1]
    assert scheduler.process.returncode == 0
    assert "Traceback" not in log
    assert "ReplicaLost" not in log
    assert '"level":"error"' not in log.replace(" ", "")
