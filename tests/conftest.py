"""Prepares a test process before anything is imported.

Without a GPU, Triton's kernels run in its interpreter, which must be requested before Triton is first imported.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_svc.vllm_platform import PLATFORM_VARIABLE

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Where `make` installs it; see deploy/locks/interpreter.txt.
    sys.path.append(str(Path(sys.prefix) / "interpreter"))


@pytest.fixture(scope="module")
def shared_vllm() -> Iterator[None]:
    """Lets a gateway test import vLLM, which chooses its platform once per process: the one that workers in this process need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLATFORM_VARIABLE, "cpu")
        yield
