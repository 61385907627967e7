"""The stack of compose.secure.yaml: HTTPS with a key, and services that know one another by certificates."""

import json
import ssl
import urllib.error
import urllib.request

import pytest

from tests.compose.engine import Engine

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


def test_the_secure_stack_answers_with_its_key_alone(engine: Engine) -> None:
    """Health checks pass with TLS, and clients get the CA and the key as the file's head says."""
    with engine.stack("compose.secure.yaml") as port:
        ca = engine.compose("exec", "gateway", "cat", "/secure/ca.pem")
        key = engine.compose("exec", "gateway", "cat", "/secure/api-key").strip()
        context = ssl.create_default_context(cadata=ca)
        url = f"https://localhost:{port}/v1/models"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, context=context, timeout=30)
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            assert json.load(answer)["data"]
        assert key not in engine.compose("logs")
