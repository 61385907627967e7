"""The log of what a prefix cache stores and evicts."""

import gc
import weakref

from scheduler_svc.api.kv_watch import watch_kv_events
from scheduler_svc.kv.events import Batch, Cleared, KvEventLog, Removed, Stored
from tests.support.scheduler.factories import make_rig, make_submission


class Cache:
    """Keys of one group, and the log that records their changes."""

    def __init__(self, *, history: int = 4096, max_remembered: int = 1_000_000, first: int = 1) -> None:
        self.keys: list[bytes] = []
        self.log = KvEventLog(
            lambda: [(0, list(self.keys)), (1, [])],
            first=first,
            history=history,
            max_remembered=max_remembered,
        )

    def store(self, key: bytes) -> None:
        self.keys.append(key)
        if self.log.active:
            self.log.stored(0, (key,), b"seed", (1, 2))
        self.log.flush()


def test_consecutive_removals_are_one_event() -> None:
    """They are of one group, with nothing stored in between."""
    cache, seen = Cache(), list[Batch]()
    cache.log.follow(seen.append)
    cache.log.removed(0, b"a")
    cache.log.removed(0, b"b")
    cache.log.removed(1, b"a")
    cache.log.stored(1, (b"c",), b"", ())
    cache.log.removed(1, b"d")
    cache.log.flush()
    assert seen[-1].events == (
        Removed(0, (b"a", b"b")),
        Removed(1, (b"a",)),
        Stored(1, (b"c",), b"", ()),
        Removed(1, (b"d",)),
    )


def test_thousands_of_removals_take_linear_time() -> None:
    """A full cache is evicted within a step: no removal copies the earlier ones."""
    cache, seen = Cache(), list[Batch]()
    cache.log.follow(seen.append)
    keys = tuple(number.to_bytes(4, "big") for number in range(40_000))
    for key in keys:
        cache.log.removed(0, key)
    assert len(seen) == 1
    cache.log.flush()
    assert seen[1:] == [Batch(2, (Removed(0, keys),))]


def test_history_is_bounded_by_its_size() -> None:
    """A stored key of two tokens counts four: three such batches are kept, one of twenty keys is not."""
    cache = Cache(max_remembered=12)
    cache.log.follow(lambda _: None)
    for key in b"abcdefgh":
        cache.store(bytes([key]))

    def joins(after: int) -> list[bool]:
        seen = list[Batch]()
        cache.log.follow(seen.append, after=after)()
        return [batch.snapshot for batch in seen]

    assert joins(6) == [False] * 3
    assert joins(5) == [True]
    for key in range(20):
        cache.log.removed(0, bytes([key]))
    cache.log.flush()
    assert (joins(9), joins(10)) == ([True], [])
    cache.store(b"i")
    assert joins(10) == [False]


def test_a_closed_log_drops_listeners_and_pools() -> None:
    """It publishes once that everything is gone, and keeps nothing of a lost replica alive."""
    cache, seen = Cache(), list[Batch]()
    end = cache.log.follow(seen.append)
    cache.log.close()
    cache.log.removed(0, b"a")
    cache.log.flush()
    end()
    assert [batch.events for batch in seen[1:]] == [(Cleared(),)]
    rig, lost = make_rig(), list[weakref.ref[object]]()
    with watch_kv_events(rig.engine.prefixes.follow):
        for _ in range(3):
            rig.submit(make_submission(range(20, 30), request_id=str(len(lost)), max_tokens=1))
            rig.run()
            lost.append(weakref.ref(rig.scheduler.kv))
            rig.replace_replica()
        gc.collect()
        assert not any(one() for one in lost)


def test_without_subscribers_nothing_is_recorded() -> None:
    """Not even empty batches are counted."""
    cache = Cache()
    cache.log.removed(0, b"a")
    cache.log.cleared()
    cache.log.flush()
    assert cache.log.sequence == 1


def test_a_subscriber_knows_the_content_of_the_cache() -> None:
    """Replaying the batches of a busy replica gives the keys of its pool, parents first."""
    rig = make_rig(num_blocks=7)
    log, keys = rig.scheduler.kv.events, set[bytes]()

    def replay(batch: Batch) -> None:
        for event in batch.events:
            match event:
                case Stored(_, new, parent, token_ids):
                    keys.update(new)
                    assert batch.snapshot or len(token_ids) == 4 * len(new)
                    assert batch.snapshot or parent
                case Removed(_, old):
                    keys.difference_update(old)
                case Cleared():
                    keys.clear()

    log.follow(replay)
    for first in (20, 40, 20, 60, 40):
        rig.submit(make_submission(range(first, first + 18), request_id=str(first), max_tokens=3))
        rig.run()
        assert keys == set(rig.scheduler.kv.groups[0].pool.keys)
        assert keys
    rig.engine.prefixes.reset()
    assert not keys
