"""Middleware that lets requests pass only with a key and within its limits; its metrics and documentation."""

from collections.abc import Iterator
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth.key_store import Key, KeyStore, caller_of, set_caller
from gateway.auth.rate_limits import set_admission
from gateway.http.errors import ClientGone, Forbidden, Unauthorized, error_response
from gateway.http.middleware import PAGE_FOLDER, Outcome, add_headers, note, outcome_of
from protos.errors import Overloaded

OPEN_PATHS: Final = frozenset({
    "/health", "/live", "/ready", "/ping", "/load", "/version", "/metrics", "/docs", "/redoc", "/openapi.json",
})  # fmt: skip
"""Paths without keys: they show neither prompts nor answers; probes and scrapers send no keys."""

_KEY_HEADER: Final = "x-api-key"

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this gateway."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}


def shown_keys(headers: Headers) -> Iterator[str]:
    """Yields the keys that a request shows: as bearer token, as Anthropic's clients do, or both."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # Only blanks are stripped: the last byte of a key in UTF-8 may look like a space of Latin-1.
    if scheme.lower() == "bearer" and (key := token.strip(" \t")):
        yield _text(key)
    if key := headers.get(_KEY_HEADER, "").strip(" \t"):
        yield _text(key)


def _text(value: str) -> str:
    # Headers are decoded as latin-1, whatever their bytes are; keys are UTF-8.
    return value.encode("latin-1").decode("utf-8", "surrogateescape")


def check_admin(request: Request, keys: KeyStore) -> None:
    """Lets only requests with admin rights pass."""
    caller = caller_of(request)
    if caller.is_admin:
        return
    if not keys.has_admin:
        raise Forbidden(
            f"{request.url.path} needs a key with admin rights and there is none; start the gateway with"
            " --admin-api-key, or with 'admin: true' for a key of --api-key-file"
        )
    if caller.name:
        raise Forbidden(f"the key '{caller.name}' has no admin rights; use one that has them")
    raise _refusal(request.headers)


def _refusal(headers: Headers) -> Unauthorized:
    if next(shown_keys(headers), None) is None:
        return Unauthorized("the API key is missing; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    return Unauthorized("the API key is wrong; send one that this gateway knows")


class KeyUsage:
    """Metrics of the use of keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Adds the metrics to ``registry``."""
        self._requests = Counter(
            "triptych:gateway_key_requests",
            "Answered HTTP requests with an API key.",
            ("key", "status"),
            registry=registry,
        )
        self._tokens = Counter(
            "triptych:gateway_key_tokens",
            "Tokens of HTTP requests with an API key.",
            ("key", "kind"),
            registry=registry,
        )

    def count(self, key: str, outcome: Outcome) -> None:
        """Counts the answer to a request; ``key`` is the key's name."""
        self._requests.labels(key, str(outcome.status)).inc()
        for kind, count in (("prompt", outcome.prompt_tokens), ("completion", outcome.completion_tokens)):
            if count:
                self._tokens.labels(key, kind).inc(count)


class AuthMiddleware:
    """Wraps the application. Refusals come before the body is read."""

    def __init__(self, app: ASGIApp, *, keys: KeyStore, usage: KeyUsage) -> None:
        """Wraps ``app``."""
        self._app = app
        self._keys = keys
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._keys.refresh()
        headers = Headers(scope=scope)
        key = self._keys.find(shown_keys(headers))
        if key is not None:
            set_caller(scope, key.caller)
            note(scope, key=key.caller.name)
            await self._run(key, scope, receive, send)
        elif self._keys.guards and not _is_open(_path(scope)):
            await error_response(_refusal(headers), path=scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _run(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        admission = None
        if key.limiter is not None and scope["method"] == "POST":
            add_headers(scope, key.limiter.headers)
            try:
                admission = key.limiter.admit()
            except Overloaded as error:
                await error_response(error, path=scope["path"])(scope, receive, send)
                self._usage.count(key.caller.name, outcome_of(scope))
                return
            set_admission(scope, admission)
        try:
            await self._app(scope, receive, send)
        finally:
            outcome = outcome_of(scope)
            self._usage.count(key.caller.name, outcome)
            if admission is not None:
                # A refused request used nothing, whatever it has been charged; one whose client left did.
                refused = outcome.status >= 400 and outcome.status != ClientGone.http_status
                admission.end(0 if refused else outcome.prompt_tokens + outcome.completion_tokens)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(f"{PAGE_FOLDER}/")


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


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
