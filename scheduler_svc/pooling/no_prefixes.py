"""Prefix operations of a pooling deployment, which has no prefix cache."""

from collections.abc import Callable

from protos.errors import TriptychError, Unsupported
from scheduler_svc.dispatch.prefix_control import KvChange


class NoPrefixes:
    """Counterpart of :class:`scheduler_svc.dispatch.prefix_control.PrefixControl` with nothing to find."""

    def reset(self) -> int:
        """Returns 0: no replica has a cache to reset."""
        return 0

    def follow(
        self, listener: Callable[[KvChange], None], *, replica_id: str = "", after: int = 0
    ) -> Callable[[], None]:
        """Never calls `listener`; returns a function that does nothing."""
        del listener, replica_id, after
        return lambda: None


def generates_nothing() -> TriptychError:
    """Returns the error for everything that only a generating model can do."""
    return Unsupported("this is a pooling model and generates no text; call Pool", param="model")
