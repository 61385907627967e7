"""The names of LoRA adapters, for requests and in settings."""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from protos.errors import InvalidArgument, NotFound, TriptychError, Unavailable
from protos.limits import MAX_NAME_BYTES


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A worker's answer to a load."""

    rank: int
    digest: str
    """Hash of configuration and weights; adapters of equal hash compute the same."""
    revision: str = ""
    """Commit on the hub; empty for a folder."""
    displaced: Collection[int] = ()
    """Load ids evicted from the host."""


LoadAnswer: TypeAlias = Callable[[LoadedAdapter | TriptychError], None]
"""Receives the answer of a replica's ranks to a load, or its error."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: loaded, or being loaded for the first time."""

    adapter_id: int
    """Never reused for other weights."""
    name: str
    """The name at the time of the load; another adapter may own it now."""
    source: str
    """A folder or hub id, readable by the workers."""
    rank: int = 0
    digest: str = ""
    """See :attr:`LoadedAdapter.digest`; empty until the first load ends."""
    revision: str = ""
    """See :attr:`LoadedAdapter.revision`; later loads read the same commit."""


# Most names in an error message.
_MAX_LISTED = 8

_MODULE: Final = re.compile(r"[^\s,]+")
_SEPARATORS: Final = " \t\n,"


class AdapterRegistry:
    """Adapters by name. A name is free, expected, refused, or an adapter's.

    Expected names are reserved for adapters of the settings until those are loaded or refused for good.
    """

    def __init__(self, expected: Collection[str] = ()) -> None:
        """Starts without adapters; `expected` are the names from the settings."""
        self._ids = itertools.count(1)
        self._adapters: dict[str, Adapter] = {}
        self._expected = set(expected)
        self._refused: dict[str, str] = {}
        self.served_name = ""
        """Name of the base model, once known."""
        self.aliases: tuple[str, ...] = ()
        """Other names of the base model."""

    def __iter__(self) -> Iterator[Adapter]:
        """Yields the adapters in the order of addition."""
        return iter(self._adapters.values())

    def resolve(self, name: str, digest: str = "") -> Adapter:
        """Returns the adapter of a name, of any digest if `digest` is empty.

        Raises:
            Unavailable: an adapter of the settings is not loaded yet.
            NotFound: the name is unknown or was refused, or the digest differs.
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

    def make(self, name: str, source: str, *, in_place: bool, expected: bool = False) -> Adapter:
        """Checks the name of a new adapter and returns the adapter; see :meth:`AdapterControl.load`."""
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
        if name in self._adapters and not in_place:
            raise InvalidArgument(
                f"the adapter {name!r} is loaded; unload it first, or set load_inplace", param="name"
            )
        if expected:
            # It was refused for lack of workers with LoRA.
            self._refused.pop(name, None)
        return Adapter(next(self._ids), name, source)

    def add(self, adapter: Adapter, facts: LoadedAdapter) -> tuple[Adapter, Adapter | None]:
        """Adds a loaded adapter; returns it with its facts, and the adapter that it replaces."""
        complete = replace(adapter, rank=facts.rank, digest=facts.digest, revision=facts.revision)
        name, earlier = adapter.name, self._adapters.get(adapter.name)
        self._adapters[name] = complete
        self._expected.discard(name)
        self._refused.pop(name, None)
        return complete, earlier

    def refuse(self, name: str, error: TriptychError, *, for_good: bool) -> None:
        """Records why an adapter of the settings cannot be served; unless `for_good`, it stays expected."""
        if for_good:
            self._expected.discard(name)
        self._refused[name] = error.message

    def remove(self, name: str) -> Adapter:
        """Frees a name and returns its adapter; raises NotFound for an unknown name."""
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


def split_modules(text: str) -> tuple[str, ...]:
    """Splits a setting: ``name=path`` or JSON objects, separated by commas or spaces.

    Returns:
        Each adapter as ``name=path``, or as a JSON object if its name or path contains a separator. Joined
        with commas, they form the setting again.

    Raises:
        ValueError: a part is neither.
    """
    modules, position = [], 0
    while position < len(text):
        if text[position] in _SEPARATORS:
            position += 1
        elif text[position] == "{":
            module, position = json.JSONDecoder().raw_decode(text, position)
            name, path = module.get("name"), module.get("path")
            if not (isinstance(name, str) and isinstance(path, str)):
                raise ValueError('expected JSON objects with "name" and "path"')
            plain = f"{name}={path}"
            fits = _MODULE.fullmatch(plain) and "=" not in name and not name.startswith("{")
            modules.append(plain if fits else json.dumps({"name": name, "path": path}))
        else:
            part = _MODULE.match(text, position)
            assert part is not None
            modules.append(part[0])
            position = part.end()
    return tuple(modules)


def name_and_path(module: str) -> tuple[str, str]:
    """Returns the name and the path of a part from :func:`split_modules`.

    Raises:
        ValueError: either is missing.
    """
    if module.startswith("{"):
        parts = json.loads(module)
        name, path = parts["name"], parts["path"]
    else:
        name, _, path = module.partition("=")
    if not (name and path):
        raise ValueError(
            f"expected name=path, for example sql=/adapters/sql, not {module!r}; write a path with spaces or commas"
            ' as JSON: {"name": "sql", "path": "/my adapters/sql"}'
        )
    return name, path
