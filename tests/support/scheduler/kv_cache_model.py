"""A naive KV memory: the content of every block, and a brute-force search for the longest hit.

It has no free lists or indices. It learns what the cache decided and what was written, and remembers, per
block, what may be found in it until the block is allocated again.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protos.steps import GroupKind
from scheduler_svc.kv.copies import PendingCopy
from scheduler_svc.kv.groups import Table
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig

Cell = tuple[bytes, bool]
"""KV of one position: its context (all tokens up to it), and whether a whole aligned chunk computed it."""


def contexts_of(sequence: SequenceKv) -> list[bytes]:
    """Returns, per position, the identity of everything that its KV depends on."""
    context, contexts = hashlib.blake2b(sequence.cache_salt.encode(), digest_size=8).digest(), []
    for token in sequence.token_ids:
        context = hashlib.blake2b(context + bytes([token]), digest_size=8).digest()
        contexts.append(context)
    return contexts


@dataclass
class KvModel:
    """Blocks by (group id, block id)."""

    shapes: ShapeConfig
    groups: Sequence[KvGroup]
    hash_block_size: int
    """Tokens of a hash block."""
    hit_stride: int
    """Hash blocks between two lengths that a hit may have."""
    memory: dict[tuple[int, int], list[Cell | None]] = field(default_factory=dict)
    """Content: cells from the block\'s start (paged), or the last ``window`` cells (in place)."""
    findable: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    """Contexts under which a block may be found, shortest first; this content must not change."""

    # ---- the device ----

    def copy(self, copy: PendingCopy) -> None:
        """Copies the leading cells; the target then holds nothing else."""
        source = self.memory.get((copy.group_id, copy.source.block_id), [])
        assert len(source) >= copy.num_tokens, f"{copy} copies what was never written"
        self.memory[copy.group_id, copy.target.block_id] = source[: copy.num_tokens]

    def spoil(self, copy: PendingCopy) -> None:
        """Marks the target of a failed copy as unknown."""
        self.memory[copy.group_id, copy.target.block_id] = []

    def clear(self, group_id: int, block_ids: Iterable[int]) -> None:
        """Clears granted blocks, as the worker does."""
        for block_id in block_ids:
            self.memory.pop((group_id, block_id), None)

    def write(self, sequence: SequenceKv, start: int, end: int, *, chunk: bool, spoil: bool = False) -> None:
        """Computes positions ``start`` .. ``end``, or writes unknown content there (``spoil``)."""
        contexts = contexts_of(sequence)
        exact = chunk and start % self.shapes.chunk == 0 and end - start == self.shapes.chunk
        for group_id, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            if group.kind is GroupKind.IN_PLACE_WINDOW:
                where = (group_id, table.blocks[0].block_id)
                assert where not in self.findable, f"block {where} is written on and can be found"
                old = self.memory.get(where, [])
                new: list[Cell | None] = [None if spoil else (contexts[p], exact) for p in range(start, end)]
                self.memory[where] = [*old, *new][-group.window :]
                continue
            for position in range(start, end):
                index, offset = divmod(position, self.shapes.block_size)
                where = (group_id, table.blocks[index].block_id)
                fixed = len(self.findable.get(where, ())) * self.hash_block_size
                assert offset >= fixed, f"position {position} of block {where} is written on and can be found"
                cells = self.memory.setdefault(where, [])
                cells += [None] * (offset + 1 - len(cells))
                cells[offset] = None if spoil else (contexts[position], exact)

    # ---- decisions of the cache ----

    def allocated(self, group_id: int, block_ids: Iterable[int]) -> None:
        """Records that blocks have a new owner, so their old content cannot be found."""
        for block_id in block_ids:
            self.findable.pop((group_id, block_id), None)

    def publish(self, sequence: SequenceKv, start: int, end: int) -> None:
        """Makes a sequence from ``start`` to the last possible end of a hit up to ``end`` findable."""
        end -= end % (self.hit_stride * self.hash_block_size)
        size, hash_block_size = self.shapes.block_size, self.hash_block_size
        if start // hash_block_size >= end // hash_block_size:
            return
        contexts = contexts_of(sequence)
        for group_id, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            if group.kind is GroupKind.IN_PLACE_WINDOW:
                continue
            for index in range(
                start // hash_block_size * hash_block_size // size,
                -(-(end // hash_block_size * hash_block_size) // size),
            ):
                if index < table.first:
                    continue
                first, last = index * size, min((index + 1) * size, end // hash_block_size * hash_block_size)
                keys = [
                    contexts[stop - 1] for stop in range(first + hash_block_size, last + 1, hash_block_size)
                ]
                self.findable[group_id, table.blocks[index].block_id] = keys

    def publish_window(self, group_id: int, block_id: int, context: bytes) -> None:
        """Makes a kept window findable."""
        self.findable[group_id, block_id] = [context]

    # ---- checks ----

    def limit(self, sequence: SequenceKv) -> int:
        """Returns the most hash blocks of a hit: up to the last boundary before the last token."""
        return (len(sequence.token_ids) - 1) // (self.hit_stride * self.hash_block_size) * self.hit_stride

    def longest_hit(self, sequence: SequenceKv, limit: int | None = None) -> int:
        """Returns the longest prefix that all groups can serve, in hash blocks, by trying every length."""
        limit = self.limit(sequence) if limit is None else limit
        found = [
            {context for (group, _), contexts in self.findable.items() if group == group_id for context in contexts}
            for group_id in range(len(self.groups))
        ]  # fmt: skip
        contexts = contexts_of(sequence)
        return max(
            (hit for hit in range(0, limit + 1, self.hit_stride)
             if all(self._serves(group_id, found[group_id], contexts, hit) for group_id in range(len(self.groups)))),
        )  # fmt: skip

    def _serves(self, group_id: int, found: set[bytes], contexts: list[bytes], hit: int) -> bool:
        if not hit:
            return True
        group, size = self.groups[group_id], self.shapes.block_size
        end = hit * self.hash_block_size
        if group.kind is GroupKind.IN_PLACE_WINDOW:
            return contexts[end - 1] in found
        if end % size and contexts[end - 1] not in found:
            return False
        first_seen = max(0, end - group.window + 1) if group.window else 0
        return all(
            contexts[stop - 1] in found
            for stop in range(size, end + 1, size)
            if stop > first_seen  # the block's last position, stop - 1, is at or behind the first one seen
        )

    def check_sequence(self, sequence: SequenceKv, *, exact: bool) -> None:
        """Checks that every computed position that a later query sees is where the tables say.

        With ``exact``, hits must also have the bits of a miss. Decoded positions of the sequence are never
        exact.
        """
        contexts, end = contexts_of(sequence), sequence.num_computed
        for group_id, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            for position, cell in self._visible(group_id, group, table, end):
                assert cell is not None, f"position {position} of group {group_id} was never written"
                assert cell[0] == contexts[position], f"position {position} of group {group_id} is another's"
                if exact and position < sequence.num_cached:
                    assert cell[1], f"position {position} of group {group_id} would have other bits in a miss"

    def _visible(
        self, group_id: int, group: KvGroup, table: Table, end: int
    ) -> Iterable[tuple[int, Cell | None]]:
        size = self.shapes.block_size
        if group.kind is GroupKind.IN_PLACE_WINDOW:
            if end:
                cells = self.memory.get((group_id, table.blocks[0].block_id), [])
                first = max(0, end - group.window)
                assert len(cells) == end - first, (
                    f"the window of group {group_id} holds {len(cells)} tokens at {end}"
                )
                yield from zip(range(first, end), cells, strict=True)
            return
        for position in range(max(0, end - group.window + 1) if group.window else 0, end):
            index, offset = divmod(position, size)
            assert index >= table.first, f"position {position} of group {group_id} is seen and was given up"
            cells = self.memory.get((group_id, table.blocks[index].block_id), [])
            yield position, cells[offset] if offset < len(cells) else None

    def check_findable(self) -> None:
        """Checks that findable content is unchanged."""
        hash_block_size = self.hash_block_size
        for (group_id, block_id), contexts in self.findable.items():
            cells = self.memory.get((group_id, block_id), [])
            if self.groups[group_id].kind is GroupKind.IN_PLACE_WINDOW:
                ends = [cells[-1] if cells else None]
            else:
                ends = [
                    cells[i] if i < len(cells) else None
                    for i in range(hash_block_size - 1, len(contexts) * hash_block_size, hash_block_size)
                ]
            assert [cell and cell[0] for cell in ends] == contexts, (
                f"block {block_id} of group {group_id} has changed"
            )
