"""The routes of the Messages API, which turn a body into a chat request.

Validated parts of bodies are not validated again.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.generation import Usage
from gateway.generation.respond import (
    context_of,
    generating_model,
    prompt_of,
    respond_to_chat,
    skipped_tools_header,
)
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import AnswerHead, CollectedWriter, ResponseWriter
from gateway.http.errors import UnknownRoute, shape_errors
from gateway.http.openapi import api_router, documented, media
from gateway.messages_api.schemas import (
    AnthropicErrorAnswer,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    PromptRequest,
    TextBlock,
    TokenCount,
)
from gateway.messages_api.writer import ID_PREFIX, MessageStreamWriter, message_body, shape
from gateway.parsers.reasoning import SWITCHES
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.chat import ChatCompletionRequest, Message
from gateway.schemas.structured import JsonSchema, ResponseFormat
from gateway.schemas.tools import EarlierCall, EarlierFunction, Function, NamedChoice, Tool
from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument
from protos.service.logs import request_id

# Claude Code begins its system prompts with a block of this form, whose text differs in every request. It is
# not part of the prompt: requests could share no prefix beyond it.
_BILLING: Final = "x-anthropic-billing-header"


class ConvertedRequest(ChatCompletionRequest):
    """A chat request with the parameter names of Anthropic's API."""

    budget_is_a_hint: ClassVar[bool] = True

    @property
    def constraint_param(self) -> str:
        """The parameter that constrains the answer."""
        return "output_config.format"


def to_chat(body: PromptRequest, template: ChatTemplate | None) -> ConvertedRequest:
    """Returns the chat request for ``body`` and the model's chat template."""
    messages = _messages(body, merge_system=template is not None and template.wants_system_first)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools if tool.custom],
        "chat_template_kwargs": _variables(body, template),
        "reasoning_effort": body.output_config and body.output_config.effort,
        "include_reasoning": body.thinking is None or body.thinking.type != "disabled",
    }
    if messages and messages[-1].role == "assistant":
        if messages[-1].tool_calls:
            raise InvalidArgument(
                "'messages' ends with a call: send its result as a 'tool_result' of the user's next turn",
                param="messages",
            )
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if (schema := body.schema_of_answer) is not None:
        wrapped = JsonSchema.model_construct(schema_=schema)
        fields["response_format"] = ResponseFormat.model_construct(type="json_schema", json_schema=wrapped)
    if isinstance(body, MessagesRequest):
        fields |= _sampling(body)
    return ConvertedRequest.model_construct(**fields)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    thinking = body.thinking
    enabled = thinking is not None and thinking.type == "enabled"
    return {
        "thinking_token_budget": thinking.budget_tokens if thinking and enabled else None,
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "user": body.user,
    }


def _variables(body: PromptRequest, template: ChatTemplate | None) -> dict[str, Any]:
    known = template.variables if template is not None else frozenset()
    variables: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        on = body.thinking.type == "enabled"
        variables |= {name: on for name in SWITCHES if name in known}
    return {**variables, **body.chat_template_kwargs}


def _messages(body: PromptRequest, *, merge_system: bool) -> list[Message]:
    texts, turns = [_text_of(body.system)], body.messages
    if merge_system:
        texts += [_text_of(turn.content) for turn in turns if turn.role == "system"]
        turns = [turn for turn in turns if turn.role != "system"]
    system = "\n".join(filter(None, texts))
    messages = [Message.model_construct(role="system", content=system)] if system else []
    names = {block.id: block.name for turn in turns for block in turn.content if block.type == "tool_use"}
    for role, group in itertools.groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.content]
        if role == "user":
            messages += _user_turns(blocks, names)
        elif role == "assistant":
            messages.append(_assistant_turn(blocks))
        elif text := _text_of(blocks):
            messages.append(Message.model_construct(role="system", content=text))
    return messages


def _text_of(blocks: Iterable[TextBlock | Block]) -> str:
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _user_turns(blocks: Sequence[Block], names: dict[str | None, str | None]) -> Iterator[Message]:
    for block in blocks:
        if block.type == "tool_result":
            call = block.tool_use_id
            yield Message.model_construct(
                role="tool", content=_result(block), tool_call_id=call, name=names.get(call)
            )
    said = [block for block in blocks if block.type == "text"]
    if said or not blocks:
        yield Message.model_construct(role="user", content="\n".join(block.text or "" for block in said))


def _result(block: Block) -> str:
    text = "\n".join(part.text for part in block.content)
    return text if not block.is_error or text[:5].lower() == "error" else f"Error: {text}"


def _assistant_turn(blocks: Sequence[Block]) -> Message:
    calls = [
        EarlierCall.model_construct(
            id=block.id or "",
            function=EarlierFunction.model_construct(name=block.name or "", arguments=_json(block.input)),
        )
        for block in blocks
        if block.type == "tool_use"
    ]
    thinking = [block.thinking or "" for block in blocks if block.type == "thinking"]
    text = "\n".join(block.text or "" for block in blocks if block.type == "text")
    return Message.model_construct(
        role="assistant", content=text, tool_calls=calls, reasoning="\n".join(filter(None, thinking)) or None
    )


def _json(arguments: dict[str, Any] | None) -> str:
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidArgument(
            "the 'input' of a call in 'messages' is nested too deep; flatten it", param="messages"
        ) from error


def _tool(tool: AnthropicTool) -> Tool:
    fields: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        fields["description"] = tool.description
    fields["parameters"] = {"type": "object", **(tool.input_schema or {})}
    if tool.strict is not None:
        fields["strict"] = tool.strict
    return Tool.model_construct(type="function", function=Function.model_construct(**fields))


def _choice(choice: AnthropicToolChoice) -> str | NamedChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return NamedChoice(choice.name or "")
        case _:
            return choice.type


PATH: Final = "/v1/messages"

router = api_router("Messages", error=AnthropicErrorAnswer, api="Anthropic")
shape_errors(PATH, shape)

_EVENTS: Final = media(
    "text/event-stream",
    "Anthropic's events: message_start, ping, content_block_start, content_block_delta, content_block_stop,"
    " message_delta, and message_stop or error as the last one.",
)


@router.post(
    PATH,
    summary="Answer a conversation (Anthropic's API)",
    responses=documented(MessageAnswer, content=_EVENTS),
)
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Generates the assistant's next turn for a conversation, as Anthropic's endpoint does.

    The model's chat template turns system prompt, messages and tools into a prompt. With `stream`, the answer
    arrives as server-sent events.
    """
    headers = {"request-id": request_id(), **skipped_tools_header(body.skipped_tools)}
    served = await generating_model(request, body.model)
    omit_thinking = body.thinking is not None and body.thinking.display == "omitted"

    def new_writer(plan: AnswerPlan, head: AnswerHead) -> ResponseWriter:
        if body.stream:
            return MessageStreamWriter(head, plan, omit_thinking=omit_thinking)

        def collected(ends: list[Delta], usage: Usage) -> bytes:
            events = plan.reader().whole(ends[0].text)
            return orjson.dumps(message_body(head, ends[0], events, usage, omit_thinking=omit_thinking))

        return CollectedWriter(head, collected)

    chat = await _chat(request, body, served)
    return await respond_to_chat(request, chat, new_writer, id_prefix=ID_PREFIX, headers=headers)


@router.post(
    f"{PATH}/count_tokens",
    summary="Count the tokens of a prompt (Anthropic's API)",
    responses=documented(TokenCount),
)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Returns the number of prompt tokens of the same messages, system prompt and tools."""
    served = await generating_model(request, body.model)
    prompt = await prompt_of(request, served, await _chat(request, body, served))
    headers = {"request-id": request_id(), **skipped_tools_header(body.skipped_tools)}
    return Response(orjson.dumps({"input_tokens": len(prompt)}), 200, headers, "application/json")


@router.api_route(f"{PATH}/batches", methods=["GET", "POST"], include_in_schema=False)
@router.api_route(f"{PATH}/batches/{{rest:path}}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def batches() -> Response:
    """Refuses batches: nothing is stored."""
    raise UnknownRoute(
        f"{PATH}/batches is not served: nothing is stored here; send each request of the batch to {PATH}"
    )


async def _chat(request: Request, body: PromptRequest, served: ServedModel) -> ConvertedRequest:
    size, template = len(await request.body()), _template(body, served)
    return await context_of(request).text_worker.run(size, lambda: to_chat(body, template), inline=False)


def _template(body: PromptRequest, served: ServedModel) -> ChatTemplate | None:
    has_tools = any(tool.custom for tool in body.tools)
    return served.text.tool_template if has_tools else served.text.chat_template
