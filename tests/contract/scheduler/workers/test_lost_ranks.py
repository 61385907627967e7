"""Ranks that are lost while they wait, are configured or run. The replica forms again; no request is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protos.errors import Unavailable
from protos.triptych.v1 import inference_pb2, registry_pb2
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_rank import FakeRank, RegisteredRank, rank_process, register_rank
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    generate_request,
    run_scheduler,
    run_worker,
    tokens_of,
)

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]
EXPECTED = expected_tokens([5, 6, 7], 20)
LOST = registry_pb2.RegisterEvent.STATE_RANK_LOST


@contextlib.asynccontextmanager
async def serving_ranks(
    scheduler: RunningScheduler, *workers: FakeRank
) -> AsyncIterator[list[RegisteredRank]]:
    """Runs the ranks of one replica within the block, which begins once they serve."""
    async with contextlib.AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(rank_process(scheduler, worker)) for worker in workers]
        await asyncio.gather(*(rank.serving() for rank in ranks))
        yield ranks


@contextlib.asynccontextmanager
async def answering(
    scheduler: RunningScheduler, worker: FakeRank
) -> AsyncIterator["asyncio.Task[list[int]]"]:
    """Starts a request that waits in the third step of a rank 0; it must end well after the block."""
    assert worker.hold_at_step == 3
    answer = asyncio.create_task(tokens_of(scheduler, generate_request(max_tokens=20)))
    await worker.holds.wait()
    yield answer


async def serves_again(scheduler: RunningScheduler, answer: "asyncio.Task[list[int]] | None" = None) -> None:
    """Starts new processes for both ranks, which finish the request, or a new one."""
    async with serving_ranks(scheduler, FakeRank(rank=0, life=1), FakeRank(rank=1, life=1)):
        assert await (answer or tokens_of(scheduler, generate_request(max_tokens=20))) == EXPECTED


async def test_a_rank_lost_while_others_wait_is_waited_for_again() -> None:
    """The registrations of the others stay."""
    async with run_scheduler() as scheduler, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(rank_process(scheduler, FakeRank(rank=0, tensor=3)))
        assert await first.accepted() == "waiting for ranks 1, 2 of replica r0"
        third = await stack.enter_async_context(rank_process(scheduler, FakeRank(rank=2, tensor=3)))
        assert await first.accepted() == "waiting for rank 1 of replica r0"
        third.call.cancel()
        assert await first.accepted() == "waiting for ranks 1, 2 of replica r0"
        first.call.cancel()
        load = await scheduler.inference.GetLoad(inference_pb2.GetLoadRequest())
        while load.replicas:  # without a rank there is no replica
            load = await scheduler.inference.GetLoad(inference_pb2.GetLoadRequest())
        workers = [FakeRank(rank=rank, tensor=3, life=1) for rank in range(3)]
        async with serving_ranks(scheduler, *workers):
            assert await tokens_of(scheduler, generate_request(max_tokens=20)) == EXPECTED


async def test_a_rank_that_waits_in_vain_hears_which_ones_are_lost() -> None:
    """One that was frozen while its group broke ends then; new ones wait on."""
    async with run_scheduler(Settings(step_timeout_s=0.3)) as scheduler, contextlib.AsyncExitStack() as stack:
        ranks = []
        for rank in range(2):
            ranks.append(
                await stack.enter_async_context(rank_process(scheduler, FakeRank(rank=rank, tensor=12)))
            )
            missing = ", ".join(map(str, range(rank + 1, rank + 9)))
            text = f"ranks {missing} and {3 - rank} more of replica r0 did not register within 0.3 s"
            assert [await each.told(LOST) for each in ranks] == [text] * len(ranks)
        for rank in range(2, 12):
            other = rank_process(scheduler, FakeRank(rank=rank, tensor=12))
            ranks += [await stack.enter_async_context(other)]
        await asyncio.gather(*(rank.serving() for rank in ranks))


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_rank_lost_while_ranks_are_configured_ends_the_others(lost: int) -> None:
    """They have joined a group that cannot form any more."""
    workers = [FakeRank(rank=0), FakeRank(rank=1)]
    workers[lost].configure_gate.clear()
    async with run_scheduler() as scheduler:
        async with (
            rank_process(scheduler, workers[1 - lost]) as other,
            rank_process(scheduler, workers[lost]) as dying,
        ):
            await workers[lost].configuring.wait()
            dying.call.cancel()
            assert await other.released() == f"rank {lost} of replica r0 is lost: its registration has ended"
            workers[lost].configure_gate.set()
        assert scheduler.serving.empty()
        assert scheduler.deployment.starting == {}
        await serves_again(scheduler)


@pytest.mark.parametrize("dies", [0, 1])
async def test_a_rank_that_dies_while_steps_run_costs_no_token(dies: int) -> None:
    """The other rank hears which one is lost, and the request counts as a suspect once."""
    async with run_scheduler() as scheduler:
        first = FakeRank(rank=0, hold_at_step=3)
        async with contextlib.AsyncExitStack() as stack:
            processes = [contextlib.AsyncExitStack(), contextlib.AsyncExitStack()]
            for process in processes:
                stack.push_async_exit(process)
            ranks = [
                await process.enter_async_context(rank_process(scheduler, worker))
                for process, worker in zip(processes, (first, FakeRank(rank=1)), strict=True)
            ]
            await asyncio.gather(*(rank.serving() for rank in ranks))
            async with answering(scheduler, first) as answer:
                await processes[dies].aclose()
                message = await ranks[1 - dies].released()
                assert message.startswith(f"rank {dies} of replica r0 is lost: ")
        assert scheduler.deployment.losses.workers == {Loss.DIED: 1}
        assert scheduler.deployment.losses.num_suspects == 1
        await serves_again(scheduler, answer)


async def test_a_hung_step_gives_up_every_rank() -> None:
    """Each may be the one that hangs, so each hears STATE_HUNG."""
    async with run_scheduler(Settings(step_timeout_s=0.3)) as scheduler:
        first = FakeRank(rank=0, hold_at_step=3)
        async with (
            serving_ranks(scheduler, first, FakeRank(rank=1)) as ranks,
            answering(scheduler, first) as answer,
        ):
            for rank in ranks:
                assert "the worker hangs" in await rank.told(registry_pb2.RegisterEvent.STATE_HUNG)
                events, error = await rank.end()
                assert events == []
                assert isinstance(error, Unavailable)
        assert scheduler.deployment.losses.workers == {Loss.HUNG: 1}
        await serves_again(scheduler, answer)


@pytest.mark.parametrize("leaves", [0, 1])
async def test_a_rank_that_leaves_takes_the_replica_along_without_blame(leaves: int) -> None:
    """Its running plan is answered first. The leaving rank's registration ends without an error."""
    async with run_scheduler(Settings(max_worker_losses=1)) as scheduler:
        first = FakeRank(rank=0, hold_at_step=3)
        async with (
            serving_ranks(scheduler, first, FakeRank(rank=1)) as ranks,
            answering(scheduler, first) as answer,
        ):
            request = registry_pb2.LeaveRequest(worker_id=ranks[leaves].worker.worker_id)
            leave = asyncio.ensure_future(scheduler.registry.Leave(request))
            await asyncio.wait({leave}, timeout=0.1)
            assert not leave.done()
            first.gate.set()
            await leave
            assert await ranks[leaves].end() == ([], None)
            assert await ranks[1 - leaves].released() == f"rank {leaves} of replica r0 leaves"
        assert scheduler.deployment.losses.workers == {Loss.LEFT: 1}
        assert scheduler.deployment.losses.num_suspects == 0
        await serves_again(scheduler, answer)


async def test_ranks_that_leave_together_all_end_without_an_error() -> None:
    """As when a supervisor stops all of them."""
    async with run_scheduler() as scheduler:
        first = FakeRank(rank=0, hold_at_step=3)
        async with (
            serving_ranks(scheduler, first, FakeRank(rank=1)) as ranks,
            answering(scheduler, first) as answer,
        ):
            leaves = [
                asyncio.ensure_future(
                    scheduler.registry.Leave(registry_pb2.LeaveRequest(worker_id=rank.worker.worker_id))
                )
                for rank in ranks
            ]
            await asyncio.wait(leaves, timeout=0.1)
            first.gate.set()
            await asyncio.gather(*leaves)
            assert [await rank.end() for rank in ranks] == [([], None)] * 2
        await serves_again(scheduler, answer)


async def test_a_rank_that_leaves_before_the_replica_serves_is_let_go_at_once() -> None:
    """While ranks wait, the others wait on; while they are configured, they start again."""
    async with run_scheduler() as scheduler:
        waiting, configured = FakeRank(rank=0), FakeRank(rank=1)
        async with rank_process(scheduler, waiting) as first:
            await first.accepted()
            configured.configure_gate.clear()
            async with rank_process(scheduler, configured) as second:
                await configured.configuring.wait()
                await scheduler.registry.Leave(registry_pb2.LeaveRequest(worker_id=configured.worker_id))
                assert (await second.end())[1] is None
                assert await first.released() == "rank 1 of replica r0 leaves"
                configured.configure_gate.set()
        async with rank_process(scheduler, FakeRank(rank=1, life=8)) as alone:
            await alone.accepted()
            await scheduler.registry.Leave(registry_pb2.LeaveRequest(worker_id=alone.worker.worker_id))
            assert await alone.end() == ([], None)


async def test_a_rank_that_was_restarted_while_ranks_waited_hears_of_a_loss() -> None:
    """What its earlier process said does not count for the new one."""
    async with run_scheduler() as scheduler:
        dying, old, new = (
            FakeRank(rank=0, tensor=3),
            FakeRank(rank=1, tensor=3),
            FakeRank(rank=1, tensor=3, life=1),
        )
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(rank_process(scheduler, dying))
            await first.accepted()
            async with rank_process(scheduler, old) as before:
                await before.accepted()
                await scheduler.registry.Leave(registry_pb2.LeaveRequest(worker_id=old.worker_id))
                assert await before.end() == ([], None)
            second = await stack.enter_async_context(rank_process(scheduler, new))
            third = FakeRank(rank=2, tensor=3)
            await stack.enter_async_context(rank_process(scheduler, third))
            await asyncio.gather(first.serving(), second.serving())
            first.call.cancel()
            assert await second.released() == "rank 0 of replica r0 is lost: its registration has ended"


async def test_a_group_outlives_its_scheduler() -> None:
    """The ranks register with the next scheduler, which repeats the name of their group."""
    workers = [FakeRank(rank=0), FakeRank(rank=1)]
    async with run_worker(workers[0]) as first, run_worker(workers[1]) as second:
        ports, epochs = (first, second), set()
        for _ in range(2):
            async with run_scheduler() as scheduler:
                ranks = [
                    register_rank(scheduler, worker, port)
                    for worker, port in zip(workers, ports, strict=True)
                ]
                await asyncio.gather(*(rank.serving() for rank in ranks))
                assert await tokens_of(scheduler, generate_request(max_tokens=20)) == EXPECTED
                epochs |= {worker.epoch for worker in workers}
    assert len(epochs) == 1


async def test_a_process_of_an_older_group_starts_again() -> None:
    """One rank was replaced while no scheduler saw it. Its peer cannot join another group."""
    old, new = FakeRank(rank=0, epoch="earlier"), FakeRank(rank=1, life=1)
    async with run_scheduler() as scheduler:
        async with rank_process(scheduler, old) as first, rank_process(scheduler, new) as second:
            for rank in (first, second):
                assert await rank.released() == (
                    "rank 0 of replica r0 cannot join the other ranks, because an earlier group has been joined; "
                    "processes that joined it start again"
                )
            assert not new.epoch, "it joins nothing that cannot form"
        await serves_again(scheduler)


async def test_many_losses_lose_no_request() -> None:
    """Ranks die in turn under load; every request has every token once."""
    prompts = [[5, number] for number in range(3, 15)]
    async with run_scheduler(Settings(max_num_seqs=2, max_worker_losses=50, lease_steps=2)) as scheduler:
        answers: list[asyncio.Task[list[int]]] = []
        for life in range(6):
            first = FakeRank(rank=0, life=life, hold_at_step=12)
            async with serving_ranks(scheduler, first, FakeRank(rank=1, life=life)) as ranks:
                answers += [
                    asyncio.create_task(tokens_of(scheduler, generate_request(prompt, max_tokens=20)))
                    for prompt in prompts[2 * life : 2 * life + 2]
                ]
                await first.holds.wait()
                ranks[life % 2].call.cancel()
                await ranks[1 - life % 2].released()
        async with serving_ranks(scheduler, FakeRank(rank=0, life=9), FakeRank(rank=1, life=9)):
            assert await asyncio.gather(*answers) == [expected_tokens(prompt, 20) for prompt in prompts]
