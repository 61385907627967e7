"""The routes of the Responses API."""

from functools import partial
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.answer_reader import DeltaReader
from gateway.generation.context import context_of, generating_model
from gateway.generation.generation import Usage
from gateway.generation.logprobs import ChatToken, Reporter, TokenReport
from gateway.generation.respond import chat_prompt, kept_alive, respond_to_chat
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import AnswerHead, CollectedWriter, ResponseWriter
from gateway.http.errors import UnknownRoute
from gateway.http.openapi import api_router, documented, media
from gateway.parsers.events import Event, Text
from gateway.quoting import quote
from gateway.responses_api.conversion import ResponseAsChat, to_chat
from gateway.responses_api.schemas import InputTokens, ResponseAnswer, ResponsesRequest
from gateway.responses_api.writer import (
    ResponseObject,
    ResponseStreamWriter,
    chat_logprobs,
    collected,
    only_error,
)
from gateway.scheduler_client.served_model import ServedModel
from gateway.tools.custom_tools import skipped_tools_header
from protos.errors import NotFound

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
    answer = _respond(request, body, headers)
    return await kept_alive(request, answer, only_error, streams=body.stream, headers=headers)


@router.post(
    f"{PATH}/input_tokens",
    summary="Count the tokens of an input (OpenAI's Responses API)",
    responses=documented(InputTokens),
)
async def count_input_tokens(request: Request, body: ResponsesRequest) -> Response:
    """Returns the number of prompt tokens of the same instructions, input and functions."""
    served = await generating_model(request, body.model)
    prompt = await chat_prompt(request, served, await _chat(request, body, served))
    content = orjson.dumps({"object": "response.input_tokens", "input_tokens": len(prompt)})
    return Response(content, 200, skipped_tools_header(body.skipped_tools), "application/json")


async def _chat(request: Request, body: ResponsesRequest, served: ServedModel) -> ResponseAsChat:
    size = len(await request.body())
    template = served.text.tool_template if body.functions else served.text.chat_template
    return await context_of(request).text_worker.run(size, lambda: to_chat(body, template))


async def _respond(request: Request, body: ResponsesRequest, headers: dict[str, str]) -> Response:
    served = await generating_model(request, body.model)

    chat, writer = await _chat(request, body, served), partial(_writer, body)
    return await respond_to_chat(request, chat, writer, id_prefix=ID_PREFIX, headers=headers)


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
