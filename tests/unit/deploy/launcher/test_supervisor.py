"""The launcher's supervisor with small real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deploy.launcher.process import COMMAND, PARENT_VARIABLE, Child, ChildSpec
from deploy.launcher.supervisor import LaunchError, RestartPolicy, Supervisor, run_until_signal

QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.05)
FOREVER = "import signal; print('up', flush=True); signal.pause()"


class Reports:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self._changed.set()

    async def wait_for(self, text: str) -> str:
        """Returns the first message with a text, as soon as there is one."""
        while True:
            for line in self.lines:
                if text in line:
                    return line
            self._changed.clear()
            await self._changed.wait()


def test_a_child_takes_no_code_from_the_current_folder(tmp_path: Path) -> None:
    """A folder may be shared: modules there that are called like ours are a stranger's."""
    for name in ("deploy", "protos", "gateway"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')\n")
    done = subprocess.run([*COMMAND, "version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["triptych"]), done.stderr


def spec(run_dir: Path, name: str, code: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", code), run_dir)


@contextlib.asynccontextmanager
async def supervised(supervisor: Supervisor) -> AsyncIterator[None]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await supervisor.stop()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def pid_of(child: ChildSpec, *, other_than: int = 0) -> int:
    """Returns the process id of a child once it has printed that it is up."""
    await until(
        lambda: child.log.exists() and child.pid_file.exists() and child.log.read_text().endswith("up\n")
    )
    await until(lambda: _read_pid(child.pid_file) not in {0, other_than})
    return _read_pid(child.pid_file)


def _read_pid(file: Path) -> int:
    """Returns 0 between the end of a process and the start of the next."""
    try:
        return int(file.read_text() or 0)
    except FileNotFoundError:
        return 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_child_is_named_and_restarted(tmp_path: Path) -> None:
    """The report of a killed child has its signal, its log and its last lines; then the child restarts."""
    child = spec(tmp_path, "worker-0", FOREVER)
    reports = Reports()
    supervisor = Supervisor([[child]], reports, policy=QUICK)
    async with supervised(supervisor):
        first = await pid_of(child)
        os.kill(first, signal.SIGKILL)
        message = await reports.wait_for("worker-0 died")
        assert "SIGKILL" in message
        assert str(child.log) in message
        assert "| up" in message
        second = await pid_of(child, other_than=first)
        assert alive(second)
    assert not alive(second)
    assert not child.pid_file.exists()


async def test_a_childs_files_are_never_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log, pid file and rotated log leave the files alone that links name, and the child runs."""
    child = Child(spec(tmp_path, "worker-0", "import signal; signal.pause()"))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    child.spec.pid_file.symlink_to(victim)
    child.spec.log.symlink_to(victim)
    await child.start()
    try:
        assert capsys.readouterr().err.count("is a symbolic link") == 2
        assert child.running
        child.spec.log.unlink()
        child.spec.log.write_text("long")
        child.spec.log.with_name("worker-0.log.1").symlink_to(victim)
        child.rotate_log(1)
    finally:
        waiting = asyncio.create_task(child.wait())
        await child.stop(0)
        await waiting
    assert victim.read_text() == "precious"


async def test_a_child_runs_although_its_files_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk, here a missing folder, must not end the services; two lines say what is missing."""
    child = Child(spec(tmp_path / "missing", "worker-0", "import signal; signal.pause()"))
    await child.start()
    try:
        said = capsys.readouterr().err
        assert [line.split(":")[0] for line in said.splitlines()] == [
            f"worker-0 runs without {child.spec.log}",
            f"worker-0 runs without {child.spec.pid_file}",
        ]
        assert child.running
    finally:
        waiting = asyncio.create_task(child.wait())
        await child.stop(0)
        assert await waiting < 0


async def refusal_of(supervisor: Supervisor) -> LaunchError:
    """Runs a supervisor to the failure of a start."""
    with pytest.raises(ExceptionGroup) as raised:
        await supervisor.run()
    await supervisor.stop()
    error = raised.value.exceptions[0]
    assert isinstance(error, LaunchError)
    return error


REASON = "triptych worker: no such model: " + "x" * 300_000
NOISE = "print('noise ' * 400_000, file=sys.stderr)"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (f"print('triptych worker: no such model: ' + 'x' * 300_000, file=sys.stderr); {NOISE}", REASON),
        (
            "sys.stderr.write('Loading: 5%\\rLoading: 9%triptych worker: bad file\\n')",
            "triptych worker: bad file",
        ),
        ("print('worker: error: bad flag', file=sys.stderr)", "worker: error: bad flag"),
        ("", "worker-0 refuses to start"),
    ],
    ids=["long", "progress bar", "other line", "no line"],
)
async def test_a_refusal_ends_the_start_with_its_whole_reason(
    tmp_path: Path, code: str, expected: str
) -> None:
    other = spec(tmp_path, "scheduler", FOREVER)
    bad = spec(tmp_path, "worker-0", f"import sys\n{code}\nsys.exit(2)")
    bad.log.write_text("triptych worker: of an earlier process\n" if expected.startswith("triptych") else "")
    error = await refusal_of(Supervisor([[other], [bad]], Reports(), policy=QUICK))
    assert str(error).startswith(expected)
    assert len(str(error)) < len(expected) + 150
    assert error.exit_code == 2
    assert not list(tmp_path.glob("*.pid"))


async def test_a_failure_is_told_before_the_services_stop(tmp_path: Path) -> None:
    busy = spec(tmp_path, "scheduler", "import signal; signal.signal(15, signal.SIG_IGN); " + FOREVER)
    code = (
        "import pathlib, sys, time\n"
        f"while not (log := pathlib.Path({str(busy.log)!r})).exists() or not log.read_text():\n"
        "    time.sleep(0.005)\n"
        "print('triptych worker: no', file=sys.stderr)\n"
        "sys.exit(2)"
    )
    supervisor = Supervisor([[busy], [spec(tmp_path, "worker-0", code)]], Reports(), drain_s=0.1, grace_s=0.0)
    told: list[tuple[str, bool]] = []

    def complain(error: LaunchError) -> None:
        told.append((str(error), alive(int(busy.pid_file.read_text()))))

    assert await run_until_signal(supervisor, supervisor.run(), complain=complain) == 2
    assert told == [("triptych worker: no", True)]
    assert not busy.pid_file.exists()


async def test_gives_up_on_a_child_that_keeps_dying(tmp_path: Path) -> None:
    """Before the stack has served, three consecutive deaths are an error that shows the log's last lines."""
    bad = spec(tmp_path, "worker-0", "raise RuntimeError('no device')")
    reports = Reports()
    error = await refusal_of(Supervisor([[bad]], reports, policy=QUICK))
    assert "no device" in str(error)
    assert error.exit_code == 1
    assert len(reports.lines) == 2


async def test_a_served_stack_keeps_trying_a_service_that_refuses(tmp_path: Path) -> None:
    """Each reason is said once; the device, for example, may come back."""
    code = (
        "import os, sys, pathlib\n"
        f"starts = pathlib.Path({str(tmp_path / 'starts')!r})\n"
        "with starts.open('a') as file:\n"
        "    file.write('x')\n"
        "print('triptych worker:', 'first' if starts.stat().st_size < 4 else 'second', file=sys.stderr)\n"
        "sys.exit(2)"
    )
    reports = Reports()
    supervisor = Supervisor([[spec(tmp_path, "worker-0", code)]], reports, policy=QUICK)
    supervisor.mark_served()
    async with supervised(supervisor):
        await reports.wait_for("triptych worker: second")
    assert len(reports.lines) == 2


async def test_stops_stage_by_stage(tmp_path: Path) -> None:
    order = tmp_path / "order"
    polite = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.1)\n"
        f"    open({str(order)!r}, 'a').write(NAME)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n" + FOREVER
    )
    stages = [[spec(tmp_path, name, f"NAME = {name!r}\n{polite}")] for name in ("g", "s", "w")]
    async with supervised(Supervisor(stages, Reports())):
        for (child,) in stages:
            await pid_of(child)
    assert order.read_text() == "gsw"


async def test_all_stages_share_the_time_for_running_requests(tmp_path: Path) -> None:
    """When it is over, whatever still drains gets SIGINT, which hurries it, and nothing is killed."""
    hurried = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n" + FOREVER
    )
    stages = [[spec(tmp_path, name, hurried)] for name in ("gateway", "scheduler")]
    reports = Reports()
    async with supervised(Supervisor(stages, reports, drain_s=1.0)):
        for (child,) in stages:
            await pid_of(child)
        began = asyncio.get_running_loop().time()
    assert 1.0 <= asyncio.get_running_loop().time() - began < 1.9
    assert reports.lines == []


@pytest.mark.parametrize(
    ("second", "code", "finishes"),
    [(signal.SIGTERM, 0, True), (signal.SIGHUP, 0, True), (signal.SIGINT, 130, False)],
)
async def test_only_ctrl_c_hurries_a_stop(
    tmp_path: Path, second: signal.Signals, code: int, finishes: bool
) -> None:
    """`timeout` and process managers send SIGTERM to the process, and again to its group."""
    may_end, done = tmp_path / "may-end", tmp_path / "done"
    child = spec(
        tmp_path,
        "gateway",
        "import pathlib, signal, sys, time\n"
        "def drain(*_):\n"
        "    print('drains', flush=True)\n"
        f"    while not pathlib.Path({str(may_end)!r}).exists():\n"
        "        time.sleep(0.005)\n"
        f"    pathlib.Path({str(done)!r}).touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain)\n" + FOREVER,
    )
    supervisor = Supervisor([[child]], Reports())
    running = asyncio.create_task(run_until_signal(supervisor, supervisor.run(), complain=print))
    await pid_of(child)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: "drains" in child.log.read_text())
    os.kill(os.getpid(), second)
    if finishes:
        await asyncio.sleep(0)  # the handler of the signal runs
        may_end.touch()
    assert await running == code
    assert done.exists() == finishes
    assert not child.pid_file.exists()


async def test_a_service_that_was_asked_to_stop_is_one_line(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); " + FOREVER
    child, reports = spec(tmp_path, "scheduler", code), Reports()
    supervisor = Supervisor([[child]], reports, policy=QUICK)
    supervisor.mark_served()
    async with supervised(supervisor):
        os.kill(await pid_of(child), signal.SIGTERM)
        line = await reports.wait_for("scheduler")
    assert line == "scheduler was stopped. scheduler restarts in 0.01 s."


async def test_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    """After the grace period the child and its own children are killed, and the supervisor reports it."""
    stubborn = spec(
        tmp_path,
        "worker-0",
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'])\n"
        "print(p.pid)\n" + FOREVER,
    )
    reports = Reports()
    async with supervised(Supervisor([[stubborn]], reports, drain_s=0.1, grace_s=0.1)):
        child = await pid_of(stubborn)
        grandchild = int(stubborn.log.read_text().split()[0])
    assert not alive(child)
    await until(lambda: not alive(grandchild) or is_zombie(grandchild))
    assert "worker-0 did not exit within 0.2 s" in reports.lines[-1]


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_children_die_with_a_killed_launcher() -> None:
    child = (
        "import os, signal; from deploy.launcher.process import die_with_launcher; "
        "die_with_launcher(os.environ); print(os.getpid(), flush=True); signal.pause()"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"environment = {{**os.environ, {PARENT_VARIABLE!r}: str(os.getpid())}}\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], env=environment)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout is not None
        assert int(launcher.stdout.readline())
        launcher.kill()
        # The pipe closes when the child, the last process that holds it, is gone.
        assert launcher.stdout.read() == ""


async def test_a_long_log_is_rotated_while_the_service_runs(tmp_path: Path) -> None:
    """The content moves to one older file, and the process keeps writing to the log."""
    code = "import sys, time\nwhile True:\n print('x' * 99, flush=True)\n time.sleep(0.001)"
    talks = spec(tmp_path, "talks", code)
    older = tmp_path / "talks.log.1"
    async with supervised(Supervisor([[talks]], Reports(), max_log_bytes=1000, look_every_s=0.01)):
        await until(older.exists)
        first = older.stat().st_mtime_ns
        await until(lambda: older.stat().st_mtime_ns > first)
    assert set(older.read_bytes()) == set(b"x\n")
    assert not (tmp_path / "talks.log").read_bytes().startswith(b"\0")


async def test_a_log_that_cannot_be_copied_is_emptied(tmp_path: Path) -> None:
    """On a full disk an older log is worth less than the room for the next lines."""
    child = Child(spec(tmp_path, "talks", FOREVER))
    child.spec.log.write_bytes(b"x" * 2000)
    (tmp_path / "talks.log.1").symlink_to("/dev/full")
    child.rotate_log(1000)
    assert child.spec.log.stat().st_size == 0
    assert not (tmp_path / "talks.log.1").is_symlink()


async def test_orphans_of_a_dead_child_are_reaped(tmp_path: Path) -> None:
    """A launcher that inherits orphans, as a container's first process does, keeps no zombies of them."""
    code = (
        "import asyncio, ctypes, os, sys\n"
        "from pathlib import Path\n"
        "from deploy.launcher.process import Child, ChildSpec\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # inherits orphans\n"
        "orphan = 'import subprocess, sys; "
        'subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])\'\n'
        "async def main():\n"
        "    child = Child(ChildSpec('c', (sys.executable, '-c', orphan), Path(sys.argv[1])))\n"
        "    await child.start()\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
        "try:\n"
        "    os.waitpid(-1, 0)\n"
        "except ChildProcessError:\n"
        "    print('none')\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert (await process.communicate())[0] == b"none\n"
