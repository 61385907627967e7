"""What operators and load balancers ask: health, metrics, version."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.context import context_of
from gateway.version import VERSION
from protos.errors import TriptychError, Unavailable
from protos.triptych.v1 import inference_pb2 as inference

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 if a request sent now would run; otherwise 503 and the reason."""
    context = context_of(request)
    load = await context.client.get_load()
    if not any(replica.state == inference.REPLICA_STATE_READY for replica in load.replicas):
        details = [f"{replica.replica_id}: {replica.detail or 'not ready'}" for replica in load.replicas]
        raise Unavailable(f"no replica is ready ({'; '.join(details) or 'no worker has registered'})")
    context.watcher.served()
    return Response(status_code=200)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Measurements in Prometheus' text format: the gateway's, then the scheduler's if it answers."""
    context = context_of(request)
    try:
        theirs = await context.client.get_metrics()
    except TriptychError:
        theirs = None
    return Response(context.metrics.text(theirs), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """Triptych's version."""
    return {"version": VERSION}
