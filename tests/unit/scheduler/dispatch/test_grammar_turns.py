"""What a grammar costs those who do not wait for it: nothing, wherever there is room."""

from dataclasses import replace
from typing import Any

import pytest

from protos.errors import InvalidArgument, Overloaded, Unavailable
from protos.steps import SlotOutput, StepResult
from scheduler_svc.dispatch.grammar_queue import MAX_COMPILING_PER_TENANT
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import FinishReason, RequestState
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.shapes.geometry import Geometry
from tests.support.scheduler.factories import (
    FULL,
    Rig,
    expected_tokens,
    make_geometry,
    make_grammar,
    make_rig,
    make_submission,
    with_grammar,
)

A, B = make_grammar("a"), make_grammar("b")
ONE_SLOT = make_geometry(max_num_seqs=1, buckets=(1,))


def constrained(request_id: str, grammar: Grammar = A, **fields: Any) -> Submission:
    plain = make_submission(request_id=request_id, **fields)
    return replace(plain, sampling=with_grammar(plain.sampling, grammar))


class Compiler:
    """One replica's: what it is asked and what is taken back."""

    def __init__(self, rig: Rig, name: str, geometry: Geometry | None = None, num_blocks: int = 65) -> None:
        """Attaches the replica."""
        geometry = geometry or rig.geometry
        kv = KvCache(geometry, (FULL,), [num_blocks], model="m", options=CacheOptions())
        self.scheduler = ReplicaScheduler(geometry, kv, rig.engine, Interleave(1), clock=lambda: rig.now)
        self.asked: list[Grammar] = []
        self.withdrawn: list[Grammar] = []
        rig.engine.attach(
            name,
            AttachedReplica(self.scheduler, lambda: None, self.asked.append, self.withdrawn.append),
        )


def alone(geometry: Geometry = ONE_SLOT, num_blocks: int = 65) -> tuple[Rig, Compiler]:
    rig = make_rig(geometry, num_blocks=num_blocks)
    rig.engine.detach("replica-0")
    made = Compiler(rig, "a", num_blocks=num_blocks)
    rig.scheduler = made.scheduler
    return rig, made


def evict(rig: Rig) -> None:
    """The worker answers the next plan's admission with an eviction."""
    plan = rig.scheduler.step()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, outputs=(SlotOutput(0, (), error=Unavailable("evicted")),)))


def test_an_evicted_grammar_stops_nobody_else() -> None:
    """Who is queued for a turn with it waits for it too, and whoever comes behind runs meanwhile."""
    rig, _ = alone()
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


def test_an_evicted_grammar_that_is_refused_ends_all_that_wait_for_it() -> None:
    """Not only who was running with it."""
    rig, made = alone()
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


def test_who_waits_is_not_left_with_a_replica_that_has_gone() -> None:
    """One replica refused, the other one is lost while it compiles: the first one is asked again."""
    rig, made = alone()
    Compiler(rig, "b")
    sink = rig.submit(constrained("one"))
    rig.engine.grammar_refused("a", A, Overloaded("busy"))
    rig.engine.detach("b")
    assert made.asked == [A, A]
    rig.engine.grammar_compiled("a", A)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)


def test_others_pass_who_has_no_room_where_its_grammar_is() -> None:
    """The replica that still compiles runs what it can, and the constrained request keeps its place for the other one."""
    rig, _ = alone()
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


def test_turns_between_tenants_are_kept_beside_the_queue() -> None:
    """Of each tenant one comes back at a time, and the queue's order decides between them."""
    rig, _ = alone()
    Compiler(rig, "b")
    for name, tenant in (("first", "x"), ("second", "x"), ("third", "x"), ("other", "y")):
        rig.submit(constrained(name, tenant=tenant))
    rig.engine.grammar_compiled("a", A)
    rig.engine.grammar_refused("b", A, Overloaded("busy"))
    assert rig.engine.num_waiting == 3
    admitted = [each.request_id for plan in rig.run() for each in plan.admit]
    assert admitted == ["first", "other", "second", "third"]


def test_who_was_passed_runs_where_its_grammar_comes_next() -> None:
    """On the second replica, as soon as that has compiled it, before what came later."""
    rig, _ = alone()
    other = Compiler(rig, "b", make_geometry(max_num_seqs=2, buckets=(1, 2)))
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


def test_who_was_passed_is_not_starved_of_memory() -> None:
    """Nothing behind it gets blocks of the replica that it waits for, however little would do."""
    geometry = make_geometry(max_num_seqs=4)
    rig, _ = alone(geometry, num_blocks=13)
    rig.submit(constrained("running", prompt=range(50, 66)))
    rig.engine.grammar_compiled("a", A)
    other = Compiler(rig, "b", geometry)
    rig.submit(constrained("large", prompt=range(3, 38), max_tokens=8))
    for number in range(3):
        rig.submit(make_submission(request_id=f"small{number}", max_tokens=1))
    assert (rig.scheduler.num_running, other.scheduler.num_running) == (1, 3)
    for number in range(3, 6):
        rig.submit(make_submission(request_id=f"small{number}", max_tokens=1))
    started = [each.request_id for plan in rig.run() for each in plan.admit]
    assert started[:2] == ["running", "large"]


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_request_too_large_for_who_has_its_grammar_is_told(first: str) -> None:
    """In whatever order the large replica refuses and the small one has it; nobody would ever run it."""
    rig, _ = alone(num_blocks=9)
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
def test_who_fits_a_small_replica_is_not_kept_from_it_by_a_larger_request(answer: str) -> None:
    """Of one grammar and tenant, aside together: the large one waits for the replica that still compiles, the small one does not."""
    rig, _ = alone(num_blocks=9)
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


def test_a_large_request_keeps_nobody_from_a_replica_that_is_too_small_for_it() -> None:
    """With no grammar at all: it waits for the large replica, and others run on the small one, in which it has no part."""
    rig, _ = alone(num_blocks=9)
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
    other.scheduler.step()
    assert found is not None
    assert found.replica_id == "b"


def test_groups_are_made_anew_when_replicas_change() -> None:
    """Both fitted both replicas when they stepped aside; then the replica of that name comes back too small for the first one."""
    rig, _ = alone(num_blocks=17)
    Compiler(rig, "b", num_blocks=17)
    rig.submit(constrained("running"))
    rig.engine.grammar_compiled("a", A)
    large = rig.submit(constrained("large", max_tokens=50))
    small = rig.submit(constrained("small"))
    rig.engine.detach("a")
    rig.scheduler = Compiler(rig, "a", num_blocks=9).scheduler
    rig.engine.grammar_compiled("a", A)
    rig.run()
    assert small.tokens == expected_tokens((5, 6, 7), 8)
    assert not large.events


def test_who_refused_is_asked_again_when_the_replica_that_a_request_waits_for_is_lost() -> None:
    """The small one that still has the grammar is of no use to the request."""
    rig, _ = alone(num_blocks=17)
    Compiler(rig, "b", num_blocks=9)
    other = Compiler(rig, "c", num_blocks=17)
    for name in ("plain", "more"):
        rig.submit(make_submission(request_id=name, max_tokens=50))
    large = rig.submit(constrained("large", max_tokens=50))
    rig.engine.grammar_refused("c", A, Overloaded("busy"))
    for name in ("b", "a"):
        rig.engine.grammar_compiled(name, A)
    assert rig.engine.num_waiting == 1
    rig.engine.detach("a")
    assert other.asked == [A, A]
    rig.engine.grammar_refused("c", A, Overloaded("busy"))
    assert isinstance(large.events[-1].error, Overloaded)


def test_a_lost_replicas_queue_is_asked_for_elsewhere() -> None:
    """Who was passed waits for its grammar again once nobody has it."""
    rig, _ = alone()
    other = Compiler(rig, "b")
    sinks = [rig.submit(constrained(name)) for name in ("first", "second")]
    rig.engine.grammar_compiled("a", A)
    rig.engine.grammar_refused("b", A, Overloaded("busy"))
    assert other.asked == [A]
    rig.engine.detach("a")
    assert other.asked == [A, A]
    rig.engine.grammar_refused("b", A, InvalidArgument("bad"))
    for sink in sinks:
        assert isinstance(sink.events[-1].error, InvalidArgument)


def test_an_aborted_request_that_was_passed_makes_room() -> None:
    """What nobody before it waits for any more is there for the next one."""
    rig, _ = alone(make_geometry(max_num_seqs=2, buckets=(1, 2)), num_blocks=13)
    rig.submit(constrained("running", prompt=range(50, 66)))
    rig.engine.grammar_compiled("a", A)
    other = Compiler(rig, "b", ONE_SLOT)
    rig.submit(constrained("large", prompt=range(3, 38), max_tokens=8))
    for name in ("plain", "later"):
        rig.submit(make_submission(request_id=name, max_tokens=1))
    assert (rig.scheduler.num_running, other.scheduler.num_running) == (1, 1)
    rig.engine.abort("large")
    assert rig.scheduler.num_running == 2


def test_a_grammar_that_nobody_wants_is_withdrawn() -> None:
    """When the last of those that have it goes, whatever way."""
    rig, made = alone()
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


def test_grammars_of_one_tenant_do_not_keep_the_compiler_from_another() -> None:
    """A few of each are asked for at once, the next ones in their order as answers come; what is aborted meanwhile never is."""
    rig, made = alone()
    many = [make_grammar(str(number)) for number in range(MAX_COMPILING_PER_TENANT + 4)]
    for number, grammar in enumerate(many):
        rig.submit(constrained(f"r{number}", grammar, tenant="greedy"))
    assert made.asked == many[:MAX_COMPILING_PER_TENANT]
    rig.submit(constrained("mine", A, tenant="other"))
    assert made.asked[-1] == A
    rig.engine.grammar_compiled("a", many[3])
    assert made.asked[-1] == many[MAX_COMPILING_PER_TENANT]
    rig.engine.abort(f"r{MAX_COMPILING_PER_TENANT + 1}")
    assert not made.withdrawn
    rig.engine.abort("r0")
    assert made.withdrawn == [many[0]]
    assert made.asked[-1] == many[MAX_COMPILING_PER_TENANT + 2]
    rig.engine.grammar_refused("a", many[1], Overloaded("busy"))
    assert made.asked[-1] == many[MAX_COMPILING_PER_TENANT + 3]
    for grammar in [*made.asked]:
        rig.engine.grammar_compiled("a", grammar)
    assert all(line.idle for line in rig.engine.grammars._lines.values())


def test_grammars_are_equal_by_their_digests() -> None:
    """A lost replica orphans a thousand large grammars at once; comparing their texts would take long."""
    one, two = make_grammar("a" * 1000), make_grammar("a" * 1000)
    assert one == two != make_grammar("b")
    object.__setattr__(two, "serialized", b"never compared")
    assert one == two
    assert hash(one) == hash(two)
