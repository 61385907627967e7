"""Our KV cache, driven as a replica's scheduler drives it, without a device."""

from collections.abc import Sequence

from protos.steps import GroupKind
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig
from tests.support.scheduler.factories import make_sequence


class KvCacheDriver:
    """The counterpart of `vllm_peer.KvCachePeer`."""

    def __init__(
        self, windows: Sequence[int | None], shapes: ShapeConfig, num_blocks: int,
        options: CacheOptions = CacheOptions(cache_generated=True),  # noqa: B008 - immutable
    ) -> None:  # fmt: skip
        """Makes a cache."""
        groups = [
            KvGroup(GroupKind.FULL) if window is None else KvGroup(GroupKind.PAGED_WINDOW, window)
            for window in windows
        ]
        self._shapes = shapes
        self._sequences: dict[str, SequenceKv] = {}
        self.kv = KvCache(shapes, groups, [num_blocks] * len(groups), model="m", options=options)

    def admit(self, request_id: str, token_ids: Sequence[int], cache_salt: str = "") -> int | None:
        """Prefills a request; returns its cached tokens, or None if it does not fit."""
        sequence = make_sequence(token_ids, cache_salt=cache_salt)
        if not self.kv.admit(sequence):
            return None
        self._run_copies()
        hit = sequence.num_computed
        while sequence.num_computed < len(token_ids):
            if not self._prefill(sequence, min(self._shapes.chunk, len(token_ids) - sequence.num_computed)):
                return None
        self._sequences[request_id] = sequence
        return hit

    def append(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Generates tokens and computes all but the last; returns False if they do not fit."""
        sequence = self._sequences[request_id]
        for token in token_ids:
            if sequence.num_computed < len(sequence.token_ids):
                if self._is_full(sequence) and not self._grow(sequence, 1):
                    return False
                sequence.num_computed += 1
                if self._is_full(sequence):
                    self.kv.prefixes.index_decoded(sequence)
            sequence.token_ids.append(token)
            sequence.num_uncomputed += 1
        return True

    def free(self, request_id: str) -> None:
        """Ends a request."""
        sequence = self._sequences.pop(request_id)
        self.kv.prefixes.index_decoded(sequence)
        self.kv.release(sequence)
        self.kv.check_integrity()

    def _prefill(self, sequence: SequenceKv, count: int) -> bool:
        start, end = sequence.num_computed, sequence.num_computed + count
        if not self._grow(sequence, count):
            return False
        self.kv.prefixes.index_chunk(sequence, start, end)
        sequence.num_computed = end
        self._run_copies()
        return True

    def _is_full(self, sequence: SequenceKv) -> bool:
        return sequence.num_computed >= self.kv.capacity(sequence, self._shapes.max_model_len)

    def _grow(self, sequence: SequenceKv, count: int) -> bool:
        return self.kv.grow(sequence, sequence.num_computed + count) is not None

    def _run_copies(self) -> None:
        self.kv.settle_copies(self.kv.copies.take())
