"""Requests that kill workers or make steps fail: they fail alone, and the others lose nothing."""

import pytest

from protos.errors import Internal, InvalidArgument
from protos.steps import StepResult
from scheduler_svc.requests.admission import Resumed
from scheduler_svc.requests.sampling import FinishReason
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_shapes, make_submission
from tests.support.scheduler.second_replica import add_replica, run
from tests.support.scheduler.simulated_device import Kind, Moment, reaches


def submit_innocents(rig: Rig, count: int = 3) -> dict[str, list[int]]:
    """Submits requests; returns what they must receive."""
    prompts = {f"i{number}": [10 + number] * (3 + 4 * number) for number in range(count)}
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name))
    return {name: expected_tokens(prompt, 8) for name, prompt in prompts.items()}


def check_innocents(rig: Rig, innocents: dict[str, list[int]]) -> None:
    """Checks that each request got exactly its tokens."""
    for name, wanted in innocents.items():
        assert rig.sinks[name].tokens == wanted
        assert rig.sinks[name].events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("lease", [1, 8])
@pytest.mark.parametrize(
    ("kind", "end"), [("admit", 0), ("chunk", 0), ("chunk", 7), ("decode", 0), ("decode", 14)]
)
@pytest.mark.parametrize("harm", ["kills", "fails"])
def test_a_harmful_request_fails_alone(harm: str, kind: Kind, end: int, lease: int) -> None:
    """It fails after two lost workers or four failed steps; the others get all of their tokens."""
    rig = make_rig(lease_steps=lease)
    setattr(rig, harm, reaches(kind, "poison", end))
    innocents = submit_innocents(rig)
    for _ in range(4):
        rig.step()
    poison = rig.submit(make_submission([7] * 10, request_id="poison"))
    rig.run(300)
    assert isinstance(poison.events[-1].error, Internal)
    assert sum(event.error is not None for event in poison.events) == 1
    assert (rig.killers, rig.failers) == (
        ["poison"] * 2 * (harm == "kills"),
        ["poison"] * 4 * (harm == "fails"),
    )
    check_innocents(rig, innocents)


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
    check_innocents(rig, innocents)


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
    check_innocents(rig, innocents)


def test_suspects_delay_the_others_by_one_step_each() -> None:
    """Requests that are no suspects decode with every other decode step, and suspects with the rest."""
    rig = make_rig(make_shapes(max_num_seqs=8, buckets=(1, 2, 4, 8)), decode_steps_per_chunk=1)
    suspects = [rig.submit(make_submission([20 + n], request_id=f"s{n}")) for n in range(6)]
    while len(rig.scheduler._decoding) < 6:
        rig.step()
    lose_replica(rig)
    before = [len(sink.tokens) for sink in suspects]
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
    # More than the token of the chunk that computes the prompt again.
    assert all(len(sink.tokens) > count + 1 for sink, count in zip(suspects, before, strict=True))
    rig.run()
    assert [len(sink.tokens) for sink in suspects] == [8] * 6


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


def test_the_count_travels_with_a_resumed_request() -> None:
    """A request that killed a worker under an earlier scheduler runs alone, and fails after one more."""
    rig = make_rig()
    rig.kills = reaches("decode", "poison")
    innocents = submit_innocents(rig, 2)
    part = Resumed(0, (), worker_losses=1)
    poison = rig.submit(make_submission([7] * 10, request_id="poison", resumed_sequences=(part,)))
    rig.run(200)
    assert isinstance(poison.events[-1].error, Internal)
    assert rig.killers == ["poison"]
    check_innocents(rig, innocents)


# ---- failed steps ----


def test_a_step_that_fails_now_and_then_fails_nothing() -> None:
    """However many steps fail: only failures in a row count, and a step that works ends the row."""
    rig = make_rig()
    count = 0

    def flaky(_moment: Moment) -> bool:
        nonlocal count
        count += 1
        return count % 7 == 0

    rig.fails = flaky
    innocents = submit_innocents(rig)
    rig.run(1000)
    assert len(rig.failers) > 5
    check_innocents(rig, innocents)


def test_an_error_of_the_request_itself_fails_it_at_once() -> None:
    """An InvalidArgument for a step of one request is not tried again."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, error=InvalidArgument("too long")))
    assert isinstance(sink.events[-1].error, InvalidArgument)
    assert rig.scheduler.num_running == 0


def test_an_error_of_one_request_in_a_batch_fails_that_one_alone() -> None:
    """Which request it is shows when each runs alone."""
    rig = make_rig()
    innocents = submit_innocents(rig)
    bad = rig.submit(make_submission([7], request_id="bad"))
    while (plan := rig.scheduler.next_plan()) is not None:
        rig.engine.dispatch()
        if bad.tokens and plan.work is not None and not bad.events[-1].error:
            slots = getattr(plan.work, "slots", ())
            request = rig.engine.find("bad")
            if request is not None and request.slot in slots:
                rig.scheduler.update(StepResult(plan.step, error=InvalidArgument("too many")))
                continue
        rig.scheduler.update(rig.device.run(plan))
    assert isinstance(bad.events[-1].error, InvalidArgument)
    check_innocents(rig, innocents)


def test_a_broken_device_fails_no_request_while_another_replica_lives() -> None:
    """Each of its requests runs elsewhere next, even if it must wait there."""
    rig = make_rig()
    second = add_replica(rig)
    rig.fails = lambda _: True
    innocents = submit_innocents(rig, 12)
    run(rig, second)
    assert rig.failers
    assert len(set(rig.failers)) == len(rig.failers), "no request is tried there twice"
    check_innocents(rig, innocents)


def test_a_poison_request_is_tried_on_every_replica() -> None:
    """With max_step_failures 1 it fails after one step on each of two."""
    rig = make_rig(max_step_failures=1)
    second = add_replica(rig)
    second.device.fails = rig.fails = reaches("decode", "poison", 8)
    innocents = submit_innocents(rig, 4)
    poison = rig.submit(make_submission([7] * 6, request_id="poison"))
    run(rig, second)
    assert isinstance(poison.events[-1].error, Internal)
    assert (rig.failers.count("poison"), second.failed) == (1, 1)
    check_innocents(rig, innocents)
