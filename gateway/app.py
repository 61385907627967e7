"""The HTTP application: routes, middleware, error handlers, and the lifespan of the scheduler client."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from gateway import VERSION
from gateway.auth.key_store import KeyStore, account_of
from gateway.auth.middleware import AuthMiddleware, KeyUsage, document_keys
from gateway.generation.respond import Context
from gateway.http.bodies import BodyLimits
from gateway.http.errors import UnknownRoute, WrongMethod, error_response, sent_method
from gateway.http.middleware import PAGE_FOLDER, RequestMiddleware
from gateway.messages_api import routes as messages
from gateway.metrics import Metrics, SharedMetrics
from gateway.openai import chat, completions, models
from gateway.operations import routes as operations
from gateway.operations import tokenize
from gateway.operations.routes import UNSERVED
from gateway.pooling import routes as pooling
from gateway.responses_api import routes as responses
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.served_model import ServedModelWatcher, load_text
from gateway.settings import Settings
from gateway.text.chat_template import read_template
from gateway.text.tokenization import TextCodec, TextWorker
from protos.errors import InvalidArgument, TriptychError
from protos.service.backpressure import UnreadLimits
from protos.service.logs import get_logger
from protos.service.tls import keep_reminding
from protos.service.tracing import Tracer

# Opens the OpenAPI document.
_DESCRIPTION: Final = (
    "OpenAI's HTTP interface, with vLLM's extensions. Bodies are JSON objects. Parameters without effect are"
    " accepted; parameters that would change the output but are not served are refused by name. Every answer has"
    " the header X-Request-Id: the client's own, if it sent a usable one. The request's key names the"
    " tenant, or, where the gateway believes it, the header X-Tenant; the scheduler shares capacity fairly among"
    " tenants. Keys travel as bearer tokens or in the header x-api-key. Statuses 429 and 503 carry Retry-After."
)

_FAMILIES: Final = (
    chat, completions, messages, responses, pooling, models, tokenize, operations,
)  # fmt: skip


def random_id() -> str:
    """Returns 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def create_app(
    settings: Settings,
    client: InferenceClient,
    *,
    new_id: Callable[[], str] = random_id,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    tracer: Tracer | None = None,
    on_unusable: Callable[[TriptychError], None] = lambda _: None,
) -> FastAPI:
    """Builds the application. Its lifespan connects ``client`` and closes it.

    Args:
        settings: the gateway's settings.
        client: not started yet.
        new_id: makes ids of answers and requests.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        tracer: writes the spans of requests, if anything does.
        on_unusable: called if the first model's text files cannot be used.
    """
    context = _assemble(settings, client, new_id, clock, wall_clock, on_unusable)
    options: dict[str, Any] = {
        "title": "Triptych",
        "description": _DESCRIPTION,
        "version": VERSION,
        "lifespan": _lifespan(context),
        "redirect_slashes": False,
        "root_path": settings.root_path,
    }
    if settings.disable_fastapi_docs:
        app = FastAPI(openapi_url=None, **options)
    else:
        app = FastAPIOffline(static_url=PAGE_FOLDER, **options)
    app.state.context = context
    for family in _FAMILIES:
        app.include_router(family.router)
    app.add_exception_handler(TriptychError, _on_triptych_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    if context.keys.guards:
        document_keys(app, metrics_are_open=settings.metrics_access == "open")
    _add_middleware(app, context, tracer)
    return app


def _assemble(
    settings: Settings,
    client: InferenceClient,
    new_id: Callable[[], str],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    on_unusable: Callable[[TriptychError], None],
) -> Context:
    watcher = ServedModelWatcher(
        client,
        poll_s=settings.model_poll_s,
        template=read_template(settings.chat_template),
        on_unusable=on_unusable,
    )
    most, flag = settings.max_unread_answer_bytes, "--max-unread-answer-bytes"
    unread = UnreadLimits(per_reader=most, total=most, flags=(flag, flag), unit="bytes")
    bodies = BodyLimits(settings.max_body_bytes, settings.max_total_body_bytes, settings.read_timeout_s)
    measured = Metrics(
        lambda: watcher.model_name,
        lambda: client.num_pending,
        lambda: len(client.startup_queue),
        lambda: client.is_refused,
        unread,
        lambda: bodies.num_bytes,
        lambda: watcher.max_model_len,
    )
    shared = settings.metrics_folder
    return Context(
        settings,
        client,
        watcher,
        measured,
        unread,
        bodies,
        TextWorker(settings.max_waiting_texts),
        KeyStore.from_settings(settings, clock, shared and shared / "keys"),
        SharedMetrics(shared, measured.text) if shared else None,
        new_id=new_id,
        clock=clock,
        wall_clock=wall_clock,
    )


def _lifespan(context: Context) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if context.shared_metrics is not None:
            await context.shared_metrics.start()
        await context.client.start()
        context.watcher.start()
        reminder = asyncio.create_task(keep_reminding(context.metrics.certificates.expiries))
        try:
            yield
        finally:
            reminder.cancel()
            await context.watcher.close()
            await context.client.close()
            if context.shared_metrics is not None:
                await context.shared_metrics.close()
            context.text_worker.close()

    return lifespan


def _add_middleware(app: FastAPI, context: Context, tracer: Tracer | None) -> None:
    settings = context.settings
    app.add_middleware(AuthMiddleware, keys=context.keys, usage=KeyUsage(context.metrics.registry))
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, **_cross_origin(settings))
    app.add_middleware(
        RequestMiddleware,
        metrics=context.metrics,
        bodies=context.bodies,
        tenant_of=lambda scope: account_of(Request(scope)).tenant,
        new_id=context.new_id,
        clock=context.clock,
        tracer=tracer,
    )


def _cross_origin(settings: Settings) -> dict[str, Any]:
    return {
        "allow_origins": settings.allowed_origins,
        "allow_methods": settings.allowed_methods,
        "allow_headers": settings.allowed_headers,
        "allow_credentials": settings.allow_credentials,
        "expose_headers": ("*",),
    }


def check_text(settings: Settings, folder: Path) -> TextCodec:
    """Loads a model's tokenizer and chat template as a gateway with these settings would."""
    return load_text(folder, read_template(settings.chat_template))


def _on_triptych_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, TriptychError):
        raise error
    # "Retry later" is an answer, not a fault: health checks get it every second while a model loads.
    if error.http_status >= 500 and not error.retryable:
        get_logger().warning("request failed", error=str(error), code=type(error).__name__)
    return error_response(error, path=request.url.path)


def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path, method = request.url.path, sent_method(request.scope)
    headers = dict(error.headers or {})
    reason = UNSERVED.get(path.removeprefix(request.scope.get("root_path", "")))
    if reason is not None:
        return error_response(UnknownRoute(f"{path} is not served: {reason}"), path=path)
    match error.status_code:
        case 404:
            return error_response(
                UnknownRoute(f"there is no {path} here; the API is under /v1/"), headers, path=path
            )
        case 405:
            allowed = headers["Allow"] = headers.get("Allow", "").replace("GET", "GET, HEAD")
            return error_response(
                WrongMethod(f"{path} does not take {method}; use {allowed}"), headers, path=path
            )
        case _:
            return error_response(InvalidArgument(str(error.detail)), headers, path=path)
