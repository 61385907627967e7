"""``/score`` and ``/rerank``, also under the paths with ``/v1``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request

from gateway.pooling.answers import (
    CohereMeta,
    CohereRerankAnswer,
    RerankAnswer,
    RerankResult,
    Score,
    ScoreList,
)
from gateway.pooling.bodies import RerankRequest, ScoreRequest
from gateway.pooling.call import PoolCall, usage_of
from gateway.pooling.inputs import Cuts, PoolInput, encode_pair, encode_text, text_ids
from gateway.pooling.similarity import compare
from gateway.routes.context import served_model
from gateway.routes.openapi import api_router
from gateway.text.tokenization import TextCodec
from protos.errors import Unsupported
from protos.triptych.v1 import common_pb2 as pb

router = api_router("Pooling")

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
    call = PoolCall.of(request, await served_model(request, body.model), body)
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
    call = PoolCall.of(request, await served_model(request, body.model), body)
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
    meta: CohereMeta = {
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
    """Returns a score for each document, and the inputs.

    Raises:
        Unsupported: if the model neither scores nor embeds, or lacks an option of the request.
    """
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
    """Returns the request's variables of the template for pairs.

    Raises:
        Unsupported: if the template does not read the instruction.
    """
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
    """Returns the input of a pair, written by the template."""
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
