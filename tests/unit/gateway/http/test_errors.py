"""The table from error classes to HTTP."""

import json

import httpx2
import openai
import pytest

from gateway.http.errors import (
    ClientGone,
    PayloadTooLarge,
    RequestTooSlow,
    UnknownModel,
    UnknownRoute,
    WrongMethod,
    error_response,
)
from protos import errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidArgument("m", param="p"), 400, "invalid_request_error", "invalid_value"),
        (errors.Unsupported("m"), 400, "invalid_request_error", "unsupported_parameter"),
        (errors.ContextExceeded("m"), 400, "invalid_request_error", "context_length_exceeded"),
        (PayloadTooLarge("m"), 413, "invalid_request_error", "payload_too_large"),
        (errors.NotFound("m"), 404, "invalid_request_error", "not_found"),
        (errors.NotFound("m", param="model"), 404, "invalid_request_error", "model_not_found"),
        (UnknownModel("m", param="model"), 404, "invalid_request_error", "model_not_found"),
        (UnknownRoute("m"), 404, "invalid_request_error", "not_found"),
        (WrongMethod("m"), 405, "invalid_request_error", "method_not_allowed"),
        (errors.Overloaded("m"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Unavailable("m"), 503, "service_unavailable_error", "service_unavailable"),
        (errors.TimedOut("m"), 503, "service_unavailable_error", "request_timed_out"),
        (errors.Unimplemented("m"), 501, "invalid_request_error", "not_implemented"),
        (ClientGone("m"), 499, "aborted_error", "request_aborted"),
        (errors.SchemaMismatch("m"), 500, "server_error", "internal_error"),
        (errors.ConfigurationRefused("m"), 500, "server_error", "internal_error"),
        (errors.Internal("m"), 500, "server_error", "internal_error"),
    ],
)
def test_each_error_has_its_status_and_body(
    error: errors.TriptychError, status: int, kind: str, code: str
) -> None:
    response = error_response(error)
    assert response.status_code == status
    body = json.loads(bytes(response.body))
    assert body == {"error": {"message": "m", "type": kind, "param": error.param or None, "code": code}}


@pytest.mark.parametrize(
    ("error", "retries"),
    [
        (errors.Internal("m"), 0),
        (errors.InvalidArgument("m"), 0),
        (RequestTooSlow("m"), 0),
        (errors.Overloaded("m"), 1),
        (errors.Unavailable("m"), 1),
    ],
)
def test_openais_client_repeats_only_what_may_succeed(error: errors.TriptychError, retries: int) -> None:
    """A request that kills workers must not be sent again by a client that retries every 500."""
    calls = 0

    def answer(_: httpx2.Request) -> httpx2.Response:
        nonlocal calls
        calls += 1
        response = error_response(error, {"retry-after-ms": "1"})
        return httpx2.Response(response.status_code, headers=response.headers, content=bytes(response.body))

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    with (
        openai.OpenAI(base_url="http://gateway/v1", api_key="-", max_retries=1, http_client=http) as client,
        pytest.raises(openai.APIStatusError),
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert calls == 1 + retries
    assert ("retry-after" in error_response(error).headers) == bool(retries)
