"""All KV groups of one replica together: a request's blocks are found, taken, grown and given back in every group or in none."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.copies import Copies, Copy, CopyQueue
from scheduler_svc.kv.events import KvEventLog
from scheduler_svc.kv.groups.base import Grid, KvGroupManager, Table
from scheduler_svc.kv.groups.full import FullGroup
from scheduler_svc.kv.groups.in_place_window import InPlaceWindowGroup
from scheduler_svc.kv.groups.paged_window import PagedWindowGroup
from scheduler_svc.kv.prefix_hash import KeyChain, seed_key
from scheduler_svc.kv.window_policy import KeepJunctions, KeepPolicy
from scheduler_svc.replica.step_plan import BlockCopy
from scheduler_svc.requests.request import Request
from scheduler_svc.shapes.geometry import Geometry, GroupKind, KvGroup


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How prefixes are reused.

    Attributes:
        prefix_caching: whether finished chunks are indexed and looked up.
        sub_block: whether a hit may end inside a block, whose beginning is then copied.
        cache_generated: whether what decode steps wrote is indexed too. Their kernels round differently from prefill's, so a hit on
            generated tokens is no longer bit-exact with a miss.
    """

    prefix_caching: bool = True
    sub_block: bool = True
    cache_generated: bool = False


@dataclass(slots=True)
class KvStats:
    """What the cache did, counted from the start.

    Attributes:
        queried_tokens: known tokens of admitted requests.
        hit_tokens: how many of them did not have to be computed.
        copies: block copies planned.
        kept_windows: how many of these keep a window.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    copies: int = 0
    kept_windows: int = 0


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """References that keep a prefix from being evicted.

    Attributes:
        num_tokens: its length.
        held: per group, what is referenced.
    """

    num_tokens: int
    held: tuple[tuple[Table, Block | None], ...]

    def blocks(self, group_id: int) -> list[Block]:
        """The blocks of one group."""
        table, source = self.held[group_id]
        return table.live if source is None else [*table.live, source]


def _make_group(group: KvGroup, grid: Grid, pool: BlockPool) -> KvGroupManager:
    """The manager of a group's kind."""
    match group.kind:
        case GroupKind.FULL:
            return FullGroup(pool, grid)
        case GroupKind.PAGED_WINDOW:
            return PagedWindowGroup(pool, grid, group.window)
        case GroupKind.IN_PLACE_WINDOW:
            return InPlaceWindowGroup(pool, grid, group.window)


class KvCache:
    """The KV memory of one replica.

    A prefix hit is the longest one that all groups can serve. It is resumed at a chunk boundary, so that the rest is computed by the
    very chunks that a miss would have run and gives the same bits; and at least the last token is always recomputed, because its
    logits are wanted.

    Blocks change hands at once, while the device runs behind: what is decided here is done in the order of the plans, and within a
    plan copies come before anything that writes. So a copy is valid if it was when it was decided.

    Attributes:
        groups: managers, by group id.
        stats: counters.
        events: what was stored and removed.
        copies: those that the next plan has to carry; hand them to :meth:`copied` when it was run.
        on_release: called whenever blocks become free: until then, what did not fit will not fit.
    """

    def __init__(
        self, geometry: Geometry, groups: Sequence[KvGroup], num_blocks: Sequence[int], *, model: str,
        options: CacheOptions = CacheOptions(), keep: KeepPolicy | None = None, first_event: int = 1,
    ) -> None:  # fmt: skip
        """Makes one pool per group.

        Args:
            geometry: block size and chunk.
            groups: the model's KV groups.
            num_blocks: per group, including the null block.
            model: part of every prefix's identity.
            options: how prefixes are reused.
            keep: which contents of in-place windows are worth a copy.
            first_event: sequence number before the first batch of events.
        """
        granule = geometry.granule
        unit = geometry.chunk // granule
        if not options.sub_block:
            unit = max(unit, geometry.block_size // granule)
        self._grid = Grid(geometry.block_size, geometry.chunk, granule, unit)
        self._model = model
        self._options = options
        self._pools = [
            BlockPool(count, on_evict=partial(self._evicted, group_id))
            for group_id, count in enumerate(num_blocks)
        ]
        self.groups = [
            _make_group(group, self._grid, pool) for group, pool in zip(groups, self._pools, strict=True)
        ]
        in_place = any(group.kind is GroupKind.IN_PLACE_WINDOW for group in groups)
        # Without such groups nothing has to be kept, and nothing remembered to decide on it.
        self._keep = (keep or KeepJunctions()) if in_place and options.prefix_caching else None
        self.copies = CopyQueue(self._pools)
        self._era = 0
        self.stats = KvStats()
        self.events = KvEventLog(
            lambda: ((i, pool.keys) for i, pool in enumerate(self._pools)), first=first_event
        )
        self.on_release: Callable[[], None] = lambda: None

    # ---- what there is -------------------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of blocks in use in the fullest group, 0 to 1."""
        return max(pool.usage for pool in self._pools)

    @property
    def num_evicted(self) -> int:
        """Blocks whose content was given up for other content so far."""
        return sum(pool.num_evicted for pool in self._pools)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of that length fits an otherwise empty replica."""
        return all(group.most_blocks(num_tokens) <= group.pool.num_blocks for group in self.groups)

    def max_tokens(self, limit: int) -> int:
        """Tokens of the longest sequence that fits an otherwise empty replica, at most ``limit``."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    def could_admit(self, request: Request, leaving: Sequence[Request]) -> bool:
        """Whether the request might fit if others left. An estimate: it may say yes where there is not enough room."""
        if not self.fits(request.end):
            return False
        shared = self.peek(request) // self._grid.block_size
        return all(
            group.most_blocks(len(request.token_ids) + 1) - shared
            <= group.pool.num_free + sum(one.tables[group_id].num_live for one in leaving)
            for group_id, group in enumerate(self.groups)
        )

    @property
    def unit(self) -> int:
        """Granules between two lengths that a hit may have."""
        return self._grid.unit

    @property
    def slides_in_place(self) -> bool:
        """Whether the model has windows whose content moves on with every token."""
        return any(isinstance(group, InPlaceWindowGroup) for group in self.groups)

    # ---- prefixes ------------------------------------------------------------------------------------------------------------------

    def keys_of(self, request: Request) -> tuple[list[BlockKey], int]:
        """The request's keys and how many of them a hit may have: the granules up to the last chunk boundary before its last token.

        None where prefixes are not reused, or the request wants to know of each token of its prompt.
        """
        # The log-probabilities of a prompt come with its tokens' computation: whoever wants them computes all of it.
        if not self._options.prefix_caching or request.sampling.prompt_logprobs is not None:
            return [], 0
        unit = self._grid.unit
        limit = (len(request.token_ids) - 1) // (self._grid.granule * unit) * unit
        return self._chain(request).extend(request.token_ids, limit), limit

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Granules of the longest hit that all groups can serve. Groups may cut each other's hits short; shrinks until all agree."""
        hit, agreed, groups = limit, 0, len(self.groups)
        for group in itertools.cycle(self.groups):
            if not hit or agreed == groups:
                return hit
            found = group.longest_hit(keys, hit)
            agreed = agreed + 1 if found == hit else 1
            hit = found
        raise AssertionError("a replica has at least one KV group")

    def hit_limit(self, request: Request) -> int:
        """Tokens of the longest hit that the request could have in any cache."""
        return self.keys_of(request)[1] * self._grid.granule

    def peek(self, request: Request) -> int:
        """Tokens that the request would not have to compute here. Does not modify anything."""
        keys, limit = self.keys_of(request)
        return self.longest_hit(keys, limit) * self._grid.granule

    # ---- a request's blocks --------------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Gives a waiting request what it starts with, as much as possible from the prefix cache.

        Sets ``tables``, ``num_computed``, ``num_cached`` and ``junction`` of the request; what has to be copied goes with the next plan.

        Returns:
            False if there is not enough room now. Its cached prefix counts as used, and will be given up later.
        """
        keys, limit = self.keys_of(request)
        hit = self.longest_hit(keys, limit)
        while not self._admit_at(request, keys, hit):
            # What is only copied needs a block more than its request has. Where that is too much, it is computed instead.
            whole = hit - hit % self._grid.per_block
            if whole == hit:
                return False
            hit = self.longest_hit(keys, whole)
        if self._keep is not None:
            boundaries = range(self._grid.unit, limit + 1, self._grid.unit)
            request.junction = self._keep.observe(keys, boundaries)
        return True

    def _admit_at(self, request: Request, keys: Sequence[BlockKey], hit: int) -> bool:
        """Admits a request that resumes behind ``hit`` granules; False without room, and then its prefix was merely used again."""
        hit_tokens = hit * self._grid.granule
        known = len(request.token_ids)
        taken = [group.take_hit(keys, hit) for group in self.groups]
        missing = [
            max(group.blocks_at_start(known, hit_tokens) - len(table.blocks), 0)
            for group, (table, _) in zip(self.groups, taken, strict=True)
        ]
        # A window that grows later needs its room soon; without it the request would only be admitted to be preempted.
        if any(
            max(count, group.most_blocks(known + 1) - len(table.live)) > group.pool.num_free
            for group, (table, _), count in zip(self.groups, taken, missing, strict=True)
        ):
            for group, (table, source) in zip(self.groups, taken, strict=True):
                group.release(table)
                if source is not None:
                    group.pool.free((source,))
            return False
        for group_id, (group, (table, source), count) in enumerate(
            zip(self.groups, taken, missing, strict=True)
        ):
            first_new = len(table.blocks)
            table.blocks += group.pool.allocate(count) or ()
            if source is not None:
                target = table.blocks[first_new]
                order = BlockCopy(group_id, source.block_id, target.block_id, group.copied_tokens(hit_tokens))
                self.copies.add(Copy(order, source, self._era, owner=request))
                self.stats.copies += 1
        request.tables = [table for table, _ in taken]
        request.num_computed = request.num_cached = hit_tokens
        request.cache_era = self._era
        self.stats.queried_tokens += known
        self.stats.hit_tokens += hit_tokens
        return True

    def capacity(self, request: Request) -> int:
        """Tokens that the request's paged tables reach up to; without any, as many as one likes."""
        size = self._grid.block_size
        reach = [
            len(table.blocks) * size
            for group, table in zip(self.groups, request.tables, strict=True)
            if not isinstance(group, InPlaceWindowGroup)
        ]
        return min(reach, default=request.end)

    def grow(self, request: Request, num_tokens: int) -> list[tuple[int, tuple[int, ...]]] | None:
        """Makes room for tokens up to ``num_tokens``, after giving up what no later query sees.

        Returns:
            (group id, new block ids) of the groups that needed any, or None, with no block allocated, if one has not enough left.
        """
        for group, table in zip(self.groups, request.tables, strict=True):
            if group.trim(table, request.num_computed):
                self.on_release()
        missing = [
            group.missing(table, num_tokens) for group, table in zip(self.groups, request.tables, strict=True)
        ]
        if any(count > pool.num_free for count, pool in zip(missing, self._pools, strict=True)):
            return None
        grown = []
        for group_id, count in enumerate(missing):
            if count:
                new = self._pools[group_id].allocate(count) or []
                request.tables[group_id].blocks += new
                grown.append((group_id, tuple(block.block_id for block in new)))
        return grown

    def fork(self, request: Request, child: Request, num_tokens: int) -> bool:
        """Gives ``child`` the first ``num_tokens`` computed tokens of ``request``: whole blocks are shared, what either would write on is copied.

        For several sequences of one prompt. Where a window slides in place, no step of ``request`` may be under way.

        Sets ``tables``, ``num_computed`` and ``num_cached`` of the child.

        Returns:
            False, and nothing changes, if there is not enough room now, or if a window has moved on.
        """
        if not all(
            group.reaches_back(table, request.num_computed, num_tokens)
            for group, table in zip(self.groups, request.tables, strict=True)
        ):
            return False
        num_full = num_tokens // self._grid.block_size
        copied = [group.copied_tokens(num_tokens) for group in self.groups]
        if any(tokens and not pool.num_free for tokens, pool in zip(copied, self._pools, strict=True)):
            return False
        tables = []
        for group_id, (group, table, tokens) in enumerate(
            zip(self.groups, request.tables, copied, strict=True)
        ):
            shared = 0 if isinstance(group, InPlaceWindowGroup) else num_full
            mine = Table(table.blocks[:shared], min(table.first, shared))
            group.pool.touch(mine.live)
            if tokens:
                source = table.blocks[shared]
                (target,) = group.pool.allocate(1) or (group.pool.null,)
                group.pool.touch((source,))
                order = BlockCopy(group_id, source.block_id, target.block_id, tokens)
                self.copies.add(Copy(order, source, self._era, owner=child))
                self.stats.copies += 1
                mine.blocks.append(target)
            tables.append(mine)
        child.tables = tables
        child.num_computed = num_tokens
        child.num_cached = request.num_cached
        child.cache_era = request.cache_era
        return True

    def computed(self, request: Request, start: int, end: int) -> None:
        """Tokens ``[start, end)`` of a request were written: what can be reused of them is made findable. Call it when it is so."""
        if not self._options.prefix_caching or request.cache_era != self._era:
            return
        granule, chunk = self._grid.granule, self._grid.chunk
        whole_chunk = start % chunk == 0 and end - start == chunk
        if not whole_chunk and not self._options.cache_generated:
            return
        first, last = start // granule, end // granule
        if first == last:
            return
        self._index(request, first, last)
        if self._keep is not None and whole_chunk:
            self._keep_windows(self._keep, request, last)

    def generated(self, request: Request) -> None:
        """Makes findable what decode steps wrote, where that is wanted; a window that slides in place is not."""
        if not self._options.prefix_caching or not self._options.cache_generated:
            return
        if request.cache_era != self._era or self.copies.waits_for(request):
            return  # it began before a reset; or it is a fork whose blocks are not copied yet, with nothing in them
        granule = self._grid.granule
        end = request.num_computed // granule
        start = max(0, request.num_computed - self._grid.block_size) // granule
        self._index(request, start, end)

    def release(self, request: Request) -> None:
        """Takes all blocks from a request; its tokens have to be computed again if it is to go on."""
        self.copies.withdraw(request)
        for group, table in zip(self.groups, request.tables, strict=bool(request.tables)):
            group.release(table)
        request.tables = []
        request.num_computed = 0
        self.on_release()

    # ---- copies --------------------------------------------------------------------------------------------------------------------

    def copied(self, copies: Copies, *, done: bool = True) -> None:
        """The plan with these copies was run (or, not ``done``, failed): kept windows can be found, sources may be evicted."""
        for entry in copies.entries:
            pool = self._pools[entry.order.group_id]
            if entry.key is not None and done and entry.era == self._era:
                new = pool.index_block(entry.held, (entry.key,), cheap=entry.cheap)
                if new and self.events.active:
                    self.events.stored(entry.order.group_id, (entry.key,), b"", ())
            pool.free((entry.held,))
        self.on_release()

    # ---- pins ----------------------------------------------------------------------------------------------------------------------

    def pin(self, request: Request, others: Sequence[PinnedPrefix], max_share: float) -> PinnedPrefix | None:
        """Keeps what is cached of a request's prefix until :meth:`unpin`.

        Returns:
            The pin, or None if it and ``others`` would hold more than ``max_share`` of some group's blocks.
        """
        keys, limit = self.keys_of(request)
        hit = self.longest_hit(keys, limit)
        held = tuple(group.take_hit(keys, hit) for group in self.groups)
        pinned = PinnedPrefix(hit * self._grid.granule, held)
        together = [pinned, *others]
        for group_id, pool in enumerate(self._pools):
            blocks = {id(block) for pin in together for block in pin.blocks(group_id)}
            if len(blocks) > max_share * pool.num_blocks:
                self.unpin(pinned)
                return None
        return pinned

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Drops the references of a pin."""
        for group, (table, source) in zip(self.groups, pinned.held, strict=True):
            group.release(table)
            if source is not None:
                group.pool.free((source,))
        self.on_release()

    # ---- the whole -----------------------------------------------------------------------------------------------------------------

    def reset_prefixes(self) -> None:
        """Forgets all cached content. Requests keep their blocks, and what they still compute on top of them is not indexed either."""
        self._era += 1
        for pool in self._pools:
            pool.reset_index()
        self.events.cleared()

    def check_integrity(self) -> None:
        """Verifies every pool.

        Raises:
            RuntimeError: naming what does not hold.
        """
        for pool in self._pools:
            pool.check_integrity()

    # ---- parts ---------------------------------------------------------------------------------------------------------------------

    def _evicted(self, group_id: int, key: BlockKey) -> None:
        self.events.removed(group_id, key)

    def _index(self, request: Request, first: int, last: int) -> None:
        """Makes granules ``[first, last)`` of a request findable in every group."""
        chain = self._chain(request)
        keys = chain.extend(request.token_ids, last)
        for group_id, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            new = group.index(table, keys, first, last)
            if new and self.events.active:
                self._announce(group_id, request, chain, new)

    def _keep_windows(self, policy: KeepPolicy, request: Request, boundary: int) -> None:
        """Has the next plan copy the windows that end at granule ``boundary``, if they are worth it."""
        unit = self._grid.unit
        if boundary % unit:
            return  # no hit may end there
        last = len(request.token_ids) // (unit * self._grid.granule) * unit
        worth = policy.worth(boundary, last, request.junction)
        if worth == "nothing":
            return
        key, cheap = self._chain(request).keys[boundary - 1], worth == "little"
        for group_id, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            target = group.keep(key, cheap=cheap)
            if target is None:
                continue
            tokens = group.copied_tokens(boundary * self._grid.granule)
            order = BlockCopy(group_id, table.blocks[0].block_id, target.block_id, tokens)
            self.copies.add(Copy(order, target, self._era, key=key, cheap=cheap))
            self.stats.copies += 1
            self.stats.kept_windows += 1

    def _announce(self, group_id: int, request: Request, chain: KeyChain, indices: list[int]) -> None:
        """One event per run of neighbouring granules."""
        granule = self._grid.granule
        for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
            members = [index for _, index in run]
            first, end = members[0], members[-1] + 1
            tokens = tuple(request.token_ids[first * granule : end * granule])
            self.events.stored(group_id, tuple(chain.keys[first:end]), chain.parent(first), tokens)

    def _chain(self, request: Request) -> KeyChain:
        # A request whose replica was lost may come from one with other granules.
        if request.keys is None or request.keys.granule != self._grid.granule:
            seed = seed_key(model=self._model, lora=request.lora_name, salt=request.cache_salt)
            request.keys = KeyChain(seed, self._grid.granule, request.media)
        return request.keys
