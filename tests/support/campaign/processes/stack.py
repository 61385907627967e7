"""The stack under test: a scheduler, workers and a gateway as real processes, with a link between any two."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio
import httpx

from deploy.launcher.process import ChildSpec
from deploy.launcher.supervisor import RestartPolicy, Supervisor
from protos.service.grpc_options import open_channel
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc
from tests.support.campaign.processes.link import Link
from tests.support.campaign.processes.nursery import Nursery
from tests.support.paths import ROOT
from tests.support.ports import free_ports

MODEL: Final = "tiny"
START_TIMEOUT_S: Final = 180.0
PATIENCE_S: Final = 300.0
"""How long requests wait for a lost service: restarts are slow on a machine with other work."""
_LOOPBACK: Final = "127.0.0.1"
_FAR_LOOPBACK: Final = "127.0.0.2"
"""Where links to workers listen: a worker announces its host, but not another port than its own."""
_POLL_S: Final = 0.05
_READY: Final = inference_pb2.REPLICA_STATE_READY


@dataclass
class Stack:
    """A running stack."""

    folder: Path
    """Logs, pid files, and what the processes exchange with the tests."""
    links: dict[str, Link]
    """The links by name: from the client to the server, for example ``gateway-scheduler``."""
    gateway_url: str
    """The gateway's address behind its link."""
    scheduler_address: str
    """The scheduler's address behind the link of direct clients."""
    direct: "inference_pb2_grpc.InferenceAsyncStub" = field(repr=False)
    """A way to the scheduler without a link, to look at it."""
    direct_url: str
    """The gateway's address without a link."""
    workers: tuple[str, ...]

    @property
    def services(self) -> tuple[str, ...]:
        """The names of all processes."""
        return ("scheduler", "gateway", *self.workers)

    def pid(self, service: str) -> int | None:
        """Returns the id of a service's process; None while none runs."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.folder / f"{service}.pid").read_text())
        return None

    def signal(self, service: str, number: signal.Signals) -> int | None:
        """Sends a signal to a service's process; returns its id, or None if none runs."""
        pid = self.pid(service)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    async def running(self, service: str) -> int:
        """Waits until a service has a process; returns its id."""
        while (pid := self.pid(service)) is None:
            await asyncio.sleep(_POLL_S)
        return pid

    async def gone(self, service: str, pid: int) -> None:
        """Waits until a process of a service has ended."""
        while self.pid(service) == pid:
            await asyncio.sleep(_POLL_S)

    async def serving(self) -> None:
        """Waits until all workers are ready and the gateway is healthy."""
        while not (await self._ready_replicas() == len(self.workers) and await self._gateway_is_healthy()):
            await asyncio.sleep(_POLL_S)

    async def idle(self) -> None:
        """Waits until the scheduler has no request left."""
        while True:
            load = await self.direct.GetLoad(inference_pb2.GetLoadRequest())
            if not load.num_running and not load.num_waiting:
                return
            await asyncio.sleep(_POLL_S)

    async def inspect(self, service: str) -> dict[str, Any]:
        """Returns what a service's process holds; see `inspection`."""
        file = self.folder / f"{service}.json"
        file.unlink(missing_ok=True)
        self.signal(service, signal.SIGUSR1)
        while not file.exists():
            await asyncio.sleep(_POLL_S)
        held: dict[str, Any] = json.loads(file.read_text())
        return held

    async def _ready_replicas(self) -> int:
        try:
            load = await self.direct.GetLoad(inference_pb2.GetLoadRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return 0
        return sum(replica.state == _READY for replica in load.replicas)

    async def _gateway_is_healthy(self) -> bool:
        try:
            async with httpx.AsyncClient(base_url=self.direct_url, timeout=2, trust_env=False) as client:
                return (await client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False


@asynccontextmanager
async def running_stack(
    model: Path, folder: Path, *, dtype: str, num_workers: int = 2
) -> AsyncIterator[Stack]:
    """Runs the services within the block, each restarted when it ends; yields once they serve."""
    workers = tuple(f"worker-{index}" for index in range(num_workers))
    scheduler, gateway, *ports = free_ports(2 + num_workers)
    links = {
        "client-gateway": Link((_LOOPBACK, gateway)),
        "client-scheduler": Link((_LOOPBACK, scheduler)),
        "gateway-scheduler": Link((_LOOPBACK, scheduler)),
        **{f"{worker}-scheduler": Link((_LOOPBACK, scheduler)) for worker in workers},
        **{
            f"scheduler-{worker}": Link((_LOOPBACK, port), _FAR_LOOPBACK, port)
            for worker, port in zip(workers, ports, strict=True)
        },
    }
    async with contextlib.AsyncExitStack() as cleanup:
        for link in links.values():
            await link.open()
            cleanup.push_async_callback(link.close)
        flags = {
            "gateway": _flags(
                port=gateway, scheduler_address=f"{_LOOPBACK}:{links['gateway-scheduler'].port}",
                resume_timeout_s=PATIENCE_S, park_timeout_s=PATIENCE_S, tool_call_parser="hermes",
            ),
            "scheduler": _flags(
                port=scheduler, max_model_len=1024, max_num_seqs=32, block_size=32, max_num_batched_tokens=128,
                decode_bucket_min=8, served_model_name=MODEL, replica_wait_s=PATIENCE_S,
            ),
        } | {
            worker: _flags(
                model=model, device="cpu", dtype=dtype, cpu_threads=1, kv_memory=0.25, port=port,
                scheduler_address=f"{_LOOPBACK}:{links[f'{worker}-scheduler'].port}",
                advertise_host=_FAR_LOOPBACK, hang_timeout_s=8,
            )
            for worker, port in zip(workers, ports, strict=True)
        }  # fmt: skip
        stages = [[_spec(name, folder, flags[name])] for name in ("gateway", "scheduler")]
        said = (folder / "supervisor.log").open("a")
        cleanup.callback(said.close)
        supervisor = Supervisor(
            stages, lambda text: print(text, file=said, flush=True),
            policy=RestartPolicy(first_delay_s=0.1, longest_delay_s=0.5),
        )  # fmt: skip
        supervisor.mark_served()
        channel = await cleanup.enter_async_context(open_channel(f"{_LOOPBACK}:{scheduler}"))
        stack = Stack(
            folder, links, f"http://{_LOOPBACK}:{links['client-gateway'].port}",
            f"{_LOOPBACK}:{links['client-scheduler'].port}", inference_pb2_grpc.InferenceStub(channel),
            f"http://{_LOOPBACK}:{gateway}", workers,
        )  # fmt: skip
        nursery = Nursery(folder, {worker: flags[worker] for worker in workers})
        supervising = [asyncio.create_task(each) for each in (supervisor.run(), nursery.run())]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await stack.serving()
            yield stack
        finally:
            for task in supervising:
                task.cancel()
            await asyncio.gather(*supervising, return_exceptions=True)


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def _spec(name: str, folder: Path, flags: list[str]) -> ChildSpec:
    command = (
        sys.executable, "-m", "tests.support.campaign.processes.service_process", name, str(folder), *flags,
    )  # fmt: skip
    return ChildSpec(name, command, folder, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
