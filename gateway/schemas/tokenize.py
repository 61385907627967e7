"""The bodies of ``/tokenize`` and ``/detokenize``, with vLLM's interface."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.chat import TEMPLATE_UNSERVED, Messages, TemplateInput
from gateway.schemas.sampling import ModelName, TokenIds, or_default


class TokenizeRequest(TemplateInput):
    """A text or a conversation to tokenize."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **TEMPLATE_UNSERVED,
        "return_prompt_text": Unserved((False,)),
        "tool_choice": Unserved(("none", "auto"), "it does not change the prompt; omit it"),
    }
    model: ModelName = None
    prompt: Annotated[str | None, Field(description="A text.")] = None
    messages: Annotated[
        Messages | None, Field(description="A conversation, for the model's chat template.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="Add the model's special tokens; by default for a prompt, not for messages."),
    ] = None
    return_token_strs: Annotated[
        bool, or_default(False), Field(description="Also return the vocabulary's spelling of each token.")
    ] = False

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either 'prompt' or 'messages', not both")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model: ModelName = None
    tokens: TokenIds
