"""Builds the images, runs the compose stack, adds processes and kills some. `make test-compose` runs it."""

import contextlib
import http.client
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compose.engine import BASE_IMAGE, SERVICES, Engine, say, timed
from tests.compose.questions import ask, completion
from tests.support.ports import free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


def stream(port: int, last_id: str | None = None) -> Iterator[tuple[str, str]]:
    """Yields the id and the text of each chunk of an answer that can be resumed; `last_id` resumes one."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    fields = {"max_tokens": 200, "ignore_eos": True, "stream": True, "stream_options": {"resumable": True}}
    with urllib.request.urlopen(completion(port, headers, **fields), timeout=180) as answer:
        event_id = ""
        for line in answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value.startswith("{"):
                yield event_id, "".join(choice["text"] for choice in json.loads(value)["choices"])


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


def test_an_answer_continues_on_another_gateway(engine: Engine, port: int) -> None:
    """Two gateways share the scheduler; when one is killed, its client goes on at the other."""
    whole = "".join(text for _, text in stream(port))
    second = free_port()
    engine.environment["TRIPTYCH_PORT"] = str(second)
    try:
        with timed("a second gateway"):
            # The first one keeps its port.
            engine.compose(
                "up", "--detach", "--no-build", "--no-recreate", "--wait", "--scale", "gateway=2",
                "--scale", f"worker={len(engine.containers('worker'))}",
            )  # fmt: skip
    finally:
        engine.environment["TRIPTYCH_PORT"] = str(port)
    (gateway,) = (name for name in engine.containers("gateway") if str(port) in engine.podman("port", name))
    text = last_id = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        for number, (event_id, piece) in enumerate(stream(port)):
            last_id, text = event_id, text + piece
            if number == 20:
                os.kill(engine.process(gateway), signal.SIGKILL)
    assert 0 < len(text) < len(whole)
    text += "".join(piece for _, piece in stream(second, last_id))
    assert text == whole


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
