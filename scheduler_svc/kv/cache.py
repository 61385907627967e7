"""The KV memory of a replica: sequences get, share and free blocks in all KV groups at once."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from protos.steps import GroupKind
from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.copies import CopyQueue, PendingCopy
from scheduler_svc.kv.events import KvEventLog
from scheduler_svc.kv.groups import (
    BlockLayout,
    FullGroup,
    InPlaceWindowGroup,
    KvGroupManager,
    PagedWindowGroup,
    Table,
)
from scheduler_svc.kv.prefix_index import KeepJunctions, KeepPolicy, KvStats, PrefixIndex
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig

ChunkStarts = Literal["whole", "anywhere", "exact"]
"""Where a worker's chunks may begin: at multiples of the chunk, anywhere, or anywhere with the same bits."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How prefixes are reused."""

    prefix_caching: bool = True
    """Whether computed tokens are indexed and looked up."""
    sub_block: bool = True
    """Whether a hit may end inside a block; the block's beginning is then copied."""
    cache_generated: bool = False
    """Whether the output of decode steps is also indexed. Unless ``chunk_starts`` is exact, decode kernels
    round differently from prefill kernels."""
    copies_blocks: bool = True
    """Whether the worker can copy blocks. If not, whole blocks are still shared, but nothing is reused by
    copying: no part of a block, no window in place, and no fork into either."""
    chunk_starts: ChunkStarts = "whole"
    """Where the worker's chunks may begin."""
    finest_hit: int = 32
    """Tokens between two lengths of a hit if chunks are exact: fewer find little more and cost a key each."""


def hit_unit(shapes: ShapeConfig, groups: Sequence[KvGroup], options: CacheOptions) -> int:
    """Returns the tokens between two possible lengths of a prefix hit.

    A window that slides in place can be resumed only where a chunk ended.
    """
    if options.chunk_starts == "whole" or any(group.kind is GroupKind.IN_PLACE_WINDOW for group in groups):
        unit = shapes.chunk
    elif options.chunk_starts == "anywhere":
        unit = shapes.chunk_sizes[0]
    else:
        unit = math.gcd(options.finest_hit, shapes.block_size)
    return unit if options.sub_block and options.copies_blocks else math.lcm(unit, shapes.block_size)


def _make_group(group: KvGroup, layout: BlockLayout, pool: BlockPool) -> KvGroupManager:
    match group.kind:
        case GroupKind.FULL:
            return FullGroup(pool, layout)
        case GroupKind.PAGED_WINDOW:
            return PagedWindowGroup(pool, layout, group.window)
        case GroupKind.IN_PLACE_WINDOW:
            return InPlaceWindowGroup(pool, layout, group.window)


class KvCache:
    """The KV memory of a replica.

    Blocks change owners as soon as the cache decides it, before the device follows: the worker applies plans
    in order, and within a plan copies run before anything that writes. A copy is therefore valid if it was
    valid when the cache decided it.
    """

    def __init__(
        self, shapes: ShapeConfig, groups: Sequence[KvGroup], num_blocks: Sequence[int], *, model: str,
        options: CacheOptions = CacheOptions(), keep: KeepPolicy | None = None, first_event: int = 1,
    ) -> None:  # fmt: skip
        """Makes a block pool per group.

        Args:
            shapes: block size and chunk.
            groups: the model's KV groups.
            num_blocks: per group, including the null block.
            model: part of every prefix's identity.
            options: how prefixes are reused.
            keep: values the contents of in-place windows.
            first_event: sequence number before the first batch of events.
        """
        self._copies_blocks = options.copies_blocks
        self._layout = BlockLayout.from_shapes(shapes, hit_unit(shapes, groups, options))
        self.chunk_unit = math.gcd(self._layout.hit_unit, shapes.chunk)
        """Chunks that another one follows are multiples of this, so that it begins where a hit may end."""
        self.events = KvEventLog(
            lambda: ((i, pool.keys) for i, pool in enumerate(self._pools)), first=first_event
        )
        """Log of stored and removed prefixes."""
        self._pools = [
            BlockPool(count, on_evict=partial(self.events.removed, group_id))
            for group_id, count in enumerate(num_blocks)
        ]
        self.groups = [
            _make_group(group, self._layout, pool) for group, pool in zip(groups, self._pools, strict=True)
        ]
        """Managers by group id."""
        self.copies = CopyQueue(self._pools)
        """Copies for the next plan to carry; pass them to :meth:`settle_copies` when the plan was run."""
        self.stats = KvStats()
        self.slides_in_place = not all(group.paged for group in self.groups)
        """Whether the model has in-place windows, which slide with every token."""
        # Every hit on a window in place is a copy.
        enabled = options.prefix_caching and (options.copies_blocks or not self.slides_in_place)
        self.block_size = shapes.block_size
        """Tokens of a block in a paged group."""
        self.caches_prefixes = enabled
        """Whether prefixes are reused."""
        self.prefixes = PrefixIndex(
            self.groups, self._layout, self.copies, self.events, self.stats, model=model,
            enabled=enabled, index_decoded=options.cache_generated,
            keep=(keep or KeepJunctions()) if self.slides_in_place and enabled else None,
        )  # fmt: skip
        """The prefix cache."""
        self.on_release: Callable[[], None] = lambda: None
        """Called whenever blocks become free; only then may a refused request fit."""

    # ---- capacity ----

    @property
    def usage(self) -> float:
        """Share of blocks in use in the fullest group, 0 to 1."""
        return max(pool.usage for pool in self._pools)

    @property
    def num_evicted(self) -> int:
        """Blocks whose cached content was evicted so far."""
        return sum(pool.num_evicted for pool in self._pools)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of this length fits an otherwise empty replica."""
        return all(group.most_blocks(num_tokens) <= group.pool.num_blocks for group in self.groups)

    def max_tokens(self, limit: int) -> int:
        """Returns the longest sequence for an otherwise empty replica, up to ``limit`` tokens."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    def share_of(self, sequence: SequenceKv) -> float:
        """Returns a sequence's share of blocks in the group where it is largest, 0 to 1."""
        return max(
            table.num_live / pool.num_blocks for table, pool in zip(sequence.tables, self._pools, strict=True)
        )

    def num_to_leave(
        self, sequence: SequenceKv, others: Sequence[SequenceKv], at_least: int = 0,
        growing: Sequence[SequenceKv] = (),
    ) -> int | None:  # fmt: skip
        """Returns how many of `others`, in order, must leave for the sequence to fit for certain.

        A block becomes free only when all its users leave. The `growing` sequences still take blocks
        for all their known tokens, unless they leave.

        Returns:
            At least `at_least`; None if not even all others are enough.
        """
        keys, limit = self.prefixes.lookup_keys(sequence)
        hit = self.prefixes.longest_hit(keys, limit)
        while rest := hit % self._layout.hash_blocks_per_block:
            hit = self.prefixes.longest_hit(keys, hit - rest)  # see `admit`
        taken, short = self._demand(sequence, keys, hit, growing)
        users = [Counter[Block]() for _ in self.groups]
        found = None
        for count in range(len(others) + 1):
            if count >= at_least and all(blocks <= 0 for blocks in short):
                found = count
                break
            if count == len(others):
                break
            other = others[count]
            for group_id, table in enumerate(other.tables):
                if other in growing:
                    short[group_id] -= self._to_come(group_id, other)
                for block in table.live:
                    users[group_id][block] += 1
                    short[group_id] -= users[group_id][block] == block.ref_count
        self._release_hit(taken)
        return found

    def capacity(self, sequence: SequenceKv, limit: int) -> int:
        """Returns the capacity of the sequence's blocks in tokens, at most ``limit``."""
        size = self._layout.block_size
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.paged:
                limit = min(limit, len(table.blocks) * size)
            elif not table.blocks:
                return 0
        return limit

    # ---- a sequence's blocks ----

    def admit(self, sequence: SequenceKv, growing: Sequence[SequenceKv] = ()) -> bool:
        """Gives a sequence the blocks of its cached prefix; :meth:`grow` gives it the others.

        Sets ``tables``, ``num_computed``, ``num_cached`` and ``junction``. The next plan carries the copies.

        Args:
            sequence: the sequence.
            growing: running sequences that still take blocks for all their known tokens.

        Returns:
            False if the known tokens of all of them do not fit together now. The cached prefix then counts as
            recently used.
        """
        keys, limit = self.prefixes.lookup_keys(sequence)
        hit = self.prefixes.longest_hit(keys, limit)
        while not self._admit_at(sequence, keys, hit, growing):
            # A partial block is copied, which takes one block more than the sequence holds. Without room for
            # that, the tokens are computed instead.
            whole = hit - hit % self._layout.hash_blocks_per_block
            if whole == hit:
                return False
            hit = self.prefixes.longest_hit(keys, whole)
        self.prefixes.note_admission(sequence, keys, limit)
        return True

    def _to_come(self, group_id: int, sequence: SequenceKv) -> int:
        """Returns how many blocks a sequence still takes for its known tokens and the next one."""
        most = self.groups[group_id].most_blocks(len(sequence.token_ids) + 1)
        return max(0, most - sequence.tables[group_id].num_live)

    def _admit_at(
        self, sequence: SequenceKv, keys: Sequence[BlockKey], hit: int, growing: Sequence[SequenceKv]
    ) -> bool:
        """Admits a sequence resumed after ``hit`` hash blocks; False if there is not enough room."""
        taken, short = self._demand(sequence, keys, hit, growing)
        if any(blocks > 0 for blocks in short):
            self._release_hit(taken)
            return False
        hit_tokens = hit * self._layout.hash_block_size
        for group_id, (group, (table, source)) in enumerate(zip(self.groups, taken, strict=True)):
            if source is None:
                continue
            (target,) = group.pool.allocate(1) or (group.pool.null,)
            table.blocks.append(target)
            self._queue_copy(group_id, source, target, group.copied_tokens(hit_tokens), sequence)
        sequence.tables = [table for table, _ in taken]
        sequence.num_computed = sequence.num_cached = sequence.num_indexed = hit_tokens
        sequence.cache_epoch = self.prefixes.epoch
        self.stats.queried_tokens += len(sequence.token_ids)
        self.stats.hit_tokens += hit_tokens
        return True

    def _demand(
        self, sequence: SequenceKv, keys: Sequence[BlockKey], hit: int, growing: Sequence[SequenceKv]
    ) -> tuple[list[tuple[Table, Block | None]], list[int]]:
        """References the blocks of a hit of ``hit`` hash blocks.

        Returns:
            By group: the hit, and how many more blocks must be free than are (0 or less if enough are) so
            that the known tokens of this and of the growing sequences fit.
        """
        taken = [group.take_hit(keys, hit) for group in self.groups]
        most = len(sequence.token_ids) + 1
        short = [
            group.most_blocks(most)
            - table.num_live
            + sum(self._to_come(group_id, one) for one in growing)
            - group.pool.num_free
            for group_id, (group, (table, _)) in enumerate(zip(self.groups, taken, strict=True))
        ]
        return taken, short

    def grow(self, sequence: SequenceKv, num_tokens: int) -> list[tuple[int, tuple[int, ...]]] | None:
        """Makes room for tokens up to ``num_tokens``, after freeing blocks no later query sees.

        Returns:
            (group id, new block ids) of each group in need of blocks, or None, with no block allocated, if a
            group lacks free blocks.
        """
        tables = sequence.tables
        for group, table in zip(self.groups, tables, strict=True):
            if group.trim(table, sequence.num_computed):
                self.on_release()
        missing = [group.missing(table, num_tokens) for group, table in zip(self.groups, tables, strict=True)]
        if any(count > pool.num_free for count, pool in zip(missing, self._pools, strict=True)):
            return None
        grown = []
        for group_id, count in enumerate(missing):
            if count:
                new = self._pools[group_id].allocate(count) or []
                tables[group_id].blocks += new
                grown.append((group_id, tuple(block.block_id for block in new)))
        return grown

    def fork(self, parent: SequenceKv, child: SequenceKv, num_tokens: int) -> bool:
        """Gives ``child`` the first ``num_tokens`` computed tokens of ``parent``, with the same prompt.

        Whole blocks are shared; a block still to be written by either sequence is copied. If a window slides
        in place, no step of ``parent`` may be in flight. Sets ``tables``, ``num_computed`` and ``num_cached``
        of the child.

        Returns:
            False, with nothing changed, if there is not enough room, a window has moved on, or a block
            cannot be copied.
        """
        if not all(
            group.reaches_back(table, parent.num_computed, num_tokens)
            for group, table in zip(self.groups, parent.tables, strict=True)
        ):
            return False
        num_full = num_tokens // self._layout.block_size
        copied = [group.copied_tokens(num_tokens) for group in self.groups]
        if any(copied) and not self._copies_blocks:
            return False
        if any(tokens and not pool.num_free for tokens, pool in zip(copied, self._pools, strict=True)):
            return False
        tables = []
        for group_id, (group, table, tokens) in enumerate(
            zip(self.groups, parent.tables, copied, strict=True)
        ):
            shared = num_full if group.paged else 0
            own = Table(table.blocks[:shared], min(table.first, shared))
            group.pool.touch(own.live)
            if tokens:
                source = table.blocks[shared]
                (target,) = group.pool.allocate(1) or (group.pool.null,)
                group.pool.touch((source,))
                self._queue_copy(group_id, source, target, tokens, child)
                own.blocks.append(target)
            tables.append(own)
        child.tables = tables
        child.num_computed = num_tokens
        child.num_cached = parent.num_cached
        child.num_indexed = min(parent.num_indexed, num_tokens)
        child.cache_epoch = parent.cache_epoch
        return True

    def release(self, sequence: SequenceKv) -> None:
        """Frees all blocks of a sequence. If it runs again, it is computed again or found in the cache."""
        self.copies.withdraw(sequence)
        for group, table in zip(self.groups, sequence.tables, strict=bool(sequence.tables)):
            group.release(table)
        sequence.tables = []
        sequence.num_computed = sequence.num_indexed = 0
        self.on_release()

    def settle_copies(self, copies: Sequence[PendingCopy], *, done: bool = True) -> None:
        """Ends the copies of an executed plan: kept windows become findable, sources may be evicted.

        Args:
            copies: the result of :meth:`CopyQueue.take` for the plan.
            done: False if the plan failed, whose windows are not indexed.
        """
        for copy in copies:
            if done:
                self.prefixes.index_window(copy)
            self._pools[copy.group_id].free((copy.held,))
        self.on_release()

    def check_integrity(self) -> None:
        """Verifies every pool; `RuntimeError` names the violated invariant."""
        for pool in self._pools:
            pool.check_integrity()

    # ---- internals ----

    def _queue_copy(
        self, group_id: int, source: Block, target: Block, num_tokens: int, sequence: SequenceKv
    ) -> None:
        """Queues a copy into a block of ``sequence``; the caller has referenced ``source``."""
        epoch = self.prefixes.epoch
        self.copies.add(PendingCopy(group_id, source, target, num_tokens, source, epoch, sequence=sequence))
        self.stats.copies += 1

    def _release_hit(self, held: Sequence[tuple[Table, Block | None]]) -> None:
        for group, (table, source) in zip(self.groups, held, strict=True):
            group.release(table)
            if source is not None:
                group.pool.free((source,))
