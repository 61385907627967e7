"""The part that all generating endpoints share: submit the prompts, then stream or collect the answer."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from gateway import version
from gateway.auth.identity import account_of
from gateway.auth.rate_limits import charge
from gateway.generation.answer_plan import AnswerPlan, plan_answer
from gateway.generation.chat_prompts import ChatInput
from gateway.generation.context import context_of, generating_model
from gateway.generation.generation import Generation, Timing, Usage
from gateway.generation.logprobs import Reporter
from gateway.generation.request_builder import (
    bad_word_tokens,
    check_logprobs,
    generate_requests,
    log_requests,
    truncated,
)
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import Answer, CollectedWriter, ResponseWriter
from gateway.http.event_streams import EarlyStream
from gateway.http.middleware import note, pass_on
from gateway.parsers.events import ToolParser
from gateway.scheduler_client.pending_request import MAX_REQUEST_ID
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.chat import ChatCompletionRequest
from gateway.schemas.sampling import SamplingRequest
from protos.errors import TriptychError
from protos.triptych.v1 import common_pb2 as pb

# Hexadecimal digits that make a client's request id unique among its retries.
_UNIQUE_DIGITS: Final = 8


class CollectedExtras(NamedTuple):
    """The parts of a collected answer beside its texts."""

    usage: Usage
    reporter: Reporter
    prompt_logprobs: list[list[dict[str, Any] | None]] | None
    """One list per prompt, if log-probabilities of prompts were asked for."""
    n: int
    """Choices per prompt."""
    fingerprint: str
    """The model's; answers carry it as `system_fingerprint`."""
    prompts: Sequence[Sequence[int]] | None = None
    """Token ids of the prompts, if ids were asked for."""

    def of_prompt(self, sequence: int) -> dict[str, Any]:
        """Returns the fields about the prompt that ``sequence`` continues."""
        fields: dict[str, Any] = {}
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs[sequence // self.n]
        if self.prompts is not None:
            fields["prompt_token_ids"] = self.prompts[sequence // self.n]
        return fields

    def of_choice(self, end: Delta) -> dict[str, Any]:
        """Returns the further fields of a choice."""
        return {} if self.prompts is None else {"token_ids": end.token_ids}


class StreamStart(NamedTuple):
    """The parts of an answer that the writer of its stream needs."""

    answer_id: str
    created: int
    """Seconds since the epoch."""
    model: str
    reporter: Reporter
    usage_so_far: Callable[[], Usage]
    fingerprint: str
    """The model's; answers carry it as `system_fingerprint`."""
    prompt_of: Callable[[int], Sequence[int]] | None
    """Returns the token ids of a choice's prompt, if ids were asked for."""


class AnswerFormat(NamedTuple):
    """How one endpoint writes its answers."""

    id_prefix: str
    stream: Callable[[StreamStart], ResponseWriter]
    """Makes the writer of a streamed answer."""
    body: Callable[[str, int, str, list[Delta], CollectedExtras], bytes]
    """Encodes a collected answer from its id, time of creation, model, whole texts and extras."""
    markers: frozenset[str] | None = frozenset()
    """Special tokens that the endpoint needs as text; ``None``: all of them."""
    constraint: pb.StructuredOutput | None = None
    """The grammar that the output must match; ``None``: any text is fine."""
    constraint_param: str = ""
    """The request's parameter that set the constraint."""
    headers: Mapping[str, str] | None = None
    """Further headers of the HTTP response."""
    thinking: Sequence[Callable[[], ToolParser]] = ()
    """For each prompt, makes a parser that separates thinking; empty: the model does not think."""


async def kept_alive(
    request: Request,
    answer: Coroutine[Any, Any, Response],
    write_error: Callable[[TriptychError], bytes],
    *,
    streams: bool,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns the response of ``answer``; while no model is known yet, a stream whose comments keep it open.

    Args:
        request: the HTTP request.
        answer: answers it.
        write_error: writes the events that end a stream that failed before its answer began.
        streams: whether the answer is a stream.
        headers: the headers of such a stream that do not depend on the model.
    """
    context = context_of(request)
    every_s = context.settings.sse_keep_alive_interval
    if streams and every_s and context.watcher.awaits_model:
        return EarlyStream(answer, every_s, write_error, headers)
    return await answer


async def respond_to_chat(
    request: Request,
    body: ChatCompletionRequest,
    write: Callable[[AnswerPlan], AnswerFormat],
    prompt: list[int] | None = None,
) -> Response:
    """Answers a conversation in the form of one protocol.

    Args:
        request: the HTTP request.
        body: the conversation; protocols other than chat completions convert theirs.
        write: returns how the planned answer is written; its markers and constraint are set here.
        prompt: what :func:`chat_prompt` has returned for the conversation; ``None``: it was not called.

    Raises:
        TriptychError: if the request is refused or fails before the first byte of the answer.
    """
    context = context_of(request)
    served = await generating_model(request, body.model)
    if prompt is None:
        prompt = await chat_prompt(request, served, body)
    prompt = truncated(served, body, prompt)
    size = len(await request.body())
    effort = size if body.tools or body.constrained else 0
    plan = await context.text_worker.run(effort, lambda: plan_answer(context.settings, served, body, prompt))
    form = write(plan)._replace(
        markers=plan.markers,
        constraint=plan.constraint,
        constraint_param=plan.constraint_param,
        thinking=() if plan.thinking is None else [plan.thinking],
    )
    return await respond(request, form, body, served, [prompt])


async def chat_prompt(request: Request, served: ServedModel, body: ChatCompletionRequest) -> list[int]:
    """Returns the token ids of a conversation; :meth:`ChatEncoder.encode` lists what it raises."""
    chat = ChatInput.of(body.messages, body, may_call=body.tool_choice != "none")
    size = len(await request.body())
    encoder = context_of(request).chat_encoder
    return await encoder.encode(served, chat, special=bool(body.add_special_tokens), size=size)


async def respond(
    request: Request,
    form: AnswerFormat,
    body: SamplingRequest,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    *,
    echoes: Sequence[str] | None = None,
) -> Response:
    """Runs ``prompts`` and answers in the way that ``body`` asks for.

    Args:
        request: the HTTP request.
        form: writes the answer.
        body: the parsed request body.
        served: the model.
        prompts: token ids, one list per prompt.
        echoes: for each prompt, the text that its answers begin with; ``None``: answers do not repeat the
            prompt.

    Raises:
        Unavailable: if no scheduler is connected.
        InvalidArgument: if the X-Tenant header is invalid.
        TriptychError: if the request is refused or fails before the first byte of the answer.
    """
    context = context_of(request)
    answer_id, created = form.id_prefix + context.new_id(), int(context.wall_clock())
    generation = await _begin(request, form, body, served, prompts, echoes)
    model = served.adapter_of(body.model) or served.model.served_name
    fingerprint = version.fingerprint(served.model)
    reporter = Reporter(
        served.text.detokenizers.token_bytes,
        as_ids=body.return_tokens_as_token_ids,
        wanted=body.num_logprobs is not None,
    )
    if body.stream:
        prompt_of = (lambda choice: prompts[choice // body.n]) if body.return_token_ids else None
        start = StreamStart(
            answer_id, created, model, reporter, lambda: generation.usage, fingerprint, prompt_of
        )
        writer = form.stream(start)
    else:

        def encode(ends: list[Delta]) -> bytes:
            prompt_logprobs = _prompt_logprobs(body, generation, reporter)
            ids = prompts if body.return_token_ids else None
            extras = CollectedExtras(generation.usage, reporter, prompt_logprobs, body.n, fingerprint, ids)
            return form.body(answer_id, created, model, ends, extras)

        writer = CollectedWriter(len(generation.sequences), encode, lambda: _prompt_effort(body, generation))
    idle_s = context.settings.sse_keep_alive_interval
    return Answer(generation, writer, context.unread, form.headers, keep_alive_s=idle_s)


async def _begin(
    request: Request,
    form: AnswerFormat,
    body: SamplingRequest,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    echoes: Sequence[str] | None,
) -> Generation:
    """Submits ``prompts`` to the scheduler."""
    context = context_of(request)
    account = account_of(request, body.priority, body.cache_salt)
    note(request.scope, tenant=account.tenant or None)
    check_logprobs(body, context.settings.max_logprobs)
    bad_words = await context.text_worker.run(
        sum(map(len, body.bad_words)), lambda: bad_word_tokens(served.text, body.bad_words)
    )
    requests = generate_requests(
        served,
        body,
        prompts,
        unique_wire_id(request),
        account=account,
        bad_words=bad_words,
        constraint=form.constraint,
    )
    if context.settings.enable_log_requests:
        log_requests(requests)
    charge(request.scope, sum(map(len, prompts)))
    pass_on(request.scope, requests)
    return Generation.begin(
        context.client.submit(requests),
        body,
        served,
        context.text_worker,
        Timing(context.metrics, context.clock, request.scope["triptych.arrived"]),
        echoes=echoes,
        markers=form.markers,
        constraint_param=form.constraint_param,
        thinking=form.thinking,
    )


def _prompt_logprobs(
    body: SamplingRequest, generation: Generation, reporter: Reporter
) -> list[list[dict[str, Any] | None]] | None:
    count = body.prompt_logprobs
    if count is None:
        return None
    return [reporter.prompt(prompt.token_ids, prompt.logprobs, count) for prompt in generation.prompts]


def _prompt_effort(body: SamplingRequest, generation: Generation) -> int:
    """Estimates the work of encoding the log-probabilities of prompts."""
    if body.prompt_logprobs is None:
        return 0
    return sum(len(prompt.token_ids) for prompt in generation.prompts) * (1 + body.prompt_logprobs)


def unique_wire_id(request: Request) -> str:
    """Returns the request's id with a suffix that makes it unique among a client's retries.

    The result leaves room for a prompt's index.
    """
    given: str = request.scope["triptych.request_id"]
    return f"{given[: MAX_REQUEST_ID - _UNIQUE_DIGITS - 8]}-{context_of(request).new_id()[:_UNIQUE_DIGITS]}"
