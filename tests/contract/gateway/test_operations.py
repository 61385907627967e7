"""Probes, the routes that only operators may use, and those of vLLM that are not served."""

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from gateway import VERSION
from gateway.operations.routes import UNSERVED, ServerInfo
from tests.support.gateway.documented import check_answer
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

USER, ADMIN = {"authorization": "Bearer sk-user"}, {"x-api-key": "sk-admin"}

PREFIX = "/proxied"
# Servers of other commands than `vllm serve`.
OTHER_SERVERS = {"dp_supervisor.py", "preload.py"}

OPERATORS = [
    ("GET", "/server_info"),
    ("GET", "/tokenizer_info"),
    ("GET", "/is_sleeping"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/reset_encoder_cache"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(
        TEXT, api_key=(SecretStr("sk-user"),), admin_api_key=SecretStr("sk-admin"), max_parked_requests=0,
        root_path=PREFIX,
    ) as stack:  # fmt: skip
        yield stack


async def test_probes_need_no_key_and_follow_the_scheduler(stack: Stack) -> None:
    """A gateway lives whatever its scheduler says; the other probes are 503 while no replica is ready."""
    probes = [("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")]
    for ready, status in ((True, 200), (False, 503)):
        stack.scheduler.ready = ready
        for method, path in probes:
            response = await stack.http.request(method, path)
            assert response.status_code == status, path
            if not ready:
                assert "compiling 3 of 7" in response.json()["error"]["message"]
                assert "retry-after" in response.headers
        assert (await stack.http.get("/live")).status_code == 200


async def test_the_load_is_the_number_of_requests_under_way(stack: Stack) -> None:
    assert (await stack.http.get("/load")).json() == {"server_load": 0}
    stack.scheduler.pause_after = 2
    chat = asyncio.create_task(stack.http.post("/v1/chat/completions", json=CHAT, headers=USER))
    await stack.scheduler.until(lambda: len(stack.scheduler.requests) == 1)
    assert (await stack.http.get("/load")).json() == {"server_load": 1}
    await stack.scheduler.resume()
    await chat
    assert (await stack.http.get("/load")).json() == {"server_load": 0}


async def test_routes_for_operators_need_admin_rights(stack: Stack) -> None:
    """Another key gets 403, no key 401."""
    for method, path in OPERATORS:
        for headers, status in ((ADMIN, 200), (USER, 403), ({}, 401)):
            response = await stack.http.request(method, path, headers=headers)
            assert response.status_code == status, path
    assert stack.scheduler.num_resets == 1


async def test_server_info_has_settings_and_versions_but_no_secret(stack: Stack) -> None:
    response = await stack.http.get("/server_info", headers=ADMIN)
    info: ServerInfo = response.json()
    check_answer(ServerInfo, info)
    assert info["settings"]["max_parked_requests"] == 0
    assert info["settings"]["admin_api_key"] == "**********"
    assert info["versions"]["triptych"] == VERSION
    assert info["model"] is not None
    assert info["model"]["names"] == ["smollm2"]
    assert not any(word in response.text for word in ("sk-user", "sk-admin"))


async def test_tokenizer_info_is_the_configuration_with_its_template(stack: Stack) -> None:
    response = await stack.http.get("/tokenizer_info", headers=ADMIN)
    config = json.loads((stack.scheduler.folder / "tokenizer_config.json").read_text())
    info = response.json()
    assert info["tokenizer_class"] == config["tokenizer_class"]
    assert info["eos_token"] == config["eos_token"]
    assert info["chat_template"] == (stack.scheduler.folder / "chat_template.jinja").read_text()
    assert all(isinstance(token, str) for token in info.get("added_tokens_decoder", {}).values())


async def test_running_requests_are_not_reset(stack: Stack) -> None:
    refused = await stack.http.post("/reset_prefix_cache?reset_running_requests=true", headers=ADMIN)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "reset_running_requests"
    reset = await stack.http.post("/reset_prefix_cache?reset_running_requests=false", headers=ADMIN)
    assert reset.json() == {"success": True}


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        ({}, []),
        ({"enable_tokenizer_info_endpoint": True}, ["/tokenizer_info"]),
        ({"dev_mode": True}, [path for _, path in OPERATORS]),
    ],
)
async def test_settings_open_routes_without_keys(settings: dict[str, Any], opened: list[str]) -> None:
    async with running_stack(TEXT, **settings) as stack:
        for method, path in OPERATORS:
            response = await stack.http.request(method, path)
            assert response.status_code == (200 if path in opened else 403), path


@pytest.mark.parametrize("keys", [{"api_key": (SecretStr("sk-user"),)}, {}])
async def test_metrics_may_need_admin_rights(keys: dict[str, Any]) -> None:
    """Whether or not other routes need a key; the document says so."""
    settings: dict[str, Any] = {"admin_api_key": SecretStr("sk-admin"), "metrics_access": "admin", **keys}
    async with running_stack(TEXT, **settings) as stack:
        for headers, status in ((ADMIN, 200), (USER, 403 if keys else 401), ({}, 401)):
            response = await stack.http.get("/metrics", headers=headers)
            assert response.status_code == status
            assert ("http_requests_total" in response.text) is (status == 200)
        document = stack.gateway.app.openapi()
        assert "security" not in document["paths"]["/metrics"]["get"]


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
            response = await stack.http.post(prefix + path, headers=USER)
            assert response.status_code == 404, path
            assert response.json()["error"]["message"].endswith(f"{path} is not served: {reason}")
    unknown = await stack.http.get("/nowhere", headers=USER)
    assert "the API is under /v1/" in unknown.json()["error"]["message"]
