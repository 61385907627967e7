"""Prefixes over real gRPC: resets, KV events and KV groups; also priorities and tenants."""

import asyncio

import pytest

from protos.errors import Unavailable
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.api.kv_watch import watch_kv_events
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    collect,
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)

pytestmark = pytest.mark.contract

PROMPT = list(range(20, 33))


async def cached(scheduler: RunningScheduler, prompt: list[int], salt: str = "") -> int:
    """Returns the tokens of a prompt that a request finds in the cache."""
    request = generate_request(prompt, max_tokens=1)
    request.cache_salt = salt
    return (await collect(scheduler.inference.Generate(request)))[0].prompt.num_cached_tokens


async def test_a_reset_forgets_prefixes(scheduler: RunningScheduler) -> None:
    """A reset forgets all prefixes and returns the number of replicas."""
    await tokens_of(scheduler, generate_request(PROMPT, max_tokens=1))
    assert await cached(scheduler, PROMPT) == 12
    assert await cached(scheduler, PROMPT, salt="other") == 0
    answer = await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
    assert answer.num_replicas == 1
    assert await cached(scheduler, PROMPT) == 0


async def test_a_reset_does_not_touch_running_requests(scheduler: RunningScheduler) -> None:
    """A stream continues unchanged over a reset."""
    call = scheduler.inference.Generate(generate_request(PROMPT, max_tokens=30))
    events = aiter(call)
    tokens = [*(await anext(events)).token_ids]
    await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
    tokens += [token async for event in events for token in event.token_ids]
    assert tokens == expected_tokens(PROMPT, 30)


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
