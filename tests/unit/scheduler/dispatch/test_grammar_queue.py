"""Requests that wait for their grammar, and tokens that a grammar forces."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from protos.errors import InvalidArgument, Overloaded, Unavailable
from protos.steps import SlotOutput, StepResult
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import FinishReason, RequestState
from scheduler_svc.requests.sampling import Grammar
from tests.support.scheduler.factories import (
    FULL,
    ListSink,
    Rig,
    expected_tokens,
    make_grammar,
    make_rig,
    make_sampling,
    make_submission,
    with_grammar,
)

A, B = make_grammar("a"), make_grammar("b")


def constrained(request_id: str, grammar: Grammar = A, prompt: Sequence[int] = (5, 6, 7)) -> Submission:
    plain = make_submission(prompt, request_id=request_id)
    return replace(plain, sampling=with_grammar(plain.sampling, grammar))


def asked(rig: Rig, name: str = "replica-0") -> list[Grammar]:
    """What a replica is asked to compile from now on."""
    grammars: list[Grammar] = []
    replica = rig.engine.replicas[name]
    rig.engine.detach(name)
    rig.engine.attach(name, AttachedReplica(replica.scheduler, lambda: None, grammars.append))
    return grammars


def second_replica(rig: Rig, ask: Callable[[Grammar], None], name: str = "replica-1") -> ReplicaScheduler:
    kv = KvCache(rig.geometry, (FULL,), [65], model="m", options=CacheOptions())
    scheduler = ReplicaScheduler(rig.geometry, kv, rig.engine, Interleave(1), clock=lambda: rig.now)
    rig.engine.attach(name, AttachedReplica(scheduler, lambda: None, ask))
    return scheduler


def test_others_go_on_while_a_request_waits_for_its_grammar() -> None:
    """It waits as WAITING_FOR_FSM, is asked for once, and runs when the replica has it."""
    rig = make_rig()
    grammars = asked(rig)
    first, second = rig.submit(constrained("a")), rig.submit(constrained("b"))
    plain = rig.submit(make_submission(request_id="plain"))
    request = rig.engine.find("a")
    assert request is not None
    assert request.state is RequestState.WAITING_FOR_FSM
    assert grammars == [A]
    assert rig.engine.num_waiting == 2
    rig.run()
    assert plain.tokens == expected_tokens((5, 6, 7), 8)
    assert not first.events
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert first.tokens == second.tokens == plain.tokens
    assert rig.engine.num_waiting == 0
    assert rig.engine.grammars.idle


def test_a_grammar_that_is_there_costs_no_waiting() -> None:
    """As long as somebody uses it the scheduler knows that the replica has it."""
    rig = make_rig()
    grammars = asked(rig)
    rig.submit(constrained("a"))
    rig.engine.grammar_compiled("replica-0", A)
    rig.submit(constrained("b"))
    assert len(grammars) == 1
    assert rig.engine.num_waiting == 0


def test_a_wrong_grammar_ends_its_requests_alone() -> None:
    """With the worker's reason."""
    rig = make_rig()
    asked(rig)
    wrong, right = rig.submit(constrained("a")), rig.submit(constrained("b", B))
    rig.engine.grammar_refused("replica-0", A, InvalidArgument("bad", param="structured_output"))
    rig.engine.grammar_compiled("replica-0", B)
    rig.run()
    (event,) = wrong.events
    assert isinstance(event.error, InvalidArgument)
    assert right.events[-1].finish_reason is FinishReason.LENGTH


def test_order_of_arrival_is_kept() -> None:
    """Whoever came first runs first, although its grammar took longer than the other's."""
    rig = make_rig()
    asked(rig)
    rig.submit(constrained("a"))
    rig.submit(constrained("b", B))
    blocker = [rig.submit(make_submission(request_id=f"p{n}")) for n in range(4)]
    rig.engine.grammar_compiled("replica-0", B)
    rig.engine.grammar_compiled("replica-0", A)
    started: list[str] = []
    while (plan := rig.step()) is not None:
        started += [admission.request_id for admission in plan.admit]
    assert started.index("a") < started.index("b")
    assert all(sink.events for sink in blocker)


def test_a_waiting_request_can_be_aborted() -> None:
    """Before its grammar is there; the answer then changes nothing."""
    rig = make_rig()
    asked(rig)
    sink = rig.submit(constrained("a"))
    assert rig.engine.abort("a")
    assert sink.events[-1].finish_reason is FinishReason.ABORT
    rig.engine.grammar_compiled("replica-0", A)
    rig.engine.grammar_refused("replica-0", A, InvalidArgument("late"))
    assert rig.run() == []
    assert rig.engine.num_waiting == 0


def test_a_lost_worker_is_replaced_in_compiling() -> None:
    """Another replica is asked, and a request whose only replica is gone waits for its grammar again."""
    rig = make_rig()
    asked(rig)
    sink = rig.submit(constrained("a"))
    rig.engine.detach("replica-0")
    again: list[Grammar] = []
    scheduler = second_replica(rig, again.append)
    assert again == [A]
    rig.engine.grammar_compiled("replica-1", A)
    assert scheduler.num_running == 1
    rig.engine.detach("replica-1")
    request = rig.engine.find("a")
    assert request is not None
    assert request.state is RequestState.WAITING_FOR_FSM
    rig.start()
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)


def test_a_request_runs_only_where_its_grammar_is() -> None:
    """A free replica that is still compiling does not get it, and nobody there gives way for it."""
    rig = make_rig()
    asked(rig)
    other = second_replica(rig, lambda _: None)
    rig.submit(constrained("a"))
    rig.engine.grammar_compiled("replica-0", A)
    assert (rig.scheduler.num_running, other.num_running) == (1, 0)


def test_one_replicas_trouble_is_not_the_requests_end() -> None:
    """As long as another one may still compile it."""
    rig = make_rig()
    asked(rig)
    second_replica(rig, lambda _: None)
    sink = rig.submit(constrained("a"))
    rig.engine.grammar_refused("replica-0", A, Overloaded("busy"))
    assert not sink.events
    rig.engine.grammar_refused("replica-1", A, Overloaded("busy"))
    assert isinstance(sink.events[-1].error, Overloaded)


def test_a_grammar_that_a_worker_has_evicted_is_asked_for_again() -> None:
    """The admission fails with an error that passes, and the request waits again."""
    rig = make_rig()
    grammars = asked(rig)
    sink = rig.submit(constrained("a"))
    rig.engine.grammar_compiled("replica-0", A)
    plan = rig.scheduler.step()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, outputs=(SlotOutput(0, (), error=Unavailable("evicted")),)))
    assert grammars == [A, A]
    assert rig.engine.num_waiting == 1
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)
    rig.scheduler.kv.check_integrity()


def test_waiting_requests_fail_when_no_worker_comes() -> None:
    """Like all others that wait."""
    rig = make_rig()
    asked(rig)
    sink = rig.submit(constrained("a"))
    assert rig.engine.suspend(Unavailable("nobody")) == 1
    assert isinstance(sink.events[-1].error, Unavailable)


@pytest.mark.parametrize("models_own", [False, True])
def test_a_grammar_overrules_min_tokens_for_the_models_end_tokens_alone(models_own: bool) -> None:
    """Where it is through nothing can follow an end token; a client's stop token is one among those that it allows."""
    whole = expected_tokens((5, 6, 7), 8)
    rig = make_rig()
    model = rig.engine.model
    assert model is not None
    if models_own:
        rig.engine.model = replace(model, eos_token_ids=frozenset({whole[3]}))
    asked(rig)
    sampling = make_sampling(stop_token_ids=[] if models_own else [whole[3]], min_tokens=6)
    sink = rig.submit(make_submission(sampling=with_grammar(sampling, A)))
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert sink.tokens == (whole[:4] if models_own else whole)
    assert sink.events[-1].finish_reason is (FinishReason.STOP if models_own else FinishReason.LENGTH)


@pytest.mark.parametrize("jump", [1, 2, 5, 11])
@pytest.mark.parametrize("cache_generated", [False, True])
@pytest.mark.parametrize("max_lease", [1, 4])
def test_forced_tokens_are_prefilled(jump: int, cache_generated: bool, max_lease: int) -> None:
    """The output is the same as token by token, every position's KV is computed from its own context, and there are fewer steps."""
    rig = make_rig(cache_generated=cache_generated, max_lease=max_lease)
    rig.device.jump = jump
    prompts = [(5, 6, 7), (9,) * 9, (5, 6, 7, 8, 1, 2)]
    sinks = [
        rig.submit(make_submission(prompt, request_id=f"r{n}", max_tokens=30))
        for n, prompt in enumerate(prompts)
    ]
    rig.run()
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == expected_tokens(prompt, 30)
        assert sink.events[-1].finish_reason is FinishReason.LENGTH
    assert rig.scheduler.stats.forced_tokens > 10
    assert rig.scheduler.prefill_backlog == 0
    assert not rig.scheduler._decoding._tenants
    rig.scheduler.kv.check_integrity()


def test_jumps_save_steps() -> None:
    """Alone, each jump of up to a chunk is one step instead of one a token."""
    passes = []
    for jump in (0, 3):
        rig = make_rig()
        rig.device.jump = jump
        rig.submit(make_submission(max_tokens=40))
        rig.run()
        passes.append(rig.device.passes)
    assert passes[1] < passes[0] * 0.6


def test_a_jumping_request_can_be_preempted_and_lost() -> None:
    """Memory for one and a half requests, and a replica that goes away in the middle."""
    rig = make_rig(num_blocks=14)
    rig.device.jump = 6
    sinks: list[ListSink] = [
        rig.submit(make_submission((n, n + 1), request_id=f"r{n}", max_tokens=40)) for n in (5, 20, 30)
    ]
    for _ in range(9):
        rig.step()
    rig.replace_replica()
    rig.device.jump = 6
    rig.run()
    for n, sink in zip((5, 20, 30), sinks, strict=True):
        assert sink.tokens == expected_tokens((n, n + 1), 40)
    assert rig.scheduler.stats.preemptions["memory"] > 0
    rig.scheduler.kv.check_integrity()
