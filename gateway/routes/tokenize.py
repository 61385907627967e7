"""``/tokenize`` and ``/detokenize``, with vLLM's interface."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from gateway.chat_prompts import ChatInput
from gateway.routes.context import context_of, known_model, read_body
from gateway.routes.openapi import body_schema, documented
from gateway.schemas.answers import Detokenized, Tokenized
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from protos.validation import check_ids

router = APIRouter(tags=["Tokens"])


@router.post(
    "/tokenize",
    summary="Tokenize",
    response_model=None,
    openapi_extra=body_schema(TokenizeRequest),
    responses=documented(Tokenized),
)
async def tokenize(request: Request) -> dict[str, Any]:
    """Returns the token ids of a text, or of a conversation after the model's chat template.

    Send either `prompt` or `messages`.
    """
    body = await read_body(request, TokenizeRequest)
    context = context_of(request)
    served = await known_model(request, body.model)
    if body.messages is not None:
        chat, size = ChatInput.of(body.messages, body), len(await request.body())
        special = bool(body.add_special_tokens)
        ids = await context.chat_encoder.encode(served, chat, special=special, size=size)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        ids = await context.text_worker.run(
            len(text), lambda: served.text.encode(text, add_special_tokens=special)
        )
    strings = served.text.tokens(ids) if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": served.model.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


@router.post(
    "/detokenize",
    summary="Detokenize",
    response_model=None,
    openapi_extra=body_schema(DetokenizeRequest),
    responses=documented(Detokenized),
)
async def detokenize(request: Request) -> dict[str, str]:
    """Returns the text of token ids, special tokens included."""
    body = await read_body(request, DetokenizeRequest)
    context = context_of(request)
    served = await known_model(request, body.model)
    if served.model.vocab_size:
        check_ids("tokens", body.tokens, served.model.vocab_size)
    text = served.text
    return {"prompt": await context.text_worker.run(len(body.tokens), lambda: text.decode(body.tokens))}
