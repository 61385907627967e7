"""A stack of real processes under a collector and a scraper: what operators see of one request."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stack import Stack, running_stack
from tests.support.tracing.collector import Collector, ReceivedSpan, running_collector

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BODY = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Which city?"}],
    "max_tokens": 24,
    "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def observed(
    smollm2: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    flags = ("--dtype", "float32", "--max-model-len", "512", "--otlp-traces-endpoint", collector.endpoint)
    with running_stack(
        smollm2, "smollm2", tmp_path_factory.mktemp("stack"), *flags, OTEL_BSP_SCHEDULE_DELAY="50"
    ) as stack:
        yield stack


def test_the_spans_of_three_services_are_one_trace(observed: Stack, collector: Collector) -> None:
    """The worker's spans lie below the scheduler's, and the wait for the grammar is there."""
    httpx.post(f"{observed.base_url}/v1/chat/completions", json=BODY, timeout=60).raise_for_status()

    def complete(spans: list[ReceivedSpan]) -> bool:
        names = {span.name for span in spans}
        return names >= {"POST /v1/chat/completions", "llm_request", "decode_steps"}

    # A slot is released by the plan behind, which an idle worker gets at once.
    spans = collector.wait_for(complete)
    assert len({span.trace_id for span in spans}) == 1
    (request,) = [span for span in spans if span.name == "llm_request"]
    below = {(span.service, span.name) for span in spans if span.parent_id == request.span_id}
    assert below >= {
        ("triptych-scheduler", "grammar"),
        ("triptych-scheduler", "prefill_chunk"),
        ("triptych-scheduler", "first_token"),
        ("triptych-scheduler", "decode"),
        ("triptych-worker", "prefill_step"),
        ("triptych-worker", "decode_steps"),
    }


def test_the_worker_reports_what_it_counts(observed: Stack) -> None:
    """Times of steps and grammars, memory and phases come from a real worker."""
    text = httpx.get(f"{observed.base_url}/metrics", timeout=20).text
    samples = {
        (sample.name, sample.labels.get("kind") or sample.labels.get("phase", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("triptych:") and sample.labels.get("le", "+Inf") == "+Inf" and sample.value
    }
    for sample in (
        ("triptych:step_seconds_sum", "prefill"),
        ("triptych:step_seconds_sum", "decode"),
        ("triptych:worker_memory_bytes", "device_free"),
        ("triptych:worker_memory_bytes", "process"),
        ("triptych:configuration_seconds", "load"),
        ("triptych:configuration_seconds", "compile"),
        ("triptych:grammar_compile_seconds_count", ""),
        ("triptych:plans_total", ""),
    ):
        assert sample in samples
