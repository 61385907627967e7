"""Pages of the API's documentation. Their scripts and styles come from this gateway, never from elsewhere."""

from importlib import resources
from typing import Final

from fastapi import APIRouter
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from gateway.auth.middleware import PAGE_FILES, PAGE_FOLDER
from gateway.http.errors import UnknownRoute

router = APIRouter(include_in_schema=False)

_PACKAGE: Final = "fastapi_offline"
_TYPES: Final = {"js": "text/javascript", "css": "text/css", "png": "image/png"}
# The files change with the package alone.
_CACHING: Final = {"cache-control": "max-age=86400"}


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Returns the page to read about the routes and to try them."""
    root = _root(request)
    return get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="Triptych",
        swagger_js_url=f"{root}{PAGE_FOLDER}swagger-ui-bundle.js",
        swagger_css_url=f"{root}{PAGE_FOLDER}swagger-ui.css",
        swagger_favicon_url=f"{root}{PAGE_FOLDER}favicon.png",
    )


@router.get("/redoc")
async def redoc(request: Request) -> HTMLResponse:
    """Returns the page that describes the API for reading."""
    root = _root(request)
    return get_redoc_html(
        openapi_url=f"{root}/openapi.json",
        title="Triptych",
        redoc_js_url=f"{root}{PAGE_FOLDER}redoc.standalone.js",
        redoc_favicon_url=f"{root}{PAGE_FOLDER}favicon.png",
        with_google_fonts=False,
    )


@router.get(PAGE_FOLDER + "{name}")
def page_file(name: str) -> Response:
    """Returns a script, a style sheet or an image of the pages."""
    if name not in PAGE_FILES:
        raise UnknownRoute(f"there is no {PAGE_FOLDER}{name} here; the pages are /docs and /redoc")
    content = resources.files(_PACKAGE).joinpath("static", name).read_bytes()
    return Response(content, headers=_CACHING, media_type=_TYPES[name.rpartition(".")[2]])


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/")
