"""Workers that join, fail, hang, send invalid data and leave, over real gRPC."""

import asyncio
import gc

import grpc.aio
import pytest
from structlog.testing import capture_logs

from protos.errors import (
    ConfigurationRefused,
    Internal,
    InvalidArgument,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    from_rpc_error,
)
from protos.steps import Prefill
from protos.triptych.v1 import common_pb2, inference_pb2, registry_pb2, worker_pb2
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    collect,
    failure,
    generate_request,
    joined,
    register,
    registration,
    run_scheduler,
    run_worker,
    tokens_of,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract


async def test_waiting_requests_fail_when_no_worker_returns() -> None:
    """After replica_wait_s without a worker, waiting requests fail with a retryable error."""
    async with run_scheduler(Settings(replica_wait_s=0.05)) as scheduler:
        worker = FakeWorker()
        worker.gate.clear()
        async with joined(scheduler, worker):
            answer = asyncio.create_task(collect(scheduler.inference.Generate(generate_request())))
            await until(lambda: scheduler.engine.num_running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
    assert isinstance(from_rpc_error(caught.value), Unavailable)


async def test_a_worker_that_cannot_copy_blocks_gets_no_copies() -> None:
    """What the worker says once it is configured counts; the scheduler says once what it does without."""
    worker = FakeWorker(
        kind=common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW,
        window=4,
        block_copies=worker_pb2.BLOCK_COPIES_RUNTIME,
        block_copies_when_ready=worker_pb2.BLOCK_COPIES_NONE,
    )
    prompt = list(range(5, 22))
    with capture_logs() as logs:
        async with run_scheduler() as scheduler, joined(scheduler, worker):
            for _ in range(2):
                request = generate_request(prompt, max_tokens=3)
                request.n = 2
                events = await collect(scheduler.inference.Generate(request))
                for sequence in range(2):
                    tokens = [t for event in events if event.sequence == sequence for t in event.token_ids]
                    assert tokens == expected_tokens(prompt, 3, sequence)
    plans = [worker.plans.get_nowait() for _ in range(worker.plans.qsize())]
    assert plans
    assert not any(plan.copies for plan in plans)
    assert [entry["replica"] for entry in logs if entry["event"] == "no_block_copies"] == ["w"]


async def test_shapes_of_pooling_models_have_no_effect_on_a_generating_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler's log names the settings, whichever variable has set them."""
    monkeypatch.setenv("VLLM_SPYRE_WARMUP_BATCH_SIZES", "1,4")
    monkeypatch.setenv("SENDNN_INFERENCE_WARMUP_PROMPT_LENS", "64,32")
    with capture_logs() as logs:
        async with run_scheduler(Settings()) as scheduler, joined(scheduler, FakeWorker()):
            pass
    (entry,) = [entry for entry in logs if entry["event"] == "settings_ignored"]
    assert entry["names"] == ["pool_batch_sizes", "pool_prompt_lens"]


@pytest.mark.parametrize("several", [True, False])
async def test_chunks_run_in_buckets_that_the_worker_announces(several: bool) -> None:
    """Without the announcement the worker is configured with one size, and the log names the settings."""
    worker = FakeWorker(default_chunk=16, default_block_size=16, prefill_buckets=several)
    prompt = list(range(5, 24))
    with capture_logs() as logs:
        settings = Settings(prefill_buckets=(4, 16), prefill_bucket_step=3)
        async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
            assert await tokens_of(scheduler, generate_request(prompt)) == expected_tokens(prompt, 8)
    assert worker.configured is not None
    assert list(worker.configured.prefill_buckets) == ([4, 16] if several else [16])
    plans = [worker.plans.get_nowait() for _ in range(worker.plans.qsize())]
    works = [plan.work for plan in plans if isinstance(plan.work, Prefill)]
    chunks = [(work.num_tokens, work.bucket) for work in works]
    assert chunks == [(16, 16), (3, 4 if several else 16)]
    ignored = [entry["names"] for entry in logs if entry["event"] == "settings_ignored"]
    assert ignored == ([] if several else [["prefill_bucket_step", "prefill_buckets"]])


async def test_two_workers_share_the_queue() -> None:
    """While one worker's device is blocked, the other worker serves all other requests."""
    async with run_scheduler(Settings(max_num_seqs=1)) as scheduler:
        held, free = FakeWorker(), FakeWorker()
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
        (FakeWorker(schema_revision=99), Settings(), SchemaMismatch, "schema revision 99"),
        (FakeWorker(kind=common_pb2.KV_GROUP_KIND_UNSPECIFIED), Settings(), ConfigurationRefused, "does not know"),
        (FakeWorker(kind=common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW, window=6), Settings(block_size=8, max_num_batched_tokens=8), ConfigurationRefused, "must be a multiple of the window"),
        (FakeWorker(), Settings(max_model_len=65), ConfigurationRefused, "exceeds the model's context of 64"),
        (FakeWorker(), Settings(block_size=6), ConfigurationRefused, "block_size 6 must be a multiple of 4"),
        (FakeWorker(), Settings(max_num_seqs=9), ConfigurationRefused, "max_num_seqs 9"),
        (FakeWorker(), Settings(decode_bucket_strategy="manual", decode_buckets=(1, 9)), ConfigurationRefused,
         "max_num_seqs 9 exceeds this device's limit of 8"),
        (FakeWorker(refuse_configure=ConfigurationRefused("too much memory")), Settings(), ConfigurationRefused,
         "too much memory"),
    ],
)  # fmt: skip
async def test_an_unusable_worker_is_refused_with_the_reason(
    worker: FakeWorker, settings: Settings, error: type[TriptychError], text: str
) -> None:
    """The registration of an unusable worker ends with the reason."""
    async with run_scheduler(settings) as scheduler, run_worker(worker) as port:
        caught = await failure(scheduler.registry.Register(registration(port)))
    assert type(caught) is error
    assert text in caught.message


async def test_a_worker_with_another_model_is_refused() -> None:
    """All replicas of a deployment run one model."""
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, FakeWorker()),
        run_worker(FakeWorker(source="other")) as port,
    ):
        caught = await failure(scheduler.registry.Register(registration(port, "w2")))
    assert isinstance(caught, ConfigurationRefused)
    assert "all workers must run one model" in caught.message


async def test_a_stranger_that_comes_first_does_not_decide_the_model() -> None:
    """A worker of another model than the expected one is refused before it is configured."""
    stranger, settings = FakeWorker(source="other"), Settings(expect_model="simulated")
    async with run_scheduler(settings) as scheduler, run_worker(stranger) as port:
        caught = await failure(scheduler.registry.Register(registration(port, "first")))
        assert isinstance(caught, ConfigurationRefused)
        assert "replica first serves 'other' and this deployment 'simulated'" in caught.message
        assert stranger.configured is None
        async with joined(scheduler, FakeWorker()):
            assert (await scheduler.inference.GetModel(inference_pb2.GetModelRequest())).source == "simulated"


async def test_a_worker_with_other_weights_of_the_same_name_is_refused() -> None:
    """The first worker that knows its weights decides, and a worker that does not know them may join."""
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, FakeWorker(), "unknown"),
        joined(scheduler, FakeWorker(weights_digest="ab" * 32), "w1"),
        joined(scheduler, FakeWorker(weights_digest="ab" * 32), "w2"),
        run_worker(FakeWorker(weights_digest="cd" * 32)) as port,
    ):
        caught = await failure(scheduler.registry.Register(registration(port, "tuned")))
        assert len(scheduler.engine.replicas) == 3
    assert isinstance(caught, ConfigurationRefused)
    assert caught.message.startswith("replica tuned has other weights of simulated (digest cdcdcdcdcdcd)")
    assert "this deployment serves (abababababab)" in caught.message


@pytest.mark.parametrize("other", [{"default_chunk": 8}, {"default_block_size": 8}])
async def test_a_worker_with_other_chunks_or_blocks_is_refused(other: dict[str, int]) -> None:
    """A worker with other default sizes is refused with the settings to use, and joins once they are set."""
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, FakeWorker()),
        run_worker(FakeWorker(**other)) as port,  # type: ignore[arg-type]
    ):
        caught = await failure(scheduler.registry.Register(registration(port, "w2")))
        assert len(scheduler.engine.replicas) == 1
    assert isinstance(caught, ConfigurationRefused)
    assert "set --max-num-batched-tokens and --block-size" in caught.message
    async with (
        run_scheduler(Settings(max_num_batched_tokens=4, block_size=4)) as scheduler,
        joined(scheduler, FakeWorker()),
        joined(scheduler, FakeWorker(**other), "w2"),  # type: ignore[arg-type]
    ):
        assert len(scheduler.engine.replicas) == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema_revision": 6}, SchemaMismatch),
        ({"world_size": 2}, ConfigurationRefused),
        ({"port": 0}, InvalidArgument),
        ({"port": 70000}, InvalidArgument),
        ({"worker_id": ""}, InvalidArgument),
    ],
)
async def test_an_invalid_registration_is_refused(
    change: dict[str, object], error: type[TriptychError]
) -> None:
    """An invalid registration is refused before the scheduler dials back."""
    request = registration(1)
    request.MergeFrom(registry_pb2.RegisterRequest(**change))  # type: ignore[arg-type]
    for name, value in change.items():
        setattr(request, name, value)
    async with run_scheduler() as scheduler:
        assert type(await failure(scheduler.registry.Register(request))) is error


async def test_a_worker_with_invalid_answers_may_register_again() -> None:
    """An invalid answer costs a worker its registration but not its next attempt."""
    async with run_scheduler() as scheduler, run_worker(FakeWorker(num_blocks=0)) as port:
        for _ in range(2):
            error = await failure(scheduler.registry.Register(registration(port)))
            assert isinstance(error, Internal)
            assert "a pool needs at least 2 blocks" in error.message


def num_futures() -> int:
    """Counts the Futures that are alive."""
    gc.collect()
    return sum(issubclass(type(one), asyncio.Future) for one in gc.get_objects())


async def test_idle_periods_leave_no_futures() -> None:
    """A worker that idles again and again costs the same memory after every period."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker()):

        async def idle(periods: int) -> None:
            for _ in range(periods):
                await tokens_of(scheduler, generate_request(max_tokens=1))

        await idle(5)
        before = num_futures()
        await idle(50)
        assert num_futures() - before < 10


async def test_an_idle_worker_that_ends_its_stream_is_lost() -> None:
    """The scheduler notices at once, although it has nothing to send."""
    async with run_scheduler() as scheduler:
        worker = FakeWorker()
        async with run_worker(worker) as port:
            call = await register(scheduler, port)
            await tokens_of(scheduler, generate_request())
        assert "the worker ended its stream" in (await failure(call)).message
