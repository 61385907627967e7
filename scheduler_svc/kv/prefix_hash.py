"""Identity of a prefix: one chained hash per granule of tokens.

``key[i] = sha256(key[i-1] ‖ tokens of granule i ‖ media in it)`` with ``key[-1] = sha256(model ‖ adapter ‖ salt)``, so equal keys mean equal
input from the sequence's start on, under the same model, adapter and tenant. SHA-256 rather than Python's ``hash``: a collision would
serve one tenant another one's context, and the result is the same in every process.

A *granule* is the smaller of chunk and block size, which divide one another: a prefix hit ends at a chunk boundary, and a block that holds
several chunks can be found at each of them.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import BlockKey


@dataclass(frozen=True, slots=True)
class Media:
    """Something that is not text in a prompt, standing for placeholder tokens.

    Attributes:
        start, end: positions of its placeholder tokens, half open.
        key: identity of its content.
    """

    start: int
    end: int
    key: bytes


def seed_key(*, model: str, lora: str = "", salt: str = "") -> BlockKey:
    """The key before a sequence's first granule. Equal only for requests that may share KV."""
    digest = hashlib.sha256()
    for part in (model, lora, salt):
        encoded = part.encode()
        # Length first: otherwise ("ab", "c") and ("a", "bc") would be one.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def granule_key(
    parent: BlockKey, token_ids: Sequence[int], media: Sequence[tuple[int, bytes]] = ()
) -> BlockKey:
    """The key of the granule that holds ``token_ids`` behind the prefix ``parent``.

    Args:
        parent: key of the granule before, or the seed.
        token_ids: the granule's tokens, each below 2**32.
        media: content in the granule, as (where it starts relative to the granule, its identity).
    """
    content = parent + array("I", token_ids).tobytes()
    for start, key in media:
        content += start.to_bytes(8, "little", signed=True) + len(key).to_bytes(8, "little") + key
    return hashlib.sha256(content).digest()


class KeyChain:
    """The keys of one growing sequence, each computed once.

    Attributes:
        granule: tokens under one key.
        keys: key of every granule so far that was asked for.
    """

    __slots__ = ("_media", "_seed", "granule", "keys")

    def __init__(self, seed: BlockKey, granule: int, media: Sequence[Media] = ()) -> None:
        """Starts an empty chain for granules of ``granule`` tokens."""
        self._seed = seed
        self.granule = granule
        self._media = tuple(media)
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int], count: int) -> list[BlockKey]:
        """Returns all keys known, at least those of the first ``count`` granules of ``token_ids``; hashes only what is new.

        ``token_ids`` must start with the tokens that earlier calls were given and fill all of the granules. The list is the chain's
        own: it may be longer than ``count`` and must not be changed.
        """
        keys, size = self.keys, self.granule
        if len(keys) < count:
            parent = keys[-1] if keys else self._seed
            for start in range(len(keys) * size, count * size, size):
                end = start + size
                media = [(m.start - start, m.key) for m in self._media if m.start < end and m.end > start]
                parent = granule_key(parent, token_ids[start:end], media)
                keys.append(parent)
        return keys

    def parent(self, index: int) -> BlockKey:
        """The key before granule ``index``: that of the granule before, or the seed."""
        return self.keys[index - 1] if index else self._seed
