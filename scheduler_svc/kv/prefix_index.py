"""The prefix cache of one replica: finds cached prefixes, indexes computed tokens and values windows."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.kv.block_pool import BlockKey
from scheduler_svc.kv.copies import CopyQueue, PendingCopy
from scheduler_svc.kv.events import KvEventLog
from scheduler_svc.kv.groups import BlockLayout, KvGroupManager
from scheduler_svc.kv.sequence import HashChain, SequenceKv, seed_key


@dataclass(slots=True)
class KvStats:
    """Counters from the start of a replica."""

    queried_tokens: int = 0
    """Known tokens of admitted requests."""
    hit_tokens: int = 0
    """Tokens of admitted requests spared by prefix hits."""
    copies: int = 0
    """Block copies planned."""
    kept_windows: int = 0
    """Copies of sliding windows kept for later requests."""


Worth = Literal["much", "little", "nothing"]
"""*much*: may evict older content; *little*: only while there is room; *nothing*: no copy."""


class KeepPolicy(Protocol):
    """Values windows at the chunk boundaries of prompts."""

    def observe(self, keys: Sequence[BlockKey], boundaries: Sequence[int]) -> int:
        """Records the prompt of an admitted sequence.

        Args:
            keys: the prompt's prefix keys.
            boundaries: the hash block counts at which its chunks end.

        Returns:
            The boundary at which the prompt diverges from earlier ones; 0 if it shares nothing.
        """

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """Returns the worth of the window at ``boundary`` of a prompt with these other boundaries."""


_MOST_SEEN: Final = 65_536


class KeepJunctions:
    """Keeps the end of every prompt, where a conversation continues, and boundaries where prompts diverge.

    The shared part of two prompts is known only when the second arrives. Every other boundary is therefore
    also kept while it evicts nothing better. A boundary where a second prompt diverges is worth as much as
    an end.
    """

    def __init__(self) -> None:
        # The most recent boundaries of prompts.
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()

    def observe(self, keys: Sequence[BlockKey], boundaries: Sequence[int]) -> int:
        """See :class:`KeepPolicy`."""
        junction = 0
        for boundary in boundaries:
            key = keys[boundary - 1]
            if key in self._seen:
                junction = boundary
                self._seen.move_to_end(key)
            else:
                self._seen[key] = None
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return junction

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """See :class:`KeepPolicy`."""
        return "much" if boundary in (last, junction) else "little"


class KeepEnds(KeepJunctions):
    """Keeps only ends of prompts and junctions: fewer copies, but the first repetition of a prefix misses."""

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """See :class:`KeepPolicy`."""
        return "much" if boundary in (last, junction) else "nothing"


class PrefixIndex:
    """Prefixes of all KV groups together.

    A hit is the longest prefix common to all groups, a multiple of the layout's hit unit. The last token is
    always recomputed for its logits.
    """

    def __init__(
        self, groups: Sequence[KvGroupManager], layout: BlockLayout, copies: CopyQueue, events: KvEventLog, stats: KvStats, *,
        model: str, enabled: bool, index_decoded: bool, keep: KeepPolicy | None,
    ) -> None:  # fmt: skip
        """Starts empty.

        Args:
            groups: managers by group id; their pools hold the index.
            layout: how blocks, chunks and hash blocks line up.
            copies: takes the copies of kept windows.
            events: log of stored and removed prefixes.
            stats: counts kept windows.
            model: part of every prefix's identity.
            enabled: whether prefixes are indexed and looked up.
            index_decoded: whether the output of decode steps is also indexed.
            keep: decides which windows of in-place groups to keep; None without such groups.
        """
        self._groups = groups
        self._layout = layout
        self._copies = copies
        self._events = events
        self._stats = stats
        self._model = model
        self._enabled = enabled
        self._index_decoded = index_decoded
        self._keep = keep
        self.epoch = 0
        """Number of resets so far."""

    # ---- looking up ----

    def boundaries(self, start: int, last: int) -> range:
        """Returns the possible ends of a hit after token ``start`` up to ``last``, in hash blocks."""
        stride = self._layout.hit_stride
        return range((start // self._layout.hit_unit + 1) * stride, last + 1, stride)

    @property
    def hash_block_size(self) -> int:
        """Tokens per prefix key."""
        return self._layout.hash_block_size

    def lookup_keys(self, sequence: SequenceKv) -> tuple[list[BlockKey], int]:
        """Returns the sequence's keys, and how many of them a hit may cover.

        The limit is the last possible end of a hit before the last token; 0 if prefixes are not reused.
        """
        if not self._enabled or not sequence.reuse_prefix:
            return [], 0
        limit = (len(sequence.token_ids) - 1) // self._layout.hit_unit * self._layout.hit_stride
        return self._chain(sequence).extend(sequence.token_ids, limit), limit

    def hash_chain(self, token_ids: Sequence[int], adapter: Adapter | None, salt: str) -> HashChain | None:
        """Returns the keys of a prompt, None if prefixes are not reused. Safe on any thread."""
        if not self._enabled:
            return None
        chain = self._new_chain(adapter, salt)
        chain.extend(token_ids, len(token_ids) // chain.hash_block_size)
        return chain

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Returns the longest hit common to all groups, in hash blocks.

        A group may shorten another group's hit; the search repeats until all groups agree.
        """
        hit, agreed, groups = limit, 0, len(self._groups)
        for group in itertools.cycle(self._groups):
            if not hit or agreed == groups:
                return hit
            found = group.longest_hit(keys, hit)
            agreed = agreed + 1 if found == hit else 1
            hit = found
        raise AssertionError("a replica has at least one KV group")

    def peek(self, sequence: SequenceKv) -> int:
        """Returns the longest cached prefix of the sequence, in tokens. Does not modify the cache."""
        keys, limit = self.lookup_keys(sequence)
        return self.longest_hit(keys, limit) * self._layout.hash_block_size

    def note_admission(self, sequence: SequenceKv, keys: Sequence[BlockKey], limit: int) -> None:
        """Records the prompt of an admitted sequence, to keep windows where prompts diverge."""
        if self._keep is not None:
            sequence.junction = self._keep.observe(keys, self.boundaries(0, limit))

    # ---- indexing ----

    def index_chunk(self, sequence: SequenceKv, start: int, end: int) -> None:
        """Makes the prefilled tokens ``[start, end)`` findable, once they are computed.

        Without generated tokens, a chunk that begins among them is not indexed.
        """
        if not self._enabled or sequence.cache_epoch != self.epoch:
            return
        unit = self._layout.hit_unit
        is_aligned = start % math.gcd(unit, self._layout.chunk) == 0
        if is_aligned or self._index_decoded:
            self._index_from(
                sequence, sequence.num_indexed if self._index_decoded else start - start % unit, end
            )
        if self._keep is not None and is_aligned and end % unit == 0:
            self._keep_windows(self._keep, sequence, end // self._layout.hash_block_size)

    def index_decoded(self, sequence: SequenceKv) -> None:
        """Makes the output of decode steps findable if the options ask for it, except in-place windows."""
        if not self._enabled or not self._index_decoded:
            return
        if sequence.cache_epoch != self.epoch or self._copies.waits_for(sequence):
            return  # admitted before a reset, or forked into blocks that are not copied yet
        self._index_from(sequence, sequence.num_indexed, sequence.num_computed)

    def index_window(self, copy: PendingCopy) -> None:
        """Makes a kept window findable, once its copy was run."""
        if copy.key is None or copy.epoch != self.epoch:
            return
        pool = self._groups[copy.group_id].pool
        new = pool.index_block(copy.held, (copy.key,), cheap=copy.cheap)
        if new and self._events.active:
            self._events.stored(copy.group_id, (copy.key,), b"", ())

    def reset(self) -> None:
        """Forgets all cached content. Sequences keep their blocks, but their additions are not indexed."""
        self.epoch += 1
        for group in self._groups:
            group.pool.reset_index()
        self._events.cleared()

    # ---- internals ----

    def _index_from(self, sequence: SequenceKv, start: int, end: int) -> None:
        """Makes the tokens of a sequence findable in every group, up to the last possible end of a hit."""
        size = self._layout.hash_block_size
        first, last = start // size, end // self._layout.hit_unit * self._layout.hit_stride
        if first >= last:
            return
        sequence.num_indexed = last * size
        chain = self._chain(sequence)
        keys = chain.extend(sequence.token_ids, last)
        for group_id, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            new = group.index(table, keys, first, last)
            if new and self._events.active:
                self._log_stored(group_id, sequence, chain, new)

    def _keep_windows(self, policy: KeepPolicy, sequence: SequenceKv, boundary: int) -> None:
        """Queues copies of the windows up to hash block ``boundary``, if the policy values them."""
        size = self._layout.hash_block_size
        last = len(sequence.token_ids) // self._layout.hit_unit * self._layout.hit_stride
        worth = policy.worth(boundary, last, sequence.junction)
        if worth == "nothing":
            return
        key, cheap = self._chain(sequence).keys[boundary - 1], worth == "little"
        for group_id, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            target = group.keep(key, cheap=cheap)
            if target is None:
                continue
            tokens = group.copied_tokens(boundary * size)
            copy = PendingCopy(
                group_id, table.blocks[0], target, tokens, target, self.epoch, key=key, cheap=cheap
            )
            self._copies.add(copy)
            self._stats.copies += 1
            self._stats.kept_windows += 1

    def _log_stored(self, group_id: int, sequence: SequenceKv, chain: HashChain, indices: list[int]) -> None:
        """Logs an event per run of adjacent hash blocks."""
        size = self._layout.hash_block_size
        lora_name = "" if sequence.adapter is None else sequence.adapter.name
        for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
            members = [index for _, index in run]
            first, end = members[0], members[-1] + 1
            tokens = tuple(sequence.token_ids[first * size : end * size])
            self._events.stored(
                group_id, tuple(chain.keys[first:end]), chain.parent(first), tokens, lora_name
            )

    def _chain(self, sequence: SequenceKv) -> HashChain:
        chain, size = sequence.hash_chain, self._layout.hash_block_size
        # A request of a lost replica may bring a chain with another hash block size.
        if chain is None or chain.hash_block_size != size:
            chain = sequence.hash_chain = self._new_chain(sequence.adapter, sequence.cache_salt)
        return chain

    def _new_chain(self, adapter: Adapter | None, salt: str) -> HashChain:
        digest = "" if adapter is None else adapter.digest
        return HashChain(seed_key(model=self._model, lora=digest, salt=salt), self._layout.hash_block_size)
