"""The table from error classes to HTTP."""

import json

import httpx2
import openai
import pytest

from gateway.http import errors as http_errors
from gateway.http.errors import (
    ClientGone,
    PayloadTooLarge,
    RequestTooSlow,
    ShapedError,
    UnknownModel,
    UnknownRoute,
    WrongMethod,
    error_response,
    internal,
    shape_errors,
    shape_for,
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
    """Every class has its status, type and code."""
    response = error_response(error)
    assert response.status_code == status
    body = json.loads(bytes(response.body))
    assert body == {"error": {"message": "m", "type": kind, "param": error.param or None, "code": code}}


def test_a_family_of_paths_has_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol other than OpenAI's shapes the errors of its path and of all paths below it."""
    monkeypatch.setattr(http_errors, "_SHAPES", {})
    shape_errors("/v1/words", lambda error: ShapedError(444, {"word": error.message}, {"x-word": "w"}))
    for path in ("/v1/words", "/v1/words/3", "/behind/a/proxy/v1/words"):
        response = error_response(errors.NotFound("m"), path=path)
        assert (response.status_code, bytes(response.body)) == (444, b'{"word":"m"}')
        assert (response.headers["x-word"], response.headers["x-should-retry"]) == ("w", "false")
    for path in ("", "/v1", "/v1/wordsworth", "/v1/chat/completions"):
        assert shape_for(path)(errors.NotFound("m")).status == 404


@pytest.mark.parametrize(("after_ms", "header"), [(0, "1"), (1, "1"), (1000, "1"), (2500, "3")])
def test_retry_after_is_in_whole_seconds(after_ms: int, header: str) -> None:
    """Retry-After is rounded up and at least one."""
    assert error_response(errors.Overloaded("m", retry_after_ms=after_ms)).headers["retry-after"] == header


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


def test_an_unexpected_exception_keeps_its_text_to_the_log() -> None:
    """Messages of unexpected exceptions may hold secrets."""
    assert "secret" not in internal(ValueError("secret")).message
