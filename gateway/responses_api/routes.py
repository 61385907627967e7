"""The routes of the Responses API, which turn a body into a chat request.

Validated parts of bodies are not validated again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan, DeltaReader
from gateway.generation.generation import Usage
from gateway.generation.respond import (
    context_of,
    generating_model,
    prompt_of,
    respond_to_chat,
    skipped_tools_header,
)
from gateway.generation.sequence_text import ChatToken, Delta, Reporter, TokenReport
from gateway.generation.streaming import AnswerHead, CollectedWriter, ResponseWriter
from gateway.http.errors import UnknownRoute
from gateway.http.openapi import api_router, documented, media
from gateway.parsers.events import Event, Text
from gateway.responses_api.input_items import (
    Aside,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    ReasoningItem,
)
from gateway.responses_api.schemas import InputTokens, ResponseAnswer, ResponsesRequest, full_name
from gateway.responses_api.writer import ResponseObject, ResponseStreamWriter, chat_logprobs, collected
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import quote
from gateway.schemas.chat import ChatCompletionRequest, Message
from gateway.schemas.sampling import SamplingRequest
from gateway.schemas.tools import Allowed, EarlierCall, EarlierFunction, Function, Tool
from gateway.text.chat_template import ChatTemplate, joined
from protos.errors import NotFound

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


PATH: Final = "/v1/responses"
ID_PREFIX: Final = "resp_"

router = api_router("Responses")

_EVENTS: Final = media(
    "text/event-stream",
    "OpenAI's typed events, numbered by sequence_number, from response.created to response.completed,"
    " response.incomplete or response.failed.",
)


@router.post(
    PATH,
    summary="Answer a conversation (OpenAI's Responses API)",
    responses=documented(ResponseAnswer, content=_EVENTS),
)
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Generates the next items of a conversation, as OpenAI's endpoint does, without storing them.

    The model's chat template turns instructions, input and functions into a prompt. Tools other than
    functions are skipped; the header X-Skipped-Tools names them. With `stream`, the answer arrives as
    server-sent events.
    """
    headers = skipped_tools_header(body.skipped_tools)
    served = await generating_model(request, body.model)
    chat, writer = await _chat(request, body, served), partial(_writer, body)
    return await respond_to_chat(request, chat, writer, id_prefix=ID_PREFIX, headers=headers)


@router.post(
    f"{PATH}/input_tokens",
    summary="Count the tokens of an input (OpenAI's Responses API)",
    responses=documented(InputTokens),
)
async def count_input_tokens(request: Request, body: ResponsesRequest) -> Response:
    """Returns the number of prompt tokens of the same instructions, input and functions."""
    served = await generating_model(request, body.model)
    prompt = await prompt_of(request, served, await _chat(request, body, served))
    content = orjson.dumps({"object": "response.input_tokens", "input_tokens": len(prompt)})
    return Response(content, 200, skipped_tools_header(body.skipped_tools), "application/json")


async def _chat(request: Request, body: ResponsesRequest, served: ServedModel) -> ResponseAsChat:
    size = len(await request.body())
    template = served.text.tool_template if body.functions else served.text.chat_template
    return await context_of(request).text_worker.run(size, lambda: to_chat(body, template), inline=False)


def _writer(body: ResponsesRequest, plan: AnswerPlan, head: AnswerHead) -> ResponseWriter:
    response = ResponseObject(body, head.answer_id, head.created, head.model)
    if not body.stream:
        return CollectedWriter(head, partial(_body, response, plan, head.reporter))
    reader = None if plan.plain else DeltaReader(plan.reader())
    return ResponseStreamWriter(response, reader, head.reporter)


def _body(
    response: ResponseObject, plan: AnswerPlan, reporter: Reporter, ends: list[Delta], usage: Usage
) -> bytes:
    (end,) = ends
    logprobs, cut = _message_logprobs(plan, end, reporter), end.finish_reason == "length"
    output = collected(response.output(), plan.reader().whole(end.text), logprobs)
    return orjson.dumps(response.ended(output.bodies(cut=cut), usage, cut=cut))


def _message_logprobs(plan: AnswerPlan, end: Delta, reporter: Reporter) -> list[ChatToken]:
    if plan.plain or not reporter.wanted:
        return chat_logprobs(reporter, end.tokens)
    reader, last = DeltaReader(plan.reader()), len(end.tokens) - 1
    tokens: list[TokenReport] = []
    event: Event | None = None
    for index, token in enumerate(end.tokens):
        until = len(end.text) if index == last else end.tokens[index + 1].offset
        reason = end.finish_reason if index == last else None
        for event, reports in reader.read(Delta(0, end.text[token.offset : until], reason, tokens=(token,))):
            tokens += reports if isinstance(event, Text) else []
    if isinstance(event, Text):
        tokens += reader.take_reports()
    return chat_logprobs(reporter, tokens)


@router.post(f"{PATH}/compact", include_in_schema=False)
async def compact() -> Response:
    """Refuses to compact conversations."""
    raise UnknownRoute(
        f"{PATH}/compact is not served: a compacted conversation could only be read by OpenAI's models; ask the"
        f" model for a summary with POST {PATH}"
    )


@router.get(f"{PATH}/{{response_id}}", include_in_schema=False)
@router.delete(f"{PATH}/{{response_id}}", include_in_schema=False)
@router.post(f"{PATH}/{{response_id}}/cancel", include_in_schema=False)
@router.get(f"{PATH}/{{response_id}}/input_items", include_in_schema=False)
async def stored_response(response_id: str) -> Response:
    """Answers 404: responses are never stored."""
    raise NotFound(
        f"there is no response {quote(response_id)}: responses are not stored here, whatever 'store' says; keep"
        " the answer of POST /v1/responses",
        param="response_id",
    )
