"""Assembles a worker and runs it until the process receives SIGTERM or SIGINT."""

import asyncio
import signal
import uuid
from typing import Any

from protos.logs import get_logger
from protos.server import Server
from protos.triptych.v1 import worker_pb2_grpc
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.registration import stay_registered
from worker_svc.api.servicer import WorkerServicer
from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings

SERVICE = "triptych.v1.Worker"


async def serve(settings: Settings) -> None:
    """Runs the service until SIGTERM or SIGINT.

    Raises:
        ConfigurationRefused: if the address cannot be bound, the model cannot be served, or the scheduler
            refuses the worker.
    """
    log = get_logger()
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    worker, thread, worker_id = Worker(settings), ModelThread(), uuid.uuid4().hex
    prepared = thread.submit(worker.prepare)
    health = _Health(thread, settings.stall_timeout_s)
    servicer = WorkerServicer(
        worker,
        thread,
        prepared=prepared,
        worker_id=worker_id,
        model=settings.model,
        on_ready=health.set_configured,
    )
    server = Server((SERVICE,), lambda grpc: worker_pb2_grpc.add_WorkerServicer_to_server(servicer, grpc))
    health.server = server
    port = await server.start(settings.host, settings.port)
    log.info("listening", host=settings.host, port=port, worker_id=worker_id)
    tasks = [asyncio.create_task(health.watch())]
    stopped: asyncio.Future[Any] = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((prepared, stopped), return_when=asyncio.FIRST_COMPLETED)
        if prepared.done():
            prepared.result()  # raises if the model cannot be served
            if settings.scheduler_address:
                registration = asyncio.create_task(
                    stay_registered(
                        settings.scheduler_address,
                        worker_id=worker_id,
                        host=settings.advertise_host,
                        port=port,
                    )
                )
                tasks.append(registration)
                await asyncio.wait((registration, stopped), return_when=asyncio.FIRST_COMPLETED)
                if registration.done():
                    registration.result()  # it ends only by raising
        await stopped
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(grace_s=0.5)
        await thread.close(wait_s=0.5)
        worker.close()
        log.info("stopped")


class _Health:
    """Reports SERVING while the worker is configured and its steps make progress."""

    def __init__(self, thread: ModelThread, stall_timeout_s: float) -> None:
        self._thread = thread
        self._stall_timeout_s = stall_timeout_s
        self._is_configured = False
        self.server: Server

    async def set_configured(self) -> None:
        """Reports SERVING."""
        self._is_configured = True
        await self.server.set_serving(True)

    async def watch(self) -> None:
        """Reports NOT_SERVING while a step takes longer than the stall timeout."""
        stalled = False
        while True:
            await asyncio.sleep(min(1.0, self._stall_timeout_s / 4))
            now_stalled = self._is_configured and self._thread.busy_s > self._stall_timeout_s
            if now_stalled != stalled:
                stalled = now_stalled
                get_logger().error(
                    "stalled" if stalled else "stall_ended", busy_s=round(self._thread.busy_s, 1)
                )
                await self.server.set_serving(not stalled)
