"""Identity of a prefix: one chained hash per block.

``key[i] = sha256(key[i-1] ‖ tokens of block i)`` with ``key[-1] = sha256(model ‖ adapter ‖ salt)``, so equal keys mean equal tokens from
the sequence's start on, under the same model, adapter and tenant. SHA-256 rather than Python's ``hash``: a collision would serve one
tenant another one's context, and the result is the same in every process.
"""

import hashlib
from array import array
from collections.abc import Sequence

from scheduler_svc.block_pool import BlockKey


def seed_key(*, model: str, lora: str = "", salt: str = "") -> BlockKey:
    """The key before a sequence's first block. Equal only for requests that may share KV."""
    digest = hashlib.sha256()
    for part in (model, lora, salt):
        encoded = part.encode()
        # Length first: otherwise ("ab", "c") and ("a", "bc") would be one.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of a full block that holds ``token_ids`` behind the prefix ``parent``."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class KeyChain:
    """The keys of one growing sequence, each computed once.

    Attributes:
        keys: key of every full block so far that was asked for.
    """

    def __init__(self, seed: BlockKey, block_size: int) -> None:
        """Starts an empty chain for blocks of ``block_size`` tokens."""
        self._seed = seed
        self._block_size = block_size
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> list[BlockKey]:
        """Returns the keys of the first ``num_blocks`` blocks of ``token_ids``, hashing only those not known yet.

        ``token_ids`` must start with the tokens that earlier calls were given and fill all of the blocks.
        """
        size = self._block_size
        for index in range(len(self.keys), num_blocks):
            parent = self.keys[-1] if self.keys else self._seed
            self.keys.append(block_key(parent, token_ids[index * size : (index + 1) * size]))
        return self.keys[:num_blocks]
