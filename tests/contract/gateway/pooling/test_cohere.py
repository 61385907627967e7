"""``/v2/embed`` with Cohere's interface, over real HTTP and real gRPC, against a fake scheduler."""

import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from gateway.routes.pooling.answers import CohereEmbedAnswer
from protos.errors import Unsupported
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import Stack, minilm_folder, running_gateway

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

URL = "/v2/embed"
SIGNS = [0.5, -0.5, 0.0, -1.0, 1.0, 1.0, -0.25, 2.0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """An embedding model with prompts for queries and documents."""
    scheduler = FakeScheduler(
        minilm_folder(),
        model="minilm",
        max_model_len=12,
        pooled_size=16,
        pool_tasks=(pb.POOL_TASK_EMBED,),
        pool_values=lambda request: [*SIGNS, *[-0.5] * (request.dimensions - 8 if request.dimensions else 8)],
    )
    async with (
        serving(scheduler) as server,
        running_gateway(server.port, max_inputs=10) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        yield Stack(scheduler, gateway, http)


async def post(stack: Stack, **body: Any) -> Any:
    response = await stack.http.post(URL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def tokens(text: str) -> list[int]:
    found = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    found.no_padding()
    found.no_truncation()
    return list(found.encode(text).ids)


async def test_every_type_is_of_the_same_embedding(stack: Stack) -> None:
    """Each type has its own list, in the order of the texts; signs are packed as Cohere packs them."""
    types = ["float", "binary", "ubinary", "base64"]
    body = await post(
        stack, model="minilm", texts=["a", "b c"], input_type="search_query", embedding_types=types
    )
    CohereEmbedAnswer.model_validate(body)
    values = [*SIGNS, *[-0.5] * 8]
    assert body["embeddings"]["float"] == [values] * 2
    assert body["embeddings"]["ubinary"] == [[0b10101101, 0]] * 2
    assert body["embeddings"]["binary"] == [[0b10101101 - 128, -128]] * 2
    assert struct.unpack("<16f", base64.b64decode(body["embeddings"]["base64"][1])) == tuple(values)
    count = len(tokens("ask: a")) + len(tokens("ask: b c"))
    assert body["texts"] == ["a", "b c"]
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": count},
        "tokens": {"input_tokens": count},
    }
    plain = await post(stack, texts=["a"], output_dimension=10)
    CohereEmbedAnswer.model_validate(plain)
    assert plain["embeddings"].keys() == {"float"}
    assert stack.scheduler.pooled[-1].dimensions == 10


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"input_type": "search_query"}, tokens("ask: one two three")),
        ({"input_type": "search_document"}, tokens("tell: one two three")),
        ({"input_type": "query", "max_tokens": 5}, tokens("ask: one")),
        ({"input_type": "query", "max_tokens": 500}, tokens("ask: one two three")),
        ({"input_type": "query", "max_tokens": 5, "truncate": "START"}, [101, *tokens("one two three")[1:]]),
    ],
)
async def test_texts_have_prompts_and_are_truncated(
    stack: Stack, fields: dict[str, Any], kept: list[int]
) -> None:
    """A prompt is found by its own name or by Cohere's; special tokens stay."""
    await post(stack, texts=["one two three"], **fields)
    assert list(stack.scheduler.pooled[-1].prompt_token_ids) == kept


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"texts": []}, "texts", "at least 1 item"),
        ({"texts": [""]}, "texts[0]", "at least 1 character"),
        ({"texts": ["a"] * 11}, "texts", "send at most 10"),
        ({"images": ["data:"]}, "images", "models read text alone"),
        ({"input_type": "image"}, "input_type", "one of 'query', 'document', search_query or search_document"),
        ({"output_dimension": 10, "embedding_types": ["binary"]}, "embedding_types", "embeddings have 10"),
        ({"embedding_types": ["int8"]}, "embedding_types[0]", "'float', 'binary', 'ubinary' or 'base64'"),
        ({"max_tokens": 3, "truncate": "NONE", "texts": ["one two"]}, "max_tokens", "but a text has 6 tokens"),
        ({"truncate": "NONE", "texts": ["one " * 20]}, "texts", "fits none of the shapes"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "send 'max_tokens'"),
    ],
)  # fmt: skip
async def test_an_invalid_request_is_refused(
    stack: Stack, fields: dict[str, Any], param: str, text: str
) -> None:
    """The error names Cohere's parameter and what to change; nothing reaches the scheduler."""
    response = await stack.http.post(URL, json={"texts": ["a"], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"]
    assert stack.scheduler.pooled == []


async def test_the_schedulers_refusal_names_coheres_parameter(stack: Stack) -> None:
    """`dimensions` is called output_dimension here."""
    stack.scheduler.refuse_pool = lambda _: Unsupported("cannot be cut", param="dimensions")
    response = await stack.http.post(URL, json={"texts": ["a"], "output_dimension": 9})
    assert response.json()["error"]["param"] == "output_dimension"
