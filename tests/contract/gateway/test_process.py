"""The gateway as a process: start-up time, memory, imports and shutdown."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.__main__ import main
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import smollm2_folder
from tests.support.ports import free_port
from tests.support.service import Service, running_service

pytestmark = pytest.mark.contract

READY_S = 3.0
RESIDENT_MB = 150

# Runs the gateway's main() and prints which heavy modules it has imported.
REPORTING = """
import sys
from gateway.__main__ import main
code = main(sys.argv[1:])
heavy = {"torch", "vllm", "transformers", "worker_svc", "scheduler_svc", "numpy"}
print("imported", sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
sys.exit(code)
"""


class Process:
    def __init__(self, service: Service) -> None:
        self.process = service.process
        ports = service.line
        self.base_url, self.own_url = (f"http://127.0.0.1:{ports[name]}" for name in ("port", "metrics_port"))
        """The URL of the API, and that of the port which no other gateway shares, if there is one."""


@contextlib.contextmanager
def started(*flags: str) -> Iterator[Process]:
    """Starts a gateway, on a free port unless the flags name one, and waits until it listens."""
    with running_service("-c", REPORTING, "--port", "0", *flags) as service:
        yield Process(service)


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[FakeScheduler, int]]:
    fake = FakeScheduler(smollm2_folder(), [504, 505, 506])
    async with serving(fake) as server:
        yield fake, server.port


async def healthy(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)


def test_a_gateway_without_a_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    """It is ready within three seconds, and shares its port only if both gateways have the flag."""
    with started("--scheduler-address", f"127.0.0.1:{free_port()}") as gateway:
        assert httpx.get(f"{gateway.base_url}/version").status_code == 200
        times = psutil.Process(gateway.process.pid).cpu_times()
        assert times.user + times.system < READY_S
        assert main(["--port", gateway.base_url.rpartition(":")[2], "--reuse-port"]) == 2
        assert "Address already in use" in capsys.readouterr().err


async def test_memory_imports_and_a_clean_end(scheduler: tuple[FakeScheduler, int]) -> None:
    """A busy gateway stays small and imports no torch. SIGTERM ends it with 0 and without a traceback."""
    with started("--scheduler-address", f"127.0.0.1:{scheduler[1]}") as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http:
            await healthy(http)
            body = {"messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 50}
            answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(32)))
            assert {answer.status_code for answer in answers} == {200}
        resident = psutil.Process(gateway.process.pid).memory_info().rss / 1e6
        assert resident < RESIDENT_MB
        gateway.process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(gateway.process.communicate, None, 20)
        assert gateway.process.returncode == 0
        assert out == "imported []\n"
        assert "Traceback" not in err
        assert json.loads(err.splitlines()[-1])["event"] == "stopped"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("chat_template.jinja", "\n{% if %}", "chat template cannot be compiled: line 2"),
        pytest.param(
            "tokenizer_config.json",
            '{"chat_template": [{}]}',
            "tokenizer cannot be used: KeyError",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_unusable_text_files_end_it(tmp_path: Path, file: str, text: str, reason: str) -> None:
    """A gateway that can never serve its model's texts exits with 2, and one line is the reason."""
    for path in smollm2_folder().iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(text)
    async with serving(FakeScheduler(tmp_path, [504])) as server:
        with started("--scheduler-address", f"127.0.0.1:{server.port}") as gateway:
            _, err = await asyncio.to_thread(gateway.process.communicate, None, 20)
    assert gateway.process.returncode == 2
    (line,) = [line for line in err.splitlines() if line.startswith("triptych gateway: ")]
    assert reason in line


async def test_a_full_disk_ends_it(scheduler: tuple[FakeScheduler, int]) -> None:
    """A gateway that cannot keep the tokenizer's files says so, and exits with 2."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file of the process can grow
    try:
        with started("--scheduler-address", f"127.0.0.1:{scheduler[1]}") as gateway:
            _, err = await asyncio.to_thread(gateway.process.communicate, None, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert gateway.process.returncode == 2
    (line,) = [line for line in err.splitlines() if line.startswith("triptych gateway: ")]
    assert "tokenizer cannot be kept" in line


@pytest.mark.parametrize(
    "difference", [-1, pytest.param(1, marks=pytest.mark.slow)], ids=["newer gateway", "older gateway"]
)
async def test_a_gateway_of_another_schema_says_so_until_the_scheduler_is_of_its_own(
    scheduler: tuple[FakeScheduler, int], difference: int
) -> None:
    """Not ready, with the reason, in probes, metric, log and refused requests."""
    fake, port = scheduler
    fake.schema_revision += difference
    flags = ("--scheduler-address", f"127.0.0.1:{port}", "--park-timeout-s", "0.3")
    with started(*flags) as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http:
            while "refuses" not in (await http.get("/health")).text:
                await asyncio.sleep(0.02)
            refused = [await http.get(path) for path in ("/health", "/ready", "/ping")]
            refused.append(await http.post("/v1/completions", json={"prompt": "x"}))
            for answer in refused:
                assert answer.status_code == 503
                assert "refuses this gateway: the scheduler speaks another revision" in answer.text
            assert (await http.get("/live")).status_code == 200
            metrics = (await http.get("/metrics")).text
            assert "\ntriptych:gateway_scheduler_refuses 1.0\n" in metrics
            assert "\ntriptych:gateway_scheduler_up 0.0\n" in metrics
            fake.schema_revision -= difference
            await healthy(http)
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            assert "\ntriptych:gateway_scheduler_refuses 0.0\n" in (await http.get("/metrics")).text
        gateway.process.terminate()
        _, log = await asyncio.to_thread(gateway.process.communicate, None, 20)
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    told = [event for event in events if event in {"refused", "connected", "serving"}]
    assert told == ["refused", "connected", "serving"]


@pytest.mark.parametrize("sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_a_signal_lets_streams_finish(
    scheduler: tuple[FakeScheduler, int], sig: signal.Signals
) -> None:
    """A running stream continues to its end, whatever SIGTERM follows; the process then exits with 0."""
    fake, port = scheduler
    fake.pause_after = 3
    with started("--scheduler-address", f"127.0.0.1:{port}") as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http:
            await healthy(http)
            body = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                gateway.process.send_signal(sig)
                await refuses_connections(gateway.base_url)
                gateway.process.send_signal(signal.SIGTERM)  # as `timeout` does; no wish to hurry
                await fake.resume()
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 9
        assert await asyncio.to_thread(gateway.process.wait, 20) == 0


async def refuses_connections(base_url: str) -> None:
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=base_url) as other:
        while True:
            try:
                await other.get("/version", headers={"connection": "close"})
            except httpx.TransportError:
                return
            await asyncio.sleep(0.02)


async def test_the_drain_timeout_ends_streams_properly(scheduler: tuple[FakeScheduler, int]) -> None:
    """After the drain timeout, a stream ends with an error object instead of a cut connection."""
    fake, port = scheduler
    fake.pause_after = 3
    with started("--scheduler-address", f"127.0.0.1:{port}", "--drain-s", "0.3") as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http:
            await healthy(http)
            body = {"prompt": "x", "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                gateway.process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert "shutting down" in rest[-2]
        assert await asyncio.to_thread(gateway.process.wait, 20) == 0
        assert gateway.process.stderr is not None
        assert '"exception"' not in gateway.process.stderr.read()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "x"], "--port"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--ssl-certfile", "/missing.pem"], "cannot use the certificate /missing.pem"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(flags))
    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("triptych gateway: ")
    assert words in line


def test_a_taken_port_is_one_line() -> None:
    """The line names the port and what to do; so ends a real process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "gateway", "--port", str(port)]
        # Another test of this process may have imported vLLM, which sets variables.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, env=clean)
    assert done.returncode == 2
    assert done.stderr == (
        f"triptych gateway: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port\n"
    )


@pytest.mark.slow
async def test_gateways_share_a_port(scheduler: tuple[FakeScheduler, int]) -> None:
    """Connections reach both. While one is gone, the other takes all; its successor gets its share again."""
    shared = ("--port", str(free_port()), "--reuse-port", "--scheduler-address", f"127.0.0.1:{scheduler[1]}")
    own = ("--metrics-port", "0")
    with started(*shared, *own) as one, started(*shared, *own) as two:
        assert one.base_url == two.base_url
        for gateway in (one, two):
            async with httpx.AsyncClient(base_url=gateway.own_url, timeout=20) as http:
                await healthy(http)
        assert sum([await connections_reach(gateway, one.base_url) for gateway in (one, two)]) == 2
        two.process.kill()
        await asyncio.to_thread(two.process.wait, 20)
        assert await answers(one.base_url, 20)
        with started(*shared, *own) as successor:
            async with httpx.AsyncClient(base_url=successor.own_url, timeout=20) as http:
                await healthy(http)
            assert await connections_reach(successor, one.base_url)


async def test_metrics_are_closed_on_both_ports(scheduler: tuple[FakeScheduler, int]) -> None:
    """--metrics-access admin holds on the gateway's own port, too."""
    flags = ("--metrics-port", "0", "--metrics-access", "admin", "--admin-api-key", "sk-admin")
    key = {"Authorization": "Bearer sk-admin"}
    with started(*flags, "--scheduler-address", f"127.0.0.1:{scheduler[1]}") as gateway:
        async with httpx.AsyncClient(timeout=20) as http:
            for url in (f"{gateway.base_url}/metrics", f"{gateway.own_url}/metrics"):
                assert (await http.get(url)).status_code == 401
                assert (await http.get(url, headers=key)).status_code == 200


async def connections_reach(gateway: Process, shared_url: str) -> bool:
    """Returns whether new connections to the shared port reach a gateway, by its count of requests."""
    async with httpx.AsyncClient(base_url=gateway.own_url, timeout=20) as http:
        before = num_completions((await http.get("/metrics")).text)
        assert await answers(shared_url, 40)  # the chance that all miss one of two is 1e-12
        return num_completions((await http.get("/metrics")).text) > before


async def answers(url: str, count: int) -> bool:
    """Returns whether all completions succeed, each on a new connection."""
    body = {"prompt": "x", "max_tokens": 1}
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as http:
        codes = [(await http.post("/v1/completions", json=body)).status_code for _ in range(count)]
    return codes == [200] * count


def num_completions(metrics: str) -> float:
    found = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)
