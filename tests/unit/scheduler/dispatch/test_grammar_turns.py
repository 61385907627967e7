"""Grammars and the order of the queue: a waiting grammar blocks no request that could run."""

from dataclasses import replace
from typing import Any

import pytest

from protos.errors import InvalidArgument, Overloaded, Unavailable
from protos.steps import SlotOutput, StepResult
from scheduler_svc.dispatch.grammar_queue import MAX_OPEN_PER_TENANT
from scheduler_svc.dispatch.placement import AttachedReplica, Placer
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request, RequestState
from scheduler_svc.requests.sampling import FinishReason, Grammar
from scheduler_svc.shapes.shape_config import ShapeConfig
from tests.support.scheduler.factories import (
    FULL,
    Rig,
    expected_tokens,
    make_grammar,
    make_rig,
    make_shapes,
    make_submission,
    with_grammar,
)
from tests.support.scheduler.simulated_device import Moment

A, B = make_grammar("a"), make_grammar("b")
ONE_SLOT = make_shapes(max_num_seqs=1, buckets=(1,))


def constrained(request_id: str, grammar: Grammar = A, **fields: Any) -> Submission:
    plain = make_submission(request_id=request_id, **fields)
    return replace(plain, sampling=with_grammar(plain.sampling, grammar))


class Compiler:
    """A replica that records which grammars it is asked for and which are withdrawn."""

    def __init__(self, rig: Rig, name: str, shapes: ShapeConfig | None = None, num_blocks: int = 65) -> None:
        """Attaches the replica."""
        shapes = shapes or rig.shapes
        kv = KvCache(shapes, (FULL,), [num_blocks], model="m", options=CacheOptions())
        self.scheduler = ReplicaScheduler(shapes, kv, rig.engine, Turns(1), clock=lambda: rig.now)
        self.asked: list[Grammar] = []
        self.withdrawn: list[Grammar] = []
        rig.engine.attach(
            name,
            AttachedReplica(self.scheduler, lambda: None, self.asked.append, self.withdrawn.append),
        )


def one_replica(shapes: ShapeConfig = ONE_SLOT, num_blocks: int = 65) -> tuple[Rig, Compiler]:
    rig = make_rig(shapes, num_blocks=num_blocks)
    rig.engine.detach("replica-0", Loss.DIED)
    made = Compiler(rig, "a", num_blocks=num_blocks)
    rig.scheduler = made.scheduler
    return rig, made


def evict(rig: Rig) -> None:
    """Answers the next plan's admission with an evicted grammar."""
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, outputs=(SlotOutput(0, (), error=Unavailable("evicted")),)))


def test_an_evicted_grammar_does_not_block_other_requests() -> None:
    """Queued requests of the grammar wait for it again, and a request behind them runs."""
    rig, _ = one_replica()
    for name in ("first", "second"):
        rig.submit(constrained(name))
    rig.engine.grammar_compiled("a", A)
    evict(rig)
    plain = rig.submit(make_submission(request_id="plain"))
    rig.run()
    assert plain.tokens == expected_tokens((5, 6, 7), 8)
    second = rig.engine.find("second")
    assert second is not None
    assert second.state is RequestState.WAITING_FOR_FSM


def test_refusing_an_evicted_grammar_fails_all_its_requests() -> None:
    """Both the running and the queued request of the grammar fail."""
    rig, made = one_replica()
    sinks = [rig.submit(constrained(name)) for name in ("first", "second")]
    rig.engine.grammar_compiled("a", A)
    evict(rig)
    assert made.asked == [A, A]
    rig.engine.grammar_refused("a", A, Overloaded("busy"))
    plain = rig.submit(make_submission(request_id="plain"))
    rig.run()
    for sink in sinks:
        assert isinstance(sink.events[-1].error, Overloaded)
    assert plain.events[-1].finish_reason is FinishReason.LENGTH
    assert rig.engine.num_waiting == 0


def test_a_replica_that_refused_is_asked_again_when_the_other_is_lost() -> None:
    """After one replica refused and the other was lost, the first one compiles the grammar."""
    rig, made = one_replica()
    Compiler(rig, "b")
    sink = rig.submit(constrained("one"))
    rig.engine.grammar_refused("a", A, Overloaded("busy"))
    rig.engine.detach("b", Loss.DIED)
    assert made.asked == [A, A]
    rig.engine.grammar_compiled("a", A)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)


def test_other_requests_pass_one_without_room_on_its_replica() -> None:
    """A replica without the grammar runs other requests; the skipped request keeps its place."""
    rig, _ = one_replica()
    other = Compiler(rig, "b")
    rig.submit(constrained("first"))
    rig.submit(constrained("second"))
    rig.engine.grammar_compiled("a", A)
    rig.submit(make_submission(request_id="plain"))
    assert (rig.scheduler.num_running, other.scheduler.num_running) == (1, 1)
    rig.submit(make_submission(request_id="later"))
    assert rig.engine.num_waiting == 2
    admitted = [each.request_id for plan in rig.run() for each in plan.admit]
    assert admitted == ["first", "second", "later"]


def test_skipped_requests_keep_the_order_between_tenants() -> None:
    """One skipped request of each tenant is retried at a time, in the order of the queue."""
    rig, _ = one_replica()
    Compiler(rig, "b")
    for name, tenant in (("first", "x"), ("second", "x"), ("third", "x"), ("other", "y")):
        rig.submit(constrained(name, tenant=tenant))
    rig.engine.grammar_compiled("a", A)
    rig.engine.grammar_refused("b", A, Overloaded("busy"))
    assert rig.engine.num_waiting == 3
    admitted = [each.request_id for plan in rig.run() for each in plan.admit]
    assert admitted == ["first", "other", "second", "third"]


def test_a_skipped_request_runs_on_the_next_replica_that_compiles() -> None:
    """It runs there before requests that arrived later."""
    rig, _ = one_replica()
    other = Compiler(rig, "b", make_shapes(max_num_seqs=2, buckets=(1, 2)))
    for name in ("first", "second"):
        rig.submit(constrained(name))
    rig.engine.grammar_compiled("a", A)
    for name in ("plain", "later"):
        rig.submit(make_submission(request_id=name))
    assert other.scheduler.num_running == 2
    third = rig.submit(constrained("third"))
    rig.engine.abort("plain")
    rig.engine.grammar_compiled("b", A)
    second = rig.engine.find("second")
    assert second is not None
    assert second.replica_id == "b"
    assert not third.events


def test_a_skipped_request_is_not_starved_of_memory() -> None:
    """Requests behind it get no blocks of the replica that it waits for."""
    shapes = make_shapes(max_num_seqs=4)
    rig, _ = one_replica(shapes, num_blocks=13)
    rig.submit(constrained("running", prompt=range(50, 66)))
    rig.engine.grammar_compiled("a", A)
    other = Compiler(rig, "b", shapes)
    rig.submit(constrained("large", prompt=range(3, 38), max_tokens=8))
    for number in range(3):
        rig.submit(make_submission(request_id=f"small{number}", max_tokens=1))
    assert (rig.scheduler.num_running, other.scheduler.num_running) == (1, 3)
    for number in range(3, 6):
        rig.submit(make_submission(request_id=f"small{number}", max_tokens=1))
    large = rig.engine.find("large")
    assert large is not None
    started: set[str] = set()
    while plans := rig.step():
        started |= {each.request_id for plan in plans for each in plan.admit}
        assert started <= {"running"} or large.slot is not None or large.state is RequestState.FINISHED
    assert len(started) == 5


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_request_too_large_for_every_replica_with_its_grammar_fails(first: str) -> None:
    """It fails once the large replica has refused, before or after the small one compiled."""
    rig, _ = one_replica(num_blocks=9)
    Compiler(rig, "b", num_blocks=65)
    large = rig.submit(constrained("large", prompt=range(3, 38), max_tokens=8))
    small = rig.submit(constrained("small"))
    if first == "a":
        rig.engine.grammar_compiled("a", A)
        assert not large.events
    rig.engine.grammar_refused("b", A, Overloaded("busy"))
    if first == "b":
        rig.engine.grammar_compiled("a", A)
    assert isinstance(large.events[-1].error, Overloaded)
    assert "large enough" in large.events[-1].error.message
    rig.run()
    assert small.tokens == expected_tokens((5, 6, 7), 8)


@pytest.mark.parametrize("answer", ["none", "refused", "compiled"])
def test_a_large_skipped_request_does_not_block_a_small_one(answer: str) -> None:
    """The small one of two requests with the same grammar and tenant runs on the small replica."""
    rig, _ = one_replica(num_blocks=9)
    other = Compiler(rig, "b", num_blocks=17)
    rig.submit(constrained("running"))
    large = rig.submit(constrained("large", max_tokens=50))
    small = rig.submit(constrained("small"))
    rig.engine.grammar_compiled("a", A)
    rig.run()
    assert small.tokens == expected_tokens((5, 6, 7), 8)
    assert not large.events
    if answer == "refused":
        rig.engine.grammar_refused("b", A, Overloaded("busy"))
        assert isinstance(large.events[-1].error, Overloaded)
    if answer == "compiled":
        rig.engine.grammar_compiled("b", A)
        assert other.scheduler.num_running == 1


def test_a_large_request_does_not_block_a_replica_too_small_for_it() -> None:
    """Other requests run on the small replica while the large request waits for the large one."""
    rig, _ = one_replica(num_blocks=9)
    other = Compiler(rig, "b", num_blocks=17)
    rig.submit(make_submission(request_id="running", max_tokens=50))
    large = rig.submit(make_submission(request_id="large", max_tokens=50))
    small = rig.submit(make_submission(request_id="small"))
    assert (rig.scheduler.num_running, other.scheduler.num_running) == (1, 1)
    rig.run()
    assert small.tokens == expected_tokens((5, 6, 7), 8)
    rig.engine.abort("running")
    assert not large.events
    found = rig.engine.find("large")
    other.scheduler.next_plan()
    assert found is not None
    assert found.replica_id == "b"


def test_a_refusing_replica_is_asked_again_when_a_large_one_is_lost() -> None:
    """The small replica that has the grammar cannot run the request, so the refusing one is asked again."""
    rig, _ = one_replica(num_blocks=17)
    Compiler(rig, "b", num_blocks=9)
    other = Compiler(rig, "c", num_blocks=17)
    for name in ("plain", "more"):
        rig.submit(make_submission(request_id=name, max_tokens=50))
    large = rig.submit(constrained("large", max_tokens=50))
    rig.engine.grammar_refused("c", A, Overloaded("busy"))
    for name in ("b", "a"):
        rig.engine.grammar_compiled(name, A)
    assert rig.engine.num_waiting == 1
    rig.engine.detach("a", Loss.DIED)
    assert other.asked == [A, A]
    rig.engine.grammar_refused("c", A, Overloaded("busy"))
    assert isinstance(large.events[-1].error, Overloaded)


def test_the_grammar_of_a_lost_replica_is_compiled_elsewhere() -> None:
    """A skipped request waits for its grammar again when no replica has it."""
    rig, _ = one_replica()
    other = Compiler(rig, "b")
    sinks = [rig.submit(constrained(name)) for name in ("first", "second")]
    rig.engine.grammar_compiled("a", A)
    rig.engine.grammar_refused("b", A, Overloaded("busy"))
    assert other.asked == [A]
    rig.engine.detach("a", Loss.DIED)
    assert other.asked == [A, A]
    rig.engine.grammar_refused("b", A, InvalidArgument("bad"))
    for sink in sinks:
        assert isinstance(sink.events[-1].error, InvalidArgument)


def test_aborting_a_skipped_request_frees_what_it_waited_for() -> None:
    """The next request may use the replica that the aborted one had claimed."""
    rig, _ = one_replica(make_shapes(max_num_seqs=2, buckets=(1, 2)), num_blocks=13)
    rig.submit(constrained("running", prompt=range(50, 66)))
    rig.engine.grammar_compiled("a", A)
    other = Compiler(rig, "b", ONE_SLOT)
    rig.submit(constrained("large", prompt=range(3, 38), max_tokens=8))
    for name in ("plain", "later"):
        rig.submit(make_submission(request_id=name, max_tokens=1))
    assert (rig.scheduler.num_running, other.scheduler.num_running) == (1, 1)
    rig.engine.abort("large")
    assert rig.scheduler.num_running == 2


def test_a_grammar_without_users_is_withdrawn() -> None:
    """The compilation is cancelled when the last request of the grammar ends."""
    rig, made = one_replica()
    for name in ("one", "two"):
        rig.submit(constrained(name))
    rig.engine.abort("one")
    assert not made.withdrawn
    rig.engine.abort("two")
    assert made.withdrawn == [A]
    rig.submit(constrained("three"))
    assert made.asked == [A, A]
    rig.engine.grammar_compiled("a", A)
    rig.run()
    assert made.withdrawn == [A]


def test_grammars_are_compiled_for_the_next_in_line() -> None:
    """A few of each tenant are ahead of their requests, the most urgent and earliest that have not ended."""
    rig, made = one_replica(make_shapes(max_num_seqs=2, buckets=(1, 2)))
    many = [make_grammar(str(number)) for number in range(MAX_OPEN_PER_TENANT + 4)]
    for number, grammar in enumerate(many):
        rig.submit(constrained(f"r{number}", grammar, tenant="greedy"))
    assert made.asked == many[:MAX_OPEN_PER_TENANT]
    rig.submit(constrained("mine", A, tenant="other"))
    rig.submit(constrained("urgent", B, tenant="greedy", priority=-1))
    assert made.asked[-2:] == [A, B]
    for grammar in (B, many[3]):  # these get the slots
        rig.engine.grammar_compiled("a", grammar)
    assert made.asked[-1] == many[MAX_OPEN_PER_TENANT]
    rig.engine.grammar_compiled("a", many[2])  # waits for a slot
    assert made.asked[-1] == many[MAX_OPEN_PER_TENANT]
    rig.engine.abort(f"r{MAX_OPEN_PER_TENANT + 1}")
    assert not made.withdrawn
    rig.engine.abort("r0")
    assert made.withdrawn == [many[0]]
    assert made.asked[-1] == many[MAX_OPEN_PER_TENANT + 2]
    rig.engine.grammar_refused("a", many[1], Overloaded("busy"))
    assert made.asked[-1] == many[MAX_OPEN_PER_TENANT + 3]


def test_under_pressure_each_grammar_is_compiled_once() -> None:
    """A worker that keeps a few grammars, the last used, still has those of the requests that get a slot."""
    rig, made = one_replica(make_shapes(max_num_seqs=4, buckets=(1, 2, 4)))
    grammars = {f"r{number}": make_grammar(str(number)) for number in range(80)}
    cache: dict[Grammar, None] = {}

    def use(grammar: Grammar) -> None:
        cache.pop(grammar, None)
        cache[grammar] = None
        for oldest in list(cache)[:-24]:
            del cache[oldest]

    def refuses(moment: Moment) -> Unavailable | None:
        if grammars[moment.request_id] not in cache:
            return Unavailable("evicted")
        use(grammars[moment.request_id])
        return None

    rig.device.refuses = refuses
    sinks = [rig.submit(constrained(name, grammar)) for name, grammar in grammars.items()]
    answered = 0
    while rig.engine.live():
        for grammar in made.asked[answered : answered + 2]:
            use(grammar)
            rig.engine.grammar_compiled("a", grammar)
            answered += 1
        rig.step()
    assert all(sink.events[-1].finish_reason is FinishReason.LENGTH for sink in sinks)
    assert made.asked == list(grammars.values())


def test_an_end_retries_no_more_requests_than_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that lacks the grammars of all that wait makes no end look at each of them."""
    rig, _ = one_replica()
    Compiler(rig, "b")
    grammars = [make_grammar(str(number)) for number in range(30)]
    for number in range(300):
        rig.submit(constrained(f"r{number}", grammars[number % 30], max_tokens=2, tenant=f"t{number % 3}"))
    asked: list[Grammar] = []
    settle, looks = Placer.settle, 0

    def count(placer: Placer, request: Request) -> bool:
        nonlocal looks
        looks += 1
        return settle(placer, request)

    monkeypatch.setattr(Placer, "settle", count)
    while rig.engine.live():
        for grammar in [
            one for one in grammars if one not in asked and rig.engine.grammars._entries[one].opened
        ]:
            asked.append(grammar)
            rig.engine.grammar_refused("b", grammar, Overloaded("busy"))
            rig.engine.grammar_compiled("a", grammar)
        rig.step()
    assert looks < 300 * 8


def test_groups_of_skipped_requests_follow_the_replicas() -> None:
    """Skipped requests are regrouped when a replica returns with less memory."""
    rig, _ = one_replica(num_blocks=17)
    Compiler(rig, "b", num_blocks=17)
    rig.submit(constrained("running"))
    rig.engine.grammar_compiled("a", A)
    large = rig.submit(constrained("large", max_tokens=50))
    small = rig.submit(constrained("small"))
    rig.engine.detach("a", Loss.DIED)
    rig.scheduler = Compiler(rig, "a", num_blocks=9).scheduler
    rig.engine.grammar_compiled("a", A)
    rig.run()
    assert small.tokens == expected_tokens((5, 6, 7), 8)
    assert not large.events
