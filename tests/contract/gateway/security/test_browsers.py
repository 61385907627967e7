"""What browsers are told: pages of other origins, pages of this gateway, and proxies with a prefix."""

from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.responses import HTMLResponse

from gateway.http.security_headers import security_headers
from tests.support.gateway.serving import running_gateway

pytestmark = pytest.mark.contract

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "x-api-key",
}


async def headers_of(method: str, path: str, headers: dict[str, str], **settings: Any) -> httpx.Response:
    async with (
        running_gateway(9, wait=False, max_parked_requests=0, **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=5) as http,
    ):
        return await http.request(method, path, headers=headers)


async def test_other_origins_are_not_served_by_default() -> None:
    """No answer allows them."""
    response = await headers_of("GET", "/version", {"Origin": PAGE})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_an_allowed_origin_asks_first_and_sees_refusals() -> None:
    """A preflight needs no key; a refusal for want of a key has the headers that let the page read it."""
    given = {"allowed_origins": (PAGE,), "api_key": (SecretStr("sk"),)}
    asked = await headers_of("OPTIONS", "/v1/models", PREFLIGHT, **given)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == "x-api-key"
    refused = await headers_of("GET", "/v1/models", {"Origin": PAGE}, **given)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    other = await headers_of("GET", "/v1/models", {"Origin": "https://evil.example"}, **given)
    assert "access-control-allow-origin" not in other.headers


async def test_no_answer_is_guessed_to_be_a_page() -> None:
    """Refusals included."""
    for path in ("/version", "/nothing"):
        assert (await headers_of("GET", path, {})).headers["x-content-type-options"] == "nosniff"


def test_pages_have_a_policy_and_may_bring_their_own() -> None:
    """They load nothing from other sites and are shown in no frame; JSON needs no policy."""
    added = dict(security_headers(HTMLResponse("<p>").raw_headers))
    assert b"default-src 'self'" in added[b"content-security-policy"]
    assert added[b"x-frame-options"] == b"DENY"
    own = HTMLResponse("<p>", headers={"Content-Security-Policy": "default-src 'none'"}).raw_headers
    assert b"content-security-policy" not in dict(security_headers(own))
    assert dict(security_headers([(b"content-type", b"application/json")])) == {
        b"x-content-type-options": b"nosniff"
    }


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/version", 200),
        ("/version", 200),
        ("/api/v1/models", 401),
        ("/v1/models", 401),
        ("/apiversion", 401),
    ],
)
async def test_a_prefix_of_a_proxy_opens_nothing(path: str, status: int) -> None:
    """Behind --root-path, routes need keys as without it, whether the proxy drops the prefix or not."""
    response = await headers_of("GET", path, {}, root_path="/api", api_key=(SecretStr("sk"),))
    assert response.status_code == status
