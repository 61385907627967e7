"""What browsers get: the pages of the documentation, and answers to pages of other origins and of proxies."""

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.responses import HTMLResponse

from gateway.http.middleware import security_headers
from tests.support.gateway.serving import running_gateway

pytestmark = pytest.mark.contract

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "x-api-key",
}


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_gateway(9, wait=False, max_parked_requests=0, **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=5) as http,
    ):
        yield http


async def test_by_default_other_origins_are_not_served_and_no_answer_is_guessed_to_be_a_page() -> None:
    async with serving() as http:
        for path, status in (("/version", 200), ("/nothing", 404)):
            response = await http.get(path, headers={"Origin": PAGE})
            assert response.status_code == status
            assert not [name for name in response.headers if name.startswith("access-control")]
            assert response.headers["x-content-type-options"] == "nosniff"


async def test_an_allowed_origin_asks_first_and_sees_refusals() -> None:
    """A preflight needs no key; a refusal for want of a key has the headers that let the page read it."""
    async with serving(allowed_origins=(PAGE,), api_key=(SecretStr("sk"),)) as http:
        asked = await http.options("/v1/models", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-headers"] == "x-api-key"
        refused = await http.get("/v1/models", headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE
        other = await http.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_prefix_of_a_proxy_opens_nothing() -> None:
    """Behind --root-path, routes need keys as without it, whether the proxy drops the prefix or not."""
    statuses = {
        "/api/version": 200,
        "/version": 200,
        "/api/v1/models": 401,
        "/v1/models": 401,
        "/apiversion": 401,
    }
    async with serving(root_path="/api", api_key=(SecretStr("sk"),)) as http:
        assert {path: (await http.get(path)).status_code for path in statuses} == statuses


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


@pytest.mark.parametrize("settings", [{}, {"root_path": "/llm"}])
async def test_pages_load_nothing_from_elsewhere(settings: dict[str, Any]) -> None:
    """Scripts, styles, images and the document come from this gateway; a policy holds browsers to that."""
    async with serving(**settings) as http:
        for path in ("/docs", "/redoc"):
            shown = await http.get(path)
            assert shown.status_code == 200
            assert "default-src 'self'" in shown.headers["content-security-policy"]
            assert "http" not in shown.headers["content-security-policy"]
            assert shown.headers["x-frame-options"] == "DENY"
            loaded = re.findall(r"""(?:src|href|spec-url)="([^"]*)"|url: '([^']*)'""", shown.text)
            places = {one or other for one, other in loaded}
            assert len(places) >= 3, shown.text
            for place in places:
                root = settings.get("root_path", "")
                assert place.startswith(f"{root}/"), place
                for asked in (place, place.removeprefix(root)):  # a proxy may drop the prefix
                    found = await http.get(asked)
                    assert found.status_code == 200, asked
                    assert len(found.content) > 1000


async def test_the_folder_of_the_pages_has_nothing_else() -> None:
    """Other names are unknown, whatever they are."""
    async with serving() as http:
        for name in ("other.js", "..%2f__init__.py", "__init__.py"):
            assert (await http.get(f"/docs/files/{name}")).status_code == 404


async def test_the_pages_can_be_left_out() -> None:
    async with serving(disable_fastapi_docs=True) as http:
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/files/swagger-ui.css"):
            assert (await http.get(path)).status_code == 404
        assert (await http.get("/live")).status_code == 200
