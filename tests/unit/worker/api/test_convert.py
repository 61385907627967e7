"""Conversion between messages and the worker's own types."""

from types import SimpleNamespace
from typing import Any

import pytest

from protos.step_messages import plan_from_proto, result_to_proto
from protos.steps import Pool, PoolShape, SlotOutput, StepResult
from protos.triptych.v1 import common_pb2, worker_pb2
from worker_svc.api import convert
from worker_svc.execution.worker import Ready
from worker_svc.shapes import PoolShapeConfig, ShapeConfig


def test_ready_lists_every_graph() -> None:
    shapes = ShapeConfig(1024, 4, 128, 128, (1, 2, 4), (33, 20))
    configured = Ready(shapes, (100, 50), {"load": 1.5}, "ab12", "runtime", "exact")
    ready = convert.ready_to_proto(configured, 60.0).ready
    assert ready.block_copies == worker_pb2.BLOCK_COPIES_RUNTIME
    assert ready.chunk_starts == worker_pb2.CHUNK_STARTS_EXACT
    assert ready.weights_digest == "ab12"
    assert list(ready.num_blocks) == [33, 20]
    assert list(ready.bytes_per_block) == [100, 50]
    assert [(graph.kind, graph.batch, graph.query_len) for graph in ready.graphs] == [
        (common_pb2.GRAPH_KIND_PREFILL, 1, 128),
        (common_pb2.GRAPH_KIND_DECODE, 1, 1),
        (common_pb2.GRAPH_KIND_DECODE, 2, 1),
        (common_pb2.GRAPH_KIND_DECODE, 4, 1),
    ]
    assert dict(ready.phase_seconds) == {"load": 1.5}


def test_shapes_are_converted() -> None:
    """Sizes are copied; no number of blocks means as many as the memory allows."""
    request = worker_pb2.ConfigureRequest(
        max_model_len=1000,
        max_num_seqs=4,
        chunk=128,
        block_size=256,
        decode_buckets=[2, 4],
        windows_kept_per_slot=3,
        prefill_buckets=[64, 128],
    )
    assert convert.shapes_from_proto(request) == ShapeConfig(
        1000, 4, 128, 256, (2, 4), windows_kept_per_slot=3, prefill_buckets=(64, 128)
    )


@pytest.mark.parametrize(
    ("model", "ranks", "chunk"),
    [
        ("ibm-granite/granite-3.3-8b-instruct", 4, 1024),
        ("ibm-granite/granite-3.3-8b-instruct", 2, 128),
        ("ibm-granite/granite-3.3-2b-instruct", 4, 128),
    ],
)
def test_a_model_s_chunk_depends_on_its_ranks(model: str, ranks: int, chunk: int) -> None:
    """Data names the model and the number of ranks; the device decides about all others."""
    device = SimpleNamespace(default_chunk=128)
    worker: Any = SimpleNamespace(layout=SimpleNamespace(tensor=ranks), device=device)
    assert convert._default_chunk(worker, model) == chunk


def test_a_worker_declares_the_parameters_that_it_applies() -> None:
    """Grammars need a compiler, a pooling model samples nothing, and stopping is the scheduler's work."""
    sampled = {
        "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "thinking_budget",
    }  # fmt: skip
    generating, pooling = SimpleNamespace(pooling=None), SimpleNamespace(pooling=object())
    worker: Any = SimpleNamespace(description=generating, grammars=None)
    assert set(convert._sampling_fields(worker)) == sampled
    worker.grammars = object()
    assert set(convert._sampling_fields(worker)) == {*sampled, "structured_output"}
    worker.description = pooling
    assert convert._sampling_fields(worker) == ()


def test_negative_recommendations_are_dropped() -> None:
    """Some authors write a `top_k` of -1 for "off"; gateways would add it to every request."""
    defaults = convert._default_sampling({"temperature": 0.7, "repetition_penalty": 1.5, "top_k": -1.0})
    assert {field.name for field, _ in defaults.ListFields()} == {"temperature", "repetition_penalty"}


def test_pooling_messages_are_converted() -> None:
    shape = common_pb2.GraphSignature(kind=common_pb2.GRAPH_KIND_POOL, batch=3, query_len=4)
    request = worker_pb2.ConfigureRequest(max_model_len=4, pool_shapes=[shape])
    shapes = convert.shapes_from_proto(request)
    assert shapes == PoolShapeConfig((PoolShape(4, 3),))
    assert list(convert.ready_to_proto(Ready(shapes, (), {}, "", "none"), 0.0).ready.graphs) == [shape]
    slot = worker_pb2.SlotRequest(
        slot=1, token_ids=[5, 6], pooling=common_pb2.PoolingParams(use_activation=False)
    )
    message = worker_pb2.StepPlan(step=3, admit=[slot], pool=worker_pb2.Pool(slots=[1], shape=shape))
    plan = plan_from_proto(message)
    assert plan.work == Pool((1,), PoolShape(4, 3))
    assert plan.admit[0].pooling == common_pb2.PoolingParams(use_activation=False)
    result = result_to_proto(plan, StepResult(3, outputs=[SlotOutput(1, pooled=(0.5, 2.0))]))
    assert not result.token_ids
    assert [list(output.pooled) for output in result.outputs] == [[0.5, 2.0]]
