"""Every route of the installed vLLM is served, or refused with the reason."""

import importlib.util
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.operations.routes import UNSERVED
from tests.support.gateway.serving import TEXT, Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PREFIX = "/proxied"
# Servers of other commands than `vllm serve`.
OTHER_SERVERS = {"dp_supervisor.py", "preload.py"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(TEXT, max_parked_requests=0, root_path=PREFIX) as stack:
        yield stack


def vllm_routes() -> set[str]:
    """Returns the paths that vLLM's server declares, read from its source."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    sources = (Path(spec.origin).parent / "entrypoints").rglob("*.py")
    route = re.compile(r'@(?:router|app)\.(?:get|post|put|delete|websocket)\(\s*"([^"]+)"')
    texts = (path.read_text() for path in sources if path.name not in OTHER_SERVERS)
    return {found for text in texts for found in route.findall(text)}


async def test_each_route_of_vllm_is_served_or_refused_by_name(stack: Stack) -> None:
    """A new route of vLLM's fails this test until it has a route or a reason here."""
    ours = {re.sub(r"\{\w+(:path)?\}", "{}", route.path) for route in stack.gateway.app.routes}
    theirs = {re.sub(r"\{\w+\}", "{}", path) for path in vllm_routes()}
    assert len(theirs) > 50
    assert theirs - ours == UNSERVED.keys()


async def test_a_refusal_says_what_to_do_instead(stack: Stack) -> None:
    """It is a 404, behind a proxy's prefix too."""
    for path, reason in UNSERVED.items():
        for prefix in ("", PREFIX):
            response = await stack.http.post(prefix + path)
            assert response.status_code == 404, path
            assert response.json()["error"]["message"].endswith(f"{path} is not served: {reason}")
    unknown = await stack.http.get("/nowhere")
    assert "the API is under /v1/" in unknown.json()["error"]["message"]
