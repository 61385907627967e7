"""``/score`` and ``/rerank`` in the forms of vLLM, Jina and Cohere, with models of every kind that scores."""

import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from gateway.pooling.schemas import CohereRerankAnswer, RerankAnswer, ScoreList
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2
from tests.support.gateway.documented import check_answer
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.serving import Stack, minilm_folder, running_stack, stack_over, tokenizer_of

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

QUERY, DOCUMENTS = "how many people", ["a cat", "eight million people live here", "two people"]


def score_of(request: inference_pb2.PoolRequest) -> list[float]:
    """Returns a score that grows with the length of the second text."""
    return [float(len(request.prompt_token_ids) - request.second_text_at)]


def scheduler_of(folder: Path, **fields: Any) -> FakeScheduler:
    return FakeScheduler(folder, model="scorer", max_model_len=24, **fields)


SCORER: dict[str, Any] = {
    "pooled_size": 1, "pool_tasks": (pb.POOL_TASK_CLASSIFY, pb.POOL_TASK_SCORE), "pool_values": score_of,
    "pooling_info": pb.PoolingInfo(labels=["relevant"], token_types=True),
}  # fmt: skip
EMBEDDER: dict[str, Any] = {
    "pooled_size": 2,
    "pool_values": lambda request: [math.cos(len(request.prompt_token_ids)), math.sin(len(request.prompt_token_ids))],
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """A cross-encoder with BERT's tokenizer."""
    async with stack_over(scheduler_of(minilm_folder(), **SCORER), max_inputs=10) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder() -> AsyncIterator[Stack]:
    async with stack_over(scheduler_of(minilm_folder(), **EMBEDDER)) as stack:
        yield stack


def pair(first: str, second: str) -> tuple[list[int], int]:
    """Returns what the tokenizer itself makes of a pair."""
    encoding = tokenizer_of(minilm_folder()).encode(first, second)
    return encoding.ids, encoding.type_ids.index(1)


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_one_text_is_scored_with_many(stack: Stack, names: tuple[str, str]) -> None:
    """Each pair is what the tokenizer makes of it, with the place of the second text."""
    body = await stack.post("/score", **{names[0]: QUERY, names[1]: DOCUMENTS})
    check_answer(ScoreList, body)
    pairs = [pair(QUERY, document) for document in DOCUMENTS]
    sent = [(list(each.prompt_token_ids), each.second_text_at) for each in stack.scheduler.pooled]
    assert sorted(sent) == sorted(pairs)
    assert [entry["score"] for entry in body["data"]] == [len(ids) - at for ids, at in pairs]
    assert {each.task for each in stack.scheduler.pooled} == {pb.POOL_TASK_SCORE}
    assert body["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in pairs)


async def test_texts_are_scored_one_by_one(stack: Stack) -> None:
    await stack.post("/score", text_1=["a", "b c"], text_2=["d", "e"], use_activation=False)
    sent = [list(each.prompt_token_ids) for each in stack.scheduler.pooled]
    assert sorted(sent) == sorted([pair("a", "d")[0], pair("b c", "e")[0]])
    assert [each.use_activation for each in stack.scheduler.pooled] == [False, False]


async def test_the_best_documents_come_first(stack: Stack) -> None:
    body = await stack.post(
        "/rerank", query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    )
    check_answer(RerankAnswer, body)
    lengths = [len(pair(QUERY, each)[0]) - pair(QUERY, each)[1] for each in DOCUMENTS]
    expected = [(1, DOCUMENTS[1], lengths[1]), (0, DOCUMENTS[0], lengths[0]), (2, DOCUMENTS[2], lengths[2])]
    found = [(one["index"], one["document"]["text"], one["relevance_score"]) for one in body["results"]]
    assert found == sorted(expected, key=lambda one: -one[2])
    few = await stack.post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert few["results"] == [{"index": 1, "relevance_score": lengths[1]}]
    check_answer(RerankAnswer, few)


async def test_long_pairs_are_truncated_as_the_tokenizer_does(stack: Stack) -> None:
    """The longer text loses tokens first, and special tokens stay. Each text can be limited by itself."""
    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(24)
    long = "one two three four five six seven eight nine ten " * 3
    for first, second in ((long, "a b c d"), ("a b c", long), (long, long)):
        stack.scheduler.reset()
        await stack.post("/score", text_1=first, text_2=second, truncate_prompt_tokens=-1)
        expected = tokenizer.encode(first, second)
        (request,) = stack.scheduler.pooled
        assert list(request.prompt_token_ids) == expected.ids
        assert request.second_text_at == expected.type_ids.index(1)
    stack.scheduler.reset()
    await stack.post("/rerank", query=long, documents=[long], max_tokens_per_query=3, max_tokens_per_doc=5)
    (request,) = stack.scheduler.pooled
    assert list(request.prompt_token_ids) == pair("one two three", "one two three four five")[0]


async def test_an_embedding_model_gives_cosines(embedder: Stack) -> None:
    """Each text is embedded once, with the prompt for queries or for documents in front, at length 1."""
    embedder.scheduler.reset()
    body = await embedder.post("/score", text_1="a", text_2=["b", "c d e"])
    sent = embedder.scheduler.pooled
    assert len(sent) == 3
    assert {each.task for each in sent} == {pb.POOL_TASK_EMBED}
    assert all(each.use_activation and not each.second_text_at for each in sent)
    counts = [len(found.ids) for found in _encoded("ask: a", "tell: b", "tell: c d e")]
    expected = [math.cos(counts[0] - counts[1]), math.cos(counts[0] - counts[2])]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(expected, abs=1e-6)
    ranked = await embedder.post("/rerank", query="a", documents=["b", "c d e"])
    assert [one["relevance_score"] for one in ranked["results"]] == pytest.approx(
        sorted(expected, reverse=True)
    )


async def test_prompts_go_in_front_of_texts(embedder: Stack) -> None:
    """A request names one of the model's prompts, brings its own, or gets the default one."""
    for fields, text in (
        ({"prompt_name": "query"}, "ask: hi"),
        ({"prompt": "Instruct: find\nQuery: "}, "Instruct: find\nQuery: hi"),
        ({"prompt": ""}, "hi"),
        ({}, "tell: hi"),
    ):
        embedder.scheduler.reset()
        await embedder.post("/v1/embeddings", input="hi", **fields)
        assert list(embedder.scheduler.pooled[0].prompt_token_ids) == _encoded(text)[0].ids
    _, error = await embedder.refusal("/v1/embeddings", input="hi", prompt_name="answer")
    assert error["message"] == ("the model has no prompt called 'answer': it has 'query', 'document'")


def _encoded(*texts: str) -> list[Any]:
    return [tokenizer_of(minilm_folder()).encode(text) for text in texts]


LOOPING = (
    "{{ instruction | default('judge') }}: {% for turn in messages %}"
    "{% if turn.role == 'query' %}q {% elif turn.role == 'document' %}d {% endif %}{{ turn.content }} {% endfor %}"
)
# The shape of vLLM's template for Qwen3-Reranker: turns are selected by role, and the task has three sources.
SELECTING = (
    '{{ instruction | default(instruct | default(messages | selectattr("role", "eq", "system") |'
    ' map(attribute="content") | first | default("judge", true), true), true) }}: q '
    '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }} d '
    '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }} '
)


@pytest.mark.parametrize("template", [LOOPING, SELECTING])
async def test_a_template_writes_pairs_with_an_instruction(template: str, tmp_path: Path) -> None:
    """A chat template with the roles "query" and "document" decides what the model reads."""
    for path in minilm_folder().iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    scheduler = scheduler_of(tmp_path, **SCORER | {"pooling_info": pb.PoolingInfo()})
    async with stack_over(scheduler) as stack:
        await stack.post("/score", text_1="one", text_2="two")
        await stack.post("/score", text_1="one", text_2="two", instruction="compare")
        own = {"chat_template_kwargs": {"instruction": "weigh", "mood": "glad"}}
        await stack.post("/v1/rerank", query="one", documents="two", instruction="compare", **own)
        sent = [list(each.prompt_token_ids) for each in scheduler.pooled]
        assert sent == [
            found.ids
            for found in _encoded("judge: q one d two ", "compare: q one d two ", "weigh: q one d two ")
        ]
        assert [each.second_text_at for each in scheduler.pooled] == [0, 0, 0]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/score", {"text_2": "a"}, "text_1", "'text_1' is required"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "at least one text"),
        ("/score", {"text_1": "a", "text_2": [5]}, "text_2", "a string or a list of strings"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "has 2 texts and text_2 3"),
        ("/score", {"text_1": "a", "text_2": ["c"] * 11}, "text_2", "send at most 10"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "no chat template that writes pairs"),
        ("/score", {"text_1": "a " * 30, "text_2": "b"}, "text_2", "fits none of the shapes 4x24 (rows x tokens)"),
        ("/rerank", {"query": "a"}, "documents", "is required"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields", "not supported"),
        ("/v1/embeddings", {"input": "a"}, "model", "serves classify, score, not embed; use /classify or /score"),
        ("/v1/completions", {"prompt": "a"}, "model", "does not generate text; use /classify or /score"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}]}, "messages", "no chat template; send the text as 'input'"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "model", "serves classify, score, not token_embed"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task", "'embed', 'classify'"),
    ],
)  # fmt: skip
async def test_an_invalid_request_is_refused(
    stack: Stack, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    """The error names the parameter and what to change; nothing reaches the scheduler."""
    status, error = await stack.refusal(path, **body)
    assert (status, error["param"]) == (400, param), error
    assert text in error["message"]
    assert stack.scheduler.pooled == []


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("instruction", "x", "reads no pairs"), ("use_activation", True, "are cosines; omit it")],
)
async def test_cosines_take_no_options_of_cross_encoders(
    embedder: Stack, field: str, value: Any, text: str
) -> None:
    status, error = await embedder.refusal("/score", **{"text_1": "a", "text_2": "b", field: value})
    assert (status, error["param"]) == (400, field)
    assert text in error["message"]


async def test_a_generating_model_scores_nothing() -> None:
    async with running_stack("Paris") as generating:
        for path, body in (
            ("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]}),
            ("/classify", {"input": "a"}), ("/pooling", {"input": "a"}),
        ):  # fmt: skip
            status, error = await generating.refusal(path, **body)
            assert status == 400, path
            assert "use /v1/chat/completions" in error["message"]


DOCUMENTS = ["a cat", "eight million people live here", "two people"]
SIZE = 4


def vectors(token_ids: list[int]) -> list[list[float]]:
    return [[float(token * place % 17 - 8) / 8 for place in range(1, SIZE + 1)] for token in token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def late_interaction() -> AsyncIterator[Stack]:
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


@pytest.fixture
def colbert(late_interaction: Stack) -> Stack:
    """The model with a vector for each token; its scheduler has forgotten earlier tests."""
    late_interaction.scheduler.reset()
    return late_interaction


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
async def test_late_interaction_scores_by_max_sim(colbert: Stack, path: str) -> None:
    """One query has its vectors compared with those of each document; several, with one each."""
    body = await colbert.post(path, queries="people", items=DOCUMENTS)
    check_answer(ScoreList, body)
    expected = [max_sim("ask: people", f"tell: {each}") for each in DOCUMENTS]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(expected, abs=1e-5)
    sent = colbert.scheduler.pooled
    assert [each.use_activation for each in sent] == [True] * 4
    assert {each.task for each in sent} == {pb.POOL_TASK_TOKEN_EMBED}
    colbert.scheduler.reset()
    both = await colbert.post(path, data_1=["cat", "two"], data_2=DOCUMENTS[:2], use_activation=False)
    pairs = zip(["cat", "two"], DOCUMENTS[:2], strict=True)
    expected = [max_sim(f"ask: {one}", f"tell: {two}") for one, two in pairs]
    assert [entry["score"] for entry in both["data"]] == pytest.approx(expected, abs=1e-5)
    assert [each.use_activation for each in colbert.scheduler.pooled] == [False] * 4


async def test_all_paths_rank_alike(colbert: Stack) -> None:
    """Jina's path and vLLM's give one answer; Cohere's adds what its clients read."""
    asked = {"query": "people", "documents": DOCUMENTS, "top_n": 2}
    plain, jina, cohere = [
        await colbert.post(path, **asked) for path in ("/rerank", "/v1/rerank", "/v2/rerank")
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
    many = await colbert.post("/v2/rerank", query="a", documents=["b"] * 201, return_documents=False)
    assert many["meta"]["billed_units"] == {"search_units": 3}
    assert many["results"][0].keys() == {"index", "relevance_score"}


async def test_documents_may_be_objects_as_in_coheres_client(colbert: Stack) -> None:
    """Their texts count; other fields, and options without effect, are tolerated."""
    objects = [{"text": each, "id": str(index)} for index, each in enumerate(DOCUMENTS)]
    habits = {"rank_fields": ["text"], "max_chunks_per_doc": 10, "model": "colbert"}
    asked = await colbert.post("/v2/rerank", query="people", documents=objects, **habits)
    assert asked["results"] == (await colbert.post("/rerank", query="people", documents=DOCUMENTS))["results"]
