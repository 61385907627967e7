"""Blocks of a KV group: in use, free, or free with a cached prefix.

A block is *free* when nothing references it. A free block keeps its cached content, and
:meth:`BlockPool.touch` can revive it until it is allocated again. The design follows vLLM's
``v1/core/block_pool.py``. In addition, a block may carry the keys of several prefixes that end inside it,
and the order of eviction depends on the worth of the content.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

BlockKey = bytes
"""Identity of a prefix: the chained hash of all tokens up to its end (see ``sequence``)."""

NULL_BLOCK_ID = 0
"""Never allocated. Padded rows of a static graph use it, and it replaces blocks in tables that are no longer
read."""


@dataclass(slots=True, eq=False)
class Block:
    """A block of KV memory."""

    block_id: int
    """Index into the worker's KV tensors."""
    ref_count: int = 0
    """Number of tables and pending copies with the block."""
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the written prefixes that end in this block, shortest first; empty for unknown content."""
    cheap: bool = False
    """Whether the content is evicted before other cached content."""
    previous: "Block | None" = None
    """Neighbour in the free list; None while the block is in use."""
    following: "Block | None" = None
    """Neighbour in the free list; None while the block is in use."""


class FreeQueue:
    """Doubly linked list through the blocks themselves, in the order in which they are allocated.

    ::

        head ─ no content ─ cheap content, oldest first ─ border ─ other content, least recently freed first ─
        tail

    A deque cannot remove from its middle in O(1), and a dict allocates memory; this list allocates nothing
    after construction. Three sentinels make special cases unnecessary.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._head, self._border, self._tail = Block(-1), Block(-1), Block(-1)
        self._head.following, self._border.following = self._border, self._tail
        self._tail.previous, self._border.previous = self._border, self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def has_spare(self) -> bool:
        """Whether the next block to allocate is empty or holds cheap content."""
        return self._head.following is not self._border

    def add(self, block: Block) -> None:
        """Inserts a block by the worth of its content. The block must not be in the list."""
        if not block.keys:
            assert self._head.following is not None
            self._insert(block, before=self._head.following)
        else:
            self._insert(block, before=self._border if block.cheap else self._tail)

    def remove(self, block: Block) -> None:
        """Removes a block from anywhere in the list. The block must be in the list."""
        previous, following = block.previous, block.following
        assert previous is not None
        assert following is not None
        previous.following = following
        following.previous = previous
        block.previous = block.following = None
        self._length -= 1

    def popleft(self, *, spare_cheap: bool = False) -> Block:
        """Removes and returns the block of least worth. The list must not be empty.

        With ``spare_cheap``, cheap content is evicted after other content instead of before it.
        """
        block = self._head.following
        assert block is not None
        if block is self._border or (spare_cheap and block.keys and self._border.following is not self._tail):
            block = self._border.following
        assert block is not None
        assert block is not self._tail
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        """Iterates in allocation order; the list must not change meanwhile."""
        block = self._head.following
        while block is not None and block is not self._tail:
            if block is not self._border:
                yield block
            block = block.following

    def _insert(self, block: Block, *, before: Block) -> None:
        last = before.previous
        assert last is not None
        last.following = before.previous = block
        block.previous, block.following = last, before
        self._length += 1


class BlockPool:
    """All blocks of a KV group on a replica.

    Invariants, kept by the pool and verified by :meth:`check_integrity`:

    1. Block 0 is the null block: never free, never allocated, never indexed.
    2. A block is in the free list if and only if its ``ref_count`` is 0.
    3. ``key in block.keys`` if and only if the block is ``index[key]`` or a twin of it; a block carries a
    key once.

    Kept by the caller:

    4. Every block obtained from :meth:`allocate` or :meth:`touch` is given back to :meth:`free` exactly once.
    5. Content under one of a block's keys is not overwritten before :meth:`allocate` returns the block again.
    6. :meth:`index_block` is called only after the content was written, with the keys in the order of their
       prefixes.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[BlockKey], None] | None = None) -> None:
        """Makes ``num_blocks`` blocks, at least 2, all free except the null block.

        `on_evict` is called with every key that is no longer findable.
        """
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (the null block and one to allocate), not {num_blocks}"
            )
        self._blocks = [Block(i) for i in range(num_blocks)]
        self.null = self._blocks[NULL_BLOCK_ID]
        self.null.ref_count = 1
        self._free = FreeQueue()
        for block in reversed(self._blocks[1:]):
            self._free.add(block)
        self._index: dict[BlockKey, Block] = {}
        # Further blocks with the same content, computed by two requests at once. Rare; kept so that a prefix
        # outlives its first block.
        self._twins: dict[BlockKey, list[Block]] = {}
        self._on_evict = on_evict
        self.num_evicted = 0
        """Blocks that lost cached content so far."""
        self.num_cheap = 0
        """Blocks with cheap content."""
        self.cheap_quota = 0
        """Number of blocks of cheap content protected from eviction before other content, as a chance for
        new content."""

    def dismantle(self) -> None:
        """Frees the memory of a pool that nothing uses any more. Safe on any thread; others run meanwhile.

        The blocks refer to one another, and a collection of garbage would stop all threads.
        """
        while self._index:
            self._index.popitem()
        self._twins.clear()
        while self._blocks:
            block = self._blocks.pop()
            block.previous = block.following = None

    @property
    def num_blocks(self) -> int:
        """Blocks available to requests: all except the null block."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks available for allocation, including cached blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Prefixes in the index; each ends in a used or a free block."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    @property
    def keys(self) -> Iterable[BlockKey]:
        """All findable keys."""
        return self._index.keys()

    def allocate(self, count: int) -> list[Block] | None:
        """Allocates ``count`` blocks with a reference each; their old content is evicted.

        Returns:
            The blocks, or None, with nothing changed, if fewer are free.
        """
        if count > len(self._free):
            return None
        return [
            self._claim(self._free.popleft(spare_cheap=self.num_cheap <= self.cheap_quota))
            for _ in range(count)
        ]

    def allocate_for_cheap(self) -> Block | None:
        """Allocates a block for cheap content if this evicts only cheap content or fits the quota."""
        if self.num_cheap < self.cheap_quota:
            return next(iter(self.allocate(1) or ()), None)
        return self._claim(self._free.popleft()) if self._free.has_spare else None

    def lookup(self, key: BlockKey) -> Block | None:
        """Returns a block with this content, if any; touch it before allocating."""
        return self._index.get(key)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to each block, against its allocation; the content is no longer cheap."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            self._set_cheap(block, False)

    def free(self, blocks: Iterable[Block]) -> None:
        """Drops a reference of each block; blocks without references become free, in the given order.

        Pass the last block of a sequence first: a prefix is found from its start, so its end should be
        evicted first.

        Raises:
            ValueError: if a block is already free.
        """
        for block in blocks:
            if block.ref_count == 0 or block is self.null:
                raise ValueError(f"block {block.block_id} is freed more often than it was referenced")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.add(block)

    def index_block(self, block: Block, keys: Sequence[BlockKey], *, cheap: bool = False) -> list[BlockKey]:
        """Makes written content of a block findable under more keys.

        Args:
            block: a block in use; the place of a free block depends on its content.
            keys: prefixes that end in the block, longer than its present ones, shortest first.
            cheap: whether the content may be evicted before other content.

        Returns:
            The keys not found before.
        """
        new = []
        for key in keys:
            first = self._index.setdefault(key, block)
            if first is block:
                new.append(key)
            else:
                self._twins.setdefault(key, []).append(block)
            block.keys.append(key)
        self._set_cheap(block, cheap)
        return new

    def reset_index(self) -> None:
        """Evicts all cached content. Blocks in use stay in use."""
        for block in self._blocks:
            if not block.keys:
                continue
            free = block.ref_count == 0
            if free:
                self._free.remove(block)
            self._forget(block)
            if free:
                self._free.add(block)

    def check_integrity(self) -> None:
        """Verifies the invariants of the class; `RuntimeError` names the first violated one."""
        free = {block.block_id for block in self._free}
        if len(free) != len(self._free):
            raise RuntimeError("the free list's length does not match its members")
        if NULL_BLOCK_ID in free or self.null.ref_count != 1 or self.null.keys:
            raise RuntimeError("the null block was allocated, freed or indexed")
        if sum(block.cheap for block in self._blocks) != self.num_cheap:
            raise RuntimeError("the number of cheap blocks is wrong")
        holders: dict[BlockKey, set[int]] = {}
        for block in self._blocks:
            if (block.ref_count == 0) != (block.block_id in free):
                raise RuntimeError(
                    f"block {block.block_id}: {block.ref_count} references, free: {block.block_id in free}"
                )
            if len(set(block.keys)) != len(block.keys):
                raise RuntimeError(f"block {block.block_id} has a key twice")
            for key in block.keys:
                holders.setdefault(key, set()).add(block.block_id)
        for key, twins in self._twins.items():
            if not twins or key not in self._index:
                raise RuntimeError("a key has twins and no first block")
        found = {
            key: {block.block_id, *(twin.block_id for twin in self._twins.get(key, ()))}
            for key, block in self._index.items()
        }
        if found != holders:
            raise RuntimeError("the index and the blocks' keys do not match")

    def _claim(self, block: Block) -> Block:
        block.ref_count = 1
        if block.keys:
            self.num_evicted += 1
            self._forget(block)
        return block

    def _forget(self, block: Block) -> None:
        for key in block.keys:
            twins = self._twins.get(key)
            if twins is None:
                del self._index[key]
                if self._on_evict is not None:
                    self._on_evict(key)
                continue
            if self._index[key] is block:
                self._index[key] = twins.pop()
            else:
                twins.remove(block)
            if not twins:
                del self._twins[key]
        # No other object holds this list.
        block.keys.clear()
        self._set_cheap(block, False)

    def _set_cheap(self, block: Block, cheap: bool) -> None:
        if block.cheap != cheap:
            block.cheap = cheap
            self.num_cheap += 1 if cheap else -1
