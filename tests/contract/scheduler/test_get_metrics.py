"""The GetMetrics call over real gRPC, while workers join and leave."""

import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from protos.triptych.v1 import inference_pb2
from scheduler_svc.settings import Settings
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

Labels = frozenset[tuple[str, str]]


async def scrape(scheduler: RunningScheduler) -> dict[tuple[str, Labels], float]:
    """Returns all samples; asserts that family names are unique, as Prometheus requires."""
    answer = await scheduler.inference.GetMetrics(inference_pb2.GetMetricsRequest())
    assert answer.content_type == CONTENT_TYPE_LATEST
    families = list(text_string_to_metric_families(answer.text.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_requests_without_an_answer_are_counted_by_their_end() -> None:
    """Refused and aborted requests of direct clients count, and those that are served do not."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker()):
        await failure(scheduler.inference.Generate(generate_request([96, 97])))
        call = scheduler.inference.Generate(generate_request(max_tokens=50))
        await anext(aiter(call))
        call.cancel()
        await tokens_of(scheduler, generate_request())
        await until(lambda: not scheduler.engine.live())
        samples = await scrape(scheduler)
    found = {tuple(sorted(labels)): value for (name, labels), value in samples.items() if "unserved" in name}
    assert found == {
        (("code", "invalid_argument"), ("outcome", "refused")): 1,
        (("code", "aborted"), ("outcome", "aborted")): 1,
    }


async def test_batches_of_a_pooling_model_are_counted_by_shape() -> None:
    """Rows, tokens and padding of pooling batches are counted by shape and outlive the replica."""
    settings = Settings(pool_batch_sizes=(2,), pool_prompt_lens=(8,))
    async with run_scheduler(settings) as scheduler:
        async with joined(scheduler, FakePoolWorker(), "r0"):
            await scheduler.inference.Pool(pool_request([5, 6, 7]))
            here = await scrape(scheduler)
        await until(lambda: not scheduler.deployment.load().replicas)
        away = await scrape(scheduler)
    shape = ("shape", "2x8")
    for samples in (here, away):
        counts = {name: value for (name, labels), value in samples.items() if shape in labels}
        assert counts == {
            "triptych:pool_batches_total": 1,
            "triptych:pool_rows_total": 1,
            "triptych:pool_padding_rows_total": 1,
            "triptych:pool_tokens_total": 3,
            "triptych:pool_padding_tokens_total": 13,
        }
    ready = ("triptych:replicas", frozenset({("state", "ready")}))
    assert (here[ready], away[ready]) == (1, 0)
