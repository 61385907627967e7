"""Compiles grammars on a worker."""

import asyncio
from collections.abc import Callable

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Internal, Overloaded, TriptychError, from_rpc_error
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from scheduler_svc.requests.sampling import Grammar

# Compilation itself takes seconds at most; the rest is time in the worker's queue.
COMPILE_TIMEOUT_S = 60.0

# Statuses after a broken connection or the end of the worker; the worker's own errors have details.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

# Pause before the next attempt.
_RETRY_S = 0.2


class GrammarCompiler:
    """The open CompileGrammar calls of a worker."""

    def __init__(
        self, stub: "worker_pb2_grpc.WorkerAsyncStub", answered: Callable[[Grammar, float | TriptychError], None],
        log: FilteringBoundLogger,
    ) -> None:  # fmt: skip
        """Starts without calls.

        `answered` is called once for each grammar, with the seconds of compilation or the reason of its
        failure, but not after :meth:`withdraw` or the loss of the worker.
        """
        self._stub = stub
        self._answered = answered
        self._log = log
        self._calls: dict[Grammar, asyncio.Future[None]] = {}

    def compile(self, grammar: Grammar) -> None:
        """Starts compiling a grammar, which must not be in compilation."""
        self._calls[grammar] = asyncio.ensure_future(self._compile(grammar))

    def withdraw(self, grammar: Grammar) -> None:
        """Cancels the call for a grammar, which also stops the worker. Does nothing after the answer."""
        call = self._calls.pop(grammar, None)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Cancels all calls."""
        for call in self._calls.values():
            call.cancel()

    async def _compile(self, grammar: Grammar) -> None:
        outcome: float | TriptychError
        try:
            request = worker_pb2.CompileGrammarRequest(structured_output=grammar_to_proto(grammar))
            answer = await self._call(request)
            outcome = answer.compile_us * 1e-6
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                outcome = Overloaded(
                    f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s, because other grammars are before it; retry later",
                    param="structured_output", retry_after_ms=5000,
                )  # fmt: skip
            else:
                outcome = from_rpc_error(error)
        except Exception as error:  # noqa: BLE001 - requests that wait for the grammar need an answer
            self._log.exception("grammar_failed")
            outcome = Internal(f"compiling the grammar failed: {type(error).__name__}: {error}")
        del self._calls[grammar]
        self._answered(grammar, outcome)

    async def _call(self, request: worker_pb2.CompileGrammarRequest) -> worker_pb2.CompileGrammarResponse:
        """Calls the worker, again after broken connections, within the time limit.

        After the loss of the worker, :meth:`close` ends the call. Other connections may break: on a pipeline,
        another rank than 0 compiles, and new calls follow changed certificates.
        """
        now = asyncio.get_running_loop().time
        end_s = now() + COMPILE_TIMEOUT_S
        while True:
            try:
                return await self._stub.CompileGrammar(request, timeout=end_s - now(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _BROKEN or error.trailing_metadata():
                    raise
            await asyncio.sleep(_RETRY_S)


def grammar_to_proto(grammar: Grammar) -> common_pb2.StructuredOutput:
    """Returns a grammar's message, for a worker to compile."""
    return common_pb2.StructuredOutput.FromString(grammar.serialized)
