"""The routes of the Messages API."""

from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.context import context_of, generating_model
from gateway.generation.generation import Usage
from gateway.generation.respond import chat_prompt, kept_alive, respond_to_chat
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import AnswerHead, CollectedWriter, ResponseWriter
from gateway.http.errors import UnknownRoute, shape_errors
from gateway.http.openapi import api_router, documented, media
from gateway.messages_api.conversion import ConvertedRequest, to_chat
from gateway.messages_api.schemas import (
    AnthropicErrorAnswer,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    PromptRequest,
    TokenCount,
)
from gateway.messages_api.writer import ID_PREFIX, MessageStreamWriter, error_event, message_body, shape
from gateway.scheduler_client.served_model import ServedModel
from gateway.text.chat_template import ChatTemplate
from gateway.tools.custom_tools import skipped_tools_header
from protos.service.logs import request_id

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
    answer = _respond(request, body, headers)
    return await kept_alive(request, answer, error_event, streams=body.stream, headers=headers)


async def _respond(request: Request, body: MessagesRequest, headers: dict[str, str]) -> Response:
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
    prompt = await chat_prompt(request, served, chat)
    return await respond_to_chat(
        request, chat, new_writer, id_prefix=ID_PREFIX, headers=headers, prompt=prompt
    )


@router.post(
    f"{PATH}/count_tokens",
    summary="Count the tokens of a prompt (Anthropic's API)",
    responses=documented(TokenCount),
)
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Returns the number of prompt tokens of the same messages, system prompt and tools."""
    served = await generating_model(request, body.model)
    prompt = await chat_prompt(request, served, await _chat(request, body, served))
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
    return await context_of(request).text_worker.run(size, lambda: to_chat(body, template))


def _template(body: PromptRequest, served: ServedModel) -> ChatTemplate | None:
    has_tools = any(tool.custom for tool in body.tools)
    return served.text.tool_template if has_tools else served.text.chat_template
