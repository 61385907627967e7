"""The `Inference` service: each RPC parses its request, calls the engine and builds the answer."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace

from prometheus_client import CONTENT_TYPE_LATEST

from protos.errors import (
    Context,
    NotFound,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    abort,
)
from protos.limits import LONG_PROMPT, MAX_REQUEST_ID_BYTES
from protos.service.backpressure import UnreadLimits
from protos.service.grpc_options import ACCEPTED_HEADER, SCHEMA_REVISION
from protos.service.logs import get_logger
from protos.service.tracing import Tracer
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.validation import check_fields
from scheduler_svc.api.events import ConnectEncoder, EventBuffer
from scheduler_svc.api.kv_watch import kv_batch_to_proto, watch_kv_events
from scheduler_svc.api.lora_service import LoraService
from scheduler_svc.api.messages import (
    check_results_fit,
    event_to_protos,
    files_to_proto,
    load_to_proto,
    lora_to_proto,
    pool_submission_from_proto,
    pooled_to_proto,
    submission_from_proto,
)
from scheduler_svc.engine.engine import Engine
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.settings import Settings
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.model_files import ServedModel

# Shortest interval between two samples of WatchLoad: the load changes with every step.
_LOAD_SAMPLE_S = 0.1


def _sequence_of(request: inference_pb2.AbortRequest) -> int | None:
    return request.sequence if request.HasField("sequence") else None


def _shutting_down() -> Unavailable:
    return Unavailable("the scheduler is shutting down; retry on another one", retry_after_ms=1000)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The service for clients."""

    def __init__(self, deployment: Deployment, settings: Settings, tracer: Tracer | None = None) -> None:
        """Serves `deployment`; `tracer` writes the spans of sampled requests."""
        self._tracer = tracer
        self._deployment = deployment
        self.loras = LoraService(deployment, settings.lora_modules)
        """Loads LoRA adapters."""
        self._unread = UnreadLimits(
            per_reader=settings.max_unread_tokens_per_stream,
            total=settings.max_unread_stream_tokens,
            flags=("--max-unread-tokens-per-stream", "--max-unread-stream-tokens"),
        )
        self.metrics = SchedulerMetrics(deployment, self._unread)
        self._draining = False
        # The buffers of open calls, and apart from them those of direct clients.
        self._streams: set[EventBuffer] = set()
        self._direct: set[EventBuffer] = set()
        # Set after the wait for direct clients: all calls end.
        self._drained = asyncio.Event()
        self._log = get_logger()

    @property
    def _engine(self) -> Engine:
        return self._deployment.engine

    def hurry(self) -> None:
        """Ends the wait of :meth:`drain`."""
        self._drained.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests of direct clients, waits for their calls, and then ends all calls.

        Connect streams serve until then; their clients resubmit to the next scheduler.
        """
        self._draining = True
        if self._direct:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), timeout_s)
        self._drained.set()
        for buffer in (*self._streams, *self._direct):
            buffer.end(_shutting_down())

    @contextlib.contextmanager
    def _buffer(self, requests: Iterable[str], calls: set[EventBuffer]) -> Iterator[EventBuffer]:
        """Yields the buffer of a call, listed in `calls`; its end aborts all requests with these ids."""

        def abort_all() -> None:
            for request_id in requests:
                self._engine.abort(request_id)

        buffer = EventBuffer(self._unread, abort_all, self.metrics.unserved.ended)
        if self._drained.is_set():
            buffer.end(_shutting_down())
        calls.add(buffer)
        try:
            yield buffer
        finally:
            calls.discard(buffer)
            if self._draining and not self._direct:
                self._drained.set()
            buffer.close()
            abort_all()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        """Runs a request. The end of the call aborts it."""
        mine: list[str] = []
        try:
            with self._buffer(mine, self._direct) as buffer:
                submission = await self._submit(request, buffer, direct=True)
                mine.append(submission.request_id)
                left = len(submission.sequences)
                while left:
                    for event in await buffer.take():
                        if isinstance(event, Event):
                            if event.error is not None:
                                raise event.error
                            left -= event.finish_reason is not None
                        for message in event_to_protos(event):
                            yield message
        except TriptychError as error:
            await abort(context, error)

    async def Connect(
        self, request_iterator: AsyncIterator[inference_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[inference_pb2.ConnectResponse]:
        """Runs many requests. The end of the stream aborts those still live."""
        mine: set[str] = set()
        try:
            with self._buffer(mine, self._streams) as buffer:
                reader = asyncio.create_task(self._read(request_iterator, context, buffer, mine))
                try:
                    async for message in self._answers(reader, buffer, mine):
                        yield message
                    await reader
                finally:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
        except TriptychError as error:
            await abort(context, error)

    async def _answers(
        self, reader: asyncio.Task[None], buffer: EventBuffer, mine: set[str]
    ) -> AsyncIterator[inference_pb2.ConnectResponse]:
        """Yields a stream's messages until its reader fails, or ends and no request is live."""
        encoder = ConnectEncoder()
        # A client that half-closes the stream still reads the answers.
        reader.add_done_callback(lambda _: buffer.wake())
        while mine or not reader.done():
            if events := await buffer.take():
                # Ask the engine, too: a refused duplicate of a live id must not orphan the live request.
                ended = {
                    event.request_id
                    for event in events
                    if isinstance(event, Event) and (event.finish_reason or event.error)
                }
                mine.difference_update(name for name in ended if self._engine.find(name) is None)
                for message in encoder.encode(events):
                    yield message
            if reader.done() and reader.exception() is not None:
                break

    async def _read(
        self, messages: AsyncIterator[inference_pb2.ConnectRequest], context: Context, buffer: EventBuffer,
        mine: set[str],
    ) -> None:  # fmt: skip
        """Submits and aborts requests as a stream asks. A request's error becomes its event."""
        first = True
        async for message in messages:
            if first:
                if message.schema_revision != SCHEMA_REVISION:
                    raise SchemaMismatch(
                        f"the client speaks schema revision {message.schema_revision}, this scheduler {SCHEMA_REVISION}; "
                        "run the same release on both"
                    )
                await context.send_initial_metadata((ACCEPTED_HEADER,))
                first = False
            await buffer.has_room()
            if message.HasField("generate"):
                try:
                    submission = await self._submit(message.generate, buffer, direct=False)
                    mine.add(submission.request_id)
                    buffer.push(Event(submission.request_id, accepted=True))
                except TriptychError as error:
                    buffer.refuse(message.generate.request_id, error)
            elif message.HasField("abort"):
                self._engine.abort(message.abort.request_id, _sequence_of(message.abort))

    async def Pool(self, request: inference_pb2.PoolRequest, context: Context) -> inference_pb2.PoolResponse:
        """Runs a request of a pooling model. The end of the call aborts it."""
        (response,) = await self._pool((request,), context)
        return response

    async def PoolAll(
        self, request: inference_pb2.PoolAllRequest, context: Context
    ) -> inference_pb2.PoolAllResponse:
        """Runs several requests of a pooling model. The first failure, or the end of the call, aborts all."""
        try:
            # Each request is checked like a single request.
            check_fields(request, entries=False)
        except TriptychError as error:
            await abort(context, error)
        return inference_pb2.PoolAllResponse(responses=await self._pool(request.requests, context))

    async def _pool(
        self, requests: Sequence[inference_pb2.PoolRequest], context: Context
    ) -> list[inference_pb2.PoolResponse]:
        mine: dict[str, Submission] = {}
        results: dict[str, inference_pb2.PoolResponse] = {}
        started_s, outcome = time.monotonic(), FinishReason.ABORT.name.lower()
        try:
            with self._buffer(mine, self._direct) as buffer:
                submissions = self._pool_submissions(requests)
                self._engine.submit_all(submissions, buffer)
                mine.update((submission.request_id, submission) for submission in submissions)
                while mine:
                    for event in await buffer.take():
                        assert isinstance(event, Event)
                        if event.worker_losses is not None:
                            continue  # it runs again
                        results[event.request_id] = pooled_to_proto(event, mine.pop(event.request_id))
            outcome = FinishReason.STOP.name.lower()
        except TriptychError as error:
            outcome = error.code_name
            if not (mine or results):
                self.metrics.unserved.refused(error, len(requests))
            await abort(context, error)
        finally:
            self._log.info(
                "request",
                request_id=requests[0].request_id[:MAX_REQUEST_ID_BYTES] if requests else "",
                inputs=len(requests),
                prompt_tokens=sum(len(each.prompt_token_ids) for each in requests),
                ms=round((time.monotonic() - started_s) * 1000, 1),
                finish_reason=outcome,
            )
        return [results[submission.request_id] for submission in submissions]

    def _pool_submissions(self, requests: Sequence[inference_pb2.PoolRequest]) -> list[Submission]:
        """Validates all requests before the first is submitted."""
        self._check_open()
        for request in requests:
            self._check_model(request.model)
        submissions = [pool_submission_from_proto(request, self._tracer) for request in requests]
        if (served := self._deployment.served) is not None and len(submissions) > 1:
            check_results_fit(submissions, served.info.pooled_size)
        return submissions

    def _check_open(self) -> None:
        if self._draining:
            raise _shutting_down()

    def _check_model(self, name: str) -> None:
        served = self._deployment.served
        if served is not None and name and name not in (served.name, *served.info.aliases):
            raise NotFound(f"the model {name!r} is not served here; this is {served.name!r}", param="model")

    async def _submit(
        self, request: inference_pb2.GenerateRequest, buffer: EventBuffer, *, direct: bool
    ) -> Submission:
        try:
            if direct:
                self._check_open()
            self._check_model(request.model)
            if len(request.prompt_token_ids) > LONG_PROMPT:
                submission = await self._read_long(request)
            else:
                submission = submission_from_proto(request, self._tracer)
            self._engine.submit(submission, buffer)
        except TriptychError as error:
            self.metrics.unserved.refused(error)
            self._log.info(
                "request",
                request_id=request.request_id[:MAX_REQUEST_ID_BYTES],
                prompt_tokens=len(request.prompt_token_ids),
                finish_reason=error.code_name,
            )
            raise
        return submission

    async def _read_long(self, request: inference_pb2.GenerateRequest) -> Submission:
        """Reads a request with a long prompt, and hashes it, while other requests go on."""
        submission = await asyncio.to_thread(submission_from_proto, request, self._tracer)
        submission = replace(submission, largest_id=max(submission.prompt_token_ids))
        await asyncio.sleep(0)
        adapter = self._engine.adapters.resolve(submission.lora_name, submission.lora_digest)
        if (hasher := self._engine.prefixes.hasher()) is None:
            return submission
        chain = await asyncio.to_thread(hasher, submission.prompt_token_ids, adapter, submission.cache_salt)
        return replace(submission, hash_chain=chain)

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        """Aborts a request, or a sequence of it."""
        found = self._engine.abort(request.request_id, _sequence_of(request))
        return inference_pb2.AbortResponse(found=found)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> common_pb2.ModelInfo:
        """Describes the served model."""
        return (await self._served(context)).info

    async def GetTokenizer(
        self, request: inference_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.FileChunk]:
        """Streams the tokenizer files."""
        for chunk in files_to_proto((await self._served(context)).files):
            yield chunk

    async def GetLoad(self, request: inference_pb2.GetLoadRequest, context: Context) -> inference_pb2.Load:
        """Returns the current load."""
        return load_to_proto(self._deployment.load())

    async def WatchLoad(
        self, request: inference_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[inference_pb2.Load]:
        """Samples the load and sends its changes."""
        last = None
        interval = max(_LOAD_SAMPLE_S, request.min_interval_ms / 1000)
        while True:
            load = self._deployment.load()
            if load != last:
                yield load_to_proto(load)
                last = load
            await asyncio.sleep(interval)

    async def WatchKvEvents(
        self, request: inference_pb2.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[inference_pb2.KvEventBatch]:
        """Streams a snapshot of every prefix cache, then every change."""
        follow = functools.partial(
            self._engine.prefixes.follow, replica_id=request.replica_id, after=request.after_sequence
        )
        try:
            with watch_kv_events(follow) as changes:
                async for change in changes:
                    for part in kv_batch_to_proto(change.replica_id, change.batch, change.tokens_per_hash):
                        yield part
        except TriptychError as error:
            await abort(context, error)

    async def ResetPrefixCache(
        self, request: inference_pb2.ResetPrefixCacheRequest, context: Context
    ) -> inference_pb2.ResetPrefixCacheResponse:
        """Forgets every cached prefix."""
        return inference_pb2.ResetPrefixCacheResponse(num_replicas=self._engine.prefixes.reset())

    async def GetMetrics(
        self, request: inference_pb2.GetMetricsRequest, context: Context
    ) -> inference_pb2.GetMetricsResponse:
        """Returns the metrics in Prometheus' text format."""
        text = await self.metrics.text()
        return inference_pb2.GetMetricsResponse(text=text, content_type=CONTENT_TYPE_LATEST)

    async def LoadLora(
        self, request: inference_pb2.LoadLoraRequest, context: Context
    ) -> inference_pb2.LoraInfo:
        """Loads a LoRA adapter."""
        await self._served(context)
        try:
            self._check_open()
            check_fields(request)
            adapter = await self.loras.load(request.name, request.source, in_place=request.load_inplace)
        except TriptychError as error:
            await abort(context, error)
        return lora_to_proto(adapter, self._engine.adapters.holders(adapter))

    async def UnloadLora(
        self, request: inference_pb2.UnloadLoraRequest, context: Context
    ) -> inference_pb2.UnloadLoraResponse:
        """Frees the name of a LoRA adapter."""
        try:
            self._engine.adapters.unload(request.name)
        except TriptychError as error:
            await abort(context, error)
        return inference_pb2.UnloadLoraResponse()

    async def ListLoras(
        self, request: inference_pb2.ListLorasRequest, context: Context
    ) -> inference_pb2.ListLorasResponse:
        """Lists the LoRA adapters for requests."""
        adapters = self._engine.adapters
        loras = [lora_to_proto(adapter, adapters.holders(adapter)) for adapter in adapters.registry]
        return inference_pb2.ListLorasResponse(loras=loras)

    async def _served(self, context: Context) -> ServedModel:
        served = self._deployment.served
        if served is None:
            starting = "; ".join(self._deployment.starting.values()) or "none has registered"
            await abort(context, Unavailable(f"no worker is ready yet ({starting})", retry_after_ms=2000))
        return served
