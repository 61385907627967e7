"""Prepares a test process before anything is imported.

Without a GPU, Triton's kernels run in its interpreter, which must be requested before the first import of
Triton.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from worker_svc.vllm_platform import PLATFORM_VARIABLE

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # `make` installs the interpreter there; see deploy/locks/interpreter.txt.
    sys.path.append(str(Path(sys.prefix) / "interpreter"))

# Generated examples have no time limit of their own: on a busy machine, any of them may be slow.
settings.register_profile("triptych", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("triptych")


def pytest_collection_finish() -> None:
    """Exempts modules and collected tests from garbage collections: they live as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def shared_vllm() -> Iterator[None]:
    """Lets a gateway test import vLLM on the workers' platform, which vLLM chooses once per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLATFORM_VARIABLE, "cpu")
        yield
