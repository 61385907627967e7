"""The bodies of ``/tokenize`` and ``/detokenize``, with vLLM's interface."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.chat import CONVERSATION_UNSERVED, Messages
from gateway.schemas.sampling import ModelName, TokenIds, or_default
from gateway.schemas.tools import Tools


class TokenizeRequest(RequestModel):
    """A text or a conversation to tokenize."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **CONVERSATION_UNSERVED,
        "tool_choice": Unserved(("none", "auto"), "it does not change the prompt; omit it"),
    }

    model: ModelName | None = None
    prompt: Annotated[str | None, Field(description="A text.")] = None
    messages: Annotated[
        Messages | None, Field(description="A conversation, for the model's chat template.")
    ] = None
    tools: Tools = Field(default_factory=list, description="Functions that the conversation offers.")
    add_generation_prompt: Annotated[
        bool,
        or_default(True),
        Field(description="End a conversation with the header of the assistant's turn."),
    ] = True
    add_special_tokens: Annotated[
        bool | None,
        Field(description="Add the model's special tokens; by default for a prompt, not for messages."),
    ] = None
    chat_template_kwargs: Annotated[dict[str, object], or_default({})] = Field(
        default_factory=dict, description="Further variables for the model's chat template."
    )
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

    model: ModelName | None = None
    tokens: TokenIds
