"""``/tokenize`` and ``/detokenize``: the requests (as vLLM has them)."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.chat import CONVERSATION_UNSERVED, Messages
from gateway.schemas.sampling import ModelName, TokenIds, or_default
from gateway.schemas.tools import Tools


class TokenizeRequest(RequestModel):
    """Text, or a conversation, to be counted or looked at."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **CONVERSATION_UNSERVED,
        "tool_choice": Unserved(("none", "auto"), "no choice changes the prompt; leave it out"),
    }

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    add_generation_prompt: Annotated[bool, or_default(True)] = True
    add_special_tokens: bool | None = None
    chat_template_kwargs: Annotated[dict[str, object], or_default({})] = Field(default_factory=dict)
    return_token_strs: Annotated[bool, or_default(False)] = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either 'prompt' or 'messages' is required, and not both")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to be read as text."""

    model: ModelName | None = None
    tokens: TokenIds
