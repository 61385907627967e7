"""KV events as docs/kv-events.md describes them, and resets of the prefix cache."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator

import pytest

from protos.errors import Unavailable
from protos.triptych.v1 import inference_pb2
from scheduler_svc.api.kv_watch import watch_kv_events
from scheduler_svc.kv.sequence import HashChain, seed_key
from scheduler_svc.settings import Settings
from tests.support.paths import ROOT
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


@pytest.fixture
def replica_id() -> str:
    """The replica id that docs/kv-events.md uses."""
    return "r0"


@pytest.fixture
def settings() -> Settings:
    """Leaves out generated tokens, so that the keys are those of prompts."""
    return Settings(cache_generated_tokens=False)


PROMPT = list(range(5, 14))
LONG = list(range(20, 33))


def keys_of(tokens: list[int], *, salt: str = "") -> list[bytes]:
    """Returns the prefix keys for the fake worker's hash blocks of 4 tokens."""
    return HashChain(seed_key(model="simulated", salt=salt), 4).extend(tokens, len(tokens) // 4)


def example(port: int) -> str:
    """The document's program, for a scheduler on that port."""
    text = (ROOT / "docs" / "kv-events.md").read_text()
    match = re.search(r"<!-- example: watch -->\n```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    assert "127.0.0.1:50051" in match[1]
    return match[1].replace("127.0.0.1:50051", f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def watching(
    scheduler: RunningScheduler, *, replica_id: str = "", after: int = 0
) -> AsyncIterator[AsyncIterator[inference_pb2.KvEventBatch]]:
    """Watches the KV events within the block."""
    request = inference_pb2.WatchKvEventsRequest(replica_id=replica_id, after_sequence=after)
    call = scheduler.inference.WatchKvEvents(request)
    try:
        async with asyncio.timeout(20):
            yield aiter(call)
    finally:
        call.cancel()


def hashes(batch: inference_pb2.KvEventBatch) -> list[bytes]:
    return [key for event in batch.events for key in event.stored.hashes]


async def test_the_documented_watcher_finds_its_prompt(scheduler: RunningScheduler) -> None:
    """The example of docs/kv-events.md sees two chunks of its prompt, and none after a reset."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", example(scheduler.server.port), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"r0 has 0 of 9 tokens\n"
            await tokens_of(scheduler, generate_request(PROMPT))
            assert await process.stdout.readline() == b"r0 has 4 of 9 tokens\n"
            assert await process.stdout.readline() == b"r0 has 8 of 9 tokens\n"
            await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
            assert await process.stdout.readline() == b"r0 has 0 of 9 tokens\n"
    finally:
        process.kill()
        await process.wait()


async def test_a_late_watcher_gets_a_snapshot_then_changes(scheduler: RunningScheduler) -> None:
    """The snapshot holds what was stored before; the keys of salted prompts differ."""
    await tokens_of(scheduler, generate_request(PROMPT))
    async with watching(scheduler) as batches:
        first = await anext(batches)
        assert first.snapshot
        assert sorted(hashes(first)) == sorted(keys_of(PROMPT))
        salted = generate_request(PROMPT[:5])
        salted.cache_salt = "mine"
        await tokens_of(scheduler, salted)
        second = await anext(batches)
    assert (second.snapshot, second.sequence) == (False, first.sequence + 1)
    (stored,) = [event.stored for event in second.events]
    assert list(stored.hashes) == keys_of(PROMPT[:4], salt="mine")
    assert stored.parent_hash == seed_key(model="simulated", salt="mine")
    assert (list(stored.token_ids), stored.tokens_per_hash) == (PROMPT[:4], 4)


async def test_a_watcher_resumes_after_its_sequence_number(scheduler: RunningScheduler) -> None:
    """A watcher gets the batches it missed; an unknown number gets a snapshot."""
    async with watching(scheduler) as batches:
        seen = (await anext(batches)).sequence
    await tokens_of(scheduler, generate_request(PROMPT))
    async with watching(scheduler, replica_id="r0", after=seen) as batches:
        missed = [await anext(batches), await anext(batches)]
    async with watching(scheduler, replica_id="r0", after=seen - 1) as batches:
        unknown = await anext(batches)
    assert [(batch.sequence, batch.snapshot) for batch in missed] == [(seen + 1, False), (seen + 2, False)]
    assert [key for batch in missed for key in hashes(batch)] == keys_of(PROMPT)
    assert unknown.snapshot


async def test_a_watcher_follows_replicas_that_join_and_leave() -> None:
    """A new replica sends an empty snapshot, a lost one `cleared`, and a returning one higher numbers."""
    async with run_scheduler() as scheduler, watching(scheduler) as batches:
        async with joined(scheduler, FakeWorker(), "r0"):
            came = await anext(batches)
        gone = await anext(batches)
        async with joined(scheduler, FakeWorker(), "r0"):
            back = await anext(batches)
    assert (came.replica_id, came.snapshot) == ("r0", True)
    assert [(event.stored.group_id, list(event.stored.hashes)) for event in came.events] == [(0, [])]
    assert [event.WhichOneof("event") for event in gone.events] == ["cleared"]
    assert back.snapshot
    assert came.sequence < gone.sequence < back.sequence


async def cached(scheduler: RunningScheduler, prompt: list[int], salt: str = "") -> int:
    """Returns the tokens of a prompt that a request finds in the cache."""
    request = generate_request(prompt, max_tokens=1)
    request.cache_salt = salt
    return (await collect(scheduler.inference.Generate(request)))[0].prompt.num_cached_tokens


async def test_a_reset_forgets_prefixes(scheduler: RunningScheduler) -> None:
    """A reset forgets all prefixes and returns the number of replicas."""
    await tokens_of(scheduler, generate_request(LONG, max_tokens=1))
    assert await cached(scheduler, LONG) == 12
    assert await cached(scheduler, LONG, salt="other") == 0
    answer = await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
    assert answer.num_replicas == 1
    assert await cached(scheduler, LONG) == 0


async def test_a_reset_does_not_touch_running_requests(scheduler: RunningScheduler) -> None:
    """A stream continues unchanged over a reset."""
    call = scheduler.inference.Generate(generate_request(LONG, max_tokens=30))
    events = aiter(call)
    tokens = [*(await anext(events)).token_ids]
    await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
    tokens += [token async for event in events for token in event.token_ids]
    assert tokens == expected_tokens(LONG, 30)


async def test_a_watcher_that_does_not_keep_up_is_cut_off(scheduler: RunningScheduler) -> None:
    """A slow watcher gets a retryable error instead of unbounded memory."""
    with watch_kv_events(scheduler.engine.prefixes.follow, max_behind=3) as changes:
        for token in range(5, 15):
            await tokens_of(scheduler, generate_request([token] * 5, max_tokens=1))
        with pytest.raises(Unavailable, match="more than 3 batches"):
            await anext(changes)
