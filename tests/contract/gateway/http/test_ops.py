"""Operators' routes: health, metrics, request ids and tenants."""

from typing import Any

import pytest

from gateway import VERSION
from gateway.scheduler_client.served_model import ServedModelWatcher
from tests.support.gateway.serving import CHAT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


async def test_version_and_metrics(stack: Stack) -> None:
    """Counts, latencies and tokens appear under vLLM's names."""
    assert (await stack.http.get("/version")).json() == {"version": VERSION}
    await stack.stream("/v1/chat/completions", CHAT)
    await stack.http.post("/v1/completions", content=b"{")
    text = (await stack.http.get("/metrics")).text
    for line in (
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="200"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="400"} 1.0',
        'http_request_duration_seconds_count{handler="/v1/chat/completions",method="POST"} 1.0',
        'triptych:gateway_errors_total{code="invalid_value",handler="/v1/completions"} 1.0',
        'vllm:time_to_first_token_seconds_count{engine="r0",model_name="smollm2"} 1.0',
        'vllm:e2e_request_latency_seconds_count{engine="r0",model_name="smollm2"} 1.0',
        'vllm:inter_token_latency_seconds_bucket{engine="r0",le="0.025",model_name="smollm2"}',
        'vllm:request_success_total{engine="r0",finished_reason="stop",model_name="smollm2"} 1.0',
        'vllm:request_params_n_bucket{engine="r0",le="1.0",model_name="smollm2"} 1.0',
        'vllm:request_generation_tokens_count{engine="r0",model_name="smollm2"} 1.0',
        "triptych:gateway_requests_in_flight 0.0",
        "process_resident_memory_bytes",
    ):
        assert line in text


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_request_ids_are_passed_on(stack: Stack, given: str) -> None:
    """The client's id comes back and begins the wire id, which is unique even for repeated ids."""
    for _ in range(2):
        response = await stack.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": given}
        )
        assert response.headers["x-request-id"] == given
    one, two = (request.request_id for request in stack.scheduler.requests)
    assert one != two
    assert one.startswith(given[:90])
    assert max(len(one), len(two)) <= 120


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", "é"])
async def test_unusable_request_ids_are_replaced(stack: Stack, given: str) -> None:
    """An id that would break a log or a header is not passed on."""
    response = await stack.http.get("/version", headers={b"X-Request-Id": given.encode()})
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("given", [None, "", "team-7", "Équipe 7", "x" * 256])
async def test_tenants_are_passed_on(stack: Stack, path: str, given: str | None) -> None:
    """The header names the tenant; without it, the request belongs to the common tenant."""
    body = {"prompt": "x"} if path == "/v1/completions" else CHAT
    headers = {} if given is None else {b"X-Tenant": given.encode()}
    assert (await stack.http.post(path, json=body, headers=headers)).status_code == 200
    assert [request.tenant for request in stack.scheduler.requests] == [given or ""]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([b"x" * 257], "longer than 256 bytes"),
        (["é".encode() * 129], "longer than 256 bytes"),
        ([b"\xff"], "not UTF-8"),
        (["a\u200eb".encode()], "unprintable"),
        ([b"a", b"b"], "several"),
    ],
)
async def test_unusable_tenants_are_refused(stack: Stack, given: list[bytes], words: str) -> None:
    """A header that two readers may understand differently must not grant another tenant's share."""
    headers = [(b"X-Tenant", value) for value in given]
    response = await stack.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"] == "X-Tenant"
    assert stack.scheduler.requests == []


async def test_a_bug_is_a_500_that_can_be_found(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception has OpenAI's body and the request's id; details stay in the log."""

    def broken(_self: Any, _model: Any = None) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(ServedModelWatcher, "served", broken)
    response = await stack.http.get("/v1/models", headers={"X-Request-Id": "find-me"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "a secret" not in response.text
    assert response.headers["x-request-id"] == "find-me"
