"""Runs one replica of two ranks, each in a container, and kills one of them."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compose.engine import Engine
from tests.compose.questions import ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def port(engine: Engine) -> Iterator[int]:
    """The HTTP port of a healthy stack of two ranks."""
    with engine.stack("compose.ranks.yaml") as port:
        yield port


def test_two_containers_serve_one_model(engine: Engine, port: int) -> None:
    """Both ranks are healthy and answer a question together."""
    for service in ("worker", "worker-rank-1"):
        (container,) = engine.containers(service)
        assert "(healthy)" in engine.status(container)
    assert "Paris" in ask(port)


@pytest.mark.parametrize("service", ["worker-rank-1", "worker"])
def test_requests_survive_a_killed_rank(engine: Engine, port: int, service: str) -> None:
    """Its container and the other rank start again, they form a new group, and no request is lost."""
    whole = ask(port, 100)
    (victim,) = engine.containers(service)
    killed = engine.process(victim)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, port, 100) for _ in range(8)]
        os.kill(killed, signal.SIGKILL)
        answers += [pool.submit(ask, port, 100) for _ in range(8)]
        assert [answer.result() for answer in answers] == [whole] * 16
    engine.wait_until_back(victim, killed)
    assert ask(port, 100) == whole
