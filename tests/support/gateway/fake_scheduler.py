"""A fake scheduler for tests of the gateway: a scripted ``Inference`` service that can fail on demand.

It answers every prompt with the same tokens, one event per sequence and step, with all requests of a stream
together, as the scheduler does.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST

from protos.errors import (
    Context,
    InvalidArgument,
    NotFound,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    abort,
)
from protos.service.grpc_options import ACCEPTED_HEADER, FILE_CHUNK_BYTES, SCHEMA_REVISION
from protos.service.server import Server
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

# The base class answers UNIMPLEMENTED for methods that are missing; its type insists on every method.
if TYPE_CHECKING:
    _Servicer = Any
else:
    _Servicer = InferenceServicer

SCHEDULER_METRICS = (
    b"# HELP vllm:num_requests_running Requests that have a slot.\n"
    b"# TYPE vllm:num_requests_running gauge\n"
    b'vllm:num_requests_running{model_name="smollm2",engine="r0"} 3.0\n'
)
GENERATE = inference.GenerateRequest
_OF_TOKENS = (pb.POOL_TASK_TOKEN_EMBED, pb.POOL_TASK_TOKEN_CLASSIFY)


def pool_response(
    request: inference.PoolRequest,
    size: int,
    values_of: Callable[[inference.PoolRequest], list[float]] | None,
) -> inference.PoolResponse:
    """Returns the answer to a request: by default the number of tokens, the first token, then tenths."""
    prompt = request.prompt_token_ids
    values = values_of(request) if values_of else [len(prompt), prompt[0], *[0.1] * (size - 2)]
    of_tokens = request.task in _OF_TOKENS
    return inference.PoolResponse(
        request_id=request.request_id, values=values, num_prompt_tokens=len(prompt),
        shape=[len(prompt), len(values) // len(prompt)] if of_tokens else [len(values)],
    )  # fmt: skip


@dataclass
class FakeSequence:
    """One sequence of a request on a stream."""

    request: GENERATE
    sequence: int
    sent: int
    """Tokens sent so far."""
    first: bool = True
    """Whether no event has been sent yet."""
    prompt_sequence: "FakeSequence | None" = None
    """The sequence that computes the prompt, if not this one."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have been sent."""

    @property
    def awaits_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are missing, so that tokens must wait."""
        sent = (self.prompt_sequence or self).num_prompt_logprobs
        missing = len(self.request.prompt_token_ids) - 1 - sent
        return self.request.sampling.HasField("prompt_logprobs") and missing > 0


def sequences_of(request: GENERATE) -> dict[tuple[str, int], FakeSequence]:
    """Returns the sequences of ``request`` that must run, by id and number.

    The first one computes the prompt.
    """
    running: dict[tuple[str, int], FakeSequence] = {}
    known = {one.sequence: one for one in request.resumed}
    for sequence in range(request.n or 1):
        part = known.get(sequence, inference.ResumedSequence())
        if not part.finished:
            prompt_sequence = next(iter(running.values()), None)
            one = FakeSequence(
                request,
                sequence,
                len(part.token_ids),
                first=prompt_sequence is None,
                prompt_sequence=prompt_sequence,
            )
            running[request.request_id, sequence] = one
    return running


def logprobs_of(token_id: int, position: int, count: int) -> pb.TokenLogprobs:
    """Returns the fake's log-probabilities of a token: it is the second likeliest one, after token 7."""
    top = [(7, -0.25), (token_id, -1.0 - position), (9, -20.0)][:count]
    return pb.TokenLogprobs(
        logprob=-1.0 - position,
        rank=2,
        top_token_ids=[one for one, _ in top],
        top_logprobs=[one for _, one in top],
    )


def in_columns(
    events: list[inference.GenerateEvent], handles: dict[tuple[str, int], int]
) -> inference.ConnectResponse:
    """Returns a step's events as one message, with plain tokens in columns.

    Args:
        events: at most one of each sequence.
        handles: those of the stream; a sequence's first tokens add one.
    """
    response = inference.ConnectResponse()
    for event in events:
        key = (event.request_id, event.sequence)
        only_tokens = not (event.finish_reason or event.logprobs or event.HasField("error"))
        if key in handles and only_tokens:
            response.handles.extend([handles[key]] * len(event.token_ids))
            response.token_ids.extend(event.token_ids)
        else:
            if event.token_ids and not event.finish_reason and key not in handles:
                event.handle = handles[key] = len(handles) + 1
            response.events.append(event)
    return response


def pooling_info(info: pb.PoolingInfo, longest: int) -> pb.PoolingInfo:
    """Returns a copy with one shape for prompts of at most `longest` tokens."""
    described = pb.PoolingInfo()
    described.CopyFrom(info)
    described.shapes.add(kind=pb.GRAPH_KIND_POOL, batch=4, query_len=longest)
    return described


@dataclass
class FakeScheduler(_Servicer):  # type: ignore[misc]
    """Answers every request with ``reply``; sequence i skips the first i tokens."""

    folder: Path
    """The tokenizer files."""
    reply: list[int] = field(default_factory=list)
    """The tokens of every answer."""
    model: str = "smollm2"
    aliases: Sequence[str] = ()
    """Further names of the model."""
    max_model_len: int = 512
    vocab_size: int = 49152
    eos: int = 2
    tokens_per_event: int = 1
    prompt_logprobs_per_event: int | None = None
    """How many log-probabilities of a prompt come with one event; ``None``: all."""
    others_first: bool = False
    """Whether a prompt's further sequences begin before its log-probabilities are complete."""
    step_s: float = 0.0
    """Pause between steps."""
    pause_after: int | None = None
    """Stop stepping a sequence after this many tokens until :meth:`resume`; ``None``: never."""
    loras: dict[str, str] = field(default_factory=dict)
    """The adapters that requests can name, with their sources."""
    refuse_lora: TriptychError | None = None
    """The answer to loads."""
    refuse: Callable[[GENERATE], TriptychError | None] = lambda _: None
    """The error for a new request; ``None`` as the result: run it."""
    ready: bool = True
    """Whether a replica is ready."""
    acknowledge: bool = True
    """Whether it says that it has taken a request."""
    break_after: int | None = None
    """Break the stream once, after this many tokens of a sequence."""
    break_in_prompt: bool = False
    """Break the stream once, between two events with log-probabilities of a prompt."""
    schema_revision: int = SCHEMA_REVISION
    refusals: int = 0
    """Streams of another revision so far."""
    requests: list[GENERATE] = field(default_factory=list)
    """Requests so far, in order."""
    aborted: list[str] = field(default_factory=list)
    """Ids of aborted requests so far, in order; ``id#sequence`` if only one sequence was aborted."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified after every change."""
    num_tokenizer_loads: int = 0
    metrics: bytes | None = SCHEDULER_METRICS
    """The answer to GetMetrics; ``None``: unavailable."""

    pooled_size: int = 0
    """Values of a pooling result; 0: the model generates text."""
    pool_tasks: Sequence["pb.PoolTask.ValueType"] = (pb.POOL_TASK_EMBED,)
    """Tasks of a pooling model."""
    pooling_info: pb.PoolingInfo = field(default_factory=pb.PoolingInfo)
    pool_values: Callable[[inference.PoolRequest], list[float]] | None = None
    """The values of a result; ``None``: made up."""
    pool_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Pooling requests are answered while this is set."""
    refuse_pool: Callable[[inference.PoolRequest], TriptychError | None] = lambda _: None
    """The error for a pooling request; ``None`` as the result: answer it."""
    pooled: list[inference.PoolRequest] = field(default_factory=list)
    """Pooling requests so far, in order."""
    pool_calls: list[int] = field(default_factory=list)
    """Requests of each call of `PoolAll` so far."""
    pool_deadlines: list[float | None] = field(default_factory=list)
    """Seconds that each of these calls had left; ``None``: it had no deadline."""
    pooling: int = 0
    """Pooling requests under way."""

    num_resets: int = 0
    """Resets of the prefix cache so far."""

    def __post_init__(self) -> None:
        self.pool_gate.set()
        self._first_reply = list(self.reply)

    def reset(self) -> None:
        """Forgets all requests, and every fault that was set."""
        self.tokens_per_event, self.pause_after, self.break_after, self.ready = 1, None, None, True
        self.acknowledge = True
        self.reply, self.step_s = list(self._first_reply), 0.0
        self.prompt_logprobs_per_event, self.others_first, self.break_in_prompt = None, False, False
        self.refuse = lambda _: None
        self.loras.clear()
        self.refuse_lora, self.metrics = None, SCHEDULER_METRICS
        self.refuse_pool = lambda _: None
        self.pool_gate.set()
        self.requests.clear()
        self.num_resets = 0
        self.pooled.clear()
        self.pool_calls.clear()
        self.pool_deadlines.clear()
        self.aborted.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until ``condition`` holds; checks it after every change."""
        async with self.changed, asyncio.timeout(20):
            await self.changed.wait_for(condition)

    async def resume(self) -> None:
        """Continues after ``pause_after``."""
        self.pause_after = None
        await self._notify()

    async def GetModel(self, request, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        if not self.ready:
            await abort(context, Unavailable("no replica is ready", retry_after_ms=2500))
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return pb.ModelInfo(
            served_name=self.model, aliases=self.aliases, source="scripted", vocab_size=self.vocab_size, max_model_len=self.max_model_len,
            eos_token_ids=[self.eos], created_unix_s=1_700_000_000, tokenizer_sha256=digest.hexdigest(),
            pooled_size=self.pooled_size,
            pool_tasks=self.pool_tasks if self.pooled_size else [],
            pooling=pooling_info(self.pooling_info, self.max_model_len) if self.pooled_size else None,
        )  # fmt: skip

    async def PoolAll(self, request, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        count = len(request.requests)
        self.pooled.extend(request.requests)
        self.pool_calls.append(count)
        self.pool_deadlines.append(context.time_remaining())
        self.pooling += count
        await self._notify()
        try:
            for each in request.requests:
                if (error := self.refuse_pool(each)) is not None:
                    await abort(context, error)
            await self.pool_gate.wait()
        finally:
            self.pooling -= count
        responses = [pool_response(each, self.pooled_size, self.pool_values) for each in request.requests]
        return inference.PoolAllResponse(responses=responses)

    async def GetTokenizer(self, request, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        self.num_tokenizer_loads += 1
        for path in sorted(self.folder.iterdir()):
            data = path.read_bytes()
            for start in range(0, len(data), FILE_CHUNK_BYTES):
                piece = data[start : start + FILE_CHUNK_BYTES]
                yield pb.FileChunk(name=path.name, data=piece, last=start + len(piece) >= len(data))

    async def GetLoad(self, request, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        state = inference.REPLICA_STATE_READY if self.ready else inference.REPLICA_STATE_CONFIGURING
        return inference.Load(
            replicas=[inference.ReplicaLoad(replica_id="r0", state=state, detail="compiling 3 of 7")]
        )

    async def GetMetrics(self, request, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        if self.metrics is None:
            await abort(context, Unavailable("on purpose"))
        return inference.GetMetricsResponse(text=self.metrics, content_type=CONTENT_TYPE_LATEST)

    async def _greet(self, message: inference.ConnectRequest, context: Context) -> None:
        """Accepts a stream, or refuses it."""
        if message.schema_revision != self.schema_revision:
            self.refusals += 1
            await abort(context, SchemaMismatch("the scheduler speaks another revision"))
        await context.send_initial_metadata((ACCEPTED_HEADER,))

    async def Connect(self, request_iterator, context):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        running: dict[tuple[str, int], FakeSequence] = {}
        handles: dict[tuple[str, int], int] = {}
        answers: list[inference.GenerateEvent] = []
        first = True

        async def read() -> None:
            nonlocal first
            async for message in request_iterator:
                if first:
                    await self._greet(message, context)
                first = False
                if message.HasField("generate"):
                    request = message.generate
                    self.requests.append(request)
                    answer = self._answer_at_once(request)
                    answers.extend(answer)
                    if not any(event.HasField("error") for event in answer):
                        running.update(sequences_of(request))
                elif message.HasField("abort"):
                    self._abort(message.abort, running)
                await self._notify()

        reader = asyncio.create_task(read())
        try:
            while not reader.done():
                events = answers + [
                    event for one in list(running.values()) if (event := self._step(one)) is not None
                ]
                answers.clear()
                for event in events:
                    if event.finish_reason:
                        running.pop((event.request_id, event.sequence), None)
                if events:
                    yield in_columns(events, handles)
                    await self._notify()
                    if (
                        self.break_after is not None
                        and any(one.sent >= self.break_after for one in running.values())
                    ) or (self.break_in_prompt and any(one.awaits_prompt for one in running.values())):
                        self.break_after, self.break_in_prompt = None, False
                        await abort(context, Unavailable("the stream was broken on purpose"))
                    await asyncio.sleep(self.step_s)
                else:
                    async with self.changed:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self.changed.wait(), 0.05)
            await reader
        finally:
            reader.cancel()
            self.aborted.extend(dict.fromkeys(name for name, _ in running))
            await self._notify()

    async def LoadLora(self, request: inference.LoadLoraRequest, context: Context) -> inference.LoraInfo:
        if self.refuse_lora is not None:
            await abort(context, self.refuse_lora)
        if request.name in self.loras and not request.load_inplace:
            await abort(context, InvalidArgument(f"the adapter '{request.name}' is loaded", param="name"))
        self.loras[request.name] = request.source
        return inference.LoraInfo(name=request.name, source=request.source, rank=8)

    async def UnloadLora(
        self, request: inference.UnloadLoraRequest, context: Context
    ) -> inference.UnloadLoraResponse:
        if self.loras.pop(request.name, None) is None:
            await abort(context, NotFound(f"no adapter is called '{request.name}'", param="name"))
        return inference.UnloadLoraResponse()

    async def ListLoras(
        self, request: inference.ListLorasRequest, context: Context
    ) -> inference.ListLorasResponse:
        loras = [inference.LoraInfo(name=name, source=source) for name, source in self.loras.items()]
        return inference.ListLorasResponse(loras=loras)

    async def ResetPrefixCache(
        self, request: inference.ResetPrefixCacheRequest, context: Context
    ) -> inference.ResetPrefixCacheResponse:
        self.num_resets += 1
        await self._notify()
        return inference.ResetPrefixCacheResponse(num_replicas=1)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _answer_at_once(self, request: GENERATE) -> list[inference.GenerateEvent]:
        """Returns the event that refuses a request or takes it."""
        if request.lora_name and request.lora_name not in self.loras:
            error: TriptychError | None = NotFound(
                f"the model '{request.lora_name}' is not served here; use '{self.model}'", param="model"
            )
        else:
            error = self.refuse(request)
        if error is not None:
            return [inference.GenerateEvent(request_id=request.request_id, error=error.to_proto())]
        if not self.acknowledge:
            return []
        return [inference.GenerateEvent(request_id=request.request_id, accepted=True)]

    def _abort(self, abort: inference.AbortRequest, running: dict[tuple[str, int], FakeSequence]) -> None:
        """Ends a request, or one of its sequences, and records it."""
        name, only = abort.request_id, abort.sequence if abort.HasField("sequence") else None
        self.aborted.append(name if only is None else f"{name}#{only}")
        for key in [key for key in running if key[0] == name and only in (None, key[1])]:
            del running[key]

    def _add_prompt_logprobs(self, one: FakeSequence, event: inference.GenerateEvent) -> None:
        """Adds the next log-probabilities of the prompt."""
        prompt = one.request.prompt_token_ids
        end = min(len(prompt), one.num_prompt_logprobs + 1 + (self.prompt_logprobs_per_event or len(prompt)))
        event.prompt_logprobs.extend(
            logprobs_of(prompt[position], position, one.request.sampling.prompt_logprobs)
            for position in range(one.num_prompt_logprobs + 1, end)
        )
        one.num_prompt_logprobs = end - 1

    def _step(self, one: FakeSequence) -> inference.GenerateEvent | None:
        limit = min(
            one.request.sampling.max_tokens or 10**9, self.max_model_len - len(one.request.prompt_token_ids)
        )
        if self.pause_after is not None and one.sent >= self.pause_after:
            return None
        end = min(one.sent + self.tokens_per_event, limit)
        reply = self.reply[one.sequence :]
        tokens = [reply[i % len(reply)] for i in range(one.sent, end)]
        event = inference.GenerateEvent(request_id=one.request.request_id, sequence=one.sequence)
        sampling = one.request.sampling
        if one.first:
            one.first = False
            event.prompt.num_tokens, event.prompt.num_cached_tokens = len(one.request.prompt_token_ids), 3
            event.prompt.replica_id = "r0"
        if one.prompt_sequence is None and one.awaits_prompt:
            self._add_prompt_logprobs(one, event)
        if one.awaits_prompt and not (self.others_first and one.prompt_sequence is not None):
            return event if event.prompt_logprobs else None
        stops = set(one.request.sampling.stop_token_ids) | (
            set() if one.request.sampling.ignore_eos else {self.eos}
        )
        for position, token in enumerate(tokens):
            if token in stops:
                del tokens[position + 1 :]
                event.finish_reason = pb.FINISH_REASON_STOP
                event.stop_token_id = token
                break
        else:
            if end >= limit:
                event.finish_reason = pb.FINISH_REASON_LENGTH
        event.token_ids.extend(tokens)
        if sampling.HasField("logprobs"):
            event.logprobs.extend(
                logprobs_of(token, position, sampling.logprobs)
                for position, token in enumerate(tokens, start=one.sent)
            )
        one.sent += len(tokens)
        return event


@contextlib.asynccontextmanager
async def serving(fake: FakeScheduler, port: int = 0) -> AsyncIterator[Server]:
    """Serves ``fake`` on a real port."""
    server = Server(
        ["triptych.v1.Inference"], lambda grpc_server: add_InferenceServicer_to_server(fake, grpc_server)
    )
    await server.start("127.0.0.1", port)
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)
