"""The pages of the API's documentation."""

import re
from typing import Any

import httpx
import pytest

from tests.support.gateway.serving import running_gateway

pytestmark = pytest.mark.contract


async def page(base_url: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=base_url, timeout=5) as http:
        return await http.get(path)


@pytest.mark.parametrize("settings", [{}, {"root_path": "/llm"}])
async def test_pages_load_nothing_from_elsewhere(settings: dict[str, Any]) -> None:
    """Scripts, styles, images and the document come from this gateway; a policy holds browsers to that."""
    async with running_gateway(9, wait=False, **settings) as gateway:
        for path in ("/docs", "/redoc"):
            shown = await page(gateway.base_url, path)
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
                found = await page(gateway.base_url, place)
                assert found.status_code == 200, place
                assert len(found.content) > 1000


async def test_the_folder_of_the_pages_has_nothing_else() -> None:
    """Other names are unknown, whatever they are."""
    async with running_gateway(9, wait=False) as gateway:
        for name in ("other.js", "..%2f__init__.py", "__init__.py"):
            assert (await page(gateway.base_url, f"/docs/{name}")).status_code == 404


async def test_the_pages_can_be_left_out() -> None:
    """As in vLLM, the document goes with them."""
    async with running_gateway(9, wait=False, disable_fastapi_docs=True) as gateway:
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/swagger-ui.css"):
            assert (await page(gateway.base_url, path)).status_code == 404
        assert (await page(gateway.base_url, "/live")).status_code == 200
