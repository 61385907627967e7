"""The scheduler's log has a line for each request, whatever its end."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from protos.limits import MAX_REQUEST_ID_BYTES
from protos.triptych.v1 import inference_pb2
from tests.support.scheduler.fake_pool_worker import FakePoolWorker, pool_request
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


def request_lines(logs: list[Any]) -> list[dict[str, Any]]:
    """Returns the lines about requests."""
    return [dict(line) for line in logs if line["event"] == "request" and line["log_level"] == "info"]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_has_one_line(scheduler: RunningScheduler, n: int) -> None:
    """With its id, tokens and times; several sequences share it."""
    with capture_logs() as logs:
        request = generate_request(request_id="mine")
        request.n = n
        await tokens_of(scheduler, request)
    (line,) = request_lines(logs)
    assert (line["request_id"], line["replica"], line["finish_reason"]) == ("mine", "w", "length")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 8 * n)
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["ms"]


async def test_a_refused_request_has_one_line(scheduler: RunningScheduler) -> None:
    """It says why."""
    with capture_logs() as logs:
        request = generate_request(request_id="other")
        request.model = "other"
        await failure(scheduler.inference.Generate(request))
    (line,) = request_lines(logs)
    assert (line["request_id"], line["finish_reason"]) == ("other", "not_found")


async def test_the_line_of_a_refused_request_is_short_whatever_its_id(scheduler: RunningScheduler) -> None:
    """Nothing has bounded the id yet."""
    with capture_logs() as logs:
        name = "x" * 1_000_000
        await failure(scheduler.inference.Generate(generate_request(request_id=name)))
        await failure(scheduler.inference.Pool(pool_request([5], request_id=name)))
        await until(lambda: len(request_lines(logs)) == 2)
    lines = request_lines(logs)
    assert [line["request_id"] for line in lines] == ["x" * MAX_REQUEST_ID_BYTES] * 2


async def test_a_request_whose_client_leaves_has_one_line(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """It counts what was generated until then."""
    worker.hold_at_step = 3
    with capture_logs() as logs:
        call = scheduler.inference.Generate(generate_request(request_id="gone", max_tokens=50))
        await anext(aiter(call))
        call.cancel()
        await until(lambda: request_lines(logs))
    (line,) = request_lines(logs)
    assert (line["request_id"], line["finish_reason"]) == ("gone", "abort")
    assert line["completion_tokens"] >= 1


async def test_a_pooling_call_has_one_line() -> None:
    """Inputs of one call share it."""
    async with run_scheduler() as scheduler, joined(scheduler, FakePoolWorker(), "w"):
        requests = [pool_request([5, 6], request_id=f"mine-{index}") for index in range(3)]
        with capture_logs() as logs:
            await scheduler.inference.PoolAll(inference_pb2.PoolAllRequest(requests=requests))
    (line,) = request_lines(logs)
    assert (line["request_id"], line["inputs"], line["prompt_tokens"]) == ("mine-0", 3, 6)
    assert line["finish_reason"] == "stop"
