"""Workers that join, fail, hang, lie and leave, as the scheduler sees them over real gRPC."""

import asyncio

import grpc.aio
import pytest

from protos.errors import (
    ConfigurationRefused,
    Internal,
    InvalidArgument,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    Unsupported,
    from_rpc_error,
)
from protos.triptych.v1 import common_pb2, registry_pb2
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.running_scheduler import (
    ScriptedWorker,
    announcement,
    collect,
    failure,
    generate_request,
    joined,
    run_scheduler,
    run_worker,
    tokens_of,
)

pytestmark = pytest.mark.contract


async def test_a_worker_lost_in_mid_stream_costs_no_token() -> None:
    """Another worker joins; the client's stream goes on behind what it has."""
    async with run_scheduler() as scheduler:
        dying = ScriptedWorker(die_at_step=5)
        async with run_worker(dying) as port:
            call = scheduler.registry.Register(announcement(port))
            async for event in call:
                if event.state == registry_pb2.RegisterEvent.STATE_SERVING:
                    break
            stream = scheduler.inference.Generate(generate_request(max_tokens=20))
            answer = asyncio.create_task(collect(stream))
            assert isinstance(await failure(call), Unavailable)
        async with joined(scheduler, ScriptedWorker(), "w2"):
            events = await answer
    assert [token for event in events for token in event.token_ids] == expected_tokens([5, 6, 7], 20)


async def test_when_no_worker_comes_back_waiting_requests_get_the_reason() -> None:
    """After replica_wait_s, with a retryable error."""
    async with run_scheduler(Settings(replica_wait_s=0.05)) as scheduler:
        worker = ScriptedWorker()
        worker.gate.clear()
        async with joined(scheduler, worker):
            answer = asyncio.create_task(collect(scheduler.inference.Generate(generate_request())))
            while scheduler.engine.num_running == 0:
                await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
    assert isinstance(from_rpc_error(caught.value), Unavailable)


async def test_a_worker_that_hangs_counts_as_lost() -> None:
    """A step without an answer within step_timeout_s ends the registration with the reason."""
    async with run_scheduler(Settings(step_timeout_s=0.1)) as scheduler:
        worker = ScriptedWorker()
        worker.gate.clear()
        async with run_worker(worker) as port:
            call = scheduler.registry.Register(announcement(port))
            async for event in call:
                if event.state == registry_pb2.RegisterEvent.STATE_SERVING:
                    break
            stream = scheduler.inference.Generate(generate_request())
            error = await failure(call)
            stream.cancel()
    assert isinstance(error, Unavailable)
    assert "the worker hangs" in error.message


async def test_two_workers_share_the_queue() -> None:
    """With one worker's device held up, the other one serves everything else."""
    async with run_scheduler(Settings(max_num_seqs=1)) as scheduler:
        held, free = ScriptedWorker(), ScriptedWorker()
        async with joined(scheduler, held, "held"), joined(scheduler, free, "free"):
            held.gate.clear()
            calls = [asyncio.create_task(tokens_of(scheduler, generate_request([3 + i]))) for i in range(6)]
            for done, finished in enumerate(asyncio.as_completed(calls), start=1):
                await finished
                if done == 5:
                    break
            held.gate.set()
            assert await asyncio.gather(*calls) == [expected_tokens([3 + i], 8) for i in range(6)]
    assert held.steps > 0
    assert free.steps > 0


@pytest.mark.parametrize(
    ("worker", "settings", "error", "text"),
    [
        (ScriptedWorker(schema_revision=99), Settings(), SchemaMismatch, "schema revision 99"),
        (ScriptedWorker(kind=common_pb2.KV_GROUP_KIND_UNSPECIFIED), Settings(), ConfigurationRefused, "does not know"),
        (ScriptedWorker(kind=common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW, window=6), Settings(block_size=8, max_num_batched_tokens=8), ConfigurationRefused, "must be a multiple of the window"),
        (ScriptedWorker(), Settings(max_model_len=65), ConfigurationRefused, "exceeds the model's context of 64"),
        (ScriptedWorker(), Settings(block_size=6), ConfigurationRefused, "block_size 6 must be a multiple of 4"),
        (ScriptedWorker(), Settings(max_num_seqs=9), ConfigurationRefused, "max_num_seqs 9"),
        (ScriptedWorker(), Settings(decode_bucket_strategy="manual", decode_buckets=(1, 9)), ConfigurationRefused,
         "max_num_seqs 9 exceeds this device's limit of 8"),
        (ScriptedWorker(refuse_configure=ConfigurationRefused("too much memory")), Settings(), ConfigurationRefused,
         "too much memory"),
    ],
)  # fmt: skip
async def test_a_worker_that_cannot_be_used_is_told_why(
    worker: ScriptedWorker, settings: Settings, error: type[TriptychError], text: str
) -> None:
    """The registration ends with the reason, which the worker can print."""
    async with run_scheduler(settings) as scheduler, run_worker(worker) as port:
        caught = await failure(scheduler.registry.Register(announcement(port)))
    assert type(caught) is error
    assert text in caught.message


async def test_a_worker_with_another_model_is_refused() -> None:
    """All replicas of a deployment run one model."""
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, ScriptedWorker()),
        run_worker(ScriptedWorker(source="other")) as port,
    ):
        caught = await failure(scheduler.registry.Register(announcement(port, "w2")))
    assert isinstance(caught, ConfigurationRefused)
    assert "all workers must run one model" in caught.message


@pytest.mark.parametrize("other", [{"default_chunk": 8}, {"default_block_size": 8}])
async def test_a_worker_of_another_grid_is_told_what_to_set(other: dict[str, int]) -> None:
    """Prefixes are told apart in one way for all replicas; with the two settings both workers join."""
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, ScriptedWorker()),
        run_worker(ScriptedWorker(**other)) as port,  # type: ignore[arg-type]
    ):
        caught = await failure(scheduler.registry.Register(announcement(port, "w2")))
        assert len(scheduler.engine.replicas) == 1
    assert isinstance(caught, ConfigurationRefused)
    assert "set --max-num-batched-tokens and --block-size" in caught.message
    async with (
        run_scheduler(Settings(max_num_batched_tokens=4, block_size=4)) as scheduler,
        joined(scheduler, ScriptedWorker()),
        joined(scheduler, ScriptedWorker(**other), "w2"),  # type: ignore[arg-type]
    ):
        assert len(scheduler.engine.replicas) == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema_revision": 7}, SchemaMismatch),
        ({"world_size": 2}, Unsupported),
        ({"port": 0}, InvalidArgument),
        ({"port": 70000}, InvalidArgument),
        ({"worker_id": ""}, InvalidArgument),
    ],
)
async def test_an_announcement_that_cannot_be_used_is_refused(
    change: dict[str, object], error: type[TriptychError]
) -> None:
    """Before anything is dialled."""
    request = announcement(1)
    request.MergeFrom(registry_pb2.RegisterRequest(**change))  # type: ignore[arg-type]
    for name, value in change.items():
        setattr(request, name, value)
    async with run_scheduler() as scheduler:
        assert type(await failure(scheduler.registry.Register(request))) is error


async def test_a_worker_that_answers_nonsense_can_come_back() -> None:
    """Whatever it sent costs it its registration, not the scheduler, and not its next attempt."""
    async with run_scheduler() as scheduler, run_worker(ScriptedWorker(num_blocks=0)) as port:
        for _ in range(2):
            error = await failure(scheduler.registry.Register(announcement(port)))
            assert isinstance(error, Internal)
            assert "a pool needs at least 2 blocks" in error.message
