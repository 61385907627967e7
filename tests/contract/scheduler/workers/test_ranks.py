"""Ranks of a replica that register, contradict one another and are configured together, over real gRPC."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from protos.errors import ConfigurationRefused, Internal, TriptychError, Unavailable
from protos.triptych.v1 import common_pb2, inference_pb2, registry_pb2
from scheduler_svc.settings import Settings
from scheduler_svc.workers import configure
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_rank import FakeRank, RegisteredRank, rank_process, register_rank
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    run_scheduler,
    run_worker,
    tokens_of,
)

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]
EXPECTED = expected_tokens([5, 6, 7], 8)


async def starting(scheduler: RunningScheduler) -> dict[str, str]:
    """Returns the replicas that are not ready, with what they wait for."""
    load = await scheduler.inference.GetLoad(inference_pb2.GetLoadRequest())
    return {replica.replica_id: replica.detail for replica in load.replicas}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
async def test_a_replica_serves_once_all_ranks_have_registered(order: tuple[int, ...]) -> None:
    """Each rank hears what is missing, all get one configuration, and rank 0 alone gets plans."""
    workers = [FakeRank(rank=rank, tensor=2, pipeline=2) for rank in range(4)]
    async with run_scheduler() as scheduler, contextlib.AsyncExitStack() as stack:
        ranks: list[RegisteredRank] = []
        for number, rank in enumerate(order[:3], start=1):
            ranks.append(await stack.enter_async_context(rank_process(scheduler, workers[rank])))
            missing = sorted(order[number:])
            text = f"waiting for rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            assert [await each.accepted() for each in ranks] == [f"{text} of replica r0"] * number
            assert await starting(scheduler) == {"r0": text}
        assert not any(worker.configured for worker in workers)
        ranks.append(await stack.enter_async_context(rank_process(scheduler, workers[order[3]])))
        for each in ranks:
            assert await each.accepted() == f"dialling 127.0.0.1:{each.port}"
            await each.serving()
        assert await tokens_of(scheduler, generate_request()) == EXPECTED
        assert list(scheduler.engine.replicas) == ["r0"]
    assert all(worker.configured == workers[0].configured for worker in workers)
    assert [worker.steps > 0 for worker in workers] == [True, False, False, False]


async def test_grammars_are_compiled_where_tokens_are_chosen() -> None:
    """That is the first rank of the last stage."""
    regex = common_pb2.StructuredOutput(regex="[a-z]+")
    workers = [FakeRank(rank=rank, tensor=2, pipeline=2) for rank in range(4)]
    async with run_scheduler() as scheduler, contextlib.AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(rank_process(scheduler, worker)) for worker in workers]
        await ranks[0].serving()
        assert await tokens_of(scheduler, generate_request(structured_output=regex)) == EXPECTED
    assert [worker.grammars for worker in workers] == [[], [], [regex], []]


async def test_two_replicas_of_two_ranks_share_the_queue() -> None:
    """Ranks of different replicas do not wait for one another."""
    workers = [FakeRank(rank=rank, replica_id=name) for rank in (0, 1) for name in ("a", "b")]
    async with run_scheduler(Settings(max_num_seqs=1)) as scheduler, contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(rank_process(scheduler, worker))
        while len(scheduler.engine.replicas) < 2:
            await scheduler.serving.get()
        calls = [tokens_of(scheduler, generate_request([3 + i])) for i in range(6)]
        assert await asyncio.gather(*calls) == [expected_tokens([3 + i], 8) for i in range(6)]
    assert [worker.steps > 0 for worker in workers] == [True, True, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_parallel_size": 4, "world_size": 4},
         "rank 1 of replica r0 says --tensor-parallel-size 4 and rank 0 says 2; start all ranks of a replica with the same sizes"),
        ({"pipeline_parallel_size": 2, "world_size": 4},
         "rank 1 of replica r0 says --pipeline-parallel-size 2 and rank 0 says 1; start all ranks of a replica with the same sizes"),
        ({"expert_parallel": True},
         "rank 1 of replica r0 says --enable-expert-parallel and rank 0 does not; start all ranks of a replica with the same flags"),
        ({"world_size": 3},
         "rank 1 of replica r0 says --world-size 3, but --tensor-parallel-size 2 x --pipeline-parallel-size 1 is 2"),
        ({"world_size": 5_000_000, "tensor_parallel_size": 1_000_000, "pipeline_parallel_size": 5},
         "rank 1 of replica r0 says --tensor-parallel-size 1000000 x --pipeline-parallel-size 5; a replica has at most 1024 ranks"),
        ({"rank": 2}, "rank 2 of replica r0 does not exist: --rank must be below --world-size 2"),
        ({"replica_id": ""},
         "rank 1 of 2 does not say which replica it belongs to; start all ranks of a replica with the same --replica-id"),
    ],
)  # fmt: skip
async def test_a_contradiction_is_refused_by_name(change: dict[str, object], message: str) -> None:
    """The refusal is final for the new rank, and the first one waits on."""
    async with run_scheduler() as scheduler, rank_process(scheduler, FakeRank(rank=0)) as first:
        assert await first.accepted() == "waiting for rank 1 of replica r0"
        async with run_worker(FakeRank(rank=1)) as port:
            request = FakeRank(rank=1).registration(port)
            for name, value in change.items():
                setattr(request, name, value)
            error = await failure(scheduler.registry.Register(request))
        assert type(error) is ConfigurationRefused
        assert error.message == message
        async with rank_process(scheduler, FakeRank(rank=1)) as second:
            await asyncio.gather(first.serving(), second.serving())


async def test_a_rank_that_another_process_has_is_refused() -> None:
    """The refusal names the rank and may be retried: the other process may be dead already."""
    async with run_scheduler() as scheduler, rank_process(scheduler, FakeRank(rank=0)) as first:

        async def refused() -> None:
            async with rank_process(scheduler, FakeRank(rank=0, life=1)) as other:
                events, error = await other.end()
            assert isinstance(error, Unavailable)
            assert events == []
            assert "rank 0 of replica r0 is still registered by another process" in error.message

        await first.accepted()
        await refused()
        async with rank_process(scheduler, FakeRank(rank=1)) as second:
            await second.serving()
            await refused()
            assert list(scheduler.engine.replicas) == ["r0"], "the replica serves on"


async def refusals(
    scheduler: RunningScheduler, *workers: FakeRank
) -> list[tuple[list[registry_pb2.RegisterEvent.State.ValueType], TriptychError | None]]:
    """Registers ranks at once; returns the states that each hears after ACCEPTED, and how each ends."""
    async with contextlib.AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(rank_process(scheduler, worker)) for worker in workers]
        ends = await asyncio.gather(*(rank.end() for rank in ranks))
    accepted = registry_pb2.RegisterEvent.STATE_ACCEPTED
    return [([event.state for event in events if event.state != accepted], error) for events, error in ends]


RANK_LOST = registry_pb2.RegisterEvent.STATE_RANK_LOST


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"source": "other"}, "has source other and rank 0 has simulated"),
        ({"vocab_size": 98}, "has vocab_size 98 and rank 0 has 97"),
        ({"device_kind": "cuda"}, "has device cuda and rank 0 has cpu"),
        ({"kind": common_pb2.KV_GROUP_KIND_PAGED_WINDOW, "window": 8}, "has groups "),
        ({"default_chunk": 8}, "has default_chunk 8 and rank 0 has 4"),
        ({"weights_digest": "cd" * 32},
         "has other weights of simulated (digest cdcdcdcdcdcd) than rank 0 (abababababab); give all ranks the same files"),
        ({"refuse_configure": ConfigurationRefused("too much memory")}, "too much memory"),
    ],
)  # fmt: skip
async def test_a_rank_that_differs_is_refused_by_name(other: dict[str, object], text: str) -> None:
    """It alone is refused for good. Rank 0 starts over, and serves with a rank that fits."""
    first = FakeRank(rank=0, weights_digest="ab" * 32)
    async with run_scheduler() as scheduler:
        second = replace(first, rank=1, configure_gate=asyncio.Event(), **other)  # type: ignore[arg-type]
        (states, error), (own_states, own_error) = await refusals(scheduler, first, second)
        assert type(own_error) is ConfigurationRefused
        assert text in own_error.message
        assert own_states == []
        assert isinstance(error, Unavailable)
        assert error.message.startswith("rank 1 of replica r0 is lost: ")
        assert text in error.message
        assert states == [RANK_LOST]
        assert scheduler.serving.empty()


async def test_a_rank_that_still_runs_an_old_stream_is_configured_again() -> None:
    """It says so, and the replica does not start over."""
    first = FakeRank(rank=0)
    first.refusals = [Unavailable("the worker executes another configuration", retry_after_ms=1)] * 3
    async with (
        run_scheduler() as scheduler,
        rank_process(scheduler, first) as leader,
        rank_process(scheduler, FakeRank(rank=1)) as other,
    ):
        await asyncio.gather(leader.serving(), other.serving())
        assert first.refusals == []
        assert await tokens_of(scheduler, generate_request()) == EXPECTED


async def test_a_rank_that_never_gets_free_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit the reason is the replica's."""
    monkeypatch.setattr(configure, "CONFIGURE_RETRY_S", 0.0)
    first = FakeRank(rank=0)
    first.refusals = [Unavailable("the worker executes another configuration", retry_after_ms=10)] * 1000
    async with run_scheduler(Settings(step_timeout_s=0.1)) as scheduler:
        (_, error), _ = await refusals(scheduler, first, FakeRank(rank=1))
        assert isinstance(error, Unavailable)
        assert error.message == "the worker executes another configuration"


async def test_the_other_process_with_a_replica_id_is_named_for_one_rank_too() -> None:
    """Two workers with the same --replica-id would otherwise retry for ever without a hint."""
    async with run_scheduler() as scheduler, run_worker(FakeRank(tensor=1)) as port:
        first = register_rank(scheduler, FakeRank(tensor=1), port)
        await first.accepted()
        _, error = await register_rank(scheduler, FakeRank(tensor=1, life=1), port).end()
        assert isinstance(error, Unavailable)
        assert error.message == (
            "replica r0 is still registered by another process; if that runs, give this one another --replica-id"
        )
        first.call.cancel()


async def test_ranks_with_different_block_counts_are_a_fault() -> None:
    """The ranks agree on the count among themselves, so a difference is a bug."""
    async with run_scheduler() as scheduler:
        _, (states, error) = await refusals(scheduler, FakeRank(rank=0), FakeRank(rank=1, num_blocks=33))
    assert isinstance(error, Internal)
    assert error.message == "rank 1 of replica r0 has [33] KV blocks and rank 0 has [65]; ranks must agree"
    assert states == [RANK_LOST], "a process that has joined the group starts again"


async def test_settings_that_no_rank_can_run_are_refused_for_all() -> None:
    """No rank is more to blame than another."""
    async with run_scheduler(Settings(max_model_len=65)) as scheduler:
        for states, error in await refusals(scheduler, FakeRank(rank=0), FakeRank(rank=1)):
            assert type(error) is ConfigurationRefused
            assert "exceeds the model's context of 64" in error.message
            assert states == []


async def test_progress_names_the_ranks() -> None:
    """GetLoad shows how far each rank is."""
    workers = [FakeRank(rank=0), FakeRank(rank=1, files={})]
    async with run_scheduler() as scheduler, contextlib.AsyncExitStack() as stack:
        blocked = workers[1]
        blocked.configure_gate.clear()
        for worker in workers:
            await stack.enter_async_context(rank_process(scheduler, worker))
        await blocked.configuring.wait()
        while (await starting(scheduler))["r0"] != "rank 0: load weights":
            await asyncio.sleep(0)
        blocked.configure_gate.set()
        await scheduler.serving.get()
        assert await starting(scheduler) == {"r0": ""}


async def test_a_registration_that_returns_takes_its_own_place() -> None:
    """While ranks wait, a rank with a broken connection registers again at once."""
    async with run_scheduler() as scheduler, rank_process(scheduler, FakeRank(rank=1)) as second:
        await second.accepted()
        again = register_rank(scheduler, second.worker, second.port)
        _, error = await again.end()
        assert isinstance(error, Unavailable)
        assert "still registered; retry" in error.message
        _, error = await second.end()
        assert isinstance(error, Unavailable)
        assert error.message == "the worker has registered again"
        again = register_rank(scheduler, second.worker, second.port)
        async with rank_process(scheduler, FakeRank(rank=0)) as first:
            await asyncio.gather(first.serving(), again.serving())
        again.call.cancel()
