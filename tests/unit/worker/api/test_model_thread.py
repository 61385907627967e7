"""The model thread: order, results, exceptions and shutdown."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
from structlog.testing import capture_logs

from worker_svc.api.model_thread import MODEL_THREAD, ModelThread, Running


@pytest.fixture
async def thread() -> AsyncIterator[ModelThread]:
    found = ModelThread()
    yield found
    await found.close(5)
    assert found.running is None


async def test_functions_run_in_order_on_one_thread(thread: ModelThread) -> None:
    names: list[tuple[int, str]] = []

    def note(number: int) -> None:
        names.append((number, threading.current_thread().name))

    futures = [thread.submit(partial(note, number)) for number in range(5)]
    await asyncio.gather(*futures)
    assert names == [(n, MODEL_THREAD) for n in range(5)]


async def test_an_exception_belongs_to_its_future(thread: ModelThread) -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await thread.submit(fail)
    assert await thread.submit(lambda: 7) == 7


async def test_the_loop_stays_live_and_sees_how_long_a_function_runs(thread: ModelThread) -> None:
    assert thread.busy_s == 0
    running, let_go = threading.Event(), threading.Event()

    def block() -> None:
        running.set()
        let_go.wait()

    future = thread.submit(block)
    await asyncio.to_thread(running.wait)
    assert thread.busy_s > 0
    assert not future.done()
    let_go.set()
    await future
    assert thread.busy_s == 0


async def test_a_function_of_many_steps_is_busy_since_the_last_one(thread: ModelThread) -> None:
    """The busy time restarts at each reported step, in another state of the same kind and limit."""
    seen: list[tuple[float, Running | None]] = []

    def steps() -> None:
        time.sleep(0.02)
        seen.append((thread.busy_s, thread.running))
        thread.progressed()
        seen.append((thread.busy_s, thread.running))

    await thread.submit(steps, what="step", limit_s=3.0)
    (before_s, before), (after_s, after) = seen
    assert before_s >= 0.02 > after_s
    assert before is not None
    assert after is not None
    assert before is not after
    assert (before.what, before.limit_s) == (after.what, after.limit_s) == ("step", 3.0)
    assert thread.running is None


async def test_a_cancelled_future_does_not_disturb_the_thread(thread: ModelThread) -> None:
    let_go = threading.Event()
    future = thread.submit(let_go.wait)
    future.cancel()
    let_go.set()
    assert await thread.submit(lambda: "next") == "next"


async def test_what_waits_for_the_device_leaves_the_thread_free(thread: ModelThread) -> None:
    """Deferred functions run in order on another thread, and the thread takes its next function meanwhile."""
    let_go = threading.Event()
    order: list[str] = []

    def read(name: str) -> None:
        let_go.wait()
        order.append(f"{name} read")

    def launch(name: str) -> None:
        thread.defer(partial(read, name))
        order.append(f"{name} launched")

    def settle() -> None:
        thread.settle()
        order.append("settled")

    await thread.submit(partial(launch, "first"))
    await thread.submit(partial(launch, "second"))
    assert order == ["first launched", "second launched"]
    settled = thread.submit(settle)
    let_go.set()
    await settled
    assert order[2:] == ["first read", "second read", "settled"]


async def test_waiting_for_the_device_counts_as_running(thread: ModelThread) -> None:
    """With the kind and limit of the function that deferred it, and as one state from its start on."""
    waiting, let_go = threading.Event(), threading.Event()

    def read() -> None:
        waiting.set()
        let_go.wait()

    await thread.submit(lambda: thread.defer(read), what="step", limit_s=3.0)
    await asyncio.to_thread(waiting.wait)
    running = thread.running
    assert running is not None
    assert (running.what, running.limit_s) == ("step", 3.0)
    assert thread.running is running
    assert thread.busy_s > 0
    let_go.set()
    await thread.submit(thread.settle)
    assert thread.running is None


@pytest.mark.parametrize("fault", [ValueError("broken"), SystemExit(1), asyncio.CancelledError()])
async def test_a_fault_in_what_was_deferred_ends_nothing_else(
    thread: ModelThread, fault: BaseException
) -> None:
    """The next step is read and answered as usual, also if a library calls for the end of the thread."""
    read = threading.Event()

    def fail() -> None:
        raise fault

    with capture_logs() as logs:
        await thread.submit(lambda: thread.defer(fail))
        await thread.submit(lambda: thread.defer(read.set))
        await asyncio.wait_for(thread.submit(thread.settle), 5)
    assert read.is_set()
    assert [entry["event"] for entry in logs] == ["deferred_failed"]


async def test_a_hung_read_shows_although_the_thread_runs_something_else(thread: ModelThread) -> None:
    waiting, blocked, let_go = threading.Event(), threading.Event(), threading.Event()

    def block(reached: threading.Event) -> None:
        reached.set()
        let_go.wait()

    await thread.submit(lambda: thread.defer(partial(block, waiting)), what="step")
    last = thread.submit(partial(block, blocked), what="reset")
    await asyncio.to_thread(waiting.wait)
    await asyncio.to_thread(blocked.wait)
    assert thread.running is not None
    assert thread.running.what == "step"
    let_go.set()
    await last
