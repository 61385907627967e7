"""Conversion between protocol messages and the scheduler's types."""

import itertools

from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.api.kv_watch import kv_batch_to_proto
from scheduler_svc.api.messages import submission_from_proto
from scheduler_svc.kv.events import Batch, Cleared, Removed, Stored


def request(**sampling: object) -> inference_pb2.GenerateRequest:
    parameters = common_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
    return inference_pb2.GenerateRequest(prompt_token_ids=[1, 2], sampling=parameters)


def test_the_scheduler_fills_in_an_id_and_a_seed() -> None:
    """Two requests without either get different ones; everything else stays unset."""
    one, two = submission_from_proto(request()), submission_from_proto(request())
    assert one.request_id != two.request_id
    assert one.sampling.params.seed != two.sampling.params.seed
    assert [field.name for field, _ in one.sampling.params.ListFields()] == ["seed", "seed_is_drawn"]


def test_fields_that_the_schema_does_not_have_stay_with_the_scheduler() -> None:
    """Nothing bounds their size, so a plan that carried them could exceed the message limit."""
    sent = common_pb2.SamplingParams(seed=1)
    # Field 1000, as bytes.
    sent.MergeFromString(b"\xc2\x3e\x04junk")
    assert sent.ByteSize() > len(b"junk")
    submission = submission_from_proto(inference_pb2.GenerateRequest(prompt_token_ids=[1], sampling=sent))
    assert submission.sampling.params.SerializeToString() == b"\x28\x01"


def make_keys(count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(32, "big") for number in range(count))


def test_a_large_snapshot_comes_in_several_messages() -> None:
    """Half a million keys arrive once, in order, in messages below 4 MiB; only the last lacks ``more``."""
    keys = make_keys(500_000)
    batch = Batch(
        7, (Stored(0, keys[:300_000], None, ()), Stored(1, keys[300_000:], None, ())), snapshot=True
    )
    parts = list(kv_batch_to_proto("r", batch, 128))
    assert max(part.ByteSize() for part in parts) < 4 << 20
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [part.snapshot for part in parts] == [True] + [False] * (len(parts) - 1)
    assert {(part.sequence, part.replica_id) for part in parts} == {(7, "r")}
    stored = [event.stored for part in parts for event in part.events]
    assert not any(one.parent_hash or one.token_ids for one in stored)
    assert tuple(key for one in stored for key in one.hashes) == keys
    assert sum(len(one.hashes) for one in stored if one.group_id == 0) == 300_000


def test_large_changes_are_cut_between_keys() -> None:
    """A piece has the last key of the piece before as its parent, and the tokens of its own keys."""
    keys = make_keys(20_000)
    tokens = tuple(range(4 * len(keys)))
    batch = Batch(7, (Cleared(), Stored(0, keys, b"seed", tokens), Removed(1, keys)))
    parts = list(kv_batch_to_proto("r", batch, 4))
    assert len(parts) > 1
    assert not any(part.snapshot for part in parts)
    cleared, *events = [event for part in parts for event in part.events]
    assert cleared.HasField("cleared")
    stored = [event.stored for event in events if event.HasField("stored")]
    ends = [b"seed", *(one.hashes[-1] for one in stored)]
    assert [one.parent_hash for one in stored] == ends[:-1]
    assert all(len(one.token_ids) == 4 * len(one.hashes) for one in stored)
    assert tuple(itertools.chain.from_iterable(one.token_ids for one in stored)) == tokens
    assert tuple(itertools.chain.from_iterable(one.hashes for one in stored)) == keys
    removed = [event.removed for event in events[len(stored) :]]
    assert tuple(itertools.chain.from_iterable(one.hashes for one in removed)) == keys
