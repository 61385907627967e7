"""Compiles grammars on one worker."""

import asyncio
from collections.abc import Callable

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Internal, Overloaded, TriptychError, from_rpc_error
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.convert.configuration import grammar_to_proto
from scheduler_svc.requests.sampling import Grammar

# Compiling itself takes seconds at most; the rest is time behind other grammars.
COMPILE_TIMEOUT_S = 60.0


class GrammarCompiler:
    """The open CompileGrammar calls of one worker."""

    def __init__(self, stub: "worker_pb2_grpc.WorkerAsyncStub", log: FilteringBoundLogger) -> None:
        """Starts without calls."""
        self._stub = stub
        self._log = log
        self._calls: dict[Grammar, asyncio.Future[None]] = {}

    def compile(self, grammar: Grammar, answered: Callable[[TriptychError | None], None]) -> None:
        """Starts compiling a grammar.

        Args:
            grammar: a grammar that is not being compiled.
            answered: called once with None or the reason why the grammar cannot be compiled. Not called if
                the worker is lost, or after :meth:`withdraw`.
        """
        self._calls[grammar] = asyncio.ensure_future(self._compile(grammar, answered))

    def withdraw(self, grammar: Grammar) -> None:
        """Cancels the call for a grammar, which also stops the worker. Does nothing after the answer."""
        call = self._calls.pop(grammar, None)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Cancels all calls."""
        for call in self._calls.values():
            call.cancel()

    async def _compile(self, grammar: Grammar, answered: Callable[[TriptychError | None], None]) -> None:
        refusal: TriptychError | None = None
        try:
            request = worker_pb2.CompileGrammarRequest(structured_output=grammar_to_proto(grammar))
            await self._stub.CompileGrammar(request, timeout=COMPILE_TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
                # The connection broke, so the step loop fails too, and the replica is about to be detached.
                return
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                refusal = Overloaded(
                    f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s, because other grammars are before it; retry later",
                    param="structured_output", retry_after_ms=5000,
                )  # fmt: skip
            else:
                refusal = from_rpc_error(error)
        except Exception as error:  # noqa: BLE001 - requests that wait for the grammar need an answer
            self._log.exception("grammar_failed")
            refusal = Internal(f"compiling the grammar failed: {type(error).__name__}: {error}")
        del self._calls[grammar]
        answered(refusal)
