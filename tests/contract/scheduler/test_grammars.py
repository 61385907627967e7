"""Grammars over real gRPC: a worker is asked to compile, says no, is slow, or dies."""

import asyncio
from dataclasses import dataclass, field

import pytest

from protos.errors import Internal, InvalidArgument, TriptychError, Unsupported, abort
from protos.limits import MAX_GRAMMAR_BYTES
from protos.triptych.v1 import common_pb2, worker_pb2
from protos.wire import Context
from scheduler_svc.requests.sampling import Grammar
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.running_scheduler import (
    ScriptedWorker,
    failure,
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)

pytestmark = pytest.mark.contract
REGEX = common_pb2.StructuredOutput(regex="[a-z]+")


@dataclass
class Compiling(ScriptedWorker):
    """Compiles when it is let to.

    Attributes:
        asked: what it was asked for.
        may_compile: calls are answered while this is set.
        cancelled: set when a call is taken back.
        refusal: what it says then.
        admitted: constraints of admitted requests.
    """

    asked: list[common_pb2.StructuredOutput] = field(default_factory=list)
    may_compile: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: TriptychError | None = None

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


async def test_a_request_runs_once_its_grammar_is_compiled() -> None:
    """Others run before it; it gets its tokens afterwards."""
    worker = Compiling()
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        constrained = asyncio.ensure_future(
            tokens_of(scheduler, generate_request([7, 8], structured_output=REGEX))
        )
        assert await tokens_of(scheduler, generate_request()) == expected_tokens((5, 6, 7), 8)
        assert not constrained.done()
        assert worker.asked == [REGEX]
        worker.may_compile.set()
        assert await constrained == expected_tokens((7, 8), 8)


async def test_a_refused_grammar_is_the_clients_error() -> None:
    """With code, reason and parameter as the worker gave them; the worker stays."""
    worker = Compiling(refusal=InvalidArgument("no such rule", param="structured_output"))
    worker.may_compile.set()
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        error = await failure(scheduler.inference.Generate(generate_request(structured_output=REGEX)))
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.param) == ("no such rule", "structured_output")
        assert await tokens_of(scheduler, generate_request()) == expected_tokens((5, 6, 7), 8)


async def test_a_worker_lost_while_compiling_is_replaced() -> None:
    """The request is asked again of the next one."""
    first, second = Compiling(), Compiling()
    second.may_compile.set()
    async with run_scheduler() as scheduler:
        async with joined(scheduler, first):
            running = asyncio.ensure_future(tokens_of(scheduler, generate_request(structured_output=REGEX)))
            async with asyncio.timeout(10):
                while not first.asked:
                    await asyncio.sleep(0.01)
        async with joined(scheduler, second):
            assert await running == expected_tokens((5, 6, 7), 8)
        assert second.asked == [REGEX]


async def test_a_grammar_of_which_the_client_has_gone_is_taken_back() -> None:
    """The worker's call ends, so that its threads are for others; the same grammar can be asked for again."""
    worker = Compiling()
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        call = scheduler.inference.Generate(generate_request(structured_output=REGEX))
        async with asyncio.timeout(10):
            while not worker.asked:
                await asyncio.sleep(0.01)
            call.cancel()
            await worker.cancelled.wait()
        worker.may_compile.set()
        tokens = await tokens_of(scheduler, generate_request(structured_output=REGEX))
        assert tokens == expected_tokens((5, 6, 7), 8)
        assert worker.asked == [REGEX, REGEX]


async def test_a_fault_in_asking_for_a_grammar_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits hears of it, and can come again."""

    def broken(grammar: Grammar) -> common_pb2.StructuredOutput:
        raise ValueError("cannot be read")

    worker = Compiling()
    worker.may_compile.set()
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        with monkeypatch.context() as patched:
            patched.setattr("scheduler_svc.workers.grammar_compiler.grammar_to_proto", broken)
            async with asyncio.timeout(10):
                error = await failure(scheduler.inference.Generate(generate_request(structured_output=REGEX)))
        assert isinstance(error, Internal)
        assert "ValueError: cannot be read" in error.message
        tokens = await tokens_of(scheduler, generate_request(structured_output=REGEX))
        assert tokens == expected_tokens((5, 6, 7), 8)


async def test_what_no_worker_can_do_is_refused_before() -> None:
    """A worker that does not name the field gets no such request, and an empty constraint none at all."""
    async with run_scheduler() as scheduler, joined(scheduler, ScriptedWorker()):
        request = generate_request(structured_output=REGEX)
        assert isinstance(await failure(scheduler.inference.Generate(request)), Unsupported)
        for nothing in (common_pb2.StructuredOutput(), common_pb2.StructuredOutput(json_object=False)):
            empty = generate_request(structured_output=nothing)
            assert "is empty" in (await failure(scheduler.inference.Generate(empty))).message
        large = generate_request(structured_output=common_pb2.StructuredOutput(regex="a" * MAX_GRAMMAR_BYTES))
        assert "at most" in (await failure(scheduler.inference.Generate(large))).message
