"""``/tokenize`` and ``/detokenize``, with vLLM's interface."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.generation.respond import chat_prompt, context_of, known_model
from gateway.http.openapi import api_router, documented, json_response
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.chat import TEMPLATE_UNSERVED, Messages, TemplateInput
from gateway.schemas.sampling import ModelName, TokenIds
from protos.validation import check_ids

router = api_router("Tokens")


class TokenizeRequest(TemplateInput):
    """A text or a conversation to tokenize."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **TEMPLATE_UNSERVED,
        "return_prompt_text": Unserved((False,)),
        "tool_choice": Unserved(("none", "auto"), "it does not change the prompt; omit it"),
    }
    model: ModelName = None
    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation, for the model's chat template.")
    add_special_tokens: bool | None = Field(
        None, description="Add the model's special tokens; by default for a prompt, not for messages."
    )
    return_token_strs: bool = Field(False, description="Also return the vocabulary's spelling of each token.")

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either 'prompt' or 'messages', not both")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model: ModelName = None
    tokens: TokenIds


class Tokenized(TypedDict):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[
        list[str] | None, Field(description="The vocabulary's spelling, with return_token_strs.")
    ]


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


@router.post("/tokenize", summary="Tokenize", responses=documented(Tokenized))
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Returns the token ids of a text, or of a conversation after the model's chat template.

    Send either `prompt` or `messages`.
    """
    worker, served = context_of(request).text_worker, await known_model(request, body.model)

    def answer(ids: list[int]) -> Response:
        tokenized: Tokenized = {
            "count": len(ids),
            "max_model_len": served.model.max_model_len,
            "tokens": ids,
            "token_strs": served.text.tokens(ids) if body.return_token_strs else None,
        }
        return json_response(tokenized)

    if body.messages is not None:
        special = bool(body.add_special_tokens)
        ids = await chat_prompt(request, served, body.messages, body, special=special)
        return await worker.run(len(ids), lambda: answer(ids))
    text, special = body.prompt or "", body.add_special_tokens is not False
    return await worker.run(len(text), lambda: answer(served.text.encode(text, add_special_tokens=special)))


@router.post("/detokenize", summary="Detokenize", responses=documented(Detokenized))
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Returns the text of token ids, special tokens included."""
    served = await known_model(request, body.model)

    def answer() -> Response:
        if served.model.vocab_size:
            check_ids("tokens", body.tokens, served.model.vocab_size)
        detokenized: Detokenized = {"prompt": served.text.decode(body.tokens)}
        return json_response(detokenized)

    return await context_of(request).text_worker.run(len(body.tokens), answer)
