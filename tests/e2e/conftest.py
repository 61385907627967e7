"""One real stack for all end-to-end tests: `triptych up` on SmolLM2.

It runs in float32, so that its tokens equal those of a reference.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import Stack, running_stack
from worker_svc.model_files.loader import fetch


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the demo model."""
    return fetch("smollm2", None)


@pytest.fixture(scope="session")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack that all tests share; no test may stop it."""
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--tool-call-parser", "hermes")
    with running_stack(smollm2, "smollm2", tmp_path_factory.mktemp("stack"), *flags) as stack:
        yield stack
