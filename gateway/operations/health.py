"""Probes of supervisors and load balancers: whether this gateway lives and serves, and how busy it is."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.routes.context import context_of
from gateway.routes.openapi import api_router, documented
from protos.errors import Unavailable
from protos.triptych.v1 import inference_pb2 as inference

router = api_router("Operations")

_SERVES = documented(description="A replica is ready. The body is empty.")


class ServerLoad(TypedDict):
    """How busy this gateway is."""

    server_load: Annotated[int, Field(description="HTTP requests under way.")]


@router.get("/health", summary="Check health", response_class=Response, responses=_SERVES)
@router.get("/ready", summary="Check readiness", response_class=Response, responses=_SERVES)
@router.get("/ping", summary="Check health, as SageMaker does", response_class=Response, responses=_SERVES)
@router.post("/ping", summary="Check health by POST", response_class=Response, responses=_SERVES)
async def health(request: Request) -> Response:
    """Answers 200 without a body if a request sent now would run, otherwise 503 with the reason.

    The check asks the scheduler whether a replica is ready.
    """
    context = context_of(request)
    load = await context.client.get_load()
    if not any(replica.state == inference.REPLICA_STATE_READY for replica in load.replicas):
        details = [f"{replica.replica_id}: {replica.detail or 'not ready'}" for replica in load.replicas]
        raise Unavailable(f"no replica is ready ({'; '.join(details) or 'no worker has registered'})")
    context.watcher.served()
    return Response(status_code=200)


@router.get(
    "/live",
    summary="Check that the gateway lives",
    response_class=Response,
    responses=documented(description="The gateway answers. The body is empty."),
)
async def live() -> Response:
    """Answers 200 whatever the state of scheduler and workers, which a restart would not change."""
    return Response(status_code=200)


@router.get("/load", summary="Read the load")
async def load(request: Request) -> ServerLoad:
    """Returns the number of HTTP requests under way in this gateway, without this request."""
    return {"server_load": context_of(request).metrics.num_in_flight - 1}
