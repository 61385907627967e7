"""``/classify`` and ``/pooling`` over real HTTP and real gRPC, against a fake scheduler."""

import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.schemas.answers import ClassificationList, PoolingList
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import Stack, minilm_folder, running_gateway

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

LABELS = ["sad", "calm", "glad"]


async def stack_of(**fields: Any) -> AsyncIterator[Stack]:
    scheduler = FakeScheduler(minilm_folder(), model="feelings", max_model_len=16, **fields)
    async with (
        serving(scheduler) as server,
        running_gateway(server.port) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        yield Stack(scheduler, gateway, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """A classifier with three classes."""
    async for stack in stack_of(
        pooled_size=3,
        pool_tasks=(pb.POOL_TASK_CLASSIFY,),
        pooling_info=pb.PoolingInfo(labels=LABELS),
        pool_values=lambda request: (
            [0.25, 0.5, 0.25] if 7 in request.prompt_token_ids else [0.125, 0.25, 0.625]
        ),
    ):
        yield stack


async def post(stack: Stack, path: str, **body: Any) -> Any:
    response = await stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_each_input_has_its_likeliest_class(stack: Stack) -> None:
    """With all probabilities, in the order of the labels."""
    body = await post(stack, "/classify", input=[[5], [7]], use_activation=False)
    ClassificationList.model_validate(body)
    assert body["data"] == [
        {"index": 0, "label": "glad", "probs": [0.125, 0.25, 0.625], "num_classes": 3},
        {"index": 1, "label": "calm", "probs": [0.25, 0.5, 0.25], "num_classes": 3},
    ]
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert {each.task for each in stack.scheduler.pooled} == {pb.POOL_TASK_CLASSIFY}
    assert all(each.HasField("use_activation") and not each.use_activation for each in stack.scheduler.pooled)


async def test_a_classifier_of_several_classes_does_not_score(stack: Stack) -> None:
    """The refusal names what it serves and the route for it."""
    response = await stack.http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert response.json()["error"]["message"] == (
        "'feelings' serves classify, not score or embed; use /classify"
    )


@pytest.mark.parametrize("task", [None, "classify"])
async def test_results_as_they_are(stack: Stack, task: str | None) -> None:
    """The model's own task is the default."""
    body = await post(stack, "/pooling", input=[5], task=task)
    PoolingList.model_validate(body)
    assert body["data"] == [{"index": 0, "object": "pooling", "data": [0.125, 0.25, 0.625]}]
    encoded = await post(stack, "/pooling", input=[5], task=task, encoding_format="base64")
    assert struct.unpack("<3f", base64.b64decode(encoded["data"][0]["data"])) == (0.125, 0.25, 0.625)


async def test_tokens_have_a_row_each() -> None:
    """A model of tokens answers with a matrix for each text; base64 has its rows one after the other."""
    async for stack in stack_of(
        pooled_size=2,
        pool_tasks=(pb.POOL_TASK_TOKEN_EMBED,),
        pool_values=lambda request: [value for token in request.prompt_token_ids for value in (token, 0.5)],
    ):
        body = await post(stack, "/pooling", input=[[5, 6, 7], [8]], dimensions=2)
        PoolingList.model_validate(body)
        assert [entry["data"] for entry in body["data"]] == [[[5, 0.5], [6, 0.5], [7, 0.5]], [[8, 0.5]]]
        assert [each.dimensions for each in stack.scheduler.pooled] == [2, 2]
        encoded = await post(stack, "/pooling", input=[5, 6], encoding_format="base64")
        assert struct.unpack("<4f", base64.b64decode(encoded["data"][0]["data"])) == (5, 0.5, 6, 0.5)
