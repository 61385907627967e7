"""Clients of the matrix: one request each, by any protocol."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import httpx

from protos.service.grpc_options import SCHEMA_REVISION
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.connect_reader import ConnectReader
from tests.support.matrix.answers import Answer, events_of, joined, joined_wire, plain
from tests.support.matrix.cases import Case

if TYPE_CHECKING:
    # Exists for type checkers only.
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

_PATHS: Final[Mapping[str, str]] = {
    "completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses",
    "messages": "/v1/messages",
}  # fmt: skip
# Bursts have deadlines of their own.
_PATIENT: Final = httpx.Timeout(None)
_OF_REQUEST: Final = frozenset(("n", "priority", "tenant", "cache_salt"))
"""Fields of `GenerateRequest`; the others are of `SamplingParams`."""


class Clients:
    """Asks over HTTP, `Inference.Generate` and one `Inference.Connect` stream."""

    def __init__(self, http: httpx.AsyncClient, stub: "InferenceAsyncStub", connect: "ConnectStream") -> None:
        """Uses open connections."""
        self._http = http
        self._stub = stub
        self._connect = connect
        self._numbers = itertools.count()
        self._tokens: dict[str, list[int]] = {}

    async def ask(self, case: Case) -> Answer:
        """Returns the answer of a request.

        Raises:
            ValueError: the request was refused or failed; the message says how.
        """
        if case.protocol in _PATHS:
            return await self._ask_http(case)
        request = await self._message(case)
        if case.protocol == "connect":
            return await joined_wire(self._connect.generate(request), request.n)
        try:
            return await joined_wire(aiter(self._stub.Generate(request)), request.n)
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"{error.code()}: {error.details()}") from error

    async def _ask_http(self, case: Case) -> Answer:
        path = _PATHS[case.protocol]
        body = {**_prompt(case), **case.fields}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
            if case.fields.get("stream"):
                return joined(await events_of(response))
            await response.aread()
            return plain(response.json())

    async def _message(self, case: Case) -> inference_pb2.GenerateRequest:
        known = {name: value for name, value in case.fields.items() if name in _OF_REQUEST}
        sampling = {name: value for name, value in case.fields.items() if name not in _OF_REQUEST}
        return inference_pb2.GenerateRequest(
            request_id=f"matrix-{next(self._numbers)}", prompt_token_ids=await self._tokens_of(case.prompt),
            sampling=common_pb2.SamplingParams(**sampling), **{"n": 1, **known},
        )  # fmt: skip

    async def _tokens_of(self, prompt: str) -> list[int]:
        if prompt not in self._tokens:
            response = await self._http.post("/tokenize", json={"prompt": prompt})
            self._tokens[prompt] = response.raise_for_status().json()["tokens"]
        return self._tokens[prompt]


def _prompt(case: Case) -> dict[str, Any]:
    match case.protocol:
        case "completions":
            return {"prompt": case.prompt}
        case "responses":
            return {"input": case.prompt}
        case _:
            return {"messages": [{"role": "user", "content": case.prompt}]}


class ConnectStream:
    """One `Inference.Connect` stream that many requests share."""

    def __init__(self, stub: "InferenceAsyncStub") -> None:
        """Opens the stream; `run` reads it."""
        self._call: Any = stub.Connect()
        self._queues: dict[str, asyncio.Queue[inference_pb2.GenerateEvent]] = {}
        self._write = asyncio.Lock()

    async def run(self) -> None:
        """Reads the stream until it is cancelled."""
        await self._send(inference_pb2.ConnectRequest(schema_revision=SCHEMA_REVISION))
        reader = ConnectReader()
        while (message := await self._call.read()) is not grpc.aio.EOF:
            for event in reader.events(message):
                if event.request_id in self._queues:
                    self._queues[event.request_id].put_nowait(event)

    async def generate(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        """Submits a request and yields its events; the caller knows the last one."""
        queue = self._queues[request.request_id] = asyncio.Queue()
        try:
            await self._send(inference_pb2.ConnectRequest(generate=request))
            while True:
                yield await queue.get()
        finally:
            del self._queues[request.request_id]

    async def _send(self, message: inference_pb2.ConnectRequest) -> None:
        async with self._write:
            await self._call.write(message)


@asynccontextmanager
async def open_clients(base_url: str, scheduler: grpc.aio.Channel) -> AsyncIterator[Clients]:
    """Opens the connections for the block, and closes the channel to the scheduler after it."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(base_url=base_url, timeout=_PATIENT, limits=limits, trust_env=False) as http,
        scheduler as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        connect = ConnectStream(stub)
        reading = asyncio.create_task(connect.run())
        try:
            yield Clients(http, stub, connect)
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
