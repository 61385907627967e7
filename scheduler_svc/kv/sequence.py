"""A sequence's share of a replica's KV memory, and the identity of its prefixes.

A request holds the handle `SequenceKv`, and the cache works on it. The identity of a prefix is a chained
hash per hash block of tokens: ``key[i] = sha256(key[i-1] ‖ tokens of hash block i)`` with ``key[-1] =
sha256(model ‖ adapter ‖ salt)``. Equal keys mean equal input from the sequence's start on, under the same
model, adapter and salt. SHA-256 replaces Python's ``hash`` because a collision would serve one tenant
another's context, and every process must compute the same keys.

A *hash block* divides a block. Prefix hits end at every hash block or at every few (``cache.hit_unit``); a
block can be found at each of those ends inside it.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.kv.block_pool import BlockKey
from scheduler_svc.kv.groups import Table


def seed_key(*, model: str, lora: str = "", salt: str = "") -> BlockKey:
    """Returns the key before a sequence's first hash block; equal only for requests that may share KV."""
    digest = hashlib.sha256()
    for part in (model, lora, salt):
        encoded = part.encode()
        # The length comes first: otherwise ("ab", "c") and ("a", "bc") would collide.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def hash_block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Returns the key of the hash block with ``token_ids`` after the prefix ``parent``.

    Args:
        parent: key of the previous hash block, or the seed.
        token_ids: the tokens of the hash block, each below 2**32.
    """
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class HashChain:
    """The keys of a growing sequence, each computed once."""

    __slots__ = ("_seed", "hash_block_size", "keys")

    def __init__(self, seed: BlockKey, hash_block_size: int) -> None:
        """Starts an empty chain with ``hash_block_size`` tokens per key."""
        self._seed = seed
        self.hash_block_size = hash_block_size
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int], count: int) -> list[BlockKey]:
        """Returns all known keys, at least those of the first ``count`` hash blocks; hashes only new blocks.

        ``token_ids`` must start with the tokens of earlier calls and fill all ``count`` hash blocks. The
        chain owns the returned list: it may be longer than ``count``, and callers must not change it.
        """
        keys, size = self.keys, self.hash_block_size
        if len(keys) < count:
            parent = keys[-1] if keys else self._seed
            for start in range(len(keys) * size, count * size, size):
                parent = hash_block_key(parent, token_ids[start : start + size])
                keys.append(parent)
        return keys

    def copy(self) -> "HashChain":
        """Returns a chain that grows apart from this one."""
        same = HashChain(self._seed, self.hash_block_size)
        same.keys = self.keys.copy()
        return same

    def parent(self, index: int) -> BlockKey:
        """Returns the key before hash block ``index``: the previous hash block's, or the seed."""
        return self.keys[index - 1] if index else self._seed


@dataclass(slots=True, eq=False)
class SequenceKv:
    """The KV state of a sequence.

    Token positions, half open::

        [0, num_computed)                KV is in the blocks of `tables`
        [num_computed, len(token_ids))   still to be computed: `num_uncomputed` tokens
    """

    token_ids: list[int]
    """Prompt and output. The request appends to this list; the cache only reads it."""
    num_uncomputed: int = field(init=False)
    """Trailing tokens without KV. Code that appends a token adds 1, except in a decode step, which computes
    a token and appends another."""
    cache_salt: str = ""
    """Sequences with different salts never share KV."""
    adapter: Adapter | None = None
    """The LoRA adapter of the KV. Only sequences with the same adapter weights share KV."""
    reuse_prefix: bool = True
    """Whether cached prefixes may replace computation. Log-probabilities of a prompt need all of it
    computed."""
    tables: list[Table] = field(default_factory=list)
    """A block table per KV group; empty while the request waits."""
    num_indexed: int = 0
    """Leading tokens in the prefix cache or offered to it."""
    num_cached: int = 0
    """Leading tokens found in the prefix cache by the last admission."""
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
