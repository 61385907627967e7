"""What whole processes of tests need to be told before they import something.

Without a GPU, Triton's kernels run in its interpreter, which Triton has to be asked for before it is imported, whoever does that.
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
    """Lets a test of the gateway import vLLM, which decides on its platform once a process: on the one that workers in it will need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLATFORM_VARIABLE, "cpu")
        yield
