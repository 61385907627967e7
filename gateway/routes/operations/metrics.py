"""What this gateway measures, and its version."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.keys.guard import check_admin
from gateway.routes.context import context_of
from gateway.routes.openapi import documented
from gateway.schemas.answers import Version
from gateway.version import VERSION
from protos.errors import TriptychError

router = APIRouter(tags=["Operations"])


@router.get(
    "/metrics",
    summary="Read metrics",
    response_class=PlainTextResponse,
    responses=documented(description="Prometheus' text format."),
)
async def metrics(request: Request) -> Response:
    """Returns metrics in Prometheus' text format: the gateway's, then the scheduler's if it answers.

    `triptych:gateway_scheduler_up` says whether the scheduler's metrics are included. Gateways that share
    a port answer with the sum over all of them; on its own `--metrics-port`, each answers for itself. With
    `--metrics-access admin` it needs a key with admin rights.
    """
    context = context_of(request)
    if context.settings.metrics_access == "admin":
        check_admin(request, context.keys)
    try:
        scheduler = await context.client.get_metrics()
    except TriptychError:
        scheduler = b""
    context.metrics.scheduler_answers(bool(scheduler))
    shared = context.shared_metrics
    settings, server = context.settings, request.scope["server"]
    on_own_port = settings.metrics_port is not None and server is not None and server[1] != settings.port
    if shared is None or on_own_port:
        own = context.metrics.text()
    else:
        own = await shared.text()
    return Response(own + scheduler, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", summary="Read the version", response_model=None, responses=documented(Version))
async def version() -> dict[str, str]:
    """Returns the version of Triptych."""
    return {"version": VERSION}
