"""The load of an engine: figures that clients balance by and that metrics show."""

from dataclasses import dataclass

from scheduler_svc.kv.cache import KvCache


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of one replica."""

    replica_id: str
    num_running: int = 0
    """Requests that have a slot."""
    kv_usage: float = 0.0
    """Share of KV blocks in use in the fullest group, 0 to 1."""
    starting: str | None = None
    """The last progress message of a replica that is not ready yet; None once it is ready."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a deployment."""

    replicas: tuple[ReplicaLoad, ...] = ()
    num_waiting: int = 0
    """Requests without a slot, deferred ones included."""
    num_deferred: int = 0
    """Requests that wait for a grammar or a shared prefix rather than for capacity."""
    num_waiting_tokens: int = 0
    """Tokens that requests in the waiting queue have to prefill."""

    @property
    def num_running(self) -> int:
        """Requests that have a slot, over all replicas."""
        return sum(replica.num_running for replica in self.replicas)

    @property
    def kv_usage(self) -> float:
        """The mean KV usage of the ready replicas."""
        ready = [replica.kv_usage for replica in self.replicas if replica.starting is None]
        return sum(ready) / max(1, len(ready))


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The blocks of one KV group of a replica."""

    num_used: int
    num_free: int
    num_cached: int
    """Prefixes that a request can hit."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """The KV memory of one replica."""

    usage: float
    """Share of blocks in use in the fullest group, 0 to 1."""
    groups: tuple[GroupMemory, ...]
    """Figures by group id."""
    block_size: int
    """Tokens of a block in a paged group."""
    prefix_caching: bool
    """Whether prefixes are reused."""


def memory_of(kv: KvCache) -> ReplicaMemory:
    """Returns the figures of a replica's KV memory."""
    pools = [group.pool for group in kv.groups]
    groups = tuple(
        GroupMemory(pool.num_blocks - pool.num_free, pool.num_free, pool.num_cached) for pool in pools
    )
    return ReplicaMemory(kv.usage, groups, kv.block_size, kv.caches_prefixes)
