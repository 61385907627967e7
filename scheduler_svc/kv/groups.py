"""KV group managers: how the layers of a group use blocks, a class for each kind of attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.shapes.shape_config import ShapeConfig


@dataclass(slots=True, eq=False)
class Table:
    """A sequence's blocks in a group."""

    blocks: list[Block] = field(default_factory=list)
    """In the order of positions; the null block replaces blocks no longer read."""
    first: int = 0
    """Number of leading null blocks."""

    @property
    def num_live(self) -> int:
        """Number of blocks held by the sequence."""
        return len(self.blocks) - self.first

    @property
    def live(self) -> list[Block]:
        """The blocks held by the sequence."""
        return self.blocks[self.first :]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How blocks, prefill chunks, hash blocks and hits line up."""

    block_size: int
    """Tokens of a block."""
    chunk: int
    """Tokens of a prefill step."""
    hash_block_size: int
    """Tokens per prefix key; divides the block size."""
    hit_stride: int
    """Hash blocks between two possible lengths of a prefix hit."""

    @classmethod
    def from_shapes(cls, shapes: ShapeConfig, hit_unit: int) -> "BlockLayout":
        """Derives the layout from block size and chunk; hits are multiples of ``hit_unit`` tokens."""
        size = math.gcd(hit_unit, shapes.block_size)
        return cls(shapes.block_size, shapes.chunk, size, hit_unit // size)

    @property
    def hit_unit(self) -> int:
        """Tokens between two possible lengths of a prefix hit."""
        return self.hit_stride * self.hash_block_size

    @property
    def hash_blocks_per_block(self) -> int:
        """Hash blocks of a block."""
        return self.block_size // self.hash_block_size


class KvGroupManager(Protocol):
    """Decides which blocks a sequence needs in a KV group, and from which prefixes it can resume.

    A *hit* is a number of leading hash blocks. Tables belong to the caller; a manager keeps nothing per
    sequence.
    """

    pool: BlockPool
    """The group's blocks."""
    paged: ClassVar[bool]
    """Whether tables grow with their sequence; False if a block slides in place."""

    def most_blocks(self, num_tokens: int) -> int:
        """Returns the peak number of blocks of a sequence that grows to ``num_tokens`` tokens."""

    def missing(self, table: Table, num_tokens: int) -> int:
        """Returns how many blocks to append so that tokens up to ``num_tokens`` can be written."""

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Returns the longest hit of at most ``limit`` hash blocks, a multiple of the layout's hit stride.

        Does not modify the pool.
        """

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """References the blocks from which a sequence resumes.

        ``hit`` is a length that :meth:`longest_hit` returned or would return, with nothing allocated in
        between.

        Returns:
            A table of blocks shared unchanged. If the sequence also needs content to overwrite, the block to
            copy it from, into the first block appended to the table.
        """

    def copied_tokens(self, num_tokens: int) -> int:
        """Returns how many tokens of the last block to copy in order to continue after ``num_tokens``."""

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:
        """Whether a table with ``num_computed`` tokens holds the window of a query at ``num_tokens``."""

    def trim(self, table: Table, num_computed: int) -> int:
        """Frees the blocks that no query from ``num_computed`` on can see; returns how many."""

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:
        """Makes hash blocks ``start`` .. ``end`` of a table findable; returns the newly findable keys."""

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:
        """Returns a referenced block to which a table's content must be copied before it is overwritten.

        Returns None if no copy is needed or no block is available.
        """

    def release(self, table: Table) -> None:
        """Frees a sequence's blocks."""


class FullGroup:
    """Full attention: paged blocks with every token.

    Block i of a table holds tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    paged: ClassVar[bool] = True

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        """Manages the blocks of ``pool``."""
        self.pool = pool
        self._layout = layout

    def most_blocks(self, num_tokens: int) -> int:
        """Returns ``ceil(num_tokens / block_size)``."""
        return -(-num_tokens // self._layout.block_size)

    def missing(self, table: Table, num_tokens: int) -> int:
        """See :class:`KvGroupManager`."""
        return max(0, self.most_blocks(num_tokens) - len(table.blocks))

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Ends a hit at the first missing hash block, because full attention reads all earlier tokens.

        Two hash blocks per block, cached ``[a b][c -]``: keys ``a b c d`` hit 3; the third is copied out of
        the second block.
        """
        per_block, lookup = self._layout.hash_blocks_per_block, self.pool.lookup
        hit = 0
        # A key stands for everything before it in its block, so each whole block needs one lookup.
        while hit + per_block <= limit and lookup(keys[hit + per_block - 1]) is not None:
            hit += per_block
        if per_block > 1:
            for end in range(min(hit + per_block - 1, limit), hit, -1):
                if lookup(keys[end - 1]) is not None:
                    hit = end
                    break
        return hit - hit % self._layout.hit_stride

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """Puts the null block in place of blocks before the window, if there is one."""
        per_block = self._layout.hash_blocks_per_block
        num_full = hit // per_block
        first = min(self._first_needed(hit * self._layout.hash_block_size), num_full)
        blocks = [self._found(keys[(i + 1) * per_block - 1]) for i in range(first, num_full)]
        source = self._found(keys[hit - 1]) if hit % per_block else None
        self.pool.touch(blocks)
        if source is not None:
            self.pool.touch((source,))
        return Table([self.pool.null] * first + blocks, first), source

    def copied_tokens(self, num_tokens: int) -> int:
        """Returns the number of tokens in the last, partly filled block."""
        return num_tokens % self._layout.block_size

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:
        """Returns True until the first block of that query's window is freed."""
        return num_tokens <= num_computed and table.first <= self._first_needed(num_tokens)

    def trim(self, table: Table, num_computed: int) -> int:  # noqa: ARG002 - part of the interface
        """Frees nothing: later queries read every token."""
        return 0

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:
        """Indexes each block's missing keys, including those of content copied into it at admission."""
        per_block = self._layout.hash_blocks_per_block
        new: list[int] = []
        for position in range(start // per_block, -(-end // per_block)):
            block = table.blocks[position]
            if block is self.pool.null:
                continue
            first, last = position * per_block + len(block.keys), min(end, (position + 1) * per_block)
            if first < last:
                # A partly filled block can only be copied; it is evicted before blocks that can be shared
                # whole.
                partial = last < (position + 1) * per_block
                fresh = set(self.pool.index_block(block, keys[first:last], cheap=partial))
                new += [index for index in range(first, last) if keys[index] in fresh]
        return new

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:  # noqa: ARG002 - part of the interface
        """Returns None: blocks are never overwritten."""
        return None

    def release(self, table: Table) -> None:
        """Frees the last block first: a prefix is found from its start, so its end is evicted first."""
        self.pool.free(reversed(table.live))

    def _first_needed(self, num_computed: int) -> int:  # noqa: ARG002 - part of the interface
        """Returns the block of the oldest token that a query at position ``num_computed`` sees."""
        return 0

    def _found(self, key: BlockKey) -> Block:
        block = self.pool.lookup(key)
        if block is None:
            raise ValueError("cannot take a prefix hit that is not in the cache")
        return block


class PagedWindowGroup(FullGroup):
    """Sliding window over append-only blocks: blocks before the window are freed.

    Blocks lie as with full attention, but a query at position p reads only positions above ``p - window``. A
    sequence therefore holds a bounded number of blocks, and a hit needs only the blocks of the next query.
    """

    def __init__(self, pool: BlockPool, layout: BlockLayout, window: int) -> None:
        """Manages ``pool`` for layers with a window of ``window`` tokens."""
        super().__init__(pool, layout)
        self._window = window

    def most_blocks(self, num_tokens: int) -> int:
        """Covers the window of a chunk's first token and the chunk, for the worst alignment with blocks."""
        layout = self._layout
        window_and_chunk = -(-(self._window - 1 + layout.chunk) // layout.block_size) + 1
        return min(super().most_blocks(num_tokens), window_and_chunk)

    def missing(self, table: Table, num_tokens: int) -> int:
        """Counts the entries before the window as present."""
        return max(0, super().most_blocks(num_tokens) - len(table.blocks))

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Searches from the right for a length with a cached window; blocks before the window may be missing.

        Window 8, blocks of 4, a hash block each: a hit of length n needs the positions from ``4n - 7`` on:
        two blocks. Cached ``[-, b, c, -, e]`` against keys ``a b c d e`` is a hit of 3.
        """
        layout, per_block, lookup = self._layout, self._layout.hash_blocks_per_block, self.pool.lookup
        hit = limit - limit % layout.hit_stride
        while hit > 0:
            if hit % per_block and lookup(keys[hit - 1]) is None:
                hit -= layout.hit_stride
                continue
            first = self._first_needed(hit * layout.hash_block_size)
            missing = next(
                (i for i in range(hit // per_block - 1, first - 1, -1) if lookup(keys[(i + 1) * per_block - 1]) is None),
                None,
            )  # fmt: skip
            if missing is None:
                return hit
            # Every shorter hit that reaches beyond the missing block needs it too: the next candidate ends
            # before its end.
            hit = (missing + 1) * per_block - 1
            hit -= hit % layout.hit_stride
        return 0

    def trim(self, table: Table, num_computed: int) -> int:
        """Frees the blocks before the window of the query at ``num_computed``, the oldest first."""
        first = min(self._first_needed(num_computed), len(table.blocks))
        count = first - table.first
        if count <= 0:
            return 0
        self.pool.free(table.blocks[table.first : first])
        table.blocks[table.first : first] = [self.pool.null] * count
        table.first = first
        return count

    def _first_needed(self, num_computed: int) -> int:
        return max(0, num_computed - self._window + 1) // self._layout.block_size


# Measured on the traces of tests/bench/simulations/kept_windows.py.
_CHEAP_SHARE = 1 / 16


class InPlaceWindowGroup:
    """Sliding window in place: a block per sequence, whose content slides along.

    The kernels of Rebellions NPUs append to the block and keep its last ``window`` tokens. A chunk later the
    prefix's window is overwritten, and vLLM-RBLN therefore disables prefix caching for such models. Here the
    block is copied, device to device, at the chunk boundaries worth resuming from. A request resumed there
    gets a copy of the copy: only its sequence writes a table's block, and indexed blocks are never written.
    """

    paged: ClassVar[bool] = False

    def __init__(self, pool: BlockPool, layout: BlockLayout, window: int) -> None:
        """Manages ``pool``, which has both working blocks and kept windows of ``window`` tokens each."""
        self.pool = pool
        pool.cheap_quota = int(pool.num_blocks * _CHEAP_SHARE)
        self._layout = layout
        self._window = window

    def most_blocks(self, num_tokens: int) -> int:  # noqa: ARG002 - part of the interface
        """Returns 1."""
        return 1

    def missing(self, table: Table, num_tokens: int) -> int:  # noqa: ARG002 - part of the interface
        """See :class:`KvGroupManager`."""
        return 1 - len(table.blocks)

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Returns the last boundary with a kept window; with ``ab`` and ``abcd`` kept, ``abce`` hits 2."""
        stride = self._layout.hit_stride
        for hit in range(limit - limit % stride, 0, -stride):
            if self.pool.lookup(keys[hit - 1]) is not None:
                return hit
        return 0

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """Shares nothing: the kept window is copied into the sequence's block."""
        if not hit:
            return Table(), None
        source = self.pool.lookup(keys[hit - 1])
        if source is None:
            raise ValueError("cannot take a prefix hit that is not in the cache")
        self.pool.touch((source,))
        return Table(), source

    def copied_tokens(self, num_tokens: int) -> int:
        """Returns how many of the sequence's tokens the window still holds."""
        return min(num_tokens, self._window)

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:  # noqa: ARG002 - part of the interface
        """Returns False for every earlier length: the last token overwrote the window of its predecessor."""
        return num_tokens == num_computed

    def trim(self, table: Table, num_computed: int) -> int:  # noqa: ARG002 - part of the interface
        """Frees nothing: the block slides in place."""
        return 0

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:  # noqa: ARG002 - part of the interface
        """Indexes nothing: the table's block will be overwritten. See :meth:`keep`."""
        return []

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:
        """Returns a block for a copy of the window, unless the prefix is kept already.

        Cheap windows replace only cheap windows, plus a small reserved share of the pool.
        The share protects windows for a prompt's first repetition from older, more valuable windows.
        """
        kept = self.pool.lookup(key)
        if kept is not None:
            if not cheap:
                # The prefix was used again: raise its worth and make it the last to be evicted.
                self.pool.touch((kept,))
                self.pool.free((kept,))
            return None
        if cheap:
            return self.pool.allocate_for_cheap()
        return next(iter(self.pool.allocate(1) or ()), None)

    def release(self, table: Table) -> None:
        """Frees the block; no other sequence can use its content."""
        self.pool.free(table.blocks)
