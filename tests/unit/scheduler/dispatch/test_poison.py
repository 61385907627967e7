"""Requests that kill workers: they fail alone, and requests beside them lose nothing."""

import pytest

from protos.errors import Internal
from scheduler_svc.requests.admission import Resumed
from scheduler_svc.requests.sampling import FinishReason
from tests.support.scheduler.factories import (
    ListSink,
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)
from tests.support.scheduler.simulated_device import Kind, reaches


def check_failed(sink: ListSink) -> None:
    """Checks that a request has ended with the error of a request that kills workers."""
    assert isinstance(sink.events[-1].error, Internal)
    assert "workers were lost while they ran" in sink.events[-1].error.message
    assert sum(event.error is not None for event in sink.events) == 1


def submit_innocents(rig: Rig, count: int = 3) -> dict[str, tuple[ListSink, list[int]]]:
    """Submits requests; returns their sinks and what they must receive."""
    prompts = {f"i{number}": [10 + number] * (3 + 4 * number) for number in range(count)}
    return {
        name: (rig.submit(make_submission(prompt, request_id=name)), expected_tokens(prompt, 8))
        for name, prompt in prompts.items()
    }


def check_innocents(innocents: dict[str, tuple[ListSink, list[int]]]) -> None:
    """Checks that each request got exactly its tokens."""
    for sink, wanted in innocents.values():
        assert sink.tokens == wanted
        assert sink.events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("lease", [1, 8])
@pytest.mark.parametrize(
    ("kind", "end"), [("admit", 0), ("chunk", 0), ("chunk", 7), ("decode", 0), ("decode", 14)]
)
def test_a_request_that_kills_workers_fails_alone(kind: Kind, end: int, lease: int) -> None:
    """It fails after two lost workers, and the requests beside it get all of their tokens."""
    rig = make_rig(lease_steps=lease)
    rig.kills = reaches(kind, "poison", end)
    innocents = submit_innocents(rig)
    for _ in range(4):
        rig.step()
    poison = rig.submit(make_submission([7] * 10, request_id="poison"))
    rig.run(200)
    check_failed(poison)
    assert rig.killers == ["poison", "poison"]
    check_innocents(innocents)


@pytest.mark.parametrize("kind", ["admit", "chunk", "decode"])
def test_the_number_of_workers_it_may_kill_is_a_setting(kind: Kind) -> None:
    """A request that runs alone from the start fails exactly after that many lost workers."""
    for most in (1, 2, 5):
        rig = make_rig(max_worker_losses=most)
        rig.kills = reaches(kind, "poison")
        poison = rig.submit(make_submission(request_id="poison"))
        rig.run(100)
        check_failed(poison)
        assert rig.killers == ["poison"] * most


def test_two_poison_requests_in_one_batch_both_fail() -> None:
    """Each is found out alone, whichever of them killed the batch."""
    rig = make_rig()
    rig.kills = lambda moment: moment.kind == "decode" and moment.request_id in "pq" and moment.end >= 8
    p, q = (
        rig.submit(make_submission([5, token, 5], request_id=name))
        for token, name in enumerate("pq", start=60)
    )
    innocents = submit_innocents(rig, 2)
    rig.run(200)
    check_failed(p)
    check_failed(q)
    assert len(rig.killers) <= 4
    check_innocents(innocents)


def lose_replica(rig: Rig) -> None:
    """Loses the replica for another reason while a plan is in flight."""
    assert rig.scheduler.next_plan() is not None
    rig.replace_replica()


def losses(rig: Rig, *names: str) -> list[int]:
    """Returns how many lost workers each live request is suspected of."""
    found = [rig.engine.find(name) for name in names]
    return [one.worker_losses for one in found if one is not None]


def test_only_requests_in_an_unanswered_step_are_suspects() -> None:
    """A request that only had a slot, or waited, is none."""
    rig = make_rig(make_shapes(max_num_seqs=2, buckets=(1, 2)), decode_steps_per_chunk=0)
    for token, name in enumerate("abc", start=60):
        rig.submit(make_submission([token] * 10, request_id=name))
    rig.step()
    rig.step()
    lose_replica(rig)
    assert losses(rig, *"abc") == [1, 0, 0]


def test_an_idle_replica_that_is_lost_makes_no_suspect() -> None:
    """All of its steps were answered."""
    rig = make_rig()
    rig.submit(make_submission())
    rig.step()
    rig.replace_replica()
    assert losses(rig, "r") == [0]


def test_a_suspect_is_cleared_by_the_answer_to_its_next_step() -> None:
    """Batch-mates of a lost worker decode once alone, then together; a chunk clears whom a chunk accused."""
    rig = make_rig()
    innocents = submit_innocents(rig)
    while len(rig.scheduler._decoding) < 3:
        rig.step()
    lose_replica(rig)
    assert losses(rig, *innocents) == [1, 1, 1]
    cleared: list[set[str]] = []
    while suspects := {name for name in innocents if losses(rig, name) == [1]}:
        rig.step()
        cleared.append(suspects - {name for name in innocents if losses(rig, name) == [1]})
    assert all(len(names) <= 1 for names in cleared)
    assert set().union(*cleared) == set(innocents)
    rig.run()
    check_innocents(innocents)


def test_a_chunk_clears_a_request_that_was_lost_in_a_chunk() -> None:
    """It need not decode alone."""
    rig = make_rig()
    rig.submit(make_submission([7] * 10))
    rig.step()
    lose_replica(rig)
    assert losses(rig, "r") == [1]
    rig.step()
    assert losses(rig, "r") == [1], "this chunk had been answered before"
    rig.step()
    assert losses(rig, "r") == [0]


def test_a_worker_lost_now_and_then_fails_nothing() -> None:
    """However many workers are lost: a request is blamed only for those lost in a row."""
    rig = make_rig()
    innocents = submit_innocents(rig)
    for _ in range(30):
        while any(losses(rig, *innocents)) or not rig.scheduler._decoding:
            if not rig.step():
                break
        if rig.engine.num_running:
            lose_replica(rig)
    rig.run()
    check_innocents(innocents)


def test_suspects_delay_the_others_by_one_step_each() -> None:
    """Requests that are no suspects decode with every other decode step, whatever suspects there are."""
    rig = make_rig(make_shapes(max_num_seqs=8, buckets=(1, 2, 4, 8)), decode_steps_per_chunk=1)
    suspects = [rig.submit(make_submission([20 + n], request_id=f"s{n}")) for n in range(6)]
    while len(rig.scheduler._decoding) < 6:
        rig.step()
    lose_replica(rig)
    other = rig.submit(make_submission([50], request_id="other", max_tokens=20, priority=-1))
    while not other.tokens:
        rig.step()
    gap = longest = 0
    while not other.events[-1].finish_reason:
        count = len(other.tokens)
        rig.step()
        gap = 0 if len(other.tokens) > count else gap + 1
        longest = max(longest, gap)
    assert longest <= 3, "a chunk, a suspect's step, a chunk"
    rig.run()
    assert [len(sink.tokens) for sink in suspects] == [8] * 6


@pytest.mark.parametrize("kind", ["chunk", "decode"])
def test_a_poison_request_with_several_sequences_fails_as_a_whole(kind: Kind) -> None:
    """Sequences that wait for a prompt, and forked ones, are judged like any other."""
    rig = make_rig()
    rig.kills = reaches(kind, "poison")
    innocents = submit_innocents(rig, 2)
    rig.step()
    poison = rig.submit(make_submission([7] * 10, request_id="poison", n=3))
    rig.run(200)
    check_failed(poison)
    assert 2 <= len(rig.killers) <= 3, "a sequence that is no suspect may be next"
    check_innocents(innocents)


def test_requests_that_wait_for_a_poison_prefix_are_not_blamed_for_it() -> None:
    """They compute the prefix themselves once the request that computed it has failed."""
    rig = make_rig()
    rig.kills = reaches("chunk", "poison")
    poison = rig.submit(make_submission([7] * 9, request_id="poison"))
    others = [rig.submit(make_submission([7] * 9 + [n], request_id=f"o{n}")) for n in (20, 21)]
    rig.run(200)
    check_failed(poison)
    assert [sink.tokens for sink in others] == [expected_tokens([7] * 9 + [n], 8) for n in (20, 21)]


def test_a_suspect_may_be_aborted() -> None:
    """While it waits, and while it decodes alone."""
    rig = make_rig()
    sinks = [rig.submit(make_submission([20 + n], request_id=f"s{n}")) for n in range(2)]
    while len(rig.scheduler._decoding) < 2:
        rig.step()
    lose_replica(rig)
    assert rig.engine.abort("s0")
    while not rig.scheduler._slots.trials:
        rig.step()
    assert rig.engine.abort("s1")
    assert rig.run() is not None
    assert [sink.events[-1].finish_reason for sink in sinks] == [FinishReason.ABORT] * 2
    assert rig.scheduler.num_running == 0


def test_nothing_is_sent_for_a_suspect_while_steps_run() -> None:
    """They are answered first; otherwise their requests were in unanswered plans, too."""
    rig = make_rig(lease_steps=8)
    rig.submit(make_submission(request_id="innocent"))
    while not rig.scheduler._decoding:
        rig.step()
    steps = rig.scheduler.next_plan()
    assert steps is not None
    part = Resumed(0, (), worker_losses=1)
    rig.submit(make_submission([7] * 10, request_id="suspect", resumed_sequences=(part,)))
    assert rig.scheduler.next_plan() is None
    rig.scheduler.update(rig.device.run(steps))
    assert losses(rig, "innocent", "suspect") == [0, 1]
    rig.run()
    assert rig.sinks["suspect"].tokens == expected_tokens([7] * 10, 8)


def test_a_request_is_not_blamed_for_one_that_ended_meanwhile() -> None:
    """A request that was aborted while its step ran may have been the reason."""
    rig = make_rig(max_worker_losses=1)
    sinks = [rig.submit(make_submission([20 + n], request_id=f"r{n}")) for n in range(2)]
    while len(rig.scheduler._decoding) < 2:
        rig.step()
    assert rig.scheduler.next_plan() is not None
    assert rig.engine.abort("r1")
    rig.replace_replica()
    rig.run()
    assert sinks[0].tokens == expected_tokens([20], 8)


def test_a_client_learns_of_losses_and_when_they_no_longer_count() -> None:
    """The count comes in an event of its own, and so does its end."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    rig.step()
    lose_replica(rig)
    rig.run()
    assert [one.worker_losses for one in sink.events if one.worker_losses is not None] == [1, 0]
    assert sink.tokens == expected_tokens([5, 6, 7], 8)


def test_the_count_travels_with_a_resumed_request() -> None:
    """A request that killed a worker under an earlier scheduler runs alone, and fails after one more."""
    rig = make_rig()
    rig.kills = reaches("decode", "poison")
    innocents = submit_innocents(rig, 2)
    part = Resumed(0, (), worker_losses=1)
    poison = rig.submit(make_submission([7] * 10, request_id="poison", resumed_sequences=(part,)))
    rig.run(200)
    check_failed(poison)
    assert rig.killers == ["poison"]
    check_innocents(innocents)
