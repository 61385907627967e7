"""A LoRA adapter, as requests and replicas know it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What a worker says about an adapter that it has loaded."""

    rank: int
    digest: str
    """Hash of the configuration and the weights; adapters with equal hashes compute the same."""
    revision: str = ""
    """The commit at which the hub had it; empty for a folder."""


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
