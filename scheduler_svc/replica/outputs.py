"""What a worker's tokens mean to the client: which of them end a sequence, and what each event says."""

from collections.abc import Callable, Sequence

from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.replica.step_plan import SlotOutput
from scheduler_svc.requests.request import Event, FinishReason, Logprobs, Request


def stops(request: Request, token: int) -> bool:
    """Whether the token just appended ends the sequence; before its least number of tokens only the model's own do, of a grammar that is through."""
    if token not in request.stop_ids:
        return False
    sampling = request.sampling
    return request.num_output_tokens >= sampling.min_tokens or (
        sampling.grammar is not None and token in request.end_ids
    )


def append(request: Request, output: SlotOutput) -> Event:
    """Appends an output's tokens, one at least, up to the first one that ends the sequence; returns what is new."""
    accepted: list[int] = []
    finish: FinishReason | None = None
    stop_token: int | None = None
    for token in output.token_ids:
        request.token_ids.append(token)
        accepted.append(token)
        if stops(request, token):
            finish, stop_token = FinishReason.STOP, token
        elif len(request.token_ids) >= request.end:
            finish = FinishReason.LENGTH
        if finish is not None:
            break
    return Event(request.request_id, tuple(accepted), output.logprobs[: len(accepted)], finish, stop_token)


def prompt_of(request: Request, start: int, logprobs: Sequence[Logprobs]) -> Event | None:
    """What a chunk that begins at ``start`` says of the prompt, but for what an earlier admission has said already; None if that is all."""
    new = tuple(logprobs[max(0, request.num_prompt_told - start) :])
    if not new:
        return None
    request.num_prompt_told += len(new)
    return Event(request.request_id, prompt_logprobs=new)


def end_of(request: Request, token: int) -> Event | None:
    """The last event of a request whose last token ``token``, just appended, may be; None if it is an end token that came too early."""
    stopped = stops(request, token)
    if not stopped and len(request.token_ids) < request.end:
        return None
    finish = FinishReason.STOP if stopped else FinishReason.LENGTH
    return Event(request.request_id, (token,), (), finish, token if stopped else None)


class Announcer:
    """Says what is said once: of a request's prompt and beginning in its first event, and what its phases took in the statistics."""

    def __init__(self, stats: SchedulerStats, clock: Callable[[], float]) -> None:
        """Counts in ``stats``; ``clock`` gives monotonic seconds."""
        self._stats = stats
        self._clock = clock

    def scheduled(self, request: Request) -> None:
        """The request has got a slot, for the first time or again."""
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            self._stats.queue_s.observe(request.first_scheduled_s - request.arrival_s)

    def complete(self, event: Event, request: Request) -> Event:
        """The event, with what is said of the prompt if nothing has been said to the client yet."""
        if not request.announced:
            request.announced = True
            event = event.announcing(request)
        if request.first_token_s is None and event.token_ids:
            request.first_token_s = now = self._clock()
            if request.first_scheduled_s is not None:
                self._stats.prefill_s.observe(now - request.first_scheduled_s)
        if event.finish_reason is not None and request.first_token_s is not None:
            self._stats.decode_s.observe(self._clock() - request.first_token_s)
        return event
