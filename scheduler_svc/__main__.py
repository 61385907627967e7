"""The scheduler service: reads its settings, builds its parts and serves until SIGTERM or SIGINT."""

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import uvloop

from protos.errors import ConfigurationRefused, TriptychError, print_end
from protos.service.environment import check_for_service
from protos.service.logs import configure, get_logger
from protos.service.server import Server, check_addresses
from protos.service.settings import load
from protos.service.tls import keep_reminding
from protos.service.tracing import open_tracer
from protos.triptych.v1 import inference_pb2_grpc, registry_pb2_grpc
from scheduler_svc.api.inference import InferenceServicer
from scheduler_svc.api.registry import RegistryServicer
from scheduler_svc.settings import Settings
from scheduler_svc.workers.deployment import Deployment

if TYPE_CHECKING:
    import grpc.aio

INFERENCE = "triptych.v1.Inference"
REGISTRY = "triptych.v1.WorkerRegistry"


async def serve(settings: Settings) -> None:
    """Runs the service until SIGTERM or SIGINT."""
    log = get_logger()
    security = settings.link_security()
    deployment = Deployment(settings)
    tracer = open_tracer(settings.otlp_traces_endpoint, "scheduler")
    inference = InferenceServicer(deployment, settings, tracer)
    inference.metrics.certificates.expiries += security.expiries
    registry = RegistryServicer(deployment, security)

    def register(server: "grpc.aio.Server") -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
        registry_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)

    server = Server(
        (INFERENCE, REGISTRY), register, max_concurrent_rpcs=settings.max_concurrent_rpcs, security=security
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def on_interrupt() -> None:
        if stop.is_set():
            inference.hurry()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    # Health follows the replicas and the settings' adapters: SERVING means that a request can run now.
    changes: asyncio.Queue[bool] = asyncio.Queue()
    inference.loras.on_ready(changes.put_nowait)
    port = await server.start(settings.host, settings.port, settings.socket)
    await server.set_serving(True, REGISTRY)
    log.info("listening", host=settings.host, port=port)

    async def follow() -> None:
        while True:
            await server.set_serving(await changes.get(), "", INFERENCE)

    work = (follow(), deployment.timeouts.run(), keep_reminding(security.expiries))
    tasks = [asyncio.create_task(each) for each in work]
    await stop.wait()
    load = deployment.load()
    log.info("draining", running=load.num_running, waiting=load.num_waiting)
    for task in tasks:
        task.cancel()
    # Readiness goes first. Only the calls of direct clients need time: gateways resubmit their requests to
    # the next scheduler. Until then those run here, because the next scheduler gets no worker before.
    await server.set_serving(False)
    await inference.drain(settings.drain_s)
    await registry.close()
    await server.stop(grace_s=0.5)
    deployment.histogram.save()
    if tracer is not None:
        tracer.close()
    log.info("stopped")


def check(settings: Settings) -> None:
    """Refuses settings and addresses that a start would refuse, and serves nothing."""
    if tracer := open_tracer(settings.otlp_traces_endpoint, "scheduler"):
        tracer.close()
    Deployment(settings)
    check_addresses(settings.host, settings.port, settings.socket, settings.link_security())


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 after a clean stop, 2 for a bad setting, 1 for a fault."""
    try:
        settings = load(Settings, argv)
        configure("scheduler", level=settings.log_level, log_format=settings.log_format)
        check_for_service(os.environ)
        uvloop.run(serve(settings))
    except TriptychError as error:
        print_end("scheduler", error)
        return 2 if isinstance(error, ConfigurationRefused) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
