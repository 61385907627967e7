"""How gRPC moves messages: without the threads of its event engine, in every service."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PING = """
import asyncio, pathlib, sys
import protos
import grpc.aio
from protos.service.grpc_options import open_channel, unix_address

async def echo(request_iterator, context):
    async for message in request_iterator:
        yield message

async def main(address):
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Echo": method}),))
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address) as channel:
        call = channel.stream_stream("/Test/Echo")()
        for _ in range(500):
            await call.write(b"x")
            await call.read()
        tasks = pathlib.Path("/proc/self/task").iterdir()
        print(sum(
            int((task / "schedstat").read_text().split()[2])
            for task in tasks if (task / "comm").read_text().startswith("event_engine")
        ))
        call.cancel()
    await server.stop(None)

asyncio.run(main(unix_address(pathlib.Path(sys.argv[1]))))
"""

ORDER = """
import importlib, importlib.abc, sys

class Note(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("grpc", "protos"):
            print(name)

sys.meta_path.insert(0, Note())
importlib.import_module(sys.argv[1])
"""


def run(program: str, argument: str) -> str:
    """Returns what a program prints in a new process whose environment says nothing of experiments."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run(
        [sys.executable, "-c", program, argument], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_event_engine_s_threads_do_not_carry_messages(tmp_path: Path) -> None:
    """500 messages there and back wake them some times for timers, not once for each message."""
    assert int(run(PING, str(tmp_path / "socket"))) < 250


@pytest.mark.parametrize(
    "module", ["scheduler_svc.__main__", "gateway.__main__", "worker_svc.__main__", "worker_svc.standby"]
)
def test_a_service_imports_protos_before_grpc(module: str) -> None:
    """A variable that is set after gRPC was imported has no effect."""
    assert run(ORDER, module).split() == ["protos", "grpc"]
