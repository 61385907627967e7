"""The interface of a KV group manager, the block table of a sequence, and the block layout."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.shapes.geometry import Geometry


@dataclass(slots=True, eq=False)
class Table:
    """A sequence's blocks in one group."""

    blocks: list[Block] = field(default_factory=list)
    """In the order of positions; the null block replaces blocks that are no longer read."""
    first: int = 0
    """Number of leading entries that are the null block."""

    @property
    def num_live(self) -> int:
        """Number of blocks that the sequence holds."""
        return len(self.blocks) - self.first

    @property
    def live(self) -> list[Block]:
        """The blocks that the sequence holds."""
        return self.blocks[self.first :]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How blocks, prefill chunks and hash blocks line up."""

    block_size: int
    """Tokens of a block."""
    chunk: int
    """Tokens of a prefill step."""
    hash_block_size: int
    """Tokens per prefix key; the smaller of block size and chunk."""
    hit_stride: int
    """Hash blocks between two lengths that a prefix hit may have."""

    @classmethod
    def of(cls, geometry: Geometry, *, sub_block: bool) -> "BlockLayout":
        """Derives the layout from a geometry.

        Args:
            geometry: block size and chunk.
            sub_block: whether a hit may end inside a block.
        """
        size = geometry.hash_block_size
        stride = geometry.chunk // size
        if not sub_block:
            stride = max(stride, geometry.block_size // size)
        return cls(geometry.block_size, geometry.chunk, size, stride)

    @property
    def hash_blocks_per_block(self) -> int:
        """Hash blocks of a block."""
        return self.block_size // self.hash_block_size


class KvGroupManager(Protocol):
    """Decides which blocks a sequence needs in one KV group, and which prefixes it can resume from.

    A *hit* is a number of leading hash blocks. Tables belong to the caller; a manager keeps nothing per
    sequence.
    """

    pool: BlockPool
    """The group's blocks."""
    paged: ClassVar[bool]
    """Whether tables grow with their sequence; False if one block slides in place."""

    def most_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence ever holds while it grows to ``num_tokens`` tokens."""

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:
        """Returns the table length at admission, given the sequence's known tokens and those of its hit."""

    def missing(self, table: Table, num_tokens: int) -> int:
        """Returns how many blocks to append so that tokens up to ``num_tokens`` can be written."""

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Returns the longest hit of at most ``limit`` hash blocks, a multiple of the layout's hit stride.

        Does not modify the pool.
        """

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """References everything that a sequence resumes from.

        ``hit`` is a length that :meth:`longest_hit` returned or would return, with nothing allocated in
        between.

        Returns:
            A table of blocks that are shared as they are. If the sequence also needs content that it will
            overwrite, the block to copy it from, into the first block that is appended to the table.
        """

    def copied_tokens(self, num_tokens: int) -> int:
        """Returns how many tokens of the last block to copy in order to continue behind ``num_tokens``."""

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:
        """Whether a table with ``num_computed`` tokens still holds what a query at ``num_tokens`` sees."""

    def trim(self, table: Table, num_computed: int) -> int:
        """Frees the blocks that no query from ``num_computed`` on can see; returns how many."""

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:
        """Makes hash blocks ``start`` .. ``end`` of a table findable; returns the newly findable ones."""

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:
        """Returns a referenced block to which a table's content must be copied before it is overwritten.

        Returns None if no copy is needed or no block is available.
        """

    def release(self, table: Table) -> None:
        """Frees a sequence's blocks."""
