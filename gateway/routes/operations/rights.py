"""Who may use the routes for operators."""

from starlette.requests import Request

from gateway.keys.guard import check_admin
from gateway.routes.context import context_of


def check_operator(request: Request, *, is_open: bool = False) -> None:
    """Lets requests with admin rights pass, with ``--dev-mode`` all requests.

    Args:
        request: the HTTP request.
        is_open: whether a setting opens this route to all requests.

    Raises:
        TriptychError: as :func:`gateway.keys.guard.check_admin`.
    """
    context = context_of(request)
    if not (is_open or context.settings.dev_mode):
        check_admin(request, context.keys)
