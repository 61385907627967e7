"""The log of what a prefix cache stores and forgets."""

import gc
import weakref

from scheduler_svc.api.kv_watch import watch_kv_events
from scheduler_svc.kv.events import Batch, Cleared, KvEventLog, Removed, Stored
from tests.support.scheduler.factories import make_rig, make_submission


class Cache:
    """Keys of one group, and the log that tells of them."""

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


def test_a_late_joiner_gets_a_snapshot_then_every_batch() -> None:
    """Without parents and tokens, and without groups that have nothing."""
    cache, seen = Cache(first=7), list[Batch]()
    cache.store(b"a")
    cache.log.follow(seen.append)
    cache.store(b"b")
    assert seen == [
        Batch(7, (Stored(0, (b"a",), None, ()), Stored(1, (), None, ())), snapshot=True),
        Batch(8, (Stored(0, (b"b",), b"seed", (1, 2)),)),
    ]


def test_sequence_numbers_grow_by_one_for_all_followers() -> None:
    """Whoever joins later sees the numbers that the others see."""
    cache, early, late = Cache(), list[Batch](), list[Batch]()
    cache.log.follow(early.append)
    cache.store(b"a")
    cache.log.follow(late.append)
    cache.store(b"b")
    assert [batch.sequence for batch in early] == [1, 2, 3]
    assert [(batch.sequence, batch.snapshot) for batch in late] == [(2, True), (3, False)]


def test_who_comes_back_gets_what_was_missed() -> None:
    """From behind the last number seen; nothing if nothing was missed."""
    cache, again = Cache(), list[Batch]()
    end = cache.log.follow(lambda _: None)
    cache.store(b"a")
    end()
    cache.store(b"b")
    cache.store(b"c")
    cache.log.follow(again.append, after=2)
    assert [(batch.sequence, batch.snapshot) for batch in again] == [(3, False), (4, False)]
    again.clear()
    cache.log.follow(again.append, after=4)
    assert again == []


def test_a_number_that_is_not_remembered_gives_a_snapshot() -> None:
    """Too old, or of another life of the replica."""
    cache = Cache(history=2, first=100)
    cache.log.follow(lambda _: None)
    for key in (b"a", b"b", b"c"):
        cache.store(key)
    for after, snapshot in ((100, True), (101, False), (99, True), (104, True), (0, True)):
        seen = list[Batch]()
        cache.log.follow(seen.append, after=after)
        assert seen[0].snapshot is snapshot, after
        if snapshot:
            assert seen[0].events == (Stored(0, (b"a", b"b", b"c"), None, ()), Stored(1, (), None, ()))


def test_removals_in_a_row_are_one_event() -> None:
    """Of one group, with nothing stored in between."""
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


def test_thousands_of_removals_are_one_event() -> None:
    """A full cache whose contents go within a step: nothing is copied for each of them."""
    cache, seen = Cache(), list[Batch]()
    cache.log.follow(seen.append)
    keys = tuple(number.to_bytes(4, "big") for number in range(40_000))
    for key in keys:
        cache.log.removed(0, key)
    assert len(seen) == 1
    assert not cache.log._open
    cache.log.flush()
    assert seen[1:] == [Batch(2, (Removed(0, keys),))]


def test_what_is_remembered_is_bounded_by_its_size_too() -> None:
    """A stored key of two tokens counts four: three batches of them are remembered, one of twenty keys is not."""
    cache = Cache(max_remembered=12)
    cache.log.follow(lambda _: None)
    for key in b"abcdefgh":
        cache.store(bytes([key]))
    assert sum(batch.size for batch in cache.log._history) == 12

    def joins(after: int) -> list[bool]:
        seen = list[Batch]()
        cache.log.follow(seen.append, after=after)()
        return [batch.snapshot for batch in seen]

    assert joins(6) == [False] * 3
    assert joins(5) == [True]
    for key in range(20):
        cache.log.removed(0, bytes([key]))
    cache.log.flush()
    assert not cache.log._history
    assert (joins(9), joins(10)) == ([True], [])
    cache.store(b"i")
    assert joins(10) == [False]


def test_a_closed_log_lets_go_of_listeners_and_pools() -> None:
    """It says that everything is gone, once; a watcher that stays keeps nothing of a lost replica alive."""
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


def test_clearing_replaces_what_was_not_told_yet() -> None:
    """And is told at once."""
    cache, seen = Cache(), list[Batch]()
    cache.log.follow(seen.append)
    cache.log.removed(0, b"a")
    cache.log.cleared()
    assert seen[-1] == Batch(2, (Cleared(),))


def test_without_followers_nothing_is_recorded() -> None:
    """Also not the end of a batch."""
    cache = Cache()
    cache.log.removed(0, b"a")
    cache.log.cleared()
    cache.log.flush()
    assert cache.log.sequence == 1


def test_a_follower_knows_what_the_cache_has() -> None:
    """Replaying the batches of a busy replica with little memory gives the keys of its pool, parents first."""
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
