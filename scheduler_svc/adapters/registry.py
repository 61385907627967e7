"""The LoRA adapters that requests can name."""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from protos.errors import InvalidArgument, NotFound, TriptychError, Unavailable
from protos.limits import MAX_NAME_BYTES


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What a worker says about an adapter that it has loaded."""

    rank: int
    digest: str
    """Hash of the configuration and the weights; adapters with equal hashes compute the same."""
    revision: str = ""
    """The commit at which the hub had it; empty for a folder."""
    displaced: Collection[int] = ()
    """Ids of the loads that left the host for it."""


LoadAnswer: TypeAlias = Callable[[LoadedAdapter | TriptychError], None]
"""Called once with what the ranks of a replica say about an adapter, or why they cannot load it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that some replica has loaded once, or is asked to load."""

    adapter_id: int
    """Never used again for other weights."""
    name: str
    """The name that requests used when they were accepted; it may belong to another adapter by now."""
    source: str
    """A folder or hub id that the workers can read."""
    rank: int = 0
    digest: str = ""
    """See :attr:`LoadedAdapter.digest`; empty until a worker has loaded it."""
    revision: str = ""
    """See :attr:`LoadedAdapter.revision`; later loads read the same commit."""


# Adapters that an error lists by name.
_MAX_LISTED = 8


class AdapterRegistry:
    """Adapters by name. A name is free, expected, refused, being loaded, or an adapter's.

    An expected name belongs to an adapter of the settings until that is loaded or refused for good.
    """

    def __init__(self, expected: Collection[str] = ()) -> None:
        """Starts without adapters; those with `expected` names are going to be loaded."""
        self._ids = itertools.count(1)
        self._adapters: dict[str, Adapter] = {}
        self._expected = set(expected)
        self._refused: dict[str, str] = {}
        self._loading: set[str] = set()
        self.served_name = ""
        """The name of the base model, once it is known."""
        self.aliases: tuple[str, ...] = ()
        """Its further names."""

    def __iter__(self) -> Iterator[Adapter]:
        """Yields the adapters in the order in which they were added."""
        return iter(self._adapters.values())

    def resolve(self, name: str, digest: str = "") -> Adapter:
        """Returns the adapter with that name.

        Args:
            name: the adapter's name.
            digest: the digest that it must have; empty: any.

        Raises:
            Unavailable: it is going to be loaded.
            NotFound: no adapter has the name, it was refused, or it has another digest.
        """
        if (adapter := self._adapters.get(name)) is not None:
            if digest and digest != adapter.digest:
                raise NotFound(
                    f"the answer began with another version of the adapter {name!r} and cannot go on;"
                    " send the request again from its beginning",
                    param="model",
                )
            return adapter
        if (reason := self._refused.get(name)) is not None:
            raise NotFound(f"the adapter {name!r} was refused: {reason}", param="model")
        if name in self._expected:
            raise Unavailable(f"the adapter {name!r} is not loaded yet; retry", retry_after_ms=1000)
        raise self._unknown(name)

    def _unknown(self, name: str) -> NotFound:
        names = [repr(each) for each in itertools.islice(self._adapters, _MAX_LISTED)]
        more = ", ..." if len(self._adapters) > _MAX_LISTED else ""
        adapters = f" or one of its adapters ({', '.join(names)}{more})" if names else ""
        return NotFound(
            f"the model {name!r} is not served here; use {self.served_name!r}{adapters}", param="model"
        )

    def begin(self, name: str, source: str, *, in_place: bool, expected: bool = False) -> Adapter:
        """Reserves a name and returns the adapter that is to be loaded; see :meth:`AdapterControl.load`."""
        _check_text(name, source)
        if name in (self.served_name, *self.aliases):
            raise InvalidArgument(
                f"{name!r} is the name of the base model; choose another name", param="name"
            )
        if name in self._expected and not expected:
            raise Unavailable(
                f"the name {name!r} belongs to an adapter of --lora-modules that is not loaded yet;"
                " retry, or choose another name",
                retry_after_ms=5000,
            )
        if name in self._loading:
            raise InvalidArgument(f"an adapter {name!r} is being loaded; wait for it", param="name")
        if name in self._adapters and not in_place:
            raise InvalidArgument(
                f"the adapter {name!r} is loaded; unload it first, or set load_inplace", param="name"
            )
        self._loading.add(name)
        if expected:
            # It was refused because no worker ran adapters.
            self._refused.pop(name, None)
        return Adapter(next(self._ids), name, source)

    def loaded(self, adapter: Adapter, facts: LoadedAdapter) -> tuple[Adapter, Adapter | None]:
        """Gives an adapter its name; returns it with its facts, and the adapter that had the name before."""
        complete = replace(adapter, rank=facts.rank, digest=facts.digest, revision=facts.revision)
        name, earlier = adapter.name, self._adapters.get(adapter.name)
        self._adapters[name] = complete
        self._loading.discard(name)
        self._expected.discard(name)
        self._refused.pop(name, None)
        return complete, earlier

    def failed(self, adapter: Adapter) -> None:
        """Frees the name of an adapter that was not loaded."""
        self._loading.discard(adapter.name)

    def refuse(self, name: str, error: TriptychError, *, for_good: bool) -> None:
        """Remembers why an expected adapter cannot be served; it still is expected unless `for_good`."""
        if for_good:
            self._expected.discard(name)
        self._refused[name] = error.message

    def remove(self, name: str) -> Adapter:
        """Frees a name and returns its adapter.

        Raises:
            NotFound: no adapter has the name.
        """
        if name not in self._adapters:
            raise NotFound(f"no adapter is called {name!r}", param="name")
        return self._adapters.pop(name)


def _check_text(name: str, source: str) -> None:
    if not name or name != name.strip() or not name.isprintable():
        raise InvalidArgument(
            "an adapter's name must be printable text without spaces around it", param="name"
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"an adapter's name has at most {MAX_NAME_BYTES} bytes", param="name")
    if not source:
        raise InvalidArgument("the adapter's path is empty; send a folder or hub id", param="source")
