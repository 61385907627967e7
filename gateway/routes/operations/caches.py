"""Routes that empty caches."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.context import context_of
from gateway.routes.openapi import documented
from gateway.routes.operations.answers import CacheReset
from gateway.routes.operations.rights import check_operator
from protos.errors import Unsupported
from protos.logs import get_logger

router = APIRouter(tags=["Operations"])


@router.post(
    "/reset_prefix_cache",
    summary="Empty the prefix cache",
    response_model=None,
    responses=documented(CacheReset),
)
async def reset_prefix_cache(request: Request, reset_running_requests: str = "false") -> dict[str, bool]:
    """Drops every cached prefix on all replicas. Running requests go on.

    Needs a key with admin rights, or `--dev-mode`. `reset_running_requests=true` is refused.
    """
    check_operator(request)
    if reset_running_requests.lower() not in ("false", "0", "no", "off"):
        raise Unsupported(
            "running requests keep their blocks; omit reset_running_requests", param="reset_running_requests"
        )
    num_replicas = await context_of(request).client.reset_prefix_cache()
    get_logger().info("the prefix cache has been emptied", replicas=num_replicas)
    return {"success": True}


@router.post(
    "/reset_mm_cache",
    summary="Empty the cache of images",
    response_class=Response,
    responses=documented(description="There is no such cache. The body is empty."),
)
@router.post(
    "/reset_encoder_cache",
    summary="Empty the encoder's cache",
    response_class=Response,
    responses=documented(description="There is no such cache. The body is empty."),
)
async def reset_no_cache(request: Request) -> Response:
    """Does nothing: models read text alone. Tools for vLLM call it between measurements.

    Needs a key with admin rights, or `--dev-mode`.
    """
    check_operator(request)
    return Response(status_code=200)
