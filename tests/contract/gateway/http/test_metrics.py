"""``/metrics``: the gateway's metrics, the scheduler's, and their documentation."""

import ast
import importlib.util
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest
import pytest_asyncio
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from protos.triptych.v1 import inference_pb2
from tests.support.gateway.fake_scheduler import SCHEDULER_METRICS
from tests.support.gateway.serving import Stack, running_gateway, running_stack
from tests.support.paths import ROOT
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import generate_request, joined, run_scheduler, tokens_of

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
UP = "triptych:gateway_scheduler_up"


_KINDS: Final = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}


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
    response = await stack.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert SCHEDULER_METRICS.decode() in response.text
    families = families_of(response.text)
    assert value(families, UP) == 1
    assert value(families, "vllm:num_requests_running") == 3


async def test_a_scheduler_without_metrics_leaves_the_gateways(stack: Stack) -> None:
    stack.scheduler.metrics = None
    response = await stack.http.get("/metrics")
    assert response.status_code == 200
    assert value(families_of(response.text), UP) == 0
    assert "vllm:time_to_first_token_seconds" in response.text


async def test_without_a_scheduler_the_scrape_is_fast() -> None:
    async with (
        running_gateway(9, wait=False) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=5) as http,
    ):
        families = families_of((await http.get("/metrics")).text)
    assert value(families, UP) == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exported(running: Stack) -> dict[str, Metric]:
    """All metrics of a gateway and of a real scheduler, by name."""
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker(max_loras=2, max_cpu_loras=2)):
        await tokens_of(scheduler, generate_request())
        answer = await scheduler.inference.GetMetrics(inference_pb2.GetMetricsRequest())
    running.scheduler.metrics = answer.text
    body = {"model": "smollm2", "prompt": [3, 4, 5], "max_tokens": 2}
    assert (await running.http.post("/v1/completions", json=body)).status_code == 200
    await running.http.get("/nowhere")
    families = families_of((await running.http.get("/metrics")).text)
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in families
        if not family.name.endswith("_created") and not family.name.startswith(("python_", "process_"))
    }


async def test_the_documentation_lists_all_metrics(exported: dict[str, Metric]) -> None:
    """docs/metrics.md has a row for each metric of a real scheduler and gateway, with type and labels."""
    documented = {
        name: (kind, {label for label in labels.split(", ") if label})
        for name, kind, labels in re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([\w, ]*?) ?\|", DOCUMENT, re.MULTILINE)
    }  # fmt: skip
    assert {name: family.type for name, family in exported.items()} == {
        name: kind for name, (kind, _) in documented.items()
    }
    for name, family in exported.items():
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == documented[name][1], name


@dataclass(frozen=True)
class VllmMetric:
    kind: str
    labels: frozenset[str]
    bounds: Callable[[int], list[float]] | None
    """Returns the bounds of a histogram's buckets, given the longest sequence."""


def vllm_metrics() -> dict[str, VllmMetric]:
    """Returns all metrics of vLLM's `v1/metrics/loggers.py`, read from its source to save the import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    tree = ast.parse((root / "v1" / "metrics" / "loggers.py").read_text())
    families = {
        node.targets[0].id: node.value.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "histogram_buckets"
        and isinstance(node.value.args[0], ast.Constant)
    }
    return dict(_metrics(tree, families, root))


def _metrics(
    tree: ast.Module, families: Mapping[str, object], root: Path
) -> Iterator[tuple[str, VllmMetric]]:
    cache_labels = frozenset({*_fields(root / "config" / "cache.py", "CacheConfig"), "engine"})
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KINDS
        ):
            continue
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        kind, name = _KINDS[node.func.attr], arguments["name"]
        if isinstance(name, ast.Constant):
            labels = frozenset(_labels(arguments["labelnames"]))
            exported = f"{name.value!s}_total" if kind == "counter" else str(name.value)
        else:  # the only metric whose name is a variable
            labels, exported = cache_labels, "vllm:cache_config_info"
        bounds = (
            _bounds(str(families[ast.unparse(arguments["buckets"])]), root)
            if "buckets" in arguments
            else None
        )
        yield exported, VllmMetric(kind, labels, bounds)


def _labels(expression: ast.expr) -> list[str]:
    match expression:
        case ast.Name(id="labelnames"):
            return ["model_name", "engine"]
        case ast.BinOp(left=left, right=right):
            return _labels(left) + _labels(right)
        case ast.List(elts=parts):
            return [label for part in parts for label in _labels(part)]
        case ast.Constant(value=str(label)):
            return [label]
        case ast.Attribute(attr=name):
            return [name.removeprefix("labelname_")]
    raise AssertionError(ast.unparse(expression))


def _bounds(family: str, root: Path) -> Callable[[int], list[float]]:
    module = sys.modules.get("vllm_buckets")
    if module is None:
        spec = importlib.util.spec_from_file_location("vllm_buckets", root / "v1" / "metrics" / "buckets.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["vllm_buckets"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    buckets = module.histogram_buckets
    return lambda longest: list(buckets(family, max_model_len=longest))


def _fields(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from (
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            )


async def test_names_kinds_labels_and_bounds_are_vllms(exported: dict[str, Metric]) -> None:
    """What has vLLM's name is what vLLM has, and docs/metrics.md says why its other metrics are missing."""
    theirs = vllm_metrics()
    left_out = set(re.findall(r"^\| `(vllm:\w+)` \| [^|]+ \|$", DOCUMENT, re.MULTILINE))
    ours = {name: family for name, family in exported.items() if name.startswith("vllm:")}
    assert ours.keys() | left_out == theirs.keys()
    assert not ours.keys() & left_out
    for name, family in ours.items():
        metric = theirs[name]
        assert family.type == metric.kind, name
        assert family.samples, name
        for sample in family.samples:
            labels = sample.labels.keys() - {"le"}
            # vLLM shows every setting of its cache as a label; we show those that we have.
            matches = labels < metric.labels if name == "vllm:cache_config_info" else labels == metric.labels
            assert matches, (name, labels, metric.labels)
        if metric.bounds:
            bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
            bounds.remove(math.inf)
            assert bounds == {*metric.bounds(int(max(bounds)))}, name
