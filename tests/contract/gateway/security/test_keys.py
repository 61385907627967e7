"""API keys over real HTTP: who passes, what the scheduler hears of a key, and limits."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

KEYS = [
    {"name": "plain", "key": "sk-plain", "tenant": "team", "min_priority": -1, "max_priority": 1},
    {"name": "proxy", "key": "sk-proxy-ä", "may_name_tenant": True},
    {"name": "slow", "key": "sk-slow", "requests_per_minute": 2},
    {"name": "short", "key": "sk-short", "tokens_per_minute": 40},
    {"name": "tiny", "key": "sk-tiny", "tokens_per_minute": 20},
    {"name": "gone", "key": "sk-gone", "tokens_per_minute": 20},
    {"name": "nbsp", "key": "sk-à"},
]


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Runs a gateway with keys of all kinds."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(json.dumps({"keys": KEYS}))
    given: dict[str, Any] = {
        "api_key": (SecretStr("sk-flag"),),
        "api_key_file": path,
        "max_parked_requests": 0,
    }
    async with running_stack(TEXT, **given) as stack:
        yield stack


async def chat(stack: Stack, headers: Any, **changes: Any) -> httpx.Response:
    return await stack.http.post("/v1/chat/completions", json={**CHAT, **changes}, headers=headers)


async def test_every_route_of_the_api_needs_a_key(stack: Stack) -> None:
    """Also unknown paths and other methods; routes for probes and scrapers do not."""
    paths = {
        (method.upper(), path.replace("{model}", "smollm2"))
        for path, methods in stack.gateway.app.openapi()["paths"].items()
        for method in methods
    }
    opened = {
        "/health", "/live", "/ready", "/ping", "/load", "/version", "/metrics", "/docs", "/redoc", "/openapi.json",
    }  # fmt: skip
    for method, path in [*sorted(paths), ("GET", "/nothing"), ("OPTIONS", "/v1/models"), ("GET", "//health")]:
        response = await stack.http.request(method, path, content=b"{")
        if path in opened:
            assert response.status_code == 200, path
            continue
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert "API key is missing" in response.text
    assert (await stack.http.get("/nothing", headers=bearer("sk-flag"))).status_code == 404


async def test_the_document_says_which_routes_need_a_key(stack: Stack) -> None:
    """In both forms that clients send, and without a key for probes."""
    document = (await stack.http.get("/openapi.json")).json()
    assert document["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert document["components"]["securitySchemes"].keys() == {"bearer", "x-api-key"}
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("sk-flag"), 200),
        (bearer("sk-plain"), 200),
        (bearer("sk-proxy-ä"), 200),
        ({"x-api-key": "sk-plain"}, 200),
        ({"authorization": "bearer  sk-plain"}, 200),
        ({"authorization": "Bearer EMPTY", "x-api-key": "sk-plain"}, 200),
        ({}, 401),
        (bearer("sk-à"), 200),
        (bearer("sk-plai"), 401),
        (bearer("sk-plain2"), 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        ({"authorization": "Basic sk-plain"}, 401),
        ({"authorization": "sk-plain"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
async def test_a_key_is_shown_in_either_header(stack: Stack, headers: Any, status: int) -> None:
    """As bearer token, or as Anthropic's clients do; refusals have OpenAI's form."""
    response = await chat(stack, headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["x-should-retry"] == "false"
        assert not stack.scheduler.requests


async def test_the_key_decides_tenant_priority_and_salt(stack: Stack) -> None:
    """The scheduler never sees a tenant or a priority that the key does not allow, nor a shared salt."""
    for key in ("sk-plain", "sk-proxy-ä", "sk-flag"):
        headers = bearer(key) | {b"X-Tenant": b"paid"}
        for changes in ({"priority": 7}, {"priority": -7, "cache_salt": "s"}):
            assert (await chat(stack, headers, **changes)).status_code == 200
    found = [(request.tenant, request.priority) for request in stack.scheduler.requests]
    assert found == [("team", 1), ("team", -1), ("paid", 0), ("paid", 0), ("api-key-1", 7), ("api-key-1", -7)]
    salts = [request.cache_salt for request in stack.scheduler.requests]
    assert len(set(salts)) == 6
    assert {len(salt) for salt in salts} == {64}
    ignored = bearer("sk-plain") | {b"X-Tenant": b"x" * 1000}
    assert (await chat(stack, ignored)).status_code == 200


async def test_requests_per_minute(stack: Stack) -> None:
    """Answers say what is left; the third request gets 429 and hears when to retry."""
    first, second, third = [
        await chat(stack, bearer("sk-slow"), stream=stream) for stream in (True, False, False)
    ]
    left = [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)]
    assert left == ["1", "0", "0"]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert third.status_code == 429
    assert 25 <= int(third.headers["retry-after"]) <= 30
    assert len(stack.scheduler.requests) == 2


async def test_tokens_per_minute(stack: Stack) -> None:
    """Prompt and answer count, and a bad request does not; the key's metrics have the same counts."""
    bad = await chat(stack, bearer("sk-short"), temperature=-1)
    assert bad.status_code == 400
    assert bad.headers["x-ratelimit-remaining-tokens"] == "40"
    answer = await chat(stack, bearer("sk-short"))
    usage = answer.json()["usage"]
    assert usage["total_tokens"] > 40
    assert (await chat(stack, bearer("sk-short"))).status_code == 429
    metrics = (await stack.http.get("/metrics")).text
    for kind in ("prompt", "completion"):
        count = float(usage[f"{kind}_tokens"])
        assert f'triptych:gateway_key_tokens_total{{key="short",kind="{kind}"}} {count}' in metrics
    assert 'triptych:gateway_key_requests_total{key="short",status="429"} 1.0' in metrics


async def test_prompts_are_charged_before_they_run(stack: Stack) -> None:
    """A client cannot start many requests at once on the tokens of one."""
    stack.scheduler.pause_after = 1
    first = asyncio.create_task(chat(stack, bearer("sk-tiny")))
    await stack.scheduler.until(lambda: len(stack.scheduler.requests) == 1)
    assert (await chat(stack, bearer("sk-tiny"))).status_code == 429
    assert len(stack.scheduler.requests) == 1
    first.cancel()
    await stack.scheduler.until(lambda: bool(stack.scheduler.aborted))


async def test_a_client_that_leaves_pays(stack: Stack) -> None:
    """It would otherwise have the worker compute any number of prompts for nothing."""
    stack.scheduler.pause_after = 1
    request = asyncio.create_task(chat(stack, bearer("sk-gone")))
    await stack.scheduler.until(lambda: len(stack.scheduler.requests) == 1)
    request.cancel()
    await stack.scheduler.until(lambda: bool(stack.scheduler.aborted))
    async with asyncio.timeout(5):
        while 'key="gone",status="499"' not in (await stack.http.get("/metrics")).text:
            pass
    assert (await chat(stack, bearer("sk-gone"))).status_code == 429


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ("", b"", 401),
        ("expect: 100-continue\r\n", b"", 401),
        ("", b"x" * 100_000, 401),
        ("expect: 100-continue\r\nauthorization: Bearer sk-flag\r\n", b"", 413),
    ],
)
async def test_a_stranger_learns_no_limit(stack: Stack, headers: str, body: bytes, status: int) -> None:
    """A body that is announced as too long is asked for from nobody, and refused to keys alone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n{headers}\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(5):
        answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()
