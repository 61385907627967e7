"""The common parts of all routes, and of generating routes: submit prompts, then answer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from gateway.auth.key_store import KeyStore, account_of
from gateway.auth.rate_limits import charge
from gateway.generation.answer_plan import AnswerPlan, plan_answer
from gateway.generation.generation import Generation, RequestTimings
from gateway.generation.request_builder import (
    bad_word_tokens,
    check_logprobs,
    encode_chat,
    generate_requests,
    log_requests,
    truncated,
)
from gateway.generation.sequence_text import Reporter
from gateway.generation.streaming import Answer, AnswerHead, ResponseWriter, while_client_waits
from gateway.generation.thinking_budget import thinking_budget
from gateway.http.bodies import BodyLimits
from gateway.http.middleware import note, pass_on
from gateway.metrics import Metrics, SharedMetrics
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.in_flight import MAX_REQUEST_ID
from gateway.scheduler_client.served_model import ServedModel, ServedModelWatcher
from gateway.schemas.chat import ChatCompletionRequest, Message, TemplateInput
from gateway.schemas.sampling import SamplingRequest
from gateway.settings import Settings
from gateway.text.tokenization import TextWorker
from protos.service.backpressure import UnreadLimits
from protos.service.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2 import LoraInfo


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a gateway."""

    settings: Settings
    client: InferenceClient
    watcher: ServedModelWatcher
    metrics: Metrics
    unread: UnreadLimits
    """Bytes of answers not yet read by clients."""
    bodies: BodyLimits
    """Bounds on requests' bodies."""
    text_worker: TextWorker
    keys: KeyStore
    shared_metrics: SharedMetrics | None
    """With several gateways on a port."""
    new_id: Callable[[], str]
    """Makes ids of answers and requests."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Seconds since the epoch."""


def context_of(request: Request) -> Context:
    """Returns the gateway of ``request``."""
    context: Context = request.app.state.context
    return context


async def served_model(request: Request, name: str | None) -> ServedModel:
    """Returns the served model; waits until a model is ready.

    Raises:
        Unavailable: if too many requests wait, or none was ready in time.
        UnknownModel: if another model is served.
        ClientGone: if the client disconnected.
    """
    context = context_of(request)
    watcher = context.watcher
    if watcher.awaits_model:
        waiting = context.client.startup_queue.wait_for(watcher.found(), "no model is ready yet")
        await while_client_waits(request.receive, waiting)
    return watcher.served(name)


async def generating_model(request: Request, name: str | None) -> ServedModel:
    """Returns the served model for a request to generate; ``name`` may be a LoRA adapter's.

    The scheduler refuses unknown names.

    Raises:
        Unsupported: if the model does not generate.
        UnknownModel: if the name is no adapter's.
        TriptychError: as :func:`served_model`.
    """
    served = await served_model(request, None)
    if served.model.pool_tasks:
        served = context_of(request).watcher.served(name)
    served.check_generates()
    served.adapter_of(name)
    return served


async def find_lora(request: Request, name: str) -> LoraInfo:
    """Returns the LoRA adapter with that name."""
    context = context_of(request)
    served = context.watcher.served()
    for lora in await context.client.list_loras():
        if lora.name == name:
            return lora
    raise served.unknown(name)


async def known_model(request: Request, name: str | None) -> ServedModel:
    """Returns the served model; ``name`` may be a LoRA adapter's, which shares its tokenizer."""
    served = context_of(request).watcher.served()
    if name is not None and not served.has_name(name):
        await find_lora(request, name)
    return served


# Hexadecimal digits that make a client's request id unique among its retries.
_UNIQUE_DIGITS: Final = 8


SKIPPED_TOOLS: Final = "x-skipped-tools"

# Types that are named. Proxies refuse answers with long headers.
_MAX_NAMED: Final = 16


def skipped_tools_header(types: Iterable[str]) -> dict[str, str]:
    """Returns the header that names the types of skipped tools, each once; logs them, too."""
    if not (skipped := list(dict.fromkeys(types))):
        return {}
    if (more := len(skipped) - _MAX_NAMED) > 0:
        skipped[_MAX_NAMED:] = [f"and {more} more"]
    get_logger().info("the request has tools that are not served", skipped=skipped)
    return {SKIPPED_TOOLS: ", ".join(skipped)}


NewWriter: TypeAlias = Callable[[AnswerHead], ResponseWriter]
"""Makes the writer of an answer, streamed or collected."""


async def respond_to_chat(
    request: Request,
    body: ChatCompletionRequest,
    new_writer: Callable[[AnswerPlan, AnswerHead], ResponseWriter],
    *,
    id_prefix: str,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answers a conversation, in the form that ``new_writer`` gives the planned answer."""
    context = context_of(request)
    served = await generating_model(request, body.model)
    prompt = truncated(served, body, await prompt_of(request, served, body))
    size = len(await request.body())
    effort = size if body.tools or body.constrained else 0
    plan = await context.text_worker.run(effort, lambda: plan_answer(context.settings, served, body, prompt))
    writer = partial(new_writer, plan)
    return await respond(request, body, served, [prompt], plan, writer, id_prefix=id_prefix, headers=headers)


async def prompt_of(request: Request, served: ServedModel, body: ChatCompletionRequest) -> list[int]:
    """Returns the token ids of the conversation in ``body``."""
    special, may_call = bool(body.add_special_tokens), body.tool_choice != "none"
    return await chat_prompt(request, served, body.messages, body, special=special, may_call=may_call)


async def chat_prompt(
    request: Request,
    served: ServedModel,
    messages: Sequence[Message],
    body: TemplateInput,
    *,
    special: bool,
    may_call: bool = True,
) -> list[int]:
    """Returns the token ids of a conversation; see :func:`encode_chat`."""
    context = context_of(request)
    return await encode_chat(
        served,
        context.text_worker,
        messages,
        body,
        defaults=context.settings.default_chat_template_kwargs,
        may_call=may_call,
        special=special,
        size=len(await request.body()),
    )


async def respond(
    request: Request,
    body: SamplingRequest,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    plan: AnswerPlan,
    new_writer: NewWriter,
    *,
    id_prefix: str,
    headers: Mapping[str, str] | None = None,
    echoes: Sequence[str] | None = None,
) -> Response:
    """Runs ``prompts`` and answers as ``body`` asks for; ``echoes`` are the texts before the answers.

    Raises:
        TriptychError: if the request is refused or fails before the first byte of the answer.
    """
    context = context_of(request)
    answer_id, created = id_prefix + context.new_id(), int(context.wall_clock())
    requests = await _wire_requests(request, body, served, prompts, plan.constraint)
    generation = Generation.begin(
        context.client.submit(requests),
        body,
        served,
        context.text_worker,
        RequestTimings(context.metrics, context.clock, request.scope["triptych.arrived"]),
        plan,
        echoes=echoes,
    )
    reporter = Reporter(
        served.text.detokenizers.token_bytes,
        as_ids=body.return_tokens_as_token_ids,
        wanted=body.num_logprobs is not None,
    )
    model = served.adapter_of(body.model) or served.model.served_name
    head = AnswerHead(answer_id, created, model, served.fingerprint, body, generation, reporter)
    idle_s = context.settings.sse_keep_alive_interval
    return Answer(generation, new_writer(head), context.unread, headers, keep_alive_s=idle_s)


async def _wire_requests(
    request: Request,
    body: SamplingRequest,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    constraint: pb.StructuredOutput | None,
) -> list[inference.GenerateRequest]:
    """Returns the checked requests to the scheduler, which are logged and charged."""
    context = context_of(request)
    account = account_of(request, body.priority, body.cache_salt)
    note(request.scope, tenant=account.tenant or None)
    check_logprobs(body, context.settings.max_logprobs)
    wire_id, size = unique_wire_id(request), sum(map(len, prompts))

    def make() -> list[inference.GenerateRequest]:
        words = bad_word_tokens(served.text, body.bad_words)
        return generate_requests(
            served,
            body,
            prompts,
            wire_id,
            account=account,
            bad_words=words,
            constraint=constraint,
            budget=partial(thinking_budget, context.settings, served, body),
        )

    # Every prompt has its own copy of the parameters.
    size += len(await request.body()) * len(prompts)
    requests = await context.text_worker.run_light(size, make)
    if context.settings.enable_log_requests:
        log_requests(requests)
    charge(request.scope, sum(map(len, prompts)))
    pass_on(request.scope, requests)
    return requests


def unique_wire_id(request: Request) -> str:
    """Returns the request's id with a suffix that makes it unique among a client's retries.

    The result leaves room for a prompt's index.
    """
    given: str = request.scope["triptych.request_id"]
    return f"{given[: MAX_REQUEST_ID - _UNIQUE_DIGITS - 8]}-{context_of(request).new_id()[:_UNIQUE_DIGITS]}"
