"""``/v1/chat/completions/batch``: several conversations in one body, as vLLM answers them."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_plan import AnswerPlan, plan_answer
from gateway.answers.streaming import while_client_waits
from gateway.routes.answer import AnswerFormat, StreamStart, chat_prompt, respond
from gateway.routes.chat import collected_body
from gateway.routes.context import context_of, generating_model, read_body
from gateway.routes.openapi import body_schema, documented
from gateway.routes.request_builder import truncated
from gateway.scheduler_link.served_model import ServedModel
from gateway.schemas.answers import BatchCompletion
from gateway.schemas.base import Unserved
from gateway.schemas.chat import MAX_MESSAGES, MAX_PARTS, ChatCompletionRequest, Messages, num_parts
from protos.errors import InvalidArgument, Unsupported

router = APIRouter(tags=["Generation"])

_ALONE = (
    "a batch has one collected answer for each conversation; send one conversation to /v1/chat/completions"
)


def _limit_conversations(conversations: Any) -> Any:
    # Checked before the messages themselves, which take far longer.
    if not isinstance(conversations, list):
        return conversations
    if len(conversations) > MAX_MESSAGES:
        raise ValueError(f"has {len(conversations)} conversations; send at most {MAX_MESSAGES} at once")
    lists = [messages for messages in conversations if isinstance(messages, list)]
    if (count := sum(map(len, lists))) > MAX_MESSAGES:
        raise ValueError(
            f"takes at most {MAX_MESSAGES} messages in all, got {count}; send fewer conversations at once"
        )
    if (parts := sum(map(num_parts, lists))) > MAX_PARTS:
        raise ValueError(
            f"takes at most {MAX_PARTS} parts of messages in all, got {parts}; send fewer conversations at once"
        )
    return conversations


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
        "chat_template": Unserved(
            (), "it would run for every conversation; send one conversation to /v1/chat/completions"
        ),
    }

    messages: Annotated[  # type: ignore[assignment]
        list[Messages],
        Field(
            min_length=1,
            fail_fast=True,
            description="Conversations, each a list of messages: at most as many as --max-prompts allows, with"
            f" {MAX_MESSAGES} messages and {MAX_PARTS} parts in all.",
        ),
        BeforeValidator(_limit_conversations),
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
    prompts, plans = await while_client_waits(request.receive, _planned(request, body, served))
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
        partial(collected_body, plans, is_batch=True),
        markers=first.markers,
        constraint=first.constraint,
        constraint_param=first.constraint_param,
        thinking=[plan.thinking for plan in plans if plan.thinking is not None],
    )
    return await respond(request, form, body, served, prompts)


async def _planned(
    request: Request, body: BatchChatRequest, served: ServedModel
) -> tuple[list[list[int]], list[AnswerPlan]]:
    """Returns the token ids of each conversation, and the plan of its answer."""
    context = context_of(request)
    prompts, plans = list[list[int]](), list[AnswerPlan]()
    size = len(await request.body()) if body.constrained else 0
    for messages in body.messages:
        one: Any = body.model_copy(update={"messages": messages})
        prompt = truncated(served, body, await chat_prompt(request, served, one))
        plan = partial(plan_answer, context.settings, served, one, prompt)
        plans.append(await context.text_worker.run(size, plan))
        prompts.append(prompt)
    return prompts, plans


def _no_stream(_: StreamStart) -> Any:
    raise AssertionError("a batch is not streamed")
