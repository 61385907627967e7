"""Builds the images, runs the compose stack, adds processes and kills some. `make test-compose` runs it."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compose.engine import BASE_IMAGE, SERVICES, Engine, say, timed
from tests.compose.questions import ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def port(engine: Engine) -> Iterator[int]:
    """The HTTP port of a healthy stack with one worker."""
    with engine.stack() as port:
        yield port


def test_images_are_small_and_have_no_needless_packages(engine: Engine) -> None:
    """Gateway and scheduler have no torch and no hub client, and no service runs as root."""
    base = engine.image_megabytes(BASE_IMAGE)
    sizes = {service: engine.image_megabytes(f"triptych-{service}") - base for service in SERVICES}
    say(f"megabytes on top of the base image ({base}): {sizes}")
    assert sizes["scheduler"] < 100
    assert sizes["gateway"] < 200
    assert sizes["worker"] < 2500
    code = (
        "import importlib.util as u, os; heavy = ('torch', 'vllm', 'huggingface_hub')\n"
        "print(os.geteuid(), *[name for name in heavy if u.find_spec(name)])"
    )
    found = {
        service: engine.podman(
            "run", "--rm", "--entrypoint", "/opt/triptych/bin/python", f"triptych-{service}", "-c", code
        ).split()
        for service in SERVICES
    }
    assert found == {
        "gateway": ["10001"],
        "scheduler": ["10001"],
        "worker": ["10001", "torch", "vllm", "huggingface_hub"],
    }


def test_requests_survive_a_killed_worker(engine: Engine, port: int) -> None:
    """A second worker joins; when one of the two is killed, every request still gets its answer."""
    assert "Paris" in ask(port)

    with timed("a second worker"):
        engine.compose("up", "--detach", "--no-build", "--no-recreate", "--wait", "--scale", "worker=2")
    workers = engine.containers("worker")
    assert len(workers) == 2
    assert "Paris" in ask(port)

    victim = workers[0]
    killed = engine.process(victim)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, port) for _ in range(8)]
        os.kill(killed, signal.SIGKILL)
        answers += [pool.submit(ask, port) for _ in range(8)]
        assert all("Paris" in answer.result() for answer in answers)
    engine.wait_until_back(victim, killed)
    assert "Paris" in ask(port)


def test_buckets_are_planned_from_the_traffic_of_earlier_schedulers(engine: Engine, port: int) -> None:
    """`triptych plan` in the container reads the statistics that the last one left in the volume."""
    assert "Paris" in ask(port)
    (before,) = engine.containers("scheduler")
    first = engine.podman("inspect", "--format", "{{.Id}}", before)
    with timed("another scheduler"):
        engine.compose("up", "--detach", "--no-build", "--no-deps", "--force-recreate", "--wait", "scheduler")
    (after,) = engine.containers("scheduler")
    assert engine.podman("inspect", "--format", "{{.Id}}", after) != first
    planned = json.loads(engine.compose("exec", "scheduler", "triptych", "plan", "--json"))
    assert planned["model"] == "smollm2"
    assert planned["steps"] > 0
    assert "Paris" in ask(port)


def test_the_root_file_system_is_read_only(engine: Engine, port: int) -> None:
    """No service can write to its own program."""
    del port
    for service in SERVICES:
        (container, *_) = engine.containers(service)
        code = "import os; print(os.access('/opt', os.W_OK) or os.statvfs('/').f_flag & os.ST_RDONLY == 0)"
        assert engine.podman("exec", container, "/opt/triptych/bin/python", "-c", code).strip() == "False"


def test_the_base_image_has_the_documented_python(engine: Engine) -> None:
    """The base image has the Python version of the upstream image that it replaces."""
    version = engine.podman("run", "--rm", f"localhost/{BASE_IMAGE}", "python3", "--version")
    assert version.startswith("Python 3.11.")


def test_the_model_is_fetched_into_the_cache(engine: Engine, port: int) -> None:
    """The cache volume has all files of the worker's model."""
    del port
    (container, *_) = engine.containers("worker")
    listed = engine.podman("exec", container, "ls", "/cache/triptych/models/smollm2")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(listed.split())
