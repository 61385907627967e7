"""``/v1/embeddings``, ``/classify``, ``/pooling``, ``/score`` and ``/rerank``."""

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.respond import served_model
from gateway.http.openapi import api_router, json_response
from gateway.pooling.call import (
    BYTES,
    Cuts,
    PoolCall,
    PoolInput,
    encode_inputs,
    encode_pair,
    encode_text,
    text_ids,
    usage_of,
)
from gateway.pooling.schemas import (
    Classification,
    ClassificationList,
    ClassificationRequest,
    CohereRerankAnswer,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from gateway.text.tokenization import TextCodec
from protos.errors import Unsupported
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    import numpy as np


router = api_router("Pooling")


@router.post(
    "/v1/embeddings", summary="Embed texts", response_model=EmbeddingList, responses={200: {"content": BYTES}}
)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Returns an embedding for each input, in the order of the inputs, as OpenAI's endpoint does.

    Only an embedding model serves this route. Inputs may be texts, lists of token ids, or a conversation.
    """
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_EMBED)
    call = PoolCall(request, served, body)
    is_text = bool(body.input) and isinstance(body.input[0], str)
    prompt = served.text.prompts.choose(body.prompt_name, body.prompt) if is_text else ""
    inputs = await encode_inputs(call, body, prompt)
    responses = await call.pool(
        inputs,
        pb.POOL_TASK_EMBED,
        param="input",
        use_activation=body.use_activation,
        dimensions=body.dimensions,
    )

    def write(results: list[Any]) -> EmbeddingList:
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": values}
                for index, values in enumerate(results)
            ],
            "model": served.model.served_name,
            "usage": usage_of(inputs),
        }

    return await call.answer_encoded(body, inputs, responses, lambda results: json_response(write(results)))


@router.post("/classify", summary="Classify texts")
async def classify(request: Request, body: ClassificationRequest) -> ClassificationList:
    """Returns the probability of each of the model's classes for each input, and the likeliest class."""
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_CLASSIFY)
    call = PoolCall(request, served, body)
    inputs = await encode_inputs(call, body)
    responses = await call.pool(
        inputs, pb.POOL_TASK_CLASSIFY, param="input", use_activation=body.use_activation
    )
    labels, data = served.model.pooling.labels, list[Classification]()
    for index, response in enumerate(responses):
        values = list(response.values)
        likeliest = values.index(max(values))
        label = labels[likeliest] if likeliest < len(labels) else None
        data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
    return {**call.head("classify-", inputs), "data": data}


@router.post(
    "/pooling",
    summary="Get a pooling model's results",
    response_model=PoolingList,
    responses={200: {"content": BYTES}},
)
async def pooling(request: Request, body: PoolingRequest) -> Response:
    """Returns the model's result for each input: a vector, or a vector for each token.

    In base64 and bytes, the rows of a matrix follow one another.
    """
    served = await served_model(request, body.model)
    if body.task is None:
        task = served.check_serves(*served.model.pool_tasks)
    else:
        task = served.check_serves(pb.PoolTask.Value(f"POOL_TASK_{body.task.upper()}"))
    call = PoolCall(request, served, body)
    inputs = await encode_inputs(call, body)
    responses = await call.pool(
        inputs, task, param="input", use_activation=body.use_activation, dimensions=body.dimensions
    )

    def write(results: list[Any]) -> PoolingList:
        return {
            **call.head("pooling-", inputs),
            "data": [
                {"index": index, "object": "pooling", "data": values} for index, values in enumerate(results)
            ],
        }

    return await call.answer_encoded(body, inputs, responses, lambda results: json_response(write(results)))


async def compare(
    call: PoolCall,
    body: ScoreRequest | RerankRequest,
    queries: Sequence[str],
    documents: Sequence[str],
    cuts: Cuts,
    *,
    task: "pb.PoolTask.ValueType",
    param: str,
) -> tuple[list[float], list[PoolInput]]:
    """Returns a score for each document, and the inputs; one query, or a query for each document.

    The task ``embed`` compares by the cosine of embeddings, ``token_embed`` by MaxSim of tokens' vectors.
    """
    _check_options(body, task)
    inputs = await _encode(call, queries, documents, cuts)
    scaled = body.use_activation is not False
    responses = await call.pool(inputs, task, param=param, use_activation=scaled)
    of_queries, of_documents = responses[: len(queries)], responses[len(queries) :]
    score = _cosines if task == pb.POOL_TASK_EMBED else _max_sims
    size = sum(len(response.values) for response in responses)
    return await call.compute(size, lambda: score(of_queries, of_documents)), inputs


def _check_options(body: ScoreRequest | RerankRequest, task: "pb.PoolTask.ValueType") -> None:
    if body.instruction is not None:
        raise Unsupported(
            "instruction is not supported: this model reads no pairs and has no template for them; omit it",
            param="instruction",
        )
    if body.use_activation is not None and task == pb.POOL_TASK_EMBED:
        raise Unsupported(
            "use_activation is not supported: the scores of an embedding model are cosines; omit it",
            param="use_activation",
        )


async def _encode(
    call: PoolCall, queries: Sequence[str], documents: Sequence[str], cuts: Cuts
) -> list[PoolInput]:
    text = call.served.text
    query_prompt, document_prompt = text.prompts.query, text.prompts.document
    of_query = Cuts(cuts.total, cuts.first, side=cuts.side)
    of_document = Cuts(cuts.total, cuts.second, side=cuts.side)

    def work() -> list[PoolInput]:
        return [
            *(encode_text(text.tokenizer, query_prompt + query, of_query) for query in queries),
            *(encode_text(text.tokenizer, document_prompt + each, of_document) for each in documents),
        ]

    size = sum(len(query_prompt) + len(query) for query in queries)
    size += sum(len(document_prompt) + len(document) for document in documents)
    return await call.encode(size, work)


def _cosines(
    queries: Sequence[inference.PoolResponse], documents: Sequence[inference.PoolResponse]
) -> list[float]:
    firsts = _one_each([query.values for query in queries], len(documents))
    return [sum(map(mul, first, other.values)) for first, other in zip(firsts, documents, strict=True)]


def _max_sims(
    queries: Sequence[inference.PoolResponse], documents: Sequence[inference.PoolResponse]
) -> list[float]:
    """Returns ColBERT's scores: the sum of each query token's largest product with a document token."""
    firsts = _one_each([_matrix(query) for query in queries], len(documents))
    return [
        float((first @ _matrix(other).T).max(axis=1).sum())
        for first, other in zip(firsts, documents, strict=True)
    ]


def _one_each(queries: Sequence[Any], count: int) -> Sequence[Any]:
    return queries if len(queries) == count else [queries[0]] * count


def _matrix(response: inference.PoolResponse) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Returns the vectors of tokens, a row for each."""
    # It takes a tenth of a second to load, and few models need it.
    import numpy as np

    return np.array(response.values, dtype=np.float32).reshape(tuple(response.shape))


# Documents per search in Cohere's bills.
_DOCUMENTS_PER_SEARCH: Final = 100


@router.post("/score", summary="Score pairs of texts")
@router.post("/v1/score", summary="Score pairs of texts, under an older path of vLLM's")
async def score(request: Request, body: ScoreRequest) -> ScoreList:
    """Scores pairs: each of `text_2` with its own `text_1`, or all with the same.

    A cross-encoder reads both texts at once. An embedding model gives the cosine of two embeddings. A model
    with a vector for each token (ColBERT) gives MaxSim: the sum, over the tokens of the first text, of the
    largest product with a token of the second.
    """
    call = PoolCall(request, await served_model(request, body.model), body)
    scores, inputs = await _scores(call, body, body.text_1, body.text_2, param="text_2")
    data: list[Score] = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    return {**call.head("score-", inputs), "data": data}


@router.post("/rerank", summary="Sort documents by relevance")
@router.post("/v1/rerank", summary="Sort documents by relevance, under Jina's path")
async def rerank(request: Request, body: RerankRequest) -> RerankAnswer:
    """Scores each document with the query and returns the best first, as Jina's API does.

    See /score for how a model scores.
    """
    call = PoolCall(request, await served_model(request, body.model), body)
    scores, inputs = await _scores(call, body, [body.query], body.documents, param="documents")
    results = list[RerankResult]()
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            result["document"] = {"text": body.documents[index]}
        results.append(result)
    return {
        "id": f"rerank-{call.context.new_id()}",
        "model": call.served.model.served_name,
        "results": results,
        "usage": usage_of(inputs),
    }


@router.post("/v2/rerank", summary="Sort documents by relevance, for Cohere's clients")
async def rerank_for_cohere(request: Request, body: RerankRequest) -> CohereRerankAnswer:
    """Returns the answer of /rerank with Cohere's `meta`."""
    answer = await rerank(request, body)
    searches = math.ceil(len(body.documents) / _DOCUMENTS_PER_SEARCH)
    meta: dict[str, dict[str, Any]] = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": searches},
        "tokens": {"input_tokens": answer["usage"]["prompt_tokens"]},
    }
    return {**answer, "meta": meta}


async def _scores(
    call: PoolCall,
    body: ScoreRequest | RerankRequest,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    param: str,
) -> tuple[list[float], list[PoolInput]]:
    """Returns a score for each document, and the inputs."""
    call.check_count(len(documents), param)
    cuts = call.cuts(first=body.max_tokens_per_query, second=body.max_tokens_per_doc)
    task = call.served.check_serves(pb.POOL_TASK_SCORE, pb.POOL_TASK_EMBED, pb.POOL_TASK_TOKEN_EMBED)
    if task != pb.POOL_TASK_SCORE:
        return await compare(call, body, queries, documents, cuts, task=task, param=param)
    text, variables = call.served.text, _template_variables(call, body)
    firsts = queries if len(queries) == len(documents) else [queries[0]] * len(documents)
    pairs = zip(firsts, documents, strict=True)
    if text.pair_template is not None and cuts.total is not None:
        raise Unsupported(
            "truncate_prompt_tokens is not supported: the model's template ends with tokens that its score"
            " depends on; send max_tokens_per_query or max_tokens_per_doc",
            param="truncate_prompt_tokens",
        )
    size = sum(len(first) for first in firsts) + sum(len(document) for document in documents)

    def encode() -> list[PoolInput]:
        if text.pair_template is not None:
            return [_rendered(text, *pair, variables, cuts) for pair in pairs]
        known = {query: text_ids(text.tokenizer, query) for query in set(firsts)}
        return [encode_pair(text.tokenizer, known[query], document, cuts) for query, document in pairs]

    inputs = await call.encode(size, encode)
    responses = await call.pool(inputs, pb.POOL_TASK_SCORE, param=param, use_activation=body.use_activation)
    return [response.values[0] for response in responses], inputs


def _template_variables(call: PoolCall, body: ScoreRequest | RerankRequest) -> dict[str, Any]:
    """Returns the request's variables of the template for pairs."""
    template = call.served.text.pair_template
    known = frozenset() if template is None else template.variables
    if body.instruction is not None and "instruction" not in known:
        raise Unsupported(
            "instruction is not supported: this model has no chat template that writes pairs with one; omit it",
            param="instruction",
        )
    given = {} if body.instruction is None else {"instruction": body.instruction}
    given |= body.chat_template_kwargs
    return {name: value for name, value in given.items() if name in known}


def _rendered(
    text: TextCodec, query: str, document: str, variables: Mapping[str, Any], cuts: Cuts
) -> PoolInput:
    assert text.pair_template is not None
    short = [
        text.decode(
            encode_text(text.tokenizer, each, Cuts(keep, side=cuts.side), add_special_tokens=False).token_ids
        )
        if keep
        else each
        for each, keep in ((query, cuts.first), (document, cuts.second))
    ]
    turns = [{"role": role, "content": each} for role, each in zip(("query", "document"), short, strict=True)]
    whole = text.pair_template.render(turns, add_generation_prompt=True, variables=variables)
    return encode_text(text.tokenizer, whole, Cuts())
