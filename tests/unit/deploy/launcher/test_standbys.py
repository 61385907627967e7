"""Standbys with small real processes: they replace dead workers, and are replaced themselves."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from deploy.launcher.process import ChildSpec
from deploy.launcher.supervisor import RestartPolicy, Standbys, Supervisor, standby_spec
from tests.unit.deploy.launcher.test_supervisor import (
    FOREVER,
    QUICK,
    Reports,
    alive,
    pid_of,
    spec,
    supervised,
    until,
)

# Waits for orders as a standby does, and then says which flags it got.
WAITS = """
import json, os, signal, sys
line = sys.stdin.readline()
if not line:
    sys.exit(0)
orders = json.loads(line)
log = os.open(orders["log"], os.O_WRONLY | os.O_APPEND)
os.write(log, f"{orders['flags']} {orders['environment']} up\\n".encode())
signal.pause()
"""
# Restarts that do not use a standby would exceed the time limit of a test.
NEVER = RestartPolicy(first_delay_s=1000, longest_delay_s=1000)


def worker(run_dir: Path, name: str = "worker-0") -> ChildSpec:
    flags = ("--port=1",)
    return replace(spec(run_dir, name, FOREVER), worker_flags=flags, environment={"DEVICE": "3"})


def standbys(run_dir: Path, reports: Reports, count: int = 1, code: str = WAITS) -> Standbys:
    return Standbys(spec(run_dir, "standby", code), count, reports, policy=QUICK)


async def standby_pid(run_dir: Path, *, other_than: int = 0, index: int = 0) -> int:
    file = run_dir / f"standby-{index}.pid"
    await until(lambda: file.exists() and int(file.read_text() or 0) not in {0, other_than})
    return int(file.read_text())


async def test_a_standby_takes_the_place_of_a_killed_worker(tmp_path: Path) -> None:
    """It gets the worker's flags, variables, log and pid file at once, and another standby is prepared."""
    dead, reports = worker(tmp_path), Reports()
    supervisor = Supervisor([[dead]], reports, policy=NEVER, standbys=standbys(tmp_path, reports))
    async with supervised(supervisor):
        first = await pid_of(dead)
        supervisor.mark_served()
        standby = await standby_pid(tmp_path)
        os.kill(first, signal.SIGKILL)
        message = await reports.wait_for("A standby takes the place of worker-0")
        assert "worker-0 died (SIGKILL)" in message
        assert await pid_of(dead, other_than=first) == standby
        await until(lambda: "['--port=1'] {'DEVICE': '3'} up" in dead.log.read_text())
        next_one = await standby_pid(tmp_path, other_than=standby)
    assert not alive(standby)
    assert not alive(next_one)
    assert list(tmp_path.glob("*.pid")) == []


async def test_no_standby_is_prepared_before_the_stack_serves(tmp_path: Path) -> None:
    """A standby would slow down the first start; a death before that is a restart with a delay."""
    dead, reports = worker(tmp_path), Reports()
    supervisor = Supervisor([[dead]], reports, policy=QUICK, standbys=standbys(tmp_path, reports))
    async with supervised(supervisor):
        os.kill(await pid_of(dead), signal.SIGKILL)
        await reports.wait_for("worker-0 restarts in 0.01 s")
        assert not (tmp_path / "standby-0.pid").exists()
        supervisor.mark_served()
        await standby_pid(tmp_path)


async def test_a_service_that_is_no_worker_restarts_by_itself(tmp_path: Path) -> None:
    gateway, reports = spec(tmp_path, "gateway", FOREVER), Reports()
    supervisor = Supervisor([[gateway]], reports, policy=QUICK, standbys=standbys(tmp_path, reports))
    async with supervised(supervisor):
        supervisor.mark_served()
        standby = await standby_pid(tmp_path)
        os.kill(await pid_of(gateway), signal.SIGKILL)
        await reports.wait_for("gateway restarts in 0.01 s")
        assert await standby_pid(tmp_path) == standby


async def test_a_dead_standby_is_replaced_with_a_growing_delay(tmp_path: Path) -> None:
    """A standby that cannot import is reported with its last line, and tried again ever later."""
    reports = Reports()
    broken = standbys(tmp_path, reports, code="raise SystemExit('no module')")
    keeping = asyncio.create_task(broken.keep())
    await until(lambda: len(reports.lines) >= 4)
    keeping.cancel()
    delays = [line.rpartition(" in ")[2] for line in reports.lines[:4]]
    assert delays == ["0.01 s.", "0.02 s.", "0.04 s.", "0.05 s."]
    assert "standby-0 died (exit code 1)" in reports.lines[0]
    assert "| no module" in reports.lines[0]
    assert not broken.has_one_for(worker(tmp_path))


async def test_two_workers_that_die_together_share_the_standbys(tmp_path: Path) -> None:
    """Each standby goes to one worker; a worker without one restarts by itself."""
    workers, reports = [worker(tmp_path, f"worker-{index}") for index in range(3)], Reports()
    supervisor = Supervisor([workers], reports, policy=QUICK, standbys=standbys(tmp_path, reports, 2))
    async with supervised(supervisor):
        pids = [await pid_of(each) for each in workers]
        supervisor.mark_served()
        waiting = {await standby_pid(tmp_path, index=index) for index in range(2)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        new = {await pid_of(each, other_than=pid) for each, pid in zip(workers, pids, strict=True)}
        assert waiting < new


async def test_a_standby_ends_when_its_launcher_closes_the_pipe(tmp_path: Path) -> None:
    """The command that the launcher runs reads its flags first, and end of input ends it with code 0."""
    command = standby_spec(
        replace(worker(tmp_path), worker_flags=("--model=smollm2", "--device=cpu"))
    ).command
    assert command[0] == sys.executable
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_a_standby_refuses_bad_settings_with_one_line(tmp_path: Path) -> None:
    """Its exit code is 2, as a worker's."""
    command = standby_spec(replace(worker(tmp_path), worker_flags=("--model=smollm2", "--port=-1"))).command
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().startswith("triptych standby: --port")
    assert errors.count(b"\n") == 1


async def test_a_standby_that_refuses_its_settings_is_not_replaced(tmp_path: Path) -> None:
    """Its replacement would refuse them as well; one line says so."""
    reports = Reports()
    async with asyncio.timeout(20):
        await standbys(
            tmp_path, reports, code="import sys; print('triptych standby: no vLLM\\nmore'); sys.exit(2)"
        ).keep()
    assert reports.lines == ["There is no standby-0: triptych standby: no vLLM"]
