"""One container engine for all tests of compose stacks."""

import os
from collections.abc import Iterator

import pytest

from tests.compose.engine import SERVICES, Engine, timed, wheels_over_http
from tests.support.ports import free_port


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A container engine with our images."""
    if os.geteuid() != 0:
        pytest.fail("this test sets up podman and must run as root")
    engine = Engine(tmp_path_factory.mktemp("engine"))
    engine.install()
    engine.environment["TRIPTYCH_PORT"] = str(free_port())
    with engine.serving(), wheels_over_http() as arguments:
        engine.environment |= arguments
        for service in SERVICES:
            with timed(f"image of the {service}"):
                engine.compose("build", service)
        yield engine
