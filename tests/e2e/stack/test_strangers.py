"""Stacks of `triptych up` beside workers that they have not started."""

import asyncio
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from protos.service.grpc_options import unix_address
from tests.e2e.stack.test_up import launcher, pids, read_until
from tests.support import tiny_models
from tests.support.listening import tcp_ports
from tests.support.service import running_service
from tests.support.stack import listening_port
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]

QUICK = ["--device", "cpu", "--backend", "eager", "--max-num-seqs", "2", "--standby-workers", "0"]


def tiny(folder: Path) -> str:
    """Writes a model that is told from others by its folder's name alone."""
    tiny_models.write("llama", folder)
    tiny_models.write_tokenizer(folder)
    return str(folder)


def listens(log: Path) -> bool:
    """Whether a service has logged that it listens."""
    return log.exists() and '"listening"' in log.read_text()


def stranger(model: str, address: str, *flags: str) -> list[str]:
    """Returns the arguments of a worker that registers at an address."""
    return [
        "-m",
        "worker_svc",
        f"--model={model}",
        *QUICK[:4],
        "--port=0",
        "--scheduler-address",
        address,
        *flags,
    ]


def test_a_stack_takes_its_own_workers_alone(tmp_path: Path) -> None:
    """Two stacks run side by side; strangers that come first are refused, with the token by their model."""
    model, other = tiny(tmp_path / "asked"), tiny(tmp_path / "other")
    first, second = tmp_path / "first", tmp_path / "second"
    token = f"--service-token-file={second / 'secure' / 'service-token'}"
    with (
        launcher(first, model, *QUICK) as alone,
        launcher(second, model, *QUICK, "--scheduler-port", "0", "--api-key", "k") as direct,
    ):
        for run_dir in (first, second):
            asyncio.run(until(partial(listens, run_dir / "scheduler.log"), timeout_s=60))
        port = listening_port(second / "scheduler.log")
        for address in (unix_address(first / "scheduler.sock"), f"127.0.0.1:{port}"):
            with running_service(*stranger(other, address), event="not_registered") as refused:
                assert "Register: the call has no service token" in refused.line["reason"]
        command = [sys.executable, *stranger(other, f"127.0.0.1:{port}", token)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert "serves 'other' and this deployment 'asked'" in done.stderr.splitlines()[-1]

        for process in (alone, direct):
            assert "Serving asked" in read_until(process, "Serving ")
        assert "call_refused" in (first / "scheduler.log").read_text()
        for run_dir, more in ((first, set()), (second, {port})):
            services = [pid for name, pid in pids(run_dir).items() if name != "launcher"]
            assert tcp_ports(services) == {listening_port(run_dir / "gateway.log"), *more}


def test_a_worker_without_an_address_registers_nowhere(tmp_path: Path) -> None:
    """Not even at a stack whose token it has."""
    model, run_dir = tiny(tmp_path / "model"), tmp_path / "run"
    token = f"--service-token-file={run_dir / 'secure' / 'service-token'}"
    with launcher(run_dir, model, *QUICK, "--scheduler-port", "0") as process:
        read_until(process, "Serving model")
        with running_service(*stranger(model, "", token), event="prepared") as worker:
            events = [json.loads(line)["event"] for line in worker.end().splitlines() if line[0] == "{"]
        assert "stopped" in events
        assert not {"registered", "not_registered", "not_connected", "not_left"} & set(events)
        assert (run_dir / "scheduler.log").read_text().count('"configuring"') == 1
