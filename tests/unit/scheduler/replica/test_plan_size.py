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
    (plan,) = rig.step()
    size = plan_to_proto(plan).admit[0].ByteSize()
    weight = submission.sampling.num_bytes + 4 * 40
    assert size <= weight <= 3 * size + 600


def test_sequences_without_room_in_a_plan_decode_with_the_next_ones() -> None:
    """They keep their order, and need no result that frees memory."""
    rig = roomy(8)
    sink = rig.submit(make_submission(PROMPT, n=8, sampling=with_grammar(make_sampling(), HEAVY)))
    rig.engine.grammar_compiled("replica-0", HEAVY)
    plans = rig.run()
    assert admissions(plans) == [1, 3, 3, 1]
    for sequence in range(8):
        assert sink.tokens_of(sequence) == expected_tokens(PROMPT, 8, sequence)


def test_a_plan_admits_one_request_of_any_size() -> None:
    """Otherwise a large request would never run."""
    rig = roomy()
    grammar = make_grammar("x" * (MAX_ADMITTED_BYTES + 1))
    sink = rig.submit(make_submission(sampling=with_grammar(make_sampling(), grammar)))
    rig.engine.grammar_compiled("replica-0", grammar)
    rig.run()
    assert sink.tokens == expected_tokens((5, 6, 7), 8)
