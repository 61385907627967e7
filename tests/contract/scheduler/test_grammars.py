"""Grammars over real gRPC: compiled, refused, slow, cancelled, and lost with their worker."""

import asyncio
from dataclasses import dataclass, field

import grpc
import pytest

from protos.errors import Context, Internal, InvalidArgument, Overloaded, TriptychError, Unsupported, abort
from protos.triptych.v1 import common_pb2, worker_pb2
from scheduler_svc.requests.sampling import Grammar
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract
REGEX = common_pb2.StructuredOutput(regex="[a-z]+")


@dataclass
class CompilingWorker(FakeWorker):
    """Compiles grammars when the test allows it."""

    asked: list[common_pb2.StructuredOutput] = field(default_factory=list)
    """The constraints that the scheduler asked for."""
    may_compile: asyncio.Event = field(default_factory=asyncio.Event)
    """Calls are answered while this is set."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call is cancelled."""
    refusal: TriptychError | None = None
    """The answer to every call, instead of success."""

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        response = await super().Describe(request, context)
        response.sampling_fields.append("structured_output")
        return response

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        self.asked.append(request.structured_output)
        try:
            await self.may_compile.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.refusal is not None:
            await abort(context, self.refusal)
        return worker_pb2.CompileGrammarResponse(memory_bytes=1, compile_us=1)


@pytest.fixture
def worker() -> CompilingWorker:
    """A worker that compiles grammars."""
    return CompilingWorker()


async def test_a_request_runs_once_its_grammar_is_compiled(
    scheduler: RunningScheduler, worker: CompilingWorker
) -> None:
    """A request waits for its grammar while others run, and gets its tokens afterwards."""
    constrained = asyncio.ensure_future(
        tokens_of(scheduler, generate_request([7, 8], structured_output=REGEX))
    )
    assert await tokens_of(scheduler, generate_request()) == expected_tokens((5, 6, 7), 8)
    assert not constrained.done()
    assert worker.asked == [REGEX]
    worker.may_compile.set()
    assert await constrained == expected_tokens((7, 8), 8)


async def test_a_refused_grammar_is_the_clients_error() -> None:
    """The client gets the worker's error with code, reason and parameter; the worker stays."""
    worker = CompilingWorker(refusal=InvalidArgument("no such rule", param="structured_output"))
    worker.may_compile.set()
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        error = await failure(scheduler.inference.Generate(generate_request(structured_output=REGEX)))
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.param) == ("no such rule", "structured_output")
        assert await tokens_of(scheduler, generate_request()) == expected_tokens((5, 6, 7), 8)


async def test_a_worker_lost_while_compiling_is_replaced() -> None:
    """The next worker compiles the grammar when the first one is lost."""
    first, second = CompilingWorker(), CompilingWorker()
    second.may_compile.set()
    async with run_scheduler() as scheduler:
        async with joined(scheduler, first):
            running = asyncio.ensure_future(tokens_of(scheduler, generate_request(structured_output=REGEX)))
            await until(lambda: first.asked)
        async with joined(scheduler, second):
            assert await running == expected_tokens((5, 6, 7), 8)
        assert second.asked == [REGEX]


@dataclass
class BreakingWorker(CompilingWorker):
    """Fails its first calls as a connection does that breaks: the status has no details."""

    breaks: int = 1
    status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        if len(self.asked) < self.breaks:
            self.asked.append(request.structured_output)
            await context.abort(self.status, "connection reset by peer")
        return await super().CompileGrammar(request, context)


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_broken_call_is_made_again(status: grpc.StatusCode) -> None:
    """The worker's plans go over another connection, so nothing else tells that the call is lost."""
    worker = BreakingWorker(status=status)
    worker.may_compile.set()
    async with run_scheduler() as scheduler, joined(scheduler, worker), asyncio.timeout(10):
        tokens = await tokens_of(scheduler, generate_request(structured_output=REGEX))
    assert tokens == expected_tokens((5, 6, 7), 8)
    assert worker.asked == [REGEX, REGEX]


async def test_calls_that_keep_breaking_fail_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails once the grammar's time is over."""
    monkeypatch.setattr("scheduler_svc.workers.grammar_compiler.COMPILE_TIMEOUT_S", 0.5)
    async with run_scheduler() as scheduler, joined(scheduler, BreakingWorker(breaks=1000)):
        async with asyncio.timeout(10):
            error = await failure(scheduler.inference.Generate(generate_request(structured_output=REGEX)))
    assert isinstance(error, Overloaded)
    assert "was not compiled within 0.5 s" in error.message


async def test_cancelling_a_request_cancels_its_compilation(
    scheduler: RunningScheduler, worker: CompilingWorker
) -> None:
    """Cancelling the last request of a grammar cancels the worker's call.

    The grammar can be compiled later.
    """
    call = scheduler.inference.Generate(generate_request(structured_output=REGEX))
    await until(lambda: worker.asked)
    call.cancel()
    await worker.cancelled.wait()
    worker.may_compile.set()
    tokens = await tokens_of(scheduler, generate_request(structured_output=REGEX))
    assert tokens == expected_tokens((5, 6, 7), 8)
    assert worker.asked == [REGEX, REGEX]


async def test_an_unexpected_error_while_compiling_fails_the_request(
    scheduler: RunningScheduler, worker: CompilingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails with the error, and a second request compiles the grammar."""

    def broken(grammar: Grammar) -> common_pb2.StructuredOutput:
        raise ValueError("cannot be read")

    worker.may_compile.set()
    with monkeypatch.context() as patched:
        patched.setattr("scheduler_svc.workers.grammar_compiler.grammar_to_proto", broken)
        async with asyncio.timeout(10):
            error = await failure(scheduler.inference.Generate(generate_request(structured_output=REGEX)))
    assert isinstance(error, Internal)
    assert "ValueError: cannot be read" in error.message
    tokens = await tokens_of(scheduler, generate_request(structured_output=REGEX))
    assert tokens == expected_tokens((5, 6, 7), 8)


@pytest.mark.parametrize("worker", [FakeWorker()])
async def test_unsupported_and_invalid_constraints_are_refused_at_once(scheduler: RunningScheduler) -> None:
    """A worker without support gets no such request; empty constraints are refused."""
    request = generate_request(structured_output=REGEX)
    assert isinstance(await failure(scheduler.inference.Generate(request)), Unsupported)
    empty = generate_request(structured_output=common_pb2.StructuredOutput())
    assert isinstance(await failure(scheduler.inference.Generate(empty)), InvalidArgument)
