"""``/classify`` and ``/pooling`` over real HTTP and real gRPC, against a fake scheduler."""

import base64
import struct
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import pytest_asyncio

from gateway.pooling.call import PoolCall
from gateway.pooling.schemas import ClassificationList, PoolingList, PoolingRequest
from gateway.text.tokenization import TextWorker
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.documented import check_answer
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.serving import Stack, minilm_folder, stack_over

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

LABELS = ["sad", "calm", "glad"]


def scheduler_of(**fields: Any) -> FakeScheduler:
    return FakeScheduler(minilm_folder(), model="feelings", max_model_len=16, **fields)


OF_TOKENS = scheduler_of(
    pooled_size=2,
    pool_tasks=(pb.POOL_TASK_TOKEN_EMBED,),
    pool_values=lambda request: [value for token in request.prompt_token_ids for value in (token, 0.5)],
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """A classifier with three classes."""
    scheduler = scheduler_of(
        pooled_size=3,
        pool_tasks=(pb.POOL_TASK_CLASSIFY,),
        pooling_info=pb.PoolingInfo(labels=LABELS),
        pool_values=lambda request: (
            [0.25, 0.5, 0.25] if 7 in request.prompt_token_ids else [0.125, 0.25, 0.625]
        ),
    )
    async with stack_over(scheduler) as stack:
        yield stack


async def test_each_input_has_its_likeliest_class(stack: Stack) -> None:
    body = await stack.post("/classify", input=[[5], [7]], use_activation=False)
    check_answer(ClassificationList, body)
    assert body["data"] == [
        {"index": 0, "label": "glad", "probs": [0.125, 0.25, 0.625], "num_classes": 3},
        {"index": 1, "label": "calm", "probs": [0.25, 0.5, 0.25], "num_classes": 3},
    ]
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert {each.task for each in stack.scheduler.pooled} == {pb.POOL_TASK_CLASSIFY}
    assert all(each.HasField("use_activation") and not each.use_activation for each in stack.scheduler.pooled)


async def test_a_classifier_of_several_classes_does_not_score(stack: Stack) -> None:
    _, error = await stack.refusal("/score", text_1="a", text_2="b")
    assert error["message"] == (
        "'feelings' serves classify, not score or embed or token_embed; use /classify"
    )


@pytest.mark.parametrize("task", [None, "classify"])
async def test_results_as_they_are(stack: Stack, task: str | None) -> None:
    body = await stack.post("/pooling", input=[5], task=task)
    check_answer(PoolingList, body)
    assert body["data"] == [{"index": 0, "object": "pooling", "data": [0.125, 0.25, 0.625]}]
    encoded = await stack.post("/pooling", input=[5], task=task, encoding_format="base64")
    assert struct.unpack("<3f", base64.b64decode(encoded["data"][0]["data"])) == (0.125, 0.25, 0.625)


async def test_tokens_have_a_row_each() -> None:
    """A model of tokens answers with a matrix for each text; base64 has its rows one after the other."""
    async with stack_over(OF_TOKENS) as stack:
        body = await stack.post("/pooling", input=[[5, 6, 7], [8]], dimensions=2)
        check_answer(PoolingList, body)
        assert [entry["data"] for entry in body["data"]] == [[[5, 0.5], [6, 0.5], [7, 0.5]], [[8, 0.5]]]
        assert [each.dimensions for each in stack.scheduler.pooled] == [2, 2]
        encoded = await stack.post("/pooling", input=[5, 6], encoding_format="base64")
        assert struct.unpack("<4f", base64.b64decode(encoded["data"][0]["data"])) == (5, 0.5, 6, 0.5)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_a_long_answer_is_encoded_beside_the_event_loop(encoding_format: str) -> None:
    """Row by row, in a thread: other answers go on meanwhile."""
    found: list[tuple[str, int]] = []

    class Values(list[float]):
        """Says which thread reads how many values at once."""

        def __getitem__(self, index: Any) -> Any:
            part = super().__getitem__(index)
            found.append((threading.current_thread().name, len(part)))
            return part

    worker = TextWorker()
    state = SimpleNamespace(context=SimpleNamespace(text_worker=worker))
    call = PoolCall(
        cast("Any", SimpleNamespace(app=SimpleNamespace(state=state))), *cast("Any", (None, None))
    )
    response = SimpleNamespace(shape=[400, 256], values=Values([0.5] * 400 * 256))
    body = PoolingRequest.model_validate({"input": "a", "encoding_format": encoding_format})
    (encoded,) = await call.encoded(cast("Any", [response]), body)
    worker.close()
    assert {name.partition("_")[0] for name, _ in found} == {"text"}
    if encoding_format == "float":
        assert orjson.loads(orjson.dumps(encoded)) == [[0.5] * 256] * 400
        assert {count for _, count in found} == {256}
    else:
        assert base64.b64decode(encoded) == struct.pack("<f", 0.5) * 400 * 256
        assert max(count for _, count in found) <= 65536


async def test_the_values_of_an_answer_are_bounded() -> None:
    """A task of tokens has a vector for each: the refusal counts them before anything is computed."""
    async with stack_over(OF_TOKENS, max_pooled_values=20) as stack:
        await stack.post("/pooling", input=[[5] * 6, [6] * 4])
        stack.scheduler.reset()
        status, error = await stack.refusal("/pooling", input=[[5] * 6, [6] * 5])
        assert (status, stack.scheduler.pooled) == (400, [])
        assert (
            "would have 22 values; send fewer or shorter texts at once, 20 values at most" in error["message"]
        )


async def test_fields_that_would_change_the_values_are_refused_by_name(stack: Stack) -> None:
    for path, field in (("/pooling", "activation"), ("/classify", "normalize"), ("/pooling", "softmax")):
        status, error = await stack.refusal(path, **{"input": "a", field: False})
        assert (status, error["message"]) == (400, f"{field}=false is not supported: send 'use_activation'")
