"""A request travels in full once, so the bytes of requests bound how many a plan admits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from protos.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.step_messages import plan_to_proto
from protos.steps import StepPlan
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.api.messages import submission_from_proto
from scheduler_svc.replica.plans import MAX_ADMITTED_BYTES
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.sampling import Sampling
from tests.support.scheduler.factories import (
    Rig,
    expected_tokens,
    make_grammar,
    make_rig,
    make_sampling,
    make_shapes,
    make_submission,
    with_grammar,
)

VOCABULARY = 262_144
PROMPT = tuple(range(20, 51))
# A plan has room for three of them.
HEAVY = make_grammar("x" * (MAX_ADMITTED_BYTES * 3 // 10))


def roomy(slots: int = 32) -> Rig:
    rig = make_rig(make_shapes(max_num_seqs=slots, buckets=(slots,)), num_blocks=600)
    assert rig.engine.model is not None
    rig.engine.model = replace(rig.engine.model, vocab_size=VOCABULARY)
    return rig


def heavy(request_id: str, prompt: Sequence[int] = (5, 6, 7), *, n: int = 1, priority: int = 0) -> Submission:
    return make_submission(
        prompt,
        request_id=request_id,
        n=n,
        priority=priority,
        sampling=with_grammar(make_sampling(), HEAVY),
    )


def ready(rig: Rig) -> Rig:
    """Marks the grammar as compiled on the replica."""
    rig.submit(heavy("first"))
    rig.engine.grammar_compiled("replica-0", HEAVY)
    return rig


def admissions(plans: Sequence[StepPlan]) -> list[int]:
    return [len(plan.admit) for plan in plans if plan.admit]


def test_many_sequences_with_long_lists_come_in_several_plans() -> None:
    """32 sequences with a megabyte of parameters each: no message is too long, and all get their tokens."""
    sampling = common_pb2.SamplingParams(
        temperature=1, max_tokens=4, allowed_token_ids=range(VOCABULARY),
        bad_words=[common_pb2.TokenSequence(token_ids=[200_000] * MAX_BAD_WORD_TOKENS)] * MAX_BAD_WORDS,
    )  # fmt: skip
    request = inference_pb2.GenerateRequest(request_id="r", prompt_token_ids=PROMPT, sampling=sampling, n=32)
    rig = roomy()
    sink = rig.submit(submission_from_proto(request))
    plans = rig.run()
    sizes = [plan_to_proto(plan).ByteSize() for plan in plans if plan.admit]
    assert sum(sizes) > 1.5 * MAX_MESSAGE_BYTES
    assert max(sizes) < MAX_MESSAGE_BYTES
    assert sum(admissions(plans)) == 32
    for sequence in range(32):
        assert sink.tokens_of(sequence) == expected_tokens(PROMPT, 4, sequence)


def test_sequences_of_a_request_share_one_object_of_parameters() -> None:
    """Only the first, which asks for prompt log-probabilities, has its own; plans translate each once."""
    rig = make_rig()
    rig.submit(make_submission(n=4, sampling=make_sampling(prompt_logprobs=0)))
    admitted = [admission for plan in rig.run() for admission in plan.admit]
    assert admitted[0].sampling.HasField("prompt_logprobs")
    assert len({id(admission.sampling) for admission in admitted[1:]}) == 1
    assert not admitted[1].sampling.HasField("prompt_logprobs")
    sent = plan_to_proto(StepPlan(1, None, admit=tuple(admitted))).admit
    assert [one.sampling.HasField("prompt_logprobs") for one in sent] == [True, False, False, False]


@pytest.mark.parametrize(
    "sampling",
    [
        make_sampling(),
        make_sampling(allowed_token_ids=tuple(range(150_000, 151_000))),
        make_sampling(bad_words=((200_000,),) * 1000),
        make_sampling(bad_words=(tuple(range(200_000, 200_256)),) * 30),
        make_sampling(logit_bias=dict.fromkeys(range(200_000, 201_000), 0.5)),
        make_sampling(stop_token_ids=range(200_000, 201_000), seed=2**63 - 1),
        with_grammar(make_sampling(), make_grammar("é" * 5000)),
    ],
)  # fmt: skip
def test_the_size_estimate_covers_the_bytes_on_the_wire(sampling: Sampling) -> None:
    """It is not many times as much."""
    rig = roomy()
    submission = make_submission(range(200_000, 200_040), request_id="r" * 128, sampling=sampling)
    rig.submit(submission)
    rig.engine.grammar_compiled("replica-0", submission.sampling.grammar or HEAVY)
    plan = rig.step()
    assert plan is not None
    size = plan_to_proto(plan).admit[0].ByteSize()
    weight = submission.sampling.num_bytes + 4 * 40
    assert size <= weight <= 3 * size + 600


def test_refused_requests_are_admitted_by_the_next_plans() -> None:
    """They keep their order and need no result that frees memory."""
    rig = ready(roomy(8))
    for index in range(7):
        rig.submit(heavy(f"r{index}", (5, 6, 7 + index)))
    plans = rig.run()
    assert admissions(plans)[:3] == [3, 3, 2]
    for index in range(7):
        assert rig.sinks[f"r{index}"].tokens == expected_tokens((5, 6, 7 + index), 8)


def test_a_plan_admits_one_request_of_any_size() -> None:
    """Otherwise a large request would never run."""
    rig = roomy()
    grammar = make_grammar("x" * (MAX_ADMITTED_BYTES + 1))
    sink = rig.submit(make_submission(sampling=with_grammar(make_sampling(), grammar)))
    rig.engine.grammar_compiled("replica-0", grammar)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)


def test_a_request_without_room_in_the_plan_preempts_nothing() -> None:
    """The next plan admits it; only then is a less urgent request preempted."""
    rig = ready(roomy(4))
    rig.submit(make_submission(request_id="plain", priority=5, max_tokens=20))
    for index in range(4):
        rig.submit(heavy(f"r{index}", (5, 6, 7 + index)))
    assert rig.scheduler.stats.preemptions["priority"] == 0
    rig.run()
    assert rig.sinks["plain"].tokens == expected_tokens((5, 6, 7), 20)
    for index in range(4):
        assert rig.sinks[f"r{index}"].tokens == expected_tokens((5, 6, 7 + index), 8)


def test_an_abort_before_the_plan_makes_room_in_it() -> None:
    """A request that is aborted between two steps no longer counts."""
    rig = ready(roomy(8))
    for index in range(3):
        rig.submit(heavy(f"r{index}", (5, 6, 7 + index)))
    assert rig.scheduler.num_running == 3
    rig.engine.abort("r0")
    assert rig.scheduler.num_running == 3
    assert admissions(rig.run()) == [3]
