"""Turns a Responses request into a chat request. Its validated parts are not validated again."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from gateway.responses_api.input_items import (
    Aside,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    ReasoningItem,
)
from gateway.responses_api.schemas import Allowed, ResponsesRequest, full_name
from gateway.schemas.chat import ChatCompletionRequest, Message
from gateway.schemas.sampling import SamplingRequest
from gateway.schemas.tools import EarlierCall, EarlierFunction, Function, Tool
from gateway.text.chat_template import ChatTemplate, joined

_SYSTEM: Final = ("system", "developer")


class ResponseAsChat(ChatCompletionRequest):
    """A Responses request as a chat request. Errors name the client's parameters."""

    prompt_param: ClassVar[str] = "input"

    @property
    def constraint_param(self) -> str:
        """The parameter with the answer's constraint."""
        return "text.format" if self.structured_outputs is None else "structured_outputs"


def to_chat(body: ResponsesRequest, template: ChatTemplate | None) -> ResponseAsChat:
    """Returns the chat request for ``body`` and the model's chat template."""
    shared = {
        name: getattr(body, name)
        for name in SamplingRequest.model_fields
        if name in body.model_fields_set and name != "stream_options"
    }
    messages = list(messages_of(body.instructions, body.input))
    if template is not None and template.wants_system_first:
        messages = _system_first(messages)
    choice = body.tool_choice
    tools = [_tool(function) for function in body.functions]
    if isinstance(choice, Allowed):
        tools = [tool for tool in tools if tool.function.name in choice.names]
        choice = choice.mode
    if not tools:
        choice = None
    return ResponseAsChat.model_construct(
        **shared,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        include_reasoning=body.include_reasoning,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        # As in vLLM: the answer goes on where the last message was cut.
        continue_final_message=_is_unfinished(body.input[-1]),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.num_logprobs is not None,
        top_logprobs=body.num_logprobs,
        response_format=None if body.text_format.type == "text" else body.text_format.for_chat(),
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
    )


def _tool(function: Function) -> Tool:
    given = {name: getattr(function, name) for name in function.model_fields_set if name != "type"}
    return Tool.model_construct(function=Function.model_construct(**given))


def _is_unfinished(item: InputItem) -> bool:
    return (
        isinstance(item, InputMessage)
        and item.role == "assistant"
        and item.status in ("in_progress", "incomplete")
    )


def _system_first(messages: Sequence[Message]) -> list[Message]:
    system = [message for message in messages if message.role in _SYSTEM]
    if not system:
        return list(messages)
    content = "\n".join(joined(message.content) for message in system)
    first = Message.model_construct(role="system", content=content)
    return [first, *(message for message in messages if message.role not in _SYSTEM)]


@dataclass(slots=True)
class _Turn:
    """A turn of the assistant, from several items."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    has_message: bool = False
    calls: list[EarlierCall] = field(default_factory=list)

    def message(self) -> Message:
        """Returns the turn as a chat message."""
        return Message.model_construct(
            role="assistant",
            content="\n".join(self.content),
            tool_calls=self.calls,
            reasoning="\n".join(self.reasoning) or None,
        )


def messages_of(instructions: str | None, items: Iterable[InputItem]) -> Iterator[Message]:
    """Yields the chat messages of a conversation.

    Adjacent thinking, text and calls of the assistant, parts of the same answer, are joined.
    """
    if instructions:
        yield Message.model_construct(role="system", content=instructions)
    turn: _Turn | None = None
    functions: dict[str, str] = {}
    for item in items:
        other = _other_message(item, functions)
        if turn is not None and (other is not None or not _continues(item, turn)):
            yield turn.message()
            turn = None
        if other is not None:
            yield other
            continue
        turn = turn or _Turn()
        match item:
            case ReasoningItem():
                turn.reasoning += [item.text] if item.text else []
            case FunctionCall():
                name = full_name(item.namespace, item.name)
                functions[item.call_id] = name
                function = EarlierFunction.model_construct(name=name, arguments=item.arguments)
                turn.calls.append(EarlierCall.model_construct(id=item.call_id, function=function))
            case InputMessage():
                turn.content.append(item.content)
                turn.has_message = True
            case Aside(text):
                turn.content.append(text)
    if turn is not None:
        yield turn.message()


def _other_message(item: InputItem, functions: dict[str, str]) -> Message | None:
    if isinstance(item, InputMessage) and item.role != "assistant":
        return Message.model_construct(role=item.role, content=item.content)
    if isinstance(item, FunctionCallOutput):
        name = functions.get(item.call_id) or item.name
        return Message.model_construct(role="tool", content=item.output, tool_call_id=item.call_id, name=name)
    return None


def _continues(item: InputItem, turn: _Turn) -> bool:
    if isinstance(item, FunctionCall | Aside):
        return True
    return not turn.has_message and (isinstance(item, InputMessage) or not turn.calls)
