"""LoRA adapters over real gRPC: loaded, refused, listed, unloaded, mixed, evicted, and lost with a worker."""

import asyncio
from collections.abc import Awaitable

import pytest

from protos.errors import InvalidArgument, NotFound, TriptychError, Unavailable, Unsupported
from protos.triptych.v1 import inference_pb2
from scheduler_svc.api import lora_service
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_pool_worker import FakePoolWorker
from tests.support.scheduler.fake_rank import FakeRank, rank_process
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
PROMPT = [5, 6, 7]


def lora_worker(**options: object) -> FakeWorker:
    return FakeWorker(max_loras=2, max_cpu_loras=2, **options)  # type: ignore[arg-type]


@pytest.fixture
def worker() -> FakeWorker:
    """A worker with two adapter slots and room for two adapters on its host."""
    return lora_worker()


async def load(
    scheduler: RunningScheduler, name: str, source: str = "", *, in_place: bool = False
) -> inference_pb2.LoraInfo:
    """Loads an adapter; its source, and so its weights, are its name by default."""
    request = inference_pb2.LoadLoraRequest(name=name, source=source or name, load_inplace=in_place)
    return await scheduler.inference.LoadLora(request)


async def unload(scheduler: RunningScheduler, name: str) -> None:
    await scheduler.inference.UnloadLora(inference_pb2.UnloadLoraRequest(name=name))


async def names(scheduler: RunningScheduler) -> list[str]:
    answer = await scheduler.inference.ListLoras(inference_pb2.ListLorasRequest())
    return [lora.name for lora in answer.loras]


def request_of(lora_name: str, *, max_tokens: int = 8, request_id: str = "") -> inference_pb2.GenerateRequest:
    request = generate_request(PROMPT, max_tokens=max_tokens, request_id=request_id)
    request.lora_name = lora_name
    return request


def running(scheduler: RunningScheduler, lora_name: str, max_tokens: int = 8) -> Awaitable[list[int]]:
    return asyncio.ensure_future(tokens_of(scheduler, request_of(lora_name, max_tokens=max_tokens)))


def wanted(weights: str, max_tokens: int = 8) -> list[int]:
    return expected_tokens(PROMPT, max_tokens, weights=weights)


async def test_adapters_are_loaded_listed_and_mixed(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """Requests name an adapter; those of the base and of two adapters run at the same time."""
    info = await load(scheduler, "sql", "/adapters/sql")
    assert (info.name, info.source, info.rank, info.digest) == ("sql", "/adapters/sql", 8, "/adapters/sql")
    assert list(info.replica_ids) == ["w"]
    await load(scheduler, "chat")
    assert await names(scheduler) == ["sql", "chat"]
    tokens = await asyncio.gather(*(running(scheduler, name) for name in ("", "sql", "chat")))
    assert tokens == [wanted(""), wanted("/adapters/sql"), wanted("chat")]


async def test_an_unknown_name_is_not_found(scheduler: RunningScheduler) -> None:
    """The error names the base model and its adapters; an unload of an unknown name fails, too."""
    await load(scheduler, "sql")
    error = await failure(scheduler.inference.Generate(request_of("sq")))
    assert isinstance(error, NotFound)
    assert (
        error.message == "the model 'sq' is not served here; use 'simulated' or one of its adapters ('sql')"
    )
    assert error.param == "model"
    unknown = scheduler.inference.UnloadLora(inference_pb2.UnloadLoraRequest(name="sq"))
    assert isinstance(await failure(unknown), NotFound)


@pytest.mark.parametrize(
    "refusal",
    [InvalidArgument("rank 64 is more than --max-lora-rank 16"), NotFound("there is no folder /bad")],
)
async def test_a_bad_adapter_is_refused_and_disturbs_no_other(
    scheduler: RunningScheduler, worker: FakeWorker, refusal: TriptychError
) -> None:
    """The client gets the worker's reason; another replica that took the adapter frees it again."""
    await load(scheduler, "good")
    worker.sources["bad"] = refusal
    other = lora_worker()
    async with joined(scheduler, other, "other"):
        request = running(scheduler, "good")
        with_bad = inference_pb2.LoadLoraRequest(name="bad", source="bad")
        error = await failure(scheduler.inference.LoadLora(with_bad))
        assert (type(error), error.message) == (type(refusal), refusal.message)
        assert await request == wanted("good")
        assert await names(scheduler) == ["good"]
        await until(lambda: "bad" not in other.adapters.values())


@pytest.mark.parametrize("settings", [Settings(served_model_name=("simulated", "alias"))], ids=[""])
@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        ("", "x", "printable"), (" a", "x", "printable"), ("a\n", "x", "printable"), ("a" * 300, "x", "256"),
        ("simulated", "x", "base model"), ("alias", "x", "base model"), ("taken", "x", "load_inplace"),
        ("a", "", "path is empty"),
    ],
)  # fmt: skip
async def test_a_bad_name_is_refused(scheduler: RunningScheduler, name: str, source: str, text: str) -> None:
    """No worker is asked."""
    await load(scheduler, "taken")
    request = inference_pb2.LoadLoraRequest(name=name, source=source)
    error = await failure(scheduler.inference.LoadLora(request))
    assert isinstance(error, InvalidArgument)
    assert text in error.message


@pytest.mark.parametrize("worker", [FakeWorker(), FakePoolWorker()])
async def test_workers_without_adapters_say_so(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """A load is refused in one line; nothing is listed."""
    error = await failure(scheduler.inference.LoadLora(inference_pb2.LoadLoraRequest(name="a", source="a")))
    assert isinstance(error, Unsupported)
    assert ("--enable-lora" in error.message) or ("pooling models" in error.message)
    assert await names(scheduler) == []


async def test_a_later_worker_serves_the_adapters_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, a request for one is told what the workers lack."""
    monkeypatch.setattr(lora_service, "_RETRY_S", 0.02)
    settings = Settings(lora_modules=("a=/a",))
    async with run_scheduler(settings) as scheduler, joined(scheduler, FakeWorker(), "plain"):
        async with asyncio.timeout(10):
            while (
                "--enable-lora"
                not in (error := await failure(scheduler.inference.Generate(request_of("a")))).message
            ):
                assert isinstance(error, Unavailable)
        assert isinstance(error, NotFound)
        async with joined(scheduler, lora_worker(), "adapted"):
            await until(lambda: names(scheduler))
            assert await running(scheduler, "a") == wanted("/a")


async def test_without_a_worker_a_load_is_unavailable() -> None:
    """The client may retry."""
    async with run_scheduler() as scheduler:
        request = inference_pb2.LoadLoraRequest(name="a", source="a")
        assert isinstance(await failure(scheduler.inference.LoadLora(request)), Unavailable)


async def test_an_adapter_is_replaced_in_place(scheduler: RunningScheduler, worker: FakeWorker) -> None:
    """A running request keeps the old weights, the next one has the new ones; a bad one changes nothing."""
    await load(scheduler, "a", "old")
    worker.hold_at_step = worker.steps + 3
    request = running(scheduler, "a")
    await worker.holds.wait()
    worker.sources["bad"] = InvalidArgument("it is pickled")
    bad = inference_pb2.LoadLoraRequest(name="a", source="bad", load_inplace=True)
    assert "pickled" in (await failure(scheduler.inference.LoadLora(bad))).message
    await load(scheduler, "a", "new", in_place=True)
    worker.gate.set()
    assert await request == wanted("old")
    assert await running(scheduler, "a") == wanted("new")


async def test_a_hub_is_asked_for_the_same_commit_again(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """A replica that joins later reads what the first one read, and clients see which commit that is."""
    worker.revisions["org/a"] = "c0ffee"
    assert (await load(scheduler, "a", "org/a")).revision == "c0ffee"
    (listed,) = (await scheduler.inference.ListLoras(inference_pb2.ListLorasRequest())).loras
    assert listed.revision == "c0ffee"
    other = lora_worker()
    async with joined(scheduler, other, "other"):
        await until(lambda: other.loads)
    assert (worker.loads, other.loads) == (["org/a"], ["org/a@c0ffee"])


async def test_all_ranks_load_an_adapter() -> None:
    """Every rank of a replica gets the calls; if one refuses, the others free the adapter."""
    ranks = [FakeRank(rank=rank, max_loras=2, max_cpu_loras=2) for rank in range(2)]
    async with (
        run_scheduler() as scheduler,
        rank_process(scheduler, ranks[0]) as one,
        rank_process(scheduler, ranks[1]) as two,
    ):
        async with asyncio.timeout(10):
            await one.serving()
            await two.serving()
        await load(scheduler, "a")
        assert [list(rank.adapters.values()) for rank in ranks] == [["a"], ["a"]]
        assert await running(scheduler, "a") == wanted("a")
        ranks[1].sources["b"] = InvalidArgument("rank 64 is too high")
        refused = inference_pb2.LoadLoraRequest(name="b", source="b")
        assert "rank 64" in (await failure(scheduler.inference.LoadLora(refused))).message
        assert [list(rank.adapters.values()) for rank in ranks] == [["a"], ["a"]]


@pytest.mark.parametrize("settings", [Settings(lora_modules=("a=/a", "bad=/bad", "b=/b"))])
@pytest.mark.parametrize("worker", [lora_worker(sources={"/bad": InvalidArgument("it has another base")})])
async def test_adapters_of_the_settings_are_loaded_with_the_first_worker(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    """One that is refused is remembered with its reason; the others serve."""
    async with asyncio.timeout(10):
        while len(await names(scheduler)) < 2:
            await asyncio.sleep(0.01)
    assert await running(scheduler, "b") == wanted("/b")
    error = await failure(scheduler.inference.Generate(request_of("bad")))
    assert isinstance(error, NotFound)
    assert error.message == "the adapter 'bad' was refused: it has another base"


@pytest.mark.parametrize("settings", [Settings(lora_modules=("a=/a",))])
async def test_a_request_for_an_adapter_that_is_not_loaded_yet_may_retry(
    settings: Settings, worker: FakeWorker
) -> None:
    """Gateways then send it again."""
    worker.may_load.clear()
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        assert isinstance(await failure(scheduler.inference.Generate(request_of("a"))), Unavailable)
        worker.may_load.set()
        await until(lambda: names(scheduler))
        assert await running(scheduler, "a") == wanted("/a")


@pytest.mark.parametrize("settings", [Settings(lora_modules=("slow=/slow", "b=/b", "c=/c", "d=/d"))])
async def test_adapters_of_the_settings_do_not_wait_for_a_slow_one(
    settings: Settings, worker: FakeWorker
) -> None:
    """More of them than the host holds: while one is read, the others take turns in the other place."""
    worker.slow_sources["/slow"] = asyncio.Event()
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker), asyncio.timeout(4):
        while await names(scheduler) != ["b", "c", "d"]:
            await asyncio.sleep(0.01)
        assert await running(scheduler, "d") == wanted("/d")
        worker.slow_sources["/slow"].set()
        while "slow" not in await names(scheduler):
            await asyncio.sleep(0.01)


async def test_the_name_of_an_adapter_of_the_settings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client takes it before the adapter is loaded, also while no worker runs adapters."""
    monkeypatch.setattr(lora_service, "_RETRY_S", 0.02)
    worker = lora_worker(sources={"/a": Unavailable("the disk is away")})
    other = inference_pb2.LoadLoraRequest(name="a", source="other", load_inplace=True)
    async with (
        run_scheduler(Settings(lora_modules=("a=/a",))) as scheduler,
        joined(scheduler, worker),
        asyncio.timeout(10),
    ):
        while len(worker.loads) < 3:
            error = await failure(scheduler.inference.LoadLora(other))
            assert isinstance(error, Unavailable)
            assert "--lora-modules" in error.message
        del worker.sources["/a"]
        await until(lambda: names(scheduler))
        assert await running(scheduler, "a") == wanted("/a")
        assert (await load(scheduler, "a", "other", in_place=True)).source == "other"


async def test_the_name_of_a_refused_adapter_is_free() -> None:
    """An adapter of the settings that is bad keeps its name for nothing."""
    worker = lora_worker(sources={"/a": InvalidArgument("it has another base")})
    settings = Settings(lora_modules=("a=/a",))
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker), asyncio.timeout(10):
        while "another base" not in (await failure(scheduler.inference.Generate(request_of("a")))).message:
            await asyncio.sleep(0.01)
        await load(scheduler, "a", "good")
        assert await running(scheduler, "a") == wanted("good")
