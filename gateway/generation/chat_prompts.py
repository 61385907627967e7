"""The prompts of conversations: their text by the model's chat template, and its token ids.

The routes import this module; it imports `tools`, `text`, `schemas` and `scheduler_client`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Self

from gateway.quoting import clip
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.chat import Message, TemplateInput
from gateway.settings import Settings
from gateway.text.chat_template import ChatTemplate, joined
from gateway.text.tokenization import TextWorker
from protos.errors import InvalidArgument
from protos.service.logs import get_logger


class ChatPrompt(NamedTuple):
    """The text of a prompt."""

    text: str
    ignored: Sequence[str]
    """The client's parameters not read by the template."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, and further input of its template."""

    turns: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    may_call: bool = True
    """Whether the model may call the tools; if not, a template that does not show tools gets no description
    of them."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the header of the assistant's turn."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last turn."""
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The template's own variables, as the client names them."""
    effort: str | None = None
    """How much the model shall think."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The deployment's values of variables, unless the client sets them."""

    @classmethod
    def from_request(cls, messages: Sequence[Message], body: TemplateInput, *, may_call: bool = True) -> Self:
        """Returns the input of a conversation."""
        return cls(
            [message.for_template() for message in messages],
            [tool.for_template() for tool in body.tools],
            may_call,
            body.add_generation_prompt and not body.continue_final_message,
            body.continue_final_message,
            body.documents,
            body.chat_template_kwargs,
            body.reasoning_effort,
        )

    def write(self, template: ChatTemplate) -> ChatPrompt:
        """Returns the prompt written by ``template``.

        Raises:
            InvalidArgument: if the template refuses the conversation.
        """
        variables = {name: value for name, value in self._all_variables() if name in template.variables}
        turns = show_tools_in_words(template, self.turns, self.tools if self.may_call else ())
        text = template.render(
            turns,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables=variables,
            tools=self.tools,
            documents=self.documents,
        )
        return ChatPrompt(text, list(self._ignored(template.variables)))

    def _all_variables(self) -> Iterator[tuple[str, Any]]:
        """Yields the template's variables: the deployment's first, the client's own last."""
        yield from self.defaults.items()
        if self.effort is not None:
            yield "reasoning_effort", self.effort
            # The switch of templates that know no degrees.
            yield "enable_thinking", self.effort != "none"
        yield from self.variables.items()

    def _ignored(self, known: frozenset[str]) -> Iterator[str]:
        if self.effort is not None and known.isdisjoint(("reasoning_effort", "enable_thinking")):
            yield "reasoning_effort"
        if self.documents and "documents" not in known:
            yield "documents"
        yield from (f"chat_template_kwargs.{name}" for name in self.variables if name not in known)


class ChatEncoder:
    """Turns conversations into token ids."""

    def __init__(self, settings: Settings, worker: TextWorker) -> None:
        """Takes the templates' default variables from ``settings``; ``worker`` runs long work."""
        self._variables = settings.default_chat_template_kwargs
        self._worker = worker

    async def encode(self, served: ServedModel, chat: ChatInput, *, special: bool, size: int) -> list[int]:
        """Returns the token ids of a conversation.

        Args:
            served: the model.
            chat: the conversation.
            special: whether to add BOS and its like; usually not, because chat templates bring their own.
            size: bytes of the request's body, which bound the effort: a template visits every message,
                however short.

        Raises:
            InvalidArgument: if there is no chat template, or it refuses the messages.
        """
        if self._variables:
            chat = replace(chat, defaults=self._variables)
        prompt = await self._worker.run(size, partial(self._write, served, chat))
        self._check(prompt)
        encode = partial(served.text.encode, prompt.text, add_special_tokens=special)
        return await self._worker.run(len(prompt.text), encode)

    def _write(self, served: ServedModel, chat: ChatInput) -> ChatPrompt:
        template = served.text.tool_template if chat.tools else served.text.chat_template
        if template is None:
            raise InvalidArgument(
                f"the model '{served.model.served_name}' has no chat template; use /v1/completions",
                param="messages",
            )
        return chat.write(template)

    def _check(self, prompt: ChatPrompt) -> None:
        """Logs parameters not read by the template."""
        if not prompt.ignored:
            return
        names = [clip(name) for name in prompt.ignored[:32]]
        get_logger().debug("the chat template does not read some parameters", fields=names)


_INTRODUCTION: Final = (
    "You can call these functions, described in JSON. To call some, answer with nothing but a JSON list of"
    ' objects with "name" and "parameters":'
)


def show_tools_in_words(
    template: ChatTemplate, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns ``turns`` with descriptions of the tools and calls that ``template`` would not show.

    Args:
        template: the model's.
        turns: the conversation, in the template's form.
        tools: the tools to describe.
    """
    described = [_calls_in_words(turn) if not template.knows_calls else turn for turn in turns]
    if not tools or template.knows_tools:
        return described
    text = "\n".join([_INTRODUCTION, *(_json(tool["function"]) for tool in tools)])
    # Every template accepts a user's turn; some refuse a system's.
    for at, turn in enumerate(described):
        if turn["role"] in ("system", "developer"):
            described[at] = {**turn, "content": f"{joined(turn['content'])}\n\n{text}"}
            return described
        if turn["role"] == "user":
            described[at] = {**turn, "content": f"{text}\n\n{joined(turn['content'])}"}
            return described
    return [{"role": "system", "content": text}, *described]


def _calls_in_words(turn: dict[str, Any]) -> dict[str, Any]:
    if not (calls := turn.get("tool_calls")):
        return turn
    text = _json(
        [{"name": call["function"]["name"], "parameters": call["function"]["arguments"]} for call in calls]
    )
    content = joined(turn["content"])
    return {**turn, "content": f"{content}\n{text}" if content else text}


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidArgument(
            "the arguments of an earlier call are nested too deep; flatten them", param="messages"
        ) from error
