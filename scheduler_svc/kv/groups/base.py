"""The interface of a KV group manager, and a sequence's table of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool


@dataclass(slots=True, eq=False)
class Table:
    """A sequence's blocks in one group.

    Attributes:
        blocks: in the order of positions; the null block where nothing is read any more.
        first: how many leading entries are the null block.
    """

    blocks: list[Block] = field(default_factory=list)
    first: int = 0

    @property
    def num_live(self) -> int:
        """How many blocks the sequence holds."""
        return len(self.blocks) - self.first

    @property
    def live(self) -> list[Block]:
        """The blocks that the sequence holds."""
        return self.blocks[self.first :]


@dataclass(frozen=True, slots=True)
class Grid:
    """How tokens, granules, blocks and chunks lie over one another.

    Attributes:
        block_size: tokens of a block.
        chunk: tokens of a prefill step.
        granule: tokens under one key; the smaller of the two.
        unit: granules between two lengths that a hit may have.
    """

    block_size: int
    chunk: int
    granule: int
    unit: int

    @property
    def per_block(self) -> int:
        """Granules of a block."""
        return self.block_size // self.granule


class KvGroupManager(Protocol):
    """Decides which blocks a sequence needs in one KV group and which prefixes can be resumed.

    A *hit* is a number of leading granules. Tables belong to the caller; a manager keeps nothing about a sequence.

    Attributes:
        pool: the group's blocks.
    """

    pool: BlockPool

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at the most at any time while it grows to ``num_tokens`` tokens."""

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:
        """Length of the table that a sequence is admitted with, given its known tokens and those of its hit."""

    def missing(self, table: Table, num_tokens: int) -> int:
        """Blocks to append so that tokens up to ``num_tokens`` can be written."""

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """The longest hit of at most ``limit`` granules, a multiple of the grid's unit. Does not modify the pool."""

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """Takes a reference to everything that a sequence resumes from.

        ``hit`` is what :meth:`longest_hit` found or a shorter length that it would find again, with nothing allocated in between.

        Returns:
            A table of blocks that are shared as they are, and, if the sequence also needs content that it will write over, the block
            to copy it from, into the first block that is appended to the table.
        """

    def copied_tokens(self, num_tokens: int) -> int:
        """How many tokens of the last block have to be copied for a sequence that continues behind ``num_tokens``; 0: none."""

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:
        """Whether the blocks of a sequence with ``num_computed`` tokens still hold what a query at position ``num_tokens`` sees."""

    def trim(self, table: Table, num_computed: int) -> int:
        """Gives up blocks that no query from position ``num_computed`` on can see; returns how many."""

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:
        """Makes the written granules ``start`` .. ``end`` of a table findable; returns which of them nobody had before."""

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:
        """A block, with a reference, to copy a table's content to that would otherwise be written over; None if there is no need or no room."""

    def release(self, table: Table) -> None:
        """Gives a sequence's blocks back."""
