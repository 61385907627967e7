"""``/metrics``: the gateway's metrics, the scheduler's, and their documentation."""

import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway.fake_scheduler import SCHEDULER_METRICS
from tests.support.gateway.serving import Stack, running_gateway, running_stack
from tests.support.paths import ROOT
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
UP = "triptych:gateway_scheduler_up"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack("Paris.", call_timeout_s=0.3) as stack:
        yield stack


def families_of(text: str) -> list[Metric]:
    """Returns all metric families; checks that names are unique, as Prometheus requires."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    lines = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(set(lines)) == len(lines)
    return families


def value(families: list[Metric], name: str) -> float:
    return next(sample.value for family in families for sample in family.samples if sample.name == name)


async def test_the_schedulers_metrics_follow(stack: Stack) -> None:
    """One answer has the metrics of both services."""
    response = await stack.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert SCHEDULER_METRICS.decode() in response.text
    families = families_of(response.text)
    assert value(families, UP) == 1
    assert value(families, "vllm:num_requests_running") == 3


async def test_a_scheduler_without_metrics_leaves_the_gateways(stack: Stack) -> None:
    """If the scheduler refuses, the gateway's metrics say that it is not up."""
    stack.scheduler.metrics = None
    response = await stack.http.get("/metrics")
    assert response.status_code == 200
    assert value(families_of(response.text), UP) == 0
    assert "vllm:time_to_first_token_seconds" in response.text


async def test_without_a_scheduler_the_scrape_is_fast() -> None:
    """A scrape does not wait for a scheduler that is away."""
    async with (
        running_gateway(9, wait=False) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=5) as http,
    ):
        families = families_of((await http.get("/metrics")).text)
    assert value(families, UP) == 0


async def test_the_documentation_lists_all_metrics() -> None:
    """docs/metrics.md has a row for each metric of a real scheduler and gateway, with type and labels."""
    documented = {
        name: (kind, {label for label in labels.split(", ") if label})
        for name, kind, labels in re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([\w, ]*?) ?\|", DOCUMENT, re.MULTILINE)
    }  # fmt: skip
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, FakeWorker(max_loras=2, max_cpu_loras=2)),
        running_gateway(scheduler.server.port, wait=False) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=5) as http,
    ):
        await tokens_of(scheduler, generate_request())
        await http.get("/version")
        families = families_of((await http.get("/metrics")).text)
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in families
        if not family.name.endswith("_created") and not family.name.startswith(("python_", "process_"))
    }
    assert {name: family.type for name, family in exported.items()} == {
        name: kind for name, (kind, _) in documented.items()
    }
    for name, family in exported.items():
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == documented[name][1], name
