"""``/tokenize`` and ``/detokenize``, with vLLM's interface."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from typing_extensions import TypedDict

from gateway.generation.respond import chat_prompt, context_of, known_model
from gateway.http.openapi import api_router
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


@router.post("/tokenize", summary="Tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Tokenized:
    """Returns the token ids of a text, or of a conversation after the model's chat template.

    Send either `prompt` or `messages`.
    """
    context = context_of(request)
    served = await known_model(request, body.model)
    if body.messages is not None:
        special = bool(body.add_special_tokens)
        ids = await chat_prompt(request, served, body.messages, body, special=special)
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


@router.post("/detokenize", summary="Detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Detokenized:
    """Returns the text of token ids, special tokens included."""
    context = context_of(request)
    served = await known_model(request, body.model)
    if served.model.vocab_size:
        check_ids("tokens", body.tokens, served.model.vocab_size)
    text = served.text
    return {"prompt": await context.text_worker.run(len(body.tokens), lambda: text.decode(body.tokens))}
