"""The interface of a KV group manager."""

from typing import Protocol

from scheduler_svc.block_pool import Block, BlockKey, BlockPool


class KvGroupManager(Protocol):
    """Decides which blocks a sequence needs in one KV group and which of them the prefix cache has.

    A sequence's *table* is the list of its blocks in this group; the manager never keeps it, the caller does.

    Attributes:
        pool: the group's blocks.
    """

    pool: BlockPool

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` tokens needs at the most at any time of its life up to there."""

    def longest_hit(self, keys: list[BlockKey], max_blocks: int) -> int:
        """How many leading blocks of ``keys`` (at most ``max_blocks``) can be taken from the cache. Does not modify the pool."""

    def take_hit(self, keys: list[BlockKey], num_blocks: int) -> list[Block]:
        """References the blocks of a hit and returns them as the start of a table.

        ``num_blocks`` is at most what :meth:`longest_hit` said, with nothing allocated in between.
        """

    def index(self, table: list[Block], keys: list[BlockKey], first: int) -> None:
        """Makes the written, full blocks ``first`` .. ``len(keys)-1`` of a table findable."""

    def release(self, table: list[Block]) -> None:
        """Gives a sequence's blocks back."""
