"""Prepares a test process before anything is imported.

Without a GPU, Triton's kernels run in its interpreter, which must be requested before the first import of
Triton.
"""

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.rbln.vendor_packages import installed
from tests.support.rbln.wheels import IndexUnreachable
from triptych import add_packages
from worker_svc.vllm_platform import PLATFORM_VARIABLE

# For the processes that tests start in other folders.
add_packages()

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # `make` installs the interpreter there; see deploy/locks/interpreter.txt.
    sys.path.append(str(Path(sys.prefix) / "interpreter"))

# Generated examples have no time limit of their own: on a busy machine, any of them may be slow.
settings.register_profile("triptych", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("triptych")


_STDERR = pytest.StashKey[int]()
# Beyond a test's timeout. pytest-timeout's signal ends the test before, unless native code runs.
_GRACE_S = 10.0


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the process's own stderr: while tests run, pytest redirects it."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a process that hangs in native code, such as uvloop's, and prints the stacks of its threads."""
    limit_s = _limit_of(item)
    if limit_s and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Installs the vendor's packages for NPUs before their first test. CI requires them."""
    try:
        if item.get_closest_marker("npu") is not None:
            installed()
        return (yield)
    except IndexUnreachable as error:
        if "REQUIRE_NPU_PACKAGES" in os.environ:
            raise
        pytest.skip(f"the package index with the vendor's packages cannot be reached: {error}")


def pytest_enter_pdb() -> None:
    """Lets a debugger take its time."""
    faulthandler.cancel_dump_traceback_later()


def _limit_of(item: pytest.Item) -> float:
    """Returns the seconds that pytest-timeout allows; 0 for any time."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0])
    chosen = item.config.getoption("timeout")
    return float(item.config.getini("timeout") if chosen is None else chosen)


def pytest_collection_finish() -> None:
    """Exempts modules and collected tests from garbage collections: they live as long as the process."""
    gc.collect()
    gc.freeze()


# Where rich is installed, structlog's default prints each exception with all variables, which takes seconds.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    """Undoes a service's configuration of logs, which would write to the test's closed stream."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="module")
def shared_vllm() -> Iterator[None]:
    """Lets a gateway test import vLLM on the workers' platform, which vLLM chooses once per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLATFORM_VARIABLE, "cpu")
        yield
