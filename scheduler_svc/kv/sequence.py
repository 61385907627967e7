"""A sequence's share of a replica's KV memory: the handle that a request holds and the cache works on."""

from dataclasses import dataclass, field

from scheduler_svc.kv.groups.base import Table
from scheduler_svc.kv.prefix_hash import HashChain


@dataclass(slots=True, eq=False)
class SequenceKv:
    """The KV state of one sequence.

    Token positions, half open::

        [0, num_computed)                KV is in the blocks of `tables`
        [num_computed, len(token_ids))   still to be computed: `num_uncomputed` tokens
    """

    token_ids: list[int]
    """Prompt and output. The request appends to this list; the cache only reads it."""
    num_uncomputed: int = field(init=False)
    """Trailing tokens without KV. A decode step computes one token and appends one, so it leaves this at 1
    and touches nothing but the list."""
    cache_salt: str = ""
    """Sequences with different salts never share KV."""
    reuse_prefix: bool = True
    """Whether cached prefixes may replace computation. Log-probabilities of a prompt need all of it
    computed."""
    tables: list[Table] = field(default_factory=list)
    """One block table per KV group; empty while the request waits."""
    num_cached: int = 0
    """Leading tokens that the last admission found in the prefix cache."""
    hash_chain: HashChain | None = None
    """Prefix hashes, shared by all groups and kept while the request lives."""
    cache_epoch: int = 0
    """Epoch of the prefix cache at admission. A reset starts a new epoch; older sequences are not indexed."""
    junction: int = 0
    """Chunk boundary, in hash blocks, where the prompt diverges from earlier ones."""

    def __post_init__(self) -> None:
        self.num_uncomputed = len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Leading tokens with KV in the blocks."""
        return len(self.token_ids) - self.num_uncomputed

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self.num_uncomputed = len(self.token_ids) - count
