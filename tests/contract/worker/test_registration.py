"""A worker registers with a real scheduler that starts late, loses it, or refuses it."""

import asyncio
from pathlib import Path

import pytest

from protos.errors import ConfigurationRefused, Internal, SchemaMismatch
from protos.service.grpc_options import SCHEMA_REVISION, open_channel, unix_address
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.api import registry
from scheduler_svc.settings import Settings
from tests.support.ports import free_port
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    registration,
    run_scheduler,
    run_worker,
)
from worker_svc.api.registration import leave, stay_registered

pytestmark = pytest.mark.contract


async def serving(scheduler: RunningScheduler, wanted: bool) -> None:
    """Waits until a replica is ready (`wanted`), or until none is."""
    while await scheduler.serving.get() is not wanted:
        pass


async def test_a_worker_registers_again_after_its_steps_failed() -> None:
    async with run_scheduler() as scheduler, run_worker(FakeWorker(die_at_step=4)) as port:
        address = f"127.0.0.1:{scheduler.server.port}"
        task = asyncio.create_task(stay_registered(address, worker_id="w", host="", port=port))
        await serving(scheduler, True)
        request = inference_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7])
        request.sampling.max_tokens = 8
        tokens = [token async for event in scheduler.inference.Generate(request) for token in event.token_ids]
        assert tokens == expected_tokens([5, 6, 7], 8)
        await serving(scheduler, False)
        await serving(scheduler, True)
        task.cancel()


async def test_a_refused_configuration_ends_the_worker_with_the_reason() -> None:
    async with run_scheduler(Settings(block_size=6)) as scheduler, run_worker(FakeWorker()) as port:
        address = f"127.0.0.1:{scheduler.server.port}"
        with pytest.raises(
            ConfigurationRefused, match="refuses this worker: block_size 6 must be a multiple of 4"
        ):
            await stay_registered(address, worker_id="w", host="", port=port)


async def test_a_worker_registers_through_unix_sockets(tmp_path: Path) -> None:
    paths = tmp_path / "the scheduler.sock", tmp_path / "the worker.sock"
    async with (
        run_scheduler(Settings(socket=paths[0])) as scheduler,
        run_worker(FakeWorker(), paths[1]),
        open_channel(unix_address(paths[0])) as channel,
    ):
        closed_port = 1
        task = asyncio.create_task(
            stay_registered(unix_address(paths[0]), worker_id="w", host="", port=closed_port, socket=paths[1])
        )
        await serving(scheduler, True)
        request = inference_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7])
        request.sampling.max_tokens = 8
        events = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        tokens = [token async for event in events for token in event.token_ids]
        assert tokens == expected_tokens([5, 6, 7], 8)
        task.cancel()


async def test_a_worker_without_an_address_to_dial_is_refused(tmp_path: Path) -> None:
    """A Unix socket does not say where the worker listens; the message says what to set."""
    path = tmp_path / "s.sock"
    async with run_scheduler(Settings(socket=path)):
        with pytest.raises(ConfigurationRefused, match="--socket or --advertise-host"):
            await stay_registered(unix_address(path), worker_id="w", host="", port=7)


async def test_a_fault_of_every_configuration_ends_the_worker() -> None:
    """The third equal fault before the worker serves ends it with the reason; one that passes does not."""
    worker = FakeWorker(refuse_configure=Internal("IndexError: weights"))
    async with asyncio.timeout(20), run_scheduler() as scheduler, run_worker(worker) as port:
        address = f"127.0.0.1:{scheduler.server.port}"
        with pytest.raises(ConfigurationRefused, match=r"IndexError: weights \(3 times\)"):
            await stay_registered(address, worker_id="w", host="", port=port)
        task = asyncio.create_task(stay_registered(address, worker_id="w", host="", port=port))
        worker.refuse_configure = None
        await serving(scheduler, True)
        task.cancel()


async def test_another_service_is_no_scheduler() -> None:
    async with run_worker(FakeWorker()) as port:
        with pytest.raises(ConfigurationRefused, match="refuses this worker"):
            await stay_registered(f"127.0.0.1:{port}", worker_id="w", host="", port=port)


async def test_a_worker_waits_for_a_scheduler_of_its_own_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SCHEMA_REVISION", SCHEMA_REVISION + 1)
    async with run_scheduler() as scheduler, run_worker(FakeWorker()) as port:
        address = f"127.0.0.1:{scheduler.server.port}"
        refusal = await failure(scheduler.registry.Register(registration(port)))
        assert isinstance(refusal, SchemaMismatch)
        task = asyncio.create_task(stay_registered(address, worker_id="w", host="", port=port))
        await asyncio.wait({task}, timeout=0.5)
        assert not task.done()
        monkeypatch.undo()
        await serving(scheduler, True)
        task.cancel()


async def test_a_worker_that_leaves_registers_no_more() -> None:
    """The scheduler has taken its requests when `leave` returns, and its registration is over."""
    async with run_scheduler() as scheduler, run_worker(FakeWorker()) as port:
        address, leaving = f"127.0.0.1:{scheduler.server.port}", asyncio.Event()
        task = asyncio.create_task(
            stay_registered(address, worker_id="w", host="", port=port, leaving=leaving)
        )
        await serving(scheduler, True)
        leaving.set()
        await leave(address, worker_id="w")
        assert not scheduler.engine.replicas
        await task


async def test_a_worker_may_leave_without_a_scheduler() -> None:
    await leave(f"127.0.0.1:{free_port()}", worker_id="w")
