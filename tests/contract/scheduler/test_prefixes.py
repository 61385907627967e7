"""Prefixes over real gRPC: pins, resets, KV events and KV groups; also priorities and tenants."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from protos.errors import InvalidArgument, NotFound, Overloaded, TriptychError, Unavailable
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.api.kv_watch import watch_kv_events
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    collect,
    failure,
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)

pytestmark = pytest.mark.contract

PROMPT = list(range(20, 33))


def pin_request(
    prompt: list[int] | None = None, *, ttl_s: float = 60.0, salt: str = "", lora: str = ""
) -> inference_pb2.PinPrefixRequest:
    return inference_pb2.PinPrefixRequest(
        prompt_token_ids=PROMPT if prompt is None else prompt, ttl_s=ttl_s, cache_salt=salt, lora_name=lora
    )


async def cached(scheduler: RunningScheduler, prompt: list[int], salt: str = "") -> int:
    """Returns the tokens of a prompt that a request finds in the cache."""
    request = generate_request(prompt, max_tokens=1)
    request.cache_salt = salt
    return (await collect(scheduler.inference.Generate(request)))[0].prompt.num_cached_tokens


async def fill(scheduler: RunningScheduler, times: int = 4) -> None:
    """Fills a small cache, which evicts everything that is not pinned."""
    for index in range(times):
        await tokens_of(scheduler, generate_request([40 + index] * 24, max_tokens=1))


@contextlib.asynccontextmanager
async def watching(
    scheduler: RunningScheduler, *, after: int = 0, replica_id: str = ""
) -> AsyncIterator[asyncio.Queue[inference_pb2.KvEventBatch]]:
    """Watches the KV events within the block."""
    call = scheduler.inference.WatchKvEvents(
        inference_pb2.WatchKvEventsRequest(after_sequence=after, replica_id=replica_id)
    )
    batches: asyncio.Queue[inference_pb2.KvEventBatch] = asyncio.Queue()

    async def read() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for batch in call:
                batches.put_nowait(batch)

    reader = asyncio.create_task(read())
    try:
        yield batches
    finally:
        call.cancel()
        await reader


async def next_batch(batches: "asyncio.Queue[inference_pb2.KvEventBatch]") -> inference_pb2.KvEventBatch:
    return await asyncio.wait_for(batches.get(), 10)


async def test_a_pin_computes_a_missing_prefix(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """The pin computes whole chunks on the replica that it returns, and a request hits them."""
    pinned = await scheduler.inference.PinPrefix(pin_request())
    assert (pinned.num_tokens, pinned.replica_id) == (12, next(iter(scheduler.engine.replicas)))
    assert worker.device is not None
    assert worker.device.prefilled == 13
    assert await cached(scheduler, PROMPT) == 12
    assert await cached(scheduler, PROMPT, salt="other") == 0


async def test_a_pin_of_a_cached_prefix_computes_nothing(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """A cached prefix is pinned without a step."""
    await tokens_of(scheduler, generate_request(PROMPT, max_tokens=1))
    steps = worker.steps
    assert (await scheduler.inference.PinPrefix(pin_request())).num_tokens == 12
    assert worker.steps == steps


async def test_a_pinned_prefix_stays_until_it_is_unpinned() -> None:
    """A pinned prefix survives eviction of everything else; unpinning twice is no error."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker(num_blocks=13)):
        pinned = await scheduler.inference.PinPrefix(pin_request())
        await fill(scheduler)
        assert await cached(scheduler, PROMPT) == 12
        unpin = inference_pb2.UnpinPrefixRequest(pin_id=pinned.pin_id)
        assert (await scheduler.inference.UnpinPrefix(unpin)).found
        assert not (await scheduler.inference.UnpinPrefix(unpin)).found
        await fill(scheduler)
        assert await cached(scheduler, PROMPT) == 0


async def test_a_pin_ends_with_its_time_to_live() -> None:
    """The pin releases its blocks without an unpin."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker(num_blocks=13)):
        released = asyncio.Event()
        pinned = await scheduler.inference.PinPrefix(pin_request(ttl_s=0.05))
        (replica,) = scheduler.engine.replicas.values()
        before = replica.scheduler.kv.on_release

        def on_release() -> None:
            before()
            released.set()

        replica.scheduler.kv.on_release = on_release
        assert replica.scheduler.kv.usage > 0
        await asyncio.wait_for(released.wait(), 5)
        assert replica.scheduler.kv.usage == 0
        unpin = inference_pb2.UnpinPrefixRequest(pin_id=pinned.pin_id)
        assert not (await scheduler.inference.UnpinPrefix(unpin)).found


async def test_pins_beyond_their_share_of_memory_are_refused() -> None:
    """The error names the share, and earlier pins stay."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker(num_blocks=13)):
        first = await scheduler.inference.PinPrefix(pin_request())
        error = await failure(scheduler.inference.PinPrefix(pin_request(list(range(50, 70)))))
        assert isinstance(error, Overloaded)
        assert "50%" in error.message
        unpin = inference_pb2.UnpinPrefixRequest(pin_id=first.pin_id)
        assert (await scheduler.inference.UnpinPrefix(unpin)).found
        assert (await scheduler.inference.PinPrefix(pin_request(list(range(50, 70))))).num_tokens == 20


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (pin_request([5, 6, 7]), InvalidArgument, "shorter than one prefill chunk"),
        (pin_request([]), InvalidArgument, "prompt_token_ids is empty"),
        (pin_request(ttl_s=0), InvalidArgument, "ttl_s must be above 0"),
        (pin_request(ttl_s=float("nan")), InvalidArgument, "ttl_s must be above 0"),
        (pin_request(ttl_s=1e9), InvalidArgument, "at most"),
        (pin_request([500] * 8), InvalidArgument, "token id 500"),
        (pin_request(lora="x"), NotFound, "the model 'x' is not served here; use 'simulated'"),
    ],
)
async def test_an_invalid_pin_is_refused(
    scheduler: RunningScheduler,
    request_: inference_pb2.PinPrefixRequest,
    error: type[TriptychError],
    text: str,
) -> None:
    """An invalid pin gets a typed error and holds nothing."""
    caught = await failure(scheduler.inference.PinPrefix(request_))
    assert isinstance(caught, error)
    assert text in caught.message
    assert (await scheduler.inference.GetLoad(inference_pb2.GetLoadRequest())).kv_usage == 0


async def test_a_deadline_ends_the_computation_of_a_pin(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """The request that computes the prefix is aborted and holds nothing."""
    worker.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.inference.PinPrefix(pin_request(), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await scheduler.engine.drained(5)
    worker.gate.set()
    await tokens_of(scheduler, generate_request())
    (replica,) = scheduler.engine.replicas.values()
    assert replica.scheduler.kv.usage == 0


async def test_a_pin_ends_with_its_replica() -> None:
    """Unpinning finds nothing after the replica is lost, and the next worker starts empty."""
    async with run_scheduler() as scheduler:
        async with joined(scheduler, FakeWorker()):
            await scheduler.serving.get()
            pinned = await scheduler.inference.PinPrefix(pin_request())
        assert not await asyncio.wait_for(scheduler.serving.get(), 5)
        unpin = inference_pb2.UnpinPrefixRequest(pin_id=pinned.pin_id)
        assert not (await scheduler.inference.UnpinPrefix(unpin)).found
        async with joined(scheduler, FakeWorker()):
            assert await cached(scheduler, PROMPT) == 0


@pytest.mark.parametrize("keep", ["junctions", "ends"])
async def test_a_pin_keeps_the_window_at_its_end_under_every_policy(keep: str) -> None:
    """The window at the end of the last whole chunk is kept, so the pinned prefix can be hit."""
    worker = FakeWorker(kind=common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW, window=4)
    settings = Settings.model_validate({"keep_windows": keep})
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        assert (await scheduler.inference.PinPrefix(pin_request(list(range(20, 35))))).num_tokens == 12
        assert await cached(scheduler, list(range(20, 35))) == 12


async def test_a_reset_forgets_prefixes_and_pins(scheduler: RunningScheduler) -> None:
    """A reset forgets prefixes and pins and returns the number of replicas."""
    pinned = await scheduler.inference.PinPrefix(pin_request())
    answer = await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
    assert answer.num_replicas == 1
    unpin = inference_pb2.UnpinPrefixRequest(pin_id=pinned.pin_id)
    assert not (await scheduler.inference.UnpinPrefix(unpin)).found
    assert await cached(scheduler, PROMPT) == 0


async def test_a_reset_does_not_touch_running_requests(scheduler: RunningScheduler) -> None:
    """A stream continues unchanged over a reset."""
    call = scheduler.inference.Generate(generate_request(PROMPT, max_tokens=30))
    events = aiter(call)
    tokens = [*(await anext(events)).token_ids]
    await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
    tokens += [token async for event in events for token in event.token_ids]
    assert tokens == expected_tokens(PROMPT, 30)


async def test_a_watcher_sees_a_snapshot_then_what_is_stored_and_removed() -> None:
    """Sequence numbers are consecutive, parents precede children, and only stored keys are removed."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker(num_blocks=9)):
        await tokens_of(scheduler, generate_request([5] * 9, max_tokens=1))
        async with watching(scheduler) as batches:
            snapshot = await next_batch(batches)
            assert snapshot.snapshot
            (event,) = snapshot.events
            known = set(event.stored.hashes)
            assert (len(known), event.stored.tokens_per_hash) == (2, 4)
            sequence, removed, parent = snapshot.sequence, 0, b""
            await fill(scheduler, 2)
            while not removed:
                batch = await next_batch(batches)
                sequence += 1
                assert (batch.sequence, batch.snapshot) == (sequence, False)
                for event in batch.events:
                    if event.HasField("stored"):
                        stored = event.stored
                        assert len(stored.token_ids) == 4 * len(stored.hashes)
                        assert not parent or stored.parent_hash in known or stored.token_ids[0] == 41
                        parent = stored.hashes[-1]
                        known |= set(stored.hashes)
                    removed += len(event.removed.hashes)
                    assert known.issuperset(event.removed.hashes)


async def test_a_watcher_resumes_without_a_snapshot(scheduler: RunningScheduler) -> None:
    """A watcher that resumes gets what it missed; a new one gets a snapshot with the same number."""
    async with watching(scheduler) as batches:
        first = await next_batch(batches)
        await tokens_of(scheduler, generate_request([5] * 5, max_tokens=1))
        seen = await next_batch(batches)
    await tokens_of(scheduler, generate_request([6] * 5, max_tokens=1))
    async with watching(scheduler, after=seen.sequence, replica_id=first.replica_id) as batches:
        missed = await next_batch(batches)
    assert (missed.snapshot, missed.sequence) == (False, seen.sequence + 1)
    assert list(missed.events[0].stored.token_ids) == [6] * 4
    async with watching(scheduler) as batches:
        late = await next_batch(batches)
    assert (late.snapshot, late.sequence) == (True, missed.sequence)
    assert len(late.events[0].stored.hashes) == 2


async def test_a_replica_that_returns_starts_with_a_snapshot() -> None:
    """A lost replica sends `cleared`; its next life starts with a snapshot and higher numbers."""
    async with run_scheduler() as scheduler:
        async with watching(scheduler) as batches:
            async with joined(scheduler, FakeWorker()):
                first = await next_batch(batches)
                await tokens_of(scheduler, generate_request([5] * 5, max_tokens=1))
                assert (await next_batch(batches)).events[0].HasField("stored")
            last = await next_batch(batches)
            assert last.events[0].HasField("cleared")
            async with joined(scheduler, FakeWorker()):
                again = await next_batch(batches)
        assert again.snapshot
        assert again.replica_id == first.replica_id
        assert again.sequence > last.sequence


async def test_a_watcher_that_does_not_keep_up_is_cut_off(scheduler: RunningScheduler) -> None:
    """A slow watcher gets a retryable error instead of unbounded memory."""
    with watch_kv_events(scheduler.engine.prefixes.follow, max_behind=3) as changes:
        for token in range(5, 15):
            await tokens_of(scheduler, generate_request([token] * 5, max_tokens=1))
        with pytest.raises(Unavailable, match="more than 3 batches"):
            await anext(changes)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (common_pb2.KV_GROUP_KIND_FULL, 0),
        (common_pb2.KV_GROUP_KIND_PAGED_WINDOW, 3),
        (common_pb2.KV_GROUP_KIND_PAGED_WINDOW, 10),
        (common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW, 4),
        (common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW, 2),
    ],
)
async def test_every_kind_of_kv_group_reuses_prefixes(
    kind: common_pb2.KvGroupKind.ValueType, window: int
) -> None:
    """A second request with the same prefix prefills only the rest and gets its own tokens."""
    worker = FakeWorker(kind=kind, window=window)
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        await tokens_of(scheduler, generate_request([*range(20, 36), 3]))
        assert worker.device is not None
        before = worker.device.prefilled
        prompt = [*range(20, 36), 4, 5]
        assert await tokens_of(scheduler, generate_request(prompt)) == expected_tokens(prompt, 8)
        assert worker.device.prefilled - before == 2


async def test_priority_and_tenant_decide_the_order() -> None:
    """The most urgent request runs first, then the tenants alternate."""
    worker = FakeWorker()
    settings = Settings(max_num_seqs=1)
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        worker.gate.clear()
        order: list[str] = []

        async def ask(name: str, priority: int, tenant: str) -> None:
            request = generate_request([ord(name), 4], request_id=name, max_tokens=2)
            request.priority, request.tenant = priority, tenant
            async for _ in scheduler.inference.Generate(request):
                if name not in order:
                    order.append(name)

        tasks = []
        for count, (name, priority, tenant) in enumerate(
            [("A", -5, "x"), ("B", 0, "x"), ("C", 0, "x"), ("D", 0, "y"), ("E", -1, "y")], start=1
        ):
            tasks.append(asyncio.create_task(ask(name, priority, tenant)))
            while scheduler.engine.num_running + scheduler.engine.num_waiting < count:
                await asyncio.sleep(0)
        worker.gate.set()
        await asyncio.gather(*tasks)
    assert order[:2] == ["A", "E"]
    assert order.index("D") < order.index("C")
