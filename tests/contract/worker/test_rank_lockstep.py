"""A scheduler that tries to get ranks out of step, over real gRPC: no rank runs a step more than another."""

import asyncio
import contextlib
import random
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection
from typing import Any, cast

import grpc.aio
import pytest

from protos.errors import ConfigurationRefused
from protos.steps import StepPlan
from protos.triptych.v1 import worker_pb2
from tests.support.ranks.fake_ranks import ApartError
from tests.support.ranks.rank_server import RankServers, rank_servers
from tests.support.waiting import until
from worker_svc.api import servicer
from worker_svc.lora.store import HostAdapter
from worker_svc.pending_step import PendingStep

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]

LAYOUTS = [(2, 1), (1, 2), (2, 2)]


def sizes(number: int = 0) -> worker_pb2.ConfigureRequest:
    """Returns one of several configurations."""
    return worker_pb2.ConfigureRequest(
        max_model_len=10_000 + number, max_num_seqs=4, chunk=8, block_size=8, decode_buckets=[1, 2, 4], num_blocks=[5],
        group_epoch="e",
    )  # fmt: skip


class Stream:
    """An Execute stream of rank 0 that the client may end at any moment."""

    def __init__(self, servers: RankServers) -> None:
        """Opens nothing yet."""
        self._stub = servers.stubs[0]
        self._call: Any = None
        self._step = 0
        # The next token of each slot, and the slots of plans without a last result and of their releases.
        self._tokens: defaultdict[int, int] = defaultdict(lambda: 1)
        self._plans: dict[int, tuple[list[int], list[int]]] = {}

    async def open(self) -> None:
        """Opens the stream once the one before has ended."""
        while True:
            self._call = self._stub.Execute()
            await self._write(worker_pb2.StepPlan())
            try:
                result = await self._call.read()
            except grpc.aio.AioRpcError as error:
                # gRPC gives INTERNAL if the refusal meets the write on its way.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                    raise
                continue
            assert result.step == 0
            return

    async def decode(self, generator: random.Random) -> None:
        """Sends a plan with some slots and steps."""
        slots = generator.sample(range(4), generator.randint(1, 4))
        work = worker_pb2.Decode(
            slots=slots, bucket=4, steps=generator.randint(1, 30), steps_per_result=generator.randint(1, 3)
        )
        await self._send(slots, decode=work)

    async def interrupt(self, release: int) -> None:
        """Sends a plan that ends earlier work and frees a slot."""
        await self._send([], release=[release], interrupts=True)

    async def admit(self, adapter_id: int) -> None:
        """Sends a plan without work that admits a request of an adapter."""
        await self._send([], admit=[worker_pb2.SlotRequest(slot=0, adapter_id=adapter_id)])

    async def _send(self, slots: list[int], **fields: Any) -> None:
        self._step += 1
        plan = worker_pb2.StepPlan(step=self._step, **fields)
        self._plans[self._step] = slots, list(plan.release)
        await self._write(plan)

    async def read(self) -> None:
        """Reads a result, which answers the oldest plan."""
        result = await self._call.read()
        assert isinstance(result, worker_pb2.StepResult)
        assert not result.HasField("error"), result.error
        step, (slots, released) = next(iter(self._plans.items()))
        assert (result.step, len(result.token_ids)) == (step, result.num_steps * len(slots))
        for slot, token in zip(slots * result.num_steps, result.token_ids, strict=True):
            assert token == self._tokens[slot]
            self._tokens[slot] += 1
        for slot in released:
            self._tokens.pop(slot, None)
        if result.last:
            del self._plans[step]

    @property
    def outstanding(self) -> int:
        return len(self._plans)

    async def end(self, *, politely: bool) -> None:
        """Ends the stream: after its last plan, or at once."""
        if politely:
            await self._call.done_writing()
        else:
            self._call.cancel()

    async def _write(self, plan: worker_pb2.StepPlan) -> None:
        # The reason of a stream that was refused comes with the next read.
        try:
            await self._call.write(plan)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def episode(servers: RankServers, generator: random.Random) -> None:
    """Runs a stream that interrupts plans at random moments and ends at one."""
    stream = Stream(servers)
    await stream.open()
    for _ in range(generator.randint(0, 8)):
        match generator.choice(("decode", "decode", "interrupt", "read", "finish")):
            case "decode":
                await stream.decode(generator)
            case "interrupt":
                await stream.interrupt(generator.randrange(4))
            case "read":
                for _ in range(generator.randint(1, 10)):
                    if stream.outstanding:
                        await stream.read()
            case _:
                while stream.outstanding:
                    await stream.read()
    await stream.end(politely=generator.random() < 0.3)


async def give_up_configuring(
    servers: RankServers, request: worker_pb2.ConfigureRequest, generator: random.Random
) -> None:
    """Configures some ranks and hangs up at some moment, as a scheduler does that is killed."""
    calls = [
        servers.configure_rank(rank, request)
        for rank in range(len(servers.stubs))
        if generator.random() < 0.8
    ]
    if calls:
        await asyncio.wait(calls, timeout=generator.random() * 0.01, return_when=asyncio.FIRST_COMPLETED)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("follows", [False, True], ids=["first", "another"])
async def test_a_scheduler_that_is_lost_while_ranks_are_configured(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next scheduler's configuration stays, although a rank still makes the last one's."""
    async with rank_servers(2, 1, monkeypatch) as servers:
        if follows:
            await servers.configure(sizes(0))
        gate = servers.ranks.gates[1] = threading.Event()
        slow = servers.configure_rank(1, sizes(1))
        await servers.configure_rank(0, sizes(1))
        slow.cancel()
        calls = [servers.configure_rank(1, sizes(2))]
        # The call has arrived once a later one is answered.
        with pytest.raises(grpc.aio.AioRpcError):
            await servers.stubs[1].Execute().read()
        calls.append(servers.configure_rank(0, sizes(2)))
        gate.set()
        await asyncio.gather(*calls)
        stream = Stream(servers)
        await stream.open()
        await stream.decode(random.Random(1))
        await stream.read()
        await asyncio.to_thread(servers.ranks.compare)
        assert servers.reasons == []


async def test_a_rank_that_nothing_asks_to_follow_rank_0_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it: the scheduler may take it for ready, because it had the sizes until then."""
    monkeypatch.setattr(servicer, "_ASKED_WITHIN_S", 0.05)
    async with rank_servers(2, 1, monkeypatch) as servers:
        await servers.configure(sizes(0))
        alone = servers.configure_rank(0, sizes(1))
        await until(lambda: servers.reasons)
        assert servers.reasons == ["rank 0 has begun a configuration that this rank was not asked for"]
        with contextlib.suppress(ApartError):
            servers.ranks.fail("the rank ends")
        with pytest.raises(grpc.aio.AioRpcError):
            await alone


@pytest.mark.parametrize("refuses", [0, 1])
async def test_a_rank_whose_configuration_failed_takes_no_other(
    refuses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may wait for it in a collective, so the next scheduler's call ends the process."""
    async with rank_servers(2, 1, monkeypatch) as servers:
        servers.ranks.refusals[refuses] = ConfigurationRefused("the graph does not compile")
        calls = [servers.configure_rank(rank, sizes(1)) for rank in (0, 1)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(error, grpc.aio.AioRpcError) for error in errors] == [refuses == 0, refuses == 1]
        assert servers.reasons == []
        with pytest.raises(grpc.aio.AioRpcError, match="this rank ends after a failed configuration"):
            await servers.configure_rank(refuses, sizes(2))
        assert servers.reasons == [
            "an earlier configuration failed on this rank, and other ranks may still wait in it"
        ]


class Hosted:
    """What `AdapterStore` has on the host."""

    def __init__(self) -> None:
        self.ids = {1, 2}
        self.found: list[bool] = []
        """For each admission of a request: whether its adapter was there."""

    def displaced(self, needed: Collection[int]) -> list[int]:
        return [min(self.ids - set(needed))]

    def reserve(self, adapter_id: int) -> None:
        """Takes every adapter."""

    def load(self, adapter_id: int, name: str, source: str, revision: str) -> HostAdapter:
        self.ids.add(adapter_id)
        return HostAdapter(name, source, 8, "d", {}, 0)

    def unload(self, adapter_id: int) -> None:
        self.ids.discard(adapter_id)

    def forget(self) -> None:
        """Keeps all: the test loads nothing."""


@contextlib.asynccontextmanager
async def hosting(
    monkeypatch: pytest.MonkeyPatch, tensor: int = 2, pipeline: int = 1
) -> AsyncIterator[tuple[RankServers, list[Hosted]]]:
    """Runs two configured ranks with two adapters each."""
    async with rank_servers(tensor, pipeline, monkeypatch) as servers:
        hosts = [Hosted(), Hosted()]
        for worker, host in zip(servers.workers, hosts, strict=True):
            worker.adapters = cast("Any", host)
        await servers.configure(sizes())
        yield servers, hosts
        assert servers.reasons == []


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("how", ["unloaded", "displaced"])
async def test_an_adapter_leaves_after_the_plans_before(
    how: str, tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has forgotten it when another rank still has to run the plan that admits a request of it."""
    gate = threading.Event()
    async with hosting(monkeypatch, tensor, pipeline) as (servers, hosts):
        engine: Any = servers.workers[1]._engine
        launch = engine.launch

        def launch_late(plan: StepPlan) -> PendingStep:
            assert gate.wait(20)
            hosts[1].found += [one.adapter_id in hosts[1].ids for one in plan.admit]
            return cast("PendingStep", launch(plan))

        engine.launch = launch_late
        stream = Stream(servers)
        await stream.open()
        await stream.admit(adapter_id=1)
        await stream.read()
        loads = []
        if how == "unloaded":
            await servers.stubs[0].UnloadAdapter(worker_pb2.UnloadAdapterRequest(adapter_id=1))
        else:
            load = worker_pb2.LoadAdapterRequest(adapter_id=3, name="c", source="/c", needed_ids=[2])
            loads = [asyncio.ensure_future(stub.LoadAdapter(load)) for stub in servers.stubs]
            assert list((await loads[0]).displaced_ids) == [1]
        assert 1 not in hosts[0].ids
        assert 1 in hosts[1].ids
        gate.set()
        for other in loads[1:]:
            assert not (await other).displaced_ids
        await until(lambda: hosts[1].ids == hosts[0].ids)
        assert hosts[1].found == [True]


async def test_rank_0_alone_unloads_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank would forget the adapter before it has run earlier plans."""
    async with hosting(monkeypatch) as (servers, hosts):
        request = worker_pb2.UnloadAdapterRequest(adapter_id=1)
        with pytest.raises(grpc.aio.AioRpcError, match="rank 0 unloads adapters"):
            await servers.stubs[1].UnloadAdapter(request)
        assert hosts[1].ids == {1, 2}


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
async def test_no_rank_runs_a_step_more(tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans interrupt others, streams are cancelled in the middle, and ranks get other configurations."""
    generator = random.Random(11)
    async with rank_servers(tensor, pipeline, monkeypatch) as servers:
        number = 0
        await servers.configure(sizes())
        for _ in range(200):
            await episode(servers, generator)
            if generator.random() < 0.4:
                number += generator.randrange(2)
                if generator.random() < 0.3:
                    # Nothing goes back to the sizes before: a rank might answer that it still has them.
                    number += 1
                    await give_up_configuring(servers, sizes(number), generator)
                    number += generator.randrange(2)
                await servers.configure(sizes(number))
        # This stream's first plan runs behind the last one's reset.
        await Stream(servers).open()
        await asyncio.to_thread(servers.ranks.compare)
        assert servers.reasons == []
        done = servers.ranks.logs[0]
        assert {"reset", "release"} <= {what for what in done if isinstance(what, str)}
        plans = Counter(what[0] for what in done if isinstance(what, tuple))
        assert max(plans.values()) > 1, "several steps of a plan"
