"""A sequence's share of a replica's KV memory: the handle that a request holds and the cache works on."""

from dataclasses import dataclass, field

from scheduler_svc.kv.groups.base import Table
from scheduler_svc.kv.prefix_hash import HashChain


@dataclass(slots=True, eq=False)
class SequenceKv:
    """The KV state of one sequence.

    Token positions, half open::

        [0, num_computed)                KV is in the blocks of `tables`
        [num_computed, len(token_ids))   still to be computed; one token while decoding
    """

    token_ids: list[int]
    """Prompt and output. The request appends to this list; the cache only reads it."""
    cache_salt: str = ""
    """Sequences with different salts never share KV."""
    reuse_prefix: bool = True
    """Whether cached prefixes may replace computation. Log-probabilities of a prompt need all of it
    computed."""
    tables: list[Table] = field(default_factory=list)
    """One block table per KV group; empty while the request waits."""
    num_computed: int = 0
    """Leading tokens with KV in the blocks."""
    num_cached: int = 0
    """Leading tokens that the last admission found in the prefix cache."""
    hash_chain: HashChain | None = None
    """Prefix hashes, shared by all groups and kept while the request lives."""
    cache_epoch: int = 0
    """Epoch of the prefix cache at admission. A reset starts a new epoch; older sequences are not indexed."""
    junction: int = 0
    """Chunk boundary, in hash blocks, where the prompt diverges from earlier ones."""
