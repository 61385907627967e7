"""The tasks of pooling models over real gRPC: parameters, results and refusals."""

from typing import Any

import pytest

from protos.errors import InvalidArgument, TriptychError, Unsupported
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2
from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_pool_worker import FakePoolWorker, embedding_of
from tests.support.scheduler.running_scheduler import failure, joined, run_scheduler

pytestmark = pytest.mark.contract

SHAPES = Settings(pool_batch_sizes=(1, 4), pool_prompt_lens=(4, 16))
SCORER: dict[str, Any] = {
    "tasks": (pb.POOL_TASK_CLASSIFY, pb.POOL_TASK_SCORE), "info": pb.PoolingInfo(token_types=True, labels=["good"]),
}  # fmt: skip
CUT: dict[str, Any] = {"info": pb.PoolingInfo(matryoshka=True, matryoshka_dimensions=[2, 3])}


def request(prompt: list[int], **fields: Any) -> inference_pb2.PoolRequest:
    return inference_pb2.PoolRequest(prompt_token_ids=prompt, **fields)


@pytest.mark.parametrize("use_activation", [True, False, None])
async def test_parameters_reach_the_worker(use_activation: bool | None) -> None:
    """A pair's score, with the task, the activation and the place of the second text."""
    worker = FakePoolWorker(**SCORER)
    async with run_scheduler(SHAPES) as scheduler, joined(scheduler, worker):
        sent = request([5, 6, 7], task=pb.POOL_TASK_SCORE, second_text_at=2, use_activation=use_activation)
        response = await scheduler.inference.Pool(sent)
        info = await scheduler.inference.GetModel(inference_pb2.GetModelRequest())
    assert list(response.values) == embedding_of([5, 6, 7])
    assert list(response.shape) == [4]
    wanted = pb.PoolingParams(task=pb.POOL_TASK_SCORE, second_text_at=2, use_activation=use_activation)
    assert worker.pooling == [wanted]
    assert list(info.pool_tasks) == [pb.POOL_TASK_CLASSIFY, pb.POOL_TASK_SCORE]
    assert (list(info.pooling.labels), info.pooling.token_types) == (["good"], True)


async def test_results_of_tokens_have_a_row_for_each() -> None:
    """The shape says how the values are arranged."""
    worker = FakePoolWorker(tasks=(pb.POOL_TASK_TOKEN_EMBED,))
    async with run_scheduler(SHAPES) as scheduler, joined(scheduler, worker):
        response = await scheduler.inference.Pool(request([5, 6, 7], task=pb.POOL_TASK_TOKEN_EMBED))
    assert list(response.shape) == [3, 4]
    assert list(response.values) == [*embedding_of([5]), *embedding_of([6]), *embedding_of([7])]


async def test_embeddings_can_be_cut() -> None:
    """The worker cuts them to dimensions that the model was trained for; the full size is always served."""
    async with run_scheduler(SHAPES) as scheduler, joined(scheduler, FakePoolWorker(**CUT)):
        for dimensions, size in ((2, 2), (3, 3), (4, 4), (0, 4)):
            response = await scheduler.inference.Pool(request([5, 6], dimensions=dimensions))
            assert list(response.values) == embedding_of([5, 6])[:size]
            assert list(response.shape) == [size]


@pytest.mark.parametrize(
    ("model", "fields", "kind", "text"),
    [
        (SCORER, {}, Unsupported, "this model serves classify, score, not embed"),
        (SCORER, {"task": pb.POOL_TASK_TOKEN_CLASSIFY}, Unsupported, "serves classify, score, not token_classify"),
        (SCORER, {"task": pb.POOL_TASK_SCORE, "dimensions": 1}, Unsupported, "the results are not embeddings"),
        (SCORER, {"task": pb.POOL_TASK_SCORE, "second_text_at": 3}, InvalidArgument, "but the prompt has 3 tokens"),
        ({}, {"task": pb.POOL_TASK_SCORE}, Unsupported, "this model serves embed, not score"),
        ({}, {"second_text_at": 1}, Unsupported, "does not mark the second text"),
        ({}, {"dimensions": 2}, Unsupported, "embeddings have 4, and it was not trained to be cut"),
        (CUT, {"dimensions": 1}, Unsupported, "can be cut to 2, 3"),
    ],
)  # fmt: skip
async def test_what_the_model_does_not_serve_is_refused(
    model: dict[str, Any], fields: dict[str, Any], kind: type[TriptychError], text: str
) -> None:
    """One line names what was asked and what is served."""
    async with run_scheduler(SHAPES) as scheduler, joined(scheduler, FakePoolWorker(**model)):
        error = await failure(scheduler.inference.Pool(request([5, 6, 7], **fields)))
    assert type(error) is kind
    assert text in error.message
