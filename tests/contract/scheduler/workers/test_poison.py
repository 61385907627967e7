"""Requests that kill workers, over real gRPC."""

import asyncio

import grpc.aio
import pytest

from protos.errors import Internal, from_rpc_error
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    collect,
    failure,
    generate_request,
    joined,
    register,
    run_scheduler,
    run_worker,
    tokens_of,
)
from tests.support.scheduler.simulated_device import Moment

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("most", [2, 3])
async def test_a_request_that_kills_workers_costs_no_other_request_a_token(most: int) -> None:
    """It fails for good after max_worker_losses; requests beside it continue on the next worker."""

    def kills(moment: Moment) -> bool:
        return moment.kind == "decode" and moment.request_id == "poison" and moment.end >= 8

    async with run_scheduler(Settings(max_worker_losses=most)) as scheduler:
        prompts = [[20 + number] * 5 for number in range(3)]
        worker = FakeWorker(kills=kills)
        async with run_worker(worker) as port:
            call = await register(scheduler, port)
            generate = scheduler.inference.Generate
            poison = asyncio.create_task(collect(generate(generate_request([7] * 6, request_id="poison"))))
            calls = [
                asyncio.create_task(tokens_of(scheduler, generate_request(prompt, max_tokens=40)))
                for prompt in prompts
            ]
            await failure(call)
            # A worker that dies may take answers with it; the request then needs a step more to kill again.
            workers = 1
            while not poison.done():
                workers += 1
                lost = asyncio.create_task(failure(await register(scheduler, port)))
                await asyncio.wait({poison, lost}, return_when=asyncio.FIRST_COMPLETED)
        assert most <= workers <= most + 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await poison
        error = from_rpc_error(caught.value)
        assert isinstance(error, Internal)
        assert f"{most} workers were lost while they ran this request" in error.message
        async with joined(scheduler, FakeWorker(kills=kills), "last"):
            assert await asyncio.gather(*calls) == [expected_tokens(prompt, 40) for prompt in prompts]


async def test_what_a_client_needs_to_submit_a_request_again_is_in_its_events() -> None:
    """The seed is in the first event; a lost worker, and that it no longer counts, in events of their own."""
    async with run_scheduler() as scheduler:
        async with run_worker(FakeWorker(die_at_step=3)) as port:
            call = await register(scheduler, port)
            answer = asyncio.create_task(collect(scheduler.inference.Generate(generate_request())))
            await failure(call)
        async with joined(scheduler, FakeWorker(), "w2"):
            events = await answer
    assert events[0].prompt.seed
    assert [event.worker_losses for event in events if event.HasField("worker_losses")] == [1, 0]
    assert not any(event.token_ids for event in events if event.HasField("worker_losses"))
    again = generate_request()
    again.age_ms = 5000
    again.resumed.add(token_ids=expected_tokens([5, 6, 7], 8)[:4], worker_losses=1)
    async with run_scheduler(Settings(max_waiting_requests=1)) as scheduler, joined(scheduler, FakeWorker()):
        assert await tokens_of(scheduler, again) == expected_tokens([5, 6, 7], 8)[4:]
