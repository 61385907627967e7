"""Requests that wait for their grammar, their order in the queue, and tokens that a grammar forces."""

from dataclasses import replace
from typing import Any

import pytest

from protos.errors import InvalidArgument, Overloaded, Unavailable
from protos.steps import SlotOutput, StepResult
from scheduler_svc.engine.engine import MOST_GRAMMAR_LOSSES
from scheduler_svc.engine.grammar_queue import MAX_OPEN_PER_TENANT
from scheduler_svc.engine.placement import Placer
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request, RequestState
from scheduler_svc.requests.sampling import FinishReason, Grammar
from scheduler_svc.shapes.shape_config import ShapeConfig
from tests.support.scheduler.factories import (
    Rig,
    expected_tokens,
    make_grammar,
    make_rig,
    make_shapes,
    make_submission,
    with_grammar,
)
from tests.support.scheduler.second_replica import add_replica
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
        self.asked: list[Grammar] = []
        self.withdrawn: list[Grammar] = []
        self.scheduler = add_replica(
            rig, name=name, shapes=shapes, num_blocks=num_blocks, ask=self.asked.append, withdraw=self.withdrawn.append
        ).scheduler  # fmt: skip


def one_replica(shapes: ShapeConfig = ONE_SLOT, num_blocks: int = 65) -> tuple[Rig, Compiler]:
    rig = make_rig(shapes, num_blocks=num_blocks)
    rig.engine.detach("replica-0", Loss.DIED)
    made = Compiler(rig, "a", num_blocks=num_blocks)
    rig.scheduler = made.scheduler
    return rig, made


def test_a_compiled_grammar_costs_no_waiting() -> None:
    """While a request uses a compiled grammar, a second one runs at once."""
    rig, made = one_replica(make_shapes())
    rig.submit(constrained("a"))
    rig.engine.grammar_compiled("a", A)
    rig.submit(constrained("b"))
    assert made.asked == [A]
    assert rig.engine.num_waiting == 0


def test_order_of_arrival_is_kept() -> None:
    """An earlier request runs first although its grammar took longer to compile."""
    rig, _ = one_replica()
    rig.submit(constrained("first"))
    rig.submit(constrained("second", B))
    rig.submit(make_submission(request_id="plain"))
    for grammar in (B, A):
        rig.engine.grammar_compiled("a", grammar)
    admitted = [each.request_id for plan in rig.run() for each in plan.admit]
    assert admitted == ["plain", "first", "second"]


def evict(rig: Rig) -> None:
    """Compiles the grammar, and refuses the admission for want of it."""
    rig.engine.grammar_compiled("a", A)
    plan = rig.scheduler.next_plan()
    assert plan is not None
    (admission,) = plan.admit
    refusal = SlotOutput(admission.slot, (), error=Unavailable("evicted"))
    rig.scheduler.update(StepResult(plan.step, outputs=(refusal,)))


def test_a_grammar_that_is_evicted_each_time_fails_its_request() -> None:
    """A worker that compiles it and never has it keeps nothing busy for ever."""
    rig, made = one_replica()
    sink = rig.submit(constrained("a"))
    for _ in range(MOST_GRAMMAR_LOSSES - 1):
        evict(rig)
    assert not sink.events
    evict(rig)
    assert isinstance(sink.events[-1].error, Overloaded)
    assert made.asked == [A] * MOST_GRAMMAR_LOSSES


def test_a_token_forgives_lost_grammars() -> None:
    """The evictions before it do not count."""
    rig, _ = one_replica()
    sink = rig.submit(constrained("a", priority=1))
    for number in range(2):
        for _ in range(MOST_GRAMMAR_LOSSES - 1):
            evict(rig)
        rig.engine.grammar_compiled("a", A)
        rig.step()
        rig.submit(make_submission(request_id=f"urgent{number}", max_tokens=1))
    assert len(sink.tokens) == 2
    assert sink.events[-1].error is None


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


def test_forced_tokens_save_steps() -> None:
    """A run of forced tokens up to one chunk costs one step."""
    passes = []
    for jump in (0, 3):
        rig = make_rig()
        rig.device.jump = jump
        rig.submit(make_submission(max_tokens=40))
        rig.run()
        passes.append(rig.device.passes)
    assert passes[1] < passes[0] * 0.6
