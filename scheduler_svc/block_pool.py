"""Blocks of one KV group: who uses which, which may be reused, and which still hold a known prefix.

A block is *free* when nobody refers to it. A free block that holds a cached prefix keeps its content and can be revived by
:meth:`BlockPool.touch` until it is handed out again; the least recently freed block is handed out first. The design follows
the block pool of vLLM's ``v1/core/block_pool.py``; the free list is intrusive so that reviving a block in its middle is O(1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

BlockKey = bytes
"""Identity of a block's content: the chained hash of all tokens up to its end (see ``prefix_cache``)."""

NULL_BLOCK_ID = 0
"""Never allocated; padded rows of a static graph read and write it."""


@dataclass(slots=True, eq=False)
class Block:
    """One block of KV memory.

    Attributes:
        block_id: index into the worker's KV tensors.
        ref_count: requests that have the block in their table.
        key: content if the block is in the prefix index, else None.
        previous, following: neighbours in the free list; both None while the block is in use.
    """

    block_id: int
    ref_count: int = 0
    key: BlockKey | None = None
    previous: "Block | None" = None
    following: "Block | None" = None


class FreeQueue:
    """Doubly linked list through the blocks themselves, least recently freed first.

    A deque cannot remove from its middle in O(1), and a dict allocates; this list allocates nothing after construction.
    The two sentinels spare every operation its special cases.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.following = self._tail
        self._tail.previous = self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Adds a block as the most recently freed one. The block must not be in the list."""
        last = self._tail.previous
        assert last is not None
        last.following = block
        block.previous = last
        block.following = self._tail
        self._tail.previous = block
        self._length += 1

    def remove(self, block: Block) -> None:
        """Takes a block out from wherever it is. The block must be in the list."""
        previous, following = block.previous, block.following
        assert previous is not None
        assert following is not None
        previous.following = following
        following.previous = previous
        block.previous = block.following = None
        self._length -= 1

    def popleft(self) -> Block:
        """Takes out the least recently freed block. The list must not be empty."""
        block = self._head.following
        assert block is not None
        assert block is not self._tail
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        """Walks in eviction order; the list must not change meanwhile."""
        block = self._head.following
        while block is not None and block is not self._tail:
            yield block
            block = block.following


class BlockPool:
    """All blocks of one KV group on one replica.

    Invariants, kept by the pool and verified by :meth:`check_integrity`:

    1. Block 0 is the null block: never free, never allocated, never indexed.
    2. A block is in the free list if and only if its ``ref_count`` is 0.
    3. ``index[key] is block`` if and only if ``block.key == key``; at most one block per key.

    Kept by the caller:

    4. Every block obtained from :meth:`allocate` or :meth:`touch` is given back to :meth:`free` exactly once.
    5. A block is written only while its ``ref_count`` is 1 and it has no key, that is, before it was indexed.
    6. :meth:`index_block` is called only after the block's content was written.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[BlockKey], None] | None = None) -> None:
        """Makes ``num_blocks`` blocks, all free but the null block.

        Args:
            num_blocks: including the null block; at least 2.
            on_evict: called with the key of every block that leaves the index.

        Raises:
            ValueError: if there would be no block to allocate.
        """
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (the null block and one to allocate), not {num_blocks}"
            )
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._null = self._blocks[NULL_BLOCK_ID]
        self._null.ref_count = 1
        self._free = FreeQueue(self._blocks[1:])
        self._index: dict[BlockKey, Block] = {}
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix index, used or free."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[Block] | None:
        """Hands out ``count`` blocks, oldest free ones first, each with one reference; their old content is forgotten.

        Returns:
            The blocks, or None (and nothing changes) if fewer are free.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_count = 1
            self._forget(block)
        return blocks

    def lookup(self, key: BlockKey) -> Block | None:
        """The block with that content, if any. Does not modify the pool; :meth:`touch` it before anything else is allocated."""
        return self._index.get(key)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Adds a reference to each of these cached blocks, so that they cannot be handed out."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drops one reference of each block; those without references become free, in the given order.

        Give the blocks of a sequence last block first: a prefix is only found from its start, so its end should go first.

        Raises:
            ValueError: if a block has no reference to drop.
        """
        for block in blocks:
            if block.ref_count == 0 or block is self._null:
                raise ValueError(f"block {block.block_id} is freed more often than it was taken")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)

    def index_block(self, block: Block, key: BlockKey) -> bool:
        """Makes a written block findable by its content.

        Returns:
            False if another block has that content already: the first one stays, so that tables never change under a request.
        """
        if block.key is not None or key in self._index:
            return block.key == key
        block.key = key
        self._index[key] = block
        return True

    def reset_index(self) -> None:
        """Forgets all cached content. Blocks in use stay in use."""
        for block in list(self._index.values()):
            self._forget(block)

    def check_integrity(self) -> None:
        """Verifies the invariants of the class.

        Raises:
            RuntimeError: naming the first one that does not hold.
        """
        free = {block.block_id for block in self._free}
        if len(free) != len(self._free):
            raise RuntimeError("the free list's length does not match its members")
        if NULL_BLOCK_ID in free or self._null.ref_count != 1 or self._null.key is not None:
            raise RuntimeError("the null block was allocated, freed or indexed")
        for block in self._blocks:
            if (block.ref_count == 0) != (block.block_id in free):
                raise RuntimeError(
                    f"block {block.block_id}: {block.ref_count} references, free: {block.block_id in free}"
                )
            if block.key is not None and self._index.get(block.key) is not block:
                raise RuntimeError(f"block {block.block_id} has a key that the index does not know")
        if any(block.key != key for key, block in self._index.items()):
            raise RuntimeError("the index has a key that its block does not have")

    def _forget(self, block: Block) -> None:
        if block.key is None:
            return
        del self._index[block.key]
        if self._on_evict is not None:
            self._on_evict(block.key)
        block.key = None
