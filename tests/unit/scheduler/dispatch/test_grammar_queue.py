"""Requests that wait for their grammar, and tokens that a grammar forces."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from protos.errors import InvalidArgument, Overloaded, Unavailable
from protos.steps import SlotOutput, StepResult
from scheduler_svc.dispatch.engine import MOST_GRAMMAR_LOSSES
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.requests.admission import ModelLimits, Submission
from scheduler_svc.requests.request import RequestState
from scheduler_svc.requests.sampling import FinishReason, Grammar
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


def record_asked(rig: Rig, name: str = "replica-0") -> list[Grammar]:
    """Returns a list that receives the grammars that a replica is asked to compile."""
    grammars: list[Grammar] = []
    replica = rig.engine.replicas[name]
    rig.engine.detach(name, Loss.DIED)
    rig.engine.attach(name, AttachedReplica(replica.scheduler, lambda: None, grammars.append))
    return grammars


def second_replica(rig: Rig, ask: Callable[[Grammar], None], name: str = "replica-1") -> ReplicaScheduler:
    kv = KvCache(rig.shapes, (FULL,), [65], model="m", options=CacheOptions())
    scheduler = ReplicaScheduler(rig.shapes, kv, rig.engine, Turns(1), clock=lambda: rig.now)
    rig.engine.attach(name, AttachedReplica(scheduler, lambda: None, ask))
    return scheduler


def test_other_requests_run_while_one_waits_for_its_grammar() -> None:
    """The request waits as WAITING_FOR_FSM, its grammar is asked for once, and it runs once compiled."""
    rig = make_rig()
    grammars = record_asked(rig)
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
    assert not rig.engine.grammars._entries


def test_a_compiled_grammar_costs_no_waiting() -> None:
    """While a request uses a compiled grammar, a second one runs at once."""
    rig = make_rig()
    grammars = record_asked(rig)
    rig.submit(constrained("a"))
    rig.engine.grammar_compiled("replica-0", A)
    rig.submit(constrained("b"))
    assert len(grammars) == 1
    assert rig.engine.num_waiting == 0


def test_an_invalid_grammar_fails_only_its_requests() -> None:
    """They fail with the worker's error, and other requests run."""
    rig = make_rig()
    record_asked(rig)
    wrong, right = rig.submit(constrained("a")), rig.submit(constrained("b", B))
    rig.engine.grammar_refused("replica-0", A, InvalidArgument("bad", param="structured_output"))
    rig.engine.grammar_compiled("replica-0", B)
    rig.run()
    (event,) = wrong.events
    assert isinstance(event.error, InvalidArgument)
    assert right.events[-1].finish_reason is FinishReason.LENGTH


def test_order_of_arrival_is_kept() -> None:
    """An earlier request runs first although its grammar took longer to compile."""
    rig = make_rig()
    record_asked(rig)
    rig.submit(constrained("a"))
    rig.submit(constrained("b", B))
    blocker = [rig.submit(make_submission(request_id=f"p{n}")) for n in range(4)]
    rig.engine.grammar_compiled("replica-0", B)
    rig.engine.grammar_compiled("replica-0", A)
    started: list[str] = []
    for plan in rig.run():
        started += [admission.request_id for admission in plan.admit]
    assert started.index("a") < started.index("b")
    assert all(sink.events for sink in blocker)


def test_a_waiting_request_can_be_aborted() -> None:
    """After the abort, the replica's answers change nothing."""
    rig = make_rig()
    record_asked(rig)
    sink = rig.submit(constrained("a"))
    assert rig.engine.abort("a")
    assert sink.events[-1].finish_reason is FinishReason.ABORT
    rig.engine.grammar_compiled("replica-0", A)
    rig.engine.grammar_refused("replica-0", A, InvalidArgument("late"))
    assert rig.run() == []
    assert rig.engine.num_waiting == 0


def test_the_next_replica_compiles_after_a_loss() -> None:
    """Another replica is asked, and a request that loses its only replica waits for its grammar again."""
    rig = make_rig()
    record_asked(rig)
    sink = rig.submit(constrained("a"))
    rig.engine.detach("replica-0", Loss.DIED)
    again: list[Grammar] = []
    scheduler = second_replica(rig, again.append)
    assert again == [A]
    rig.engine.grammar_compiled("replica-1", A)
    assert scheduler.num_running == 1
    rig.engine.detach("replica-1", Loss.DIED)
    request = rig.engine.find("a")
    assert request is not None
    assert request.state is RequestState.WAITING_FOR_FSM
    rig.start()
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)


def test_a_request_runs_only_where_its_grammar_is() -> None:
    """A free replica that still compiles the grammar does not get the request."""
    rig = make_rig()
    record_asked(rig)
    other = second_replica(rig, lambda _: None)
    rig.submit(constrained("a"))
    rig.engine.grammar_compiled("replica-0", A)
    assert (rig.scheduler.num_running, other.num_running) == (1, 0)


def test_an_evicted_grammar_is_compiled_again() -> None:
    """The admission fails with a retryable error, and the request waits for its grammar again."""
    rig = make_rig()
    grammars = record_asked(rig)
    sink = rig.submit(constrained("a"))
    rig.engine.grammar_compiled("replica-0", A)
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, outputs=(SlotOutput(0, (), error=Unavailable("evicted")),)))
    assert grammars == [A, A]
    assert rig.engine.num_waiting == 1
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)
    rig.scheduler.kv.check_integrity()


def evict(rig: Rig) -> None:
    """Compiles the grammar, and refuses the admission for want of it."""
    rig.engine.grammar_compiled("replica-0", A)
    plan = rig.scheduler.next_plan()
    assert plan is not None
    (admission,) = plan.admit
    refusal = SlotOutput(admission.slot, (), error=Unavailable("evicted"))
    rig.scheduler.update(StepResult(plan.step, outputs=(refusal,)))


def test_a_grammar_that_is_evicted_each_time_fails_its_request() -> None:
    """A worker that compiles it and never has it keeps nothing busy for ever."""
    rig = make_rig()
    grammars = record_asked(rig)
    sink = rig.submit(constrained("a"))
    for _ in range(MOST_GRAMMAR_LOSSES - 1):
        evict(rig)
    assert not sink.events
    evict(rig)
    assert isinstance(sink.events[-1].error, Overloaded)
    assert grammars == [A] * MOST_GRAMMAR_LOSSES
    assert not rig.engine.grammars._entries


def test_a_token_forgives_lost_grammars() -> None:
    """The evictions before it do not count."""
    rig = make_rig()
    record_asked(rig)
    sink = rig.submit(constrained("a"))
    request = rig.engine.find("a")
    assert request is not None
    for num_tokens in (1, 2):
        for _ in range(MOST_GRAMMAR_LOSSES - 1):
            evict(rig)
        rig.engine.grammar_compiled("replica-0", A)
        while len(sink.tokens) < num_tokens:
            rig.step()
        rig.scheduler._slots.preempt(request, "memory")
    assert len(sink.tokens) == 2
    assert sink.events[-1].error is None


@pytest.mark.parametrize("models_own", [False, True])
def test_a_finished_grammar_overrules_min_tokens_for_end_tokens_only(models_own: bool) -> None:
    """A model's end token ends the sequence before min_tokens; a client's stop token does not."""
    whole = expected_tokens((5, 6, 7), 8)
    rig = make_rig()
    model = rig.engine.model
    assert isinstance(model, ModelLimits)
    if models_own:
        rig.engine.model = replace(model, eos_token_ids=frozenset({whole[3]}))
    record_asked(rig)
    sampling = make_sampling(stop_token_ids=[] if models_own else [whole[3]], min_tokens=6)
    sink = rig.submit(make_submission(sampling=with_grammar(sampling, A)))
    rig.engine.grammar_compiled("replica-0", A)
    rig.run()
    assert sink.tokens == (whole[:4] if models_own else whole)
    assert sink.events[-1].finish_reason is (FinishReason.STOP if models_own else FinishReason.LENGTH)


@pytest.mark.parametrize("jump", [1, 2, 5, 11])
@pytest.mark.parametrize("cache_generated", [False, True])
@pytest.mark.parametrize("lease_steps", [1, 4])
def test_forced_tokens_are_prefilled(jump: int, cache_generated: bool, lease_steps: int) -> None:
    """The output equals that of single steps, the KV is correct, and fewer steps run."""
    rig = make_rig(cache_generated=cache_generated, lease_steps=lease_steps)
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
    assert not rig.scheduler._decoding
    rig.scheduler.kv.check_integrity()


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


def test_requests_with_forced_tokens_survive_preemption_and_loss() -> None:
    """Outputs stay exact with too little memory and a replica that is lost midway."""
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


def test_suspending_the_engine_fails_requests_that_wait_for_grammars() -> None:
    """They fail like all waiting requests."""
    rig = make_rig()
    record_asked(rig)
    sink = rig.submit(constrained("a"))
    assert rig.engine.suspend(Unavailable("no worker")) == 1
    assert isinstance(sink.events[-1].error, Unavailable)
