"""Step plans and results on the wire: what one side writes, the other side reads."""

import pytest

from protos.errors import Internal
from protos.limits import MAX_LOGPROBS
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.step_messages import plan_from_proto, plan_to_proto, result_from_proto, result_to_proto
from protos.steps import (
    Admission,
    BlockCopy,
    Decode,
    Growth,
    Pool,
    PoolShape,
    Prefill,
    SlotOutput,
    StepPlan,
    StepResult,
    Work,
)
from protos.triptych.v1 import common_pb2, worker_pb2
from tests.support.sampling_params import pooling_params, sampling_params, token_logprobs

# Largest chunk that a worker announces.
MAX_CHUNK = 65536


@pytest.mark.parametrize(
    "work",
    [
        None,
        Prefill(2, 128, 5, sample=True),
        Decode((0, 2), 4, steps=7, steps_per_result=3),
        Pool((1,), PoolShape(prompt_len=8, batch=2)),
        Pool((1, 4), PoolShape(prompt_len=8, batch=2, packed=True)),
    ],
)
def test_a_plan_survives_the_wire(work: Work | None) -> None:
    plan = StepPlan(
        3,
        work,
        release=(1,),
        copies=(BlockCopy(1, 5, 6, 64),),
        admit=(
            Admission(2, (10, 11, 12), 1, sampling_params(top_k=4, bad_words=((6, 7),)), {0: (8, 9), 1: (3,)}, "r", 1, 2, adapter_id=77),
            Admission(4, (5,), 0, sampling_params(), {}, "p", num_prompt_tokens=1, pooling=pooling_params(use_activation=False)),
        ),
        grow=(Growth(0, 1, (4,)),),
        interrupts=True,
    )  # fmt: skip
    message = worker_pb2.StepPlan.FromString(plan_to_proto(plan).SerializeToString())
    assert plan_from_proto(message) == plan


def test_a_result_survives_the_wire() -> None:
    outputs = [
        SlotOutput(0, (5, 6), [token_logprobs(-0.5, 1, (5, -0.5))]),
        SlotOutput(2, prompt_logprobs=[token_logprobs(-1.5, 9)]),
        SlotOutput(1, error=Internal("broken")),
        SlotOutput(3, pooled=(0.5, -2.0)),
    ]
    result = StepResult(3, outputs=outputs, last=False, num_steps=2, execute_us=70)
    sent = result_to_proto(StepPlan(3), result)
    read = result_from_proto(worker_pb2.StepResult.FromString(sent.SerializeToString()))
    assert (read.step, read.last, read.num_steps, read.execute_us) == (3, False, 2, 70)
    assert [(one.slot, list(one.token_ids), list(one.pooled)) for one in read.outputs] == [
        (0, [5, 6], []), (2, [], []), (1, [], []), (3, [], [0.5, -2.0]),
    ]  # fmt: skip
    assert list(read.outputs[0].logprobs) == outputs[0].logprobs
    assert list(read.outputs[1].prompt_logprobs) == outputs[1].prompt_logprobs
    assert isinstance(read.outputs[2].error, Internal)


def test_a_decode_plan_names_slots_and_new_blocks_only() -> None:
    """A step in steady state sends neither token ids nor block tables."""
    plan = StepPlan(3, Decode((0, 2), 4), release=(1,), grow=(Growth(2, 0, (8,)),))
    assert plan_to_proto(plan).ByteSize() < 40


@pytest.mark.parametrize(
    ("work", "outputs"),
    [
        (Decode((4, 1), 2), [SlotOutput(4, (9,)), SlotOutput(1, (3,))]),
        (Prefill(4, 0, 8, sample=True), [SlotOutput(4, (9,))]),
    ],
)
def test_one_token_per_slot_takes_the_compact_form(work: Prefill | Decode, outputs: list[SlotOutput]) -> None:
    """The message holds the tokens in the order of the work's slots, and nothing else."""
    message = result_to_proto(StepPlan(11, work=work), StepResult(11, outputs=outputs, execute_us=1234))
    assert (message.step, message.last, message.execute_us) == (11, True, 1234)
    assert list(message.token_ids) == [output.token_ids[0] for output in outputs]
    assert not message.outputs


@pytest.mark.parametrize(
    ("work", "outputs"),
    [
        (Decode((4, 1), 2), [SlotOutput(1, (3,))]),
        (Decode((4, 1), 2), [SlotOutput(1, (3,)), SlotOutput(4, (9,))]),
        (Decode((4,), 2), [SlotOutput(4, (9, 8))]),
        (Decode((4,), 2), [SlotOutput(4, (), error=Internal("broken"))]),
        (Decode((4,), 2), [SlotOutput(4, (9,), (token_logprobs(-0.5, 2),))]),
        (Prefill(4, 0, 8, sample=True), [SlotOutput(4, (9,), prompt_logprobs=(token_logprobs(-0.5, 2),))]),
        (Prefill(4, 0, 8, sample=False), []),
        (Prefill(4, 0, 8, sample=False), [SlotOutput(1, (), error=Internal("broken"))]),
        (None, []),
    ],
)
def test_other_results_take_the_full_form(work: Prefill | Decode | None, outputs: list[SlotOutput]) -> None:
    """A missing slot, a failed slot, or more than one token needs an entry per slot."""
    message = result_to_proto(StepPlan(11, work=work), StepResult(11, outputs=outputs, execute_us=1))
    assert not message.token_ids
    assert [output.slot for output in message.outputs] == [output.slot for output in outputs]


def test_the_largest_chunk_fits_into_a_message() -> None:
    """Even with 20 log-probabilities for each of its tokens from a large vocabulary."""
    entry = token_logprobs(-1e30, 500_000, *[(500_000, -1e30)] * MAX_LOGPROBS)
    output = SlotOutput(0, (500_000,), prompt_logprobs=[entry] * 100)
    size = result_to_proto(
        StepPlan(1, work=Prefill(0, 0, 100, sample=True)), StepResult(1, outputs=[output], execute_us=1)
    ).ByteSize()
    assert size / 100 * MAX_CHUNK < MAX_MESSAGE_BYTES


def test_failures_are_typed() -> None:
    """A failed step has a code and a message, and no outputs."""
    message = result_to_proto(StepPlan(3), StepResult(3, error=Internal("broken")))
    assert (message.step, message.last, len(message.outputs)) == (3, True, 0)
    assert (message.error.code, message.error.message) == (common_pb2.ERROR_CODE_INTERNAL, "broken")
