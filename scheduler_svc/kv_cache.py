"""All KV groups of one replica together: a request's blocks are found, taken, grown and given back in every group or in none."""

from collections.abc import Callable, Sequence

from scheduler_svc.block_pool import BlockPool
from scheduler_svc.geometry import Geometry
from scheduler_svc.kv_groups.base import KvGroupManager
from scheduler_svc.kv_groups.paged import PagedGroup
from scheduler_svc.prefix_cache import KeyChain, seed_key
from scheduler_svc.request import Request


class KvCache:
    """The KV memory of one replica.

    A prefix hit is the longest one that all groups can serve. It is resumed at a chunk boundary, so that the rest is computed by the
    very chunks that a miss would have run and gives the same bits; and at least the last token is always recomputed, because its
    logits are wanted.
    """

    def __init__(
        self, geometry: Geometry, num_blocks: Sequence[int], *, model: str, prefix_caching: bool,
        make_group: Callable[[BlockPool, int], KvGroupManager] = PagedGroup,
    ) -> None:  # fmt: skip
        """Makes one pool per group.

        Args:
            geometry: block size and chunk.
            num_blocks: per group, including the null block.
            model: part of every prefix's identity.
            prefix_caching: whether full blocks are indexed and looked up.
            make_group: builds a group's manager from its pool and the block size.
        """
        self._block_size = geometry.block_size
        # Where a hit may end: a multiple of both.
        self._boundary = max(geometry.chunk, geometry.block_size)
        self._model = model
        self._prefix_caching = prefix_caching
        self.groups = [make_group(BlockPool(count), geometry.block_size) for count in num_blocks]

    @property
    def usage(self) -> float:
        """Share of blocks in use in the fullest group, 0 to 1."""
        return max(group.pool.usage for group in self.groups)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits an otherwise empty replica."""
        return min(group.pool.num_blocks for group in self.groups) * self._block_size

    def admit(self, request: Request) -> bool:
        """Gives a waiting request blocks for all of its known tokens, as many as possible from the prefix cache.

        Sets ``blocks``, ``num_computed`` and ``num_cached`` of the request.

        Returns:
            False, and nothing changes, if they do not fit now.
        """
        hit_blocks, keys = self._find_hit(request)
        # The next token needs room as well: otherwise a request could be admitted only to be preempted by its own first token.
        wanted = [group.num_blocks_for(len(request.token_ids) + 1) for group in self.groups]
        tables = [group.take_hit(keys, hit_blocks) for group in self.groups]
        if any(
            need - hit_blocks > group.pool.num_free for need, group in zip(wanted, self.groups, strict=True)
        ):
            for group, table in zip(self.groups, tables, strict=True):
                group.release(table)
            return False
        for need, group, table in zip(wanted, self.groups, tables, strict=True):
            table.extend(group.pool.allocate(need - hit_blocks) or ())
        request.blocks = tables
        request.num_computed = request.num_cached = hit_blocks * self._block_size
        return True

    def capacity(self, request: Request) -> int:
        """Tokens that the request's blocks can hold."""
        return len(request.blocks[0]) * self._block_size

    def grow(self, request: Request) -> list[int] | None:
        """Appends one block per group.

        Returns:
            The new block ids by group, or None, and nothing changes, if a group has none left.
        """
        if any(group.pool.num_free == 0 for group in self.groups):
            return None
        new = [(group.pool.allocate(1) or [])[0] for group in self.groups]
        for table, block in zip(request.blocks, new, strict=True):
            table.append(block)
        return [block.block_id for block in new]

    def index(self, request: Request, start: int, end: int) -> None:
        """Makes the blocks that a finished chunk ``[start, end)`` filled findable. Call it after the worker wrote them."""
        if not self._prefix_caching:
            return
        first, last = start // self._block_size, end // self._block_size
        if last > first:
            keys = self._chain(request).extend(request.token_ids, last)
            for group, table in zip(self.groups, request.blocks, strict=True):
                group.index(table, keys, first)

    def release(self, request: Request) -> None:
        """Takes all blocks from a request; its tokens have to be computed again if it is to go on."""
        for group, table in zip(self.groups, request.blocks, strict=bool(request.blocks)):
            group.release(table)
        request.blocks = []
        request.num_computed = 0

    def check_integrity(self) -> None:
        """Verifies every pool.

        Raises:
            RuntimeError: naming what does not hold.
        """
        for group in self.groups:
            group.pool.check_integrity()

    def _find_hit(self, request: Request) -> tuple[int, list[bytes]]:
        """Blocks of the longest usable hit, and the keys they are found under."""
        if not self._prefix_caching:
            return 0, []
        boundary_blocks = self._boundary // self._block_size
        max_blocks = (len(request.token_ids) - 1) // self._boundary * boundary_blocks
        keys = self._chain(request).extend(request.token_ids, max_blocks)
        hit = max_blocks
        # Groups may cut each other's hits short; shrink until all agree.
        while (
            agreed := min(group.longest_hit(keys, hit) for group in self.groups)
            // boundary_blocks
            * boundary_blocks
        ) < hit:
            hit = agreed
        return hit, keys

    def _chain(self, request: Request) -> KeyChain:
        if request.keys is None:
            seed = seed_key(model=self._model, salt=request.cache_salt)
            request.keys = KeyChain(seed, self._block_size)
        return request.keys
