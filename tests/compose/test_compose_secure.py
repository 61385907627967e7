"""The stack of compose.secure.yaml: HTTPS with a key, and services that know one another by certificates."""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.compose.engine import Engine, timed
from tests.compose.questions import completion

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

_TLS = ("CA", "CERT", "KEY", "NAME", "REQUIRE_CLIENT_CERT")


@pytest.fixture(scope="module")
def port(engine: Engine) -> Iterator[int]:
    """The HTTPS port of a healthy secure stack."""
    with engine.stack("compose.secure.yaml") as port:
        yield port


def test_the_secure_stack_answers_with_its_key_alone(engine: Engine, port: int) -> None:
    """Health checks pass with TLS, and clients get the CA and the key as the file's head says."""
    ca = engine.folder / "ca.pem"
    engine.compose("cp", "gateway:/secure/ca.pem", str(ca))
    key = engine.compose("exec", "gateway", "cat", "/secure/api-key").strip()
    context = ssl.create_default_context(cafile=ca)
    request = completion(port, {}, max_tokens=8)
    request.full_url = f"https://localhost:{port}/v1/completions"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, context=context, timeout=30)
    request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, context=context, timeout=180) as answer:
        assert "Paris" in json.load(answer)["choices"][0]["text"]
    assert key not in engine.compose("logs")


@pytest.mark.parametrize(
    ("without", "event"),
    [
        (["TRIPTYCH_SERVICE_TOKEN_FILE"], "not_registered"),
        ([f"TRIPTYCH_GRPC_TLS_{name}" for name in _TLS], "not_connected"),
    ],
    ids=["no token", "no TLS"],
)
def test_a_worker_that_lacks_the_secrets_is_refused(
    engine: Engine, port: int, without: list[str], event: str
) -> None:
    """It says so, and is not registered."""
    del port
    stranger = "triptych-test-stranger"
    settings = [part for name in without for part in ("--env", f"{name}=")]
    try:
        with timed(f"a worker that is told {event}"):
            engine.compose("run", "--detach", "--no-deps", *settings, "--name", stranger, "worker")
            deadline = time.monotonic() + 180
            while event not in (log := engine.log(stranger)):
                assert time.monotonic() < deadline, log
                time.sleep(0.5)
    finally:
        engine.podman("rm", "--force", "--time", "0", "--volumes", stranger)
    assert '"event": "registered"' not in log
    if event == "not_registered":
        assert "the call has no service token" in engine.compose("logs", "scheduler")
