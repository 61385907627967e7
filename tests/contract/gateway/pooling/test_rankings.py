"""The other paths and shapes of scores and rankings: vLLM's, Jina's and Cohere's; and late interaction."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.pooling.schemas import CohereRerankAnswer, RerankAnswer, ScoreList
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.documented import check_answer
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.serving import Stack, minilm_folder, stack_over, tokenizer_of

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

DOCUMENTS = ["a cat", "eight million people live here", "two people"]
SIZE = 4


def vectors(token_ids: list[int]) -> list[list[float]]:
    """Returns a vector for each token."""
    return [[float(token * place % 17 - 8) / 8 for place in range(1, SIZE + 1)] for token in token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """A model with a vector for each token, as ColBERT's are."""
    scheduler = FakeScheduler(
        minilm_folder(),
        model="colbert",
        pooled_size=SIZE,
        pool_tasks=(pb.POOL_TASK_TOKEN_EMBED,),
        pool_values=lambda request: [
            value for vector in vectors(list(request.prompt_token_ids)) for value in vector
        ],
    )
    async with stack_over(scheduler, max_inputs=250) as stack:
        yield stack


def tokens(text: str) -> list[int]:
    return list(tokenizer_of(minilm_folder()).encode(text).ids)


def max_sim(query: str, document: str) -> float:
    """Returns the score of a pair, computed one product after the other."""
    others = vectors(tokens(document))
    return sum(
        max(sum(a * b for a, b in zip(one, other, strict=True)) for other in others)
        for one in vectors(tokens(query))
    )


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_late_interaction_scores_by_max_sim(stack: Stack, path: str) -> None:
    """One query has its vectors compared with those of each document; several, with one each."""
    body = await stack.post(path, queries="people", items=DOCUMENTS)
    check_answer(ScoreList, body)
    expected = [max_sim("ask: people", f"tell: {each}") for each in DOCUMENTS]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(expected, abs=1e-5)
    sent = stack.scheduler.pooled
    assert [each.use_activation for each in sent] == [True] * 4
    assert {each.task for each in sent} == {pb.POOL_TASK_TOKEN_EMBED}
    stack.scheduler.reset()
    both = await stack.post(path, data_1=["cat", "two"], data_2=DOCUMENTS[:2], use_activation=False)
    pairs = zip(["cat", "two"], DOCUMENTS[:2], strict=True)
    expected = [max_sim(f"ask: {one}", f"tell: {two}") for one, two in pairs]
    assert [entry["score"] for entry in both["data"]] == pytest.approx(expected, abs=1e-5)
    assert [each.use_activation for each in stack.scheduler.pooled] == [False] * 4


async def test_all_paths_rank_alike(stack: Stack) -> None:
    """Jina's path and vLLM's give one answer; Cohere's adds what its clients read."""
    asked = {"query": "people", "documents": DOCUMENTS, "top_n": 2}
    plain, jina, cohere = [
        await stack.post(path, **asked) for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    check_answer(RerankAnswer, jina)
    check_answer(CohereRerankAnswer, cohere)
    scores = [max_sim("ask: people", f"tell: {each}") for each in DOCUMENTS]
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [(one["index"], one["document"]["text"]) for one in plain["results"]] == [
        (index, DOCUMENTS[index]) for index in best
    ]
    assert plain["results"] == jina["results"] == cohere["results"]
    assert plain["usage"] == cohere["usage"]
    assert cohere["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": plain["usage"]["prompt_tokens"]},
    }
    many = await stack.post("/v2/rerank", query="a", documents=["b"] * 201, return_documents=False)
    assert many["meta"]["billed_units"] == {"search_units": 3}
    assert many["results"][0].keys() == {"index", "relevance_score"}


async def test_documents_may_be_objects_as_in_coheres_client(stack: Stack) -> None:
    """Their texts count; other fields, and options without effect, are tolerated."""
    objects = [{"text": each, "id": str(index)} for index, each in enumerate(DOCUMENTS)]
    habits = {"rank_fields": ["text"], "max_chunks_per_doc": 10, "model": "colbert"}
    asked = await stack.post("/v2/rerank", query="people", documents=objects, **habits)
    assert asked["results"] == (await stack.post("/rerank", query="people", documents=DOCUMENTS))["results"]


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"documents": [{"title": "a"}]}, "documents", "must be a string or a list of strings"),
        ({"documents": ["a"], "rank_fields": ["title"]}, "rank_fields", "is not supported: send the text"),
        ({"documents": ["a"], "instruction": "b"}, "instruction", "reads no pairs"),
    ],
)
async def test_options_that_would_change_scores_are_refused(
    stack: Stack, body: dict[str, Any], param: str, text: str
) -> None:
    """By name, on every path."""
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, error = await stack.refusal(path, query="q", **body)
        assert (status, error["param"]) == (400, param)
        assert text in error["message"]
