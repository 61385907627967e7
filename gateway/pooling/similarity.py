"""Scores of models that read queries and documents separately: comparisons of their vectors."""

from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

from gateway.pooling.bodies import RerankRequest, ScoreRequest
from gateway.pooling.call import PoolCall
from gateway.pooling.inputs import Cuts, PoolInput, encode_text
from protos.errors import Unsupported
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    import numpy as np


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
    """Returns a score for each document, and the inputs.

    Args:
        call: the request.
        body: its body.
        queries: one for all documents, or one for each.
        documents: the texts to compare.
        cuts: how many tokens to keep of each text.
        task: ``embed`` for the cosines of embeddings, ``token_embed`` for MaxSim of the vectors of tokens.
        param: the client's name for the documents.

    Raises:
        Unsupported: if an option belongs to models that read pairs.
        TriptychError: as :meth:`PoolCall.pool`.
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
    """Returns the tokens of queries, then of documents, each after the model's prompt for its kind."""
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
    """Returns the products of embeddings of length 1."""
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
