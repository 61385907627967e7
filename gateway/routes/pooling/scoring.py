"""``/score`` and ``/rerank``."""

from collections.abc import Sequence
from operator import mul

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.context import read_body, served_model
from gateway.routes.openapi import body_schema, documented
from gateway.routes.pooling.run import PoolCall, answer_json, usage_of
from gateway.schemas.answers import RerankAnswer, ScoreList
from gateway.schemas.pooling import RerankRequest, ScoreRequest
from gateway.text.pooling_inputs import Cuts, PoolInput, encode_pair, encode_text, text_ids
from gateway.text.tokenization import TextCodec
from protos.errors import Unsupported
from protos.triptych.v1 import common_pb2 as pb

router = APIRouter(tags=["Pooling"])


@router.post(
    "/score",
    summary="Score pairs of texts",
    openapi_extra=body_schema(ScoreRequest),
    responses=documented(ScoreList),
)
async def score(request: Request) -> Response:
    """Scores pairs: each of `text_2` with the one `text_1`, or with its own.

    A cross-encoder reads both texts at once. An embedding model gives the cosine of two embeddings.
    """
    body = await read_body(request, ScoreRequest)
    call = PoolCall.of(request, await served_model(request, body.model), body)
    scores, inputs = await _scores(call, body, body.text_1, body.text_2, param="text_2")
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return call.answer("score-", data, inputs)


@router.post(
    "/rerank",
    summary="Sort documents by relevance",
    openapi_extra=body_schema(RerankRequest),
    responses=documented(RerankAnswer),
)
async def rerank(request: Request) -> Response:
    """Scores each document with the query and returns the best ones first, as Jina's and Cohere's APIs do.

    See /score for how a model scores.
    """
    body = await read_body(request, RerankRequest)
    call = PoolCall.of(request, await served_model(request, body.model), body)
    scores, inputs = await _scores(call, body, [body.query], body.documents, param="documents")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": body.documents[index]}} if body.return_documents else {}),
        }
        for index in order
    ]
    return answer_json(
        {
            "id": f"rerank-{call.context.new_id()}",
            "model": call.served.model.served_name,
            "results": results,
            "usage": usage_of(inputs),
        }
    )


async def _scores(
    call: PoolCall,
    body: ScoreRequest | RerankRequest,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    param: str,
) -> tuple[list[float], list[PoolInput]]:
    """Returns a score for each document, and what the model read.

    Raises:
        Unsupported: if the model neither scores nor embeds.
    """
    call.check_count(len(documents), param)
    cuts = call.cuts(first=body.max_tokens_per_query, second=body.max_tokens_per_doc)
    if call.served.check_serves(pb.POOL_TASK_SCORE, pb.POOL_TASK_EMBED) == pb.POOL_TASK_EMBED:
        return await _cosines(call, body, queries, documents, cuts, param)
    text, instruction = call.served.text, body.instruction
    _check_instruction(text, instruction)
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
            return [_rendered(text, *pair, instruction, cuts) for pair in pairs]
        known = {query: text_ids(text.tokenizer, query) for query in set(firsts)}
        return [encode_pair(text.tokenizer, known[query], document, cuts) for query, document in pairs]

    inputs = await call.encode(size, encode)
    responses = await call.pool(inputs, pb.POOL_TASK_SCORE, param=param, use_activation=body.use_activation)
    return [response.values[0] for response in responses], inputs


def _check_instruction(text: TextCodec, instruction: str | None) -> None:
    template = text.pair_template
    if instruction is not None and (template is None or "instruction" not in template.variables):
        raise Unsupported(
            "instruction is not supported: this model has no chat template that writes pairs with one; omit it",
            param="instruction",
        )


def _rendered(text: TextCodec, query: str, document: str, instruction: str | None, cuts: Cuts) -> PoolInput:
    """Returns what the model reads of a pair that its template writes."""
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
    variables = {} if instruction is None else {"instruction": instruction}
    whole = text.pair_template.render(turns, add_generation_prompt=True, variables=variables)
    return encode_text(text.tokenizer, whole, Cuts())


async def _cosines(
    call: PoolCall,
    body: ScoreRequest | RerankRequest,
    queries: Sequence[str],
    documents: Sequence[str],
    cuts: Cuts,
    param: str,
) -> tuple[list[float], list[PoolInput]]:
    for name in ("use_activation", "instruction"):
        if getattr(body, name) is not None:
            raise Unsupported(
                f"{name} is not supported: the scores of an embedding model are cosines; omit it", param=name
            )
    text = call.served.text
    query_prompt, document_prompt = text.prompts.query, text.prompts.document

    def work() -> list[PoolInput]:
        first, second = (
            Cuts(cuts.total, cuts.first, side=cuts.side),
            Cuts(cuts.total, cuts.second, side=cuts.side),
        )
        return [
            *(encode_text(text.tokenizer, query_prompt + query, first) for query in queries),
            *(encode_text(text.tokenizer, document_prompt + document, second) for document in documents),
        ]

    size = sum(len(query_prompt) + len(query) for query in queries)
    size += sum(len(document_prompt) + len(document) for document in documents)
    inputs = await call.encode(size, work)
    responses = await call.pool(inputs, pb.POOL_TASK_EMBED, param=param, use_activation=True)
    vectors = [response.values for response in responses]
    firsts, seconds = vectors[: len(queries)], vectors[len(queries) :]
    if len(firsts) < len(seconds):
        firsts = [firsts[0]] * len(seconds)
    pairs = zip(firsts, seconds, strict=True)
    size = sum(map(len, vectors))
    return await call.compute(size, lambda: [sum(map(mul, one, two)) for one, two in pairs]), inputs
