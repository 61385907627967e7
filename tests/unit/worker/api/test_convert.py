"""Between the wire and the worker's own types."""

from dataclasses import fields

import pytest

from protos.errors import Internal
from protos.triptych.v1 import common_pb2, worker_pb2
from protos.wire import MAX_MESSAGE_BYTES
from worker_svc.api import convert
from worker_svc.execution.worker import Ready
from worker_svc.plans.geometry import Geometry, PoolGeometry, PoolShape
from worker_svc.plans.step_plan import (
    Admission,
    BlockCopy,
    DecodeWork,
    Growth,
    Logprobs,
    Output,
    Plan,
    PoolWork,
    PrefillWork,
    Sampling,
)
from worker_svc.sampling.logprobs import NUM_TOP


def test_a_full_plan_arrives() -> None:
    """Every part of a plan has its counterpart."""
    message = worker_pb2.StepPlan(
        step=7,
        release=[3, 1],
        copies=[worker_pb2.BlockCopy(group_id=1, source_block=5, target_block=6, num_tokens=64)],
        admit=[
            worker_pb2.SlotRequest(
                slot=2, request_id="r", sequence=1, token_ids=[10, 11, 12], num_prompt_tokens=2, num_computed_tokens=1,
                sampling=common_pb2.SamplingParams(temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=2**64 - 1, logprobs=3),
                blocks=[worker_pb2.SlotBlocks(slot=2, group_id=0, block_ids=[8, 9])],
            )
        ],
        grow=[worker_pb2.SlotBlocks(slot=0, group_id=1, block_ids=[4])],
        decode=worker_pb2.Decode(slots=[0, 2], positions=[5, 6], bucket=4),
    )  # fmt: skip
    assert convert.plan_from_proto(message) == Plan(
        step=7,
        release=(3, 1),
        copies=(BlockCopy(1, 5, 6, 64),),
        admit=(
            Admission(
                2, (10, 11, 12), 1, Sampling(0.5, 0.25, 4, 0.125, 2**64 - 1, 3), {0: (8, 9)}, "r", 1, 2
            ),
        ),
        grow=(Growth(0, 1, (4,)),),
        work=DecodeWork((0, 2), (5, 6), 4),
    )


def test_absent_sampling_fields_are_off() -> None:
    """What nobody set filters nothing; a temperature of 0 that was set stays greedy."""
    slots = [
        worker_pb2.SlotRequest(token_ids=[1]),
        worker_pb2.SlotRequest(token_ids=[1], sampling=common_pb2.SamplingParams(temperature=0)),
    ]
    first, second = convert.plan_from_proto(worker_pb2.StepPlan(admit=slots)).admit
    assert first.sampling == Sampling(1.0, 1.0, 0, 0.0, 0, None)
    assert second.sampling.temperature == 0


def test_every_sampling_parameter_arrives() -> None:
    """What the worker says it honours is there, and nothing that it does not say."""
    sampling = common_pb2.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=7, min_tokens=3, stop_token_ids=[5, 6], presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={8: -1.5}, allowed_token_ids=[1, 2],
        bad_words=[common_pb2.TokenSequence(token_ids=[3, 4])], logprobs=50, prompt_logprobs=2,
    )  # fmt: skip
    plan = worker_pb2.StepPlan(admit=[worker_pb2.SlotRequest(token_ids=[1], sampling=sampling)])
    (admission,) = convert.plan_from_proto(plan).admit
    assert admission.sampling == Sampling(
        0.5, 0.25, 4, 0.125, 7, 20, 2, 0.5, -0.5, 1.5, {8: -1.5}, (1, 2), ((3, 4),), 3, (5, 6)
    )
    arrived = {each.name for each in fields(Sampling)} - {"stop_token_ids"}
    assert arrived == set(convert._SAMPLING_FIELDS)
    assert admission.prompt_len == 1


def test_prefill_and_no_work() -> None:
    """The two other forms of a plan."""
    prefill = worker_pb2.Prefill(slot=1, start=128, num_tokens=5, sample=True)
    assert convert.plan_from_proto(worker_pb2.StepPlan(prefill=prefill)).work == PrefillWork(
        1, 128, 5, sample=True
    )
    assert convert.plan_from_proto(worker_pb2.StepPlan(release=[1])).work is None


def test_results_carry_tokens_and_logprobs() -> None:
    """Outputs keep their order and what was asked for."""
    outputs = [Output(4, (9,), (Logprobs(-0.5, 2, (8, 9), (-0.25, -0.5)),)), Output(1, (3,))]
    message = convert.result_to_proto(Plan(11, work=DecodeWork((4, 1), (0, 0), 2)), outputs, 1234)
    assert (message.step, message.last, message.execute_us) == (11, True, 1234)
    assert [(output.slot, list(output.token_ids)) for output in message.outputs] == [(4, [9]), (1, [3])]
    (report,) = message.outputs[0].logprobs
    assert (report.logprob, report.rank) == (-0.5, 2)
    assert list(report.top_token_ids) == [8, 9]
    assert not message.outputs[1].logprobs
    assert not message.HasField("error")


@pytest.mark.parametrize(
    ("work", "outputs"),
    [
        (DecodeWork((4, 1), (0, 0), 2), [Output(4, (9,)), Output(1, (3,))]),
        (PrefillWork(4, 0, 8, sample=True), [Output(4, (9,))]),
    ],
)
def test_the_common_result_is_token_ids_alone(work: PrefillWork | DecodeWork, outputs: list[Output]) -> None:
    """One token for each slot of the work, in its order."""
    message = convert.result_to_proto(Plan(11, work=work), outputs, 1234)
    assert (message.step, message.last, message.execute_us) == (11, True, 1234)
    assert list(message.token_ids) == [output.token_ids[0] for output in outputs]
    assert not message.outputs


@pytest.mark.parametrize(
    ("work", "outputs"),
    [
        (DecodeWork((4, 1), (0, 0), 2), [Output(1, (3,))]),
        (DecodeWork((4, 1), (0, 0), 2), [Output(1, (3,)), Output(4, (9,))]),
        (DecodeWork((4,), (0,), 2), [Output(4, (9, 8))]),
        (DecodeWork((4,), (0,), 2), [Output(4, (), error=Internal("broken"))]),
        (DecodeWork((4,), (0,), 2), [Output(4, (9,), (Logprobs(-0.5, 2),))]),
        (PrefillWork(4, 0, 8, sample=True), [Output(4, (9,), prompt_logprobs=(Logprobs(-0.5, 2),))]),
        (PrefillWork(4, 0, 8, sample=False), []),
        (PrefillWork(4, 0, 8, sample=False), [Output(1, (), error=Internal("broken"))]),
        (None, []),
    ],
)
def test_anything_else_is_said_in_full(work: PrefillWork | DecodeWork | None, outputs: list[Output]) -> None:
    """A slot that is missing, failed, or has more to say needs its own message."""
    message = convert.result_to_proto(Plan(11, work=work), outputs, 1)
    assert not message.token_ids
    assert [output.slot for output in message.outputs] == [output.slot for output in outputs]


def test_the_largest_chunk_fits_into_a_message() -> None:
    """With all that may be said of each of its tokens, of the largest vocabularies."""
    entry = Logprobs(-1e30, 500_000, [500_000] * NUM_TOP, [-1e30] * NUM_TOP)
    output = Output(0, (500_000,), prompt_logprobs=[entry] * 100)
    size = convert.result_to_proto(Plan(1, work=PrefillWork(0, 0, 100, sample=True)), [output], 1).ByteSize()
    assert size / 100 * convert._MAX_CHUNK < MAX_MESSAGE_BYTES


def test_a_slot_can_fail_alone() -> None:
    """Its error stands beside the others' tokens."""
    outputs = [Output(2, (), error=Internal("does not fit")), Output(1, (3,))]
    message = convert.result_to_proto(Plan(5, work=DecodeWork((2, 1), (0, 0), 2)), outputs, 1)
    assert [output.HasField("error") for output in message.outputs] == [True, False]
    error = message.outputs[0].error
    assert (error.code, error.message) == (common_pb2.ERROR_CODE_INTERNAL, "does not fit")
    assert not message.HasField("error")


def test_failures_are_typed() -> None:
    """A failed step has a code and a message, and no outputs."""
    message = convert.failure_to_proto(3, Internal("broken"), 10)
    assert (message.step, message.last, len(message.outputs)) == (3, True, 0)
    assert (message.error.code, message.error.message) == (common_pb2.ERROR_CODE_INTERNAL, "broken")


def test_ready_lists_every_graph() -> None:
    """One prefill graph, one decode graph a bucket."""
    geometry = Geometry(1024, 4, 128, 128, (1, 2, 4), (33, 20))
    ready = convert.ready_to_proto(Ready(geometry, (100, 50), {"load": 1.5})).ready
    assert list(ready.num_blocks) == [33, 20]
    assert list(ready.bytes_per_block) == [100, 50]
    assert [(graph.kind, graph.batch, graph.query_len) for graph in ready.graphs] == [
        (common_pb2.GRAPH_KIND_PREFILL, 1, 128),
        (common_pb2.GRAPH_KIND_DECODE, 1, 1),
        (common_pb2.GRAPH_KIND_DECODE, 2, 1),
        (common_pb2.GRAPH_KIND_DECODE, 4, 1),
    ]
    assert dict(ready.phase_seconds) == {"load": 1.5}


def test_geometry_arrives() -> None:
    """Sizes come as they were sent; no numbers of blocks means as many as the memory allows."""
    request = worker_pb2.ConfigureRequest(
        max_model_len=1000,
        max_num_seqs=4,
        chunk=128,
        block_size=256,
        decode_buckets=[2, 4],
        windows_kept_per_slot=3,
    )
    assert convert.geometry_from_proto(request) == Geometry(
        1000, 4, 128, 256, (2, 4), windows_kept_per_slot=3
    )


def test_only_recommendations_that_are_served_reach_the_gateways() -> None:
    """A model that recommends what is not served, or an "off" of its own, must not have every request refused for it."""
    defaults = convert._served_defaults(
        {"temperature": 0.7, "repetition_penalty": 1.5, "top_k": -1.0, "typical_p": 0.8}
    )
    assert {field.name for field, _ in defaults.ListFields()} == {"temperature", "repetition_penalty"}


def test_pooling_messages_are_converted() -> None:
    """Shapes, work, normalization and results of a pooling model survive the conversion."""
    shape = common_pb2.GraphSignature(kind=common_pb2.GRAPH_KIND_POOL, batch=3, query_len=4)
    request = worker_pb2.ConfigureRequest(max_model_len=4, pool_shapes=[shape])
    geometry = convert.geometry_from_proto(request)
    assert geometry == PoolGeometry((PoolShape(3, 4),))
    assert list(convert.ready_to_proto(Ready(geometry, (), {})).ready.graphs) == [shape]
    slot = worker_pb2.SlotRequest(slot=1, token_ids=[5, 6], pooling=common_pb2.PoolingParams(normalize=False))
    message = worker_pb2.StepPlan(step=3, admit=[slot], pool=worker_pb2.Pool(slots=[1], shape=shape))
    plan = convert.plan_from_proto(message)
    assert plan.work == PoolWork((1,), PoolShape(3, 4))
    assert plan.admit[0].normalize is False
    result = convert.result_to_proto(plan, [Output(1, (), pooled=(0.5, 2.0))], 7)
    assert not result.token_ids
    assert [list(output.pooled) for output in result.outputs] == [[0.5, 2.0]]
