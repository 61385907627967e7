"""The log of what a prefix cache stores and forgets."""

from scheduler_svc.kv_events import Batch, Cleared, KvEventLog, Removed, Stored
from tests.scheduler_factories import make_rig, make_submission


class Cache:
    """Keys of one group, and the log that tells of them."""

    def __init__(self, *, history: int = 4096, first: int = 1) -> None:
        self.keys: list[bytes] = []
        self.log = KvEventLog(lambda: [(0, list(self.keys)), (1, [])], first=first, history=history)

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
    rig.engine.reset_prefix_cache()
    assert not keys
