"""LoRA and prefix operations of a pooling deployment, which has neither."""

from collections.abc import Callable

from protos.errors import NotFound, TriptychError, Unsupported
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.dispatch.adapter_control import Outcome
from scheduler_svc.dispatch.prefix_control import KvChange


class NoAdapters:
    """Counterpart of :class:`scheduler_svc.dispatch.adapter_control.AdapterControl` without adapters."""

    max_loras = 0
    smallest_host = 0

    def resolve(self, name: str, digest: str = "") -> Adapter | None:
        """Refuses every adapter.

        Raises:
            NotFound: the name is not empty.
        """
        del digest
        if name:
            raise NotFound(f"no adapter is called {name!r}: this is a pooling model", param="model")
        return None

    def load(self, name: str, source: str, *, in_place: bool, done: Outcome, expected: bool = False) -> None:
        """Refuses to load.

        Raises:
            Unsupported: always.
        """
        del name, source, in_place, done, expected
        raise Unsupported("pooling models take no LoRA adapters; serve a model that generates text")

    def refuse(self, name: str, error: TriptychError, *, for_good: bool) -> None:
        """Does nothing: no request names an adapter here."""
        del name, error, for_good

    def unload(self, name: str) -> None:
        """Refuses every name.

        Raises:
            NotFound: always.
        """
        raise NotFound(f"no adapter is called {name!r}", param="name")

    def listed(self) -> list[tuple[Adapter, list[str]]]:
        """Returns no adapters."""
        return []


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
