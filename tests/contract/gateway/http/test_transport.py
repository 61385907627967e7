"""The forms in which a request may come: paths, methods, headers, encodings and marks before JSON."""

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from gateway import VERSION
from gateway.scheduler_client.served_model import ServedModelWatcher
from tests.support.gateway.serving import CHAT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

COMPLETIONS = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
BODY = json.dumps(PROMPT).encode()
# The limit of the module's gateway is 100,000 bytes.
TOO_LONG = b'{"prompt": "x"' + b" " * 200_000 + b"}"


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


BOMB = packed(bytes(200_000_000))


async def post(stack: Stack, body: bytes, encoding: str, **headers: str) -> httpx.Response:
    return await stack.http.post(COMPLETIONS, content=body, headers={"content-encoding": encoding, **headers})


def without_ids(response: httpx.Response) -> Any:
    """Returns an answer's object without the fields that differ from one answer to the next."""
    if "json" not in response.headers.get("content-type", ""):
        return response.headers.get("content-type")
    body = response.json()
    return {k: v for k, v in body.items() if k not in ("id", "created", "server_load", "request_id")}


async def test_a_trailing_slash_changes_nothing(stack: Stack) -> None:
    """Every route answers the same with a slash or two at the end of its path, and nothing redirects."""
    routes = [route for route in stack.gateway.app.routes if isinstance(route, APIRoute)]
    assert len(routes) > 30
    for route in routes:
        path = route.path
        for name in route.param_convertors:
            path = path.replace(f"{{{name}}}", "x").replace(f"{{{name}:path}}", "x")
        for method in route.methods:
            plain = await stack.http.request(method, path, json=PROMPT)
            for end in ("/", "//"):
                slashed = await stack.http.request(method, path + end, json=PROMPT)
                assert slashed.status_code == plain.status_code, (method, path + end)
                assert without_ids(slashed) == without_ids(plain), (method, path + end)


async def test_a_trailing_slash_keeps_body_and_query(stack: Stack) -> None:
    found = await stack.stream("/v1/chat/completions/?a=b", CHAT)
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in found[:-1])
    model = await stack.http.get("/v1/models/smollm2/")
    assert model.json()["id"] == "smollm2"
    assert [one["id"] for one in (await stack.http.get("/v1/models/")).json()["data"]] == ["smollm2"]


async def test_head_answers_as_get_without_a_body(stack: Stack) -> None:
    """Every GET route takes HEAD, with the same status and the same length."""
    routes: list[Any] = [
        one for one in stack.gateway.app.routes if "GET" in (getattr(one, "methods", None) or set[str]())
    ]
    for route in routes:
        path = route.path.partition("{")[0] + ("smollm2" if "{" in route.path else "")
        got, head = await stack.http.get(path), await stack.http.head(path)
        assert head.status_code == got.status_code, path
        assert head.content == b"", path
        assert head.headers.get("content-type") == got.headers.get("content-type"), path
        if not path.startswith("/metrics"):  # grows with every request
            assert head.headers.get("content-length") == got.headers.get("content-length"), path


async def test_head_of_other_routes_is_refused(stack: Stack) -> None:
    response = await stack.http.head(COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert (await stack.http.head("/nothing")).status_code == 404
    assert (await stack.http.post("/version")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", packed(BODY)),
        ("GZIP", packed(BODY)),
        ("x-gzip", packed(BODY)),
        ("gzip", packed(BODY[:9]) + packed(BODY[9:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("deflate, gzip", packed(zlib.compress(BODY))),
        ("identity", BODY),
        ("", BODY),
    ],
    ids=lambda value: value if isinstance(value, str) else "body",
)
async def test_encoded_bodies_are_decoded(stack: Stack, encoding: str, body: bytes) -> None:
    """A compressed body means the same, also if it arrives byte by byte."""
    plain = await stack.http.post(COMPLETIONS, content=BODY)
    whole = await post(stack, body, encoding)
    assert whole.status_code == 200, whole.text

    async def bytewise() -> Any:
        for at in range(len(body)):
            yield body[at : at + 1]

    pieces = await stack.http.post(COMPLETIONS, content=bytewise(), headers={"content-encoding": encoding})
    assert without_ids(whole) == without_ids(pieces) == without_ids(plain)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, br", "aes128gcm", "gzip, gzip, gzip"])
async def test_other_encodings_are_refused_by_name(stack: Stack, encoding: str) -> None:
    response = await post(stack, b"x" * 1000, encoding)
    assert response.status_code == 415
    assert "content encoding" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate"
    messages = await stack.http.post("/v1/messages", content=b"x", headers={"content-encoding": encoding})
    assert (messages.status_code, messages.json()["type"]) == (415, "error")


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", BODY),
        ("gzip", packed(BODY)[:-9]),
        ("gzip", packed(BODY) + b"more"),
        ("deflate", zlib.compress(BODY) + b"more"),
        ("gzip", packed(BODY)[:-8] + b"\0" * 8),
        ("gzip", packed(b"") * 1000 + packed(BODY)),
        ("deflate", b"\xff" * 9),
        ("gzip", b""),
    ],
)
async def test_broken_encodings_are_refused(stack: Stack, encoding: str, body: bytes) -> None:
    """A body that is not what its header says is the client's mistake."""
    response = await post(stack, body, encoding)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", packed(TOO_LONG)),
        ("deflate", zlib.compress(TOO_LONG)),
        ("gzip", BOMB),
        ("gzip, gzip", packed(BOMB)),
    ],
)
async def test_the_limit_counts_decoded_bytes(stack: Stack, encoding: str, body: bytes) -> None:
    """A small body that decodes to a long one is refused as the long one is."""
    response = await post(stack, body, encoding)
    assert response.status_code == 413, response.text
    assert (await stack.http.post(COMPLETIONS, content=TOO_LONG)).json() == response.json()
    assert (await stack.http.post(COMPLETIONS, content=BODY)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {**CHAT, "max_tokens": 2}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ],
)
async def test_a_byte_order_mark_is_skipped(stack: Stack, path: str, body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    assert (await stack.http.post(path, content=b"\xef\xbb\xbf" + text)).status_code == 200


@pytest.mark.parametrize("model", ["", None])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {**CHAT, "max_tokens": 3}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [504]}),
    ],
)
async def test_an_empty_model_means_the_served_one(
    stack: Stack, path: str, body: dict[str, Any], model: str | None
) -> None:
    """Clients that have no model set send an empty name or null; answers show the served model's."""
    response = await stack.http.post(path, json={**body, "model": model})
    assert response.status_code == 200, response.text
    assert response.json().get("model", "smollm2") == "smollm2"


@pytest.mark.parametrize("max_tokens", [2, 9])
async def test_max_completion_tokens_wins(stack: Stack, max_tokens: int) -> None:
    body = {**CHAT, "max_tokens": max_tokens, "max_completion_tokens": 5}
    assert (await stack.http.post("/v1/chat/completions", json=body)).json()["usage"][
        "completion_tokens"
    ] == 5


async def test_version_and_metrics(stack: Stack) -> None:
    """Counts, latencies and tokens appear under vLLM's names."""
    assert (await stack.http.get("/version")).json() == {"version": VERSION}
    await stack.stream("/v1/chat/completions", CHAT)
    await stack.http.post("/v1/completions", content=b"{")
    text = (await stack.http.get("/metrics")).text
    for line in (
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="200"}',
        'http_requests_total{handler="/v1/completions",method="POST",status="400"}',
        'http_request_duration_seconds_count{handler="/v1/chat/completions",method="POST"}',
        'triptych:gateway_errors_total{code="invalid_value",handler="/v1/completions"}',
        'vllm:time_to_first_token_seconds_count{engine="r0",model_name="smollm2"}',
        'vllm:e2e_request_latency_seconds_count{engine="r0",model_name="smollm2"}',
        'vllm:inter_token_latency_seconds_bucket{engine="r0",le="0.025",model_name="smollm2"}',
        'vllm:request_success_total{engine="r0",finished_reason="stop",model_name="smollm2"}',
        'vllm:request_params_n_bucket{engine="r0",le="1.0",model_name="smollm2"}',
        'vllm:request_generation_tokens_count{engine="r0",model_name="smollm2"}',
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
