"""``/v2/embed`` and ``/v2/rerank``, with Cohere's interface."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.quoting import clip
from gateway.routes.context import read_body, served_model
from gateway.routes.openapi import body_schema, documented
from gateway.routes.pooling.answers import CohereEmbedAnswer, CohereRerankAnswer
from gateway.routes.pooling.encoding import as_base64, as_bits, as_numbers
from gateway.routes.pooling.run import PoolCall, answer_json, usage_of
from gateway.routes.pooling.scoring import ranked
from gateway.schemas.base import Unserved
from gateway.schemas.pooling import Dimensions, PoolingBody, RerankRequest
from gateway.schemas.sampling import or_default
from gateway.text.pooling_inputs import PoolInput, encode_text
from gateway.text.prompts import TextPrompts
from protos.errors import InvalidArgument, TriptychError
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

router = APIRouter(tags=["Pooling"])

# Documents of one request that Cohere bills as one search.
_DOCUMENTS_PER_SEARCH: Final = 100

_BITS_PER_NUMBER: Final = 8

_KEPT_SIDE: Final = {"START": "left", "END": "right"}


EmbeddingTypes = list[Literal["float", "binary", "ubinary", "base64"]]


def _floats() -> EmbeddingTypes:
    return ["float"]


class CohereEmbedRequest(PoolingBody):
    """A request for embeddings of texts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "images": Unserved(([],), "models read text alone; send 'texts'"),
        "inputs": Unserved(([],), "send 'texts'"),
        **dict.fromkeys(
            ("truncate_prompt_tokens", "truncation_side"), Unserved((), "send 'max_tokens' and 'truncate'")
        ),
    }

    texts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, description="The texts.")]
    input_type: Annotated[
        str | None,
        Field(
            description="Puts the model's prompt of that name in front of each text; search_query and search_document"
            " mean its prompts for queries and for documents."
        ),
    ] = None
    output_dimension: Dimensions = None
    embedding_types: Annotated[
        EmbeddingTypes,
        or_default(["float"]),
        Field(min_length=1, description="The types of the embeddings in the answer."),
    ] = Field(default_factory=_floats)
    truncate: Annotated[
        Literal["NONE", "START", "END"],
        or_default("END"),
        Field(description="Where long texts lose tokens; NONE: they are refused."),
    ] = "END"
    max_tokens: Annotated[
        int | None, Field(ge=1, description="Tokens that a text may have; omitted: as many as fit.")
    ] = None


@router.post(
    "/v2/embed",
    summary="Embed texts, for Cohere's clients",
    openapi_extra=body_schema(CohereEmbedRequest),
    responses=documented(CohereEmbedAnswer),
)
async def embed(request: Request) -> Response:
    """Returns one embedding for each text, in each of the types that are asked for, as Cohere's API does."""
    body = await read_body(request, CohereEmbedRequest)
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_EMBED)
    size = body.output_dimension or served.model.pooled_size
    if size % _BITS_PER_NUMBER and {"binary", "ubinary"}.intersection(body.embedding_types):
        raise InvalidArgument(
            f"embedding_types: signs come eight in a number, but embeddings have {size}; ask for float or base64",
            param="embedding_types",
        )
    kept = None
    if body.truncate != "NONE":
        kept = min(body.max_tokens or served.longest_input, served.longest_input)
    side = _KEPT_SIDE.get(body.truncate, "right")
    call = PoolCall.of(
        request,
        served,
        body.model_copy(update={"truncate_prompt_tokens": kept, "truncation_side": side}),
    )
    inputs = await _encode(call, body)
    try:
        responses = await call.pool(
            inputs, pb.POOL_TASK_EMBED, param="texts", dimensions=body.output_dimension
        )
    except TriptychError as error:
        error.param = "output_dimension" if error.param == "dimensions" else error.param
        raise

    def write() -> dict[str, list[Any]]:
        return {
            kind: [_written(response, kind) for response in responses]
            for kind in dict.fromkeys(body.embedding_types)
        }

    count = usage_of(inputs)["prompt_tokens"]
    values = sum(len(response.values) for response in responses) * len(body.embedding_types)
    return answer_json(
        {
            "id": f"embd-{call.context.new_id()}",
            "embeddings": await call.compute(values, write),
            "texts": body.texts,
            "meta": _meta({"input_tokens": count}, count),
            "response_type": "embeddings_by_type",
        }
    )


async def _encode(call: PoolCall, body: CohereEmbedRequest) -> list[PoolInput]:
    """Returns the tokens of each text.

    Raises:
        InvalidArgument: if there are too many texts, or one is too long and must not be truncated.
    """
    call.check_count(len(body.texts), "texts")
    cuts, text = call.cuts(), call.served.text
    prompt = _prompt(text.prompts, body.input_type)
    size = sum(len(prompt) + len(each) for each in body.texts)
    inputs = await call.encode(
        size, lambda: [encode_text(text.tokenizer, prompt + each, cuts) for each in body.texts]
    )
    longest = max(len(each.token_ids) for each in inputs)
    if body.truncate == "NONE" and body.max_tokens is not None and longest > body.max_tokens:
        raise InvalidArgument(
            f"max_tokens is {body.max_tokens}, but a text has {longest} tokens; shorten it, or send truncate=END",
            param="max_tokens",
        )
    return inputs


def _prompt(prompts: TextPrompts, input_type: str | None) -> str:
    """Returns what goes in front of each text.

    Raises:
        InvalidArgument: if the model has no prompt of that name.
    """
    if input_type is None or input_type in prompts.by_name:
        return prompts.choose(input_type, None)
    match input_type:
        case "search_query":
            return prompts.query
        case "search_document":
            return prompts.document
        case _:
            known = ", ".join(f"'{clip(each)}'" for each in prompts.by_name)
            raise InvalidArgument(
                f"input_type '{clip(input_type)}' is not a prompt of this model; send"
                f" {f'one of {known}, ' if known else ''}search_query or search_document, or omit it",
                param="input_type",
            )


def _written(response: inference.PoolResponse, kind: str) -> Any:
    match kind:
        case "float":
            return as_numbers(response)
        case "base64":
            return as_base64(response.values)
        case _:
            return as_bits(response.values, signed=kind == "binary")


@router.post(
    "/v2/rerank",
    summary="Sort documents by relevance, for Cohere's clients",
    openapi_extra=body_schema(RerankRequest),
    responses=documented(CohereRerankAnswer),
)
async def rerank(request: Request) -> Response:
    """Scores each document with the query and returns the best ones first, as Cohere's API does.

    The answer is that of /rerank, with Cohere's `meta`.
    """
    body = await read_body(request, RerankRequest)
    answer = await ranked(request, body)
    searches = math.ceil(len(body.documents) / _DOCUMENTS_PER_SEARCH)
    meta = _meta({"search_units": searches}, answer["usage"]["prompt_tokens"])
    return answer_json({**answer, "meta": meta})


def _meta(billed: Mapping[str, int], input_tokens: int) -> dict[str, Any]:
    return {
        "api_version": {"version": "2"},
        "billed_units": billed,
        "tokens": {"input_tokens": input_tokens},
    }
