"""``/v1/chat/completions``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_plan import AnswerPlan, plan_answer
from gateway.answers.answer_reader import CollectedMessage, finish_reason
from gateway.answers.chat_stream_writer import ChatStreamWriter
from gateway.answers.generation import Delta
from gateway.answers.streaming import ChatChunks
from gateway.routes.answer import AnswerFormat, CollectedExtras, respond
from gateway.routes.context import context_of, generating_model, read_body
from gateway.routes.openapi import body_schema, documented, event_stream
from gateway.routes.request_builder import encode_chat, truncated
from gateway.schemas.answers import ChatCompletion
from gateway.schemas.chat import ChatCompletionRequest

router = APIRouter(tags=["Generation"])


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    openapi_extra=body_schema(ChatCompletionRequest),
    responses=documented(ChatCompletion, content=event_stream("`chat.completion.chunk` objects")),
)
async def chat_completions(request: Request) -> Response:
    """Generates the assistant's next message for a conversation, as OpenAI's endpoint does.

    The model's chat template turns the messages into a prompt. With `tools`, the message may contain tool
    calls. With `stream`, the answer arrives as server-sent events that end with `data: [DONE]`.
    """
    body = await read_body(request, ChatCompletionRequest)
    context = context_of(request)
    served = await generating_model(request, body.model)
    prompt = await encode_chat(
        served,
        context.text_worker,
        body.messages,
        tools=body.tools,
        may_call=body.tool_choice != "none",
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs,
        size=len(await request.body()),
    )
    prompt = truncated(served, body, prompt)
    size = len(await request.body()) if body.tools or body.constrained else 0
    plan = await context.text_worker.run(size, lambda: plan_answer(context.settings, served, body, prompt))
    form = AnswerFormat(
        "chatcmpl-",
        partial(_stream, plan),
        partial(_completion, plan),
        plan.markers,
        plan.constraint,
        plan.constraint_param,
    )
    return await respond(request, form, body, served, [prompt])


def _stream(plan: AnswerPlan, *args: Any, **options: Any) -> tuple[ChatChunks, Callable[[Delta], bytes]]:
    chunks = ChatChunks(*args, **options)
    if plan.plain:
        return chunks, chunks.write
    return chunks, ChatStreamWriter(chunks, plan.reader, named=plan.named).write


def _choice(plan: AnswerPlan, end: Delta, extras: CollectedExtras) -> dict[str, Any]:
    message, reason = CollectedMessage.of(plan.reader().whole(end.text)), end.finish_reason
    return {
        "index": end.sequence,
        "message": message.body(with_reasoning=plan.thinking is not None),
        "logprobs": extras.reporter.chat(end.tokens),
        "finish_reason": reason and finish_reason(reason, len(message.calls), named=plan.named),
        "stop_reason": end.stop_reason,
    }


def _completion(
    plan: AnswerPlan, answer_id: str, created: int, model: str, ends: list[Delta], extras: CollectedExtras
) -> bytes:
    choices = [_choice(plan, end, extras) for end in ends]
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": choices,
            "usage": extras.usage.body(),
            **extras.of_prompt(0),
        }
    )
