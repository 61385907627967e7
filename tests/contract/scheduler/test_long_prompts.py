"""A long prompt does not hold up the scheduler's event loop."""

import asyncio
import gc
import time
from typing import Any

import pytest

from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import generate_request, joined, run_scheduler

COUNT = 400_000


@pytest.mark.contract
def test_a_long_prompt_is_read_hashed_and_sent_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """No callback of the scheduler takes 25 ms of CPU."""
    gc.freeze()  # the objects of other tests
    # asyncio's own loop shows its callbacks.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(longest_callback_s(monkeypatch)) < 0.025


async def longest_callback_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Returns the most CPU time of a callback while a long prompt is on its way to the worker."""
    longest_s, run = 0.0, asyncio.Handle._run

    def measured(handle: Any) -> None:
        nonlocal longest_s
        begun_s = time.thread_time()
        run(handle)
        task = getattr(handle._callback, "__self__", None)
        name = repr(task.get_coro()) if isinstance(task, asyncio.Task) else ""
        # Handlers of gRPC are its own coroutines. The others are the client's and the worker's.
        if "ReplicaDriver" in name or "_cython" in name:
            longest_s = max(longest_s, time.thread_time() - begun_s)

    worker = FakeWorker(
        num_blocks=COUNT // 256 + 80, max_model_len=COUNT + 16, default_block_size=256, default_chunk=16
    )
    worker.vocab_size = 1 << 20
    prompt = [5 + place % 100_000 for place in range(COUNT)]
    async with run_scheduler(Settings()) as scheduler, joined(scheduler, worker):
        worker.gate.clear()  # its steps run in handlers of gRPC, too
        request = generate_request(prompt, max_tokens=2)
        monkeypatch.setattr(asyncio.Handle, "_run", measured)
        call = scheduler.inference.Generate(request)
        async with asyncio.timeout(60):
            while not (plan := await worker.plans.get()).admit:
                pass
        monkeypatch.undo()
        assert list(plan.admit[0].token_ids) == prompt
        call.cancel()
    return longest_s
