"""Assembles a worker and runs it until the process receives SIGTERM or SIGINT."""

import asyncio
import functools
import signal
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from protos.errors import ConfigurationRefused
from protos.service.channels import LinkSecurity
from protos.service.logs import get_logger
from protos.service.server import Server, check_addresses
from protos.service.tls import keep_reminding
from protos.service.tracing import open_tracer
from protos.triptych.v1 import worker_pb2_grpc
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.registration import leave, stay_registered
from worker_svc.api.servicer import WorkerServicer
from worker_svc.api.watchdog import FailedSteps, Watchdog, WorkerFailed, end_process
from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings

SERVICE = "triptych.v1.Worker"


async def serve(settings: Settings, end: Callable[[ConfigurationRefused], NoReturn]) -> None:
    """Runs the service until SIGTERM or SIGINT.

    Calls `end`, which ends the process, if the model cannot be served or the scheduler refuses the worker:
    neither a registration nor requests are left then.

    Raises:
        ConfigurationRefused: if the address cannot be bound.
        WorkerFailed: if too many steps failed in a row.
    """
    loop = asyncio.get_running_loop()
    stop, leaving = asyncio.Event(), asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    failed: asyncio.Future[None] = loop.create_future()

    def give_up(reason: str) -> None:
        if not stop.is_set():  # otherwise the ranks stop together
            end_process(f"{reason}; the worker ends, so that its supervisor starts another")

    security = settings.link_security()
    worker, thread, worker_id = Worker(settings, give_up), ModelThread(), uuid.uuid4().hex
    watchdog, prepared = _watch(thread, settings), thread.submit(worker.prepare)
    health = _Health(thread, settings.stall_timeout_s)
    failed_steps = FailedSteps(
        settings.max_failed_steps, lambda reason: loop.call_soon_threadsafe(_fail, failed, reason)
    )
    servicer = WorkerServicer(
        worker, thread, prepared=prepared, worker_id=worker_id, model=settings.model,
        on_configured=health.set_configured, failed_steps=failed_steps, step_limit_s=settings.step_limit_s,
        configure_limit_s=settings.configure_hang_timeout_s,
        first_step_timeout_s=settings.first_step_timeout_s, tracer=open_tracer(settings.otlp_traces_endpoint, "worker"),
    )  # fmt: skip
    register = functools.partial(worker_pb2_grpc.add_WorkerServicer_to_server, servicer)
    server = Server((SERVICE,), register, max_concurrent_rpcs=settings.max_concurrent_rpcs, security=security)
    health.server = server
    port = await server.start(settings.host, settings.port, settings.socket)
    get_logger().info("listening", host=settings.host, port=port, worker_id=worker_id)
    registered = _register(
        worker, settings, prepared, watchdog, leaving, worker_id=worker_id, port=port, give_up=give_up,
        security=security,
    )  # fmt: skip
    work = (health.watch(), registered, keep_reminding(security.expiries))
    tasks = [asyncio.create_task(each) for each in work]
    ends: list[asyncio.Future[Any]] = [asyncio.create_task(stop.wait()), failed, *tasks]
    try:
        await _first_end(ends, servicer)
    except ConfigurationRefused as error:
        end(error)
    finally:
        # Readiness goes first, then the requests, then the process.
        leaving.set()
        await health.stop()
        await _leave(settings, worker_id, security, tasks)
        await _close(server, thread, watchdog, servicer, worker)
        get_logger().info("stopped")


async def _first_end(ends: list[asyncio.Future[Any]], servicer: WorkerServicer) -> None:
    """Waits for the first end of a service; raises its error."""
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    try:
        for end in done:
            end.result()
    except ConfigurationRefused as error:
        raise servicer.refusal or error from None
    except ImportError as error:
        reason = f"a package cannot be imported: {error}; run `triptych install worker`"
        raise ConfigurationRefused(reason) from error


def check(settings: Settings) -> Worker:
    """Returns a prepared worker, with the checks of a start; serves and registers nothing.

    Raises:
        ConfigurationRefused: if an address cannot be bound, or the model cannot be served.
    """
    if tracer := open_tracer(settings.otlp_traces_endpoint, "worker"):
        tracer.close()
    check_addresses(settings.host, settings.port, settings.socket, settings.link_security())
    worker = Worker(settings)
    worker.prepare()
    return worker


async def _leave(
    settings: Settings, worker_id: str, security: LinkSecurity, tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Withdraws the registration and ends the tasks."""
    if settings.scheduler_address:
        await leave(settings.scheduler_address, worker_id=worker_id, security=security)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close(
    server: Server, thread: ModelThread, watchdog: Watchdog, servicer: WorkerServicer, worker: Worker
) -> None:
    await server.stop(grace_s=0.5)
    await thread.close(wait_s=0.5)
    watchdog.close()
    servicer.close()
    worker.close()


async def _register(
    worker: Worker, settings: Settings, prepared: asyncio.Future[None], watchdog: Watchdog,
    leaving: asyncio.Event, *, worker_id: str, port: int, give_up: Callable[[str], None],
    security: LinkSecurity,
) -> None:  # fmt: skip
    """Keeps a prepared worker registered. Ends only by raising."""
    await asyncio.shield(prepared)  # raises if the model cannot be served

    def rank_lost(reason: str) -> None:
        if worker.epoch:  # otherwise no collective waits for the lost rank
            give_up(reason)

    def hung(reason: str) -> None:
        watchdog.give_step_up()
        rank_lost(reason)

    if settings.scheduler_address:
        await stay_registered(
            settings.scheduler_address,
            worker_id=worker_id,
            host=settings.advertise_host,
            port=port,
            rank=worker.layout,
            replica_id=settings.replica_id,
            on_hung=hung,
            on_rank_lost=rank_lost,
            leaving=leaving,
            security=security,
            socket=settings.socket and settings.socket.absolute(),
        )
    await asyncio.Event().wait()


def _watch(thread: ModelThread, settings: Settings) -> Watchdog:
    limits = (settings.step_limit_s(0.0), settings.configure_hang_timeout_s)
    return Watchdog(thread, longest_s=max(limits) if all(limits) else 0.0)


def _fail(failed: asyncio.Future[None], reason: WorkerFailed) -> None:
    if not failed.done():
        failed.set_exception(reason)


class _Health:
    """Reports SERVING while the worker is configured and its steps make progress."""

    def __init__(self, thread: ModelThread, stall_timeout_s: float) -> None:
        self._thread = thread
        self._stall_timeout_s = stall_timeout_s
        self._is_configured = False
        self._is_stalled = False
        self._is_stopping = False
        self.server: Server

    async def set_configured(self, configured: bool) -> None:
        """Reports SERVING if the worker is configured, and NOT_SERVING while it is not."""
        self._is_configured = configured
        await self._report()

    async def stop(self) -> None:
        """Reports NOT_SERVING from now on."""
        self._is_stopping = True
        await self._report()

    async def watch(self) -> None:
        """Reports NOT_SERVING while a step takes longer than the stall timeout."""
        while True:
            await asyncio.sleep(min(1.0, self._stall_timeout_s / 4))
            busy_s = self._thread.busy_s
            stalled = self._is_configured and busy_s > self._stall_timeout_s
            if stalled != self._is_stalled:
                self._is_stalled = stalled
                get_logger().error("stalled" if stalled else "stall_ended", busy_s=round(busy_s, 1))
                await self._report()

    async def _report(self) -> None:
        serving = self._is_configured and not self._is_stalled and not self._is_stopping
        await self.server.set_serving(serving)
