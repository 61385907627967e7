"""``/v1/chat/completions/batch``: several conversations in one body, as vLLM answers them."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_plan import AnswerPlan, plan_answer
from gateway.routes.answer import AnswerFormat, StreamStart, chat_prompt, respond
from gateway.routes.chat import collected_body
from gateway.routes.context import context_of, generating_model, read_body
from gateway.routes.openapi import body_schema, documented
from gateway.routes.request_builder import truncated
from gateway.schemas.answers import BatchCompletion
from gateway.schemas.base import Unserved
from gateway.schemas.chat import ChatCompletionRequest, Messages
from protos.errors import InvalidArgument, Unsupported

router = APIRouter(tags=["Generation"])

_ALONE = (
    "a batch has one collected answer for each conversation; send one conversation to /v1/chat/completions"
)


class BatchChatRequest(ChatCompletionRequest):
    """A request to answer several conversations."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **ChatCompletionRequest.unserved,
        "n": Unserved((1,), _ALONE),
        "best_of": Unserved((1,), _ALONE),
        "stream": Unserved((False,), _ALONE),
        "stream_options": Unserved(({},), _ALONE),
        "tools": Unserved(([],), _ALONE),
        "tool_choice": Unserved(("none",), _ALONE),
        "parallel_tool_calls": Unserved((True, False), _ALONE),
    }

    messages: Annotated[  # type: ignore[assignment]
        list[Messages],
        Field(min_length=1, fail_fast=True, description="Conversations, each a list of messages."),
    ]


@router.post(
    "/v1/chat/completions/batch",
    summary="Answer several conversations",
    openapi_extra=body_schema(BatchChatRequest),
    responses=documented(BatchCompletion),
)
async def batch(request: Request) -> Response:
    """Answers each conversation with one choice, in the order of the conversations.

    All other parameters are those of `/v1/chat/completions` and hold for every conversation. An error of one
    conversation is the error of the whole body.
    """
    body = await read_body(request, BatchChatRequest)
    context = context_of(request)
    served = await generating_model(request, body.model)
    if len(body.messages) > (most := context.settings.max_prompts):
        raise InvalidArgument(
            f"'messages' has {len(body.messages)} conversations; send at most {most} at once",
            param="messages",
        )
    prompts, plans = list[list[int]](), list[AnswerPlan]()
    size = len(await request.body()) if body.constrained else 0
    for messages in body.messages:
        one: Any = body.model_copy(update={"messages": messages})
        prompt = truncated(served, body, await chat_prompt(request, served, one))
        plan = partial(plan_answer, context.settings, served, one, prompt)
        plans.append(await context.text_worker.run(size, plan))
        prompts.append(prompt)
    first = plans[0]
    if any(plan.constraint != first.constraint for plan in plans):
        raise Unsupported(
            f"{first.constraint_param} is not supported for conversations of which only some end within"
            " thinking; send them in batches of their own",
            param=first.constraint_param,
        )
    form = AnswerFormat(
        "chatcmpl-",
        _no_stream,
        partial(collected_body, plans),
        markers=first.markers,
        constraint=first.constraint,
        constraint_param=first.constraint_param,
        thinking=first.thinking,
    )
    return await respond(request, form, body, served, prompts)


def _no_stream(_: StreamStart) -> Any:
    raise AssertionError("a batch is not streamed")
