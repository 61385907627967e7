"""A worker process, driven over gRPC as a scheduler drives it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import ConfigurationRefused, SchemaMismatch, from_rpc_error
from protos.service.grpc_options import SCHEMA_REVISION, open_channel
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.sampling_params import thinking_budget

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is
PARIS = [7042, 30]
SIZES = worker_pb2.ConfigureRequest(
    max_model_len=512, max_num_seqs=4, chunk=128, block_size=128, decode_buckets=[1, 2, 4], num_blocks=[20]
)
GREEDY = common_pb2.SamplingParams(temperature=0)

Steps = grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]


@dataclass(frozen=True)
class Running:
    """A worker process and its address."""

    process: subprocess.Popen[str]
    address: str


def start(folder: Path, *flags: str) -> Running:
    process = subprocess.Popen(
        [sys.executable, "-m", "worker_svc", "--model", str(folder), "--port", "0", "--scheduler-address", "", *flags],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        entry = json.loads(line)
        if entry["event"] == "listening":
            return Running(process, f"127.0.0.1:{entry['port']}")
    raise AssertionError("the worker ended before it listened")


@pytest.fixture(scope="module")
def running(smollm2: Path) -> Iterator[Running]:
    """A worker in float32; the first test that needs a configuration configures it."""
    running = start(smollm2, "--dtype", "float32")
    yield running
    running.process.kill()
    running.process.wait()
    assert running.process.stderr is not None
    running.process.stderr.close()


@pytest.fixture
async def channel(running: Running) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(running.address) as channel:
        yield channel


@pytest.fixture
async def stub(channel: grpc.aio.Channel) -> "worker_pb2_grpc.WorkerAsyncStub":
    return worker_pb2_grpc.WorkerStub(channel)


@pytest.fixture
async def steps(stub: "worker_pb2_grpc.WorkerAsyncStub") -> AsyncIterator[Steps]:
    """An Execute stream of a configured worker."""
    await configure(stub, SIZES)
    call = stub.Execute()
    yield call
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def configure(
    stub: "worker_pb2_grpc.WorkerAsyncStub", sizes: worker_pb2.ConfigureRequest
) -> list[worker_pb2.ConfigureEvent]:
    return [event async for event in stub.Configure(sizes)]


async def run(steps: Steps, **fields: object) -> worker_pb2.StepResult:
    await steps.write(worker_pb2.StepPlan(**fields))  # type: ignore[arg-type]
    result = await steps.read()
    assert isinstance(result, worker_pb2.StepResult)
    if result.token_ids:  # the compact form omits the slots; the plan has them
        work = worker_pb2.StepPlan(**fields)  # type: ignore[arg-type]
        slots = work.decode.slots or [work.prefill.slot]
        for slot, token in zip(slots, result.token_ids, strict=True):
            result.outputs.add(slot=slot, token_ids=[token])
    return result


def admission(
    slot: int,
    tokens: list[int],
    blocks: list[int],
    computed: int = 0,
    sampling: common_pb2.SamplingParams = GREEDY,
) -> worker_pb2.SlotRequest:
    return worker_pb2.SlotRequest(
        slot=slot, token_ids=tokens, num_prompt_tokens=len(tokens), num_computed_tokens=computed, sampling=sampling,
        blocks=[worker_pb2.SlotBlocks(slot=slot, group_id=0, block_ids=blocks)],
    )  # fmt: skip


def decode(slot: int, **fields: int) -> worker_pb2.Decode:
    return worker_pb2.Decode(slots=[slot], bucket=1, **fields)


def prefill(slot: int, start: int, count: int) -> worker_pb2.Prefill:
    return worker_pb2.Prefill(slot=slot, start=start, num_tokens=count, sample=True)


def tokens(result: worker_pb2.StepResult) -> dict[int, list[int]]:
    assert not result.HasField("error"), result.error
    return {output.slot: list(output.token_ids) for output in result.outputs}


async def health(channel: grpc.aio.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stubs cover only the synchronous stub
    status: int = (await stub.Check(health_pb2.HealthCheckRequest())).status
    return status


async def test_describe_and_health_before_configure(
    stub: "worker_pb2_grpc.WorkerAsyncStub", channel: grpc.aio.Channel
) -> None:
    """Without weights the worker describes the model and reports NOT_SERVING."""
    answer = await stub.Describe(worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION), timeout=60)
    assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert answer.device == "cpu"
    assert answer.model.architecture == "LlamaForCausalLM"
    assert answer.model.source == "smollm2"
    assert (answer.model.vocab_size, answer.model.max_model_len) == (49152, 8192)
    assert list(answer.model.eos_token_ids) == [2]
    assert answer.model.dtype == "float32"
    (group,) = answer.kv_groups
    assert (group.kind, group.num_layers, group.bytes_per_token) == (
        common_pb2.KV_GROUP_KIND_FULL, 30, 30 * 2 * 3 * 64 * 4
    )  # fmt: skip
    assert answer.default_block_size % answer.block_size_multiple == 0


async def test_another_schema_revision_is_refused(stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Describe(worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION + 1))
    assert isinstance(from_rpc_error(caught.value), SchemaMismatch)


async def test_model_files_are_the_tokenizer(stub: "worker_pb2_grpc.WorkerAsyncStub", smollm2: Path) -> None:
    files: dict[str, bytes] = {}
    async for chunk in stub.GetModelFiles(worker_pb2.GetModelFilesRequest()):
        files[chunk.name] = files.get(chunk.name, b"") + chunk.data
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"} <= set(files)
    assert all((smollm2 / name).read_bytes() == data for name, data in files.items())
    assert "model.safetensors" not in files


async def test_bad_sizes_are_refused_and_good_ones_work_after(
    stub: "worker_pb2_grpc.WorkerAsyncStub", channel: grpc.aio.Channel
) -> None:
    """A refusal names the size; the same worker then accepts others, reports progress and serves."""
    bad = worker_pb2.ConfigureRequest()
    bad.CopyFrom(SIZES)
    bad.block_size = 100
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await configure(stub, bad)
    refusal = from_rpc_error(caught.value)
    assert isinstance(refusal, ConfigurationRefused)
    assert "multiple of 32" in refusal.message
    assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    events = await configure(stub, SIZES)
    assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
    phases = {event.progress.phase for event in events if event.HasField("progress")}
    assert {worker_pb2.ConfigureProgress.PHASE_LOAD, worker_pb2.ConfigureProgress.PHASE_WARM_UP} <= phases
    ready = events[-1].ready
    assert list(ready.num_blocks) == [20]
    assert len(ready.graphs) == 4
    again = await configure(stub, SIZES)
    assert len(again) == 1
    assert again[0].ready == ready


async def test_a_request_lives_in_its_slot(steps: Steps) -> None:
    result = await run(steps, step=1, admit=[admission(1, PROMPT, [3])], prefill=prefill(1, 0, 5))
    assert result.step == 1
    assert result.last
    assert tokens(result) == {1: PARIS[:1]}
    wide = worker_pb2.Decode(slots=[1], bucket=2)
    assert tokens(await run(steps, step=2, decode=wide)) == {1: PARIS[1:]}
    assert tokens(await run(steps, step=3, release=[1])) == {}


async def test_a_thought_ends_within_steps_in_flight(steps: Steps) -> None:
    """A budget counts the output of an earlier admission; its neighbour is not disturbed."""
    budget = thinking_budget(6, end=[9], close=[8, 9, 10])
    thinks = common_pb2.SamplingParams(temperature=0, thinking_budget=budget)
    free: dict[int, list[int]] = {}
    for known in ([], [11, 12, 13, 14], [11, 12, 13, 14, 15, 16, 8]):
        begun = admission(1, [*PROMPT, *known], [4], sampling=thinks)
        begun.num_prompt_tokens = len(PROMPT)
        await run(steps, step=1, admit=[admission(0, PROMPT, [3])], prefill=prefill(0, 0, 5))
        first = tokens(await run(steps, step=2, admit=[begun], prefill=prefill(1, 0, 5 + len(known))))[1]
        for step in (3, 4):
            both = worker_pb2.Decode(slots=[0, 1], bucket=2, steps=4, steps_per_result=4)
            await steps.write(worker_pb2.StepPlan(step=step, decode=both))
        written: list[int] = []
        for _ in range(2):
            result = await steps.read()
            assert isinstance(result, worker_pb2.StepResult)
            written += result.token_ids
        free.setdefault(0, written[::2])
        assert written[::2] == free[0], "of a slot without a budget"
        whole = [*known, *first, *written[1::2]]
        assert whole[6:9] == [8, 9, 10]
        assert 9 not in whole[:6]
        await run(steps, step=5, release=[0, 1])


async def test_the_end_of_a_stream_frees_every_slot(stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
    """A new stream starts with free slots, even after a cancelled one; a second open stream is refused."""
    await configure(stub, SIZES)
    first = stub.Execute()
    await run(first, step=1, admit=[admission(slot, PROMPT, [3 + slot]) for slot in range(4)])
    with pytest.raises(grpc.aio.AioRpcError, match="another Execute stream is open"):
        await stub.Execute().read()
    first.cancel()
    # The worker refuses new streams until it notices the cancellation.
    async with asyncio.timeout(10):
        result, other = None, first
        while result is None:
            other = stub.Execute()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                result = await run(other, step=1, admit=[admission(0, PROMPT, [3])], prefill=prefill(0, 0, 5))
    assert tokens(result) == {0: PARIS[:1]}
    await other.done_writing()


async def test_grammars_compile_while_steps_go_on(
    stub: "worker_pb2_grpc.WorkerAsyncStub", steps: Steps
) -> None:
    """A costly grammar delays no step, refusals say why, and an output follows its compiled grammar."""

    def compile_(**spec: Any) -> "grpc.aio.UnaryUnaryCall[Any, worker_pb2.CompileGrammarResponse]":
        structured = common_pb2.StructuredOutput(**spec)
        return stub.CompileGrammar(worker_pb2.CompileGrammarRequest(structured_output=structured), timeout=60)

    description = await stub.Describe(worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION))
    assert "structured_output" in description.sampling_fields
    hostile = compile_(grammar="root ::= " + " ".join("[a-z]*" for _ in range(2000)))
    assert (await compile_(choice=common_pb2.Choices(values=["0", "1"]))).memory_bytes > 0
    sampling = common_pb2.SamplingParams(
        temperature=1.0,
        seed=3,
        structured_output=common_pb2.StructuredOutput(choice=common_pb2.Choices(values=["0", "1"])),
    )
    result = await run(
        steps, step=1, admit=[admission(0, [5, 6, 7], [1], sampling=sampling)], prefill=prefill(0, 0, 3)
    )
    (output,) = tokens(result).values()
    assert output[-1] in description.model.eos_token_ids
    assert not hostile.done()
    other = common_pb2.SamplingParams(structured_output=common_pb2.StructuredOutput(regex="not compiled"))
    result = await run(
        steps,
        step=2,
        release=[0],
        admit=[admission(0, [5, 6], [1], sampling=other)],
        prefill=prefill(0, 0, 2),
    )
    assert result.outputs[0].error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    for spec, why in (
        ({"regex": "(a"}, "not closed"),
        ({"json_schema": '{"not": {}}'}, "matches no finite value"),
        ({}, "is empty"),
        ({"json_schema": '{"not": {}}'}, "no finite value"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
            await compile_(**spec)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="cannot be compiled"):
        await hostile


async def test_sigterm_ends_it_cleanly(running: Running, stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
    """With an idle stream open, the process exits within seconds with code 0.

    This test must run last, since it ends the worker.
    """
    await configure(stub, SIZES)
    call = stub.Execute()
    await run(call, step=1)
    asked = time.monotonic()
    os.kill(running.process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(running.process.wait, 10) == 0
    assert time.monotonic() - asked < 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "."), "no config.json"),
        ((), "--model"),
    ],
)
def test_a_bad_setting_is_one_line_and_code_2(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-m", "worker_svc", "--port", "0", "--scheduler-address", "", *flags],
        check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_absent_device_is_one_line_and_code_2(smollm2: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "worker_svc", "--port", "0", "--scheduler-address", "", "--model", str(smollm2),
            "--device", "rbln",
        ],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "rebel" in done.stderr.splitlines()[-1]
