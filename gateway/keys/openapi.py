"""Keys in the OpenAPI document, so that generated clients and pages of documentation ask for one."""

from typing import Any, Final

from fastapi import FastAPI

from gateway.keys.guard import OPEN_PATHS

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this gateway."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}


def document_keys(app: FastAPI, *, metrics_are_open: bool) -> None:
    """Makes the document of ``app`` say which routes need a key, and how to send it."""
    opened = OPEN_PATHS if metrics_are_open else OPEN_PATHS - {"/metrics"}
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        if "security" not in document:
            document.setdefault("components", {})["securitySchemes"] = _SCHEMES
            document["security"] = [{name: []} for name in _SCHEMES]
            for path in opened & document["paths"].keys():
                for operation in document["paths"][path].values():
                    operation["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI documents this way to extend it
