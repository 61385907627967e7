"""``/v1/embeddings`` over real HTTP and real gRPC, against a fake scheduler."""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import CreateEmbeddingResponse

from gateway.openai.models import ModelCard
from gateway.pooling.schemas import EmbeddingList
from protos.errors import Internal, Overloaded, Unsupported
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.documented import check_answer
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.serving import Stack, running_stack, smollm2_folder, stack_over
from tests.support.waiting import until

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

URL = "/v1/embeddings"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    scheduler = FakeScheduler(smollm2_folder(), model="minilm", max_model_len=64, pooled_size=4)
    async with stack_over(scheduler, max_inputs=100) as stack:
        yield stack


async def test_one_text(stack: Stack) -> None:
    """The answer has OpenAI's shape, and the input has the model's own tokens."""
    body = await stack.post(URL, input="Hello there", model="minilm")
    (request,) = stack.scheduler.pooled
    count = len(request.prompt_token_ids)
    assert body == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [count, request.prompt_token_ids[0], *[pytest.approx(0.1)] * 2]}
        ],
        "model": "minilm",
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }  # fmt: skip
    check_answer(EmbeddingList, body)
    assert request.task == pb.POOL_TASK_EMBED
    assert request.model == "minilm"
    assert not request.HasField("use_activation")


async def test_the_answer_fits_the_clients_type_and_habits_are_tolerated(stack: Stack) -> None:
    """No field is missing or unknown; fields that cannot change the embeddings are accepted."""
    habits = {"cache_salt": "x", "padding": "longest", "request_id": "x", "metadata": {}, "user": "me"}
    plain = await stack.post(URL, input="a")
    CreateEmbeddingResponse.model_validate(plain, strict=True, extra="forbid")
    assert (await stack.post(URL, input="a", **habits))["data"] == plain["data"]


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7], [8, 9, 10]], [[5, 6], [7], [8, 9, 10]]),
        (["Hello", "Hello there"], None),
    ],
)
async def test_every_kind_of_input(stack: Stack, sent: Any, prompts: list[list[int]] | None) -> None:
    body = await stack.post(URL, input=sent)
    if prompts is not None:
        assert sorted(list(request.prompt_token_ids) for request in stack.scheduler.pooled) == sorted(prompts)
        assert [entry["embedding"][:2] for entry in body["data"]] == [[len(p), p[0]] for p in prompts]
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    assert body["usage"]["prompt_tokens"] == sum(entry["embedding"][0] for entry in body["data"])


async def test_base64(stack: Stack) -> None:
    """base64 is float32 in little-endian order, as OpenAI's own client asks for."""
    body = await stack.post(URL, input=[5, 6, 7], encoding_format="base64")
    values = struct.unpack("<4f", base64.b64decode(body["data"][0]["embedding"]))
    assert values == pytest.approx((3, 5, 0.1, 0.1))
    async with AsyncOpenAI(base_url=f"{stack.gateway.base_url}/v1", api_key="unused") as client:
        answer = await client.embeddings.create(model="minilm", input="Hello", dimensions=4)
    assert len(answer.data[0].embedding) == 4


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
async def test_parameters_reach_the_scheduler(stack: Stack, name: str) -> None:
    """Normalization under either name, priority and the header's tenant are passed on."""
    response = await stack.http.post(
        URL, json={"input": "x", name: False, "priority": 3}, headers={"X-Tenant": "acme"}
    )
    assert response.status_code == 200
    (request,) = stack.scheduler.pooled
    assert (request.HasField("use_activation"), request.use_activation) == (True, False)
    assert (request.priority, request.tenant) == (3, "acme")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "input", "'input' is required"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": [1, "a"]}, "input", "must be a string"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "'float', 'base64'"),
        ({"input": "x", "dimensions": 2**40}, "dimensions", "4294967295"),
        ({"input": "x", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "between 1 and the 64"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and the 64"),
        ({"input": "x", "prompt_name": "query"}, "prompt_name", "no prompt called 'query': it has none"),
        ({"input": "x", "prompt_name": "a", "prompt": "b"}, "prompt", "exclude each other"),
        ({"input": [1, 2], "prompt": "b"}, "prompt", "need inputs that are texts"),
        ({"input": [49152]}, "input", "ids end at 49151"),
        ({"input": [[1]] * 101}, "input", "send at most 100"),
        ({"input": [[1], [1] * 65]}, "input", "has 65 tokens and fits none of the shapes 4x64"),
    ],
)
async def test_an_invalid_request_is_refused(
    stack: Stack, body: dict[str, Any], param: str, text: str
) -> None:
    """The error names the parameter and what to change; nothing reaches the scheduler."""
    status, error = await stack.refusal(URL, **body)
    assert (status, error["param"]) == (400, param)
    assert text in error["message"]
    assert stack.scheduler.pooled == []


async def test_inputs_can_be_truncated(stack: Stack) -> None:
    """Texts and token ids keep as many tokens as asked for, from either side; -1 keeps what fits."""
    for sent, kept in (
        ({"truncate_prompt_tokens": 2}, [1, 2]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [69, 70]),
        ({"truncate_prompt_tokens": -1}, list(range(1, 65))),
    ):
        stack.scheduler.reset()
        await stack.post(URL, input=list(range(1, 71)), **sent)
        assert list(stack.scheduler.pooled[0].prompt_token_ids) == kept
    stack.scheduler.reset()
    await stack.post(URL, input="Hello there my friend", truncate_prompt_tokens=2)
    assert len(stack.scheduler.pooled[0].prompt_token_ids) == 2


async def test_dimensions_are_the_schedulers_to_check(stack: Stack) -> None:
    await stack.post(URL, input="x", dimensions=2)
    assert stack.scheduler.pooled[0].dimensions == 2
    stack.scheduler.refuse_pool = lambda _: Unsupported("dimensions=3: cannot be cut", param="dimensions")
    status, error = await stack.refusal(URL, input="x", dimensions=3)
    assert (status, error["param"], error["message"]) == (400, "dimensions", "dimensions=3: cannot be cut")


async def test_one_failure_fails_the_request(stack: Stack) -> None:
    """The request fails with that error, and the other inputs are cancelled."""
    stack.scheduler.refuse_pool = lambda request: (
        Internal("not finite") if 66 in request.prompt_token_ids else None
    )
    status, error = await stack.refusal(URL, input=[[1], [66], [2]])
    assert (status, error["message"]) == (500, "not finite")
    stack.scheduler.refuse_pool = lambda _: Overloaded("full", retry_after_ms=3000)
    response = await stack.http.post(URL, json={"input": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


async def test_a_client_that_disconnects_cancels_its_requests(stack: Stack) -> None:
    stack.scheduler.pool_gate.clear()
    asking = asyncio.create_task(stack.http.post(URL, json={"input": [[1], [2]]}))
    await stack.scheduler.until(lambda: len(stack.scheduler.pooled) == 2)
    assert stack.scheduler.pooling
    asking.cancel()
    await until(lambda: not stack.scheduler.pooling)


async def test_the_wrong_kind_of_model_names_the_right_endpoint(stack: Stack) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
    }
    for path, body in bodies.items():
        response = await stack.http.post(path, json=body)
        assert response.status_code == 400
        assert "use /v1/embeddings" in response.json()["error"]["message"]
    assert (await stack.http.get("/health")).status_code == 200
    (card,) = (await stack.http.get("/v1/models")).json()["data"]
    check_answer(ModelCard, card)
    assert (card["embedding_size"], card["pool_tasks"]) == (4, ["embed"])
    async with running_stack("Paris") as generating:
        status, error = await generating.refusal(URL, input="x")
        (card,) = (await generating.http.get("/v1/models")).json()["data"]
        assert "embedding_size" not in card
    assert (status, error["code"]) == (400, "unsupported_parameter")
    assert "use /v1/chat/completions" in error["message"]
