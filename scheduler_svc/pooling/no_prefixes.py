"""Prefix operations of a pooling deployment, which has no prefix cache."""

from collections.abc import Callable

from protos.errors import TriptychError, Unsupported
from scheduler_svc.dispatch.prefix_control import KvChange
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request


class NoPrefixes:
    """Counterpart of :class:`scheduler_svc.dispatch.prefix_control.PrefixControl` with nothing to find."""

    def check(self, submission: Submission) -> None:
        """Refuses to pin.

        Raises:
            Unsupported: always.
        """
        del submission
        raise generates_nothing()

    def find(self, probe: Request) -> tuple[str, int] | None:
        """Returns None: no replica caches prefixes."""
        del probe
        return None

    def pinnable_tokens(self, probe: Request) -> int:
        """Returns 0: no replica caches prefixes."""
        del probe
        return 0

    def pin(
        self, pin_id: str, replica_id: str, probe: Request, on_end: Callable[[], None] = lambda: None
    ) -> int:
        """Refuses to pin.

        Raises:
            Unsupported: always.
        """
        del pin_id, replica_id, probe, on_end
        raise generates_nothing()

    def unpin(self, pin_id: str) -> bool:
        """Returns False: there are no pins."""
        del pin_id
        return False

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
