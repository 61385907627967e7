"""``/metrics`` of a gateway: its own, its scheduler's, and what the documents say about both."""

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
from tests.support.scheduler.running_scheduler import (
    ScriptedWorker,
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
    """All families, which have one name each, as Prometheus insists."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    lines = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(set(lines)) == len(lines)
    return families


def value(families: list[Metric], name: str) -> float:
    return next(sample.value for family in families for sample in family.samples if sample.name == name)


async def test_the_scheduler_s_metrics_follow(stack: Stack) -> None:
    """One text of both."""
    response = await stack.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert SCHEDULER_METRICS.decode() in response.text
    families = families_of(response.text)
    assert value(families, UP) == 1
    assert value(families, "vllm:num_requests_running") == 3


async def test_without_the_scheduler_s_there_are_its_own(stack: Stack) -> None:
    """An error there is a 0 here."""
    stack.scheduler.metrics = None
    response = await stack.http.get("/metrics")
    assert response.status_code == 200
    assert value(families_of(response.text), UP) == 0
    assert "vllm:time_to_first_token_seconds" in response.text


async def test_without_a_scheduler_there_is_an_answer_soon() -> None:
    """A scrape does not wait for who is not there."""
    async with (
        running_gateway(9, wait=False) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=5) as http,
    ):
        families = families_of((await http.get("/metrics")).text)
    assert value(families, UP) == 0


async def test_the_document_lists_what_is_exported() -> None:
    """Names, types and labels of a real scheduler behind a real gateway, each in one row of docs/metrics.md."""
    documented = {
        name: (kind, {label for label in labels.split(", ") if label})
        for name, kind, labels in re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([\w, ]*?) ?\|", DOCUMENT, re.MULTILINE)
    }  # fmt: skip
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, ScriptedWorker()),
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
