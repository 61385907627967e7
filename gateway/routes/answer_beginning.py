"""How an answer begins: anew, or where a client lost the stream that it continues."""

from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request

from gateway.answers.resumable import LAST_EVENT_ID, MAX_CHOICES, Position, digest_of, position_of
from gateway.keys.caller import account_of
from gateway.routes.context import context_of
from gateway.scheduler_link.client import InferenceClient
from gateway.scheduler_link.pending_request import RequestGroup
from gateway.schemas.sampling import SamplingRequest
from protos.errors import InvalidArgument
from protos.triptych.v1 import inference_pb2 as inference


class AnswerBeginning(NamedTuple):
    """The facts about an answer that stay the same when its stream is continued."""

    answer_id: str
    created: int
    """Seconds since the epoch."""
    logs: Sequence[inference.EventLog] = ()
    """For each prompt of a resumable stream, where the scheduler keeps its events."""
    seen: Sequence[int] = ()
    """For each choice of a resumable stream, the chunks that the client has."""
    replays: Sequence[Sequence[inference.GenerateEvent]] = ()
    """For each prompt of a stream that is continued, its events so far."""
    is_over: bool = False
    """Whether the client has the whole answer."""


async def begin_answer(
    request: Request, body: SamplingRequest, id_prefix: str, num_prompts: int
) -> AnswerBeginning:
    """Returns the beginning of an answer; ends the stream that it continues, if that still runs.

    Raises:
        InvalidArgument: if the stream cannot be resumable, or the request is not the one that began it.
        NotFound: if the stream that the client wants to continue is unknown, or no longer kept.
        Unavailable: if it cannot be continued because no scheduler is connected.
    """
    context = context_of(request)
    num_choices = num_prompts * body.n
    if not body.resumable:
        if LAST_EVENT_ID in request.headers:
            raise InvalidArgument(
                "Last-Event-ID continues only streams that began with stream_options.resumable=true; omit the header",
                param="Last-Event-ID",
            )
        return AnswerBeginning(id_prefix + context.new_id(), int(context.wall_clock()))
    if num_choices > MAX_CHOICES:
        raise InvalidArgument(
            f"a resumable stream has at most {MAX_CHOICES} choices, not {num_choices}; ask for fewer, or send"
            " stream_options.resumable=false",
            param="stream_options.resumable",
        )
    position = position_of(request.headers, id_prefix, num_choices)
    content, tenant, path = await request.body(), account_of(request).tenant, request.url.path
    digest = await context.text_worker.run(len(content), lambda: digest_of(path, tenant, content))
    if position is None:
        answer_id, created = id_prefix + context.new_id(), int(context.wall_clock())
        logs = _logs(answer_id, digest, created, num_prompts)
        return AnswerBeginning(answer_id, created, logs, (0,) * num_choices)
    return await _continued(context.client, position, digest, num_prompts)


async def _continued(
    client: InferenceClient, position: Position, digest: str, num_prompts: int
) -> AnswerBeginning:
    answer_id, seen = position
    if seen is None:
        return AnswerBeginning(answer_id, 0, is_over=True)
    found = [await client.replay(log.log_id, digest) for log in _logs(answer_id, digest, 0, num_prompts)]
    created = found[0][0].created_unix_s
    replays = [[response.event for response in responses] for responses in found]
    return AnswerBeginning(answer_id, created, _logs(answer_id, digest, created, num_prompts), seen, replays)


def _logs(answer_id: str, digest: str, created: int, num_prompts: int) -> list[inference.EventLog]:
    return [
        inference.EventLog(log_id=f"{answer_id}.{index}", digest=digest, created_unix_s=created)
        for index in range(num_prompts)
    ]


def submit(
    client: InferenceClient, requests: Sequence[inference.GenerateRequest], beginning: AnswerBeginning
) -> RequestGroup:
    """Sends an answer's requests, one per prompt.

    Raises:
        Unavailable: if no scheduler is connected and there is no room for the requests to wait.
    """
    for request, log in zip(requests, beginning.logs, strict=False):
        request.log.CopyFrom(log)
    return client.resume(requests, beginning.replays) if beginning.replays else client.submit(requests)
